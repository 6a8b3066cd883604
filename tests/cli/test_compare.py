"""Schedules side by side: what is shown is what simulating and running them says."""

import json
import re
import signal
from functools import partial

import pytest
from tqdm import std

import pipelab
from pipelab import Costs, simulate
from pipelab.cli import main
from pipelab.cli.compare import compared, comparison_text, run_in_turn
from pipelab.optimize.order import bound
from pipelab.predict.costs import CostError
from pipelab.predict.memory import memory
from pipelab.schedules import SCHEDULES, make_all, make_for
from pipelab.show import bar

COSTS = Costs(forward=[1, 2], input_grad=2, weight_grad=1, weights=8, activations=4)


def compare(costs, p, m, names=None, batches=2):
    sizes = {"virtual": 2, "batches": batches}
    if names is None:
        made, _ = make_all(p, m, costs, **sizes)
        return [compared(*each) for each in made.values()]
    return [compared(*make_for(name, p, m, costs, **sizes)) for name in names]


def test_every_schedule_is_simulated_on_the_same_model():
    entries = compare(COSTS, 2, 4, batches=3)
    assert [e["schedule"] for e in entries] == list(SCHEDULES)
    for entry in entries:
        schedule, costs = make_for(entry["schedule"], 2, 4, COSTS, virtual=2, batches=3)
        again = simulate(schedule, costs)
        assert entry["predicted"]["makespan"] == again.makespan
        assert entry["predicted"]["peak"] == memory(again, costs).peak()
        # The work of a device is the same in all; of two copies each device has both stages.
        work = [3 * 4 * 4, 3 * 4 * 5]
        assert again.busy == (work if schedule.copies == 1 else [sum(work) / 2] * 2)


@pytest.mark.parametrize(
    ("name", "p", "staleness"),
    [("gpipe", 4, 0), ("pipedream", 4, 3), ("pipedream_2bw", 4, 1), ("interleaved", 2, 0)],
)
def test_staleness_is_the_papers(name, p, staleness):
    (entry,) = compare(Costs(), p, 4, names=[name], batches=4)
    assert entry["staleness"] == staleness


def test_the_table_has_a_row_each_and_no_empty_columns():
    entries = compare(COSTS, 2, 4, names=["gpipe", "pipedream"])
    head, *rows, note = comparison_text(entries).splitlines()
    columns = ["schedule", "seconds", "bubble", "MiB", "gap", "versions", "staleness"]
    assert head.split() == columns
    assert note.startswith("gap: how far the time of a batch is above a lower bound")
    assert [row.split()[0] for row in rows] == ["gpipe", "pipedream"]
    assert rows[1].split()[-2:] == ["2", "1"]


def test_compare_runs_every_schedule_and_shows_the_spread(tmp_path, capsys):
    file = tmp_path / "all.svg"
    sizes = ["--devices", "2", "--batches", "1", "--repeats", "2"]
    assert main(["compare", *sizes, "--json", "--plot", str(file)]) == 0
    found = json.loads(capsys.readouterr().out)["schedules"]
    of_sequences = {"seq1f1b", "terapipe"}  # an mlp has none
    assert {x["schedule"] for x in found} == set(SCHEDULES) - of_sequences
    assert all(x["check"] and x["measured"]["makespan"] > 0 for x in found)
    weights = {x["schedule"]: sum(p["weights"] for p in x["measured"]["at_peak"]) for x in found}
    of_copies = {weights.pop(name) for name in ("chimera", "dualpipe")}
    assert of_copies == {2 * one for one in weights.values()}  # one model
    assert all(name in file.read_text() for name in set(SCHEDULES) - of_sequences)
    for entry in found:
        least, most = entry["spread"]
        assert entry["repeats"] == 2
        assert 0 < least <= entry["measured"]["makespan"] <= most


