"""What does not fit is refused in a clear line; what fails leaves nothing behind."""

import gc
import weakref
from collections import OrderedDict, UserDict
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

from pipelab import Recompute, RunError, Trainer, evaluate, make, run
from tests.conftest import Wrapping
from tests.support import SGD, Failing, Layer, batches, explode, passing, run_of, stages

CALLS = pytest.mark.parametrize(
    "call", [partial(run, optimizer=SGD), evaluate], ids=["run", "evaluate"]
)

# ---- data


@CALLS
def test_a_data_set_is_read_up_to_its_length(call):
    # Was: the check and the evaluation's check iterated, which ends at an IndexError
    # alone: they hung.
    data = Wrapping(batches(2))
    assert call(make("gpipe", 2, 2, batches=2), stages(2), data, F.mse_loss).check.passed
    assert set(data.asked) == {0, 1}


X, Y = batches(1)[0]


@pytest.mark.parametrize(
    "other", [(X, Y, Y), (X,), X, {"x": X, "y": Y}], ids=["three", "one", "tensor", "dictionary"]
)
@CALLS
def test_a_batch_that_is_no_pair_is_refused(call, other):
    # Was: three: "Piece.__new__() takes from 4 to 5 positional arguments" after training; one:
    # IndexError; a tensor: its first two samples were taken for input and target; a dictionary:
    # "its tensors have no samples".
    with pytest.raises(ValueError, match=r"batch 1 .*\(input, target\)"):
        call(make("gpipe", 2, 2, batches=2), stages(2), [(X, Y), other], F.mse_loss)


def test_a_mapping_without_labels_is_told_how_to_be_a_pair():
    # Was: "is no pair", without its keys.
    said = (
        r"batch 0 is a UserDict of ids, mask, y, not a pair: give \(input, target\), such as "
        r"\(\(b\['ids'\], b\['mask'\]\), b\['y'\]\) for b in loader; or name the target 'labels'"
    )
    with pytest.raises(ValueError, match=said):
        run_of(make("gpipe", 2, 2), data=[UserDict(ids=X, mask=X, y=Y)])


class Masked(nn.Linear):
    def forward(self, batch):
        return super().forward(batch["input_ids"]) * batch["attention_mask"]


@pytest.mark.parametrize("kind", [dict, UserDict], ids=["dict", "mapping"])
@CALLS
def test_a_mapping_with_labels_is_a_pair(call, kind):
    # Was: "is no pair"; as the input of a pair: "holds a UserDict, whose arrays cannot be found".
    # A UserDict as transformers' BatchEncoding is one.
    inputs = {"input_ids": X, "attention_mask": (X > 0).double()}
    arguments = make("gpipe", 2, 4), [Masked(6, 6, dtype=torch.float64), *stages(1)]
    expected = call(*arguments, [(inputs, Y)], F.mse_loss)
    for batch in (kind(labels=Y, **inputs), (kind(inputs), Y)):
        result = call(*arguments, [batch], F.mse_loss)
        assert result.check.passed
        assert result.losses == expected.losses
    assert "labels" not in inputs


@pytest.mark.parametrize("layout", ["to_sparse", "to_sparse_csr"])
def test_a_sparse_tensor_is_refused_where_it_has_to_be_cut_or_sent(layout):
    # Was: "Could not run 'aten::as_strided'", or "Cannot access storage of SparseTensorImpl".
    with pytest.raises(ValueError, match=r"batch 0 cannot be cut .*: give dense arrays"):
        run_of(make("gpipe", 2, 2), data=[(getattr(X, layout)(), Y)])
    modules = [nn.Sequential(*stages(1), Sparse(layout)), *stages(1)]
    with pytest.raises(RunError, match=r"0F0: ValueError: the stage's output is a torch.sparse_"):
        run_of(make("gpipe", 2, 2), modules)


class Sparse(nn.Module):
    def __init__(self, layout):
        super().__init__()
        self.layout = layout

    def forward(self, x):
        return getattr(x, self.layout)()


# ---- what stages hand on


@dataclass
class Pair:
    a: Tensor
    b: Tensor


