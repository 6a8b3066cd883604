"""Messages between processes: what may travel, who may call, and what a failure leaves."""

import io
import json
import multiprocessing
import os
import socket
import struct
import sys
import threading
import time
from collections import namedtuple
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.utils import _pytree as pytree

import pipelab
from pipelab.runtime import wire as wires
from pipelab.runtime.torch.pipes import Pipe, dumps
from pipelab.runtime.torch.processes import _Failure
from pipelab.runtime.torch.wire import reduced
from pipelab.runtime.transport import Aborted, Lost, Message
from pipelab.runtime.wire import Link, Wire, connect
from pipelab.runtime.worker import RunError

SOON = 10.0  # seconds within which anything here has to end
BUFFER = io.DEFAULT_BUFFER_SIZE  # of what is read of a socket
T = torch.arange(20.0).reshape(4, 5)
LARGE = torch.ones(5_000_000)  # more than the kernel takes at once


Pair = namedtuple("Pair", "left right")
MESSAGES: dict = {
    "nested": {"a": (T, None, 3, "text"), "b": [T > 2, T.long(), T.bfloat16(), T[0, 0]]},
    "namedtuple": Pair(T, Pair(T, None)),
    "empty": (torch.empty(0, 3), torch.empty(3, 0, 2), torch.zeros(0, 5).T),
    "only empty": [torch.empty(0)] * 1100,
    "layouts": (T.T, T[:, 1:3], T[:1].expand(7, 5), T[::2, ::2]),
    "complex": (torch.complex(T, -T).conj(), torch.complex(T, T).conj().imag),
    "negated": torch.complex(T, T).conj().imag[0, 1:2],  # one number, of stride 2
    "twice": (T, T, T.view(-1)),
    "many": [torch.full((2,), float(i)) for i in range(2000)],
    "long pickle": ("q" * 100_000, T),
    "large": (LARGE, T),
}


@pytest.fixture
def socket_ends():
    ends = [Link(s, reduced) for s in socket.socketpair()]
    yield ends
    for end in ends:
        end.end()
        end.close()


@pytest.fixture
def two_ends():
    ends = two_pipes()
    yield ends
    for end in ends:
        end._reader.close()  # who writes to it does not wait any more
    for end in ends:
        end.close()


def two_pipes():
    (at_b, from_a), (at_a, from_b) = (multiprocessing.Pipe(duplex=False) for _ in range(2))
    return [Pipe(at_a, from_a), Pipe(at_b, from_b)]


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


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_comes_as_it_was_sent(name, two_ends):
    near, far = two_ends
    near.write(MESSAGES[name])
    found = within(far.read)
    sent, received = (pytree.tree_flatten(m) for m in (MESSAGES[name], found))
    assert sent[1] == received[1]
    for a, b in zip(sent[0], received[0], strict=True):
        if isinstance(a, torch.Tensor):
            assert a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
        else:
            assert a == b and type(a) is type(b)


def test_messages_stay_in_order_around_the_buffer_and_behind_a_large_one(two_ends):
    near, far = two_ends
    messages = [LARGE, *("q" * n for n in range(BUFFER - 90, BUFFER + 10)), T]
    within(lambda: [near.write(message) for message in messages])
    for message in messages:
        assert str(within(far.read)) == str(message)


def test_a_message_waits_for_those_before_it(two_ends):
    near, far = two_ends
    before = threading.Event()
    near._sending = near._thread.submit(before.wait)
    near.write("behind")
    try:
        assert not far._reader.poll(0.1)
    finally:
        before.set()
    assert within(far.read) == "behind"


def test_two_who_send_each_other_much_do_not_wait_for_each_other(two_ends):
    def swap(end):
        for message in (LARGE, T, LARGE):
            end.write(message)
        return [len(end.read()) for _ in range(3)]

    expected = [len(LARGE), len(T), len(LARGE)]
    assert together(*(partial(swap, end) for end in two_ends)) == [expected] * 2


def test_a_link_is_closed_when_all_has_left(two_ends):
    near, far = two_ends
    near.write(LARGE)
    _, found = together(near.close, far.read)
    assert len(found) == len(LARGE)


def test_a_write_to_who_has_left_is_lost(two_ends):
    near, far = two_ends
    far.close()
    with pytest.raises(Lost):
        near.write(T)


class Held:
    """A type with what cannot be copied."""

    lock = threading.Lock()


def test_types_that_the_receiver_has_are_its_own_and_others_are_sent(two_ends, monkeypatch):
    near, far = two_ends
    monkeypatch.setattr(Held, "__module__", "__main__")  # as in a script that every rank runs
    monkeypatch.setattr(sys.modules["__main__"], "Held", Held, raising=False)
    near.write(Held())
    assert type(within(far.read)) is Held

    class Local:
        x = T

    near.write(Local())
    assert torch.equal(within(far.read).x, T)


