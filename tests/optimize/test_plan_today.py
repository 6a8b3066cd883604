"""What is trained today: memory, links, schedules, published runs, the lines that start a plan."""

import json
import math
import re
import shlex
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.run import get_args_parser

from pipelab import Costs, ScheduleError, make, memory, simulate
from pipelab.cli import main
from pipelab.cli.jobs import start_lines
from pipelab.optimize.cut import Layer, Profile
from pipelab.optimize.order import gap
from pipelab.optimize.plan import (
    FLUSH,
    MACHINES,
    MODELS,
    SPLIT,
    Latent,
    Machine,
    Problem,
    Transformer,
    estimate,
    find_plan,
    makespan,
    table_for,
)
from pipelab.optimize.plan.choice_costs import costs_of, lengths_of, sizes_of_stages
from pipelab.optimize.plan.enumerate import Enumeration
from pipelab.optimize.plan.repeat import IN_ROUNDS, _period
from pipelab.predict.costs import Recompute
from pipelab.schedules import takes
from tests.conftest import examples, thorough

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import published

GPT22 = Transformer(layers=48, hidden=6144, heads=64, sequence=2048, vocabulary=51200)
TINY = Transformer(layers=4, hidden=64, heads=4, sequence=32, vocabulary=100)
A100 = MACHINES["A100-80GB"]
LAYER = Layer("layer", 1, 1, 1)
EVEN = Machine("even", 1e9, math.inf, bandwidth=1e6, inside=1e7, node=2, latency=1e-5)


# ---- memory


def test_a_layer_run_again_keeps_its_input():
    """22B, t = 8, p = 1, b = 4 (arXiv 2205.05198): 56 GB, where a whole stage run again has 115."""
    theirs = Problem(GPT22, A100, 8, 4, tensor=(8,), flash=False, sequence=False, zero=0)
    wanted = [c for c in theirs.choices() if (c.pipeline, c.microbatch) == (1, 4)]
    size = {(c.keep, c.recompute): estimate(theirs, c).memory / 1e9 for c in wanted}
    assert size["full", Recompute.NEVER] == pytest.approx(56, rel=0.03)
    assert size["all", Recompute.ALWAYS] > 105
    assert size["full", Recompute.NEVER] < size["selective", Recompute.NEVER]
    assert size["selective", Recompute.NEVER] < size["all", Recompute.NEVER]


def test_zero_shares_out_state():
    """Bytes a parameter: 18, or 16 as ZeRO counts; 6 and 12 over the replicas; all over them, and a
    layer's weights."""
    parameters = TINY.parameters + TINY.hidden * TINY.vocabulary
    cases = (0, None, 18), (0, 6.0, 16), (1, None, 6 + 12 / 4), (3, None, 18 / 4)
    for zero, optimizer, each in cases:
        problem = Problem(TINY, A100, devices=4, batch=4, zero=zero, optimizer=optimizer)
        choice = next(c for c in problem.choices() if c.pipeline == 1)
        costs = costs_of(problem, choice)
        (held,) = (2 * w + o for w, o in zip(costs.weights, costs.optimizer, strict=True))
        gathered = 2 * max(problem.profile().of("weights")) if zero == 3 else 0
        assert held == pytest.approx(each * parameters + gathered)


def test_grouped_heads_a_gate_and_experts_by_hand():
    model = Transformer(2, 8, 4, 16, 32, key_heads=2, feed=24, gated=True, experts=4, active=2)
    attention, feed = 2 * 8 * (8 + 4), 3 * 8 * 24
    assert model.parameters == 2 * (attention + 4 * feed) + 2 * 8 * 32
    products = 2 * 16 * (attention + 2 * feed)
    assert model.flops(1, recompute=False) == 3 * (2 * (products + 4 * 16**2 * 8) + 2 * 16 * 8 * 32)
    unit = Machine("unit", 1, 1, math.inf, share=1, latency=0)
    alone, shared = (model.profile(unit, expert=n, flash=False).layers[1] for n in (1, 4))
    assert alone.weight_grad == pytest.approx(products)
    assert alone.weights == 2 * (attention + 4 * feed)
    assert shared.weights == 2 * (attention + feed)
    link = replace(unit, bandwidth=10.0)
    sent = model.profile(link, expert=4, flash=False).layers[1].forward - shared.forward
    # Two of a token's experts get it, and send it back; three of four are elsewhere.
    assert sent == pytest.approx(2 * (3 / 4) * 2 * (2 * 16 * 8) / 10)


def test_published_sizes():
    """DeepSeek-V3: 671 B, 37 B active (arXiv 2412.19437), 250 GFLOPs a token (2505.09343, table 2);
    Mixtral: 46.7 B and 12.9 B with its embedding (2401.04088); Qwen3: 235 B, 22 B so (2505.09388);
    Llama 3: 8.03, 70.6 and 405 B (2407.21783; the files)."""
    llama = MODELS["llama-3-405b"]
    deepseek, mixtral, qwen = (
        MODELS[x] for x in ("deepseek-v3", "mixtral-8x7b", "qwen3-235b-a22b")
    )
    models = (
        replace(llama, layers=32, hidden=4096, heads=32, feed=14336),
        replace(llama, layers=80, hidden=8192, heads=64, feed=28672),
        *(llama, mixtral, qwen, deepseek),
    )
    assert [f"{x.parameters / 1e9:.4g}" for x in models] == [
        *("8.03", "70.55", "405.8", "46.7", "235", "670.9")
    ]
    assert f"{deepseek.active_parameters / 1e9:.0f}" == "37"
    for model, active in ((mixtral, "12.9"), (qwen, "22.1")):
        embedding = model.hidden * model.vocabulary
        assert f"{(model.active_parameters + embedding) / 1e9:.1f}" == active
    token = deepseek.flops(1, recompute=False, causal=True) / deepseek.sequence
    assert token == pytest.approx(250e9, rel=0.002)


