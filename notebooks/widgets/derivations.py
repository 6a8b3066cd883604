"""The course's derivations: what each step says, and which boxes it is about.

Forward 1, backward 2 of a device's whole share of the model, unless it says otherwise.
"""

from collections.abc import Iterable, Mapping

from pipelab.predict.costs import Costs
from pipelab.predict.simulate import simulate
from pipelab.predict.timeline import Timeline
from pipelab.schedules import make
from pipelab.table.action import Kind
from pipelab.table.schedule import Schedule
from widgets.derivation import Derivation, Step, cells

TITLES = {"gpipe": "GPipe", "pipedream_flush": "1F1B", "interleaved": "Interleaved"}


def table(name: str, p: int, m: int, v: int = 1) -> Timeline:
    return simulate(make(name, p, m, virtual=v), Costs().split(v))


def one_batch() -> Derivation:
    """How long a batch takes, by ever better schedules."""
    on = {
        "one device at a time": table("inter_layer", 4, 8),
        "GPipe or 1F1B": table("pipedream_flush", 4, 8),
        "interleaved, v = 2": table("interleaved", 4, 8, 2),
        "interleaved, v = 4": table("interleaved", 4, 8, 4),
    }
    says = (
        "The model is cut into four parts, one for each device, and the batch into eight "
        "micro-batches. These go through one at a time: one device works, three wait.",
        "Let each micro-batch follow the one before at once, and all devices work. They still wait "
        "while the pipeline fills and drains.",
        "Give each device two smaller parts of the model. It fills and drains in half the time.",
        "Four parts a device: a quarter of the time. Nothing takes less than 24, a device's work.",
    )
    return Derivation(
        "How long does one batch take on four devices?",
        " → ".join(f"{{t{k}: {t.makespan:g}}}" for k, t in enumerate(on.values())),
        on,
        [Step(text, f"t{k}", on=name) for k, (text, name) in enumerate(zip(says, on, strict=True))],
    )


def bubble(name: str = "gpipe", p: int = 4, m: int = 8, v: int = 1) -> Derivation:
    """Why a flush leaves (p - 1)(F + B) / v idle: GPipe, 1F1B and interleaved alike."""
    t, last = table(name, p, m, v), p - 1
    over, chunk, times = (" / v", "chunk ", "v ") if v > 1 else ("", "", "")
    mine = cells(range(last, p * v, p), "FB", range(m))
    steps = [
        Step(f"{p} devices run {m} micro-batches. Follow the last device, device {last}."),
        Step(
            f"Before it starts, p - 1 {chunk}forwards run on other devices: it waits {last / v:g}.",
            "fill",
            cells(range(last), "F", [0]),
            lambda gap: gap.device == last and gap.start == 0,
        ),
        Step(f"Then it never waits: m forwards and m backwards, {3 * m}.", "work", mine),
        Step(
            f"After its last backward, p - 1 {chunk}backwards follow on others: {2 * last / v:g}.",
            "drain",
            cells(range(last), "B", [m - 1]),
            lambda gap: gap.device == last and gap.start > 0,
        ),
        Step(
            f"Each device loses as much time, {3 * last / v:g}: before, between or after its work.",
            "fill drain lost",
            idle=lambda gap: True,
        ),
        Step(
            f"The batch takes the work and what is lost: {3 * m} + {3 * last / v:g} = "
            f"{t.makespan:g}.",
            "work lost",
            mine,
            lambda gap: gap.device == last,
        ),
        Step(
            f"F and B cancel: {last} / {v * m + last}, {t.bubble.of_total:.0%} of all device time. "
            f"More micro-batches{' or chunks' * (v > 1)} make it less; larger ones do not.",
            "share",
            idle=lambda gap: True,
        ),
    ]
    return Derivation(
        f"{TITLES[name]}: how much of the time do devices idle?",
        f"[{{fill: (p - 1) F{over}}} + {{drain: (p - 1) B{over}}} | {{work: m (F + B)}} + "
        f"{{lost: (p - 1)(F + B){over}}}] = {{share: [p - 1 | {times}m + p - 1]}}",
        {TITLES[name]: t},
        steps,
    )