def test_compare_predicts_for_a_profile(tmp_path, capsys):
    file = tmp_path / "p.json"
    layers = [{"name": str(i), "forward": 1, "kind": "x"} for i in range(4)]
    file.write_text(json.dumps({"layers": layers}))
    command = ["compare", "--profile", str(file), "--devices", "2", "--microbatches", "4"]
    assert main([*command, "--batches", "1"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^gpipe +10 +20.0% +0 +4 +yes +0.0% ", out, re.M) and "measured" not in out
    assert main([*command, "--plot", str(tmp_path)]) == 2
    assert "is a folder: name a file" in capsys.readouterr().err


def test_the_gap_is_that_of_a_batch_under_the_memory_that_the_schedule_uses():
    """Equal stages, 4 devices, 8 micro-batches: 27 is the least with backwards that are split."""
    names = ["gpipe", "pipedream_flush", "inter_layer", "interleaved", "pipedream"]
    found = {e["schedule"]: e for e in compare(Costs(), 4, 8, names=names, batches=3)}
    assert found["gpipe"]["gap"] == found["pipedream_flush"]["gap"] == pytest.approx(33 / 27 - 1)
    alone = bound(Costs(), 4, 8, memory=1)
    assert found["inter_layer"]["gap"] == pytest.approx(8 * 12 / alone.makespan - 1)
    chunks = Costs().split(2)
    least = bound(chunks, 4, 8, memory=11 / 2, placement=(0, 1, 2, 3) * 2)
    assert found["interleaved"]["gap"] == pytest.approx(28.5 / least.makespan - 1)
    # Three batches without a flush are one large batch.
    least = bound(Costs(), 4, 24, memory=4)
    assert found["pipedream"]["gap"] == pytest.approx(
        found["pipedream"]["predicted"]["makespan"] / least.makespan - 1
    )


def test_schedules_that_there_are_not_are_left_out(tmp_path, capsys):
    file = tmp_path / "p.json"
    file.write_text(json.dumps({"layers": [{"name": str(i), "forward": 1} for i in range(8)]}))
    sizes = ["--devices", "4", "--microbatches", "2", "--batches", "1"]
    assert main(["compare", "--profile", str(file), *sizes]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-1].startswith("left out: pipedream_2bw needs microbatches >= devices")
    rows = re.split(r"^schedule .*|^gap: .*", out, flags=re.M)[1].split("\n")[1:-1]
    assert {row.split()[0] for row in rows} == set(SCHEDULES) - {"pipedream_2bw"}


def test_costs_per_link_leave_interleaved_out(tmp_path, capsys):
    """Its chunks have a link from the last device to the first, of which nothing is known."""
    costs = Costs(transfer=[0.5, 0.5])
    assert "interleaved" not in [e["schedule"] for e in compare(costs, 3, 4)]
    reason = make_all(3, 4, costs, virtual=2)[1]["interleaved"]
    assert reason.startswith("interleaved: transfer per link has no value")
    with pytest.raises(CostError, match="transfer per link"):
        compare(costs, 3, 4, names=["interleaved"])
    assert (
        "interleaved" in make_all(2, 4, Costs(transfer=[0.5]), virtual=2)[0]
    )  # one pair of devices
    assert len(compare(Costs(transfer=0.5), 2, 4)) == len(SCHEDULES)
    assert "pipedream_2bw" not in [e["schedule"] for e in compare(Costs(), 4, 2)]
    file = tmp_path / "p.json"
    file.write_text(json.dumps({"layers": [{"name": str(i), "forward": 1} for i in range(3)]}))
    assert (
        main(["compare", "--profile", str(file), "--devices", "3", "--costs", "transfer=1,2"]) == 0
    )
    assert "left out: interleaved: transfer per link" in capsys.readouterr().out


def test_runs_are_repeated_in_turn_and_what_there_is_survives_an_interrupt(capsys):
    order = []

    def run(table):
        order.append(table)
        if len(order) == 5:
            raise KeyboardInterrupt
        return len(order)

    assert run_in_turn({"a": "A", "b": "B"}, run, 3) == {"a": [1, 3], "b": [2, 4]}
    assert order == ["A", "B", "A", "B", "A"]
    assert "interrupted in run 5 of 6" in capsys.readouterr().err
    order[:] = "A", "B", "A"
    assert run_in_turn({"a": "A", "b": "B"}, run, 2) == {"a": [4]}  # no list for one that has none
    assert "interrupted in run 2 of 4" in capsys.readouterr().err
    order.clear()
    assert run_in_turn({"a": "A", "b": "B"}, run, 2) == {"a": [1, 3], "b": [2, 4]}
    assert capsys.readouterr().err == ""


def test_a_bar_names_the_schedule_that_runs(capsys, monkeypatch):
    monkeypatch.setattr(bar, "seen", lambda: True)
    monkeypatch.setattr("tqdm.auto.tqdm", partial(std.tqdm, disable=False))
    shown = []

    def run(table):
        shown.append(capsys.readouterr().err.split("\r")[-1])

    run_in_turn({"gpipe": "A", "zb_h1": "B"}, run, 2)
    assert [re.findall(r"^(\w+): .* (\d/4) ", each) for each in shown] == [
        [("gpipe", "0/4")],
        [("zb_h1", "1/4")],
        [("gpipe", "2/4")],
        [("zb_h1", "3/4")],
    ]
    assert capsys.readouterr().err.endswith("\r")  # nothing of it is left


def test_an_interrupt_before_any_run_has_ended_is_one_line_and_status_130(capsys, monkeypatch):
    runs, run = [], pipelab.run

    def third(*arguments, **options):  # after the two that its costs are from
        runs.append(1)
        if len(runs) == 3:
            signal.raise_signal(signal.SIGINT)
        return run(*arguments, **options)

    monkeypatch.setattr(pipelab, "run", third)
    assert main(["compare", "--devices", "2", "--batches", "1"]) == 130
    assert capsys.readouterr() == ("", "pipelab compare: interrupted\n")
