"""Closed forms of the schedules that have them, each with where it comes from and what it assumes.

`p` devices, `m` micro-batches a batch, `v` chunks a device, `batches`; `device` counts from 0. All
of them assume equal stages and updates that take no time, and all but `idle` no transfer time; the
tests compare every one with the simulator.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple


class Source(NamedTuple):
    formula: str
    paper: str
    section: str


@dataclass(frozen=True)
class Theory:
    """The closed forms of one schedule.

    over_ideal  (p, m, v, batches) -> (makespan - ideal) / ideal; of split backwards with F = I = W
    in_flight   (device, p, m, v, batches) -> most micro-batches (chunk activations) held at once
    for_weights (device, p, m) -> how many of those at the peak are past their I and wait for W:
                they take M_W bytes each, the others M_B (M_W <= M_B)
    versions    (device, p, m, v, batches) -> most weight versions of a stage
    idle        (p, m, F, I, W, transfer) -> seconds of the longest device span without compute,
                where F >= W, I >= W and m >= 2 p - 1; with transfers, which are short against
                these, p divides m. None for a schedule without such a formula
    bubble, peak, stash  the formula as written, its paper and section; the bubble over ideal
    share       the bubble's formula as a share of the total time
    assumes     beyond equal stages, no transfer time and free updates
    """

    over_ideal: Callable[[int, int, int, int], float]
    in_flight: Callable[[int, int, int, int, int], int]
    versions: Callable[[int, int, int, int, int], int]
    bubble: Source
    share: str
    peak: Source
    stash: Source
    assumes: str
    for_weights: Callable[[int, int, int], int] = lambda device, p, m: 0
    idle: Callable[[int, int, float, float, float, float], float] | None = None

    def of_total(self, p: int, m: int, v: int = 1, batches: int = 1) -> float:
        """Idle share of all device time; the same bubble over another denominator: x / (1 + x)."""
        x = self.over_ideal(p, m, v, batches)
        return x / (1 + x)


_GPIPE = "arXiv 1811.06965"
_PIPEDREAM = "arXiv 1806.03377"
_2BW = "arXiv 2006.09503"
_MEGATRON = "arXiv 2104.04473"
_ZERO_BUBBLE = "arXiv 2401.10241"
_CONTROLLABLE = "arXiv 2405.15362"
_DUALPIPE = "arXiv 2412.19437"
_CONTINUOUS = "only the start and the end of training are idle"

_gpipe = Theory(
    over_ideal=lambda p, m, v, batches: (p - 1) / m,
    in_flight=lambda device, p, m, v, batches: m,
    versions=lambda *sizes: 1,
    bubble=Source("(p - 1) / m", _GPIPE, "2.3"),
    share="(p - 1) / (m + p - 1)",
    peak=Source("m", _MEGATRON, "2.2.1"),
    stash=Source("1", _2BW, "3.2"),
    assumes="a flush after every batch",
)
_pipedream = Theory(
    over_ideal=lambda p, m, v, batches: (p - 1) / (m * batches),
    in_flight=lambda device, p, m, v, batches: min(m * batches, p - device),
    versions=lambda device, p, m, v, batches: min(
        p - device, m * batches, max(2, m * batches - (p - device) + 2)
    ),
    bubble=Source("(p - 1) / (m x batches)", _PIPEDREAM, "3.3"),
    share="(p - 1) / (m x batches + p - 1)",
    peak=Source("p - s on stage s", _PIPEDREAM, "3.3"),
    stash=Source(
        "p - s on stage s; fewer while fewer than 2 (p - s) - 2 micro-batches run in all",
        _PIPEDREAM,
        "3.4",
    ),
    assumes=f"weight stashing without vertical sync, no replicated stage; {_CONTINUOUS}",
)

_flush = replace(
    _gpipe,
    in_flight=lambda device, p, m, v, batches: min(m, p - device),
    bubble=Source("(p - 1) / m", _MEGATRON, "2.2.1"),
    peak=Source("min(m, p - s) on stage s", _MEGATRON, "2.2.1"),
    idle=lambda p, m, f, i, w, transfer: (
        (p - 1) * (f + i + w) + transfer * (2 * m * (p - 1) / p + 2 * max(p - 2, 0))
    ),
)

THEORY: dict[str, Theory] = {
    "inter_layer": replace(
        _gpipe,
        over_ideal=lambda p, m, v, batches: p - 1,
        in_flight=lambda *sizes: 1,
        bubble=Source("p - 1", _GPIPE, "2.2, figure 2b"),
        share="(p - 1) / p",
        peak=Source("1", _GPIPE, "2.2, figure 2b"),
        assumes="nothing more",
    ),
    "gpipe": _gpipe,
    "pipedream": _pipedream,
    "pipedream_2bw": replace(
        _pipedream,
        versions=lambda device, p, m, v, batches: min(batches, 2),
        bubble=_pipedream.bubble._replace(paper=_2BW, section="3.1"),
        peak=_pipedream.peak._replace(paper=_2BW, section="3.1"),
        stash=Source("2", _2BW, "3.1"),
        assumes=f"m >= p; two versions from the second batch on; {_CONTINUOUS}",
    ),
    "pipedream_flush": _flush,
    "interleaved": replace(
        _gpipe,
        over_ideal=lambda p, m, v, batches: (p - 1) / (v * m),
        in_flight=lambda device, p, m, v, batches: min(
            m * v, 2 * (p - device - 1) + (v - 1) * p + 1 if v > 1 else p - device
        ),
        bubble=Source("(p - 1) / (v m)", _MEGATRON, "2.2.2"),
        share="(p - 1) / (v m + p - 1)",
        peak=Source(
            "min(m v, 2 (p - r - 1) + (v - 1) p + 1) chunks on device r", _MEGATRON, "2.2.2"
        ),
        assumes="p divides m (else the bubble is larger); a flush after every batch",
    ),
    "looped_bfs": replace(
        _gpipe,
        over_ideal=lambda p, m, v, batches: (p - 1 + (v - 1) * max(p - m, 0)) / (v * m),
        in_flight=lambda device, p, m, v, batches: m * v,
        bubble=Source("(p - 1) / (v m)", "arXiv 2211.05953", "4"),
        share="(p - 1) / (v m + p - 1)",
        peak=Source("m v chunks", "arXiv 2211.05953", "4"),
        assumes="m >= p (else a chunk waits for the one before); a flush after every batch",
    ),
    "eager_1f1b": replace(
        _flush,
        in_flight=lambda device, p, m, v, batches: min(m, 2 * (p - device) - 1),
        peak=Source("min(m, 2 (p - s) - 1) on stage s", "arXiv 2211.05322", "4"),
        idle=None,
    ),
    "zb_h1": replace(
        _gpipe,
        over_ideal=lambda p, m, v, batches: (p - 1 + max(p - m, 0)) / (3 * m),
        in_flight=lambda device, p, m, v, batches: min(m, p),
        bubble=Source("(p - 1) (F + I - W) / (m (F + I + W))", _ZERO_BUBBLE, "2.3"),
        share="(p - 1) / (3 m + p - 1)",
        peak=Source("(p - s) M_B + s M_W on stage s", _ZERO_BUBBLE, "2.3"),
        assumes="F = I = W; m >= p; a flush after every batch",
        for_weights=lambda device, p, m: max(min(m, p) - (p - device), 0),
        idle=lambda p, m, f, i, w, transfer: (p - 1) * (f + i - w + 4 * transfer),
    ),
    "zb_h2": replace(
        _gpipe,
        over_ideal=lambda p, m, v, batches: (
            (p - 1 + max(2 * p - 1 - m, 0) // 2 + (batches - 1) * max(2 * p - 1 - m, 0))
            / (3 * m * batches)
        ),
        in_flight=lambda device, p, m, v, batches: min(m, 2 * p - 1),
        bubble=Source("(p - 1) / (3 m x batches)", _ZERO_BUBBLE, "2.3"),
        share="(p - 1) / (3 m x batches + p - 1)",
        peak=Source("(2 (p - s) - 1) M_B + 2 s M_W on stage s", _ZERO_BUBBLE, "2.3"),
        assumes="F = I = W; m >= 2 p - 1; a device waits only before its first forward and after "
        "its last update, from where the next batch goes on",
        for_weights=lambda device, p, m: max(min(m, 2 * p - 1) - (2 * (p - device) - 1), 0),
        idle=lambda p, m, f, i, w, transfer: (p - 1) * (f + i - 2 * w + 2 * transfer),
    ),
}

# Two chunks a device in a V: peaks are chunk activations, two of a micro-batch on a device.
_v = replace(
    _gpipe,
    in_flight=lambda device, p, m, v, batches: 2 * min(m, p),
    peak=Source("2 p chunks", _ZERO_BUBBLE, "6"),
)


def _v_half_idle(p: int) -> int:
    """Makespan less ideal in slots of one action, F = I = W: of V-Half."""
    return max(3 * p - (4 if p % 2 else 7), p - 1)


def _v_min_idle(p: int) -> int:
    """The same of V-Min."""
    return max(4 * p - (7, 5, 6)[p % 3], p - 1)


THEORY |= {
    "zb_v": replace(
        _v,
        over_ideal=lambda p, m, v, batches: (
            (p - 1 + (batches - 1) * max(2 * p - 1 - m, 0)) / (6 * m * batches)
        ),
        bubble=Source("(p - 1) / (6 m x batches)", _ZERO_BUBBLE, "6"),
        share="(p - 1) / (6 m x batches + p - 1)",
        assumes="F = I = W; m >= p, and from 2 p - 1 on a device waits only before its first "
        "forward and after its last update",
    ),
    "v_half": replace(
        _v,
        over_ideal=lambda p, m, v, batches: _v_half_idle(p) / (6 * m),
        in_flight=lambda device, p, m, v, batches: min(2 * m, m + device + 1, 2 * ((p + 2) // 2)),
        bubble=Source("(3 p - 7) / (6 m); p odd: (3 p - 4) / (6 m)", _CONTROLLABLE, "3"),
        share="(3 p - 7) / (6 m + 3 p - 7)",
        peak=Source("2 floor((p + 2) / 2) chunks", _CONTROLLABLE, "3"),
        assumes="F = I = W; m >= p > 2; a flush after every batch",
    ),
    "v_min": replace(
        _v,
        over_ideal=lambda p, m, v, batches: _v_min_idle(p) / (6 * m),
        in_flight=lambda device, p, m, v, batches: min(2 * m, m + device + 1, 2 * ((p + 4) // 3)),
        bubble=Source("(4 p - c) / (6 m), c = 7, 5, 6 where p mod 3 = 0, 1, 2", _CONTROLLABLE, "3"),
        share="(4 p - c) / (6 m + 4 p - c)",
        peak=Source("2 floor((p + 4) / 3) chunks", _CONTROLLABLE, "3"),
        assumes="F = I = W; m >= p > 2; a flush after every batch",
    ),
    "dualpipe_v": replace(
        _v,
        over_ideal=lambda p, m, v, batches: (p - 1) / (6 * m),
        in_flight=lambda device, p, m, v, batches: min(2 * m, m + device + 1, 2 * p + 1),
        bubble=Source("(p - 1) (F + I - W) / (2 m (F + I + W))", _DUALPIPE, "3.2.1"),
        share="(p - 1) / (6 m + p - 1)",
        peak=Source("2 p + 1 chunks", _DUALPIPE, "3.2.1"),
        assumes="F = I = W; m >= 2 p; a forward and a backward one after the other, where the "
        "paper overlaps them; a flush after every batch",
    ),
}