def in_flight(p: int = 4, m: int = 8, s: int = 0) -> Derivation:
    """Why stage s of 1F1B holds p - s micro-batches, and nothing as fast holds fewer; m >= p."""
    held, last = p - s, p - 1
    steps = [
        Step(
            f"Device {s} holds micro-batch 0 until backward 0 ends. Micro-batch 0 passes p - s "
            f"stages, down and back: {3 * held}. Until then device {s} frees nothing.",
            "trip",
            cells(range(s, p), "FB", [0]),
        ),
        Step(
            "Meanwhile the last device must not pause, or the batch takes longer. It needs another "
            "micro-batch every F + B = 3.",
            "pace",
            cells([last], "FB", range(held)),
        ),
        Step(
            f"No micro-batch gets there faster than the first. So device {s} must start forward k "
            f"no later than k (F + B) after forward 0.",
            "pace",
            cells(range(s, p), "F", range(held)),
        ),
        Step(
            f"So p - s forwards start before backward 0 ends: device {s} holds {held}. No schedule "
            f"that is as fast holds fewer.",
            "held",
            cells([s], "F", range(held)) | cells([s], "B", [0]),
        ),
        Step(
            "And 1F1B holds no more: each further forward follows a backward, which has freed an "
            "activation.",
            "held",
            cells([s], "B", range(m)) | cells([s], "F", range(held, m)),
        ),
        Step(
            "It is one fewer from device to device. The last holds one, however large m is.",
            "held",
            {name for d in range(p) for name in cells([d], "F", range(p - d))},
        ),
    ]
    return Derivation(
        f"1F1B: how many micro-batches does stage s hold? (Here s = {s}.)",
        "[{trip: (p - s)(F + B)} | {pace: F + B}] = {held: p - s}",
        {"1F1B": table("pipedream_flush", p, m)},
        steps,
    )


def versions(p: int = 4, m: int = 4) -> Derivation:
    """Why 2BW needs two weight versions; an update takes 0.5, so that it is seen."""
    made, before = cells([0], "B", [m - 1]) | {"0U0"}, 2 * m - p
    first, second, third = (cells(range(p), "FB", range(b * m, (b + 1) * m)) for b in range(3))
    steps = [
        Step(
            f"Device 0 begins mini-batch 1, micro-batch {m}, before it makes update 0. So "
            f"mini-batch 1 cannot read what this update makes.",
            "read",
            {f"0F{m}", "0U0"},
        ),
        Step("It reads version 0 on every device, as mini-batch 0 does.", "read", first | second),
        Step(
            "Mini-batch 2 reads version 1, which update 0 makes. This is one update late, "
            "whatever p is.",
            "read",
            third | cells(range(p), "U", [0]),
        ),
        Step(
            f"Is version b - 1 made in time? Update b - 2 makes it, on device 0 right after "
            f"backward (b - 1) m - 1. With b = 2 that is backward {m - 1}.",
            "made",
            made,
        ),
        Step(
            f"Device 0 starts mini-batch b right after backward b m - p, here {before}. That is "
            f"later, so two versions are enough. They are enough down to m = p - 1.",
            "made begins",
            made | {f"0B{before}", f"0F{2 * m}"},
        ),
    ]
    return Derivation(
        "2BW: which version does mini-batch b read, and why are two enough?",
        "version {read: b - 1}; two are enough if {made: (b - 1) m - 1} ≤ {begins: b m - p}",
        {"2BW": simulate(make("pipedream_2bw", p, m, batches=3), Costs(update=0.5))},
        steps,
    )


