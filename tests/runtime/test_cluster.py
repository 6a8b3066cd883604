"""Processes that something else has started: what they tell each other, and when they give up."""

import threading
import time
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace

import pytest

from pipelab import RunError
from pipelab.runtime import cluster as clusters
from pipelab.runtime.cluster import Cluster
from pipelab.runtime.orders import Outcome
from pipelab.runtime.threads import Threads
from pipelab.runtime.transport import Lost


class Store(dict):
    """A store that may hang or break, which all processes of a test share."""

    def __init__(self):
        self.there, self.error = threading.Event(), None
        self.there.set()

    def reached(self):
        assert self.there.wait(10)
        if self.error:
            raise self.error


class Process(Cluster):
    def __init__(self, me, store, timeout=10.0, call="a call", count=2):
        super().__init__(me, count, timeout, call)
        self.store, self.meetings = store, 0

    def give(self, name, value):
        self.store.reached()
        self.store[name] = value

    def give_first(self, name, value):
        self.store.reached()
        return self.store.setdefault(name, value)

    def take(self, names, seconds):
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not {*names} <= {*self.store}:
            self.store.reached()
            time.sleep(0.01)
        self.store.reached()
        return [self.store.get(name) for name in names]

    def look(self, names, perhaps):
        self.store.reached()
        return [self.store[name] for name in names] + [
            self.store[name] for name in [perhaps] if name in self.store
        ]

    def drop(self, name):
        self.store.pop(name, None)

    ranks = make_wire = None


Process.__abstractmethods__ = frozenset()


@contextmanager
def beside(call, *arguments, **options):
    """What another process calls meanwhile; afterwards the list has what that returned."""
    found = []
    thread = threading.Thread(target=lambda: found.append(call(*arguments, **options)))
    thread.start()
    yield found
    thread.join()


@pytest.fixture
def store():
    return Store()


@contextmanager
def met(store, count):
    """Processes that have met."""
    found = [Process(me, store, count=count) for me in range(count)]
    with ExitStack() as others:
        for process in found[1:]:
            others.enter_context(beside(process.__enter__))
        found[0].__enter__()
    yield found
    for process in found:
        process.__exit__(None, None, None)


@pytest.fixture
def two(store):
    with met(store, 2) as found:
        yield found


@pytest.fixture
def three(store):
    with met(store, 3) as found:
        yield found


def test_what_the_first_says_stays_until_all_have_read_it(two):
    # Was: it did not wait for the others, and what it said eight calls before was dropped.
    one, other = two
    other.patience, numbers = 5.0, [*range(20)]
    with beside(lambda: [one.from_first(lambda n=n: n) for n in numbers]) as found:
        time.sleep(0.2)  # it has said all that it says before the other reads anything
        assert [other.from_first(list) for _ in numbers] == numbers
    assert found == [numbers]


def test_what_a_process_said_before_it_failed_counts(two):
    one, other = two
    other._tell(7, "")
    other._agreed(RunError("in the next call"))
    one._look()
    assert one.share(None) == [None, 7]
    with pytest.raises(RunError, match="in the next call"):
        one.share(None)


def test_a_call_that_others_do_not_make_is_refused_and_can_be_followed_by_theirs(two):
    one, other = two
    told = "process 1 is at save, but process 0 at fit: make the"
    with beside(other.share, 1, "save") as found:
        with pytest.raises(ValueError, match=told):
            one.share(0, "fit", early=True)
        assert one.share(0, "save") == [0, 1]
    assert found == [[0, 1]]


def test_another_call_is_refused_though_one_has_not_come_yet(three, monkeypatch):
    monkeypatch.setattr(clusters, "LEAVING", 0.1)
    one, other, last = three

    one._tell(0, "fit")
    with pytest.raises(ValueError, match="process 0 is at fit, but process 2 at save"):
        last.share(2, "save")
    with beside(last.share, 2, "fit") as found:
        assert other.share(1, "fit") == [0, 1, 2]
    assert found == [[0, 1, 2]] == [one._heard(range(3), "fit")]


