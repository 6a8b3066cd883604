"""What only a GPU can show: make gpu. Without one, the same command rehearsed: make gpu DEVICE=cpu.

Needs torch and numpy. What else a section needs and is not installed is named where it is left out.
Every section is a process of its own: what hangs, or breaks a GPU's context, ends one section.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch

from gpu.executed import (
    check_costs,
    checked,
    faults_on_ranks,
    jax_processes,
    jax_stages,
    launched,
    lectures,
    pipeshard,
    suite,
)
from gpu.measured import (
    DEFAULTS,
    KEPT,
    Failed,
    Place,
    Skip,
    clocks,
    predictions,
    sharing,
    streams,
)
from gpu.memory import memory
from gpu.speed import (
    beside_a_compiled_loop,
    beside_a_loop,
    beside_torchgpipe,
    beside_torchs_runtime,
)
from measure import FOLDER, check_folder, machine, page, paragraph, table
from pipelab.table.action import check_counts

HERE = Path(__file__).parent
ENDING = 5  # that what hangs has to end by itself


class Section(NamedTuple):
    """A part of the page, and the seconds that it may take: what hangs takes no other's time."""

    call: Callable[[Place], list[str]]
    seconds: int


# What only a GPU shows, cheap first; then what is compared with others; then what takes longest.
SECTIONS = {
    "The suite's GPU tests": Section(suite, 90),
    "What parts of one GPU share": Section(sharing, 60),
    "Memory": Section(memory, 60),
    "Four stages on one GPU": Section(streams, 45),
    "The timeline and the clock": Section(clocks, 45),
    "Checked runs": Section(checked, 60),
    "Predictions": Section(predictions, 120),
    "Faults": Section(faults_on_ranks, 100),
    "Processes": Section(launched, 160),
    "JAX in two processes": Section(jax_processes, 45),
    "Pipeshard": Section(pipeshard, 45),
    "JAX": Section(jax_stages, 100),
    "Beside torch's runtime": Section(beside_torchs_runtime, 60),
    "Beside torchgpipe": Section(beside_torchgpipe, 90),
    "Beside a plain loop": Section(beside_a_loop, 180),
    "Beside a compiled loop": Section(beside_a_compiled_loop, 180),
    "What the check costs": Section(check_costs, 120),
    "Lectures": Section(lectures, 420),
}
SECONDS = sum(section.seconds for section in SECTIONS.values())  # of all together, at most
PAGES = {"cuda": "gpu.md", "cpu": "cpu.md"}
INTRODUCTIONS = {
    "cuda": "`make gpu` measured this.",
    "cpu": "A rehearsal without a GPU: `make gpu DEVICE=cpu` runs what `make gpu` runs, small, "
    "with the CPU in the place of the GPU. It shows that the command works, nothing about GPUs.",
}


class Outcome(NamedTuple):
    """What became of a section.

    state  passed, skipped or FAILED
    parts  of its page: paragraphs and tables; the reason of a skip, the error of a failure
    """

    state: str
    parts: list[str]


def attempt(title: str, place: Place) -> Outcome:
    """A section of SECTIONS; whatever it raises is its outcome."""
    try:
        return Outcome("passed", SECTIONS[title].call(place))
    except Skip as reason:
        return Outcome("skipped", [f"Skipped: {reason}.", *reason.parts])
    except Failed as failed:
        return Outcome("FAILED", failed.parts)
    except ModuleNotFoundError as missing:
        if (missing.name or "pipelab").startswith("pipelab"):
            return _failure(missing)
        return Outcome("skipped", [f"Skipped: it needs {missing.name}, which is not installed."])
    except Exception as error:
        return _failure(error)


def _failure(error: BaseException) -> Outcome:
    traceback.print_exception(error)
    first = str(error).partition("\n")[0]
    return Outcome("FAILED", [f"Failed: `{type(error).__name__}: {first}`"])


def in_a_process(title: str, device: str, seconds: float) -> Outcome:
    """`attempt` in a process of its own, which has so many seconds."""
    with tempfile.TemporaryDirectory() as folder:
        file, log = Path(folder) / "outcome", Path(folder) / "log"
        command = [
            sys.executable,
            "-m",
            "gpu.report",
            "--device",
            device,
            "--seconds",
            str(int(seconds)),
        ]
        command += ["--section", title, "--markdown", str(file)]
        with open(log, "w") as output:
            process = subprocess.Popen(
                command,
                stdout=output,
                stderr=output,
                env=_environment(device),
                start_new_session=True,  # see `end`
            )
            try:
                process.wait(seconds)
                ending = f"its process ended with status {process.returncode}"
            except subprocess.TimeoutExpired:
                ending = f"no end within {seconds:.0f} s"
            finally:
                end(process)
        written = log.read_text(errors="replace")
        if file.exists():
            outcome = Outcome(*json.loads(file.read_text()))
        else:
            outcome = Outcome("FAILED", [f"Failed: `{ending}`", *rows_until_then(written)])
    if outcome.state == "FAILED":
        sys.stderr.write(written)
    return outcome


