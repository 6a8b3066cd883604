"""Partitions: splits equal brute force, PipeDream's optimizer equals its authors' program."""

import json
import math
from itertools import combinations, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from pipelab import make, simulate
from pipelab.cli import main
from pipelab.models import parameters, split
from pipelab.models.gpt2 import gpt2
from pipelab.optimize.cut import (
    CutStage,
    Layer,
    Partition,
    Profile,
    intervals,
    pipedream,
    plots,
    profile,
    split_layers,
)
from tests.conftest import examples

numbers = st.integers(0, 9).map(float)
layers = st.builds(
    Layer, st.just("x"), numbers, numbers, numbers, numbers, numbers, numbers, st.sampled_from("AB")
)
profiles = st.lists(layers, min_size=1, max_size=7).map(lambda found: Profile(tuple(found)))


def splits(n, stages):
    for middle in combinations(range(1, n), stages - 1):
        yield [0, *middle, n]


def held(profile, bounds):
    """Bytes of each stage's device under 1F1B."""
    weights, activations = profile.of("weights"), profile.of("activations")
    stages = len(bounds) - 1
    return [
        2 * weights[a:b].sum() + (stages - s) * activations[a:b].sum()
        for s, (a, b) in enumerate(pairwise(bounds))
    ]


# ---- the dynamic program


@given(st.data(), st.integers(1, 5), st.sampled_from([np.maximum, np.add]))
def test_intervals_join_to_the_least_of_all_splits(data, n, join):
    """Costs that depend on the stage; some are infinite."""
    stages = data.draw(st.integers(1, n))
    one = st.sampled_from([0.0, 1.0, 2.0, 5.0, math.inf])
    cost = np.array(data.draw(st.lists(one, min_size=stages * n**2, max_size=stages * n**2)))
    between = np.full((stages, n + 1, n + 1), np.inf)
    between[:, :-1, 1:] = cost.reshape(stages, n, n)
    between[:, np.tri(n + 1, dtype=bool)] = np.inf

    def joined(bounds):
        return join.reduce([between[s, a, b] for s, (a, b) in enumerate(pairwise(bounds))])

    least, balance = intervals.split_intervals(lambda stage: between[stage], stages, join)
    assert least == min(map(joined, splits(n, stages)))
    assert math.isinf(least) or joined(np.cumsum([0, *balance])) == least


# ---- splits of a chain


@given(profiles, st.integers(1, 5), st.sampled_from([math.inf, 10.0, 40.0, 90.0]))
def test_splits_are_the_best_there_are(profile, stages, memory):
    n = len(profile.layers)
    stages = min(stages, n)
    time = profile.of("time")
    fitting = [b for b in splits(n, stages) if max(held(profile, b)) <= memory]
    if not fitting:
        least = min(max(held(profile, b)) for b in splits(n, stages))
        with pytest.raises(ValueError, match=f"needs {least:,.0f}, {least - memory:,.0f} more"):
            split_layers(profile, stages, "time", memory=memory)
        return
    found = split_layers(profile, stages, "time", memory=memory)
    largest = {tuple(b): max(time[x:y].sum() for x, y in pairwise(b)) for b in fitting}
    assert found.bottleneck == min(largest.values())
    alike = min(
        sum(time[x:y].sum() ** 2 for x, y in pairwise(b))
        for b in fitting
        if largest[tuple(b)] == found.bottleneck
    )
    assert sum(stage.time**2 for stage in found.stages) == alike
    assert sum(found.balance) == n and max(held(profile, np.cumsum([0, *found.balance]))) <= memory


@pytest.mark.parametrize(
    ("method", "balance"),
    [
        ("uniform", [2, 2]),
        ("time", [3, 1]),
        ("parameters", [1, 3]),
        ("size", [2, 2]),
        ("type:conv", [1, 3]),
    ],
)
def test_each_method_balances_its_own(method, balance):
    kinds = ["Conv2d", "ReLU", "Conv2d", "Linear"]
    sizes = zip(kinds, [1, 1, 1, 3], [9, 1, 1, 1], [0, 0, 0, 15], strict=True)
    layers = [Layer(x, t, weights=w, activations=kept, kind=x) for x, t, w, kept in sizes]
    found = Profile(tuple(layers))
    assert split_layers(found, 2, method).balance == balance


