"""Messages between processes: what may travel, who may call, and what a failure leaves."""

import queue
import sys
import threading
import time
from collections import defaultdict, namedtuple
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils import _pytree as pytree

import pipelab
from pipelab.runtime import wire as wires
from pipelab.runtime.torch import groups
from pipelab.runtime.torch.child import Failure
from pipelab.runtime.torch.groups import GroupLink
from pipelab.runtime.transport import Aborted, Lost, Message
from pipelab.runtime.wire import Wire
from pipelab.runtime.worker import RunError

SOON = 10.0  # seconds within which anything here has to end
T = torch.arange(20.0).reshape(4, 5)
LARGE = torch.ones(5_000_000)  # more than the kernel takes at once


Pair = namedtuple("Pair", "left right")
MESSAGES: dict = {
    "nested": {"a": (T, None, 3, "text"), "b": [T > 2, T.long(), T.bfloat16(), T[0, 0]]},
    "namedtuple": Pair(T, Pair(T, None)),
    "empty": (torch.empty(0, 3), torch.empty(3, 0, 2), torch.zeros(0, 5).T),
    "only empty": [torch.empty(0)] * 1100,
    "layouts": (T.T, T[:, 1:3], T[:1].expand(7, 5), T[::2, ::2]),
    "channels last": [
        torch.rand(size, 3, 4, 5, dtype=dtype)[:, :channels].to(memory_format=torch.channels_last)
        for size, channels, dtype in [(2, 3, torch.float32), (1, 1, torch.complex64)]
    ],
    "complex": (torch.complex(T, -T).conj(), torch.complex(T, T).conj().imag),
    "negated": torch.complex(T, T).conj().imag[0, 1:2],  # one number, of stride 2
    "twice": (T, T, T.view(-1)),
    "zeros without memory": (torch._efficientzerotensor(3), T),
    "many": [torch.full((2,), float(i)) for i in range(2000)],
    "long pickle": ("q" * 100_000, T),
    "large": (LARGE, T),
}


def job(schedule, row=0, replica=0, replicas=1):
    """What a wire asks of a job."""
    return SimpleNamespace(schedule=schedule, row=row, replica=replica, replicas=replicas)


def together(*functions):
    """What they return or raise, in a thread each; fails if that takes longer than SOON."""
    outcomes: list = [None] * len(functions)

    def outcome(number, function):
        try:
            outcomes[number] = function()
        except Exception as error:
            outcomes[number] = error

    threads = [
        threading.Thread(target=outcome, args=each, daemon=True) for each in enumerate(functions)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON)
        assert not thread.is_alive(), "hangs"
    return outcomes


def within(function):
    (outcome,) = together(function)
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


class Work:
    """A send or a receive, done when it is waited for."""

    def __init__(self, wait):
        self.wait = wait


@pytest.fixture
def two_groups(monkeypatch, request):
    """Two ranks, with queues for process groups; how many tensors each has sent."""
    sent = []

    class Group:
        """What a link asks of torch's: the ranks of a pair are one way each."""

        def __init__(self):
            self.ways = defaultdict(queue.SimpleQueue)

        def send(self, memory, rank, tag):
            self.ways[tag].put(memory[0].clone())
            sent.append(self)
            return Work(lambda: None)

        def recv(self, memory, rank, tag):
            def wait():
                found = self.ways[tag].get(timeout=SOON)
                memory[0][: len(found)] = found  # it may be less than was asked for

            return Work(wait)

    if hasattr(request, "param"):  # bytes that a reader asks for beforehand
        monkeypatch.setattr(groups, "LEAST", request.param)
        monkeypatch.setattr(groups, "MOST", request.param)
    there, back = Group(), Group()
    monkeypatch.setattr(groups.dist, "get_group_rank", lambda group, rank: rank)
    cpu = torch.device("cpu")
    return GroupLink(1, there, back, cpu), GroupLink(0, back, there, cpu), sent


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_comes_as_it_was_sent(name, two_groups):
    near, far, _ = two_groups
    near.write((7, MESSAGES[name], 0.5))
    key, found, at = within(far.read)
    assert (key, at) == (7, 0.5)
    sent, received = (pytree.tree_flatten(m) for m in (MESSAGES[name], found))
    assert sent[1] == received[1]
    for a, b in zip(sent[0], received[0], strict=True):
        if isinstance(a, torch.Tensor):
            assert a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
            assert b.stride() == a.to("meta").stride()  # as when a tensor goes to another device
        else:
            assert a == b and type(a) is type(b)


def test_numpy_numbers_in_a_table_or_a_pace_come_as_numbers(two_groups):
    near, far, _ = two_groups
    near.write(((np.int64(3), True, np.int64(2)), T, np.float64(0.5)))
    key, _, at = within(far.read)
    assert {key: at} == {(3, True, 2): 0.5}


def test_a_tensor_has_memory_of_its_own(two_groups):
    near, far, _ = two_groups
    sent = torch.arange(300.0)  # two fill a row that has been asked for
    near.write((7, (sent, sent), 0.5))
    _, (first, second), _ = within(far.read)
    before = second._version
    first += 1
    assert second._version == before and torch.equal(second, sent)
    assert second.untyped_storage().nbytes() == sent.nbytes  # what it is counted as


@pytest.mark.parametrize("two_groups", [groups.START.size, groups.LEAST], indirect=True)
def test_small_messages_come_in_one_row_and_others_part_by_part(two_groups):
    near, far, sent = two_groups
    small = near._there.ahead[0] > groups.START.size
    forward, backward = {"x": T, "n": 3}, (2.0, [T > 2, T])
    for i, payload in enumerate([forward, backward] * 3):
        near.write((i, payload, float(i)))
        key, found, _ = within(far.read)
        assert key == i and str(found) == str(payload)
    messages, tensors = 6, 3 * (1 + 2)
    assert len(sent) == messages + (0 if small else messages + tensors)
    near.close()


