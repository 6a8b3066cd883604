"""A plan among its rivals: throughput over memory."""

import numpy as np
from matplotlib.axes import Axes

from pipelab.optimize.plan import Answer, Plan
from pipelab.plot import style


def plan(answer: Answer, ax: Axes | None = None) -> Axes:
    """Throughput over the memory of the fullest device.

    Dots are all choices, by their bounds: more throughput and less memory than any of them could
    have. Steps are the frontier of what was simulated, if the answer has one: the most that a
    device of so much memory can reach. Numbers are the runners-up, as the answer lists them.
    """
    ax = style.axes(ax, 9, 4.2)
    limit, batch = answer.problem.machine.memory, answer.problem.batch
    others = [runner.plan for runner in answer.runners_up]
    # [1] all choices
    memory, seconds = np.array(answer.bounds).T
    ax.plot(
        memory / 1e9,
        batch / seconds,
        ".",
        color=style.lighter(style.GREY, 0.6),
        ms=2,
        label="a choice, by its bounds",
        zorder=1,
    )
    # [2] the limit, the best plan, the runners-up
    ax.axvline(limit / 1e9, color=style.GREY, ls="--", lw=1, label="memory of a device")
    name = f"best: {answer.best.choice.schedule}"
    ax.plot(*_at(answer.best), "*", color=style.RED, ms=14, label=name, zorder=4)
    if others:
        ax.plot(*_at(*others), "s", color=style.ORANGE, ms=5, label="runner-up", zorder=3)
    for number, plan in enumerate(others, 1):
        place = plan.memory / 1e9, plan.throughput
        ax.annotate(str(number), place, (5, 4), textcoords="offset points", fontsize=9)
    shown = [answer.best, *answer.frontier, *others]
    sizes = [plan.memory for plan in shown] + [limit] * (limit < np.inf)
    right = 1.15 * max(sizes) / 1e9
    # [3] the frontier: what fits stays possible with more memory
    if answer.frontier:
        x, y = _at(*answer.frontier[::-1])
        ax.step([*x, right], [*y, y[-1]], where="post", color=style.BLUE, lw=1.5, zorder=2)
        ax.plot(x, y, "o", color=style.BLUE, ms=4, label="frontier", zorder=2)
    top = 1.2 * max(plan.throughput for plan in shown)
    ax.set(xlim=(0, right), ylim=(0, top), xlabel="GB of the fullest device", ylabel="samples/s")
    style.legend(ax)
    return ax


def _at(*plans: Plan) -> tuple[list[float], list[float]]:
    """Memory and throughput of each."""
    return [plan.memory / 1e9 for plan in plans], [plan.throughput for plan in plans]
