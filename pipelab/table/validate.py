"""Is a table complete, in order and free of deadlock? The error draws the grid with the fault
marked."""

from collections.abc import Iterable, Iterator
from typing import NoReturn

from pipelab.table.action import Action, F, Kind, ScheduleError
from pipelab.table.schedule import Schedule

LARGEST_DRAWN = 2_000  # actions of a table that an error draws


def validate(schedule: Schedule) -> Schedule:
    """Return the schedule if it can run; else raise a ScheduleError that marks the fault.

    Checked, in this order: every action is there exactly once (only forwards, if the table has
    nothing else); each row has the order forward, backward, update; each forward's weight version
    exists by then; there is no deadlock, also under rendezvous (each side of a transfer waits for
    the other) if transfers are written out.

    >>> from pipelab.schedules import gpipe
    >>> validate(gpipe(4, 8)).name
    'gpipe'
    """
    check_static(schedule)
    check_deadlock(schedule, schedule.unit_times().head)
    return schedule


def check_static(schedule: Schedule) -> None:
    """Everything but the deadlock."""
    check_type(Schedule, schedule=schedule)
    _check_twice(schedule)
    _check_complete(schedule)
    _check_order(schedule)
    _check_versions(schedule)
    _check_sequences(schedule)


def _fail(schedule: Schedule, problem: str, mark: Iterable[int] = ()) -> NoReturn:
    size = len(schedule.actions)
    if size <= LARGEST_DRAWN:
        picture = schedule.grid(mark)
    else:
        picture = f"(the table of {size} actions is too large to draw)"
    raise ScheduleError(f"{schedule.name}: {problem}\n{picture}")


def _check_twice(schedule: Schedule) -> None:
    if len(schedule.position) == len(schedule.actions):
        return
    for i, action in enumerate(schedule.actions):
        if (last := schedule.position[action]) != i:
            problem = f"{action} appears twice on device {schedule.device_of[i]}: remove one"
            _fail(schedule, problem, (i, last))


def _check_complete(schedule: Schedule) -> None:
    at, found, missing = schedule.position, 0, []
    for cell in _required(schedule):
        if cell in at:
            found += 1
        else:
            missing.append(Action(*cell))
    extra = set(schedule.actions).difference(_required(schedule)) if found < len(at) else set()
    if alone := [action for action in extra if action.kind >= Kind.SEND_F]:
        problem = f"{min(alone)} has no matching transfer on another device: remove it"
        _fail(schedule, problem, [at[min(alone)]])
    if missing:
        first = min(missing, key=lambda a: (a.kind, a.stage, a.microbatch))
        others = sum(action.kind is first.kind for action in missing) - 1
        more = f" (and {others} more like it)" if others else ""
        device = schedule.placement[first.stage]
        _fail(schedule, f"{first} is missing on device {device}{more}: add it")
    if extra:  # what is neither missing nor a transfer
        half = min(extra)
        if half.kind is Kind.F:
            problem = f"micro-batch {half.microbatch} uses two copies of the model: remove one"
            _fail(schedule, problem, [at[half]])
        _fail(
            schedule,
            f"stage {half.stage} has a full backward B and also I or W for micro-batch "
            f"{half.microbatch}: keep B or the pair, not both",
            [at[half._replace(kind=Kind.B)], at[half]],
        )


