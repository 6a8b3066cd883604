"""What becomes of a run in which a rank fails, under every launcher: python benchmarks/faults.py.

Linux alone: what is left is looked for in /proc.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from measure import FOLDER, in_turn, machine, main, page, paragraph, spread, table
from pipelab import make, run

LIMIT = 5.0  # seconds after the fault, or after the timeout, by which all shall have ended
RAISES, SHAPE, NAN = "a stage raises", "a stage outputs a wrong shape", "a loss is nan"
LAST, FIRST = "the last rank is killed in a forward", "the first rank is killed in a forward"
TRANSFER = "the first rank is killed in a transfer"
STOPPED, HANGS = "the last rank is stopped (SIGSTOP)", "the last rank hangs in its stage"
ALONE = {RAISES, SHAPE, NAN}  # they end no process: threads have them, too
EVERY = (RAISES, SHAPE, NAN, LAST, FIRST, TRANSFER, STOPPED, HANGS)
LAUNCHERS = ("threads", "processes", "torchrun", "jax")


class Sizes(NamedTuple):
    """How much is measured; the default takes some ten minutes."""

    faults: Sequence[str] = EVERY
    launchers: Sequence[str] = LAUNCHERS
    parcel: int = 50_000_000  # floats of the transfer in which a rank is killed
    timeout: float = 8.0  # more than the ranks' starts may be apart
    patience: float = 120.0  # after the start, and after the fault: what is there then is left


DEFAULT = Sizes()


class Outcome(NamedTuple):
    """What became of a run.

    told     seconds from the fault to the RunError of the last rank that raised one
    ended    seconds from the fault until no process was there any more
    message  what was told, by rank where that is not the same
    left     processes and files that stayed
    """

    told: float
    ended: float
    message: str
    left: str


def report(repeats: int = 3, sizes: Sizes = DEFAULT) -> str:
    """Every fault under every launcher, as a Markdown page."""
    here, rows = machine("torch", "jax"), []
    for fault in sizes.faults:
        for launcher in sizes.launchers:
            if launcher == "threads" and fault not in ALONE:
                continue
            (found,) = in_turn([partial(attempt, fault, launcher, sizes)], repeats, warm_up=0)
            told, ended, messages, left = zip(*found, strict=True)
            times = [spread(seconds, ".2f", unit=1) for seconds in (told, ended)]
            rows.append((fault, launcher, *times, messages[-1], "; ".join({*left})))
    return page(
        "# Faults",
        here,
        paragraph(
            "Two ranks, each with one stage, of a run of GPipe with 4 micro-batches; the fault is "
            "in the second forward of a stage, or where jax compiles it. Told: the seconds from "
            "then to the RunError of the last rank that raised one. Ended: to the end of all "
            "processes, launcher, interpreters and all. Of what is "
            f"stopped or hangs: the seconds beyond `timeout={sizes.timeout:g}`. The median "
            f"(fastest to slowest) of {repeats}. The transfer is of {4 * sizes.parcel / 1e6:.0f} "
            "MB. Left: processes, found by a variable in their environment, and files in the "
            "folder for temporary ones, other than torch's cache (torchinductor_*)."
        ),
        "## Under every launcher",
        table(("fault", "launcher", "told (s)", "ended (s)", "the error", "left"), rows),
        paragraph(
            "torchrun ends the other ranks when one has ended, and says which was the first: a "
            "rank that it ends so may not tell its own error. What does not heed its SIGTERM, such "
            "as a stopped process, it kills 30 s later. (TORCH_ELASTIC_SHUTDOWN_TIMEOUT=3 changes "
            "nothing there: torch 2.13 reads it after a signal to torchrun itself alone.) Between "
            "processes of jax, aborts are put off for six seconds, so that every process can say "
            "why it ends. One that is stopped stays, since nothing that could end it has started "
            f"it; told is what the other says, and the script kills it after {sizes.patience:g} s. "
            "Told nan: no rank was left to tell."
        ),
    )


# ---- in the caller


def attempt(fault: str, launcher: str, sizes: Sizes) -> Outcome:
    """A run with a fault, in processes of its own."""
    with tempfile.TemporaryDirectory() as folder:
        home, started = Path(folder, "tmp"), []
        home.mkdir()
        given = ["--rank", fault, launcher, folder, *map(str, (sizes.parcel, sizes.timeout))]
        with Path(folder, "said").open("w") as out, Path(folder, "errors").open("w") as errors:
            for command, shell in starts(launcher, given):
                shell = os.environ | shell | {"TMPDIR": str(home), "OMP_NUM_THREADS": "1"}
                piped: dict[str, Any] = {"stdout": out, "stderr": errors, "env": shell}
                started.append(subprocess.Popen(command, **piped))
            clock, began = Path(folder, "clock"), time.time()
            # What is just being started may not show its environment yet.
            while (there := processes_with(home)) or any(p.poll() is None for p in started):
                if (
                    time.time() - (clock.stat().st_mtime if clock.exists() else began)
                    > sizes.patience
                ):
                    break
                time.sleep(0.02)
        ended = time.time()
        for process in there:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        for caller in started:
            caller.wait()
        left = [f"{len(there)} processes"] if there else []
        files = {re.sub(r"_\w+$", "_*", path.name) for path in home.iterdir()}
        left += sorted(files - {"torchinductor_*"})
        errors_said = Path(folder, "errors").read_text()
        if not clock.exists():
            raise AssertionError(f"{fault}, {launcher}: it did not happen\n{errors_said}")
        began = clock.stat().st_mtime + (sizes.timeout if fault in (STOPPED, HANGS) else 0)
        lines = Path(folder, "said").read_text().splitlines()
        said = [json.loads(line) for line in lines if line.startswith("{")]
        told = max((word["at"] for word in said), default=math.nan) - began
        return Outcome(told, ended - began, message_of(said, errors_said), ", ".join(left) or "-")


def starts(launcher: str, given: Sequence[str]) -> list[tuple[list[str], dict[str, str]]]:
    """Commands that start the ranks, with what is special in their environments."""
    script = [str(FOLDER / "faults.py"), *given]
    if launcher == "torchrun":
        meeting = ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--nproc-per-node=2"]
        return [([sys.executable, "-m", "torch.distributed.run", *meeting, *script], {})]
    if launcher != "jax":
        return [([sys.executable, *script], {})]
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{found.getsockname()[1]}"
    shell = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2", "JAX_PLATFORMS": "cpu"}
    return [([sys.executable, *script], shell | {"JAX_PROCESS_ID": str(n)}) for n in range(2)]


def processes_with(home: Path) -> list[int]:
    """Those whose folder for temporary files this is."""
    found, mark = [], f"TMPDIR={home}".encode()
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark in path.joinpath("environ").read_bytes().split(b"\0"):
                found.append(int(path.name))
    return found


def message_of(said: Sequence[dict[str, Any]], errors: str) -> str:
    """What was told, and what Elastic says of the rank that it saw fail first."""
    # Without what the stage was given: its shape and type are no part of this.
    texts = {word["rank"]: word["error"].partition(" (it was given")[0] for word in said}
    parts = [*dict.fromkeys(texts.values())]
    if len(parts) > 1:
        parts = [f"rank {rank}: {text}" for rank, text in sorted(texts.items())]
    root = re.search(r"Root Cause.*?rank +: (\d+).*?traceback : ([^\n]*)", errors, re.DOTALL)
    if root and "Signal" in root[2]:
        parts.append(f"Elastic: rank {root[1]}: {root[2].partition(' by PID')[0]}")
    return "; ".join(parts).replace("|", "\\|")


# ---- in a rank


def on_rank(fault: str, launcher: str, folder: str, parcel: str, timeout: str) -> None:
    """The run; prints the RunError and when it was raised, as a line of JSON."""
    if launcher == "torchrun":
        from gpu.ranks import share_gpus

        share_gpus(os.environ.get("PIPELAB_WIRE", "gloo"))
    given = arguments_of_jax if launcher == "jax" else arguments_of_torch
    happen = partial(happens, fault, f"{folder}/clock")
    options: dict[str, Any] = {"check": False, "timeout": float(timeout)}
    if launcher != "torchrun":
        options["backend"] = launcher
    rank = os.environ.get("JAX_PROCESS_ID") or os.environ.get("RANK", "0")
    arguments = given(fault, happen, int(parcel))
    try:
        run(make("gpipe", 2, 4), *arguments, **options)
    except Exception as error:  # one of what does not compile is refused as its library says it
        first = str(error).splitlines()[0]
        print(json.dumps({"at": time.time(), "rank": rank, "error": first}), flush=True)
        sys.exit(1)
    raise AssertionError(f"{fault}: the run ended as if nothing had happened")


def happens(fault: str, clock: str) -> float:
    """The fault; else what its stage's output is multiplied by."""
    if fault == TRANSFER:
        time.sleep(0.02)  # the first output is under way
    Path(clock).touch()
    if fault == RAISES:
        raise ZeroDivisionError("by design")
    if fault in (LAST, FIRST, TRANSFER, STOPPED):
        os.kill(os.getpid(), signal.SIGSTOP if fault == STOPPED else signal.SIGKILL)
    if fault == HANGS:
        time.sleep(1000)
    return math.nan if fault == NAN else 1.0