def factor(one: Schedule, two: Schedule) -> Derivation:
    """Why interleaved tables run twice as many forwards ahead: four devices, two chunks, rounds
    of four, by factor 1 and by factor 2."""
    costs = Costs(transfer=0.5).split(2)
    steps = [
        Step(
            "With factor 1: device 3 ends backward 0 at 8.5, and device 2 has it at 9. Device 2 "
            "runs backward 0 and then forward 2, until 10.5.",
            "",
            {"7B0", "6B0", "6F2"},
        ),
        Step(
            "The output is on device 3 at 11. Meanwhile device 3 has one pair to run. It waits "
            "from 10 to 11: for two transfers.",
            "",
            {"7F1", "7B1", "7F2"},
            lambda gap: gap.device == 3 and gap.start == 10,
        ),
        Step(
            "With factor 2, device 2 runs forward 2 before backward 0.",
            "factor",
            {"6F2", "6B0"},
            on="factor 2",
        ),
        Step(
            "So device 3 has a second pair to run, until 11.5. Forward 3 is there at 11, in time.",
            "factor",
            {"7F1", "7B1", "7F2", "7B2", "6F3", "7F3"},
        ),
        Step(
            "The last device runs a round ahead for each further chunk.",
            "rounds",
            {str(action) for action in two.rows[3][:4]},
        ),
        Step(
            "Each device before it runs two forwards more than the next one. The first covers that "
            "neighbour's work, the second the transfers.",
            "factor ahead",
            {str(action) for d, row in enumerate(two.rows) for action in row[4 : 10 - 2 * d]},
        ),
    ]
    return Derivation(
        "Interleaved: why run 2 (p - d - 1) forwards ahead, if a transfer takes 0.5?",
        "warm-up of device d = {factor: 2} {ahead: (p - d - 1)} + {rounds: (v - 1) p}",
        {"factor 1": simulate(one, costs), "factor 2": simulate(two, costs)},
        steps,
    )


def halves(on: Mapping[str, Timeline]) -> Derivation:
    """The bubble of ZB-H1; timelines of 1F1B, of its backwards in halves, and of ZB-H1."""
    _, split, h1 = on
    s = on[h1].schedule
    p, m, last = s.devices, s.microbatches, s.devices - 1
    back, left = cells(range(last), "I", [m - 1]), cells([last], "W", range(m - p, m))
    steps = [
        Step(
            f"1F1B: follow micro-batch {m - 1} at the right edge. Each of p - 1 steps back takes a "
            f"whole backward, I + W.",
            "back",
            cells(range(last), "B", [m - 1]),
        ),
        Step(
            f"In halves, a step back takes I alone: no device waits for another's W. This saves "
            f"(p - 1) W = {last}.",
            "back",
            back,
            on=split,
        ),
        Step(
            "So W can wait. In ZB-H1 device s lets s of them wait.",
            "late",
            cells(range(p), "W", range(m)),
            on=h1,
        ),
        Step(
            f"Device {last} starts after p - 1 forwards, and never waits from then on.",
            "fill",
            cells(range(last), "F", [0]),
            lambda gap: gap.device == last and gap.start == 0,
        ),
        Step(
            "Up to its last I it does m F and m I, but only m - p W.",
            "late",
            cells([last], "FI", range(m)) | cells([last], "W", range(m - p)),
        ),
        Step(
            f"The last gradient takes p - 1 more I. Meanwhile device {last} does postponed W.",
            "back late",
            back | left,
        ),
        Step(
            f"Device 0 ends last, with a W, and has lost (p - 1)(F + I - W) = {last}. With 1F1B "
            f"it loses (p - 1)(F + I + W) = {3 * last}.",
            "fill back late",
            {f"0W{m - 1}"},
            lambda gap: gap.device == 0,
        ),
    ]
    return Derivation(
        "ZB-H1: where has the idle time gone?",
        "bubble = {fill: (p - 1) F} + {back: (p - 1) I} - {late: (p - 1) W}",
        on,
        steps,
    )