@dataclass
class KnownPair:
    a: Tensor
    b: Tensor


class Named(OrderedDict):
    pass


pytree.register_pytree_node(KnownPair, lambda p: ([p.a, p.b], None), lambda t, _: KnownPair(*t))


class Parting(Layer):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def forward(self, x):
        y = super().forward(x)
        return self.kind(a=y, b=y.tanh())


class Joining(Layer):
    def forward(self, parts):
        a, b = (parts["a"], parts["b"]) if isinstance(parts, dict) else (parts.a, parts.b)
        return super().forward(a + b)


@pytest.mark.parametrize("kind", [Pair, Named])
@CALLS
def test_a_structure_that_torch_cannot_open_is_refused(call, kind):
    # Was: it went on as it was, with its tensors and their graph: the next stage's backward went on
    # through this stage.
    modules = [Parting(kind), Joining()]
    with pytest.raises((ValueError, RunError), match=rf"{kind.__name__}.*pytree"):
        call(make("gpipe", 2, 4), modules, batches(1), F.mse_loss)


def test_a_structure_that_torch_can_open_is_handed_on():
    # Passed all along: the remedy that the refusal names.
    passing(make("pipedream", 2, 4), [Parting(KnownPair), Joining()])


@pytest.mark.parametrize("side", ["input", "target"])
def test_a_batch_that_torch_cannot_open_is_refused(side):
    # Was: no tensor of it was cut: every micro-batch got the whole of it.
    modules = [Joining() if side == "input" else stages(1)[0], *stages(1)]
    data = [(Pair(X, X), Y) if side == "input" else (X, Pair(Y, Y))]

    def loss(y, target):
        return F.mse_loss(y, target.a if isinstance(target, Pair) else target)

    with pytest.raises(ValueError, match=r"batch 0.*Pair.*pytree"):
        run_of(make("gpipe", 2, 4), modules, data, loss)


# ---- losses


class Counted(torch.optim.SGD):
    steps = 0

    def step(self, *rest):
        Counted.steps += 1
        return super().step(*rest)


def whole(y, target):
    return F.mse_loss(y, target, reduction="none")


LOSSES = {
    # Was: nothing was trained, and the check passed: the reference trained nothing either.
    "detached": (lambda y, t: F.mse_loss(y.detach(), t), "loss.*(detach|gradient)"),
    # Was: "Boolean value of Tensor with more than one value is ambiguous".
    "unreduced": (whole, r"loss.*\(4, 6\)"),
    "half_reduced": (lambda y, t: whole(y, t).mean(1), r"loss.*\(4,\)"),
    # Was: trained, and then failed the check, by inf.
    "one_element": (lambda y, t: F.mse_loss(y, t)[None], r"loss.*\(1,\)"),
    # Was: "'float' object has no attribute 'detach'", and so on.
    "number": (lambda y, t: F.mse_loss(y, t).item(), "loss.*float"),
    "nothing": (lambda y, t: None, "loss.*NoneType"),
}


@pytest.mark.parametrize("kind", LOSSES)
def test_a_loss_that_cannot_be_trained_on_is_refused(kind):
    loss, said = LOSSES[kind]
    Counted.steps = 0
    with pytest.raises((ValueError, RunError), match=said):
        run_of(make("gpipe", 2, 2), loss=loss, optimizer=partial(Counted, lr=0.1))
    assert Counted.steps == 0


def test_a_batch_that_has_a_graph_is_data():
    # Was: backwards went on into the caller's graph, which the second one did not find any more.
    (x, target), *_ = batches(1)
    x.requires_grad_()
    passing(make("gpipe", 2, 2), data=[(x * 2, target)])
    assert x.grad is None


@pytest.mark.parametrize("count", [-1.0, float("nan"), float("inf")])
def test_a_loss_that_is_the_mean_of_no_number_is_refused(count):
    loss = lambda y, t: (F.mse_loss(y, t), count)  # noqa: E731
    with pytest.raises(RunError, match=f"the loss is the mean of {count}: return"):
        run_of(make("gpipe", 2, 2), loss=loss)