def home_of(fault: str) -> int:
    """The stage with the fault."""
    return 0 if fault in (FIRST, TRANSFER, SHAPE) else 1


def arguments_of_torch(fault: str, happen: Callable[[], float], parcel: int) -> Sequence[Any]:
    """Stages, batches, loss and optimizer for `run`."""
    import torch
    from torch import Tensor, nn

    class Faulty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            x = x * self.weight
            if self.calls == 2:
                x = x * happen()
                x = x.repeat(1, 2) if fault == SHAPE else x
            return x[:, :1].expand(len(x), parcel // len(x)) if fault == TRANSFER else x

    torch.set_num_threads(1)
    stages: list[nn.Module] = [nn.Linear(4, 4), nn.Linear(4, 4)]
    if fault == TRANSFER:
        stages = [Faulty(), nn.AdaptiveAvgPool1d(4)]
    else:
        stages[home_of(fault)] = nn.Sequential(nn.Linear(4, 4), Faulty())
    batch = (torch.ones(8, 4), torch.ones(8, 4))
    return stages, [batch], nn.functional.mse_loss, partial(torch.optim.SGD, lr=0.01)


def arguments_of_jax(fault: str, happen: Callable[[], float], parcel: int) -> Sequence[Any]:
    """The same; what does not compile fails where it is compiled, all else when it runs."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    jax.config.update("jax_num_cpu_devices", 1)
    address, count = os.environ["JAX_COORDINATOR_ADDRESS"], int(os.environ["JAX_NUM_PROCESSES"])
    jax.distributed.initialize(address, count, int(os.environ["JAX_PROCESS_ID"]))
    home, calls = home_of(fault), iter(range(100))
    here = jax.process_index() == home

    def factor(x: Any) -> Any:
        fails = here and next(calls) == 1
        return np.float32(happen() if fails else 1.0)

    def faulty(weight: Any, x: Any) -> Any:
        if fault in (RAISES, SHAPE):
            if here:
                happen()
            return jnp.tile(x @ weight, (1, 2)) if fault == SHAPE else x @ weight
        number = jax.ShapeDtypeStruct((), jnp.float32)
        x = x @ weight * jax.pure_callback(factor, number, jax.lax.stop_gradient(x))
        return jnp.repeat(x, parcel // x.size, axis=1) if fault == TRANSFER else x

    def plain(weight: Any, x: Any) -> Any:
        if fault == TRANSFER:
            x = x.reshape(len(x), 4, -1).mean(2)
        return x @ weight

    stages = [(plain, jnp.eye(4)), (plain, jnp.eye(4))]
    stages[home] = faulty, jnp.eye(4)
    batch = (np.ones((8, 4), np.float32), np.ones((8, 4), np.float32))
    return stages, [batch], lambda y, target: ((y - target) ** 2).mean(), optax.sgd(0.01)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        on_rank(*sys.argv[2:])
    else:
        main(report, "faults.md", repeats=3)
