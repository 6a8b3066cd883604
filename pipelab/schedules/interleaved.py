"""Interleaved 1F1B (Narayanan et al. 2021, arXiv 2104.04473, figure 4): v chunks on every device.

0F0 0F1 2F0 2F1 .   2B0 .   2B1 0B0 0B1 0U0 2U0     p = 2, v = 2, m = 2: device 0 holds stages
.   1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1 1U0 3U0 .       0 and 2, device 1 1 and 3; chunks take turns
"""

import numpy as np

from pipelab.action import Kind, check_counts, every_batch, insert_updates, one_kind
from pipelab.placement import loop_placement
from pipelab.schedule import Schedule
from pipelab.schedules.pipedream import one_forward_one_backward, one_stage


def interleaved(devices: int, microbatches: int, virtual: int = 2, batches: int = 1) -> Schedule:
    """1F1B over v chunks a device, placed in a loop (stage s on device s mod p); a flush after each
    batch.

    Chunks take turns by rounds of p micro-batches. Where p does not divide m, the table of the next
    multiple is built and the absent micro-batches are dropped, spread evenly over the rounds:
    dependencies stay inside a micro-batch, so a valid table minus whole micro-batches stays valid,
    and no more is in flight than with the multiple. (Rounds of more than p would be faster, and
    hold more.) With virtual=1 it is `pipedream_flush`, row for row.

    >>> interleaved(4, 8, virtual=2).peak_in_flight
    [11, 9, 7, 5]
    """
    check_counts(devices=devices, microbatches=microbatches, virtual=virtual, batches=batches)
    rows = [
        every_batch(_one_batch(d, devices, microbatches, virtual), batches, microbatches)
        for d in range(devices)
    ]
    rows = insert_updates(rows, microbatches)
    placement = loop_placement(devices, virtual)
    return Schedule("interleaved", rows, placement, microbatches, batches)


def _one_batch(device: int, devices: int, microbatches: int, virtual: int) -> np.ndarray:
    """A device's row for one batch: that of the full table, without the absent micro-batches."""
    if virtual == 1:  # a micro-batch waits for no round
        return one_stage(device, devices, np.arange(microbatches))
    # A chunk's first backward comes back after a trip over all later devices and return.
    warmup = 2 * (devices - device - 1) + (virtual - 1) * devices
    rounds = -(-microbatches // devices)  # rounded up
    slots = np.full((rounds, 1, devices), -1)  # of each round; -1: no micro-batch stands there
    for of_round, present in zip(slots, np.array_split(range(microbatches), rounds), strict=True):
        of_round[0, : len(present)] = present
    stages = np.arange(virtual)[:, None] * devices + device  # one for each chunk
    full = one_forward_one_backward(
        one_kind(stages, Kind.F, slots), one_kind(stages[::-1], Kind.B, slots), warmup
    )
    return full[full[:, 2] >= 0]
