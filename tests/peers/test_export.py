"""Exported folders: trained from by torch's own runtime, and read by torchtitan's own parser."""

import hashlib
import json
import subprocess
import sys
from importlib.util import find_spec
from itertools import chain

import pytest

from pipelab import Costs, Schedule, make, simulate, validate
from pipelab.optimize.order import search
from pipelab.peers.export import export
from tests.conftest import thorough
from tests.support import WORKERS, torchrun


def searched(placement, uneven=True):
    """For stages that get slower and slower; the heuristics' table, without OR-Tools."""
    devices, stages = max(placement) + 1, len(placement)
    costs = Costs(forward=[1 + s / 2 for s in range(stages)] if uneven else 1)
    return search(costs, devices, 2 * devices, placement=placement, seconds=0)


def row_edited(schedule, *swaps):
    """The schedule with cells of its text swapped."""
    text = schedule.to_csv()
    for one, other in swaps:
        text = text.replace(one, "?").replace(other, one).replace("?", other)
    return Schedule.from_csv(text, name=schedule.name)


TABLES = {
    "gpipe": lambda p: make("gpipe", p, 2 * p),
    "1F1B": lambda p: make("pipedream_flush", p, 2 * p + 1),
    "interleaved": lambda p: make("interleaved", p, 2 * p, virtual=2),
    "zb_h1": lambda p: make("zb_h1", p, 2 * p + 1),
    "zb_v": lambda p: make("zb_v", p, 2 * p),
    "dualpipe_v": lambda p: make("dualpipe_v", p, 2 * p + 1),
    "searched": lambda p: searched(tuple(range(p))),
    "unequal": lambda p: searched((*range(p), 0)),
}


EQUAL = "largest difference of a gradient from one device's: 0.0"


