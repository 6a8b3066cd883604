"""Zero-bubble schedules made for costs and a memory limit (Qi et al. 2023, arXiv 2401.10241).

Between ZB-H1 (3 micro-batches fit) and ZB-H2 (5 fit): p = 3, m = 5, and 4 fit.

0F0 0F1 0F2 0F3 .   0I0 0W0 0I1 0F4 0I2 0W1 0I3 0W2 0W3 0I4 0W4 0U0 .
.   1F0 1F1 1F2 1I0 1F3 1I1 1W0 1I2 1F4 1I3 1W1 1W2 1I4 1W3 1W4 1U0 .
.   .   2F0 2I0 2F1 2I1 2F2 2I2 2F3 2I3 2W0 2F4 2I4 2W1 2W2 2W3 2W4 2U0

ZB-V (section 6), p = 2, m = 3, F = I = W: after its first forward, no device waits. Device 0 holds
stages 0 and 3, device 1 stages 1 and 2; so the first and the last stage are on one device.

0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 0I1 3W2 0I2 0W1 0W2 0U0 3U0 .
.   1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 1I1 2I2 1I2 2W1 1W1 2W2 1W2 1U0 2U0
"""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

from pipelab.optimize.order.list_scheduler import drafts
from pipelab.optimize.order.problem import OrderProblem
from pipelab.predict.costs import Costs
from pipelab.predict.simulate import simulate
from pipelab.schedules import make
from pipelab.table.action import ScheduleError, check_counts
from pipelab.table.placement import loop_placement, v_placement
from pipelab.table.schedule import Schedule
from pipelab.table.transform import repeat

# Of one stage a device, and of two in a V.
FIXED = ("zb_h1", "zb_h2", "pipedream_flush", "eager_1f1b", "gpipe", "inter_layer")
IN_A_V = ("v_half", "v_min", "dualpipe_v")


def zb(
    devices: int,
    microbatches: int,
    batches: int = 1,
    costs: Costs | None = None,
    memory: float | None = None,
) -> Schedule:
    """One stage a device: of many tables tried, the one whose longest device span is shortest.

    costs   of its stages, in seconds; activations and weight_activations (bytes) give the share of
            an activation kept from I to W; without bytes, all of it
    memory  how many micro-batches' activations fit on a device. Default: p (ZB-1p); 2 p is ZB-2p;
            fractions count, since W keeps less than I

    The tables come from a list scheduler with several rules, and from the fixed orders that fit,
    whose backwards may be whole. ScheduleError for a memory below one micro-batch.

    >>> zb(4, 8).peak_in_flight
    [4, 4, 4, 4]
    """
    return _fastest("zb", loop_placement, FIXED, devices, microbatches, batches, costs, memory)


def zb_v(
    devices: int,
    microbatches: int,
    batches: int = 1,
    costs: Costs | None = None,
    memory: float | None = None,
) -> Schedule:
    """Two chunks a device in a V, chosen as `zb` chooses.

    costs   of its 2 p stages, as for `zb`
    memory  how many micro-batches' activations (of both chunks) fit on a device; default: p. More
            memory shrinks the bubble if F, I and W differ

    >>> zb_v(4, 8).peak_in_flight
    [8, 8, 8, 8]
    """
    return _fastest("zb_v", v_placement, IN_A_V, devices, microbatches, batches, costs, memory)


def _fastest(
    name: str,
    place: Callable[[int], tuple[int, ...]],
    fixed: tuple[str, ...],
    devices: int,
    microbatches: int,
    batches: int,
    costs: Costs | None,
    memory: float | None,
) -> Schedule:
    devices, microbatches, batches = check_counts(
        devices=devices, microbatches=microbatches, batches=batches
    )
    limit = devices if memory is None else memory
    problem = OrderProblem(Costs() if costs is None else costs, place(devices), microbatches, limit)
    if not (best := _best(problem, fixed)):
        raise ScheduleError(
            f"memory={memory!r}: {name} finds no order for {devices} devices; give at least 1, or "
            f"None for {devices}"
        )
    return replace(repeat(best, batches), name=name)


@lru_cache(maxsize=16)
def _best(problem: OrderProblem, fixed: tuple[str, ...]) -> Schedule | None:
    """Of the fixed orders, and of the list scheduler's, the fastest that fits."""

    def span(table: Schedule) -> tuple[float, float, int]:
        timeline = simulate(table, problem.costs)
        # The next batch waits for the longest span; among equals, fewer activations are better.
        return timeline.span, timeline.makespan, max(timeline.peak_in_flight)

    # [1] The fixed orders, and ahead of them the list scheduler's: `min` keeps the first of equals.
    tables = [make(order, problem.devices, problem.microbatches) for order in fixed]
    # With less memory it could not start a forward.
    if problem.memory >= 1:
        tables.insert(0, min(drafts(problem), key=lambda draft: draft.span).table)
    # [2] The fastest that fits.
    return min(filter(problem.fits, tables), key=span, default=None)