def test_gpt2_small_by_its_blocks():
    """The numbers of parameters that DeepSpeed prints for type:GPT2Block, as the original course
    did."""
    with torch.device("meta"):
        model = gpt2(vocabulary=50257, length=1024, width=768, heads=12, blocks=12)
    found = Profile(tuple(Layer(type(x).__name__, kind=type(x).__name__) for x in model))
    balance = split_layers(found, 4, "type:GPT2Block").balance
    assert balance == [4, 3, 3, 4]
    counts = parameters(split(model, balance))
    assert counts == [60_647_424, 21_263_616, 21_263_616, 59_862_528]


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ((0,), "0 stages for 2 layers: a stage needs at least one layer"),
        ((3,), "3 stages for 2 layers"),
        ((1, "speed"), "method='speed': use one of uniform, parameters, type:REGEX"),
        ((1, "type:("), "not a regular expression"),
        ((1, "type:conv"), "no layer matches; there are A, B"),
    ],
)
def test_splits_that_cannot_be(arguments, match):
    with pytest.raises(ValueError, match=match):
        split_layers(Profile((Layer("a", kind="A"), Layer("b", kind="B"))), *arguments)


def test_stages_are_of_all_layers():
    """A stage of no layer would take its seconds away."""
    model = Profile((Layer("a", 1.0), Layer("b", 1.0)))
    for balance in ([1], [2, 0]):
        with pytest.raises(ValueError, match="for 2 layers: give every stage at least one, 2 in"):
            model.costs(balance)


# ---- PipeDream


def plans(n, devices):
    """All (bounds, replicas)."""
    for stages in range(1, min(n, devices) + 1):
        for bounds in splits(n, stages):
            for share in splits(devices, stages):
                yield bounds, [b - a for a, b in pairwise(share)]


def pace(profile, bounds, replicas, bandwidth, model):
    """As the module's formulas say, one plan at a time."""
    time, weights, output = (profile.of(name) for name in ("time", "weights", "output"))
    found = []
    for (a, b), r in zip(pairwise(bounds), replicas, strict=True):
        sync = 4 * (r - 1) / r * weights[a:b].sum() / bandwidth
        work = time[a:b].sum()
        found.append((work + sync if model == "sum" else max(work, sync)) / r)
        share = r if model == "sum" else 1
        if a:
            found.append(2 * output[a - 1] / bandwidth / share)
            if model == "sum" and b < len(time):
                found.append(2 * output[b - 1] / bandwidth / share)
    return max(found)


planned = given(
    found=st.lists(layers, min_size=1, max_size=5),
    devices=st.integers(1, 5),
    model=st.sampled_from(["sum", "max"]),
    bandwidth=st.sampled_from([1.0, 7.0]),
)


@examples(60)
@planned
def test_pipedream_is_the_best_of_all_plans(found, devices, model, bandwidth):
    profile = Profile(tuple(found))
    best = min(pace(profile, *plan, bandwidth, model) for plan in plans(len(found), devices))
    result = pipedream(profile, devices, bandwidth=bandwidth, model=model)
    bounds = np.cumsum([0, *result.balance]).tolist()
    replicas = [stage.replicas for stage in result.stages]
    assert sum(replicas) == devices
    assert result.bottleneck == pytest.approx(best)
    assert pace(profile, bounds, replicas, bandwidth, model) == pytest.approx(best)
    assert max(stage.time for stage in result.stages) <= result.bottleneck * (1 + 1e-12)


def test_memory_leaves_plans_out():
    """Activations of all in flight: 3 + 2 + 1 on three devices, or a third of the batches each."""
    found = Profile(tuple(Layer(str(i), forward=1, activations=1, output=100) for i in range(3)))
    free = pipedream(found, 3, bandwidth=1.0)
    assert [stage.replicas for stage in free.stages] == [3]
    assert pipedream(found, 3, bandwidth=1.0, memory=3).balance == [3]
    with pytest.raises(ValueError, match=r"no plan for 3 devices of 1 bytes: .* needs 2, 1 more"):
        pipedream(found, 3, memory=1)
    two = Profile(found.layers[:2])  # two devices share a stage before a third: 2 in flight on each
    with pytest.raises(ValueError, match="needs 2, 1 more"):
        pipedream(two, 3, memory=1)
    assert pipedream(found, 3, memory=3, straight=True).balance == [1, 1, 1]


