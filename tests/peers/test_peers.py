"""Other pipelines on the same stages and batches: the same losses, gradients and weights.

Their spans come from torch.profiler inside their runs.
"""

import itertools
import subprocess
import sys
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from harness.deepspeed import run_deepspeed
from harness.torch_pipelining import run_torch_pipelining
from pipelab import (
    Recompute,
    RunError,
    Schedule,
    ScheduleError,
    make,
    run,
    validate,
)
from pipelab.measure.trace import from_trace
from pipelab.models import data, parameters, split
from pipelab.models.gpt2 import gpt2, next_token_loss
from pipelab.optimize.cut import Layer, Profile, split_layers, uniform
from pipelab.peers import torchgpipe
from pipelab.peers.deepspeed import schedule_of
from pipelab.peers.record import PeerRecord, gather
from pipelab.peers.torchgpipe import run_torchgpipe
from pipelab.table.transform import repeat
from tests.conftest import thorough
from tests.support import (
    ENVIRONMENT,
    GUARD,
    PYTHON,
    SGD,
    WORKERS,
    Failing,
    Named,
    Sum,
    Twice,
    batches,
    decaying,
    explode,
    free_port,
    run_of,
    stages,
)

RATE = SGD.keywords["lr"]
Adam = partial(torch.optim.Adam, lr=0.01)


def gradients_of(modules, batch, loss):
    """The gradients of plain autograd over the whole batch, per stage."""
    x, y = batch
    for module in modules:
        module.zero_grad()
    loss(nn.Sequential(*modules)(x), y).backward()
    return [{name: p.grad for name, p in module.named_parameters()} for module in modules]


def of_all(found):
    return [tensor for of_stage in found for tensor in of_stage.values()]


def stepped(modules, weights, rate):
    """The gradients of the one step of plain SGD from the modules' weights to these."""
    return [
        {name: (p.detach() - after[name]) / rate for name, p in module.named_parameters()}
        for module, after in zip(modules, weights, strict=True)
    ]


def equal(ours, theirs, rtol=1e-10, atol=1e-15):
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.keys() == other.keys()
        for name, tensor in mine.items():
            assert torch.allclose(other[name], tensor, rtol=rtol, atol=atol), name


def agree(ours, theirs, table):
    """Losses, weights and the order of the actions; and the spans can be of that order."""
    assert theirs.losses == pytest.approx(ours.losses, rel=1e-12)
    equal(ours.weights, theirs.weights)
    assert len(theirs.seconds) == len(ours.losses)
    assert min(theirs.seconds) > 0
    t = theirs.timeline
    assert t.source == "measured"
    assert validate(t.schedule).rows == table.rows
    assert all(start < end for start, end in zip(t.start, t.end, strict=True))
    for a, b in itertools.pairwise(t.schedule.bounds):
        assert all(end <= start for end, start in zip(t.end[a:b], t.start[a + 1 : b], strict=False))
    for taker, source in enumerate(t.schedule.inputs):
        assert source is None or t.start[taker] >= t.end[source]
    assert sum(theirs.seconds) >= t.makespan


# ---- torchgpipe


def agree_with_torchgpipe(modules, corpus, optimizer, recompute):
    p, count, what = len(modules), len(corpus), (modules, corpus, F.mse_loss, optimizer)
    ours = run(make("gpipe", p, 4, batches=count), *what, recompute=recompute)
    theirs = run_torchgpipe(*what, chunks=4, checkpoint=recompute.value)
    agree(ours, theirs, torchgpipe.schedule_of(p, 4, count))


@pytest.mark.parametrize("recompute", Recompute)
@pytest.mark.parametrize(("samples", "optimizer"), [(8, SGD), (10, decaying)])
def test_torchgpipe_trains_the_same_weights(samples, optimizer, recompute):
    agree_with_torchgpipe(stages(3), batches(3, samples=samples), optimizer, recompute)


@pytest.mark.parametrize("recompute", Recompute)
def test_torchgpipe_computes_all_forwards_again_but_the_last(recompute):
    modules, corpus, calls = stages(3), batches(1), []
    # The layers are counted, as torchgpipe has no module for a stage.
    modules[1][0].register_forward_hook(lambda *_: calls.append(1))
    checkpoint = recompute.value
    run_torchgpipe(modules, corpus, F.mse_loss, SGD, chunks=4, checkpoint=checkpoint)
    assert len(calls) == {"never": 4, "except_last": 4 + 3, "always": 4 + 4}[checkpoint]