@pytest.mark.parametrize("ranks", [2, *thorough(4)])
def test_torchs_runtime_has_one_devices_gradients(ranks, tmp_path):
    """The check sees a table that torch trains wrong, too: the last stage's forwards out of order,
    put into a folder by hand, since `export` refuses them."""
    folders = [tmp_path / name for name in TABLES]
    for folder in folders:
        schedule = TABLES[folder.name](ranks)
        uneven = [1 + s % 3 for s in range(schedule.stages)]
        plan = export(schedule, "torch", folder, layers=uneven)
        assert plan["placement"] == schedule.placement and plan["layers"] == uneven
    wrong = tmp_path / "wrong"
    plan = export(make("gpipe", ranks, 4), "torch", wrong)
    *rows, _ = make("gpipe", ranks, 4).to_torch_csv().splitlines()
    cells = ["F0", "F2", "F1", "F3", "I0", "I1", "I2", "I3", "W0", "W1", "W2", "W3"]
    text = "\n".join([*rows, ",".join(f"{ranks - 1}{cell}" for cell in cells)])
    (wrong / "schedule.csv").write_text(text)
    done = subprocess.run([sys.executable, wrong / "check.py"], capture_output=True, text=True)
    assert done.returncode and "schedule.csv is not the table" in done.stderr
    plan["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    (wrong / "plan.json").write_text(json.dumps(plan))
    scripts = [folder / "check.py" for folder in (*folders, wrong)]
    done = torchrun(ranks, WORKERS / "in_turn.py", *scripts, timeout=180)
    *said, last = done.stdout.splitlines()
    assert said == [EQUAL] * len(TABLES), done.stderr[-4000:]
    assert done.returncode and float(last.split(": ")[1]) > 1


@pytest.mark.thorough
def test_a_folder_trains(tmp_path):
    export(make("zb_v", 2, 4), "torch", tmp_path / "out", layers=[1, 2, 1, 1], samples=2)
    done = torchrun(2, tmp_path / "out" / "train.py")
    assert done.returncode == 0, done.stderr[-4000:]
    losses = [float(line.split("loss ")[1]) for line in done.stdout.splitlines()]
    assert len(losses) == 10 and losses[-1] < 0.9 * losses[0]


@pytest.mark.thorough
def test_too_few_ranks_are_told(tmp_path):
    export(make("gpipe", 2, 2), "torch", tmp_path / "out")
    assert "start 2 ranks" in torchrun(1, tmp_path / "out" / "train.py").stderr


@pytest.mark.parametrize(
    ("schedule", "engine", "problem"),
    [
        (row_edited(make("gpipe", 2, 4), ("1F1", "1F2")), "torch", r"order \[0, 2, 1, 3\]"),
        (make("pipedream", 2, 4), "torch", "updates without a flush"),
        (make("pipedream_2bw", 2, 4), "torch", "updates without a flush"),
        (make("gpipe", 2, 4, batches=2), "torch", "torch's tables hold one batch"),
        (make("gpipe", 2, 4).forward_only(), "torch", "has only forwards"),
        (make("gpipe", 2, 4).with_transfers(), "torch", "run the table without them"),
        (Schedule("idle", [*make("gpipe", 2, 4).rows, []], (0, 1), 4), "torch", "a stage"),
        (row_edited(make("gpipe", 2, 4), ("0F1", "0B3")), "torch", "0B3 comes before 0F3"),
        (searched((0, 1, 0)), "torchtitan", r"devices \(0, 1, 0\): torchtitan only knows"),
        (searched((1, 0)), "torchtitan", "torchtitan only knows"),
        (make("gpipe", 1, 4), "torchtitan", "at least two devices"),
        (make("gpipe", 2, 4), "deepspeed", "use one of torch, torchtitan"),
    ],
)
def test_what_would_be_trained_otherwise_is_refused(schedule, engine, problem, tmp_path):
    with pytest.raises(ValueError, match=problem):
        export(schedule, engine, tmp_path / "new" / "out", layers=[8])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"layers": [3]}, "4 stages for 3 layers"),
        ({"layers": [1, 2]}, "layers of 2 stages for 4"),
        ({"layers": [1, 1, 0, 1]}, "layers of stage 2=0: give a whole number"),
        ({"layers": []}, "give `layers`"),
        ({"layers": [4], "samples": 0}, "samples=0"),
        ({"layers": [10**9]}, "layers: 1,000,000,000 in all; give at most 5,000"),
        ({"layers": [4], "costs": Costs(forward=[1, 2])}, "forward"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(options, problem, tmp_path):
    with pytest.raises(ValueError, match=problem):
        export(make("zb_v", 2, 4), "torchtitan", tmp_path / "out", **options)
    assert not list(tmp_path.iterdir())


def test_torchs_stages_have_layers(tmp_path):
    with pytest.raises(ValueError, match="layers of stage 0=0: give a whole number"):
        export(make("zb_v", 2, 4), "torch", tmp_path / "out", layers=[0, 2, 2, 1])


def test_a_folder_that_is_there_is_left_alone(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(ValueError, match="name a new folder"):
        export(make("gpipe", 2, 4), "torch", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_nothing_is_left_of_a_folder_that_could_not_be_written(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules["pipelab.peers.export"].SCRIPTS, "torch", ("missing.py",))
    with pytest.raises(OSError, match=r"missing\.py"):
        export(make("gpipe", 2, 4), "torch", tmp_path / "out")
    assert not list(tmp_path.iterdir())


# ---- torchtitan


def options_of(folder):
    lines = (folder / "options.txt").read_text().splitlines()
    return dict(line.removeprefix("--").partition(" ")[::2] for line in lines)


PLACED = {
    "PipelineScheduleSingle": make("zb_h1", 2, 4),
    "PipelineScheduleMulti": make("interleaved", 2, 4, virtual=2),
    "ZBVZeroBubble": make("zb_v", 2, 4),
}


@pytest.mark.parametrize("name", PLACED)
def test_torchtitan_is_told_the_placement_by_a_schedules_name(name, tmp_path):
    schedule, folder = PLACED[name], tmp_path / "out"
    plan = export(schedule, "torchtitan", folder, layers=[6], samples=3)
    found = options_of(folder)
    prefix = "parallelism.pipeline_parallel"
    assert found[f"{prefix}_schedule"] == name
    assert found[f"{prefix}_degree"] == "2"
    assert found[f"{prefix}_schedule_csv"] == str(folder / "schedule.csv")
    assert (found[f"{prefix}_microbatch_size"], found["training.local_batch_size"]) == ("3", "12")
    stages = [part.split(",") for part in found["parallelism.module_fqns_per_model_part"].split()]
    layers = [f"layers.{i}" for i in range(6)]
    assert [*chain(*stages)] == ["tok_embeddings", *layers, "norm", "lm_head"]
    counts = [sum(module.startswith("layers.") for module in stage) for stage in stages]
    assert counts == plan["layers"] == json.loads((folder / "plan.json").read_text())["layers"]


def test_torchtitans_last_stage_has_whole_backwards(tmp_path):
    """Its chunked loss loses a gradient of the final norm otherwise."""
    schedule, costs = make("zb_v", 2, 4), Costs(weight_grad=3)
    layers = [0, 2, 2, 0]  # at the ends an embedding and a head alone
    plan = export(schedule, "torchtitan", tmp_path / "out", layers=layers, costs=costs)
    text = (tmp_path / "out" / "schedule.csv").read_text()
    table = validate(Schedule.from_torch_csv(text))
    assert {a.kind.name for a in schedule.actions if a.stage == 3} == {*"FIWU"}
    assert {a.kind.name for a in table.actions if a.stage == 3} == {*"FBU"}
    others = [[a for a in row if a.stage < 3] for row in table.rows]
    assert others == [[a for a in row if a.stage < 3] for row in schedule.rows]
    makespans = {"given": simulate(schedule, costs), "exported": simulate(table, costs)}
    assert plan["makespan"] == {key: timeline.makespan for key, timeline in makespans.items()}
    assert plan["makespan"]["given"] < plan["makespan"]["exported"]


@pytest.mark.thorough
def test_torchtitans_table_has_one_devices_gradients(tmp_path):
    layers, costs = [0, 2, 2, 0], Costs(weight_grad=3)
    export(make("zb_v", 2, 4), "torchtitan", tmp_path / "out", layers=layers, costs=costs)
    done = torchrun(2, tmp_path / "out" / "check.py")
    assert done.returncode == 0, done.stderr[-4000:]


def test_torchtitans_options_are_words(tmp_path):
    with pytest.raises(ValueError, match="cannot contain spaces"):
        export(make("gpipe", 2, 4), "torchtitan", tmp_path / "my folder", layers=[4])


def torchtitan_job():
    """What torchtitan's parser fills in: the parts of its Trainer.Config that are told here."""
    from dataclasses import field, make_dataclass

    from torchtitan.config import ParallelismConfig, TrainingConfig

    parts = {"parallelism": ParallelismConfig, "training": TrainingConfig}
    fields = [(key, kind, field(default_factory=kind)) for key, kind in parts.items()]
    return make_dataclass("Job", [*fields, ("hf_assets_path", str, ".")])()


@pytest.mark.skipif(not find_spec("torchtitan"), reason="torchtitan is not installed")
@pytest.mark.parametrize("name", PLACED)
def test_torchtitans_own_parser_reads_the_options(name, tmp_path):
    from torchtitan.config import ConfigManager

    schedule, folder = PLACED[name], tmp_path / "out"
    export(schedule, "torchtitan", folder, layers=[1, 2, 1, 2][: schedule.stages], samples=3)
    words = (folder / "options.txt").read_text().split()
    job = ConfigManager().parse_args(["--module", __name__, "--config", "torchtitan_job", *words])
    parallel = job.parallelism
    assert parallel.pipeline_parallel_degree == 2
    assert parallel.pipeline_parallel_schedule_csv == str(folder / "schedule.csv")
    assert parallel.pipeline_parallel_layers_per_stage is None
    assert job.training.local_batch_size == parallel.pipeline_parallel_microbatch_size * 4 == 12
    assert job.training.disable_cuda_graphs
    parts = parallel.module_fqns_per_model_part
    assert parts[0] == ["tok_embeddings", "layers.0"]
    assert parts[-1][-2:] == ["norm", "lm_head"] and len(parts) == schedule.stages
    style = "v" if parallel.pipeline_parallel_schedule == "ZBVZeroBubble" else "loop"
    from torch.distributed.pipelining._utils import generate_stage_to_rank_mapping

    placed = generate_stage_to_rank_mapping(2, schedule.stages, style=style)
    assert tuple(placed.values()) == schedule.placement