def test_branches_are_cut_together():
    """0 -> 1 and 2 -> 3: layers 1 and 2 stand side by side."""
    found = Profile(
        tuple(Layer(str(i), forward=t, output=1) for i, t in enumerate((1, 4, 1, 2))),
        ((0, 1), (0, 2), (1, 3), (2, 3)),
    )
    result = pipedream(found, 2, bandwidth=1e9, straight=True)
    assert [stage.layers for stage in result.stages] == [(0, 2), (1, 3)] or result.bottleneck == 5
    cuts = found.cuts()
    assert len(cuts) == 6  # {}, 0, 01, 02, 012, all
    assert sorted(found.crossing(cuts).tolist()) == [0, 0, 1, 2, 2, 2]
    wide = Profile(tuple(Layer(str(i)) for i in range(16)), ((0, 15),))
    with pytest.raises(ValueError, match="can be cut in more than 5,000 places"):
        wide.cuts()


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (dict(devices=4, model="best"), "model='best': use one of sum, max"),
        (dict(devices=0), "devices=0: give a whole number of at least 1"),
        (dict(devices=3, straight=True), "3 devices for 2 layers"),
    ],
)
def test_plans_that_cannot_be(arguments, match):
    with pytest.raises(ValueError, match=match):
        pipedream(Profile((Layer("a"), Layer("b"))), **arguments)


# ---- the authors' file


GRAPH = """node1 -- Input0 -- forward_compute_time=1.5, backward_compute_time=0.000, activation_size=8.0, parameter_size=0.000
node3 -- LSTM(2, 1) -- forward_compute_time=3.000, backward_compute_time=5.000, activation_size=[4.0; 1.0; 1.0], parameter_size=50.000
node2 -- Embedding(3, 2) -- forward_compute_time=1.000, backward_compute_time=2.000, activation_size=6.0, parameter_size=24.000
node4 -- __getitem__(0) -- forward_compute_time=0.000, backward_compute_time=0.000, activation_size=4.0, parameter_size=0.000
node5 -- __getitem__(1) -- forward_compute_time=0.000, backward_compute_time=0.000, activation_size=1.0, parameter_size=0.000
\tnode1 -- node2
\tnode2 -- node3
\tnode3 -- node4
\tnode3 -- node5
\tnode4 -- node6
node6 -- Linear(1, 1) -- forward_compute_time=2.000, backward_compute_time=4.000, activation_size=2.0, parameter_size=8.000
"""  # noqa: E501


def test_the_authors_profiles_are_read():
    found = Profile.read(GRAPH)
    assert [layer.kind for layer in found.layers] == ["Embedding", "LSTM", "__getitem__", "Linear"]
    assert found.edges == ((0, 1), (1, 2), (2, 3))
    assert found.of("time").tolist() == pytest.approx([0.003, 0.008, 0, 0.006])
    assert found.of("output").tolist() == [6, 6, 4, 2] and found.layers[1].weights == 50
    assert Profile.read(found.to_json()) == found


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "at least one layer"),
        ("node1 -- what", "line 1 is not a node of a profile: 'node1 -- what'"),
        (GRAPH.replace("=3.000, b", "=x, b"), "line 2: could not convert string to float: 'x'"),
        (GRAPH + "\tnode6 -- node2\n", "in a circle: node"),
        (GRAPH + "\tnode9 -- node2\n", "an edge names 'node9', which no line describes"),
        (GRAPH + "\tnode1\n", "an edge names '', which no line describes"),
        (GRAPH * 2, "node1 appears twice: give each node one line"),
        ('{"layers": [{"name": "a"}], "layers": []}', "an object has 'layers' twice"),
        ('{"layers": [{"name": 5}]}', "a layer has name=5: give text"),
        ('{"layers": [{"name": "a"}, {"name": "b"}], "edges": [[0.9, 1]]}', "edge 0.9 -> 1"),
        ('{"layers": [{"name": "a"}], "samples": 1%s}' % (400 * "0"), "give at most 1e"),
        ("{}", "not a profile: give an object with layers, a list of objects with a name"),
        ('{"layers": {"name": "a"}}', "not a profile: give an object with layers"),
        ('{"layers": ["a"]}', "not a profile: give an object with layers"),
        (
            '{"layers": [{"name": "a", "speed": 1}]}',
            "not a profile: .* forward, input_grad, .*speed",
        ),
        ('{"layers": [{"name": "a", "forward": -1}]}', "layer 'a' has forward=-1: give at least 0"),
        ('{"layers": [{"name": "a", "weights": null}]}', "layer 'a' has weights=None: give at"),
        ('{"layers": [{"name": "a"}], "edges": [[0, 0]]}', "edge 0 -> 0"),
        ('{"layers": [{"name": "a"}], "samples": 0}', "samples=0: give a whole number"),
        ('{"layers": [' + 5000 * '{"name": "a"}, ' + '{"name": "b"}]}', "5,001 layers: give at m"),
        ("{", "not a profile"),
    ],
)
def test_files_that_are_no_profiles(text, match):
    with pytest.raises(ValueError, match=match):
        Profile.read(text)


# ---- measured