def test_torchgpipe_runs_forwards_again_ahead_where_the_input_has_no_gradient():
    """A stage that reads tokens."""
    torch.manual_seed(0)
    model = split([nn.Embedding(9, 6), *stages(3)], [2, 2])
    tokens = torch.randint(9, (8,))
    model, batch = [stage.double() for stage in model], (tokens, torch.randn(8, 6).double())
    table = torchgpipe.schedule_of(2, 4)
    for mode in Recompute:
        found = run_torchgpipe(model, [batch], F.mse_loss, SGD, chunks=4, checkpoint=mode.value)
        assert found.timeline.schedule.rows == table.rows
        expected = gradients_of(model, batch, F.mse_loss)
        equal(expected, stepped(model, found.weights, RATE), atol=1e-12)


def test_torchgpipe_makes_fewer_micro_batches_than_it_is_told():
    """torch.chunk cuts 5 samples into 2, 2 and 1, where 4 are asked for."""
    modules, corpus = stages(2), batches(1, samples=5)
    found = run_torchgpipe(modules, corpus, F.mse_loss, SGD, chunks=4)
    assert found.timeline.schedule.rows == torchgpipe.schedule_of(2, 3).rows
    with pytest.raises(ValueError, match=r"into \[3, 4\] micro-batches: give batches of one size"):
        run_torchgpipe(modules, corpus + batches(1, samples=8), F.mse_loss, SGD, chunks=4)


@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize("several", [False, True])
def test_torchgpipe_runs_a_stage_that_returns_its_input(several, recompute):
    """Its backward begins before it ends, though one tensor goes in and out."""
    modules, corpus = stages(3), batches(2)
    modules[1] = nn.Sequential(Twice() if several else nn.Identity())
    modules[2] = nn.Sequential(Sum() if several else nn.Identity())
    found = run_torchgpipe(modules, corpus, F.mse_loss, SGD, chunks=2, checkpoint=recompute)
    table = make("gpipe", 3, 2, batches=2)
    ours = run(table, modules, corpus, F.mse_loss, SGD, recompute=Recompute(recompute))
    agree(ours, found, torchgpipe.schedule_of(3, 2, batches=2))


class Cut(nn.Module):
    def forward(self, x):
        return x.detach()


@pytest.mark.parametrize("recompute", ["never", "always"])
def test_torchgpipes_backward_ends_where_no_gradient_gets_to_the_input(recompute):
    modules, corpus = stages(2), batches(1)
    modules[1] = nn.Sequential(Cut(), *modules[1])
    found = run_torchgpipe(modules, corpus, F.mse_loss, SGD, chunks=2, checkpoint=recompute)
    assert list(map(str, found.timeline.schedule.rows[1])) == ["1F0", "1F1", "1B1", "1B0", "1U0"]
    assert found.timeline.makespan > 0


def test_torchgpipe_runs_a_stage_that_changes_its_input():
    modules, corpus = stages(2), batches(1)
    modules[1] = nn.Sequential(nn.ReLU(inplace=True), *modules[1])
    ours = run(make("gpipe", 2, 2), modules, corpus, F.mse_loss, SGD)
    found = run_torchgpipe(modules, corpus, F.mse_loss, SGD, chunks=2)
    agree(ours, found, torchgpipe.schedule_of(2, 2))


@pytest.mark.parametrize("recompute", Recompute)
def test_torchgpipe_has_no_backward_before_the_first_weight_to_train(recompute):
    """With a checkpoint it runs the forward again all the same, without any use.

    The backward that the table has takes next to no time.
    """
    modules, corpus = stages(2), batches(2)
    modules[0].requires_grad_(False)
    found = run_torchgpipe(modules, corpus, F.mse_loss, SGD, chunks=2, checkpoint=recompute.value)
    ours = run(make("gpipe", 2, 2, batches=2), modules, corpus, F.mse_loss, SGD)
    assert found.losses == pytest.approx(ours.losses, rel=1e-12)
    equal(ours.weights, found.weights)
    t = found.timeline
    assert t.schedule.rows == torchgpipe.schedule_of(2, 2, batches=2).rows
    took = [(str(s.action), s.end - s.start) for s in t.spans]
    first, second = (min(time for name, time in took if f"{s}B" in name) for s in (0, 1))
    assert first < second
    modules[1].requires_grad_(False)
    found = run_torchgpipe(modules, corpus, F.mse_loss, SGD, chunks=2, checkpoint=recompute.value)
    equal([module.state_dict() for module in modules], found.weights)


