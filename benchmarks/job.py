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
from statistics import median

from measure import FOLDER, in_turn, machine, main, page, paragraph, table

OURS, THEIRS = FOLDER.parent / "notebooks/scripts/finetune.py", FOLDER / "harness/finetune.py"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}
LAST = "for i in range(512)]\n"
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
    "60 steps on 2 ranks, then on 4": {OURS: (), THEIRS: ()},
}


def report(repeats: int = 5, ranks: int = 2) -> str:
    """Both scripts under torchrun, in turn: lines, losses, seconds; as a Markdown page."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        scripts = {"pipelab": OURS, "torch.distributed.pipelining": THEIRS}
        calls = [partial(_step, script, folder, ranks) for script in scripts.values()]
        turns = in_turn(calls, repeats, 0)
        rows = [
            [who, str(_lines(script)), f"{median(t for t, _ in of):.2f}", _spread(of), of[0][1]]
            for (who, script), of in zip(scripts.items(), turns, strict=True)
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
                done = folder / ("o" if script == OURS else "t")
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
            "Lines are those of code. A step's seconds are those of 60 steps less those of 20, "
            "divided by 40: starting does not count. Ours checks its first step, and not these."
        ),
        machine("torch", "transformers"),
        table(("runtime", "lines", "s a step", "spread", "losses of steps 1, 10, 20"), rows),
        paragraph("What they end with where the job changes, after as many steps, or ten more:"),
        table(("change", *scripts), refused),
    )


def _run(script: Path, folder: Path, ranks: int, steps: int) -> subprocess.CompletedProcess:
    command = [*TORCHRUN, str(ranks), script, f"--steps={steps}", f"--folder={folder}"]
    return subprocess.run(
        [*map(str, command)], capture_output=True, text=True, env=ENVIRONMENT, timeout=150
    )


def _step(script: Path, folder: Path, ranks: int) -> tuple[float, str]:
    """Seconds of a step, and the losses of some."""
    said, seconds, last = "", [], folder / ("o" if script == OURS else "t")
    for steps, where in ((20, folder / str(time.monotonic_ns())), (60, last)):
        if where.exists():
            where = folder / str(time.monotonic_ns())
        began = time.perf_counter()
        done = _run(script, where, ranks, steps)
        seconds.append(time.perf_counter() - began)
        assert done.returncode == 0, done.stderr
        said = done.stdout if steps == 20 else said
    losses = re.findall(r"step (?:1|10|20): loss ([\d.]+)", said)
    return (seconds[1] - seconds[0]) / 40, ", ".join(losses)


def _spread(of: list[tuple[float, str]]) -> str:
    times = [seconds for seconds, _ in of]
    return f"{min(times):.2f} to {max(times):.2f}"


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
    try:
        done = _run(script, folder, ranks, 70)
    except subprocess.TimeoutExpired:
        return "hangs"
    found = re.findall(r"^(?:\[rank\d\]: ?)?(\w*Error: .*)", done.stderr, re.M)
    return found[0][:110].replace("|", "\\|") if done.returncode else "trains"


if __name__ == "__main__":
    main(report, "job.md", repeats=5, ranks=2)