def test_a_profile_of_real_layers():
    torch.manual_seed(0)
    model = gpt2(vocabulary=64, length=8, width=32, blocks=2)
    before = [p.clone() for layer in model for p in layer.parameters()]
    found = profile(model, torch.randint(0, 64, (4, 8)), repeats=2, warm_up=1)
    assert [layer.kind for layer in found.layers] == ["Embedding", "GPT2Block", "GPT2Block", "Head"]
    weights = [4 * sum(p.numel() for p in layer.parameters()) for layer in model]
    assert found.of("weights").tolist() == weights
    assert found.of("output").tolist() == [4 * 8 * 32 * 4] * 3 + [4 * 8 * 64 * 4]
    assert (found.of("forward") > 0).all() and found.samples == 4
    assert found.layers[1].activations > 10 * found.layers[1].output
    after = [p for layer in model for p in layer.parameters()]
    assert all(torch.equal(a, b) and a.grad is None for a, b in zip(after, before, strict=True))


def test_the_loss_counts_with_the_last_layer():
    x, y = torch.randn(64, 8), torch.randn(64, 4000)
    model = [nn.Linear(8, 8), nn.Linear(8, 4000)]

    def slow(output, target):
        for _ in range(100):
            target = target * 0.9
        return F.mse_loss(output, target), len(target)

    alone, whole = profile(model, x, repeats=5), profile(model, x, loss=slow, target=y, repeats=5)
    assert [layer.kind for layer in whole.layers] == ["Linear", "Linear"]
    assert whole.layers[1].forward > 2 * alone.layers[1].forward
    assert whole.layers[1].weights == alone.layers[1].weights and whole.layers[1].output == 4


def test_a_profile_as_table_and_picture():
    found = Profile((Layer("one", 1e-3, 2e-3, 3e-3, 4e6, 5e6, 6e6), Layer("another", 1)))
    head, first, second = str(found).splitlines()
    assert " ".join(head.split()) == "F ms I ms W ms weights MB kept MB sent MB"
    assert first.split() == ["one", "1.000", "2.000", "3.000", "4.000", "5.000", "6.000"]
    assert len(head) == len(first) == len(second)
    ax = plots.profile(found)
    assert [p.get_width() for p in ax.patches] == pytest.approx([1, 1000, 2, 0, 3, 0])


def test_what_is_saved_counts_once():
    x = torch.ones(4, 8)
    linear, relu, dropout = profile(
        [nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Dropout(0.5)], x, repeats=1
    ).layers
    assert linear.activations == x.nbytes  # the input, which it saves
    assert relu.activations == x.nbytes  # the output, in the place of the input
    assert dropout.activations > x.nbytes  # the input, and the mask
    assert dropout.weight_grad == 0 and linear.kind == "Linear"
    with pytest.raises(ValueError, match="at least one layer"):
        profile([], x)


def test_what_a_partition_costs():
    """Stages that a schedule simulates: shares of replicas, all-reduce as an update."""
    large = Layer("a", 4, 4, 4, weights=2, output=5)
    small = Layer("b", 1, 1, 1, weights=900, activations=3)
    plan = pipedream(Profile((large, small), samples=2), 3, bandwidth=100.0)
    assert [stage.replicas for stage in plan.stages] == [2, 1]
    costs = plan.costs(transfer=0.5)
    assert costs.forward == (2, 1) and costs.boundary == (0, 5) and costs.activations == (0, 3)
    assert costs.update == pytest.approx((4 * 0.5 * 2 / 100 / 2, 0))
    assert simulate(make("pipedream", 2, 4), costs).makespan > 4 * plan.stages[0].time


@examples(60)
@planned
def test_the_simulated_pace_is_the_plans(found, devices, model, bandwidth):
    """Of `pipedream`: the bottleneck, unless a link is it. With a flush: without the all-reduce."""
    plan = pipedream(Profile(tuple(found)), devices, bandwidth=bandwidth, model=model)
    p = len(plan.stages)

    def pace(name, **options):
        spans = []
        for m in (32 * p, 64 * p):  # stages that are nearly alike take long to settle
            schedule = make(name, p, m)
            spans.append(simulate(schedule, plan.costs(**options)).makespan)
        return (spans[1] - spans[0]) / (32 * p)

    slowest = max(stage.time for stage in plan.stages)
    assert pace("pipedream") == pytest.approx(slowest)
    time, weights = plan.profile.of("time"), plan.profile.of("weights")
    works = [time[list(stage.layers)].sum() / stage.replicas for stage in plan.stages]
    assert pace("pipedream_flush", per_update=32 * p) == pytest.approx(max(works))
    if model == "sum":  # one exchange an update, whatever the number of micro-batches
        updates = plan.costs(per_update=99).of("update", p)
        for stage, update in zip(plan.stages, updates, strict=True):
            ring = 4 * (1 - 1 / stage.replicas) * weights[list(stage.layers)].sum() / bandwidth
            assert update == pytest.approx(ring)