@pytest.mark.parametrize("recompute", Recompute)
def test_torchgpipes_micro_batches_may_share_their_memory(recompute):
    corpus = [(x[:1].expand(8, 6), y) for x, y in batches(2)]
    agree_with_torchgpipe(stages(2), corpus, SGD, recompute)


def test_torchgpipe_would_count_twice_in_batchnorm_with_a_checkpoint():
    modules = [nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)).double() for _ in range(2)]
    go = partial(run_torchgpipe, batches=batches(1), loss=F.mse_loss, optimizer=SGD, chunks=2)
    with pytest.raises(ValueError, match=r"stage 0 has BatchNorm1d.* twice in its running stat"):
        go(modules, checkpoint="always")
    go([module.eval() for module in modules], checkpoint="always")


def test_torchgpipe_says_which_outputs_it_does_not_pass():
    # Was: AttributeError "'str' object has no attribute 'detach'".
    class Naming(nn.Linear):
        def forward(self, x):
            return {"x": super().forward(x)}

    class Pairing(Naming):
        def forward(self, x):
            return x, super().forward(x)

    for first, has in ((Naming, "is a dict"), (Pairing, "has a dict")):
        modules = [nn.Sequential(first(6, 6).double()), *stages(1)]
        told = f"the output of stage 0 {has}: torchgpipe passes on only a t"
        with pytest.raises(ValueError, match=told):
            run_torchgpipe(modules, batches(1), F.mse_loss, SGD, chunks=2)


def test_torchgpipes_stages_do_not_share_a_learning_rate():
    # Was: every stage's scheduler halved the one tensor.
    rate = torch.tensor(0.1, dtype=torch.float64)

    def halved(parameters):
        optimizer = torch.optim.Adam(parameters, lr=rate)
        return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    arguments = stages(2), batches(3), F.mse_loss, halved
    theirs = run_torchgpipe(*arguments, chunks=2)
    assert rate == 0.1
    agree(run(make("gpipe", 2, 2, batches=3), *arguments), theirs, theirs.timeline.schedule)


def test_torchgpipe_ends_with_a_stage_that_leaves():
    """Its threads pass on Exceptions alone."""

    class Leaving(nn.Linear):
        def forward(self, x):
            raise SystemExit(3)

    modules = [*stages(1), nn.Sequential(Leaving(6, 6).double())]
    with pytest.raises(RunError, match=r"^stage 1 of torchgpipe: SystemExit: 3$"):
        run_torchgpipe(modules, batches(1), F.mse_loss, SGD, chunks=2)


def test_torchgpipes_balance_is_no_more_than_a_layer_off_the_best():
    """It stops where partitions differ by no more than the longest layer; ours is exact."""
    from torchgpipe.balance import balance_cost

    def compare(times, partitions):
        layers = tuple(Layer(str(i), forward=float(t)) for i, t in enumerate(times))
        ours = split_layers(Profile(layers), partitions)
        ends = np.cumsum([0, *balance_cost(times, partitions)])
        largest = max(sum(times[a:b]) for a, b in itertools.pairwise(ends))
        return ours.balance, np.diff(ends).tolist(), ours.bottleneck, largest

    assert compare([1000, 1, 1, 1], 2) == ([1, 3], [2, 2], 1000, 1001)
    assert compare([10, 1, 1, 1, 1, 1], 2) == ([1, 5], [3, 3], 10, 12)
    random = np.random.default_rng(0)
    for _ in range(50):
        times = random.integers(1, 100, size=9).tolist()
        _, _, best, theirs = compare(times, 3)
        assert best <= theirs <= best + max(times)


# ---- torch.distributed.pipelining


