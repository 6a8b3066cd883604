"""Placements of stages on devices: stage -> device."""

from collections.abc import Iterable, Sequence
from operator import index

from pipelab.table.action import MOST_STAGES, Action, ScheduleError


def check_placement(
    placement: Iterable[int], devices: int | None = None, *, each: bool = False
) -> tuple[int, ...]:
    """The placement as a tuple; ScheduleError for a device that is not below `devices`, if given.

    each  a device without a stage is an error, too
    """
    try:
        home = tuple(map(index, placement))
    except TypeError:  # no sequence, or not of whole numbers
        home = ()
    if not home or not 0 <= min(home) <= max(home) < (devices or max(home) + 1):
        most = f"to {devices - 1}" if devices else "on"
        raise ScheduleError(f"placement={placement!r}: give each stage a device from 0 {most}")
    if each and devices and len(set(home)) < devices:
        raise ScheduleError(f"placement={placement!r}: give each of {devices} devices a stage")
    return home


def placement_of(rows: Sequence[Sequence[Action]]) -> tuple[int, ...]:
    """The device of each stage in these rows; ScheduleError for a missing stage, or one in two."""
    home: dict[int, int] = {}
    for d, row in enumerate(rows):
        for stage in {action.stage for action in row}:
            if stage in home:
                raise ScheduleError(
                    f"stage {stage} has actions in rows {home[stage]} and {d}: put all of them in "
                    "one row"
                )
            home[stage] = d
    if max(home) >= len(home):
        missing = min(set(range(len(home))) - set(home))
        raise ScheduleError(
            f"stage {missing} has no action, though stage {max(home)} has: number stages from 0 "
            "without gaps"
        )
    return tuple(home[s] for s in range(len(home)))


def stages_of(placement: Sequence[int]) -> list[list[int]]:
    """The stages of each device.

    >>> stages_of([0, 1, 1, 0])
    [[0, 3], [1, 2]]
    """
    found: list[list[int]] = [[] for _ in range(max(placement) + 1)]
    for stage, home in enumerate(placement):
        found[home].append(stage)
    return found


def loop_placement(devices: int, virtual: int = 1) -> tuple[int, ...]:
    """A loop with `virtual` stages per device: stage s is on device s mod p.

    >>> loop_placement(3, virtual=2)
    (0, 1, 2, 0, 1, 2)
    """
    _check_stages(devices, virtual)
    return tuple(range(devices)) * virtual


def v_placement(devices: int) -> tuple[int, ...]:
    """A V with two stages per device: device 0 has the first stage and the last.

    >>> v_placement(3)
    (0, 1, 2, 2, 1, 0)
    """
    _check_stages(devices, 2)
    return (*range(devices), *reversed(range(devices)))


def _check_stages(devices: int, virtual: int) -> None:
    if devices * virtual > MOST_STAGES:
        raise ScheduleError(
            f"devices={devices} with {virtual} stages each: give at most {MOST_STAGES:,} stages"
        )
