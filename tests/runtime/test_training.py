"""What real training needs: ties, skips, dropout, autocast, replicas, evaluation, checkpoints."""

import copy
import json
import threading
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from pipelab import Recompute, RunError, Trainer, evaluate, make, run
from pipelab.models import mlp, split
from pipelab.models.skip import Pop, Stash, with_skips
from pipelab.runtime.drafts import draft_of
from pipelab.runtime.threads import Threads
from pipelab.runtime.torch.device import CpuDevice
from tests.conftest import FLUSH, examples, pairs, tables, thorough
from tests.support import (
    RULES,
    SGD,
    Failing,
    Forward,
    Layer,
    batches,
    decaying,
    explode,
    passing,
    plainly,
    run_of,
    same,
    stages,
)

BACKENDS = ("threads", "processes")
ADAMW = partial(torch.optim.AdamW, lr=1e-2)


@pytest.mark.parametrize("name", ["pipedream_flush", "zb_h1", "pipedream"])
def test_compiled_stages_train_alike_and_nothing_else_is_compiled(name, caplog):
    # Was: what notes the tensors that autograd saves was compiled too, and a warning told of it.
    compiled = [torch.compile(stage, backend="aot_eager") for stage in stages(2)]
    table = make(name, 2, 4, batches=2)
    assert passing(table, compiled).losses == pytest.approx(run_of(table).losses)
    assert not [record for record in caplog.records if record.name.startswith("torch._dynamo")]


# ---- tied weights


def tied(count=3):
    modules = stages(count)
    modules[-1][2].weight = modules[0][0].weight
    return modules


@pytest.mark.parametrize(("name", "clip", "backend"), pairs(FLUSH, [None, 1e-2], BACKENDS))
def test_tied_weights_have_one_gradient(name, clip, backend):
    schedule = make(name, 3, 4, batches=2, virtual=2 if name == "interleaved" else 1)
    modules = tied(schedule.stages)
    result = passing(schedule, modules, optimizer=ADAMW, clip=clip, backend=backend)
    assert result.check.ratio == 0
    assert torch.equal(result.weights[0]["0.weight"], result.weights[-1]["2.weight"])
    model, _ = plainly(modules, batches(2), optimizer=ADAMW, clip=clip)
    assert torch.allclose(result.weights[0]["0.weight"], model[0][0].weight, rtol=1e-9)


def test_a_tied_gradient_of_one_stage_alone_fails_the_check(monkeypatch):
    from pipelab.runtime.torch import weights

    monkeypatch.setattr(weights, "_add_up", lambda news: {})
    assert not run_of(make("gpipe", 3, 4), tied()).check.passed


def test_a_weight_in_two_places_of_one_stage_keeps_its_versions():
    modules = stages(3)
    for stage in modules:
        stage[2].weight = stage[0].weight
    result = passing(make("pipedream", 3, 6), modules)
    assert result.weight_versions == [3, 2, 1]
    assert torch.equal(result.weights[0]["0.weight"], result.weights[0]["2.weight"])


# ---- skips


def residual(count=6):
    torch.manual_seed(0)
    layers = [Layer() for _ in range(count)]
    return with_skips(
        [
            layers[0],
            Stash("far"),
            layers[1],
            Stash("near"),
            layers[2],
            Pop("near"),
            nn.Tanh(),
            *layers[3:],
            Pop("far", torch.mul),
        ]
    )


BALANCES = [2, 2, 7], [3, 4, 4], [1, 9, 1], [11]