@pytest.mark.parametrize(
    ("name", "v", "m", "optimizer"),
    [("gpipe", 1, 3, Adam), ("pipedream_flush", 1, 5, SGD), ("interleaved", 2, 4, Adam)],
)
def test_torch_pipelining_trains_the_same_weights(name, v, m, optimizer):
    """In our order, though its table of 1F1B as data is off by one."""
    modules, corpus = stages(2 * v), batches(3, samples=2 * m)
    table = make(name, 2, m, virtual=v, batches=3)
    ours = run(table, modules, corpus, F.mse_loss, optimizer)
    theirs = run_torch_pipelining(
        name, modules, corpus, F.mse_loss, optimizer, devices=2, microbatches=m
    )
    agree(ours, theirs, table)


@pytest.mark.parametrize(
    ("name", "m"), [("interleaved", 3), *thorough(("gpipe", 4), ("pipedream_flush", 1))]
)
def test_torchs_runtime_carries_out_our_tables(name, m):
    """Few micro-batches, and numbers of them that its own schedules refuse."""
    v = 2 if name == "interleaved" else 1
    given = stages(2 * v), batches(3, samples=2 * m), F.mse_loss, decaying
    ours = run(make(name, 2, m, virtual=v, batches=3), *given)
    theirs = run_torch_pipelining(make(name, 2, m, virtual=v), *given)
    agree(ours, theirs, ours.timeline.schedule)


def test_torchs_runtime_carries_out_split_backwards():
    """Weight gradients last, as in the zero-bubble tables."""
    table = Schedule.from_grid("""
        0F0 0F1 .   .   0I0 0I1 0W0 0W1
        .   1F0 1F1 1I0 1I1 1W0 1W1 .
    """)
    modules, corpus = stages(2), batches(1)
    ours = run(table, modules, corpus, F.mse_loss, SGD)
    agree(ours, run_torch_pipelining(table, modules, corpus, F.mse_loss, SGD), table)


def test_torch_pipelining_says_what_it_does_not_take():
    given = stages(2), batches(1, 7), F.mse_loss, SGD
    unnamed = "no schedule for 'pipedream': use one of gpipe, pipedream_flush, inter"
    for schedule, m, error, told in (
        ("gpipe", 2, ValueError, "batch 0: 7 samples do not make 2 micro-batches of one size"),
        ("pipedream", 7, ValueError, unnamed),
        (make("pipedream", 2, 7), 7, ScheduleError, "updates without a flush"),
    ):
        with pytest.raises(error, match=told):
            run_torch_pipelining(schedule, *given, devices=2, microbatches=m)


@pytest.mark.parametrize("name", [*thorough("pipedream_flush"), "table"])
def test_torch_pipelining_passes_tuples(name):
    """Between stages, and as the input; one stage passes on what it has received."""
    first, second = stages(2)
    modules = [nn.Sequential(Sum(), *first, Twice()), nn.Sequential(Sum(), *second)]
    corpus = [((x, y), y) for x, y in batches(2)]
    table = make("pipedream_flush", 2, 2)
    go = partial(run_torch_pipelining, table)
    if name != "table":
        go = partial(run_torch_pipelining, name, devices=2, microbatches=2)
    theirs = go(modules, corpus, F.mse_loss, SGD)
    table = make("pipedream_flush", 2, 2, batches=2)
    agree(run(table, modules, corpus, F.mse_loss, SGD), theirs, table)


def test_torch_pipelining_passes_on_a_stages_own_error():
    # Was: "[Stage 1] failed to run forward" with shapes alone.
    class Failing(nn.Module):
        calls = 0  # of the class: torch first finds out shapes, with a copy

        def forward(self, x):
            Failing.calls += 1
            if Failing.calls > 1:
                raise ZeroDivisionError("the stage's own words")
            return x

    modules = [stages(1)[0], nn.Sequential(*stages(1), Failing())]
    with pytest.raises(RunError, match=r"^rank 1 of .*: ZeroDivisionError: the stage's own words$"):
        run_torch_pipelining(make("gpipe", 2, 2), modules, batches(1), F.mse_loss, SGD)


def test_torch_pipelining_says_which_values_it_does_not_pass():
    class Alone(nn.Module):
        def forward(self, x):
            return (x,)

    first, second = stages(2)
    (x, y), *_ = corpus = batches(2)
    go = partial(run_torch_pipelining, make("gpipe", 2, 2), loss=F.mse_loss, optimizer=SGD)
    passes = "torch's runtime passes a tensor, or a tuple of several tensors"
    with pytest.raises(RunError, match=f"the output of stage 0 is a tuple: {passes}"):
        go([nn.Sequential(*first, Alone()), second], corpus)
    for odd, told in (
        ([(x, y), ([x, x], y)], f"the input of batch 1 is a list: {passes}"),
        ([(x, (y, y))], "the target of batch 0 is a tuple: give one tensor"),
        (corpus + batches(1, samples=4), r"\(4, 6\).*\(8, 6\).*: .* batches of one shape"),
    ):
        with pytest.raises(ValueError, match=told):
            go([first, second], odd)