def test_an_unreduced_loss_is_not_evaluated():
    # Was: "only one element tensors can be converted to Python scalars".
    with pytest.raises((ValueError, RunError), match=r"loss.*\(4, 6\)"):
        evaluate(make("gpipe", 2, 2), stages(2), batches(1), whole)


# ---- arguments

SHARED = Layer()
DOUBLE = make("pipedream_2bw", 2, 2)  # of one batch, which looks as if it had a flush
META = nn.BatchNorm1d(6, affine=False, device="meta")


def refuse_to_train(weights):
    raise AssertionError("an optimizer was made")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"devices": "meta"}, "device 'meta': this machine has cpu"),
        ({"schedule": make("gpipe", 2, 2).with_transfers()}, "has its transfers written out"),
        ({"stages": stages(3)}, "3 modules for the 2 stages of gpipe: give one per stage"),
        (
            {"stages": [SHARED, SHARED], "schedule": make("pipedream", 2, 2)},
            "stages 0 and 1 share the weight weight, but pipedream updates without a flush",
        ),
        ({"stages": [SHARED, SHARED], "schedule": DOUBLE}, "share the weight .* without a flush"),
        ({"replicas": 2, "schedule": make("pipedream", 2, 2)}, "replicas=2 with pipedream, which"),
        ({"replicas": 2, "schedule": DOUBLE}, "replicas=2 with pipedream_2bw, which updates"),
        ({"replicas": 0}, "replicas=0: give a whole number"),
        # Was: a TypeError of a rank, or none.
        ({"replicas": 1.5}, "replicas=1.5: give a whole number of at least 1"),
        ({"seed": 1.5}, "seed=1.5: give a whole number of at least 0"),
        ({"timeout": None}, "timeout=None: give seconds, a number above 0"),
        # Was: ZeroDivisionError in an update; trained uphill, and the check passed; weights of nan.
        ({"clip": 0}, "clip=0: give the largest norm"),
        ({"clip": -1.0}, "clip=-1.0: give"),
        ({"clip": float("nan")}, "clip=nan: give"),
        ({"reference": "batch"}, "reference='batch': give one of batches, microbatches"),
        # Was: a NotImplementedError of torch's, from a copy.
        ({"stages": [nn.Linear(6, 6, device="meta"), *stages(1)]}, "0 is on the meta .* to_empty"),
        ({"stages": [*stages(1), META]}, "stage 1 is on the meta device .* to_empty"),
        ({"recompute": "some"}, "recompute='some': use one of never, except_last, always"),
        ({"pace": -1.0}, "pace=-1.0: give the seconds of one cost unit"),
        ({"seed": -1}, "seed=-1: give a whole number of at least 0"),
        ({"timeout": 0}, "timeout=0: give seconds"),
        ({"autocast": torch.float16}, "autocast=torch.float16: use torch.bfloat16"),
        ({"stop": 1}, "stop=1 without save loses the work"),
        (
            {"schedule": make("gpipe", 2, 2).forward_only()},
            "has only forwards: use pipelab.evaluate",
        ),
        ({"batches": batches(2)}, "2 batches for a table of 1: build the schedule with batches=2"),
        ({"batches": batches(1, samples=1)}, "batch 0 has 1 samples for 2 micro-batches"),
        ({"batches": [(torch.ones(4, 6), torch.ones(5, 6))]}, r"tensors have \[4, 5\] samples"),
        ({"devices": ["cpu"]}, "1 devices for the 2 rows of gpipe"),
        ({"devices": ["cpu", "gpu0"]}, "device 'gpu0'"),
        ({"devices": "cuda:64"}, "device 'cuda:64': this machine has cpu"),
        ({"batches": iter(batches(1))}, "batches is a list_iterator: give a list, such as list"),
        ({"optimizer": None}, "optimizer is a NoneType: give a factory, such as torch.optim.SGD"),
        ({"optimizer": lambda weights: None}, "factory made a NoneType of weights"),
        ({"optimizer": lambda _: SGD([SHARED.weight])}, "factory made a SGD of weights"),
        ({"devices": [None, None]}, "device 'None'"),
    ],
)
def test_arguments_that_do_not_fit(change, message):
    arguments = dict(
        schedule=make("gpipe", 2, 2),
        stages=stages(2),
        batches=batches(1),
        loss=F.mse_loss,
        optimizer=refuse_to_train,
    )
    with pytest.raises(ValueError, match=message):
        run(**arguments | change)


