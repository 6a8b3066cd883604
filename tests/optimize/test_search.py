"""The search: its proofs against exhaustive search and the solver alone, its limits, its runs."""

import builtins
import itertools
import json
import math
import pickle
import signal
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelab import (
    Action,
    CostError,
    Costs,
    Kind,
    Recompute,
    Schedule,
    ScheduleError,
    make,
    simulate,
    validate,
)
from pipelab.optimize.order import bound, memory_used, search
from pipelab.optimize.order.best import named_schedules
from pipelab.optimize.order.exact import SolverModel, common_unit
from pipelab.optimize.order.list_scheduler import (
    every_rule,
    fuse,
    greedy_order,
    refilled,
    refined,
    rules,
)
from pipelab.optimize.order.problem import OrderProblem, as_placement
from pipelab.predict.simulate import delays, durations
from pipelab.table.action import insert_updates
from tests.conftest import examples
from tests.support import passing

UNEVEN = Costs([1, 2, 1.5, 1], [1, 2.5, 1.5, 2], [1, 1.5, 1, 0.5], transfer=0.25)


def orders(chains):
    """Every way to merge chains of actions into one row."""
    if not any(chains):
        yield ()
    for i, chain in enumerate(chains):
        if chain:
            rest = [*chains[:i], chain[1:], *chains[i + 1 :]]
            yield from ((chain[0], *row) for row in orders(rest))


def every_table(problem):
    """All tables, micro-batches in any order; where that may pay, each backward whole or split."""
    m, both = problem.microbatches, [(Kind.F, Kind.I, Kind.W), (Kind.F, Kind.B)]
    kinds = both if problem.whole_may_pay else [problem.kinds]
    rows = []
    for stages in problem.stages_of:
        cells = [*itertools.product(stages, range(m))]
        rows.append([])
        for choice in itertools.product(kinds, repeat=len(cells)):
            chains = [
                [Action(s, kind, k) for kind in chain]
                for (s, k), chain in zip(cells, choice, strict=True)
            ]
            rows[-1].extend(orders(chains))
    for choice in itertools.product(*rows):
        yield Schedule("any", insert_updates(choice, m), problem.placement, m)


def exhaustive(problem):
    """The makespan of the fastest of all tables that fit and have no deadlock."""
    best = math.inf
    for table in every_table(problem):
        seconds = [x + problem.costs.overhead for x in durations(table, problem.costs)]
        walk = table.walk(seconds, delays(table, problem.costs))
        if walk.head == table.bounds[1:] and problem.fits(table):
            best = min(best, max(walk.end))
    return best - problem.costs.overhead


def one_by_one(problem):
    """A slow table that always fits: each micro-batch to its end before the next one begins."""
    rows = []
    for stages in problem.stages_of:
        back = [(s, kind) for s in stages[::-1] for kind in problem.kinds[1:]]
        rows.append([*((s, Kind.F) for s in stages), *back] * problem.microbatches)
    return problem.table("one by one", rows)


def proved(problem, seconds=30):
    """What the solver finds and proves by itself: from a slow table on, with no other bound."""
    return SolverModel(problem, one_by_one(problem), 0.0).solve(seconds, workers=1)


TINY = [
    OrderProblem(Costs(), (0, 1), 2, 2.0, True),
    OrderProblem(Costs([1, 2], [2, 1], [1, 0.5], transfer=0.5), (0, 1), 2, 2.0, True),
    OrderProblem(Costs([1, 2], [2, 1], [1, 3], update=[2, 0]), (0, 1), 2, 1.0, True),
    OrderProblem(Costs([1, 2], [2, 1], [1, 3], transfer=1), (0, 1), 2, 2.0, split=False),
    OrderProblem(Costs([1, 2, 1], [2, 1, 1.5], transfer=0.25), (0, 1, 2), 2, 1.0, split=False),
    OrderProblem(
        Costs([1, 2, 2, 1], [2, 1, 1, 3], 0.5, transfer=0.25), as_placement("v", 2), 1, 1.0, True
    ),
    OrderProblem(Costs([1, 2], [1, 1], [1, 3]), (1, 0), 2, 2.0, True),
    OrderProblem(Costs([1, 2], [1, 0], [1, 0], transfer=1), (0, 1), 2, 2.0, True),
    OrderProblem(Costs([1, 2], activations=4, weight_activations=1), (0, 1), 2, 1.25, True),
    OrderProblem(
        Costs([1, 2], activations=4, weight_activations=[5, 7], overhead=0.75), (0, 1), 2, 2.0, True
    ),
]


