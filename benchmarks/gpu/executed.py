"""What benchmarks/gpu checks and executes, on a GPU or in its rehearsal on the CPU."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

import checked as checked_sizes
import faults
from gpu.cases import CASES, processes
from gpu.measured import Failed, Place, Skip, judged, met, row_of
from gpu.speed import BESIDE, beside
from measure import FOLDER, cores, paragraph, table

ROOT = FOLDER.parent
TIMES, BYTES = 5, 40  # that a check may take: of one device's training, and for each weight
TORCHRUNS = "torchelastic_*"  # a folder that it leaves behind itself
LARGE = checked_sizes.Size(1600, 48, 50257, 64, 2)


def failure(message: str) -> str:
    """The first line of an error, for a cell of a table."""
    return "FAILED: " + message.partition("\n")[0].replace("|", "\\|")


def last_error(text: str) -> str:
    """The last line that names an error, of what a process wrote."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)  # without colours
    return ["it wrote no error", *re.findall(r"^\S*[Ee]rror: .*", plain, re.MULTILINE)][-1]


# ---- what is checked


def check_costs(place: Place) -> list[str]:
    """The check's time and memory, from 2.6 million weights to GPT-2 XL's 1.6 billion."""
    few = (checked_sizes.SIZES[0],)
    sizes = (*checked_sizes.SIZES, LARGE) if place.on_gpu else few
    device = str(place.device) if place.on_gpu else "cpu"
    rows = [row_of(*row, _within(row)) for row in checked_sizes.rows_of(1, sizes, device)]
    parts = [
        checked_sizes.words(1),
        table((*checked_sizes.HEADER, "within"), rows),
        f"Asked: at most {TIMES} times, and {BYTES} bytes a weight.",
    ]
    return judged(place, parts, rows)


def _within(row: list[str]) -> str:
    try:
        return met(float(row[-2]) <= TIMES and float(row[-1]) <= BYTES)
    except ValueError:  # an error in place of numbers
        return met(False)


def checked(place: Place) -> list[str]:
    """Runs of many kinds, each compared with its reference."""
    rows, failed = [], False
    for name, case in CASES.items():
        began = time.perf_counter()
        try:
            check = case.run(place.device).check
            verdict = "passed" if check.passed else f"FAILED: {check}"
            rows.append((name, verdict, f"{check.ratio:.2f}", f"{time.perf_counter() - began:.1f}"))
            failed = failed or not check.passed
        except Exception as error:
            failed = True
            rows.append((name, failure(f"{type(error).__name__}: {error}"), "", ""))
    parts = [
        paragraph(
            "Every loss, gradient and weight against the reference; `ratio` is how many times its "
            "rounding the worst tensor is off (at most 3)."
        ),
        table(("run", "check", "ratio", "s"), rows),
    ]
    if failed:
        raise Failed(parts)
    return parts


def launched(place: Place) -> list[str]:
    """The same in processes: started by pipelab, and as ranks of torchrun."""
    gpus = [f"cuda:{n}" for n in range(torch.cuda.device_count())] if place.on_gpu else ["cpu"]
    check = processes([gpus[0], gpus[-1]]).check
    verdict = "passed" if check.passed else f"FAILED: {check}"
    rows: list[tuple[Any, ...]] = [("pipelab", 2, "1F1B", verdict)]
    counts = sorted({case.workers for case in CASES.values()})
    starts = [("NCCL" if place.on_gpu else "gloo", count) for count in counts]
    if place.on_gpu and len(gpus) == 1:
        starts.append(("gloo", 2))
    for wire, count in starts:
        found = on_ranks("gpu.ranks", count, wire)
        rows += [(f"torchrun, {wire}", count, *row) for row in found]
    parts = [
        paragraph(
            "Every loss, gradient and weight against the reference. Ranks that share a GPU talk "
            "over gloo, through the CPU's memory; where NCCL is told that they are of different "
            "hosts (NCCL_HOSTID), by its sockets, unless one of them is on the CPU. NCCL's own log "
            "has to say whether it has connected them."
            if place.on_gpu
            else "Every loss, gradient and weight against the reference."
        ),
        table(("processes by", "processes", "run", "check"), rows),
    ]
    if any("passed" not in row[-1] for row in rows):
        raise Failed(parts)
    return parts


