"""Messages over real process groups, which take what a row of bytes has, and not what was asked."""

import random
from types import SimpleNamespace

import pytest
import torch

from pipelab import make
from pipelab.runtime.torch import groups
from pipelab.runtime.torch.processes import run_processes


def rank_job(rank):
    return SimpleNamespace(rank=rank, row=rank, where=f"rank {rank}", doing=str)


def test_messages_of_all_sizes_cross_both_ways_at_once():
    def work(job, progress):
        from pipelab.runtime.torch import groups

        me, other, cpu = job.rank, 1 - job.rank, torch.device("cpu")
        of = groups.groups_of([(0, 1)], me, cpu)
        link = groups.GroupLink(other, of[me, other], of[other, me], cpu)
        sizes = {rank: random.Random(rank) for rank in (me, other)}

        def message(rank, i):
            count = sizes[rank].choice([0, 1, 7, 1000, 2**16, 2**17 + rank, groups.MOST // 4])
            first = torch.full((count,), float(i), dtype=torch.float32)
            return {"a": first, "b": (torch.arange(i % 5), i), "c": torch.tensor(1j * i).conj()}

        found = []
        for turn in range(12):
            for i in range(turn % 4 + 1):  # some are sent before the first is read
                link.write(((me, True, i), message(me, i), float(i)))
            for i in range(turn % 4 + 1):
                key, payload, at = link.read()
                expected = message(other, i)
                same = all(torch.equal(payload[k], expected[k]) for k in "ac")
                same &= torch.equal(payload["b"][0], expected["b"][0]) and payload["b"][1] == i
                found.append((key, at) == ((other, True, i), i) and same)
            progress(turn)
        link.close()
        return found

    for found in run_processes([rank_job(0), rank_job(1)], work, 60.0):
        assert found == [True] * 30


def test_what_was_sent_may_be_written_again():
    # Was: what no row has room for was taken from the tensor when the reader asked for it.
    def work(job, progress):
        import time

        from pipelab.runtime.torch import groups

        me, other, cpu = job.rank, 1 - job.rank, torch.device("cpu")
        of = groups.groups_of([(0, 1)], me, cpu)
        link = groups.GroupLink(other, of[me, other], of[other, me], cpu)
        sent = torch.ones(groups.MOST // 2)
        link.write((0, sent, 0.0))
        sent.zero_()
        time.sleep(0.2)  # the other end has written its own again, too
        found = link.read()[1]
        link.close()
        return bool(found.eq(1).all())

    assert run_processes([rank_job(0), rank_job(1)], work, 60.0) == [True, True]


@pytest.mark.parametrize(
    ("device", "expected"),
    [("cpu", [[1, 2], [1, 2], [1, 2]]), ("meta", [[1, 2], [1, 2, 3, 4], [3, 4]])],
)
def test_ranks_close_their_groups_once_and_in_one_order(monkeypatch, device, expected):
    """On a CPU all have one each way; else, as between GPUs, every pair has two."""
    made, closed = [], []
    monkeypatch.setattr(groups, "new_group", lambda ranks: made.append(ranks) or len(made))
    monkeypatch.setattr(groups, "GroupLink", lambda *_: SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(groups.dist, "send", lambda *_: None)
    monkeypatch.setattr(groups.dist, "recv", lambda *_: None)
    monkeypatch.setattr(groups.dist, "destroy_process_group", lambda group: closed.append(group))
    table = make("gpipe", 3, 2)
    for rank in range(3):
        job = SimpleNamespace(
            schedule=table, replicas=1, replica=0, partners={}, device=device, rank=rank
        )
        made.clear(), closed.clear()
        groups.GroupWire(job, ["a", "b", "c"]).close()
        assert closed == expected[rank]


def test_replicas_add_up_gradients_in_buckets(monkeypatch):
    """Was: an all-reduce, and a copy there and back, for every weight."""
    calls = []

    def all_reduce(tensor, group):
        calls.append(tensor.nbytes)
        tensor *= 2  # two replicas with the same

    monkeypatch.setattr(groups, "BUCKET", 4000)
    monkeypatch.setattr(groups.dist, "all_reduce", all_reduce)
    wire = groups.GroupWire.__new__(groups.GroupWire)
    wire.device, wire._replicas = torch.device("cpu"), None
    parts = [torch.arange(3.0).double(), *(torch.randn(5, 10).T for _ in range(40))]
    parts += [torch.randn(4, 2, 3, 3).to(memory_format=torch.channels_last), torch.tensor(1.5)]
    kept = [part.clone() for part in parts]
    sums = wire.sum_over_replicas((0, 0), 0, parts, None)
    assert len(calls) == 4 and max(calls) < 4000 + 200
    for part, before, total in zip(parts, kept, sums, strict=True):
        assert torch.equal(part, before) and torch.equal(total, 2 * part)
        assert total.is_contiguous() and total.dtype == part.dtype