def kept(p: int = 4, m: int = 8) -> Derivation:
    """What a device of ZB-H1 and ZB-H2 holds at its peak; m >= 2 p - 1."""
    last = p - 1
    steps = [
        Step(
            f"ZB-H1, device {last}, when forward {last} starts: {last} have done their I, none its "
            f"W. So s micro-batches wait for W.",
            "w1",
            cells([last], "I", range(last)),
        ),
        Step(f"Micro-batch {last} waits for its I.", "b1", cells([last], "F", [last])),
        Step(
            f"On device 0 p = {p} wait for their I, and none for W.",
            "b1",
            cells([0], "F", range(p)),
        ),
        Step(
            f"ZB-H2: device 0 runs 2 p - 1 = {2 * p - 1} forwards before its first I.",
            "b2",
            cells([0], "F", range(2 * p - 1)),
            on="ZB-H2",
        ),
        Step(
            f"When device {last} starts forward {2 * last}, 2 s = {2 * last} wait for W and one "
            f"for I: as many as on device 0.",
            "w2 b2",
            cells([last], "I", range(2 * last)) | cells([last], "F", [2 * last]),
        ),
    ]
    return Derivation(
        "What does device s hold at most?",
        "H1: {b1: (p - s) M_B} + {w1: s M_W};  H2: {b2: (2 p - 2 s - 1) M_B} + {w2: 2 s M_W}",
        {"ZB-H1": table("zb_h1", p, m), "ZB-H2": table("zb_h2", p, m)},
        steps,
    )


def two_copies(p: int = 6, m: int = 12, costs: Costs | None = None) -> Derivation:
    """The bubble of DualPipe with pairs, on a middle device; p even and at least 4, m >= 2 p."""
    t = simulate(
        make("dualpipe", p, m).overlap(),
        costs or Costs(forward=2, input_grad=2, weight_grad=1, together=4),
    )
    s, me, times = t.schedule, p // 2, p // 2 - 1
    mine, pairs = range(*s.bounds[me : me + 2]), s.joined | {i - 1 for i in s.joined}
    kinds = [action.kind for action in s.actions]
    last = max(i for i in mine if kinds[i] is Kind.I)
    # [1] The first micro-batch on its way here, and the last gradient on its way from here.
    there, back = [s.inputs[mine[0]]], [s.takers[last]]
    while (i := there[-1]) is not None:
        there.append(s.inputs[i])
    while (i := back[-1]) is not None:
        back.append(s.takers[i])
    # [2] What each action after a pause waited for, in turn, back to a pair.
    alone = [i for i in mine if kinds[i] is Kind.B and i not in pairs]
    for i in (i for i in mine[1:] if t.start[i] > t.end[i - 1]):
        while i not in pairs:
            sources = [j for j in (s.inputs[i], t.before[i]) if j is not None]
            i = max(sources, key=t.end.__getitem__)
            alone += [i] if i not in s.joined else [i - 1, i]

    def named(found: Iterable[int | None]) -> set[str]:
        return {str(s.actions[i]) for i in found if i is not None}

    steps = [
        Step(
            f"{p} devices hold two copies of the model. Micro-batches enter at both ends, and each "
            f"passes all devices. Follow device {me}, in the middle."
        ),
        Step(
            f"The first that it gets passes p / 2 - 1 = {times} other devices. It waits for a "
            "forward on each.",
            "fill",
            named(there),
            lambda gap: gap.device == me and gap.start == 0,
        ),
        Step(
            "Then forwards of one copy pair with backwards of the other, and it never waits.",
            lit=named(pairs.intersection(mine)),
        ),
        Step(
            "Its forwards run out: it does backwards alone, each in B. Each device towards the end "
            f"still does one more pair, in F&B. It waits F&B - B for each: {times} times.",
            "pair",
            named(alone),
            lambda gap: gap.device == me and 0 < gap.start and gap.end < t.makespan,
        ),
        Step(
            f"Its last gradient still passes p / 2 - 1 = {times} devices, in I on each. For each "
            "it has only a W left to do, and is idle for I - W.",
            "late",
            named([last, *back, *(i for i in mine if i > last and kinds[i] is Kind.W)]),
            lambda gap: gap.device == me and gap.end == t.makespan,
        ),
        Step(
            f"Together it is idle for {t.makespan - t.busy[me]:g} of {t.makespan:g}. With F = I, "
            "and B = I + W, that is p / 2 - 1 times F&B + B - 3 W.",
            "fill pair late",
            idle=lambda gap: gap.device == me,
        ),
    ]
    return Derivation(
        "DualPipe: how long does a device in the middle idle?",
        "bubble = (p / 2 - 1) ( {fill: F} + {pair: F&B - B} + {late: I - W} )",
        {"DualPipe": t},
        steps,
    )