def rows_until_then(written: str) -> list[str]:
    """The rows that a section had printed when it was cut off, as parts of its page."""
    rows = [line[len(KEPT) + 1 :] for line in written.splitlines() if line.startswith(KEPT)]
    return ["The rows until then:", "\n".join(["```", *rows, "```"])] if rows else []


def end(process: subprocess.Popen) -> None:
    """End a process that began a session, and what it has started.

    torchrun's workers have sessions of their own, which it ends if it is asked to end itself.
    """
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        deadline = time.monotonic() + ENDING
        while time.monotonic() < deadline:
            process.poll()
            os.killpg(process.pid, 0)  # raises when nobody is left
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _environment(device: str) -> dict[str, str]:
    """Of a section's process: torch and JAX share the GPU's memory, or see none."""
    paths = {"PYTHONPATH": os.pathsep.join([str(FOLDER), str(FOLDER.parent)])}
    if device == "cpu":
        no_gpu = {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}
        return os.environ | paths | no_gpu
    return os.environ | paths | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


def report(
    device: str,
    seconds: float,
    run: Callable[[str, str, float], Outcome] = in_a_process,
    *,
    begin: str = "",
    keep: Callable[[str], object] = lambda text: None,
) -> tuple[str, set[str]]:
    """All sections from `begin` on as a Markdown page, and what became of them.

    keep  gets the page after each of them, as far as it is
    """
    deadline = time.monotonic() + seconds
    rows, parts, titles = [], [], list(SECTIONS)
    for title in titles[titles.index(begin) if begin else 0 :]:
        began, own = time.monotonic(), SECTIONS[title].seconds
        left, over = deadline - began, f"Skipped: the {seconds:.0f} seconds were over"
        if left < 1:
            outcome = Outcome("skipped", [f"{over}."])
        else:
            outcome = run(title, device, min(left, own))
            if outcome.state == "FAILED" and left < own and time.monotonic() >= deadline:
                # What had less than its own time has not failed.
                outcome = Outcome("skipped", [f"{over} before its end.", *outcome.parts[1:]])
        took = time.monotonic() - began
        print(f"{title}: {outcome.state} ({took:.0f} s)", file=sys.stderr, flush=True)
        rows.append((title, outcome.state, f"{took:.0f}"))
        parts += [f"## {title}", *outcome.parts]
        text = page(
            "# On a GPU" if device == "cuda" else "# On a GPU, rehearsed on the CPU",
            f"{machine('numpy', 'torch', 'jax')} {_gpus(device)}",
            paragraph(INTRODUCTIONS[device]),
            table(("section", "outcome", "seconds"), rows),
            *parts,
        )
        keep(text)
    return text, {state for _, state, _ in rows}


def _gpus(device: str) -> str:
    if device == "cpu":
        return "No GPU."
    names = [torch.cuda.get_device_name(d) for d in range(torch.cuda.device_count())]
    return f"GPUs: {', '.join(names)}; CUDA {torch.version.cuda}."


def _options(arguments: list[str] | None) -> argparse.Namespace:
    """Exit status 2 and one line on bad input, before anything is measured."""
    parser = argparse.ArgumentParser(description="What only a GPU can show, as a Markdown page.")
    parser.add_argument("--device", choices=PAGES, default="cuda", help="cpu: a rehearsal")
    parser.add_argument("--seconds", type=int, default=SECONDS, help=f"default: {SECONDS}")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="instead of the page here")
    parser.add_argument("--begin", choices=SECTIONS, help="leave out the sections before it")
    parser.add_argument("--section", choices=SECTIONS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.markdown = options.markdown or HERE / PAGES[options.device]
    try:
        check_counts(seconds=options.seconds)
        check_folder(options.markdown)
        if options.device == "cuda" and not torch.cuda.is_available():
            raise ValueError(
                "torch sees no CUDA device here: make gpu DEVICE=cpu rehearses it without one"
            )
    except ValueError as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    return options


def main(arguments: list[str] | None = None) -> int:
    """The command; exit status 1 if a section failed, 3 if one was skipped, and none failed."""
    options = _options(arguments)
    if options.section:
        name = "cuda:0" if options.device == "cuda" else "cpu"
        place = Place(torch.device(name), DEFAULTS[options.device], options.seconds)
        options.markdown.write_text(json.dumps(attempt(options.section, place)))
        return 0
    keep = options.markdown.write_text
    text, states = report(options.device, options.seconds, begin=options.begin, keep=keep)
    print(text, end="")
    return 1 if "FAILED" in states else 3 if "skipped" in states else 0


if __name__ == "__main__":
    sys.exit(main())