def on_ranks(module: str, count: int, wire: str, *more: str) -> list[tuple[str, ...]]:
    """What the first of `count` ranks of torchrun, which run a module, says of each run."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(count), "-m", module, wire, *more]
    with tempfile.TemporaryDirectory() as folder:
        log = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": f"{folder}/%p"}
        piped: dict[str, Any] = {"stdout": subprocess.PIPE, "text": True, "cwd": FOLDER}
        done = subprocess.run(command, env=os.environ | log, **piped)
        formed = sum(path.read_text().count("Init COMPLETE") for path in Path(folder).iterdir())
    rows = [tuple(json.loads(line)) for line in done.stdout.splitlines() if line[:1] == "["]
    if done.returncode:
        rows.append(("", failure(f"status {done.returncode}")))
    if (formed > 0) != (wire == "NCCL"):
        rows.append(("", failure(f"{formed} communicators of NCCL, by its log")))
    return rows


def faults_on_ranks(place: Place) -> list[str]:
    """What becomes of ranks when one of them fails."""
    wire = "NCCL" if place.on_gpu else "gloo"
    os.environ["PIPELAB_WIRE"] = wire
    sizes = faults.DEFAULT._replace(parcel=5_000_000, patience=40.0)
    rows, failed = [], False
    for fault in (faults.RAISES, faults.LAST, faults.TRANSFER, faults.HANGS):
        outcome = faults.attempt(fault, "torchrun", sizes)
        ended = outcome.ended <= faults.LIMIT and outcome.left in ("-", TORCHRUNS)
        failed = failed or not (ended and outcome.message)
        times = [f"{seconds:.2f}" for seconds in (outcome.told, outcome.ended)]
        rows.append((fault, *times, outcome.message, outcome.left))
    parts = [
        paragraph(
            f"Two ranks of torchrun over {wire}, as in faults.md: told and ended are seconds from "
            f"the fault, or for what hangs beyond `timeout={sizes.timeout:g}`. {faults.LIMIT} s at "
            "most are allowed, an error has to be told, and only torchrun's folder may be left."
        ),
        table(("fault", "told (s)", "ended (s)", "the error", "left"), rows),
    ]
    if failed:
        raise Failed(parts)
    return parts


def jax_stages(place: Place) -> list[str]:
    """The jax backend: four stages on one device, checked, and beside one jitted step."""
    from gpu.jax_stages import on_devices, one_step, pipeshard_step

    device, sizes = _jax_devices(place)[0], place.sizes
    check = on_devices([device] * 4, sizes.microbatches, checked=True).check
    if not check.passed:
        raise RuntimeError(f"the check failed: {check}")

    def stages(count: int) -> list[float]:
        done = on_devices([device] * count, sizes.microbatches, checked=False)
        return list(done.timeline.batch_seconds())

    ways = {f"backend jax, {n} stages": partial(stages, n) for n in (1, 2, 4)}
    if len(two := _jax_devices(place)[:2]) == 2:  # its stages have a device each
        ways["pipeshard, 2 devices"] = partial(pipeshard_step, two, sizes.microbatches)
    plain = partial(one_step, device, sizes.microbatches)
    rows = [row_of(name, *beside(call, plain, 1.10)) for name, call in ways.items()]
    parts = [
        paragraph(
            f'`run(backend="jax")` on {device}: the check of four stages passed (ratio '
            f"{check.ratio:.2f}). Beside one jitted step that scans the same micro-batches; "
            "stages wait for what they compute. A/A: the jitted step beside itself."
        ),
        table(("run", "ms a batch", "one jitted step", *BESIDE), rows),
    ]
    return judged(place, parts, rows)


def jax_processes(place: Place) -> list[str]:
    """A stage in each of two processes, which may share a GPU: jax's transfer servers."""
    _jax_devices(place)
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{found.getsockname()[1]}"
    piped: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [
        subprocess.Popen([sys.executable, "-m", "gpu.jax_stages", address, str(n)], **piped)
        for n in range(2)
    ]
    for (said, errors), process in [(p.communicate(), p) for p in processes]:
        if process.returncode:
            sys.stderr.write(errors)
            raise RuntimeError(last_error(errors))
        passed, ratio, verdict = json.loads(said.splitlines()[-1])
        if not passed:
            raise RuntimeError(f"the check failed: {verdict}")
    return [f"1F1B between two processes: the check passed ({ratio:.2f})."]


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
    """The suite's GPU tests, but for the runs of `checked`."""
    for name in ("pytest", "hypothesis"):
        if not importlib.util.find_spec(name):
            raise Skip(f"the suite needs {name}, which is not installed")
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-rs"]
    command += ["-k", "not reference", "tests/runtime/test_gpu.py"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    said = done.stdout.splitlines()
    lines = [line for line in said if line.startswith(("SKIPPED", "FAILED"))] + said[-1:]
    text = ["`pytest -m gpu`, but for the checked runs above", "\n".join(["```", *lines, "```"])]
    if done.returncode:
        sys.stderr.write(done.stdout)
        raise Failed(text)
    if place.on_gpu and len(lines) > 1:  # a rehearsal has none to run
        raise Skip("some tests were", text)
    return text


def lectures(place: Place) -> list[str]:
    """The lectures, executed in a temporary folder while there is time; outputs are kept."""
    for name in ("nbclient", "ipykernel"):
        if not importlib.util.find_spec(name):
            raise Skip(f"lectures need {name}, which is not installed")
    deadline = time.monotonic() + place.seconds - 30  # to end in time, imports included
    kept = Path(os.environ.get("OUT") or ROOT / "build" / "gpu") / "lectures"
    kept.mkdir(parents=True, exist_ok=True)

    def one(book: Path) -> tuple[str, ...]:
        began = time.monotonic()
        outcome = _executed(book, kept / book.name, deadline - began)
        return row_of(book.stem, outcome, f"{time.monotonic() - began:.0f}")

    # Most of a lecture is Python's work: four cores for each.
    with ThreadPoolExecutor(at_once := max(1, cores() // 4)) as pool:
        rows = list(pool.map(one, sorted((ROOT / "notebooks").glob("*.ipynb"))))
    text = [
        table(("lecture", "outcome", "seconds"), rows),
        f"Asked: no error, no warning. {at_once} ran at once, so seconds are of that.",
    ]
    if any(row[1].startswith("FAILED") for row in rows):
        raise Failed(text)
    if any(row[1] != "executed" for row in rows):
        raise Skip("some were not executed", text)
    return text


EXECUTE = """
import sys
import nbformat
from nbclient import NotebookClient

book = nbformat.read(sys.argv[1], 4)
try:
    NotebookClient(book, timeout=None, resources={"metadata": {"path": sys.argv[3]}}).execute()
finally:
    nbformat.write(book, sys.argv[2])
"""


def _executed(book: Path, kept: Path, seconds: float) -> str:
    """What came of a lecture that has so many seconds; `kept` gets what it printed."""
    if seconds < 10:
        return "skipped: no time left"
    with tempfile.TemporaryDirectory() as folder:
        errors = Path(folder) / "errors"
        beside_it = os.pathsep.join([str(book.parent), os.environ["PYTHONPATH"]])  # its imports
        command = [sys.executable, "-c", EXECUTE, str(book), str(kept), folder]
        with open(errors, "w") as output:  # a pipe would be open until the kernel ends, too
            try:
                done = subprocess.run(
                    command,
                    stderr=output,
                    timeout=seconds,
                    env=os.environ | {"PYTHONPATH": beside_it},
                )
            except subprocess.TimeoutExpired:
                return "skipped: no time left"
        if not done.returncode:
            warned = _warnings(kept)
            return f"FAILED: it warns: {warned}" if warned else "executed"
        error = last_error(errors.read_text())
    missing = re.search(r"No module named '([\w.]+)'", error)
    return f"skipped: it needs {missing[1]}" if missing else failure(error)


def _warnings(book: Path) -> str:
    """The first line that a lecture wrote to its error stream, if there is one."""
    cells = json.loads(book.read_text())["cells"]
    outputs = (output for cell in cells for output in cell.get("outputs", ()))
    said = ["".join(of["text"]) for of in outputs if of.get("name") == "stderr"]
    return said[0].partition("\n")[0].replace("|", "\\|") if said else ""