@pytest.mark.parametrize(
    ("balance", "backend"),
    [
        *((balance, "threads") for balance in BALANCES),
        (BALANCES[0], "processes"),
        *thorough(*((balance, "processes") for balance in BALANCES[1:])),
    ],
)
def test_skips_cross_any_cut(balance, backend):
    layers = residual()
    result = passing(
        make("pipedream_flush", len(balance), 4), split(layers, balance), backend=backend
    )
    x, y = batches(1)[0]
    with torch.no_grad():
        loss = float(F.mse_loss(nn.Sequential(*layers)(x), y))
    assert result.losses == [pytest.approx(loss, rel=1e-12)]


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([Pop("a")], "layer 0 pops 'a', which no layer"),
        ([Stash("a"), Stash("a")], "layer 1 stashes 'a' again"),
        ([Stash("a"), nn.Tanh()], "stashed and never popped: a"),
    ],
)
def test_skips_that_do_not_fit(layers, message):
    with pytest.raises(ValueError, match=message):
        with_skips(layers)


# ---- dropout, batch norm, mixed precision


def dropping(count=3, rate=0.4):
    return [nn.Sequential(*stage, nn.Dropout(rate)) for stage in stages(count)]


@pytest.mark.parametrize(("rule", "recompute"), pairs(RULES, [*Recompute, [0, 2]]))
def test_dropout_is_the_same_again_and_in_the_reference(rule, recompute):
    schedule = make(rule[0], 3, 3, batches=2, reads=rule[1])
    result = passing(schedule, dropping(), batches(2, 9), recompute=recompute, seed=1)
    assert result.check.ratio == 0


def test_dropout_drawn_anew_by_recomputation_fails_the_check(monkeypatch):
    from pipelab.runtime.torch.stage import TorchStage

    original = TorchStage._apply

    def draw_anew(self, microbatch, *arguments):
        seed, *rest = self.fed[microbatch].seed
        self.fed[microbatch].seed = seed + (microbatch in self._seen), *rest
        self._seen.add(microbatch)
        return original(self, microbatch, *arguments)

    monkeypatch.setattr(TorchStage, "_seen", set(), raising=False)
    monkeypatch.setattr(TorchStage, "_apply", draw_anew)
    recomputed = run_of(make("gpipe", 1, 2), dropping(1), recompute=Recompute.ALWAYS, seed=1)
    assert not recomputed.check.passed


def test_dropout_of_one_seed_does_not_depend_on_schedule_or_backend():
    gpipe, flush = (make(name, 3, 3, batches=2) for name in ("gpipe", "pipedream_flush"))
    given = dropping(), batches(2, 9)
    one = run_of(gpipe, *given, seed=1)
    assert run_of(flush, *given, seed=1, backend="processes").losses == one.losses
    assert run_of(gpipe, *given, seed=2).losses != one.losses
    torch.manual_seed(1)
    expected = torch.rand(2)
    torch.manual_seed(1)
    assert run_of(gpipe, *given).losses == one.losses
    assert torch.equal(torch.rand(2), expected)  # which a run leaves alone


class Noisy(Layer):
    """Draws by itself: no layer says so."""

    def forward(self, x):
        return F.dropout(super().forward(x), 0.3) * torch.rand(len(x), 1, dtype=x.dtype)


@pytest.mark.parametrize("name", ["pipedream_flush", "pipedream"])
def test_a_forward_that_draws_by_itself_draws_the_same_again(name, tmp_path):
    # Was: without a seed, what ran again drew other numbers, and so did the reference.
    modules, table = [stages(1)[0], Noisy(), Noisy()], make(name, 3, 3, batches=3)
    given = table, modules, batches(3, 9)
    torch.manual_seed(1)
    kept = passing(*given)
    again = passing(*given, recompute=Recompute.ALWAYS)
    assert again.losses == kept.losses == run_of(*given, seed=1, check=False).losses
    run_of(*given, save=tmp_path / "saved", stop=1, check=False)
    torch.manual_seed(2)
    assert same(run_of(*given, resume=tmp_path / "saved", check=False), kept)
    assert run_of(*given, check=False).losses != kept.losses


def test_an_evaluation_may_draw():
    # Was: a check that failed, and told to give a seed, which an evaluation has no word for.
    assert evaluate(make("gpipe", 2, 2), [Noisy(), Noisy()], batches(1), F.mse_loss).check.passed