# ---- what a failing run leaves behind

copies = []  # weak references to the modules that forwards ran on: copies of those that were given


class Noting(Failing):
    def forward(self, x):
        copies.append(weakref.ref(self))
        return super().forward(x)


class Breaking(torch.optim.SGD):
    def step(self, *rest):
        explode()


@pytest.fixture
def _no_collection():
    # torch's first optimizer imports what keeps the stack of that moment; the collection is of the
    # past alone.
    torch.optim.SGD([nn.Parameter(torch.ones(1))])
    gc.collect()
    gc.disable()
    copies.clear()
    yield
    gc.enable()


@pytest.mark.parametrize("what", ["stage", "loss", "optimizer"])
@pytest.mark.usefixtures("_no_collection")
def test_a_failing_run_is_freed_at_once(what):
    # Was: the error's traceback and what it came from held each other, with all stages, until a
    # collection: 80 failing runs kept 3.4 GB.
    modules = [Noting(1 if what == "stage" and s == 1 else 1000, explode) for s in range(3)]
    optimizer = partial(Breaking if what == "optimizer" else torch.optim.SGD, lr=0.1)

    def loss(y, target):
        return F.mse_loss(y, target) * (float("nan") if what == "loss" else 1.0)

    failed = False
    try:
        run(make("gpipe", 3, 2), modules, batches(1), loss, optimizer)
    except RunError:
        failed = True
    assert failed
    assert copies
    assert not any(copy() is not None for copy in copies)


# ---- what the caller is in, or gives


@pytest.mark.parametrize(
    ("recompute", "backend"),
    [(Recompute.NEVER, "threads"), (Recompute.ALWAYS, "threads"), (Recompute.ALWAYS, "processes")],
)
def test_a_caller_in_inference_mode_trains_all_the_same(recompute, backend):
    # Was: "Inference tensors cannot be saved for backward".
    norm = nn.BatchNorm1d(6, dtype=torch.float64)
    expected = run_of(make("gpipe", 2, 2), [*stages(1), norm], recompute=recompute)
    with torch.inference_mode():
        norm = nn.BatchNorm1d(6, dtype=torch.float64)
        arguments = make("gpipe", 2, 2), [*stages(1), norm], batches(1), F.mse_loss
        result = run(*arguments, SGD, recompute=recompute, backend=backend)
        evaluated = evaluate(*arguments)
    assert result.check.passed, result.check
    assert result.losses == expected.losses
    assert evaluated.check.passed


@CALLS
def test_a_loader_is_no_list(call):
    # Was: TypeError "'DataLoader' object is not subscriptable".
    loader = DataLoader(batches(2), batch_size=None)
    with pytest.raises(ValueError, match=r"batches is a DataLoader: give a list, .*list\(loader\)"):
        call(make("gpipe", 2, 2, batches=2), stages(2), loader, F.mse_loss)


class Unspeakable(Exception):
    def __str__(self):
        raise RuntimeError("no words")


class Raising(nn.Module):
    def forward(self, x):
        raise Unspeakable


@pytest.mark.parametrize("backend", ["threads", "processes"])
def test_an_error_without_words_still_has_a_place(backend):
    # Was: "no words", without device and action.
    with pytest.raises(RunError, match="device 1, action 1F0: Unspeakable") as error:
        run_of(make("gpipe", 2, 2), [*stages(1), Raising()], backend=backend)
    assert error.value.device == 1


def test_a_schedules_name_is_no_schedule():
    given = stages(2), batches(1), F.mse_loss
    for call in (
        lambda: run("gpipe", *given, SGD),
        lambda: evaluate("gpipe", *given),
        lambda: Trainer("gpipe", given[0], F.mse_loss, SGD),
    ):
        with pytest.raises(ValueError, match="schedule is a str: give a Schedule"):
            call()
