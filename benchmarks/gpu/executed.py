"""What benchmarks/gpu checks and executes, on a GPU or in its rehearsal on the CPU."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from gpu.cases import CASES, processes
from gpu.measured import Failed, Place, Skip, one_and_four
from measure import FOLDER, paragraph, table

ROOT = FOLDER.parent


def failure(message: str) -> str:
    """The first line of an error, for a cell of a table."""
    return "FAILED: " + message.partition("\n")[0].replace("|", "\\|")


def last_error(text: str) -> str:
    """The last line that names an error, of what a process wrote."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)  # without colours
    return ["it wrote no error", *re.findall(r"^\S*[Ee]rror: .*", plain, re.MULTILINE)][-1]


# ---- what is checked


def checked(place: Place) -> list[str]:
    """Runs of many kinds, each compared with its reference."""
    rows, failed = [], False
    for name, case in CASES.items():
        try:
            check = case(place.device).check
            verdict = "passed" if check.passed else f"FAILED: {check}"
            rows.append((name, verdict, f"{check.ratio:.2f}"))
            failed = failed or not check.passed
        except ModuleNotFoundError as missing:
            rows.append((name, f"skipped: it needs {missing.name}", ""))
        except Exception as error:
            failed = True
            rows.append((name, failure(f"{type(error).__name__}: {error}"), ""))
    parts = [
        paragraph(
            "Every loss, gradient and weight against the reference; `ratio` is how many times its "
            "rounding the worst tensor is off (at most 3)."
        ),
        table(("run", "check", "ratio"), rows),
    ]
    if failed:
        raise Failed(parts)
    return parts


def launched(place: Place) -> list[str]:
    """Two ranks: over NCCL where each has a GPU of its own."""
    if place.on_gpu and torch.cuda.device_count() < 2:
        raise Skip("NCCL between two GPUs: one GPU here")
    pair = ["cuda:0", "cuda:1"] if place.on_gpu else ["cpu", "cpu"]
    began = time.perf_counter()
    check = processes(pair).check
    if not check.passed:
        raise RuntimeError(f"two processes: the check failed: {check}")
    rows = [("two processes of one call", "passed", f"{time.perf_counter() - began:.1f}")]
    for what, sizes in (("torchrun, two stages", (2, 1)), ("torchrun, two replicas", (1, 2))):
        devices, replicas = map(str, sizes)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", "2", "-m", "pipelab", "run", "pipedream_flush", "--json"]
        command += ["--devices", devices, "--replicas", replicas, "--microbatches", "4"]
        began = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        if done.returncode:
            raise RuntimeError(f"{what}: {last_error(done.stderr)}")
        verdict = json.loads(done.stdout)["check"]
        if not verdict["passed"]:
            raise RuntimeError(f"{what}: the check failed: {verdict}")
        rows.append((what, "passed", f"{time.perf_counter() - began:.1f}"))
    wire = "NCCL" if place.on_gpu else "gloo, as without GPUs"
    return [
        f"1F1B on two ranks, over {wire}.",
        table(("ranks", "check", "s, launch included"), rows),
    ]


def jax_stages(place: Place) -> list[str]:
    """The jax backend: four stages on one device, checked, and beside one stage."""
    from gpu.jax_stages import on_one_device

    device, sizes = _jax_devices(place)[0], place.sizes
    check = on_one_device(device, 4, sizes.microbatches, checked=True).check
    if not check.passed:
        raise RuntimeError(f"the check failed: {check}")

    def seconds(stages: int) -> float:
        done = on_one_device(device, stages, sizes.microbatches, checked=False)
        return statistics.median(done.timeline.batch_seconds())

    return [
        paragraph(
            f'`run(backend="jax")` on {device}: the check of four stages passed (ratio '
            f"{check.ratio:.2f}). Stages wait for what they compute."
        ),
        *one_and_four(seconds, sizes.repeats),
    ]


def pipeshard(place: Place) -> list[str]:
    """A pipeline of two meshes, which have to be different devices."""
    import jax

    from gpu.jax_stages import two_meshes

    devices = [*_jax_devices(place), *(jax.devices("cpu") if place.on_gpu else [])]
    check = two_meshes(devices[:2])
    if not check.passed:
        raise RuntimeError(f"the check failed: {check}")
    return [f"Meshes of {devices[0]} and {devices[1]}: the check passed ({check.ratio:.2f})."]


def _jax_devices(place: Place) -> list[Any]:
    import jax

    if place.on_gpu and jax.default_backend() != "gpu":
        raise Skip(f"JAX {jax.__version__} sees no GPU here")
    return jax.devices()


# ---- what is executed


def suite(place: Place) -> list[str]:
    """The suite's GPU tests."""
    for name in ("pytest", "hypothesis"):
        if not importlib.util.find_spec(name):
            raise Skip(f"the suite needs {name}, which is not installed")
    suite = "tests/runtime/test_gpu.py"
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-rs", suite]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    lines = [line for line in done.stdout.splitlines() if line.startswith(("SKIPPED", "FAILED"))]
    text = ["`pytest -m gpu`", "\n".join(["```", *lines, done.stdout.splitlines()[-1], "```"])]
    if done.returncode:
        sys.stderr.write(done.stdout + done.stderr)
        raise Failed(text)
    return text


def lectures(place: Place) -> list[str]:
    """The lectures, executed in a temporary folder, while there is time."""
    for name in ("nbconvert", "ipykernel"):
        if not importlib.util.find_spec(name):
            raise Skip(f"lectures need {name}, which is not installed")
    deadline = time.monotonic() + place.seconds - 10  # to end in time
    rows = []
    for book in sorted((ROOT / "notebooks").glob("*.ipynb")):
        began = time.monotonic()
        outcome = _executed(book, deadline - began)
        rows.append((book.stem, outcome, f"{time.monotonic() - began:.0f}"))
    text = [table(("lecture", "outcome", "seconds"), rows)]
    if any(outcome.startswith("FAILED") for _, outcome, _ in rows):
        raise Failed(text)
    return text


def _executed(book: Path, seconds: float) -> str:
    """What came of a lecture that has so many seconds."""
    if seconds < 10:
        return "skipped: no time left"
    with tempfile.TemporaryDirectory() as folder:
        copied, errors = shutil.copy(book, folder), Path(folder) / "errors"
        command = [sys.executable, "-m", "nbconvert", "--to", "notebook", "--execute", "--inplace"]
        with open(errors, "w") as output:  # a pipe would be open until the kernel ends, too
            try:
                done = subprocess.run([*command, copied], stderr=output, timeout=seconds)
            except subprocess.TimeoutExpired:
                return "skipped: no time left"
        if not done.returncode:
            return "executed"
        error = last_error(errors.read_text())
    missing = re.search(r"No module named '([\w.]+)'", error)
    return f"skipped: it needs {missing[1]}" if missing else failure(error)