def test_only_what_draws_takes_turns(monkeypatch):
    turns = []
    drawing = CpuDevice._drawing

    def counted(self, *arguments):
        turns.append(self)
        return drawing(self, *arguments)

    monkeypatch.setattr(CpuDevice, "_drawing", counted)
    passing(make("gpipe", 3, 4), [stages(1)[0], Noisy(), stages(1)[0]])
    assert len(turns) == 4 + 2  # the others' first forwards show that they draw nothing


class Meeting(nn.Module):
    """Lets the caller draw between its seed and its draw, if it may."""

    seeded, drawn = threading.Event(), threading.Event()

    def __init__(self, rate):
        super().__init__()
        self.rate = rate

    def forward(self, x):
        self.drawn.clear()
        self.seeded.set()
        self.drawn.wait(0.02)
        self.seeded.clear()
        return F.dropout(x, self.rate)


@pytest.mark.parametrize(("rate", "seed"), [(0.5, 1), (0.5, None), (0.0, None)])
@pytest.mark.parametrize("name", ["gpipe", "pipedream"])
def test_the_caller_and_the_forwards_draw_by_themselves(name, rate, seed):
    # Was: both drew from one generator at the same time: other data, another dropout.
    modules = [nn.Sequential(*stages(1), Meeting(rate)), *stages(1)]

    def reading(count):
        for _ in range(count):
            Meeting.seeded.wait(0.02)
            batch = torch.randn(2, 8, 6, dtype=torch.float64).unbind()
            Meeting.drawn.set()
            yield batch

    torch.manual_seed(1)
    plain = [(*batch, torch.rand(1)) for batch in reading(4)]
    schedule = partial(make, name, 2, 2)
    torch.manual_seed(1)
    data, given = [batch[:2] for batch in plain], (F.mse_loss, SGD)
    whole = run(schedule(batches=4), modules, data, *given, seed=seed, check=False)
    with Trainer(schedule(), modules, *given, seed=seed, check=False) as trainer:
        steps = [(step, torch.rand(1)) for step in trainer.fit(reading(4))]
    assert [draw for _, draw in steps] == [draw for *_, draw in plain]
    assert [step.loss for step, _ in steps] == whole.losses


def test_a_generator_of_its_own_cannot_be_drawn_from_again():
    # Was: another mask in the backward, without a word.
    noisy = Noisy()
    noisy.generator = torch.Generator()
    with pytest.raises(ValueError, match=r"stage 1: generator of a Noisy is a torch\.Generator"):
        run_of(make("gpipe", 2, 2), [stages(1)[0], noisy], recompute="always")


def test_batch_norm_is_over_micro_batches():
    modules = [nn.Sequential(stage, nn.BatchNorm1d(6, dtype=torch.float64)) for stage in stages(2)]
    result = passing(make("gpipe", 2, 2, batches=2), modules)
    assert result.check.ratio == 0
    whole = run_of(make("gpipe", 2, 1, batches=2), modules)
    assert whole.losses != pytest.approx(result.losses, rel=1e-3)  # another model
    assert result.weights[0]["1.num_batches_tracked"] == 4


@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast_to_bfloat16(backend):
    modules, data = stages(3, dtype=torch.float32), batches(2, dtype=torch.float32)
    seen = []

    def loss(y, target):
        seen.append(y.dtype)
        return F.mse_loss(y, target)

    schedule = make("pipedream_flush", 3, 4, batches=2)
    options = {"autocast": torch.bfloat16, "recompute": Recompute.ALWAYS, "backend": backend}
    result = passing(schedule, modules, data, loss, ADAMW, **options)
    assert not result.check.ratio
    assert set(seen) == {torch.bfloat16, torch.float32}  # the latter of the undivided batch
    assert result.weights[0]["0.weight"].dtype == torch.float32
    plain = run(schedule, modules, data, F.mse_loss, ADAMW)
    assert result.losses == pytest.approx(plain.losses, rel=3e-2)
    assert result.losses != plain.losses
    with torch.autocast("cpu", torch.bfloat16):
        inherited = run(schedule, modules, data, F.mse_loss, ADAMW, backend=backend)
    assert inherited.losses == result.losses