@pytest.mark.parametrize("problem", TINY)
def test_the_solver_proves_what_all_tables_say(problem):
    (found, bound), least = proved(problem), exhaustive(problem)
    assert problem.fits(validate(found))
    assert problem.makespan(found) == pytest.approx(least)
    assert bound == pytest.approx(least)


@pytest.mark.parametrize(
    ("p", "memory", "split", "costs", "least"),
    [
        (4, 4, True, Costs(), 27),
        (4, 4, False, Costs(), 33),
        (4, 4, True, Costs(18, 18, 9, 1), 453),
        (4, 3, True, Costs(), 31),
        (8, 8, True, Costs(), 55),
    ],
)
def test_unit_costs_with_twice_as_many_micro_batches_as_devices(p, memory, split, costs, least):
    found = search(costs, p, 2 * p, memory=memory, split=split, seconds=20)
    assert found.proof.status == "optimal" and found.proof.gap == 0
    assert found.proof.bound == found.proof.makespan == least
    assert simulate(validate(found), costs).makespan == least


@examples(40)
@given(
    p=st.integers(1, 4),
    m=st.integers(1, 9),
    memory=st.sampled_from([1, 1.5, 2, 3, 4.25, math.inf]),
    split=st.booleans(),
    shape=st.sampled_from(["loop", "v"]),
    data=st.data(),
)
def test_the_heuristics_give_complete_tables_within_the_memory(p, m, memory, split, shape, data):
    home = as_placement(shape, p)
    amounts = [st.sampled_from([low, 0.5, 1.0, 1.75, 4.0]) for low in (0.0, 0.0, 0.0, 0.25, 0.0)]
    values = [data.draw(st.lists(x, min_size=len(home), max_size=len(home))) for x in amounts]
    names = ("forward", "input_grad", "weight_grad", "activations", "weight_activations")
    costs = Costs(**dict(zip(names, values, strict=True)), transfer=0.25, overhead=0.125)
    problem = OrderProblem(costs, home, m, memory, split)
    for each in problem.variants():
        rule = data.draw(st.sampled_from([*rules(each), *every_rule(each)]))
        table = validate(greedy_order(each, rule).table)
        assert problem.fits(table) and problem.fits(validate(fuse(table)))
        if each.split:
            again = refined(each, refilled(each, greedy_order(each, rule).rows, window=1))
            assert problem.fits(validate(again.table))
    found = search(costs, p, m, memory=memory, split=split, placement=shape, seconds=0)
    assert problem.fits(found) and found.proof.bound <= found.proof.makespan
    assert found.proof.makespan == simulate(validate(found), costs).makespan


@pytest.mark.parametrize("shape", ["loop", "v"])
@pytest.mark.parametrize("memory", [1, 2.5, 4, 8])
@pytest.mark.parametrize("split", [True, False])
def test_never_slower_than_a_named_schedule_that_fits(shape, memory, split):
    costs = UNEVEN if shape == "loop" else UNEVEN.over(as_placement("v", 4))
    problem = OrderProblem(costs, as_placement(shape, 4), 6, memory, split)
    found = search(costs, 4, 6, memory=memory, placement=shape, split=split, seconds=0)
    for _, schedule in named_schedules(problem):
        if problem.fits(schedule):
            assert found.proof.makespan <= problem.makespan(schedule) + 1e-9
    assert split or not {Kind.I, Kind.W} & found.kinds


@pytest.mark.parametrize(("p", "waves"), [(2, 1), (2, 3), (3, 2), (4, 1), (4, 2), (8, 2)])
def test_hanayos_waves(p, waves):
    """Down and up the devices, again and again (arXiv 2308.15762), a micro-batch for each device:
    the bubble shrinks with the waves, and no order has a smaller one."""
    placement = [*range(p), *reversed(range(p))] * waves
    costs = Costs(*[1 / (2 * waves)] * 3)
    found = search(costs, p, p, placement=placement, split=False, seconds=0)
    assert found.proof.makespan == pytest.approx(3 * p + 2 * (p - 1) / waves)
    assert found.proof.makespan == pytest.approx(found.proof.bound)


