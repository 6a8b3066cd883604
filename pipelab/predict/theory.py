"""Closed forms of the schedules that have them, each with where it comes from and what it assumes.

`p` devices, `m` micro-batches a batch, `v` chunks a device (or slices a sequence), `batches`;
`device` counts from 0. F, I and W are a micro-batch's seconds on a device, of all its stages;
B = I + W. All forms assume equal stages, and updates, transfers and copies that take no time; the
tests compare every one with the simulator, over all small sizes and many costs. GPipe: arXiv
1811.06965, PipeDream: 1806.03377, 2BW: 2006.09503, Megatron-LM: 2104.04473, zero bubble:
2401.10241, controllable memory: 2405.15362.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from pipelab.predict.costs import Costs
from pipelab.table.action import check_counts

Idle = Callable[[int, int, int, float, float, float], float]


@dataclass(frozen=True)
class Theory:
    """The closed forms of one schedule.

    over_ideal  (p, m, v, batches) -> (makespan - ideal) / ideal; with F = I = W
    in_flight   (device, p, m, v, batches) -> most micro-batches (chunk activations, slices) held at
                once; an upper bound where `peaks` does not hold
    versions    (device, p, m, v, batches) -> most weight versions of a stage
    bubble      over ideal, as the papers write it
    share       the same as a share of the total time, with F = I = W
    for_weights (device, p, m) -> how many of those at the peak are past their I and wait for W, and
                so take M_W bytes each instead of M_B (M_W <= M_B); None where that is not known
    holds       (p, m, v) -> whether `over_ideal` equals the simulation's
    peaks       (p, m, v) -> whether `in_flight` does
    idle        (p, m, v, F, I, W) -> makespan - ideal of one batch, in seconds; None: only that of
                F = I = W is known
    where       (p, m, v, F, I, W) -> whether `idle` equals the simulation's, where `holds` does
    paired      (p, F, I, W, T) -> idle seconds of a middle device (of a V, the last one), if its
                forwards and backwards overlap; a pair takes T, from max(F, B) to F + B; W <= I = F
    """

    over_ideal: Callable[[int, int, int, int], float]
    in_flight: Callable[[int, int, int, int, int], int]
    versions: Callable[[int, int, int, int, int], int]
    bubble: str
    share: str
    for_weights: Callable[[int, int, int], int | None] = lambda device, p, m: 0
    holds: Callable[[int, int, int], bool] = lambda p, m, v: True
    peaks: Callable[[int, int, int], bool] = lambda p, m, v: True
    idle: Idle | None = None
    where: Callable[[int, int, int, float, float, float], bool] = lambda *sizes_and_costs: True
    paired: Callable[[int, float, float, float, float], float] | None = None

    def of_total(self, p: int, m: int, v: int = 1, batches: int = 1) -> float:
        """Idle share of all device time; the same bubble over another denominator: x / (1 + x)."""
        x = self.over_ideal(p, m, v, batches)
        return x / (1 + x)

    def seconds(
        self, p: int, m: int, v: int = 1, *, forward: float, input_grad: float, weight_grad: float
    ) -> float | None:
        """Makespan - ideal of one batch, for a device's costs of a micro-batch; None where no
        closed form holds. ScheduleError or CostError for a size or a cost that no table has.

        >>> costs = {"forward": 2, "input_grad": 2, "weight_grad": 1}
        >>> THEORY["zb_h1"].seconds(4, 8, **costs), THEORY["zb_v"].seconds(4, 8, **costs)
        (9, None)
        """
        check_counts(p=p, m=m, v=v)
        Costs(forward, input_grad, weight_grad)  # raises, for what is no cost
        each = forward, input_grad, weight_grad
        if not self.holds(p, m, v):
            return None
        if self.idle and self.where(p, m, v, *each):
            return self.idle(p, m, v, *each)
        if forward == input_grad == weight_grad:
            return self.over_ideal(p, m, v, 1) * m * sum(each)
        return None


def _of(idle: Idle) -> Callable[[int, int, int, int], float]:
    """`over_ideal` of a schedule with a flush."""
    return lambda p, m, v, batches: idle(p, m, v, 1, 1, 1) / (3 * m)


def _fill(p: int, m: int, v: int, f: float, i: float, w: float) -> float:
    """A fill and a drain of p - 1 steps, each of a chunk's or a slice's forward or backward."""
    return (p - 1) * (f + i + w) / v


def _h1(p: int, m: int, v: int, f: float, i: float, w: float) -> float:
    """A step of the fill is a forward, one of the drain an I; W fills as much of both as the
    shortest of the three takes. Fewer micro-batches than devices leave W that fill nothing."""
    return (p - 1) * (f + i - min(f, i, w)) + max(p - m, 0) * w


def _h2(p: int, m: int, v: int, f: float, i: float, w: float) -> float:
    """The fill is forwards. The drain lasts longer if W cannot fill it, or if I is so long that a
    device waits in its warm-up."""
    return (p - 1) * max(f, f + i - 2 * w, i - f)


def _chimera(p: int, m: int, v: int, f: float, i: float, w: float) -> float:
    """A middle device waits for p / 2 - 1 others twice, at the pace of the longer action; in each
    further round of p micro-batches for as many, by what forwards and backwards differ."""
    return (p - 2) * (max(f, i + w) + (m / p - 1) * abs(i + w - f))


def _whole_rounds(p: int, m: int, v: int) -> bool:
    return v == 1 or m % p == 0


def _dualpipe(steps: float, f: float, i: float, w: float) -> float:
    """A step of the fill is a forward; one of the drain is an I, during which W is done."""
    return steps * (f + i - w)


def _paired(steps: float, f: float, i: float, w: float, pair: float) -> float:
    """The same, and each step waits for a pair where it has a backward alone: the paper's
    steps (F&B + B - 3 W), since I is F and B is F + W."""
    return steps * (f + (pair - i - w) + (i - w))


def _ordered(p: int, m: int, v: int, f: float, i: float, w: float) -> bool:
    """W <= I <= F <= B."""
    return w <= i <= f <= i + w


# GPipe, section 2.3; one version: 2BW, section 3.2. A flush after every batch.
_gpipe = Theory(
    over_ideal=lambda p, m, v, batches: (p - 1) / m,
    idle=lambda p, m, v, *costs: _fill(p, m, 1, *costs),
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
    idle=_gpipe.idle,
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

# Megatron-LM, section 2.2.2: p divides m (else the bubble is larger, and no more is in flight than
# with the next multiple of p).
_rounds = replace(
    _gpipe,
    over_ideal=_of(_fill),
    idle=_fill,
    in_flight=lambda device, p, m, v, batches: min(
        m * v, 2 * (p - device - 1) + (v - 1) * p + 1 if v > 1 else p - device
    ),
    bubble="(p - 1) / (v m)",
    share="(p - 1) / (v m + p - 1)",
    holds=_whole_rounds,
    peaks=_whole_rounds,
)
# v slices a sequence: arXiv 2102.07988, section 3.1.
_slices = replace(
    _rounds,
    in_flight=lambda device, p, m, v, batches: m * v,
    holds=_gpipe.holds,
    peaks=_gpipe.peaks,
)
# Who waits for W at the peak is not known.
_v = replace(_gpipe, for_weights=lambda device, p, m: None)

THEORY: dict[str, Theory] = {
    # GPipe, section 2.2, figure 2b.
    "inter_layer": replace(
        _gpipe,
        over_ideal=lambda p, m, v, batches: p - 1,
        idle=lambda p, m, v, *costs: m * _fill(p, m, 1, *costs),
        in_flight=lambda *sizes: 1,
        bubble="p - 1",
        share="(p - 1) / p",
    ),
    "gpipe": _gpipe,
    "pipedream": _pipedream,
    # 2BW, section 3.1: m >= p; two versions from the second batch on.
    "pipedream_2bw": replace(_pipedream, versions=lambda device, p, m, v, batches: min(batches, 2)),
    "pipedream_flush": _flush,
    "interleaved": _rounds,
    # arXiv 2211.05953, section 4: m >= p (else a chunk waits for the one before).
    "looped_bfs": replace(
        _slices,
        over_ideal=lambda p, m, v, batches: (p - 1 + (v - 1) * max(p - m, 0)) / (v * m),
        idle=lambda p, m, v, *costs: _fill(p + (v - 1) * max(p - m, 0), m, v, *costs),
    ),
    # arXiv 2211.05322, section 4.
    "eager_1f1b": replace(
        _flush,
        in_flight=lambda device, p, m, v, batches: min(m, 2 * (p - device) - 1),
    ),
    # Zero bubble, section 2.3, has (p - 1) (F + I - W): W is the shortest. m >= p, or with fewer W
    # is the shortest. Stage s keeps (p - s) M_B + s M_W.
    "zb_h1": replace(
        _gpipe,
        over_ideal=_of(_h1),
        idle=_h1,
        where=lambda p, m, v, f, i, w: m >= p or w <= min(f, i),
        in_flight=lambda device, p, m, v, batches: min(m, p),
        bubble="(p - 1) (F + I - min(F, I, W)) / (m (F + I + W))",
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
        idle=_h2,
        where=lambda p, m, *others: m >= 2 * p - 1,
        in_flight=lambda device, p, m, v, batches: min(m, 2 * p - 1),
        bubble="(p - 1) / (3 m x batches)",
        share="(p - 1) / (3 m x batches + p - 1)",
        for_weights=lambda device, p, m: max(min(m, 2 * p - 1) - (2 * (p - device) - 1), 0),
    ),
    # Two chunks a device in a V: peaks are chunk activations, two of a micro-batch on a device.
    # Zero bubble, section 6: F = I = W, m >= p; from 2 p - 1 on a device waits only before its
    # first forward and after its last update.
    "zb_v": replace(
        _v,
        idle=None,
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
        _v,
        idle=None,
        over_ideal=lambda p, m, v, batches: max(3 * p - (4 if p % 2 else 7), p - 1) / (6 * m),
        in_flight=lambda device, p, m, v, batches: min(2 * m, m + device + 1, 2 * ((p + 2) // 2)),
        bubble="(3 p - 7) / (6 m); p odd: (3 p - 4) / (6 m)",
        share="(3 p - 7) / (6 m + 3 p - 7)",
        holds=lambda p, m, v: m >= p != 2,
    ),
    "v_min": replace(
        _v,
        idle=None,
        over_ideal=lambda p, m, v, batches: max(4 * p - (7, 5, 6)[p % 3], p - 1) / (6 * m),
        in_flight=lambda device, p, m, v, batches: min(2 * m, m + device + 1, 2 * ((p + 4) // 3)),
        bubble="(4 p - c) / (6 m), c = 7, 5, 6 where p mod 3 = 0, 1, 2",
        share="(4 p - c) / (6 m + 4 p - c)",
        holds=lambda p, m, v: m >= p != 2,
    ),
    # DeepSeek-V3, arXiv 2412.19437, section 3.2.1: m >= 2 p; W <= I <= F <= B. The paper's bubble
    # is that of pairs; its devices, PP, are twice these.
    "dualpipe_v": replace(
        _v,
        over_ideal=lambda p, m, v, batches: (p - 1) / (6 * m),
        idle=lambda p, m, v, *costs: _dualpipe((p - 1) / 2, *costs),
        where=_ordered,
        paired=lambda p, *costs: _paired((p - 1) / 2, *costs),
        in_flight=lambda device, p, m, v, batches: min(2 * m, m + device + 1, 2 * p + 1),
        bubble="(p - 1) (F + I - W) / (2 m (F + I + W)); paired (p - 1) (F&B + B - 3 W) / 2 s",
        share="(p - 1) / (6 m + p - 1)",
        holds=lambda p, m, v: m >= 2 * p,
    ),
    # Chimera, tables 2 and 3: p divides m. After the first round each further one loses what
    # forwards and backwards differ by.
    "chimera": replace(
        _gpipe,
        over_ideal=_of(_chimera),
        idle=_chimera,
        in_flight=lambda device, p, m, v, batches: min(m, p // 2 + 1 + min(device, p - 1 - device)),
        bubble="(p - 2) (max(F, B) + (m / p - 1) |F - B|) / (m (F + B))",
        share="(p - 2) (m / p + 1) / (3 m + (p - 2) (m / p + 1))",
        holds=lambda p, m, v: m % p == 0,
        peaks=lambda p, m, v: m >= p,
    ),
    # As dualpipe_v with p / 2 devices: m even and at least 2 p.
    "dualpipe": replace(
        _v,
        over_ideal=lambda p, m, v, batches: (p / 2 - 1) / (3 * m),
        idle=lambda p, m, v, *costs: _dualpipe(p / 2 - 1, *costs),
        where=_ordered,
        paired=lambda p, *costs: _paired(p / 2 - 1, *costs),
        in_flight=lambda device, p, m, v, batches: min(m, p + 1),
        bubble="(p / 2 - 1) (F + I - W) / (m (F + I + W)); paired (p / 2 - 1) (F&B + B - 3 W) s",
        share="(p / 2 - 1) / (3 m + p / 2 - 1)",
        holds=lambda p, m, v: m >= 2 * p and m % 2 == 0,
        peaks=lambda p, m, v: m >= 2 * p,
    ),
    # Interleaved 1F1B with one more forward in flight; as long as a pair gains nothing.
    "overlapped_1f1b": replace(
        _rounds,
        in_flight=lambda device, p, m, v, batches: min(m * v, 2 * (p - device) + (v - 1) * p),
    ),
    # arXiv 2503.01328, section 4: two micro-batches of two chunks stay on a device.
    "pipeoffload": replace(
        _rounds,
        in_flight=lambda device, p, m, v, batches: (
            min(m, 2, p - device) if v == 1 else min(m * v, 4)
        ),
        peaks=lambda p, m, v: v == 1,
    ),
    # arXiv 2406.03488, section 3.
    "seq1f1b": replace(
        _slices,
        in_flight=lambda device, p, m, v, batches: min(m * v, p - device - 1 + v),
    ),
    "terapipe": _slices,
    # Zero bubble's H1 over chunks: m >= p.
    "zb_interleaved": replace(
        _v,
        over_ideal=lambda p, m, v, batches: (p - 1) / (3 * v * m),
        idle=lambda p, m, v, *costs: _h1(p, m, v, *costs) / v,
        in_flight=lambda device, p, m, v, batches: min(
            m * v, p + (v - 1) * -(-m // max(1, m // p))
        ),
        bubble="(p - 1) (F + I - min(F, I, W)) / (v m (F + I + W))",
        share="(p - 1) / (3 v m + p - 1)",
        holds=lambda p, m, v: m >= p,
    ),
}