@pytest.mark.parametrize(
    ("name", "count", "sizes", "message"),
    [
        ("gpipe", 2, (3, 2), "2 stages for torch's own gpipe on 3 devices: give each device one"),
        ("pipedream_flush", 4, (2, 2), "4 stages for torch's own pipedream_flush on 2 devices"),
        ("interleaved", 3, (2, 2), "3 stages for torch's own interleaved on 2 devices"),
        ("gpipe", 2, (0, 2), "devices=0: give a whole number of at least 1"),
        ("gpipe", 2, (2, 0), "microbatches=0: give a whole number of at least 1"),
        (make("gpipe", 3, 2), 2, (None, None), "2 modules for the 3 stages of gpipe: give one per"),
    ],
)
def test_torch_pipelining_refuses_sizes_that_do_not_fit(name, count, sizes, message):
    devices, m = sizes
    with pytest.raises(ValueError, match=message):
        run_torch_pipelining(
            name, stages(count), batches(1), F.mse_loss, SGD, devices=devices, microbatches=m
        )


# ---- DeepSpeed


@pytest.mark.parametrize(("p", "m", "optimizer"), [(2, 4, decaying), *thorough((3, 2, Adam))])
def test_deepspeed_trains_the_same_weights_and_prints_nothing(p, m, optimizer, capfd):
    """Nor does it clip gradients to a norm of 1, its default."""
    modules, corpus = stages(p), batches(3, samples=2 * m)
    table = make("pipedream_flush", p, m, batches=3)
    loss = lambda output, target: 10 * F.mse_loss(output, target)  # noqa: E731
    ours = run(table, modules, corpus, loss, optimizer)
    theirs = run_deepspeed(modules, corpus, loss, optimizer, microbatches=m)
    agree(ours, theirs, table)
    assert sum(g.square().sum() for g in of_all(gradients_of(modules, corpus[0], loss))) > 4
    assert tuple(capfd.readouterr()) == ("", "")


def test_deepspeeds_dualpipe_v_trains_the_same_weights_and_its_trace_is_read():
    """Two stages a rank, whose actions have names of their own in the trace."""
    modules, corpus = stages(4), batches(2, samples=8)
    table = schedule_of(2, 4, name="dualpipe_v")
    theirs = run_deepspeed(modules, corpus, F.mse_loss, SGD, microbatches=4, schedule="dualpipe_v")
    ours = run(make("dualpipe_v", 2, 4, batches=2), modules, corpus, F.mse_loss, SGD)
    agree(ours, theirs, repeat(table, 2))


def test_reading_deepspeeds_schedule_prints_nothing():
    code = "from pipelab.peers.deepspeed import schedule_of; schedule_of(2, 2)"
    done = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == done.stderr == ""


def test_deepspeed_refuses_uneven_micro_batches():
    with pytest.raises(ValueError, match="batch 0: 7 samples do not make 2 micro-batches"):
        run_deepspeed(stages(2), batches(1, 7), F.mse_loss, SGD, microbatches=2)


def test_deepspeed_wants_a_weight_to_train_on_every_stage():
    first, second = stages(2)
    message = "stage 0 has no weight to train, and DeepSpeed does not run such a stage: join it"
    modules = [first.requires_grad_(False), second]
    with pytest.raises(RunError, match=message):
        run_deepspeed(modules, batches(1), F.mse_loss, SGD, microbatches=2)


def test_deepspeed_takes_tuples_and_batches_of_several_sizes():
    first, second = stages(2)
    modules = [nn.Sequential(Sum(), *first, Twice()), nn.Sequential(Sum(), *second)]
    corpus = [((x, y), y) for x, y in batches(1) + batches(1, samples=4)]
    table = make("pipedream_flush", 2, 2, batches=2)
    theirs = run_deepspeed(modules, corpus, F.mse_loss, SGD, microbatches=2)
    agree(run(table, modules, corpus, F.mse_loss, SGD), theirs, table)