# ---- replicas


@examples(25)
@given(
    tables(names=FLUSH, largest=3),
    st.integers(2, 3),
    st.integers(0, 4),
    st.sampled_from([None, 1e-2]),
)
def test_replicas_train_as_one(case, replicas, extra, clip):
    schedule, _, m, _, k = case
    data = batches(k, samples=m * replicas + extra)
    result = passing(schedule, data=data, optimizer=ADAMW, replicas=replicas, clip=clip)
    assert len(result.replicas) == replicas
    assert len(result.microbatch_losses) == schedule.total * replicas
    one = passing(schedule, data=data, optimizer=ADAMW, clip=clip)
    assert result.losses == pytest.approx(one.losses, rel=1e-9)


def test_replicas_on_processes_with_tied_weights_dropout_and_clipping():
    modules = tied(2)
    modules[0].append(nn.Dropout(0.3))
    given = make("pipedream_flush", 2, 2, batches=2), modules, batches(2, 9), F.mse_loss, ADAMW
    result = passing(*given, replicas=2, clip=1e-2, backend="processes")
    assert result.check.ratio == 0
    threads = passing(*given, replicas=2, clip=1e-2)
    assert result.losses == pytest.approx(threads.losses, rel=1e-12)


def test_ranks_are_laid_out_as_in_deepspeeds_topology():
    topology = pytest.importorskip("deepspeed.runtime.pipe.topology").PipeDataParallelTopology(
        num_pp=3, num_dp=2
    )
    from pipelab.runtime.options import Options
    from pipelab.runtime.torch.backend import TorchJob

    def rank(row, replica):
        job = TorchJob(
            schedule=make("gpipe", 3, 2),
            row=row,
            device="cpu",
            replica=replica,
            replicas=2,
            modules={},
            options=Options(loss=F.mse_loss, replicas=2),
            draws=False,
            ties=[],
            start={},
            names={},
        )
        return job.rank

    assert all(rank(d, r) == topology.get_rank(pipe=d, data=r) for d in range(3) for r in range(2))


def test_replicas_that_differ_fail_the_check(monkeypatch):
    from pipelab.runtime.transport import Transport

    def forget_the_others(self, key, row, sums, device):
        return sums

    monkeypatch.setattr(Transport, "sum_over_replicas", forget_the_others)
    assert not run_of(make("gpipe", 2, 2), replicas=2).check.passed


# ---- evaluation


@pytest.mark.parametrize("backend", BACKENDS)
def test_evaluation_is_the_forwards_alone(backend):
    modules, data = dropping(), batches(2, 10)
    result = evaluate(
        make("pipedream_flush", 3, 4, batches=2), modules, data, F.mse_loss, backend=backend
    )
    assert result.check.passed
    whole = copy.deepcopy(nn.Sequential(*modules)).eval()
    with torch.no_grad():
        assert result.losses == pytest.approx(
            [float(F.mse_loss(whole(x), y)) for x, y in data], rel=1e-12
        )
    assert result.timeline.schedule.bounds[-1] == 3 * 8
    assert all(m.training for m in modules)


def test_an_evaluation_keeps_nothing_for_a_backward(monkeypatch):
    """100 times what goes in, which a training forward would keep."""

    w = nn.Parameter(torch.ones(600, dtype=torch.float64))
    wide = Forward(lambda module, x: (x.repeat(1, 100) * module.w).tanh()[:, :6], w=w)
    found, collect = [], Threads.collect
    monkeypatch.setattr(Threads, "collect", lambda *of: found.append(collect(*of)) or found[-1])
    evaluate(make("gpipe", 2, 2), [wide, copy.deepcopy(wide)], batches(1), F.mse_loss)
    assert all(max(o.record.most) == 0 for o in found[0])


