"""One fine-tuning job, on pipelab and on torch's own runtime: python benchmarks/job.py."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from threading import Timer

from measure import FOLDER, in_turn, machine, main, page, paragraph, spread, table

OURS, THEIRS = FOLDER.parent / "notebooks/scripts/finetune.py", FOLDER / "harness/finetune.py"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1", "PYTHONUNBUFFERED": "1"}
LIMIT = 150  # seconds
STEPS, FROM, TO = 120, 20, 110  # of a run, and those between which a step's time is taken
LAST = "for i in range(512)]\n"
SPLIT = 'stages = split(layers_of(model), int(os.environ.get("WORLD_SIZE", 4)))\n'
BY_HAND = (  # in the part that the other script cuts by hand
    ("__init__(self)", "__init__(self, mine)"),
    ("if first", "if 0 in mine"),
    ("if last", "if 7 in mine"),
    ("x = self.word(x) if", 'x = self.word(x["input_ids"]) if'),
)
# What changes in the job: by script, what is replaced by what.
CHANGES: dict[str, dict[Path, tuple[tuple[str, str], ...]]] = {
    "passages in the order of their lengths, each batch as wide as its longest": {
        OURS: (
            (
                LAST,
                LAST + 'passages[32:] = sorted(passages[32:], key=lambda p: len(p["input_ids"]))\n',
            ),
            ("shuffle=True", "shuffle=False"),
        ),
        THEIRS: (
            (LAST, LAST + "passages[32:] = sorted(passages[32:], key=len)\n"),
            ("def collate(rows):\n", "def collate(rows):\n    width = max(map(len, rows))\n"),
            ("shuffle=True", "shuffle=False"),
        ),
    },
    "a short last batch, 7 samples for 8 micro-batches": {
        script: (("passages[32:]", "passages[32:71]"),) for script in (OURS, THEIRS)
    },
    f"{STEPS} steps on 2 ranks, then on 4": {OURS: (), THEIRS: ()},
}


def report(repeats: int = 5, ranks: int = 2) -> str:
    """Both scripts under torchrun, in turn: lines, losses, seconds; as a Markdown page."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        scripts = {
            "pipelab": OURS,
            "torch.distributed.pipelining": THEIRS,
            "pipelab, cut by hand": _cut_by_hand(folder / "by_hand.py"),
        }
        calls = [partial(_step, script, folder, ranks) for script in scripts.values()]
        turns = in_turn(calls, repeats, 0)
        rows = [
            [who, str(_lines(script)), spread([t for t, _ in of], ".0f"), of[0][1]]
            for (who, script), of in zip(scripts.items(), turns, strict=True)
        ]
        ours, theirs, by_hand = ([seconds for seconds, _ in of] for of in turns)
        ratios = [
            spread([a / b for a, b in zip(of, theirs, strict=True)], unit=1)
            for of in (ours, by_hand)
        ]
        refused = []
        for what, of_script in CHANGES.items():
            cells = []
            for script, changes in of_script.items():
                source = script.read_text()
                for old, new in changes:
                    assert old in source
                    source = source.replace(old, new)
                changed = folder / "changed.py"
                changed.write_text(source)
                done = folder / script.parent.name
                fresh = folder / str(time.monotonic_ns())
                ends = (fresh, ranks) if changes else (done, 2 * ranks)
                cells.append(_outcome(changed, *ends))
            refused.append([what, *cells])
    return page(
        "# One job on two runtimes",
        paragraph(
            f"Fine-tuning as `notebooks/scripts/finetune.py` does it, under torchrun on {ranks} "
            "ranks: a small Llama, tied weights, passages of 8 to 28 tokens, AdamW in two groups, "
            "warm-up and cosine, clipping, evaluation, checkpoints. `benchmarks/harness/"
            "finetune.py` does the same by hand where torch's runtime leaves it to its user. "
            "Lines are those of code. A step's milliseconds are those between the lines that tell "
            f"of steps {FROM} and {TO}, with what is evaluated and saved meanwhile; the median "
            f"(least-most) of {repeats} runs in turn. Ratios are those of one turn: below 1, ours "
            "is faster. Ours checks its first step, and not these."
        ),
        machine("torch", "transformers"),
        table(("runtime", "lines", "ms a step", "losses of steps 1, 10, 20"), rows),
        paragraph(
            "Beside torch's, a step of ours takes {} times as long, and {} with the part that the "
            "other script cuts by hand: it has no mask, and none of what transformers does before "
            "and behind its blocks.".format(*ratios)
        ),
        paragraph("What they end with where the job changes, after as many steps, or ten more:"),
        table(("change", *[*scripts][:2]), refused),
    )