@pytest.mark.thorough
def test_a_script_under_deepspeeds_launcher_trains_the_same_weights(tmp_path):
    layers, corpus, m = [layer for stage in stages(2) for layer in stage], batches(2), 4
    torch.manual_seed(0)
    modules = split([layer.float() for layer in layers], [2, 4])
    corpus = [(x.float(), y.float()) for x, y in corpus]
    torch.save((layers, corpus, m), tmp_path / "job.pt")
    launch = [PYTHON, "-c", "from deepspeed.launcher.runner import main; main()", "--num_gpus=2"]
    script = [f"--master_port={free_port()}", WORKERS / "deepspeed_script.py", tmp_path]
    where = {"env": ENVIRONMENT | {"DS_ACCELERATOR": "cpu"}, "timeout": GUARD}
    done = subprocess.run([*map(str, launch + script)], capture_output=True, text=True, **where)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    ours = run(make("pipedream_flush", 2, m, batches=2), modules, corpus, F.mse_loss, SGD)
    numbered = [f"{number}." for number in range(6)]
    results = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    assert results[0][0] == pytest.approx(ours.losses, rel=1e-6)
    theirs = results[0][1] | results[1][1]
    mine = nn.Sequential(*layers)
    for s, stage in enumerate(modules):
        stage.load_state_dict(ours.weights[s])
    assert mine.state_dict().keys() == theirs.keys()
    assert all(name.startswith(tuple(numbered)) for name in theirs)
    for name, weight in mine.state_dict().items():
        assert torch.allclose(theirs[name], weight, rtol=1e-5), name
    seen = from_trace([tmp_path / f"{rank}.json" for rank in range(2)])
    assert seen.part(0, 1).schedule.rows == schedule_of(2, m).rows
    assert seen.schedule == ours.timeline.schedule


# ---- all of them

TRAIN = {
    "torchgpipe": partial(run_torchgpipe, chunks=2),
    "deepspeed": partial(run_deepspeed, microbatches=2),
    "torch": partial(run_torch_pipelining, make("gpipe", 2, 2)),
}
PEERS = pytest.mark.parametrize("train", TRAIN.values(), ids=TRAIN)


@PEERS
def test_each_module_trains_or_evaluates_as_its_training_says_and_is_left_alone(train):
    """Nor does BatchNorm count a forward that only finds out shapes; batches get no gradients, and
    a module's own state comes back with the weights. Without a trace there is no timeline."""
    modules, corpus = stages(2), batches(2)
    modules[0].append(nn.BatchNorm1d(6).double())
    modules[1].extend([nn.BatchNorm1d(6).double().eval(), nn.Dropout(0.9).eval()])
    modules[1].append(Named())
    ours = run_of(make("gpipe", 2, 2, batches=2), modules, corpus, check=False)
    given = [*nn.ModuleList(modules).parameters()]
    before = [p.clone() for p in given]
    given += [tensor.requires_grad_() for batch in corpus for tensor in batch]
    traced = train is TRAIN["torchgpipe"]
    found = train(modules, corpus, F.mse_loss, SGD, trace=traced)
    assert (found.timeline is not None) == traced
    for weights in (ours.weights, found.weights):
        assert weights[1].pop("5._extra_state") == {"name": "first", "scale": torch.ones(1)}
    equal(ours.weights, found.weights)
    assert found.losses == pytest.approx(ours.losses, rel=1e-12)
    assert [state["3.num_batches_tracked"] for state in found.weights] == [4, 0]
    assert all(map(torch.equal, before, given))
    assert all(tensor.grad is None for tensor in given)


@PEERS
def test_no_batches_and_no_stages_are_refused(train):
    with pytest.raises(ValueError, match="batches=0: give a whole number of at least 1"):
        train(stages(2), [], F.mse_loss, SGD)
    with pytest.raises(ValueError, match=r"stages=0: give|0 modules for the 2 stages"):
        train([], batches(1), F.mse_loss, SGD)


@pytest.mark.parametrize(
    ("train", "name"), [(run_torchgpipe, "chunks"), (run_deepspeed, "microbatches")]
)
def test_no_micro_batches_are_refused(train, name):
    with pytest.raises(ValueError, match=rf"^{name}=0: give a whole number of at least 1"):
        train(stages(2), batches(1), F.mse_loss, SGD, **{name: 0})