# ---- checkpoints


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True)


# The rules and optimizers take turns; those that keep several versions, in processes too.
OPTIMIZERS = [momentum, SGD, ADAMW, decaying]
SOME = [(rule, "threads", OPTIMIZERS[i % 4]) for i, rule in enumerate(RULES)]
SOME += [(rule, "processes", ADAMW) for rule in RULES if rule[0] in ("pipedream", "pipedream_2bw")]
EVERY = [
    *((rule, "threads", optimizer) for rule in RULES for optimizer in OPTIMIZERS),
    *((rule, "processes", ADAMW) for rule in RULES),
]


@pytest.mark.parametrize(
    ("rule", "backend", "optimizer"), [*SOME, *thorough(*(of for of in EVERY if of not in SOME))]
)
def test_stopped_and_resumed_is_not_stopped(rule, backend, optimizer, tmp_path):
    schedule = make(rule[0], 3, 3, batches=5, reads=rule[1])
    given = schedule, dropping(), batches(5, 9), F.mse_loss, optimizer
    whole = passing(*given, seed=5)
    a = passing(*given, save=tmp_path / "a", stop=1, seed=5, backend=backend)
    b = passing(*given, save=tmp_path / "b", stop=3, resume=tmp_path / "a", backend=backend)
    c = passing(*given, resume=tmp_path / "b", backend=backend)
    assert a.losses + b.losses + c.losses == whole.losses
    assert same(c, whole)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"]  # no drafts
    assert len(list((tmp_path / "a").glob("*.pt"))) == 3


@pytest.mark.parametrize("first", [True, False])
def test_a_save_that_fails_on_any_rank_leaves_no_draft(first, tmp_path):
    def save():
        with draft_of(tmp_path / "new" / "step", first) as draft:
            (draft / "stage_000.pt").touch()
            raise OSError("full")

    with pytest.raises(OSError, match="full"):
        save()
    assert [*tmp_path.iterdir()] == []


def test_a_folder_that_another_process_writes_meanwhile_is_not_replaced(tmp_path):
    """Each has a draft of its own, and a folder with the former name of one is nobody's draft."""
    (tmp_path / ".step.draft").mkdir()
    (tmp_path / ".step.draft" / "mine").write_text("x")

    def save(content, meanwhile=lambda: None):
        with draft_of(tmp_path / "step") as draft:
            (draft / "stage_000.pt").write_text(content)
            meanwhile()

    with pytest.raises(OSError, match="/step could not be written: Directory not empty"):
        save("second", lambda: save("first"))
    assert (tmp_path / "step" / "stage_000.pt").read_text() == "first"
    assert (tmp_path / ".step.draft" / "mine").read_text() == "x"
    assert len([*tmp_path.iterdir()]) == 2


def test_an_asynchronous_checkpoint_holds_every_version_that_is_still_read(tmp_path):
    run_of(make("pipedream", 3, 3, batches=4), data=batches(4, 9), save=tmp_path / "c", stop=2)
    versions = []
    for s in range(3):
        saved = torch.load(tmp_path / "c" / f"stage_{s:03}.pt", weights_only=True)
        versions.append(sorted(saved["weights"]))
    assert versions == [[4, 5, 6], [5, 6], [6]]


def test_a_checkpoint_of_other_stages_that_are_not_cut_of_layers_is_refused(tmp_path):
    torch.manual_seed(0)
    layers = [layer.double() for layer in mlp(layers=8, width=6)]

    def on(balance, **options):
        schedule = make("pipedream_flush", len(balance), 4, batches=4)
        return run_of(schedule, [*map(Whole, split(layers, balance))], optimizer=ADAMW, **options)

    on([4, 4], save=tmp_path / "c", stop=2)
    with pytest.raises(ValueError, match="has 2 stages, but the model has 3 stages: give the"):
        on([2, 3, 3], resume=tmp_path / "c")
    with pytest.raises(ValueError, match=r"of stage \d is .*, but missing in .*: give the same"):
        on([5, 3], resume=tmp_path / "c")