def test_uneven_stages_are_solved_and_beat_every_named_schedule():
    found = search(UNEVEN, 4, 8, memory=4, seconds=5, workers=1)
    assert found.proof.status == "optimal"
    problem = OrderProblem(UNEVEN, as_placement("loop", 4), 8, 4, True)
    fitting = [problem.makespan(s) for _, s in named_schedules(problem) if problem.fits(s)]
    assert fitting and found.proof.makespan < min(fitting)


def test_memory_that_counts_what_a_weight_gradient_needs():
    """Kept from I to W is a quarter: more forwards fit before the first W."""
    costs = Costs(activations=4, weight_activations=1)
    problem = OrderProblem(costs, as_placement("loop", 3), 6, 3, True)
    full = OrderProblem(Costs(activations=4), as_placement("loop", 3), 6, 3, True)
    assert proved(problem)[1] <= proved(full)[1]
    late = problem.table(
        "late", [[(s, Kind.F), (s, Kind.I)] * 6 + [(s, Kind.W)] * 6 for s in range(3)]
    )
    assert memory_used(late, costs) == [1 + 5 / 4] * 3
    assert problem.fits(late) and not full.fits(late)


def test_actions_of_no_length_keep_their_order():
    """Several of them at one moment: I before its W, though W gives memory back."""
    seconds = [0.25, 1, 3, 2, 0.5, 0.25], [1.5, 0, 2, 0.5, 0, 0.25], [0.25, 0, 3, 3, 3, 1.5]
    alone = Costs(1, 0, 1), (0, 0)  # both stages' I at one moment: the later stage's first
    for costs, home in ((Costs(*seconds), as_placement("loop", 3, 2)), alone):
        problem = OrderProblem(costs, home, 2, math.inf, True)
        assert problem.fits(validate(proved(problem, seconds=5)[0]))


def test_the_search_begins_where_the_first_stage_is():
    found = search(Costs([1, 2, 1]), 2, 3, placement=(1, 0, 1), seconds=0)
    assert validate(found).placement == (1, 0, 1)


def test_large_sizes_end_in_time(monkeypatch):
    """What is made is only what is tried: before, tables of other placements were, too."""
    made = []

    def making(*sizes, **options):
        made.append(make(*sizes, **options))
        return made[-1]

    monkeypatch.setattr("pipelab.optimize.order.best.make", making)
    found = search(Costs([1, 2] * 24), 48, 48, seconds=0.01, workers=1)
    assert validate(found).proof.found_by == "zb_h1"
    whole = [table for table in made if table.microbatches > 1]
    assert whole and {table.placement for table in whole} == {found.placement}


def test_large_sizes_say_how_good_they_are():
    costs = Costs(10.4, 10.2, 7.7, transfer=0.4)
    found = search(costs, 16, 64, seconds=0)
    assert validate(found).proof.gap < 0.05
    assert found.proof.makespan <= simulate(make("zb_h1", 16, 64), costs).makespan


# ---- units


def test_units_are_the_common_divisor_or_fine():
    assert common_unit([18, 18, 9, 1.0], 453) == 1
    assert common_unit([0.75, 0.5], 10) == 0.25
    odd = common_unit([0.1234567890123, math.pi], 100)
    assert odd == 100 / 2**30


def test_costs_without_a_common_divisor_have_a_sound_bound():
    draw = np.random.default_rng(0)
    costs = Costs(*draw.uniform(1, 2, (3, 3)).tolist(), transfer=0.1)
    found = search(costs, 3, 4, memory=2, seconds=20, workers=1)
    assert found.proof.status == "optimal"
    assert found.proof.bound <= found.proof.makespan <= found.proof.bound * (1 + 1e-6)


def test_overhead_is_saved_by_whole_backwards():
    """An action's overhead counts twice for a split backward: the search may leave it whole."""
    costs = Costs(1, 1, 1, overhead=0.5)
    found = search(costs, 2, 4, memory=2, seconds=2, workers=1)
    whole = search(costs, 2, 4, memory=2, seconds=2, workers=1, split=False)
    assert found.proof.makespan <= whole.proof.makespan
    assert found.proof.bound <= whole.proof.bound


