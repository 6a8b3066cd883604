"""What `run` and `evaluate` are asked for beside the model and the data."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any

from pipelab.costs import Costs, Recompute

BACKENDS = ("threads", "processes", "jax")
FOLDER = (str, os.PathLike), "the name of a folder"
KINDS: dict[str, tuple[Any, str]] = {  # of options, unless they are as they are by default
    "devices": ((str, Sequence), "a device for each row, or one name for all"),
    "recompute": (Recompute, "Recompute.NEVER, EXCEPT_LAST or ALWAYS"),
    "seed": (Integral, "a whole number of at least 0"),
    "costs": (Costs, "a pipelab.Costs"),
    "dump": FOLDER,
    "save": FOLDER,
    "stop": (Integral, "a number of batches"),
    "resume": FOLDER,
}


@dataclass(frozen=True)
class Options:
    """As `run` documents them. ValueError, with the remedy, for a value that no run can have."""

    backend: str | None = None
    devices: str | Sequence[Any] | None = None
    replicas: int = 1
    recompute: Recompute = Recompute.NEVER
    clip: float | None = None
    autocast: Any = None
    seed: int | None = None
    finite: bool = True
    pace: float | None = None
    costs: Costs | None = None
    pin: bool = False
    check: bool | str = True
    tolerance: float | None = None
    dump: str | Path | None = None
    save: str | Path | None = None
    stop: int | None = None
    resume: str | Path | None = None
    timeout: float = 60.0

    def __post_init__(self) -> None:
        if self.backend not in (None, *BACKENDS):
            raise ValueError(f"backend={self.backend!r}: use one of {', '.join(BACKENDS)}")
        for name, (kinds, remedy) in KINDS.items():
            value = getattr(self, name)
            if value is getattr(Options, name):
                continue
            if not isinstance(value, kinds) or value == "" or (name == "seed" and value < 0):
                raise ValueError(f"{name}={value!r}: give {remedy}")
        if not isinstance(self.replicas, Integral) or self.replicas < 1:
            raise ValueError(f"replicas={self.replicas!r}: give a whole number of at least 1")
        if self.check not in (True, False, "quick"):
            raise ValueError(f"check={self.check!r}: use True, False or 'quick'")
        self._require("clip", "the largest norm, a number above 0")
        self._require("pace", "the seconds of one cost unit, such as 0.005")
        self._require("timeout", "seconds, a number above 0")
        remedy = "how many times its rounding a tensor may be off, at least 1"
        self._require("tolerance", remedy, least=1.0)
        for name in ("save", "resume"):
            other = getattr(self, name)
            if self.dump and other and Path(self.dump).resolve() == Path(other).resolve():
                raise ValueError(f"dump and {name} are both {str(other)!r}: name two folders")

    def _require(self, name: str, remedy: str, least: float = 0.0) -> None:
        """A number above 0, and not below the least, if there is one."""
        value = getattr(self, name)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if value is not None and not (number and value > 0 and least <= value < math.inf):
            raise ValueError(f"{name}={value!r}: give {remedy}")

    def cores(self, workers: int) -> list[int | None]:
        """The core of each worker, if they are to be pinned. ValueError if they cannot be."""
        if not self.pin:
            return [None] * workers
        if not hasattr(os, "sched_getaffinity"):
            raise ValueError("pin=True is not supported on this system: leave it out")
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) < workers:
            raise ValueError(f"pin=True: {workers} workers and {len(cores)} cores: leave it out")
        return list(cores[:workers])

    def refuse(self, *names: str) -> None:
        """ValueError if one of these options is not as it is by default."""
        for name in names:
            value = getattr(self, name)
            if value != getattr(Options, name):
                raise ValueError(
                    f"{name}={value!r} is not supported with backend={self.backend!r}: leave it out"
                )
