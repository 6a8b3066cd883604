"""Is a table complete, in order and free of deadlock? The error draws the grid with the fault
marked."""

from collections.abc import Iterable
from typing import NoReturn

import numpy as np

from pipelab.action import Action, Kind, ScheduleError
from pipelab.schedule import Schedule

LARGEST_DRAWN = 2_000  # actions of a table that an error draws


def validate(schedule: Schedule) -> Schedule:
    """Return the schedule if it can run; else raise a ScheduleError that marks the fault.

    Checked, in this order: every action there once (of a table of forwards alone: every forward),
    none twice; the order within each row (forward, backward, update); the weight version that each
    forward reads exists by then; no deadlock, also under rendezvous (neither side of a transfer
    goes on alone) where the table writes its transfers out.

    >>> from pipelab.schedules import gpipe
    >>> validate(gpipe(4, 8)).name
    'gpipe'
    """
    check_static(schedule)
    check_deadlock(schedule, schedule.unit_times().head)
    return schedule


def check_static(schedule: Schedule) -> None:
    """Everything but the deadlock, by whole-array comparisons."""
    _check_twice(schedule)
    _check_complete(schedule)
    _check_order(schedule)
    _check_versions(schedule)


def _fail(schedule: Schedule, problem: str, mark: Iterable[int] = ()) -> NoReturn:
    size = schedule.bounds[-1]
    if size <= LARGEST_DRAWN:
        picture = schedule.grid(mark)
    else:
        picture = f"(the table of {size} actions is too large to draw)"
    raise ScheduleError(f"{schedule.name}: {problem}\n{picture}")


def _first(where: np.ndarray) -> list[int]:
    """The first indices at which an array is true; [] if it is nowhere."""
    return np.argwhere(where)[:1].ravel().tolist()


def _check_twice(schedule: Schedule) -> None:
    device, stage, kind, microbatch = schedule.columns
    kept = schedule.position[kind, stage, microbatch]
    if again := _first(kept != np.arange(len(kept))):
        (i,) = again
        problem = f"{schedule.action(i)} stands twice on device {device[i]}: remove one"
        _fail(schedule, problem, (i, int(kept[i])))


def _check_complete(schedule: Schedule) -> None:
    have = schedule.position >= 0  # [kind, stage, micro-batch or update], as `required`
    split = have[Kind.I] | have[Kind.W]
    required = np.zeros_like(have)
    required[Kind.F] = True
    required[[Kind.I, Kind.W]] = split & ~have[Kind.B]
    if schedule.training:
        required[Kind.B] = ~split
        required[Kind.U, :, : schedule.updates] = True
    if schedule.has_transfers:
        home = np.array(schedule.placement)
        apart = (home[:-1] != home[1:])[:, None]  # stages s and s + 1 are on different devices
        required[Kind.SEND_F, :-1] = required[Kind.RECV_F, 1:] = apart
        required[Kind.RECV_B, :-1] = required[Kind.SEND_B, 1:] = apart & schedule.training
        extra = have & ~required
        extra[: Kind.SEND_F] = False
        if found := _first(extra):
            kind, s, k = found
            action = Action(s, Kind(kind), k)
            problem = f"{action} has no other side on another device: remove it"
            _fail(schedule, problem, [schedule.position[kind, s, k]])
    missing = required & ~have
    if found := _first(missing):
        kind, s, k = found
        others = np.count_nonzero(missing[kind]) - 1
        more = f" (and {others} more like it)" if others else ""
        action, device = Action(s, Kind(kind), k), schedule.placement[s]
        _fail(schedule, f"{action} is missing on device {device}{more}: add it")
    if both := _first(have[Kind.B] & split):
        s, k = both
        _fail(
            schedule,
            f"stage {s} has a full backward B and also I or W for micro-batch {k}: B is both of "
            "them",
            schedule.position[[Kind.B, Kind.I, Kind.W], s, k].tolist(),
        )


def _check_order(schedule: Schedule) -> None:
    at, group = schedule.position, schedule.per_update
    gradient = np.maximum(at[Kind.B], at[Kind.I])
    last_backward = np.maximum(at[Kind.B], at[Kind.W])
    update = np.repeat(at[Kind.U, :, : schedule.updates], group, axis=1)  # [stage, micro-batch]
    pairs = [
        (at[Kind.F], gradient),
        (at[Kind.I], at[Kind.W]),
        (last_backward, update),
        (update[:, :-group], last_backward[:, group:]),  # the next group adds to new sums
        (at[Kind.RECV_F], at[Kind.F]),
        (at[Kind.F], at[Kind.SEND_F]),
        (at[Kind.RECV_B], gradient),
        (gradient, at[Kind.SEND_B]),
    ]
    for before, after in pairs:
        if wrong := _first((before >= 0) & (after >= 0) & (before > after)):
            i, j = (int(x[tuple(wrong)]) for x in (before, after))
            needed, device = schedule.action(i), schedule.columns.device[i]
            _fail(
                schedule,
                f"{schedule.action(j)} stands before {needed} on device {device}: it needs "
                f"{needed} first",
                (i, j),
            )


def _check_versions(schedule: Schedule) -> None:
    if wrong := _first(schedule.versions > schedule.latest):
        s, k = wrong
        _fail(
            schedule,
            f"{Action(s, Kind.F, k)} reads weight version {schedule.versions[s, k]} "
            f"({schedule.reads.name}), but its row has made only {schedule.latest[s, k]} before "
            "it: move the update up or change `reads`",
            [schedule.position[Kind.F, s, k]],
        )


def check_deadlock(schedule: Schedule, head: list[int]) -> None:
    """Raise a ScheduleError with the shortest cycle of devices that wait for each other.

    `head` says how far each row got, as `earliest` does.
    """
    stuck = {d: i for d, i in enumerate(head) if i < schedule.bounds[d + 1]}
    if not stuck:
        return
    device, needed = schedule.columns.device, schedule.needs.tolist()
    needs = {d: needed[i] for d, i in stuck.items()}
    cycle = _shortest_cycle({d: int(device[j]) for d, j in needs.items()})
    steps = [
        f"device {d} holds at {schedule.action(stuck[d])} until {schedule.action(needs[d])} on "
        f"device {device[needs[d]]}"
        for d in cycle
    ]
    _fail(
        schedule,
        f"deadlock: {'; '.join(steps)}: change the order of one of them",
        [stuck[d] for d in cycle],
    )


def _shortest_cycle(after: dict[int, int]) -> list[int]:
    """The shortest cycle of a graph where every node has one successor."""
    cycles, seen = [], set()
    for node in after:
        path = []
        while node not in seen:
            seen.add(node)
            path.append(node)
            node = after[node]
        if node in path:
            cycles.append(path[path.index(node) :])
    return min(cycles, key=len)