def test_replicas_share_links():
    """Three devices send to one: over its one link. Three to two: over two."""
    found = Profile(tuple(Layer(name, forward=6, output=12) for name in "abc"))
    parts = [CutStage((0,), 2, 3), CutStage((1,), 3, 2), CutStage((2,), 6, 1)]
    plan = Partition(found, tuple(parts), 6)
    links = plan.costs(bandwidth=2, transfer=1).links(3)
    assert links == [1 + 12 / 2 / 2, 1 + 12 / 2]


# ---- the command line


def test_partition_on_the_command_line(tmp_path, capsys):
    file, picture = tmp_path / "graph.txt", tmp_path / "plan.png"
    file.write_text(GRAPH)
    command = ["partition", "--profile", str(file), "--devices", "2"]
    assert main([*command, "--json", "--plot", str(picture)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["bottleneck"] == pytest.approx(0.011) and found["time"] == pytest.approx(0.017)
    assert [s["first"] for s in found["stages"]] == [0, 2] and found["stages"][1]["last"] == 3
    assert [s["layers"] for s in found["stages"]] == [
        ["node2: Embedding(3, 2)", "node3: LSTM(2, 1)"],
        ["node4: __getitem__(0)", "node6: Linear(1, 1)"],
    ]
    assert picture.stat().st_size > 1000
    assert main([*command, "--method", "pipedream", "--straight"]) == 0
    assert "bottleneck 11.000 ms (a stage)" in capsys.readouterr().out
    assert main([*command, "--method", "fast"]) == 2
    assert "method='fast': use one of" in capsys.readouterr().err
    assert main([*command[:-1], "9"]) == 2
    assert "9 stages for 4 layers" in capsys.readouterr().err


def test_stages_of_a_branched_graph_are_named(tmp_path, capsys):
    """node2 and node3 read node1: where they are cut apart, positions alone do not tell them."""
    times, edges = {1: 1, 2: 1, 3: 7, 4: 4}, [(1, 2), (1, 3), (2, 4), (3, 4)]
    lines = [
        f"node{n} -- Layer{n}() -- forward_compute_time={t}, backward_compute_time=0.0, "
        "activation_size=1.0, parameter_size=0.0"
        for n, t in times.items()
    ]
    lines += [f"\tnode{a} -- node{b}" for a, b in edges]
    file = tmp_path / "graph.txt"
    file.write_text("\n".join(lines))
    command = ["partition", "--profile", str(file), "--devices", "2", "--method", "pipedream"]
    assert main([*command, "--straight", "--json"]) == 0
    stages = json.loads(capsys.readouterr().out)["stages"]
    assert [stage["layers"] for stage in stages] == [
        ["node1: Layer1()", "node3: Layer3()"],
        ["node2: Layer2()", "node4: Layer4()"],
    ]


@pytest.mark.parametrize("command", ["partition", "compare"])
def test_a_file_with_other_numbers_is_named(tmp_path, capsys, command):
    file = tmp_path / "odd.json"
    file.write_text('{"layers": [{"name": "a", "forward": "x"}]}')
    assert main([command, "--profile", str(file), "--devices", "1"]) == 2
    told = f"{file}: layer 'a' has forward='x': give at least 0, at most 1e+100"
    assert told in capsys.readouterr().err


def test_layers_without_times(tmp_path):
    """They can be cut by their parameters; there is nothing to draw."""
    found = split_layers(Profile((Layer("a", weights=4), Layer("b", weights=8))), 2, "parameters")
    assert str(found).endswith("bottleneck 0.000 ms (a stage); all layers on one device 0.000 ms")
    assert found.to_json()["bottleneck"] == 0
    with pytest.raises(ValueError, match="the profile has no times"):
        plots.partition(found)


def test_measuring_changes_nothing():
    """Neither running means nor what is drawn next."""
    norm, x = nn.BatchNorm1d(4), torch.randn(8, 4)
    state = torch.get_rng_state()
    profile([norm, nn.Dropout(0.5)], x, repeats=1)
    assert torch.equal(torch.get_rng_state(), state)
    assert norm.num_batches_tracked == 0 and not norm.running_mean.any()


@pytest.mark.parametrize("sample", [None, [], torch.tensor(1.0)])
def test_a_sample_that_is_no_micro_batch(sample):
    with pytest.raises(ValueError, match="give a tensor whose first dimension counts samples"):
        profile([nn.ReLU()], sample)