def _command(script: Path, folder: Path, ranks: int, steps: int) -> list[str]:
    command = [*TORCHRUN, ranks, script, f"--steps={steps}", f"--folder={folder}"]
    return [*map(str, command)]


def _step(script: Path, folder: Path, ranks: int) -> tuple[float, str]:
    """Seconds of a step, and the losses of some."""
    said: dict[int, str] = {}
    at: dict[int, float] = {}
    where = folder / script.parent.name
    if where.exists():
        where = folder / str(time.monotonic_ns())
    command = _command(script, where, ranks, STEPS)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT) as running:
        assert running.stdout
        limit = Timer(LIMIT, running.kill)
        limit.start()
        for line in running.stdout:
            if found := re.match(r"step (\d+): loss ([\d.]+)", line):
                at[int(found[1])], said[int(found[1])] = time.perf_counter(), found[2]
        limit.cancel()
    assert running.returncode == 0, f"{script} has failed, or took more than {LIMIT} s"
    return (at[TO] - at[FROM]) / (TO - FROM), ", ".join(said[n] for n in (1, 10, 20) if n in said)


def _cut_by_hand(script: Path) -> Path:
    """Ours, with the part of the model that the other cuts by hand."""
    part = THEIRS.read_text().partition("class Part")[2].partition("\n\n# [2]")[0]
    for old, new in BY_HAND:
        assert old in part
        part = part.replace(old, new)
    source = OURS.read_text()
    assert SPLIT in source
    cut = (
        f'class Part{part}\n\ndevices = int(os.environ["WORLD_SIZE"])\n'
        "bounds = [0, *torch.tensor(uniform(8, devices)).cumsum(0).tolist()]\n"
        "stages = [Part(range(a, b)) for a, b in zip(bounds, bounds[1:])]\n"
    )
    head = "from torch import nn\nfrom pipelab.optimize.cut import uniform\n"
    source = source.replace("import torch\n", f"import torch\n{head}", 1).replace(SPLIT, cut)
    script.write_text(source)
    return script


def _lines(script: Path) -> int:
    """Lines with code: no comments, docstrings and blank ones."""
    tree = ast.parse(script.read_text())
    strings = [
        n for n in ast.walk(tree) if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)
    ]
    text = {line for n in strings for line in range(n.lineno, (n.end_lineno or n.lineno) + 1)}
    source = script.read_text().splitlines()
    return sum(
        bool(line.strip()) and not line.strip().startswith("#") and number not in text
        for number, line in enumerate(source, 1)
    )


def _outcome(script: Path, folder: Path, ranks: int) -> str:
    """What it ends with."""
    command = _command(script, folder, ranks, STEPS + 10)
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env=ENVIRONMENT, timeout=LIMIT, check=False
        )
    except subprocess.TimeoutExpired:
        return "hangs"
    found = re.findall(r"^(?:\[rank\d\]: ?)?(\w*Error: .*)", done.stderr, re.M)
    return found[0][:110].replace("|", "\\|") if done.returncode else "trains"


if __name__ == "__main__":
    main(report, "job.md", repeats=5, ranks=2)