def _required(schedule: Schedule) -> Iterator[tuple[int, Kind, int]]:
    """The actions of a complete table; a backward is B, or I and W if split. Offloaded activations
    are reloaded."""
    at, home, training = schedule.position, schedule.placement, schedule.training
    f, b, i, w, u, offload, reload, send_f, recv_f, send_b, recv_b = Kind
    offloads = offload in schedule.kinds or reload in schedule.kinds
    taken: list[list[int]] = [[] for _ in range(schedule.copies)]
    for k, copy in enumerate(schedule.copy_of):
        taken[copy].append(k)
    for stage in range(schedule.stages):
        micro_batches = taken[stage // schedule.model_stages]
        yield from ((stage, f, k) for k in micro_batches)
        for k in micro_batches:
            split = (stage, i, k) in at or (stage, w, k) in at
            if split and (stage, b, k) not in at:
                yield stage, i, k
                yield stage, w, k
            elif training:
                yield stage, b, k
            if offloads and ((stage, offload, k) in at or (stage, reload, k) in at):
                yield from ((stage, offload, k), (stage, reload, k))
        if training:
            yield from ((stage, u, number) for number in range(schedule.updates))
    if schedule.has_transfers:
        for stage in range(schedule.stages - 1):
            if home[stage] != home[stage + 1] and not schedule.ends(stage)[1]:
                for k in taken[stage // schedule.model_stages]:
                    yield from ((stage, send_f, k), (stage + 1, recv_f, k))
                    if training:
                        yield from ((stage + 1, send_b, k), (stage, recv_b, k))


# What stands before an action in its row: the same stage's and micro-batch's.
EARLIER = {
    Kind.F: (Kind.RECV_F,),
    Kind.B: (Kind.F, Kind.RECV_B, Kind.RELOAD),
    Kind.I: (Kind.F, Kind.RECV_B, Kind.RELOAD),
    Kind.OFFLOAD: (Kind.F,),
    Kind.RELOAD: (Kind.OFFLOAD,),
    Kind.W: (Kind.I,),
    Kind.SEND_F: (Kind.F,),
    Kind.SEND_B: (Kind.B, Kind.I),
}
LAST = (Kind.B, Kind.W)  # the last of a backward
GRADIENT = (Kind.B, Kind.I)  # what makes an input's gradient


def needed_in_row(schedule: Schedule) -> Iterator[list[tuple[int, Kind, int]]]:
    """For each action, those that must come before it in its row, if the table has them."""
    group, update, slices = schedule.per_update, Kind.U, schedule.per_sequence
    earlier = {
        kind: [other for other in others if other in schedule.kinds]
        for kind, others in EARLIER.items()
    }
    for stage, kind, k in schedule.actions:
        needed = [(stage, other, k) for other in earlier.get(kind, ())]
        # A slice attends to those before it, whose keys get a gradient from it.
        if kind is Kind.F and k % slices:
            needed.append((stage, kind, k - 1))
        elif kind in GRADIENT and (k + 1) % slices:
            needed += [(stage, other, k + 1) for other in GRADIENT]
        if kind is update:
            members = range(k * group, (k + 1) * group)
            needed = [(stage, last, member) for member in members for last in LAST]
        elif kind in LAST and k >= group:
            needed.append((stage, update, k // group - 1))  # the next group adds to new sums
        yield needed


def _check_order(schedule: Schedule) -> None:
    at = schedule.position
    for j, needed in enumerate(needed_in_row(schedule)):
        for cell in needed:
            if at.get(cell, -1) > j:
                action, first = schedule.actions[j], Action(*cell)
                _fail(
                    schedule,
                    f"{action} comes before {first} on device {schedule.device_of[j]}: it needs "
                    f"{first} first",
                    (j, at[first]),
                )


def _check_versions(schedule: Schedule) -> None:
    latest = schedule.latest
    for (stage, k), version in schedule.versions.items():
        if version > latest[stage, k]:
            action = F(stage, k)
            _fail(
                schedule,
                f"{action} reads weight version {version} ({schedule.reads.name}), but its row "
                f"has made only {latest[stage, k]} before it: move the update up or change `reads`",
                [schedule.position[action]],
            )


def _check_sequences(schedule: Schedule) -> None:
    versions = schedule.versions
    for (stage, k), version in versions.items():
        if k % schedule.per_sequence and versions.get((stage, k - 1)) != version:
            _fail(
                schedule,
                f"{F(stage, k)} continues the sequence of {F(stage, k - 1)} with another copy or "
                "version of the model: let a sequence's slices take the same",
                [schedule.position[F(stage, k)]],
            )


def check_deadlock(schedule: Schedule, head: list[int]) -> None:
    """Raise a ScheduleError with the shortest cycle of devices that wait for each other.

    `head` says how far each row got, as `earliest` does.
    """
    holder, steps = {}, {}
    for d, i in enumerate(head):
        if i < schedule.bounds[d + 1]:
            needed = schedule.needs[i]
            # Of two that overlap, the first may have its input.
            if needed is None or needed < head[schedule.device_of[needed]]:
                i, needed = i + 1, schedule.needs[i + 1]
            assert needed is not None, "only a missing input can hold up a row"
            holder[d] = schedule.device_of[needed]
            steps[d] = (
                f"device {d} waits at {schedule.actions[i]} for {schedule.actions[needed]} on "
                f"device {holder[d]}"
            )
    if not holder:
        return
    cycle = _shortest_cycle(holder)
    problem = "; ".join(steps[d] for d in cycle)
    _fail(
        schedule,
        f"deadlock: {problem}: change the order of one of them",
        [head[d] for d in cycle],
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


def check_type(kind: type, **values: object) -> None:
    """ValueError for an argument, by its name, that is not of this class."""
    for name, value in values.items():
        if not isinstance(value, kind):
            raise ValueError(f"{name} is a {type(value).__name__}: give a {kind.__name__}")