def test_payloads_that_are_equal_and_not_the_same_stay_apart(two_groups):
    near, far, _ = two_groups
    values = [0.0, -0.0, 1.0, 1, True, None, [1.0], (1.0,), [], (), float("nan"), "1.0"]
    for value in values * 2:
        for payload in (value, (value, T), [T, [value, T]], [T, (value, T.t()[:2])]):
            near.write((0, payload, 0.0))
            assert repr(within(far.read)[1]) == repr(payload)


def test_tensors_without_numbers_are_refused(two_groups):
    near, *_ = two_groups
    with FakeTensorMode():
        fake = torch.ones(3)
    with pytest.raises(ValueError, match="a FakeTensor has no numbers"):
        near.write((0, [fake], 0.0))


@pytest.mark.parametrize(
    ("make", "kind_of"),
    [
        (lambda: torch.eye(3).to_sparse(), "torch.sparse_coo"),
        (lambda: torch.nested.nested_tensor([T, T[:1]], layout=torch.jagged), "nested"),
        (lambda: torch.quantize_per_tensor(T, 0.1, 0, torch.quint8), "torch.quint8"),  # crashed
    ],
)
def test_tensors_that_are_not_plain_are_refused(make, kind_of, two_groups):
    near, *_ = two_groups
    with pytest.raises(
        ValueError, match=f"a {kind_of} tensor cannot be sent to another process: let"
    ):
        near.write((0, [make()], 0.0))


def test_large_messages_come_in_one_when_the_reader_knows_of_them(two_groups):
    near, far, sent = two_groups
    for i in range(groups.AHEAD + 3):
        near.write((i, torch.full((3000 - i, 2), float(i)), 0.0))
        assert torch.equal(within(far.read)[1], torch.full((3000 - i, 2), float(i)))
    assert len(sent) == 3 * groups.AHEAD + 3  # before: start, head, tensor
    near.write((9, T, 0.0))  # does not keep the room of a large one
    assert within(far.read)[1].untyped_storage().nbytes() == T.nbytes


class Held:
    """A type with what cannot be copied."""

    lock = threading.Lock()


def test_types_that_the_receiver_has_are_its_own_and_others_are_sent(two_groups, monkeypatch):
    near, far, _ = two_groups
    monkeypatch.setattr(Held, "__module__", "__main__")  # as in a script that every rank runs
    monkeypatch.setattr(sys.modules["__main__"], "Held", Held, raising=False)
    near.write((0, Held(), 0.0))
    assert type(within(far.read)[1]) is Held

    class Local:
        x = T

    near.write((0, Local(), 0.0))
    assert torch.equal(within(far.read)[1].x, T)


class Event:
    """Stands for torch.cuda.Event, which this machine may not have; it cannot be pickled."""

    def __reduce__(self):
        raise TypeError


def test_events_stay_where_they_are(two_groups, monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    near, far, _ = two_groups
    for payload in ((T, Event()), {"x": T, "event": Event()}):
        near.write((0, payload, 0.0))
        assert None in pytree.tree_leaves(within(far.read)[1])


class Gone:
    """A link to a rank that has left."""

    def write(self, message):
        raise Lost("gone")

    def end(self):
        pass


def test_a_send_after_the_end_is_no_failure_of_its_own():
    wire = Wire(job(pipelab.make("gpipe", 2, 2)), {(0, 1): Gone()})
    with pytest.raises(Lost):
        wire.send((0, True, 0), 1, Message(T, 0.0))
    wire.abort()
    with pytest.raises(Aborted):
        wire.send((0, True, 0), 1, Message(T, 0.0))


FORWARDS = (0, True, 0), (0, True, 1)  # keys of two messages of stage 0


class Slow:
    """A link to device 0 of whose two messages the second has to be waited for."""

    def __init__(self):
        self.keys = iter(FORWARDS)

    def read(self):
        key, began = next(self.keys), time.perf_counter()
        while key[2] and time.perf_counter() - began < 2 * wires.AT_ONCE:
            pass
        return key, None, -1.0


def test_what_is_waited_for_has_come_then_and_all_else_when_it_was_sent(monkeypatch):
    monkeypatch.setattr(wires, "AT_ONCE", 0.01)  # also on a busy machine
    wire = Wire(job(pipelab.make("gpipe", 2, 2)), {(1, 0): Slow()})
    wire.began = time.perf_counter()
    first, second = FORWARDS
    assert wire.receive(first, 1).at == -1.0
    assert wire.receive(second, 1).at >= 2 * wires.AT_ONCE
    wire.began = None  # paced: the messages say it
    wire._links[1, 0].keys = iter([second])
    assert wire.receive(second, 1).at == -1.0


def test_rows_of_a_process_send_and_end_however_far_one_is_ahead():
    schedule = pipelab.make("gpipe", 2, 2000)
    wire = Wire(job(schedule), {})
    within(lambda: [wire.send((0, True, k), 1, Message(None, 0.0)) for k in range(2000)])
    within(wire.abort)
    wire.close()


def test_a_connection_error_of_the_callers_code_is_its_own_failure():
    error = RunError("device 1, action 1F0: no data")
    error.__cause__ = ConnectionRefusedError("no data")
    assert not Failure(SimpleNamespace(where="device 1", rank=1), error).secondary
