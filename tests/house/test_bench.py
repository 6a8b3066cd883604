"""The scripts in benchmarks/, in tiny sizes: structure and relations, no absolute times."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import tests.jax_setup  # isort: skip  # noqa: F401
import faults
import job
import measure
import peers
import predict
import run
import search
import wire

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SCRIPTS = {path.name for path in BENCHMARKS.glob("*.py") if "__main__" in path.read_text()}
GUARD = 60  # seconds within which any fault has to be reported


@pytest.fixture(scope="module")
def tables():
    return tables_of(run.report(1, (2,)))


def tables_of(page):
    """Section -> rows of its table."""
    sections = {}
    for section in page.split("\n## ")[1:]:
        lines = [line for line in section.splitlines() if line.startswith("|")]
        cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
        assert all(len(row) == len(cells[0]) for row in cells)
        sections[section.splitlines()[0]] = [
            dict(zip(cells[0], row, strict=True)) for row in cells[2:]
        ]
    return sections


def numbers(text):
    """The median of `median (least-most)`; a nan is in no order."""
    middle, least, most = (
        float(x) for x in re.fullmatch(r"(\S+) \((\S+?)(?:-| to )(\S+)\)", text).groups()
    )
    assert least <= middle <= most
    return middle


@pytest.mark.thorough
def test_beside_others():
    """Each library that has the schedule, on each model; ratios are those of the medians shown."""
    case = peers.DEFAULT.cases[1]
    sizes = peers.Sizes(cases=(case,), devices=(2,), microbatches=4, batches=2)
    found = peers.rows(1, sizes)
    assert [row[2:4] for row in found] == [
        (name, f"{library} / {backend}") for name, backend, library in peers.BESIDE
    ]
    for row in found:
        ours, theirs = map(numbers, row[4:6])
        assert min(ours, theirs) > 0
        assert float(row[6].split()[0]) == pytest.approx(ours / theirs, abs=0.02, rel=0.02)
        assert float(row[7]) > 0


@pytest.mark.thorough
def test_messages_beside_torchs():
    """Every case has its row; a ratio is of the times that stand beside it."""
    tables = tables_of(
        wire.report(
            1,
            wire.Sizes(
                cases=wire.DEFAULT.cases[1:],
                devices=(2,),
                schedules=("gpipe", "interleaved"),
                microbatches=4,
                batches=2,
                empty=4,
            ),
        )
    )
    overhead = tables["Overhead of an empty action"]
    assert len(overhead) == 15
    assert all(numbers(row["µs per action"]) > 0 for row in overhead)
    beside = tables["Beside torch.distributed.pipelining"]
    assert [(row["schedule"], row["started by"]) for row in beside] == [
        (name, by)
        for name in ("pipedream_flush", "gpipe", "interleaved")
        for by in ("pipelab", "torchrun")
    ]
    for row in beside:
        ours, theirs = numbers(row["pipelab (ms)"]), numbers(row["torch (ms)"])
        assert numbers(row["ratio"]) == pytest.approx(ours / theirs, abs=0.02, rel=0.02)
        assert numbers(row["A/A"]) > 0
        more = row["uncounted"], row["a Trainer"]
        assert all(map(numbers, more)) if row["started by"] == "torchrun" else more == ("-", "-")


@pytest.mark.thorough
def test_what_takes_time_takes_some(tables):
    for row in tables["Launch"]:
        assert float(row["first run (s)"]) > numbers(row["following runs (s)"]) > 0


@pytest.mark.thorough
def test_faults_under_every_launcher_are_told_in_time_and_leave_nothing():
    sizes = faults.Sizes(faults=(faults.RAISES, faults.TRANSFER), parcel=1_000_000, timeout=20.0)
    rows = tables_of(faults.report(1, sizes))["Under every launcher"]
    found = {(row["fault"], row["launcher"]): row for row in rows}
    others = faults.LAUNCHERS[1:]
    expected = [(faults.RAISES, "threads"), *((f, by) for f in sizes.faults for by in others)]
    assert sorted(found) == sorted(expected)
    for (_, launcher), row in found.items():
        assert numbers(row["ended (s)"]) < GUARD
        assert row["left"] == ("torchelastic_*" if launcher == "torchrun" else "-")
    for launcher in faults.LAUNCHERS:
        told = found[faults.RAISES, launcher]["the error"]
        assert re.search("device 1, action 1F[01]: ZeroDivisionError: by design", told)
    told = {launcher: found[faults.TRANSFER, launcher]["the error"] for launcher in others}
    assert told["processes"] == "device 0, action 0F1: its process was killed by SIGKILL"
    assert "Elastic: rank 0: Signal 9 (SIGKILL) received" in told["torchrun"]
    assert told["jax"].startswith("process 0 disconnected; it was at: device 0")


@pytest.mark.thorough
def test_predictions_stand_beside_the_same_run_again():
    sizes = predict.Sizes(
        width=8,
        samples=2,
        layers=4,
        microbatches=2,
        targets=[predict.Target("interleaved", 4), predict.Target("gpipe", 2, (1, 3))],
        shared=[predict.Target("pipedream_flush", 4)],
    )
    page = predict.report(1, sizes)
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| ")]
    assert [row[0] for row in rows].count("| jax") == 3  # in two processes, two; in one, one
    assert "gpipe [1, 3]" in page
    assert "spread (A/A)" in page


@pytest.mark.thorough
def test_searched_schedules_are_proved_paced_and_measured():
    """A found schedule is in every table, and never slower than a named one as predicted."""
    sizes = search.Sizes(
        cases=search.CASES[:1], seconds=1, width=8, samples=2, microbatches=2, batches=2, slower=20
    )
    tables = tables_of(search.report(1, sizes))
    (proof,) = tables["How good they are"]
    assert (proof["found"], proof["bound"], float(proof["gap (%)"])) == ("27", "27", 0)
    found, *named = tables["Four uneven stages, paced"]
    assert found["schedule"] == "found" and found["check"] == "passed" and named
    assert all(float(row["predicted"]) >= float(found["predicted"]) for row in named)
    rows = tables["Four uneven stages on two devices, measured"]
    assert rows[0]["schedule"] == "found" and float(rows[0]["ratio, predicted"]) == 1
    assert all(numbers(row["ratio, measured"]) > 0 for row in rows)


@pytest.mark.thorough
def test_jax_pipelines_side_by_side():
    import jax_pipelines

    sizes = jax_pipelines.Sizes(
        width=8, samples=2, devices=2, microbatches=(2, 8), batches=3, empty=(2, 4), calls=1
    )
    page = jax_pipelines.report(1, sizes)
    overhead = tables_of(page)["Overhead of an empty action"]
    assert [row["micro-batches"] for row in overhead] == ["2", "4"]
    for row in overhead:
        assert all(numbers(row[what]) > 0 for what in ("both", "action of pipeshard"))
    rows = [
        [c.strip() for c in line.split("|")[1:-1]]
        for line in page.split("\n## ")[0].splitlines()
        if line.startswith("| ")
    ][1:]
    rows = [row for row in rows if row[0] != "---"]
    kept = {(name, int(m)): float(size.replace("-", "nan")) for m, name, _, _, size in rows}
    names = [
        "worker, gpipe",
        "worker, pipedream_flush",
        "worker, interleaved",
        "Trainer, gpipe",
        "Trainer, pipedream_flush",
        "SPMD",
        "SPMD, recomputing",
        "SPMD, circular",
        "one device",
    ]
    assert list(kept) == [(name, m) for m in (2, 8) for name in names]
    assert all(numbers(time) > 0 for _, _, time, _, _ in rows)
    assert kept["worker, gpipe", 8] == pytest.approx(
        4 * kept["worker, gpipe", 2], abs=0.02
    )  # GPipe keeps all micro-batches
    assert kept["worker, pipedream_flush", 8] == kept["worker, pipedream_flush", 2]  # 1F1B keeps p


# ---- one job on two runtimes


def test_the_job_of_two_runtimes(tmp_path):
    for of_script in job.CHANGES.values():
        for changed, changes in of_script.items():
            assert all(old in changed.read_text() for old, _ in changes)
    script = tmp_path / "script.py"
    script.write_text('"""Words.\n\nMore."""\n# a comment\nx = """a\nb"""\n\nraise ValueError(x)\n')
    assert job._lines(script) == 3
    assert job._lines(job.OURS) < job._lines(job.THEIRS)
    assert compile(job._cut_by_hand(tmp_path / "by_hand.py").read_text(), "by_hand", "exec")


# ---- the scripts


def test_make_bench_runs_every_script_and_each_has_its_page():
    makefile = (BENCHMARKS.parent / "Makefile").read_text()
    assert set(re.findall(r"python benchmarks/(\w+\.py)", makefile)) == SCRIPTS
    pages = [
        re.search(r'main\(report, "(.*?)"', (BENCHMARKS / name).read_text())[1] for name in SCRIPTS
    ]

    assert set(pages) == {path.name for path in BENCHMARKS.glob("*.md")}


@pytest.mark.thorough
def test_the_script_writes_its_page_and_prints_it(tmp_path):
    file = tmp_path / "page.md"
    options = ["--repeats", "1", "--actions", "20000", "--markdown", file]
    command = [sys.executable, BENCHMARKS / "simulate.py", *options]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    page = file.read_text()
    assert done.stdout.endswith(page)  # DeepSpeed logs to standard output when it is imported
    assert "| pipedream_flush | 16 | 256 | 8,208 |" in page
    for generator in (
        "pipelab",
        "torch.distributed.pipelining",
        "DeepSpeed TrainSchedule",
    ):
        assert f"| {generator} |" in page


@pytest.mark.parametrize("name", sorted(SCRIPTS))
def test_every_script_says_what_it_measures(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(BENCHMARKS / name), run_name="__main__")
    assert stop.value.code == 0
    said = capsys.readouterr().out
    assert "as a Markdown page" in " ".join(said.split())
    assert "--repeats" in said or name == "published.py"  # which measures nothing


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--repeats", "0"], "repeats=0: give a whole number of at least 1"),
        (["--repeats", "x"], "invalid int value: 'x'"),
        (["--markdown", "nowhere/page.md"], "nowhere/page.md: there is no folder nowhere"),
        (["--markdown", "."], ". is a folder: name a file"),
    ],
)
def test_bad_input_ends_before_anything_is_measured(arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        measure.main(lambda repeats: pytest.fail("measured"), "page.md", arguments, repeats=1)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_a_spread_is_the_median_and_the_extremes():
    assert measure.spread([0.003, 0.001, 0.0025]) == "2.50 (1.00-3.00)"
    assert measure.spread([3, 1, 2], ".0f", unit=1) == "2 (1-3)"