class Event:
    """Stands for torch.cuda.Event, which this machine may not have; it cannot be pickled."""

    def __reduce__(self):
        raise TypeError


def test_events_stay_where_they_are(two_ends, monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    near, far = two_ends
    near.write((T, Event()))
    assert within(far.read)[1] is None


@pytest.mark.parametrize("much", [0, 1, 50, 400])
def test_a_message_that_breaks_off_is_lost(much, two_ends):
    near, far = two_ends
    packed = dumps((0, torch.ones(100)))
    os.write(near._writer.fileno(), (struct.pack("!i", len(packed)) + packed)[:much])
    near.close()
    with pytest.raises(Lost, match="a message to or from another process was lost"):
        far.read()


@pytest.mark.parametrize("before", [None, LARGE])
def test_a_send_after_the_end_is_no_failure_of_its_own(before, socket_ends):
    wire = Wire(job(pipelab.make("gpipe", 2, 2)), {(0, 1): socket_ends[0]})
    if before is not None:
        wire.send(0, 1, Message(before, 0.0))
    wire.abort()
    with pytest.raises(Aborted):
        wire.send(0, 1, Message(LARGE, 0.0))
    within(wire.close)  # though nobody reads


@pytest.mark.parametrize("ending", [0, 1])
def test_who_waits_when_the_run_ends_is_aborted_and_who_waits_for_that_has_lost(
    ending, socket_ends
):
    schedule = pipelab.make("gpipe", 2, 2)
    near, far = socket_ends
    pair = [Wire(job(schedule), {(0, 1): near}), Wire(job(schedule), {(1, 0): far})]
    outcome, _ = together(partial(pair[1].receive, 0, 1), pair[ending].abort)
    assert type(outcome) is (Aborted if ending == 1 else Lost)


class Slow:
    """A link to device 0 of whose two messages the second has to be waited for."""

    def __init__(self):
        self.keys = iter([0, 1])

    def read(self):
        key, began = next(self.keys), time.perf_counter()
        while key and time.perf_counter() - began < 2 * wires.AT_ONCE:
            pass
        return key, None, -1.0


def test_what_is_waited_for_has_come_then_and_all_else_when_it_was_sent(monkeypatch):
    monkeypatch.setattr(wires, "AT_ONCE", 0.01)  # also on a busy machine
    wire = Wire(job(pipelab.make("gpipe", 2, 2)), {(1, 0): Slow()})
    wire.began = time.perf_counter()
    assert wire.receive(0, 1).at == -1.0
    assert wire.receive(1, 1).at >= 2 * wires.AT_ONCE
    wire.began = None  # paced: the messages say it
    wire._links[1, 0].keys = iter([1])
    assert wire.receive(1, 1).at == -1.0


def test_replicas_add_up_in_one_order():
    schedule, count = pipelab.make("gpipe", 2, 2), 3
    parts = [[torch.tensor([x]), LARGE * x] for x in (1e8, -1e8, 1.0)]
    wirings: list[dict] = [{} for _ in range(count)]
    for a in range(count):
        for b in range(a):
            ends = two_pipes()
            wirings[a][count + a, count + b], wirings[b][count + b, count + a] = ends
    home = SimpleNamespace(give=lambda x: (x, None), take=lambda parcel: parcel[0])

    def sums(replica):
        wire = Wire(job(schedule, 1, replica, count), wirings[replica])
        found = wire.sum_over_replicas((1, 0), 1, parts[replica], home)
        wire.close()
        return found

    for first, second in together(*(partial(sums, replica) for replica in range(count))):
        assert first == 1.0  # in another order it would be 0
        assert torch.equal(second, LARGE)


def test_rows_of_a_process_send_and_end_however_far_one_is_ahead():
    schedule = pipelab.make("gpipe", 2, 2000)
    wire = Wire(job(schedule), {})
    mine = range(*schedule.bounds[:2])
    within(lambda: [wire.send(i, 1, Message(None, 0.0)) for i in mine])
    within(wire.abort)
    wire.close()


def test_a_connection_error_of_the_callers_code_is_its_own_failure():
    error = RunError("device 1, action 1F0: no data")
    error.__cause__ = ConnectionRefusedError("no data")
    assert not _Failure(SimpleNamespace(where="device 1", rank=1), error).secondary


def reset(call):
    call.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    call.close()


STRANGERS = {
    "hangs up": lambda call: call.close(),
    "wrong key": lambda call: call.sendall(b"\0\0\0\5hello"),
    "http": lambda call: call.sendall(b"GET / HTTP/1.1\r\n\r\n"),
    "breaks off": lambda call: (call.sendall(b"\0\0"), call.shutdown(socket.SHUT_WR)),
    "resets": reset,
    "silent": lambda call: None,
}


class Exchanges:
    """The values of several threads, each of which is a process; `at(me, number)` comes between."""

    def __init__(self, count, at=lambda me, number, values: None):
        self.everybody, self.at = threading.Barrier(count), at
        self.given: list[list] = [[] for _ in range(count)]

    def __call__(self, me, value):
        self.given[me].append(json.loads(json.dumps(value)))
        number = len(self.given[me]) - 1
        self.everybody.wait(SOON)
        values = [of[number] for of in self.given]
        self.at(me, number, values)
        self.everybody.wait(SOON)
        return values


def meet(pairs, homes, exchanges):
    """What `connect` gives every process."""
    every = range(max(homes) + 1)
    calls = [partial(connect, me, pairs, homes, partial(exchanges, me)) for me in every]
    return together(*calls)


def joined(found):
    """Whether every socket leads to its other end; closes them."""
    every = {ends: each for of in found for ends, each in of.items()}
    for (own, other), each in every.items():
        each.settimeout(SOON)
        each.sendall(bytes([own, other]))
    right = [[*each.recv(9)] == [other, own] for (own, other), each in every.items()]
    for each in every.values():
        each.close()
    return all(right)


@pytest.mark.parametrize("name", STRANGERS)
def test_processes_meet_in_spite_of_a_stranger(name, monkeypatch):
    monkeypatch.setattr(wires, "MEETING", 2.0)
    calls: list[socket.socket] = []

    def stranger(me, number, values):
        if (me, number) == (0, 1):  # the ports: somebody else is quicker
            calls.append(socket.create_connection(tuple(values[0])))
            STRANGERS[name](calls[0])

    found = meet([(0, 1)], (0, 1), Exchanges(2, stranger))
    calls[0].close()
    assert [len(of) for of in found] == [1, 1]
    assert joined(found)


def test_every_pair_of_ends_has_a_connection_for_small_messages():
    pairs, homes = [(0, 1), (0, 2), (0, 3), (1, 2), (2, 3)], (0, 1, 1, 2)
    socket.setdefaulttimeout(0.2)
    exchanges = Exchanges(3)
    try:
        found = meet(pairs, homes, exchanges)
    finally:
        socket.setdefaulttimeout(None)
    assert [{*of} for of in found] == [
        {(0, 1), (0, 2), (0, 3)},
        {(1, 0), (2, 0), (2, 3)},
        {(3, 0), (3, 2)},
    ]
    for each in (each for of in found for each in of.values()):
        assert each.gettimeout() is None
        assert each.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    assert {port[0] for _, port in exchanges.given} == {"127.0.0.1"}  # no other host can call
    assert joined(found)


def test_the_first_message_may_come_before_the_answer(monkeypatch):
    monkeypatch.setattr(wires, "MEETING", 2.0)
    monkeypatch.setattr(wires, "_address", lambda: "127.0.0.1")
    said: list = []
    callers = []

    def exchange(value):
        said.append(value)
        if len(said) == 2:  # process 1 calls, and goes on, before process 0 answers
            answers = iter([[said[0], said[0]], [said[1], None]])
            callers.append(connect(1, [(0, 1)], (0, 1), lambda value: next(answers))[1, 0])
            callers[0].sendall(b"more")
        return [value, value]

    found = connect(0, [(0, 1)], (0, 1), exchange)[0, 1]
    assert found.recv(9) == b"more"
    for each in (found, *callers):
        each.close()


def test_processes_of_several_networks_meet_at_their_own_addresses(monkeypatch):
    addresses = iter(["127.0.0.2", "127.0.0.3"])
    monkeypatch.setattr(wires, "_address", lambda: next(addresses))
    found = meet([(0, 1)], (0, 1), Exchanges(2))
    assert {each.getpeername()[0] for each in found[1].values()} < {"127.0.0.2", "127.0.0.3"}
    assert joined(found)


def test_a_host_is_called_where_it_calls_the_launcher(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert wires._address() == "127.0.0.1"


@pytest.mark.parametrize("absent", [0, 1])
def test_who_does_not_come_is_named(absent, monkeypatch):
    monkeypatch.setattr(wires, "MEETING", 0.2)
    here = 1 - absent
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        port = nobody.getsockname()

    def exchange(value):
        return [value if me == here or not isinstance(value, tuple) else port for me in range(2)]

    with pytest.raises(RunError, match=f"process {here} cannot reach process {absent}: "):
        connect(here, [(0, 1)], (0, 1), exchange)
