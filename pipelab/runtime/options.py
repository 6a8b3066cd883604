"""How to train: all that a caller chooses, checked once, and the same for every rank."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from math import inf
from pathlib import Path
from typing import Any

from pipelab.predict.costs import Chosen, Costs, Recompute

REFERENCES = ("batches", "microbatches")


@dataclass(frozen=True, kw_only=True)
class Options:
    """The arguments of `run`, which documents them, except its schedule, stages and batches.

    ValueError, with the remedy, for an invalid value. A library's `Backend` replaces those that
    default to the caller's context, such as `autocast` and `seed`.

    check, save  whether anything will be checked or kept, which shows early whether that is
                 possible; `Session.run` is told with each `Work` whether and where
    training     whether there are updates. If not, there is no optimizer, and all orders evaluate;
                 if so, some may, as in `Trainer.evaluate`
    endless      whether the training continues after the table's last batch
    """

    loss: Callable[[Any, Any], Any]
    optimizer: Any = None
    backend: str | None = None
    devices: Any = None
    replicas: int = 1
    recompute: Recompute | Chosen = Recompute.NEVER
    clip: float | None = None
    autocast: Any = None
    seed: int | None = None
    finite: bool = True
    pace: float | None = None
    costs: Costs | None = None
    check: bool = True
    reference: str = "batches"
    save: str | Path | None = None
    stop: int | None = None
    resume: str | Path | None = None
    timeout: float = 60.0
    training: bool = True
    endless: bool = False

    def __post_init__(self) -> None:
        for name, fits, remedy in (
            ("replicas", _whole(self.replicas, 1), "a whole number of at least 1"),
            ("check", self.check in (True, False), "True or False"),
            ("reference", self.reference in REFERENCES, f"one of {', '.join(REFERENCES)}"),
            ("seed", self.seed is None or _whole(self.seed, 0), "a whole number of at least 0"),
            ("pace", _above(0, self.pace), "the seconds of one cost unit, such as 0.005"),
            ("timeout", _above(0, self.timeout or 0), "seconds, a number above 0"),
            ("clip", _above(0, self.clip), "the largest norm, a number above 0"),
        ):
            if not fits:
                raise ValueError(f"{name}={getattr(self, name)!r}: give {remedy}")

    def refuse(self, *names: str) -> None:
        """ValueError if one of these is not at its default."""
        for option in fields(self):
            value = getattr(self, option.name)
            if option.name in names and value != option.default:
                raise ValueError(
                    f"{option.name}={value!r} is not supported with backend={self.backend!r}: "
                    "leave it out"
                )


def _whole(value: Any, least: int) -> bool:
    return hasattr(value, "__index__") and value >= least


def _above(least: float, value: float | None) -> bool:
    return value is None or least < value < inf
