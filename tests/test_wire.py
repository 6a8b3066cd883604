"""Messages between processes: what may travel, who may call, and what a failure leaves."""

import io
import json
import os
import socket
import struct
import threading
from collections import namedtuple
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree

import pipelab
from pipelab.executors import wire as wires
from pipelab.executors.torch.processes import _Failure
from pipelab.executors.torch.wire import reduced
from pipelab.executors.transport import Aborted, Message
from pipelab.executors.wire import Link, Wire, connect
from pipelab.executors.worker import RunError

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
    "twice": (T, T, T.view(-1)),
    "many": [torch.full((2,), float(i)) for i in range(2000)],
    "long pickle": ("q" * 100_000, T),
    "large": (LARGE, T),
}


@pytest.fixture
def two_ends():
    ends = [Link(s, reduced) for s in socket.socketpair()]
    yield ends
    for end in ends:
        end.end()
        end.close()


def job(schedule, row=0, replica=0, replicas=1):
    """What a wire asks of a job."""
    return SimpleNamespace(schedule=schedule, row=row, replica=replica, replicas=replicas)


def within(function):
    """What it returns, in a thread; fails if that takes longer than SOON."""
    outcome: list = []
    thread = threading.Thread(target=lambda: outcome.append(function()), daemon=True)
    thread.start()
    thread.join(SOON)
    assert outcome, "hangs, or has failed"
    return outcome[0]


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
    for message in messages:
        near.write(message)
    for message in messages:
        assert str(within(far.read)) == str(message)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs cores to pin to")
def test_what_sends_is_not_pinned_to_the_core_of_its_worker(two_ends):
    cores = os.sched_getaffinity(0)

    def pinned():
        os.sched_setaffinity(0, {min(cores)})
        two_ends[0].write(LARGE)

    within(pinned)
    (sender,) = (t for t in threading.enumerate() if t.name.startswith("pipelab sends"))
    assert os.sched_getaffinity(sender.native_id) == cores


@pytest.mark.parametrize("before", [None, LARGE])
def test_a_send_after_the_end_is_no_failure_of_its_own(before, two_ends):
    with Wire(job(pipelab.make("gpipe", 2, 2)), {(0, 1): two_ends[0]}) as wire:
        if before is not None:
            wire.send(0, 1, Message(before, 0.0))
        wire.abort()
        with pytest.raises(Aborted):
            wire.send(0, 1, Message(LARGE, 0.0))


def test_rows_of_a_process_send_and_end_however_far_one_is_ahead():
    schedule = pipelab.make("gpipe", 2, 2000)
    wire = Wire(job(schedule), {})
    mine = np.flatnonzero(schedule.columns.device == 0)
    send = lambda i: wire.send(int(i), 1, Message(None, 0.0))  # noqa: E731
    within(lambda: [*map(send, mine)])
    within(wire.abort)
    wire.__exit__(None, None, None)


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


@pytest.mark.parametrize("name", STRANGERS)
def test_processes_meet_in_spite_of_a_stranger(name, monkeypatch):
    monkeypatch.setattr(wires, "MEETING", 2.0)
    everybody = threading.Barrier(2)
    given: list[dict] = [{}, {}]
    calls: list[socket.socket] = []

    def exchange(me, value):
        number = len(given[me])
        given[me][number] = json.loads(json.dumps(value))
        everybody.wait(SOON)
        if (me, number) == (0, 1):  # the addresses: somebody else is quicker
            calls.append(socket.create_connection(tuple(given[0][1])))
            STRANGERS[name](calls[0])
        everybody.wait(SOON)
        return [of[number] for of in given]

    found: list[dict] = [{}, {}]

    def meet(me):
        found[me] = connect(me, [(0, 1)], (0, 1), lambda value: exchange(me, value))

    threads = [threading.Thread(target=meet, args=(me,), daemon=True) for me in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(5)
    calls[0].close()
    assert [len(of) for of in found] == [1, 1]
