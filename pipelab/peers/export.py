"""Export: a schedule as a folder from which another engine trains.

schedule.csv  the table, as torch loads it ("compute_only")
plan.json     sizes, placement, layers a stage, simulated makespans, the table's hash
check.py      one step by the table in torch's runtime, on CPU toys, against one device
train.py      for torch: trains by the table under torchrun
options.txt   for torchtitan 0.3 (on torch 2.14 or newer): its command-line options

torch's runtime trains some tables wrong without an error, and torchtitan knows only three
placements: `export` rejects what they cannot train. torchtitan's chunked loss loses a gradient of
the final norm if the last stage splits its backward, so its I and W are written as B.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Literal

from pipelab.optimize.cut.profiles import MOST_LAYERS
from pipelab.optimize.cut.uniform import uniform
from pipelab.predict.costs import Costs
from pipelab.predict.simulate import simulate
from pipelab.runtime.drafts import draft_of, writing
from pipelab.runtime.prepare import check_table
from pipelab.table.action import Kind, ScheduleError, check_counts
from pipelab.table.placement import check_placement, loop_placement, v_placement
from pipelab.table.schedule import Schedule
from pipelab.table.validate import validate

SCRIPTS = {"torch": ("check.py", "train.py"), "torchtitan": ("check.py",)}


def export(
    schedule: Schedule,
    engine: Literal["torch", "torchtitan"],
    folder: str | Path,
    *,
    layers: Sequence[int] = (),
    samples: int = 1,
    costs: Costs | None = None,
) -> dict[str, Any]:
    """Write a new folder from which `engine` trains by the schedule; returns what plan.json says.

    layers   of each stage, or one number to divide evenly (torch: default one per stage)
    samples  of a micro-batch
    costs    of the stages, to simulate by (default: unit costs)

    Raises ScheduleError for a table that the engine cannot train correctly, ValueError for layers
    that do not fit it or for a folder that exists; then nothing is written.
    """
    if engine not in SCRIPTS:
        raise ValueError(f"engine={engine!r}: use one of {', '.join(SCRIPTS)}")
    _check(schedule)
    titan = engine == "torchtitan"
    table = _whole_last_stage(schedule) if titan else schedule
    csv = table.to_torch_csv()
    layers = _shared_out(layers or ([] if titan else [table.stages]), table, titan)
    (samples,) = check_counts(samples=samples)
    target = Path(folder).absolute()
    if os.path.lexists(target):
        raise ValueError(f"{folder} already exists: name a new folder")
    plan = {
        "engine": engine,
        "schedule": table.name,
        **{name: getattr(table, name) for name in ("devices", "stages", "microbatches")},
        "placement": table.placement,
        "layers": layers,
        "samples": samples,
        "makespan": {
            "given": float(simulate(schedule, costs).makespan),
            "exported": float(simulate(table, costs).makespan),
        },
        "sha256": hashlib.sha256(csv.encode()).hexdigest(),
    }
    files = {"schedule.csv": csv, "plan.json": json.dumps(plan, indent=1) + "\n"}
    if titan:
        files["options.txt"] = _titan_options(table, layers, samples, target)
    with draft_of(target) as draft:
        with writing(draft):
            for name, text in files.items():
                (draft / name).write_text(text)
        for name in SCRIPTS[engine]:
            shutil.copyfile(Path(__file__).with_name("scripts") / name, draft / name)
    return plan


def _check(schedule: Schedule) -> None:
    """ScheduleError or ValueError for a table that torch's runtime does not train as we do."""
    validate(schedule)
    check_table(schedule, schedule.model_stages, schedule.batches, training=True)
    check_placement(schedule.placement, schedule.devices, each=True)
    last = schedule.stages - 1
    order = [k for stage, kind, k in schedule.actions if stage == last and kind is Kind.F]
    if order != sorted(order):
        raise ScheduleError(
            f"{schedule.name}: the last stage's forwards run in the order {order}: torch assumes "
            "that they are in order, and would stop or train wrong; put them in order"
        )


def _shared_out(layers: Sequence[int], table: Schedule, titan: bool) -> list[int]:
    """Layers of each stage."""
    if not layers:
        raise ValueError("torchtitan cuts the model by layers: give `layers`, their number")
    if sum(layers) > MOST_LAYERS:
        raise ValueError(f"layers: {sum(layers):,} in all; give at most {MOST_LAYERS:,}")
    if len(layers) == 1:
        return uniform(layers[0], table.stages)
    if len(layers) != table.stages:
        raise ValueError(
            f"layers of {len(layers)} stages for {table.stages}: give one number per stage, or one "
            "in all"
        )
    # torchtitan's first stage has the embedding besides, and its last one the head.
    ends = {0, table.stages - 1} if titan and table.stages > 1 else set()
    found = {f"layers of stage {s}": n for s, n in enumerate(layers) if n or s not in ends}
    check_counts(**found)
    return [*layers]


# ---- torchtitan


def _whole_last_stage(schedule: Schedule) -> Schedule:
    """The last stage's I and W as a B where I stood."""
    last = schedule.stages - 1
    rows = [
        [
            action._replace(kind=Kind.B) if action[:2] == (last, Kind.I) else action
            for action in row
            if action[:2] != (last, Kind.W)
        ]
        for row in schedule.rows
    ]
    return replace(schedule, rows=rows)


def _titan_options(table: Schedule, layers: list[int], samples: int, folder: Path) -> str:
    """Its options, one a line; ScheduleError for another placement than its three."""
    p = table.devices
    placements = {
        "PipelineScheduleSingle": loop_placement(p),
        "PipelineScheduleMulti": loop_placement(p, table.stages // p),
        "ZBVZeroBubble": v_placement(p),
    }
    names = [name for name, placement in placements.items() if placement == table.placement]
    if p == 1 or not names:
        raise ScheduleError(
            f"{table.name} has its stages on devices {table.placement}: torchtitan only knows one "
            "stage per device, loops and the V, on at least two devices; export it for torch"
        )
    if len(str(folder).split()) > 1:
        raise ValueError(
            f"{folder}: torchtitan's options cannot contain spaces: name a folder without them"
        )
    # Its words for a Llama's modules, stage by stage.
    bounds = pairwise([0, *accumulate(layers)])
    parts = [[f"layers.{i}" for i in range(*bound)] for bound in bounds]
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", "lm_head"]
    options = {
        "parallelism.pipeline_parallel_degree": p,
        "parallelism.pipeline_parallel_schedule": names[0],
        "parallelism.pipeline_parallel_schedule_csv": folder / "schedule.csv",
        "parallelism.pipeline_parallel_microbatch_size": samples,
        "parallelism.module_fqns_per_model_part": " ".join(map(",".join, parts)),
        "training.local_batch_size": samples * table.microbatches,
        "training.disable_cuda_graphs": "",
    }
    return "".join(f"--{name} {value}".strip() + "\n" for name, value in options.items())
