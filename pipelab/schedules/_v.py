"""Common ground of the schedules with two chunks a device in a V.

The model's first and last stage are on device 0 (`v_placement`), and nothing is sent between stages
p - 1 and p. A building block (Qi et al. 2024, arXiv 2405.15362) is one micro-batch's passes; a
schedule is that block repeated.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

from pipelab.schedules.rows import Rows
from pipelab.table.action import Action, F, I, Kind, U
from pipelab.table.placement import v_placement

PERIOD = 6  # slots between two micro-batches: each device has F, I and W of two chunks


Block = Callable[[int], tuple[int, int, int, int]]
Slots = dict[Action, int]


def repeated(block: Block, chunks: int, devices: int, microbatches: int) -> Rows:
    """Rows of a building block repeated, then tightened with no more activations held.

    block   device -> when it has F of its first and its second chunk, I of its second and its first
            one, in slots of one action each; from one micro-batch to the next there are PERIOD
    chunks  activations of a chunk (half a micro-batch's on the device) that may be held at once
    """
    few = min(microbatches, 2 * devices + 2)  # of more, only the middle of a row is longer
    home, at = v_placement(devices), _blocks(block, devices, few)
    # [1] W in free slots behind its I, then each action as early as it can be.
    _place_weight_gradients(at, home)
    _tighten(at, home, at, chunks)
    # [2] Behind a device's last forward memory is free: W makes room for I, which others wait for.
    last = {home[a.stage]: at[a] for a in _in_order(at, at) if a.kind is Kind.F}
    drain = [a for a in at if at[a] > last[home[a.stage]]]
    for action in drain:
        if action.kind is Kind.W:
            del at[action]
    _tighten(at, home, [a for a in drain if a.kind is Kind.I], chunks)
    _place_weight_gradients(at, home)
    for device in range(devices):
        row = [a for a in _in_order(at, at) if home[a.stage] == device]
        yield [*_longer(row, microbatches - few), U(device), U(2 * devices - device - 1)]


def _longer(row: list[Action], more: int) -> list[Action]:
    """A row for more micro-batches: in its middle each of them has a period."""
    begin = len(row) // 2
    end = begin + PERIOD
    periods = [_later(a, k) for k in range(1 + more) for a in row[begin:end]]
    return [*row[:begin], *periods, *(_later(a, more) for a in row[end:])]


def _later(action: Action, more: int) -> Action:
    return action._replace(microbatch=action.microbatch + more)


# ---- slots: a device has one action in each


def _blocks(block: Block, devices: int, microbatches: int) -> Slots:
    """Every F and I in the slot that its micro-batch's building block gives it."""
    at = {}
    for device in range(devices):
        first, second = device, 2 * devices - device - 1
        passes = F(first, 0), F(second, 0), I(second, 0), I(first, 0)
        for action, slot in zip(passes, block(device), strict=True):
            for k in range(microbatches):
                at[_later(action, k)] = slot + PERIOD * k
    return at


def _in_order(at: Slots, actions: Iterable[Action]) -> list[Action]:
    return sorted(actions, key=lambda a: (at[a], a.kind, a.stage, a.microbatch))


def _taken(at: Slots, home: Sequence[int]) -> list[set[int]]:
    """The slots of each device where an action stands."""
    taken: list[set[int]] = [set() for _ in home]
    for action, slot in at.items():
        taken[home[action.stage]].add(slot)
    return taken


def _first_free(taken: set[int], slot: int) -> int:
    while slot in taken:
        slot += 1
    return slot


def _place_weight_gradients(at: Slots, home: Sequence[int]) -> None:
    """Every W that has no slot gets its device's first free one behind its I, oldest first."""
    taken = _taken(at, home)
    for action in _in_order(at, at):
        weights = action._replace(kind=Kind.W)
        if action.kind is Kind.I and weights not in at:
            of_device = taken[home[action.stage]]
            at[weights] = _first_free(of_device, at[action] + 1)
            of_device.add(at[weights])


def _tighten(at: Slots, home: Sequence[int], actions: Iterable[Action], chunks: int) -> None:
    """Move actions, in order, into the first free slot where their inputs are there."""
    taken, held = _taken(at, home), _held(at, home)
    for action in _in_order(at, actions):
        device = home[action.stage]
        now, first = at[action], _ready(at, action, last=len(home) - 1)
        if action.kind is Kind.F:
            full = [slot for slot in range(first, now) if held[device][slot] >= chunks]
            first = max([first, *(slot + 1 for slot in full)])
        taken[device].remove(now)
        slot = at[action] = _first_free(taken[device], first)
        taken[device].add(slot)
        if action.kind is Kind.F:
            for between in range(slot, now):
                held[device][between] += 1
        elif action.kind is Kind.W:
            for between in range(slot + 1, now + 1):
                held[device][between] -= 1


def _held(at: Slots, home: Sequence[int]) -> list[list[int]]:
    """The activations of each device in each slot, counted from F's slot to W's."""
    change = [[0] * (max(at.values()) + 2) for _ in home]
    for action, slot in at.items():
        if action.kind is Kind.F:
            change[home[action.stage]][slot] += 1
        elif action.kind is Kind.W:
            change[home[action.stage]][slot + 1] -= 1
    return [[*accumulate(row)] for row in change]


def _ready(at: Slots, action: Action, last: int) -> int:
    """The first slot behind all that an action needs, and the micro-batch before it."""
    stage, kind, k = action
    needs = [Action(stage, kind, k - 1)]
    match kind:
        case Kind.F:
            needs.append(F(stage - 1, k))
        case Kind.I:
            needs.append(I(stage + 1, k) if stage < last else F(stage, k))
        case Kind.W:
            needs.append(I(stage, k))
    return 1 + max(at.get(needed, -1) for needed in needs)