class Whole(nn.Module):
    """A stage whose layers are its own matter."""

    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, x):
        return self.layers(x)


@pytest.mark.parametrize("name", ["gpipe", "inter_layer"])
def test_a_flush_goes_on_by_another_schedule(name, tmp_path):
    def on(name, **options):
        return passing(make(name, 2, 4, batches=4), optimizer=ADAMW, **options)

    whole = on("pipedream_flush")
    on("pipedream_flush", save=tmp_path / "c", stop=2)
    rest = on(name, resume=tmp_path / "c")
    assert rest.losses == pytest.approx(whole.losses[2:], rel=1e-12)


def test_checkpoints_that_do_not_fit(tmp_path):
    table = make("pipedream", 2, 2, batches=2)
    run_of(table, save=tmp_path / "c", stop=1)
    (tmp_path / "file").touch()

    def refused(told, table=table, modules=None, resume="c", **options):
        resumes = {} if "save" in options else {"resume": tmp_path / resume}
        with pytest.raises(ValueError, match=told):
            run_of(table, modules, **resumes, **options)

    narrow = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 6)).double()
    other = r"0.weight of stage 0 is float64 \(5, 6\) in the model, but float64 \(6, 6\) in"
    refused("missing does not hold a checkpoint", resume="missing")
    refused("different table than pipedream", make("pipedream", 4, 2, batches=2))
    refused(other, modules=[narrow, *stages(1)])
    refused("there is nothing left to do", make("pipedream", 2, 2))
    refused("stop=3: give a batch after 0, at most 2", save=tmp_path / "d", stop=3)
    refused("is not an empty folder", save=tmp_path / "c")
    assert json.loads((tmp_path / "c" / "checkpoint.json").read_text())["batch"] == 1
    refused("file' exists and is not an empty folder: name a new one", save=tmp_path / "file")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "file"]


def test_a_run_that_fails_leaves_no_checkpoint_behind(tmp_path):
    with pytest.raises(RunError):
        run_of(make("gpipe", 2, 2), [*stages(1), Failing(0, explode)], save=tmp_path / "c")
    assert list(tmp_path.iterdir()) == []


# ---- counts that the loss's type cannot hold


@pytest.mark.parametrize(
    ("dtype", "samples"), [(torch.float16, 70_000), (torch.bfloat16, 257), (torch.float32, 300)]
)
@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_gradient_is_weighed_by_its_count_in_any_precision(dtype, samples, microbatches):
    # Was: in float16, where 70,000 is inf, nan in the second batch; in bfloat16 a gradient for 256
    # samples, divided by 257.
    data = batches(2, samples * microbatches, dtype=dtype)
    modules = stages(2, dtype=dtype)
    result = run_of(make("pipedream_flush", 2, microbatches, batches=2), modules, data, check=False)
    model = nn.Sequential(*copy.deepcopy(nn.ModuleList(modules)))
    step = SGD(model.parameters())
    for x, y in data:
        for xs, ys in zip(x.chunk(microbatches), y.chunk(microbatches), strict=True):
            F.mse_loss(model(xs), ys).backward()
        for p in model.parameters():
            p.grad /= microbatches
        step.step()
        step.zero_grad()
    eps = 0.0 if dtype is torch.bfloat16 else torch.finfo(dtype).eps  # 257 / 256 is 1 there
    for of_stage, part in zip(result.weights, model, strict=True):
        for name, weight in part.state_dict().items():
            assert torch.allclose(of_stage[name], weight, rtol=4 * eps, atol=eps)


def test_weights_of_counts_agree_between_replicas_of_uneven_batches():
    # Four samples for one replica's micro-batch and three for the other's are other powers of two.
    passing(make("gpipe", 2, 1), data=batches(1, 7), replicas=2)
