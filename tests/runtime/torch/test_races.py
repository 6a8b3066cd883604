"""Races between a GPU's streams, without a GPU: every operation of the workers is looked at."""

import random
from contextlib import contextmanager
from threading import RLock

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from pipelab import make
from pipelab.runtime.torch import cuda
from tests.runtime.torch.test_cuda import ELSEWHERE, Stream, gpu  # noqa: F401
from tests.support import FUZZ, batches, run_of

ATEN = torch.ops.aten
EMPTY = {ATEN.empty.memory_format, ATEN.empty_like.default, ATEN.empty_strided.default}
HOST_WAITS = {ATEN._local_scalar_dense.default, ATEN.equal.default}


class Block:
    """Memory, which belongs to the stream that it was made on.

    written   the last time, by which stream and when by its clock
    uses      the last time, by stream
    recorded  streams that it is kept for when it is freed
    """

    def __init__(self, storage, stream):
        self.alive, self.stream = StorageWeakRef(storage), stream
        self.written, self.uses, self.recorded = None, {}, set()


def waited(stream, other, at):
    """Whether a stream, or the host, has waited for another's work."""
    return stream is other or max(stream.clock[other], Stream.done[other]) >= at


class Races(TorchDispatchMode):
    """Notes every use of memory before it is written, or after it may be written again."""

    def __init__(self, known):
        super().__init__()
        self.cuda, self.blocks, self.found, self.seen, self.lock = known, {}, set(), 0, RLock()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        schema = function._schema
        if not any(of.alias_info and not of.alias_info.is_write for of in schema.returns):
            given = zip(schema.arguments, args, strict=False)  # those that are written come first
            written = [x for of, x in given if of.alias_info and of.alias_info.is_write]
            with self.lock:
                self.look(function, *map(tensors_in, ((args, kwargs), written, output)))
        return output  # of a view, which uses nothing

    def look(self, function, used, written, made):
        self.seen += 1
        self.free()
        stream = into = self.cuda.streams[-1]
        if function is ATEN._to_copy.default and into.device == ELSEWHERE:
            # Between GPUs torch copies on the sender's stream; both streams wait for each other.
            stream = self.cuda.streams[-2]
            stream.clock |= into.clock
        self.use(function, stream, [*map(self.known, used)], [*map(self.known, written)])
        into.clock |= stream.clock
        blocks = [self.known(tensor) or self.new(tensor, into) for tensor in made]
        self.use(function, into, blocks, [] if function in EMPTY else blocks)
        if function in HOST_WAITS:
            Stream.done |= stream.clock

    def use(self, function, stream, blocks, written):
        stream.clock[stream] += 1
        for block in filter(None, blocks):
            if block.written and not waited(stream, *block.written):
                self.found.add(f"{function} before its input is written")
            if block in written and not all(waited(stream, *use) for use in block.uses.items()):
                self.found.add(f"{function} writes where another stream still reads")
        for block in filter(None, blocks):
            block.uses[stream] = stream.clock[stream]
            if block in written:
                block.written = stream, stream.clock[stream]

    def known(self, tensor):
        """Its block; None if it is the caller's, or one whose memory another has now."""
        block = self.blocks.get(tensor.untyped_storage()._cdata)
        return block if block and not block.alive.expired() else None

    def new(self, tensor, stream):
        storage = tensor.untyped_storage()
        return self.blocks.setdefault(storage._cdata, Block(storage, stream))

    def free(self):
        for key in [key for key, block in self.blocks.items() if block.alive.expired()]:
            block = self.blocks.pop(key)
            for stream, at in block.uses.items():
                if stream not in block.recorded and not waited(block.stream, stream, at):
                    self.found.add("memory is free while another stream still uses it")

    def record(self, tensor, stream):
        with self.lock:
            if block := self.known(tensor):
                block.recorded.add(stream)


def tensors_in(tree):
    leaves = pytree.tree_leaves(tree)
    return [x for x in leaves if isinstance(x, torch.Tensor) and x.layout is torch.strided]


@pytest.fixture
def races(gpu, monkeypatch):  # noqa: F811
    found = Races(gpu)

    def looking(real):
        @contextmanager
        def inside(self):
            with real(self), found:
                yield

        return inside

    for name in ("active", "placing"):
        monkeypatch.setattr(cuda.CudaDevice, name, looking(getattr(cuda.CudaDevice, name)))
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True), raising=False)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *given: found.record(*given))
    return found


def drawn(seed):
    """A table and options, at random."""
    draw = random.Random(seed)
    name, rows = draw.choice(("gpipe", "pipedream", "zb_h1", "interleaved")), draw.choice((1, 2, 3))
    virtual = 2 if name == "interleaved" else 1
    table = make(name, rows, 2 * rows, batches=2, virtual=virtual)
    if name != "zb_h1":
        table = table.overlap() if draw.random() < 0.5 else table
        table = table.offload() if draw.random() < 0.5 else table
    options = {"clip": 0.1} if draw.random() < 0.5 else {}
    if draw.random() < 0.3:
        options["recompute"] = "always"
    return table, options


PROGRAMS = {
    "versions": (make("pipedream", 3, 6, batches=2), {}),
    "replicas": (make("zb_h1", 2, 4, batches=2), {"replicas": 2, "clip": 0.1}),
    "copies of the model": (make("dualpipe", 2, 4, batches=2), {"recompute": "always"}),
    "pairs": (make("dualpipe_v", 2, 6, batches=2).overlap(), {"clip": 0.1}),
    "offloaded": (make("gpipe", 2, 6, batches=2).offload(), {}),
    "offloaded pairs": (make("interleaved", 2, 4, virtual=2).overlap().offload(), {}),
    **{f"drawn {seed}": drawn(seed) for seed in range(FUZZ)},
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_memory_is_used_before_it_is_written_or_after_it_is_free(name, races):
    table, options = PROGRAMS[name]
    torch.manual_seed(0)
    model = [
        nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6)).double()
        for _ in range(table.model_stages)
    ]
    if not table.asynchronous:
        model[-1][0].weight = model[0][0].weight
    run_of(table, model, batches(table.batches, 24), check=False, **options)
    assert races.seen > 100 and races.found == set()