def test_a_head_size_by_hand(capsys):
    """Heads of 6 where hidden / heads is 2: in weights, FLOPs, activations, keys and values."""
    model = Transformer(2, 8, 4, 16, 32, key_heads=2, feed=24, gated=True, head_size=6)
    query, key = 4 * 6, 2 * 6
    attention, feed = 8 * (query + 2 * key) + query * 8, 3 * 8 * 24
    assert model.parameters == 2 * (attention + feed) + 2 * 8 * 32
    unit = Machine("unit", 1, 1, math.inf, share=1, latency=0)
    layer = model.profile(unit).layers[1]
    assert layer.weights == 2 * (attention + feed)
    assert layer.weight_grad == pytest.approx(2 * 16 * (attention + feed))
    assert layer.forward - layer.weight_grad == pytest.approx(16 * 16 * 2 * query)  # causal
    assert layer.activations == 16 * (8 * 8 + 2 * (2 * query + 2 * key) + 4 * 24)
    biased = replace(model, gated=False)
    vectors = query + 2 * key + 24 + 6 * 8
    assert sum(biased.sizes()) == attention + 2 * 8 * 24 + vectors
    # Two devices share a sequence: each gets the other's keys and values.
    link = replace(unit, bandwidth=10.0)
    shared, free = (model.profile(at, context=2).layers[1].forward for at in (link, unit))
    assert shared - free == pytest.approx(2 * 8 * 2 * key / 10)
    assert replace(model, head_size=2).parameters == replace(model, head_size=0).parameters
    # Four devices share two heads' keys and values: each has one of them whole.
    whole = model.profile(unit, tensor=4).layers[1]
    assert whole.weights == 2 * (8 * (query / 4 + 2 * 6) + query / 4 * 8 + feed / 4)
    with pytest.raises(ValueError, match="head_size=-1"):
        replace(model, head_size=-1)
    with pytest.raises(ValueError, match="head_size=6: latent attention has widths of its own"):
        replace(model, latent=Latent(6, 4, 3, 1, 2))
    line = "plan --devices 1 --batch 1 --machine A100-80GB --json --model "
    line += "layers=2,hidden=8,heads=3,sequence=4,vocabulary=9"
    assert main(f"{line},head-size=5".split()) == 0
    capsys.readouterr()
    assert main(line.split()) == 2
    assert "give heads that divide hidden, or head_size" in capsys.readouterr().err


def test_what_a_plan_says_of_qwen3():
    """64 heads of 128 in 4,096: 22 B of 235 B are met by a token, not 18 B."""
    shared = {"expert": 32, "zero": 3, "schedules": ("pipedream_flush",)}
    problem = Problem(MODELS["qwen3-235b-a22b"], MACHINES["H200"], 64, 64, **shared)
    assert "235 B parameters, of which a token meets 21.5 B" in str(find_plan(problem))


def test_seconds_of_messages_by_their_cause():
    """Those of tensor parallelism, of experts and of ZeRO apart; blocked stages wait for transfers,
    an update passes over the state."""
    latent = Transformer(2, 64, 4, 32, 100, experts=4, active=2)
    machine = Machine("m", 1e9, math.inf, 1e6, inside=1e7, node=2, latency=1e-5, hbm=1e9)
    base = Problem(latent, machine, 4, 4, zero=0)

    def parts(problem, **wanted):
        wanted = {"pipeline": 1, "keep": "all", "recompute": Recompute.NEVER} | wanted
        chosen = (c for c in problem.choices() if wanted.items() <= c._asdict().items())
        found = estimate(problem, next(chosen))
        assert sum(found.parts.values()) == pytest.approx(found.step)
        return {name for name, seconds in found.parts.items() if seconds}

    alone = {"compute", "update"}
    assert parts(replace(base, devices=1)) == alone
    assert parts(base) == alone | {"all-reduce"}
    assert parts(replace(base, zero=3)) == alone | {"all-reduce", "ZeRO"}
    assert parts(replace(base, expert=4)) == alone | {"all-reduce", "experts"}
    assert parts(replace(base, tensor=(4,))) == alone | {"tensor"}
    assert parts(replace(base, context=(4,))) == alone | {"tensor", "all-reduce"}
    for blocking in (False, True):
        found = parts(replace(base, devices=2, blocking=blocking), pipeline=2)
        assert "transfer" in found and "tensor" not in found