# ---- refusals, interruption, the result as a schedule


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"memory": 0.5}, ScheduleError, "memory=0.5: give at least 1"),
        ({"memory": math.nan}, ScheduleError, "memory=nan: give at least 1"),
        ({"microbatches": 0}, ScheduleError, "microbatches=0"),
        ({"batches": 0}, ScheduleError, "batches=0"),  # at once, not after the search
        ({"placement": "w"}, ScheduleError, "placement='w': use 'loop' or 'v'"),
        ({"placement": (0, 1, 2)}, ScheduleError, r"placement=\(0, 1, 2\): give each stage a dev"),
        ({"placement": "v", "virtual": 3}, ScheduleError, "virtual=3: a v has two stages"),
        ({"seconds": math.nan}, ScheduleError, "seconds=nan, workers=0: give numbers of at least"),
        ({"workers": -1}, ScheduleError, "workers=-1: give numbers of at least 0"),
        ({"costs": Costs([1, 2, 3])}, CostError, "3 values for 2 stages"),
        ({"costs": Costs(recompute=Recompute.ALWAYS)}, CostError, "recomputation"),
    ],
)
def test_refused(changed, error, message):
    with pytest.raises(error, match=message):
        search(**{"costs": Costs(), "devices": 2, "microbatches": 4} | changed)


@pytest.mark.parametrize("made", [search, bound, partial(make, "zb"), partial(make, "zb_v")])
def test_what_is_no_memory_and_no_costs(made):
    sizes = {"devices": 2, "microbatches": 4}
    with pytest.raises(ValueError, match="memory is a str: give a Real"):
        made(costs=Costs(), memory="2", **sizes)
    with pytest.raises(ValueError, match="costs is a list: give a Costs"):
        made(costs=[1, 2], **sizes)


def test_without_the_solver_it_names_the_extra(monkeypatch, capsys):
    from pipelab.cli import main

    real = builtins.__import__

    def fails(name, *rest):
        if name.startswith("ortools"):
            raise ModuleNotFoundError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", fails)
    with pytest.raises(ImportError, match=r"pipelab\[search\]"):
        search(Costs(), 2, 4)
    assert search(Costs(), 2, 4, seconds=0).proof.makespan == 13
    command = ["search", "--devices", "2", "--microbatches", "4"]
    assert main(command) == 2
    assert capsys.readouterr().err.startswith("pipelab search: error: the exact search needs")
    assert main([*command, "--seconds", "0"]) == 0


def test_the_named_schedules_are_tried_however_short_the_time():
    assert search(Costs(), 4, 8, seconds=1e-9, workers=1).proof.makespan == 27


def test_interrupted_it_gives_the_best_so_far():
    """A problem that takes minutes; Ctrl-C as soon as the solver begins with what is known."""
    costs = Costs(*np.random.default_rng(4).uniform(1, 2, (3, 8)).tolist(), transfer=0.1)
    told = []

    def interrupt(makespan, bound):
        told.append(makespan)
        signal.raise_signal(signal.SIGINT)

    found = search(costs, 8, 16, memory=5, seconds=100, workers=1, progress=interrupt)
    assert found.proof.status == "gap" and found.proof.makespan <= min(told) * (1 + 1e-3)
    assert validate(found) and found.proof.seconds < 90


def test_the_result_is_a_schedule():
    found = search(Costs(), 2, 3, seconds=0, batches=2)
    assert pickle.loads(pickle.dumps(found)) == found
    again = Schedule.from_csv(found.to_csv())
    assert again.rows == found.rows and again.batches == 2
    assert found.part(1, 2).rows == search(Costs(), 2, 3, seconds=0).rows
    for made in (found.part(1, 2), found.part(0, 2), found.forward_only(), found.with_transfers()):
        assert type(made) is Schedule  # whose proof it is not
    assert found.part(0, 2) == found.plain
    assert str(found.proof).startswith("optimal: no schedule within memory for 2 micro-batches")


def test_command(tmp_path, capsys):
    from pipelab.cli import main

    file = tmp_path / "found.csv"
    command = ["search", "--devices", "4", "--microbatches", "8", "--json", "--csv", str(file)]
    assert main(command) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["makespan"] == 27 and shown["peak_in_flight"] == [4, 4, 4, 4]
    proof = shown["proof"]
    told = proof["status"], proof["makespan"], proof["bound"], proof["gap"]
    assert told == ("optimal", 27, 27, 0)
    assert simulate(Schedule.from_csv(file.read_text())).makespan == 27
    assert main([*command[:5], "--whole"]) == 0
    assert "faster than 33" in capsys.readouterr().out
    assert main([*command[:5], "--memory", "0.5"]) == 2
    assert "memory=0.5" in capsys.readouterr().err


def test_a_found_schedule_runs_and_is_checked():
    passing(search(UNEVEN, 4, 6, memory=3, seconds=0, batches=2))
