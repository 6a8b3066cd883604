"""Is a table complete, in order and free of deadlock? The error draws the grid with the fault marked."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from pipelab.action import Action, Kind, ScheduleError
from pipelab.schedule import Schedule

_SHOWN = 2_000  # largest table that an error draws


def validate(schedule: Schedule) -> Schedule:
    """Return the schedule if it can run; else raise a ScheduleError that marks the fault in the grid.

    Checked, in this order: every action there once (of a table of forwards alone: every forward), none twice; the order
    within each row (forward, backward, update); the weight version that each forward reads exists by then; no deadlock, also
    under rendezvous (neither side of a transfer goes on alone) where the table writes its transfers out.

    >>> from pipelab.schedules import gpipe
    >>> validate(gpipe(4, 8)).name
    'gpipe'
    """
    check_static(schedule)
    _, _, head = schedule.unit_times()
    check_deadlock(schedule, head)
    return schedule


def check_static(schedule: Schedule) -> None:
    """Everything but the deadlock, by whole-array comparisons."""
    _check_twice(schedule)
    _check_complete(schedule)
    _check_order(schedule)
    _check_versions(schedule)


def _fail(schedule: Schedule, problem: str, mark: Iterable[int] = ()) -> None:
    size = schedule.bounds[-1]
    picture = (
        f"\n{schedule.grid(mark)}"
        if size <= _SHOWN
        else f"\n(the table of {size} actions is too large to draw)"
    )
    raise ScheduleError(f"{schedule.name}: {problem}{picture}")


def _check_twice(schedule: Schedule) -> None:
    here = np.arange(schedule.bounds[-1])
    _, stage, kind, microbatch = schedule.columns
    kept = schedule.position[kind, stage, microbatch]
    if (again := np.flatnonzero(kept != here)).size:
        i, j = int(again[0]), int(kept[again[0]])
        _fail(
            schedule,
            f"{schedule.action(i)} stands twice on device {schedule.columns.device[i]}: remove one",
            (i, j),
        )


def _check_complete(schedule: Schedule) -> None:
    have = schedule.position >= 0
    split = have[Kind.I] | have[Kind.W]
    wanted = [(Kind.F, ~have[Kind.F])]
    if schedule.training:
        wanted += [
            (Kind.B, ~have[Kind.B] & ~split),
            (Kind.U, ~have[Kind.U] & (np.arange(schedule.total) < schedule.updates)),
        ]
    wanted += [
        (Kind.I, have[Kind.W] & ~have[Kind.I] & ~have[Kind.B]),
        (Kind.W, have[Kind.I] & ~have[Kind.W] & ~have[Kind.B]),
    ]
    if schedule.has_transfers:
        home = np.asarray(schedule.placement)
        up = np.append(home[:-1] != home[1:], False)[:, None]  # stage s and s + 1 live apart
        down = np.roll(up, 1, axis=0)
        back = up & schedule.training
        needed = {
            Kind.SEND_F: up,
            Kind.RECV_B: back,
            Kind.RECV_F: down,
            Kind.SEND_B: np.roll(back, 1, axis=0),
        }
        wanted += [(kind, apart & ~have[kind]) for kind, apart in needed.items()]
        for kind, apart in needed.items():
            if (extra := np.argwhere(have[kind] & ~apart)).size:
                s, k = map(int, extra[0])
                _fail(
                    schedule,
                    f"{Action(s, kind, k)} has no other side on another device: remove it",
                    [schedule.position[kind, s, k]],
                )
    for kind, missing in wanted:
        if missing.any():
            s, k = map(int, np.argwhere(missing)[0])
            more = f" (and {missing.sum() - 1} more like it)" if missing.sum() > 1 else ""
            _fail(
                schedule,
                f"{Action(s, kind, k)} is missing on device {schedule.placement[s]}{more}: add it",
            )
    if (both := np.argwhere(have[Kind.B] & split)).size:
        s, k = map(int, both[0])
        _fail(
            schedule,
            f"stage {s} has a full backward B and also I or W for micro-batch {k}: B is both of them",
            [i for i in schedule.position[[Kind.B, Kind.I, Kind.W], s, k] if i >= 0],
        )


def _check_order(schedule: Schedule) -> None:
    at = schedule.position
    gradient = np.maximum(at[Kind.B], at[Kind.I])
    last_backward = np.maximum(at[Kind.B], at[Kind.W])
    pairs = [(at[Kind.F], gradient), (at[Kind.I], at[Kind.W])]
    update = np.repeat(
        at[Kind.U, :, : schedule.updates], schedule.per_update, axis=1
    )  # of each micro-batch's group
    pairs += [(last_backward, update)]
    pairs += [
        (update[:, : -schedule.per_update], last_backward[:, schedule.per_update :])
    ]  # the next group adds to new sums
    if schedule.has_transfers:
        pairs += [(at[Kind.RECV_F], at[Kind.F]), (at[Kind.F], at[Kind.SEND_F])]
        pairs += [(at[Kind.RECV_B], gradient), (gradient, at[Kind.SEND_B])]
    for before, after in pairs:
        if (wrong := np.argwhere((before >= 0) & (after >= 0) & (before > after))).size:
            i, j = (int(x[tuple(wrong[0])]) for x in (before, after))
            device, needed = schedule.columns.device[i], schedule.action(i)
            _fail(
                schedule,
                f"{schedule.action(j)} stands before {needed} on device {device}: it needs {needed} first",
                (i, j),
            )


def _check_versions(schedule: Schedule) -> None:
    if (wrong := np.argwhere(schedule.versions > schedule.latest)).size:
        s, k = map(int, wrong[0])
        read, made = schedule.versions[s, k], schedule.latest[s, k]
        problem = f"{Action(s, Kind.F, k)} reads weight version {read} ({schedule.reads.name}), but its row has made only {made}"
        _fail(
            schedule,
            f"{problem} before it: move the update up or change `reads`",
            [schedule.position[Kind.F, s, k]],
        )


def check_deadlock(schedule: Schedule, head: list[int]) -> None:
    """Given how far each row got, raise a ScheduleError with the shortest wait-for cycle if some row did not end."""
    stuck = {d: i for d, i in enumerate(head) if i < schedule.bounds[d + 1]}
    if not stuck:
        return
    needed = {d: int(schedule.needs[i]) for d, i in stuck.items()}
    needs = {d: j if j >= 0 else -2 - j for d, j in needed.items()}
    device = schedule.columns.device
    cycle = _shortest_cycle({d: int(device[j]) for d, j in needs.items()})
    steps = [
        f"device {d} holds at {schedule.action(stuck[d])} until {schedule.action(needs[d])} on device {device[needs[d]]}"
        for d in cycle
    ]
    _fail(
        schedule,
        f"deadlock: {'; '.join(steps)}: change the order of one of them",
        [stuck[d] for d in cycle],
    )


def _shortest_cycle(after: dict[int, int]) -> list[int]:
    """The shortest cycle where every node has one successor."""
    cycles = []
    for node in after:
        path = [node]
        while (node := after[node]) not in path:
            path.append(node)
        cycles.append(path[path.index(node) :])
    return min(cycles, key=len)
