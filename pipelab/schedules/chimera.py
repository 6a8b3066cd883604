"""Chimera (Li and Hoefler 2021, arXiv 2107.06925): two pipelines, one from each end.

0F0 0F1 .   7F2 7B2 7F3 7B3 0B0 .   0B1 0U0 7U0     p = 4, m = 4: stages 4 to 7 are copies
.   1F0 6F2 1F1 6F3 6B2 1B0 6B3 1B1 1U0 6U0 .       of stages 0 to 3, on devices 3 to 0
.   5F2 2F0 5F3 2F1 2B0 5B2 2B1 5B3 2U0 5U0 .
4F2 4F3 .   3F0 3B0 3F1 3B1 4B2 .   4B3 3U0 4U0
"""

from pipelab.schedules.rows import Rows, generated
from pipelab.table.action import Action, B, F, ScheduleError, U


@generated(copies=2)
def chimera(devices: int, microbatches: int) -> Rows:
    """Two copies of the model: half of every p micro-batches goes down the devices, half goes up.

    If forwards take as long as backwards, a batch's bubble is p - 2 of them (the paper's table 2).
    Made for an even p and a multiple of p; other m drop the absent micro-batches from that table.

    >>> from pipelab import Costs, simulate
    >>> t = simulate(chimera(4, 8), Costs(input_grad=0.5, weight_grad=0.5))
    >>> t.makespan - t.ideal
    2.0
    """
    p = check_even(devices, "chimera")
    for device in range(p):
        at: dict[Action, int] = {}
        for begin in range(0, microbatches, p):
            for k in range(begin, begin + p // 2):
                # Slots of one action: what goes up fills those that what goes down leaves free.
                down = device, device, k
                up = p - 1 - device, 2 * p - 1 - device, k + p // 2
                for place, stage, number in (down, up):
                    at[F(stage, number)] = 2 * k + place
                    at[B(stage, number)] = 2 * (k + p) - 1 - place
        row = sorted((a for a in at if a.microbatch < microbatches), key=at.__getitem__)
        yield [*row, U(device), U(2 * p - 1 - device)]


def check_even(devices: int, name: str) -> int:
    """The number of devices; ScheduleError for an odd one."""
    if devices % 2:
        raise ScheduleError(
            f"{name} needs an even number of devices, got {devices}: half go down, half up"
        )
    return devices
