"""Closed forms of the schedules that have them, each with where it comes from and what it assumes.

`p` devices, `m` micro-batches a batch, `v` chunks a device, `batches`; `device` counts from 0. All
of them assume equal stages, and updates and transfers that take no time; the tests compare every
one with the simulator. GPipe: arXiv 1811.06965, PipeDream: 1806.03377, 2BW:
2006.09503, Megatron-LM: 2104.04473, zero bubble: 2401.10241, controllable memory: 2405.15362.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Theory:
    """The closed forms of one schedule.

    over_ideal  (p, m, v, batches) -> (makespan - ideal) / ideal; of split backwards with F = I = W
    in_flight   (device, p, m, v, batches) -> most micro-batches (chunk activations) held at once
    versions    (device, p, m, v, batches) -> most weight versions of a stage
    bubble      over ideal, as the papers write it
    share       the same as a share of the total time
    for_weights (device, p, m) -> how many of those at the peak are past their I and wait for W, and
                so take M_W bytes each instead of M_B (M_W <= M_B)
    holds       (p, m, v) -> whether `over_ideal` equals the simulation's
    """

    over_ideal: Callable[[int, int, int, int], float]
    in_flight: Callable[[int, int, int, int, int], int]
    versions: Callable[[int, int, int, int, int], int]
    bubble: str
    share: str
    for_weights: Callable[[int, int, int], int] = lambda device, p, m: 0
    holds: Callable[[int, int, int], bool] = lambda p, m, v: True

    def of_total(self, p: int, m: int, v: int = 1, batches: int = 1) -> float:
        """Idle share of all device time; the same bubble over another denominator: x / (1 + x)."""
        x = self.over_ideal(p, m, v, batches)
        return x / (1 + x)


# GPipe, section 2.3; one version: 2BW, section 3.2. A flush after every batch.
_gpipe = Theory(
    over_ideal=lambda p, m, v, batches: (p - 1) / m,
    in_flight=lambda device, p, m, v, batches: m,
    versions=lambda *sizes: 1,
    bubble="(p - 1) / m",
    share="(p - 1) / (m + p - 1)",
)
# PipeDream, sections 3.3 and 3.4: weight stashing without vertical sync, no replicated stage; only
# the start and the end of training are idle. p - s versions on stage s, fewer while fewer than
# 2 (p - s) - 2 micro-batches run in all.
_pipedream = Theory(
    over_ideal=lambda p, m, v, batches: (p - 1) / (m * batches),
    in_flight=lambda device, p, m, v, batches: min(m * batches, p - device),
    versions=lambda device, p, m, v, batches: min(
        p - device, m * batches, max(2, m * batches - (p - device) + 2)
    ),
    bubble="(p - 1) / (m x batches)",
    share="(p - 1) / (m x batches + p - 1)",
)
# Megatron-LM, section 2.2.1.
_flush = replace(
    _gpipe,
    in_flight=lambda device, p, m, v, batches: min(m, p - device),
)

THEORY: dict[str, Theory] = {
    # GPipe, section 2.2, figure 2b.
    "inter_layer": replace(
        _gpipe,
        over_ideal=lambda p, m, v, batches: p - 1,
        in_flight=lambda *sizes: 1,
        bubble="p - 1",
        share="(p - 1) / p",
    ),
    "gpipe": _gpipe,
    "pipedream": _pipedream,
    # 2BW, section 3.1: m >= p; two versions from the second batch on.
    "pipedream_2bw": replace(_pipedream, versions=lambda device, p, m, v, batches: min(batches, 2)),
    "pipedream_flush": _flush,
    # Megatron-LM, section 2.2.2: p divides m (else the bubble is larger).
    "interleaved": replace(
        _gpipe,
        over_ideal=lambda p, m, v, batches: (p - 1) / (v * m),
        in_flight=lambda device, p, m, v, batches: min(
            m * v, 2 * (p - device - 1) + (v - 1) * p + 1 if v > 1 else p - device
        ),
        bubble="(p - 1) / (v m)",
        share="(p - 1) / (v m + p - 1)",
        holds=lambda p, m, v: v == 1 or m % p == 0,
    ),
    # arXiv 2211.05953, section 4: m >= p (else a chunk waits for the one before).
    "looped_bfs": replace(
        _gpipe,
        over_ideal=lambda p, m, v, batches: (p - 1 + (v - 1) * max(p - m, 0)) / (v * m),
        in_flight=lambda device, p, m, v, batches: m * v,
        bubble="(p - 1) / (v m)",
        share="(p - 1) / (v m + p - 1)",
    ),
    # arXiv 2211.05322, section 4.
    "eager_1f1b": replace(
        _flush,
        in_flight=lambda device, p, m, v, batches: min(m, 2 * (p - device) - 1),
    ),
    # Zero bubble, section 2.3: F = I = W, m >= p. Stage s keeps (p - s) M_B + s M_W.
    "zb_h1": replace(
        _gpipe,
        over_ideal=lambda p, m, v, batches: (p - 1 + max(p - m, 0)) / (3 * m),
        in_flight=lambda device, p, m, v, batches: min(m, p),
        bubble="(p - 1) (F + I - W) / (m (F + I + W))",
        share="(p - 1) / (3 m + p - 1)",
        for_weights=lambda device, p, m: max(min(m, p) - (p - device), 0),
    ),
    # The same, m >= 2 p - 1: a device waits only before its first forward and after its last
    # update, from where the next batch goes on. Stage s keeps (2 (p - s) - 1) M_B + 2 s M_W.
    "zb_h2": replace(
        _gpipe,
        over_ideal=lambda p, m, v, batches: (
            (p - 1 + max(2 * p - 1 - m, 0) // 2 + (batches - 1) * max(2 * p - 1 - m, 0))
            / (3 * m * batches)
        ),
        in_flight=lambda device, p, m, v, batches: min(m, 2 * p - 1),
        bubble="(p - 1) / (3 m x batches)",
        share="(p - 1) / (3 m x batches + p - 1)",
        for_weights=lambda device, p, m: max(min(m, 2 * p - 1) - (2 * (p - device) - 1), 0),
    ),
    # Two chunks a device in a V: peaks are chunk activations, two of a micro-batch on a device.
    # Zero bubble, section 6: F = I = W, m >= p; from 2 p - 1 on a device waits only before its
    # first forward and after its last update.
    "zb_v": replace(
        _gpipe,
        over_ideal=lambda p, m, v, batches: (
            (p - 1 + (batches - 1) * max(2 * p - 1 - m, 0)) / (6 * m * batches)
        ),
        in_flight=lambda device, p, m, v, batches: 2 * min(m, p),
        bubble="(p - 1) / (6 m x batches)",
        share="(p - 1) / (6 m x batches + p - 1)",
        holds=lambda p, m, v: m >= p,
    ),
    # Controllable memory, section 3: F = I = W, m >= p > 2.
    "v_half": replace(
        _gpipe,
        over_ideal=lambda p, m, v, batches: max(3 * p - (4 if p % 2 else 7), p - 1) / (6 * m),
        in_flight=lambda device, p, m, v, batches: min(2 * m, m + device + 1, 2 * ((p + 2) // 2)),
        bubble="(3 p - 7) / (6 m); p odd: (3 p - 4) / (6 m)",
        share="(3 p - 7) / (6 m + 3 p - 7)",
        holds=lambda p, m, v: m >= p != 2,
    ),
    "v_min": replace(
        _gpipe,
        over_ideal=lambda p, m, v, batches: max(4 * p - (7, 5, 6)[p % 3], p - 1) / (6 * m),
        in_flight=lambda device, p, m, v, batches: min(2 * m, m + device + 1, 2 * ((p + 4) // 3)),
        bubble="(4 p - c) / (6 m), c = 7, 5, 6 where p mod 3 = 0, 1, 2",
        share="(4 p - c) / (6 m + 4 p - c)",
        holds=lambda p, m, v: m >= p != 2,
    ),
    # DeepSeek-V3, arXiv 2412.19437, section 3.2.1: F = I = W, m >= 2 p; a forward and a backward
    # one after the other, where the paper overlaps them.
    "dualpipe_v": replace(
        _gpipe,
        over_ideal=lambda p, m, v, batches: (p - 1) / (6 * m),
        in_flight=lambda device, p, m, v, batches: min(2 * m, m + device + 1, 2 * p + 1),
        bubble="(p - 1) (F + I - W) / (2 m (F + I + W))",
        share="(p - 1) / (6 m + p - 1)",
        holds=lambda p, m, v: m >= 2 * p,
    ),
}