def test_seconds_go_from_the_first_device_to_begin_to_the_last_to_end():
    """So that no action is outside of them."""
    outcomes = [PeerRecord([1.0, 2.0], {0: {}}, [5.0, 7.0, 8.0])]
    outcomes.append(PeerRecord([], {1: {}}, [6.0, 7.5, 7.9]))
    assert gather(outcomes, []).seconds == [2.5, 0.5]


@PEERS
def test_shared_weights_are_refused(train):
    modules = stages(2)
    modules[1][0].weight = modules[0][0].weight
    with pytest.raises(ValueError, match=r"stages share a weight|duplicate parameters"):
        train(modules, batches(1), F.mse_loss, SGD)


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("torchgpipe", ZeroDivisionError, "^by design$"),
        ("deepspeed", RunError, "^rank 1 of DeepSpeed: ZeroDivisionError: by design$"),
        ("torch", RunError, "^rank 1 of torch.distributed.pipelining: "),
    ],
)
def test_a_stage_that_fails_says_where(name, error, message):
    modules = [*stages(1), nn.Sequential(Failing(0, explode))]
    with pytest.raises(error, match=message):
        TRAIN[name](modules, batches(1), F.mse_loss, SGD)


@pytest.mark.parametrize(
    ("library", "call"),
    [
        ("torchgpipe", lambda: run_torchgpipe([], [], None, None, chunks=1)),
        ("deepspeed", lambda: run_deepspeed([], [], None, None, microbatches=1)),
        ("deepspeed", lambda: schedule_of(2, 2)),
    ],
)
def test_a_missing_library_is_named_with_what_to_install(library, call, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)
    message = rf"^{library} is not installed: pip install 'pipelab\[peers\]'$"
    with pytest.raises(ImportError, match=message):
        call()


@pytest.mark.thorough
def test_gpt2_through_all_of_them():
    """Token by token the same loss and the same gradients, each in its own processes."""
    torch.manual_seed(0)
    layers = gpt2(vocabulary=64, length=8, width=16, blocks=4, heads=2)
    modules = [stage.double() for stage in split(layers, uniform(6, 2))]
    corpus = data.batches(torch.randint(64, (500,)), 1, 8, 8)
    expected = gradients_of(modules, corpus[0], next_token_loss)
    ours = run(make("gpipe", 2, 4), modules, corpus, next_token_loss, SGD)
    arguments = corpus, next_token_loss, SGD
    runs = {
        "torchgpipe": run_torchgpipe(modules, *arguments, chunks=4, checkpoint="except_last"),
        "torch": run_torch_pipelining(
            "pipedream_flush", modules, *arguments, devices=2, microbatches=4
        ),
        "torch, our table": run_torch_pipelining(make("gpipe", 2, 4), modules, *arguments),
        "DeepSpeed": run_deepspeed(modules, *arguments, microbatches=4),
    }
    for name, found in runs.items():
        assert found.losses == pytest.approx(ours.losses, rel=1e-12), name
        equal(ours.weights, found.weights)
        equal(expected, stepped(modules, found.weights, RATE), atol=1e-12)
    counted = [sum(map(torch.numel, state.values())) for state in runs["DeepSpeed"].weights]
    assert counted == parameters(modules)


def test_torchgpipe_keeps_the_attributes_of_weights():
    """An optimizer may group weights by them, as in `run`."""
    stages = [torch.nn.Sequential(torch.nn.Linear(4, 4)) for _ in range(2)]
    stages[0][0].weight.still = True

    def optimizer(weights):
        weights = list(weights)
        moving = [p for p in weights if not getattr(p, "still", False)]
        still = [p for p in weights if getattr(p, "still", False)]
        groups = [{"params": moving}, *([{"params": still, "lr": 0.0}] if still else [])]
        return torch.optim.SGD(groups, lr=0.5)

    batch = torch.randn(8, 4), torch.randn(8, 4)
    loss = torch.nn.functional.mse_loss
    result = run_torchgpipe(stages, [batch], loss, optimizer, chunks=2)
    assert torch.equal(result.weights[0]["0.weight"], stages[0][0].weight)
    assert not torch.equal(result.weights[1]["0.weight"], stages[1][0].weight)