def test_gradients_are_summed_as_they_are_kept():
    """Of 18 bytes a parameter 4 are a gradient's, of 16 two: 2 passes; with ZeRO-1 one of them, and
    one of weights of 2 bytes; with ZeRO-3 one of them."""
    machine = replace(EVEN, node=1, latency=0.0)
    weights = 2 * (TINY.parameters + TINY.hidden * TINY.vocabulary)
    pass_of = 3 / 4 / 1e6 * weights  # of a ring of four
    for optimizer, passes in ((7.0, (4, 3, 2)), (6.0, (2, 2, 1))):
        for zero, count in zip((0, 1, 3), passes, strict=True):
            problem = Problem(TINY, machine, 4, 4, zero=zero, optimizer=optimizer)
            choice = next(c for c in problem.choices() if c.pipeline == 1)
            assert costs_of(problem, choice).update[0] == pytest.approx(count * pass_of)


def test_an_overlapped_sum_leaves_a_devices_last_layer():
    """Of eight layers, in one chunk or in two."""
    slow = replace(EVEN, bandwidth=1.0, inside=1.0, latency=0.0)
    layers = Profile((Layer("layer", 1, 99, 0, weights=8.0),) * 16, samples=1)
    problem = Problem(layers, slow, 4, 4, overlap=True)
    for v in (1, 2):
        cut = {"pipeline": 2, "virtual": v, "balance": (8 // v,) * (2 * v)}
        choice = next(c for c in problem.choices() if cut.items() <= c._asdict().items())
        seconds = sizes_of_stages(problem, choice)["update"][0] * v
        assert seconds == pytest.approx(8.0)  # two devices exchange a layer's


def test_fewer_devices_may_do_more_each():
    """Five devices can only be a pipeline: (8 + 4) x 3 s. Four are replicas, with 2 x 15 s."""
    problem = Problem(Profile((LAYER,) * 5), EVEN, 5, 8)
    (fewer,) = (x for x in find_plan(problem).runners_up if x.decision == "devices")
    assert fewer.estimate.choice.pipeline * fewer.estimate.choice.replicas == 4
    assert fewer.why == "4 devices, each of which does 50.0% more: 6 s less"
    assert "  1. fewer devices: gpipe p=1 replicas=4 " in str(find_plan(problem))
    for devices, said in ((6, "25.0% more: +6 s (compute"), (4, "")):
        found = find_plan(replace(problem, devices=devices, model=Profile((LAYER,) * 6)))
        whys = "".join(x.why for x in found.runners_up if x.decision == "devices")
        assert said in whys and bool(said) == bool(whys)


def test_deepseeks_pairs_hide_its_messages():
    """180,000 GPU hours for 10^12 tokens: 19.9 s a batch. One after the other it would be 36."""
    problem = Problem(
        MODELS["deepseek-v3"],
        MACHINES["H800"],
        2048,
        15360,
        expert=64,
        schedules=("dualpipe_v",),
        overlap=True,
    )
    layout = next(c for c in problem.choices() if c.pipeline == 16 and c.microbatch == 1)
    layout = layout._replace(recompute=Recompute.NEVER, keep="selective")
    apart = estimate(problem, layout)
    paired = estimate(replace(problem, pairs=True), layout)
    assert apart.step > 1.7 * 19.9 and 19.9 < paired.step < 1.25 * 19.9
    assert paired.gap >= 0 and sum(paired.parts.values()) == pytest.approx(paired.step)
    stages = sizes_of_stages(replace(problem, pairs=True), layout)
    both = stages["forward"] + stages["input_grad"] + stages["weight_grad"]
    assert (stages["together"] <= both).all() and (stages["together"] >= both / 2).all()


def test_slices_train_long_sequences_without_recomputation():
    """30 B parameters with sequences of 64k on 64 A100, as Seq1F1B reports (arXiv 2406.03488)."""
    model = Transformer(64, 6144, 64, 65536, 50257)
    problem = Problem(model, A100, 64, 32, (8,), schedules=("pipedream_flush",), slices=(1, 4))
    layouts = {
        (choice.schedule, choice.slices): choice
        for choice in problem.choices()
        if choice.pipeline == 8 and choice.microbatch == 1
        if choice.keep == "all" and choice.recompute is Recompute.NEVER
    }
    whole, cut = (
        estimate(problem, layouts[kind]) for kind in (("pipedream_flush", 1), ("seq1f1b", 4))
    )
    assert whole.memory > 120e9 and cut.memory < 60e9
    assert cut.step < 0.9 * whole.step
    assert cut.parts["bubble"] == pytest.approx(whole.parts["bubble"] / 4, rel=0.02)
    assert cut.parts["compute"] > whole.parts["compute"]  # smaller products
    best = find_plan(problem)
    assert best.best.choice.slices == 4 and " slices=4 " in str(best)
    # The command that starts it makes the same table: slices that take equally long.
    (job,) = (line for line in start_lines(best) if line.startswith("pipelab run"))
    (lengths,) = re.findall(r",slices=([\d,]+) ", job)
    shares = [int(x) / 1000 for x in lengths.split(",")]
    assert shares == pytest.approx(best.best.to_json()["lengths"], abs=1e-3)
    costs = costs_of(problem, best.best.choice)
    made = replace(make("seq1f1b", 4, 16, slices=4), slices=tuple(shares))
    assert simulate(made, costs).makespan == pytest.approx(best.best.step, rel=2e-3)


def test_tables_that_would_take_minutes_are_left_out():
    model = Transformer(254, 1024, 8, 1048576, 1000)
    problem = Problem(model, A100, 256, 256, schedules=("pipedream_flush",), slices=(64,))
    longest = max(choice.pipeline for choice in problem.choices() if choice.slices > 1)
    assert 16 <= longest < 256


def test_one_device_may_slice_what_it_computes_again():
    """Of layers that are made again, a slice at a time."""
    problem = Problem(Transformer(2, 1024, 8, 65536, 1000), A100, 1, 1, slices=(16,))
    whole = replace(problem, schedules=("pipedream_flush",), slices=(1,))
    cut, plain = (Enumeration(each).smallest() for each in (problem, whole))
    assert cut.choice.slices == 16 and cut.memory < 0.7 * plain.memory
    longest = lengths_of(problem, cut.choice)[0]
    assert longest > 1 / 16 and len(lengths_of(problem, plain.choice)) == 1


def test_an_overlapped_sum_hides_behind_the_last_slice_alone():
    slow = replace(A100, bandwidth=2e9, inside=2e9)
    problem = Problem(Transformer(14, 512, 8, 16384, 1000), slow, 8, 16, slices=(2, 16))
    few, many = (
        next(c for c in problem.choices() if (c.slices, c.pipeline) == (k, 4)) for k in (2, 16)
    )
    hidden = replace(problem, overlap=True)
    left = [
        sizes_of_stages(hidden, c)["update"] / sizes_of_stages(problem, c)["update"]
        for c in (few, many)
    ]
    assert (left[0] < left[1]).all()


def test_what_attention_takes_by_hand():
    """Of equal slices, the time of each; without a head and an embedding."""
    unit = Machine("unit", 1, math.inf, math.inf, share=1, latency=0)
    model = Transformer(1, 8, 2, 16, 1)
    problem = Problem(model, unit, 2, 2, slices=(4,))
    (choice, *_) = (c for c in problem.choices() if c.slices == 4 and c.keep == "all")
    products, scores = 3 * 24 * 16 * 8**2 + 3 * 2 * 16 * 8, 3.5 * 2 * 16**2 * 8
    share = problem.attention(**choice.layer)
    assert share == pytest.approx(scores / (products + scores), rel=0.01)
    costs = costs_of(problem, choice)
    lengths = costs.even_slices(4)
    assert sum(lengths) == pytest.approx(1) and [*lengths] == sorted(lengths, reverse=True)
    table = replace(make("seq1f1b", 2, 1, slices=4), slices=lengths)
    assert costs.of_slices(table) == pytest.approx([0.25] * 4)
    with pytest.raises(ValueError, match="slices=17: give at most the 16 tokens"):
        replace(problem, slices=(17,))
    with pytest.raises(ValueError, match="a measured profile cannot be sliced"):
        Problem(Profile((Layer("one", 1, 1, 1),)), unit, 2, 2, slices=(2,))
    with pytest.raises(ScheduleError, match=r"slices=\(1,\): for seq1f1b give numbers above 1"):
        replace(problem, slices=(1,))


def test_latent_attention_by_hand():
    """And a first layer without experts, an expert that every token uses."""
    latent = Latent(query=6, key=4, nope=3, rope=1, value=2)
    experts = {"experts": 4, "active": 2, "shared": 1, "dense": (40,)}
    model = Transformer(3, 8, 4, 16, 32, feed=24, gated=True, latent=latent, **experts)
    made, ups = 8 * (6 + 4 + 1), 6 * 4 * 4 + 4 * 4 * (3 + 2)
    attention, expert = made + ups + 4 * 2 * 8, 3 * 8 * 24
    plain = attention + 3 * 8 * 40
    assert model.parameters == plain + 2 * (attention + 5 * expert) + 2 * 8 * 32
    assert model.active_parameters == plain + 2 * (attention + 3 * expert) + 8 * 32
    unit = Machine("unit", 1, 1, math.inf, share=1, latency=0)
    _, first, second, third, _ = model.profile(unit).layers
    assert first.weight_grad == pytest.approx(2 * 16 * plain)
    assert second == third and second.weights == 2 * (attention + 5 * expert)
    assert second.weight_grad == pytest.approx(2 * 16 * (attention + 3 * expert))
    assert second.forward - second.weight_grad == pytest.approx(16 * 16 * 4 * (4 + 2))  # causal
    assert second.activations == 16 * (8 * 8 + 2 * 11 + 2 * 4 * (4 + 4 + 2 + 2) + 4 * 3 * 24)
    lean = model.profile(unit, keep="selective").layers[2]  # queries, keys, values of the latents
    assert second.activations - lean.activations == 16 * 2 * 4 * (4 + 4 + 2)
    assert lean.input_grad - second.input_grad == pytest.approx(2 * 16 * ups)
    shared = model.profile(unit, tensor=2, expert=4).layers[2]  # all make the latents
    assert shared.weights == 2 * (made + (attention - made + expert + expert) / 2)
    problem = Problem(model, A100, 4, 4, expert=4)
    choice = next(c for c in problem.choices() if c.pipeline == 1)
    own = sizes_of_stages(replace(problem, zero=3), choice)["weights"]
    once = 2 * (plain + 2 * (attention + expert) + 2 * 8 * 32) / 4 + 2 * 2 * 4 * expert / 4
    assert own == pytest.approx(once)


# ---- links


def test_a_collective_has_the_cards_of_a_node():
    """16 devices of 2 nodes: their ring crosses with 8 cards, a ring of every eighth with one."""
    machine = Machine("m", 1, 1, bandwidth=1.0, inside=100.0, node=8, latency=0)
    assert machine.collective(160, 16, 1) == pytest.approx(2 * 15 / 16 * 160 / 8)
    assert machine.collective(160, 2, 8) == pytest.approx(160)
    assert machine.collective(160, 8, 1) == pytest.approx(2 * 7 / 8 * 160 / 100)
    far = replace(machine, rack=16, spine=0.5)
    assert far.collective(160, 32, 1) == pytest.approx(2 * 31 / 32 * 160 / 4)
    slow = replace(machine, latency=1.0)  # a tree: 2 log2 16 messages where a ring has 30
    assert slow.collective(1.6, 16, 1) == pytest.approx(2 * 1.6 / 8 + 8)


def test_groups_that_do_not_fill_a_node_cross_its_end():
    """Every second group of 4 lies in two nodes of 6, and sends by cards; not in a single node."""
    machine = Machine("m", 1, math.inf, bandwidth=1.0, inside=100.0, node=6, latency=0)
    for node in (5, 6):  # one device is left of a node, or two
        other = replace(machine, node=node)
        assert other.collective(160, 4, 1) == pytest.approx(2 * 3 / 4 * 160 / 4)
    assert machine.collective(160, 3, 1) == pytest.approx(2 * 2 / 3 * 160 / 100)
    racks = replace(machine, node=1, rack=6, spine=0.5)
    assert [racks.slowest(n) for n in (2, 3, 4, 12)] == [1.0, 1.0, 0.5, 0.5]
    model = Transformer(layers=4, hidden=12, heads=4, sequence=8, vocabulary=16)
    for devices, link in ((12, 1 * 4), (4, 100)):  # of 4 devices all are in one node
        problem = Problem(model, machine, devices, 4, tensor=(4,))
        layer = problem.profile(4).layers[1]
        free = replace(problem, machine=replace(machine, inside=math.inf, bandwidth=math.inf))
        alone = free.profile(4).layers[1]
        assert layer.forward - alone.forward == pytest.approx(2 * (2 * 3 / 4 * 2 * 8 * 12 / link))


def test_only_links_that_leave_a_node_are_slow():
    machine = Machine("m", 1, math.inf, bandwidth=1.0, inside=10.0, node=2, latency=0)
    problem = Problem(Profile((Layer("a", 1, 1, 1, output=20),) * 4), machine, 4, 4)
    (choice,) = {
        c
        for c in problem.choices()
        if c.pipeline == 4
        and c.microbatch == 1
        and c.schedule == "pipedream_flush"
        and c.recompute is Recompute.NEVER
    }
    assert costs_of(problem, choice).links(4) == [2, 20, 2]


# ---- schedules


def test_rounds_of_more_than_p():
    """p = 8, m = 9, v = 3: torch's order takes 102 where full rounds of 8 take 135."""
    times = [simulate(make("interleaved", 8, 9, virtual=3, longest=n)).makespan for n in (1, 9)]
    assert times == [135, 102]
    problem = Problem(Profile((Layer("a", 1, 1, 1),) * 24), EVEN, 8, 9)
    rounds = {c.longest for c in problem.choices() if c.schedule == "interleaved"}
    assert rounds == {1, 9}
    with pytest.raises(ScheduleError, match=r"longest=5: rounds of 8 to that many"):
        make("interleaved", 8, 9, virtual=3, longest=5)
    with pytest.raises(ScheduleError, match="gpipe has no rounds"):
        make("gpipe", 8, 9, longest=9)


@examples(40)
@given(st.integers(1, 5), st.integers(2, 4), st.integers(1, 30), st.data())
def test_longer_rounds_have_the_same_actions(p, v, m, data):
    longest = data.draw(st.integers(max(p, 2), max(p, 2, m)))
    try:
        longer = make("interleaved", p, m, virtual=v, longest=longest)
    except ScheduleError:
        assert m // -(-m // longest) < p
        return
    assert simulate(longer).makespan > 0
    assert sorted(longer.actions) == sorted(make("interleaved", p, m, virtual=v).actions)


def test_v_schedules_and_searched_ones_are_planned_with():
    problem = Problem(
        Profile((Layer("a", 1, 1, 1, activations=1),) * 8),
        Machine("fast", 1, math.inf, math.inf, latency=0),
        devices=4,
        batch=8,
        schedules=(*FLUSH, *SPLIT),
    )
    steps = {}
    for choice in problem.choices():
        wanted = (choice.pipeline, choice.microbatch, choice.recompute) == (4, 1, Recompute.NEVER)
        if wanted and len({*choice.balance}) == 1:
            steps[choice.schedule] = estimate(problem, choice).step
    ideal = 8 * 2 * 3
    assert {*SPLIT} <= {*steps}
    assert steps["zb_v"] == ideal + 3  # no device waits from its first forward on
    assert steps["zb_h1"] == ideal + 2 * 3 and steps["pipedream_flush"] == ideal + 6 * 3
    with pytest.raises(ScheduleError, match="'1f1b' cannot be used in plans"):
        replace(problem, schedules=("1f1b",))


# ---- a steady state counted once

seconds = st.sampled_from([0.5, 1.0, 1.25, 2.0, 3.0]) | st.floats(0.5, 3)


@examples(150)
@given(st.sampled_from(["gpipe", *IN_ROUNDS]), st.data())
def test_repetition_is_the_whole_simulation(name, data):
    p, m, v = data.draw(st.tuples(st.integers(1, 5), st.integers(1, 70), st.integers(2, 3)))
    v = v if takes(name, "virtual") else 1
    n = p * v
    some = st.lists(seconds, min_size=n, max_size=n)
    costs = Costs(
        *(data.draw(some) for _ in range(3)),
        transfer=data.draw(st.lists(st.sampled_from([0, 0.5, 4]), min_size=n - 1, max_size=n - 1)),
        update=data.draw(some),
        together=data.draw(st.none() | some),
        overhead=data.draw(st.sampled_from([0.0, 0.1])),
        recompute=data.draw(st.sampled_from(Recompute)),
    )
    table, slices = make(name, p, m, virtual=v), 1
    if takes(name, "slices"):
        slices = data.draw(st.integers(1, 3))
        costs = replace(costs, attention=data.draw(st.sampled_from([0.0, 0.4, 1.0])))
        lengths = costs.even_slices(slices) if slices > 1 else ()
        table = replace(make(name, p, m, slices=slices), slices=lengths)
    expected = simulate(table, costs).makespan + costs.overhead  # before the first action
    assert makespan(name, p, m, costs, virtual=v, slices=slices) == pytest.approx(
        expected, rel=1e-9
    )


def test_millions_of_actions_are_those_of_a_short_table(monkeypatch):
    """(m + p - 1) (F + B) of equal stages."""
    made = []
    monkeypatch.setattr(
        "pipelab.optimize.plan.repeat.make",
        lambda name, p, m, **sizes: made.append(m) or make(name, p, m, **sizes),
    )
    assert makespan("pipedream_flush", 3, 10**6, Costs()) == 3 * (10**6 + 2)
    assert sum(made) < 100


@pytest.mark.parametrize(("links", "turns"), [([9, 0], 2), ([0, 9, 9], 3), ([9, 9, 9, 9, 0], 5)])
def test_a_table_grows_until_it_repeats(monkeypatch, links, turns):
    """Devices at slow links wait for each other: their turn comes every `turns` micro-batches,
    which does not divide the p of a round."""
    p, costs = len(links) + 1, Costs(transfer=links)
    made = []
    monkeypatch.setattr(
        "pipelab.optimize.plan.repeat._period",
        lambda *table: made.append(_period(*table)) or made[-1],
    )
    for m in (40 * p, 40 * p + 1, 41 * p):
        expected = simulate(make("pipedream_flush", p, m), costs).makespan
        assert makespan("pipedream_flush", p, m, costs) == pytest.approx(expected, rel=1e-12)
        assert made[-1][0] == turns


@examples(25)
@given(st.sampled_from(["pipedream_flush", "interleaved"]), st.integers(2, 4), st.data())
def test_a_shorter_table_has_the_peak_of_the_whole(name, p, data):
    layers = [
        Layer("a", *(data.draw(seconds) for _ in range(3)), 1.0, data.draw(seconds), 1.0)
        for _ in range(2 * p)
    ]
    assert_peak_of_the_whole(name, p, layers)


def test_the_peak_of_a_table_that_repeats_late():
    """Inputs queue up for a while: 17 of 25 micro-batches do not show all of it."""
    times = [(1.25, 1.25, 2.0, 0.5), (2.6875, 1.0, 2.125, 0.5)]
    times += [(1.0, 2.0, 3.0, 0.5), (1.0, 1.0, 2.5625, 0.5)]
    layers = [Layer("a", *passes, 1.0, kept, 1.0) for *passes, kept in times]
    assert_peak_of_the_whole("interleaved", 2, layers)


def assert_peak_of_the_whole(name, p, layers):
    problem = Problem(Profile(tuple(layers)), replace(EVEN, bandwidth=2.0), p, 12 * p + 1)
    for choice in problem.choices():
        if choice.schedule == name and choice.pipeline == p and choice.microbatch == 1:
            costs = costs_of(problem, choice)
            whole = memory(simulate(table_for(choice, costs), costs), costs)
            found = estimate(problem, choice)
            assert found.memory == pytest.approx(max(whole.peak()))
            assert found.gap == pytest.approx(gap(table_for(choice, costs), costs), abs=1e-9)
            break


# ---- published runs


def test_published_runs_that_nothing_was_fitted_on():
    """Those whose tables are small; the whole page is benchmarks/published.md."""
    rows = [
        row
        for row in published.ROWS
        if not row.fitted and row.pipeline <= 16 and row.devices // row.pipeline <= 1024
    ]
    plans = [row.predicted() for row in rows]
    found = sorted(abs(published.error(*pair)) for pair in zip(rows, plans, strict=True))
    assert len(found) >= 12
    assert found[len(found) // 2] <= 0.05 and found[-1] <= 0.12
    assert all(x.memory <= row.machine.memory for x, row in zip(plans, rows, strict=True))


def test_llama_at_its_limit():
    """8,192 GPUs: twice the micro-batch does not fit."""
    (row,) = (row for row in published.ROWS if row.model == published.LLAMA and row.fitted)
    own = row.predicted()
    twice = own.choice._replace(microbatch=2, microbatches=16)
    assert own.memory <= 80e9 < estimate(row.problem, twice).memory


def test_the_machines_have_what_was_fitted():
    for machine, names, which in published.FITS:
        rows = [row for row in published.ROWS if row.fitted and which(row)]
        assert rows and len(names) <= 3
        found = published.fit(rows, names, [getattr(machine, name) for name in names], 2)
        for name, value in zip(names, found, strict=True):
            assert getattr(machine, name) == pytest.approx(value, rel=0.01)


def test_the_plan_for_llama_is_the_one_that_was_run():
    problem = Problem(published.LLAMA, MACHINES["H100-80GB"], 16384, 2048, (8,), overlap=True)
    search = Enumeration(problem)
    best = search.best(problem.machine.memory).choice
    assert (best.tensor, best.pipeline, best.replicas, best.microbatch) == (8, 16, 128, 1)
    assert best.keep == "all" and best.recompute is Recompute.NEVER


# ---- attacks

small = st.builds(
    Problem,
    model=st.builds(
        Transformer,
        layers=st.integers(1, 3),
        hidden=st.just(8),
        heads=st.sampled_from([2, 4]),
        sequence=st.sampled_from([4, 8]),
        vocabulary=st.integers(5, 50),
    ),
    machine=st.builds(
        Machine,
        name=st.just("any"),
        flops=st.just(1e5),
        memory=st.just(math.inf),
        bandwidth=st.floats(1e3, 1e5),
        inside=st.floats(1e5, 1e6),
        node=st.sampled_from([1, 2, 4]),
        hbm=st.sampled_from([1e5, math.inf]),
        narrow=st.sampled_from([0, 4]),
    ),
    devices=st.sampled_from([2, 4]),
    batch=st.sampled_from([2, 4]),
    tensor=st.sampled_from([(1,), (1, 2)]),
    context=st.sampled_from([(1,), (1, 2)]),
    flash=st.booleans(),
    sequence=st.booleans(),
    zero=st.sampled_from([0, 1, 3]),
    overlap=st.booleans(),
    blocking=st.booleans(),
)


@examples(12)
@given(small, st.lists(st.floats(0, 1), min_size=2, max_size=2))
def test_the_best_is_that_of_all(problem, places):
    """Brute force over every choice; and more memory never makes the best plan slower."""
    every = [estimate(problem, choice) for choice in problem.choices()]
    needs = sorted(x.memory for x in every)
    before = math.inf
    for place in sorted(places):
        limit = needs[int(place * (len(needs) - 1))]
        truth = min(x.step for x in every if x.memory <= limit)
        found = Enumeration(problem).best(limit)
        assert found.memory <= limit and found.step == pytest.approx(truth, rel=1e-9)
        assert found.step <= before * (1 + 1e-9)
        before = found.step


@examples(12)
@given(small, st.sampled_from(["bandwidth", "inside", "flops", "hbm"]), st.floats(1.1, 10))
def test_a_faster_machine_is_never_slower(problem, name, more):
    """TrainingChoice by choice, as long as a node's links stay faster than those between nodes."""
    value = getattr(problem.machine, name) * more
    machine = replace(problem.machine, **{name: value})
    if name == "bandwidth":
        machine = replace(machine, bandwidth=min(value, machine.inside), spine=0.0)
    faster = replace(problem, machine=machine)
    for choice in list(problem.choices())[::3]:
        assert estimate(faster, choice).step <= estimate(problem, choice).step * (1 + 1e-9)


SIZES = "--model layers=4,hidden=64,heads=4,sequence=32,vocabulary=100"
BASE = f"--devices 4 --batch 16 {SIZES} --machine A100-80GB"


def changed(line):
    """The words of BASE with other options, or other settings in them."""
    given = BASE.split()
    found = dict(zip(given[::2], given[1::2], strict=True))
    words = line.split()
    for option, value in zip(words[::2], words[1::2], strict=True):
        name, setting, _ = value.partition("=")
        kept = found.get(option, "").split(",") if setting else []
        kept = [part for part in kept if part and part.partition("=")[0] != name]
        found[option] = ",".join([*kept, value])
    return [word for pair in found.items() for word in pair]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--model layers=1000000000", "layers=1000000000: give at most 2,000"),
        ("--model gpt5", "unknown model 'gpt5': there are deepseek-v3, mixtral-8x7b"),
        ("--model pyproject.toml", "pyproject.toml: line 1 is not a node"),
        ("--model nowhere.json", "nowhere.json"),
        ("--model width=8", "width=8: There are layers, hidden"),
        ("--model heads=3", "heads=3 hidden=64: give heads that divide hidden"),
        ("--model latent=4,2", "latent=(4, 2): give query, key, nope, rope, value"),
        ("--model dense=8,8,8,8,8", "dense has 5 widths, but there are 4 layers"),
        ("--model key-heads=3", "key_heads=3: give a number that divides heads=4"),
        ("--model active=2", "active=2: give at most experts=1"),
        ("--devices 0", "'0': give a whole number of at least 1"),
        ("--devices 7", "batch=16 on 7 devices: no pipeline"),
        ("--batch 3 --devices 8", "batch=3 on 8 devices: no pipeline of at most 6"),
        ("--devices 1000000000000000000", "1,000,000,000,000,000,000 devices, or samples of a"),
        ("--batch 1000000000000000000", "samples of a batch: give at most 1,000,000,000"),
        ("--training tensor=3", "tensor=3: give a number that divides the 4 devices and the 4 hea"),
        ("--training context=3", "context=3: give a number that divides the 4 devices and the 32"),
        ("--training expert=2", "expert=2: give a number that divides the 4 devices and the 1 exp"),
        (
            "--model experts=4 --training expert=4 --training tensor=4",
            "and is a multiple of expert=4; change one of these",
        ),
        ("--training optimizer=nan", "optimizer=nan: give bytes per byte of weights, at least 0"),
        ("--machine L40S", "unknown machine 'L40S': there are A100-80GB"),
        ("--machine share=74", "share=74.0 of A100-80GB: give at most 1"),
        ("--machine share=-1", "share=-1.0 of A100-80GB: give a number above 0"),
        ("--machine flops=0", "flops=0.0 of A100-80GB: give a number above 0"),
        ("--machine hbm=nan", "hbm=nan of A100-80GB: give a number above 0"),
        ("--machine narrow=-1", "narrow=-1.0 of A100-80GB: give a number of at least 0"),
        ("--machine latency=inf", "latency=inf of A100-80GB: give a finite number"),
        ("--machine memory=1e5", "nothing fits devices of 0.0001 GB"),
    ],
)
def test_nonsense_is_one_line(capsys, line, message):
    assert_refused(capsys, changed(line), message)


def assert_refused(capsys, words, message):
    assert main(["plan", *words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--machine H200", "the following arguments are required: --model"),
        ("--model heads=4 --machine H200", "--model: add layers=, hidden=, sequence=, vocabulary="),
        (f"{SIZES} --machine node=4", "add flops=, memory=, bandwidth=, or begin with one of A100"),
    ],
)
def test_what_is_left_out_is_asked_for(capsys, line, message):
    assert_refused(capsys, ["--devices", "4", "--batch", "16", *line.split()], message)


# ---- what it says, and the lines that start it


def test_the_answer_names_layers_means_and_reasons(capsys):
    line = f"plan {BASE},memory=2.2e6 --training tensor=1,2"
    assert main(line.split()) == 0
    out = capsys.readouterr().out
    assert re.search(r"^  layers embedding \+ ", out, re.M) and "head" in out
    assert "on: ZeRO-1, messages beside compute, FlashAttention, sequence parallelism; off: " in out
    assert main([*line.split(), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["means"].startswith("on: ZeRO-1")
    assert found["start"][0].startswith("stages = pipelab.models.split(layers, [")
    assert re.match(r"torchrun --nproc-per-node \d -m -- pipelab run ", found["start"][2])


def on_two_nodes(agent):
    """What the ranks of two such agents print."""
    agents = [
        subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *agent],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    try:
        outputs = [agent.communicate(timeout=240) for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    assert [agent.returncode for agent in agents] == [0, 0], outputs[0][1][-2000:]
    return "".join(out for out, _ in outputs)


@pytest.mark.parametrize("real", [False, *thorough(True)])
def test_the_printed_lines_run(real, capsys, tmp_path, monkeypatch):
    """`pipelab run`, `torchrun` on two nodes and the hand-over, as printed; its agents' options are
    read by torch's own parser, and `real` starts them."""
    machine = "--machine A100-80GB,node=1,inside=1e9,bandwidth=1e9,memory=3.2e6"
    sizes = SIZES.replace("layers=4", "layers=6")
    line = f"plan --devices 2 --batch 4 {sizes} {machine} --training zero=0 --json"
    assert main(line.split()) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["best"]["pipeline"] == 2
    split, run, torchrun, export, titan = found["start"]
    assert eval(split.split("layers, ")[1][:-1]) == found["best"]["balance"]
    assert main(shlex.split(run)[1:]) == 0
    assert "Check passed" in capsys.readouterr().out
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meeting = f"127.0.0.1:{free.getsockname()[1]}"
    assert torchrun.startswith("torchrun --nnodes 2 ") and "NODE0:29500" in torchrun
    agent = shlex.split(torchrun.replace("NODE0:29500", meeting))[1:]
    told = get_args_parser().parse_args(agent)
    assert (told.nnodes, told.nproc_per_node, told.module) == ("2", "1", True)
    assert [told.training_script, *told.training_script_args] == shlex.split(run)
    if real:
        assert "Check passed" in on_two_nodes(agent)
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(export)[1:]) == 0
    options = Path("hand-over/options.txt").read_text()
    assert "--parallelism.pipeline_parallel_degree 2" in options and "tok_embeddings" in options
    assert "--parallelism.tensor_parallel_degree 1" in titan