def test_the_patience_with_one_is_over_when_it_has_come(three, monkeypatch):
    # Was: another one that came later was refused at once.
    monkeypatch.setattr(clusters, "LEAVING", 1.0)
    one, other, last = three
    other._tell(1, "fit")
    with beside(one.share, 0, "save") as found:
        time.sleep(0.5)
        other._withdraw()
        other._tell(1, "save")
        time.sleep(1.0)
        last._tell(2, "fit")
        time.sleep(0.5)
        last._withdraw()
        last._tell(2, "save")
    assert found == [[0, 1, 2]]


def test_what_only_the_first_needs_is_told_to_it_alone(two, monkeypatch):
    def outcome(row):
        return Outcome(row, 0, {}, weights={row: "large"}, steps={row: ()})

    monkeypatch.setattr(Threads, "collect", lambda self, call: [outcome(self.me)])
    one, other = two
    with beside(other.collect) as found:
        mine = one.collect()
    assert [of.weights for of in mine] == [{0: "large"}, {1: "large"}]
    assert [of.weights for of in found[0]] == [{1: "large"}, {}]


def test_a_call_that_one_does_not_make_is_given_up_in_all(two):
    one, other = two
    one.wire, one.timeout = SimpleNamespace(abort=list, close=list), 0.3
    told = r"process 1 has not made the call within 0\.3 s: make it in all"
    with pytest.raises(RunError, match=told):
        one.share(True, "fit", early=True)
    other.share(True, "fit", early=True)
    with pytest.raises(RunError, match=told):
        other.share(True, "fit", early=True)


def test_one_that_leaves_with_an_error_tells_it(two):
    one, other = two
    error = RunError("it has ended before")
    one.__exit__(RunError, error, None)
    with pytest.raises(RunError, match="it has ended before"):
        other.share(None, "the end")


def test_all_raise_the_first_failure_and_its_own_keeps_the_cause(two):
    one, other = two
    mine, theirs = RunError("the first"), RunError("the second")
    assert one._agreed(mine) is mine
    assert str(other._agreed(theirs)) == "the first"


def test_who_only_lost_a_message_lets_others_tell_first(two, monkeypatch):
    monkeypatch.setattr(clusters, "LEAVING", 1.0)
    one, other = two
    secondary = RunError("lost")
    secondary.__cause__ = Lost()
    with beside(one._agreed, secondary) as found:
        other._agreed(RunError("what happened"))
    assert str(found[0]) == "what happened"


def test_an_error_in_one_ends_the_others_wait(two):
    one, other = two
    other.__exit__(ZeroDivisionError, ZeroDivisionError("by design"), None)
    with pytest.raises(RunError, match="process 1: ZeroDivisionError: by design"):
        one.share(None)


def test_a_store_that_hangs_ends_a_run_in_time(two, store, monkeypatch):
    monkeypatch.setattr(clusters, "LEAVING", 0.1)
    one, _ = two
    store.there.clear()
    one.patience = 0.5
    time.sleep(0.6)
    with pytest.raises(RunError, match=r"no action ended within 0.5 s: process 0 \(not in this"):
        one.watch()
    error = RunError("no action ended")
    assert one._agreed(error) is error  # nobody can be told
    store.there.set()


def test_a_store_that_is_gone_was_process_0s(two, store):
    _, other = two
    store.error = Lost("gone")
    deadline = time.monotonic() + 10
    while not other.failure and time.monotonic() < deadline:
        time.sleep(0.01)
    told = "process 0 disconnected; it was at: process 0 (not in this run yet)"
    assert str(other.failure) == told


def test_who_does_not_come_is_named_and_the_next_call_meets(store):
    one = Process(0, store, timeout=0.2)
    with pytest.raises(RunError, match=r"process 1 has not made the call within 0\.2 s: make"):
        one.__enter__()
    assert not [name for name in store if "/met/" in name]


def test_another_schedule_is_refused(store):
    def enter(process):
        with pytest.raises(ValueError, match="process 1 runs a different schedule from process 0"):
            process.__enter__()
        return process.me

    one, other = (Process(me, store, call=f"call {me}") for me in range(2))
    with beside(enter, other) as found:
        enter(one)
    assert found == [1]
