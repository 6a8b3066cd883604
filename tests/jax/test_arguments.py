"""The same on JAX stages: data of every kind, and arguments that do not fit."""

import gc
import weakref
from types import SimpleNamespace

import tests.jax_setup  # isort: skip  # noqa: F401
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from flax import linen, nnx

from pipelab import RunError, evaluate, make, run
from pipelab.jax.device import _in_turn as in_turn
from pipelab.jax.device import jax_meshes
from pipelab.jax.stage import JaxStage
from tests.conftest import Wrapping, thorough


def layer(p, x):
    return jnp.tanh(x @ p["w"])


def scaled(p, given):
    return layer(p, given["x"]) * given["scale"]


def mse(y, target):
    return ((y - target) ** 2).mean()


def stages(*functions):
    random = np.random.default_rng(0)
    weights = [random.normal(size=(6, 6)).astype(np.float32) for _ in functions]
    return [(f, {"w": jnp.asarray(w)}) for f, w in zip(functions, weights, strict=True)]


def batches(count):
    random = np.random.default_rng(1)
    numbers = random.normal(size=(count, 2, 8, 6)).astype(np.float32)
    return [(x, y) for x, y in numbers]


def refuse_to_train(*rest):
    raise AssertionError("an optimizer was used")


REFUSING = optax.GradientTransformation(refuse_to_train, refuse_to_train)
REFUSING_TO_STEP = optax.GradientTransformation(lambda p: (), refuse_to_train)


def call(way, data, schedule=None, modules=None, optimizer=None, **options):
    """Run or evaluate on JAX."""
    arguments = (
        schedule or make("gpipe", 2, 2, batches=len(data)),
        modules or stages(layer, layer),
        data,
        mse,
    )
    if way == "evaluate":
        return evaluate(*arguments, backend="jax", **options)
    return run(*arguments, optimizer or optax.sgd(0.1), backend="jax", **options)


@pytest.mark.parametrize("name", ["pipedream", *thorough("gpipe")])
def test_a_batch_may_begin_with_a_number(name):
    # Was: trained, and then "object of type 'numpy.float32' has no len()" in the check, which took
    # the number for data.
    data = [({"scale": np.float32(2), "x": x}, y) for x, y in batches(2)]
    schedule = make(name, 2, 2, batches=2)
    assert call("run", data, schedule, stages(scaled, layer)).check.passed


@pytest.mark.parametrize("way", ["run", "evaluate"])
def test_a_data_set_is_read_up_to_its_length(way):
    # Was: the check iterated, which ends at an IndexError alone: it hung.
    data = Wrapping(batches(2))
    assert call(way, data).check.passed
    assert set(data.asked) == {0, 1}


@pytest.mark.parametrize("way", ["run", "evaluate"])
@pytest.mark.parametrize("count", [1, 3])
def test_a_batch_that_is_no_pair_is_refused(count, way):
    # Was: "too many values to unpack (expected 2)".
    first, (x, y) = batches(2)
    with pytest.raises(ValueError, match=r"batch 1 .*\(input, target\)"):
        call(way, [first, (x, y, y)[:count]])


@pytest.mark.parametrize("clip", [0, -1.0, float("nan")])
def test_a_clip_that_is_no_length_is_refused(clip):
    # Was: 0: ZeroDivisionError in an update; -1 and nan: trained on that, and the check passed.
    with pytest.raises(ValueError, match=f"clip={clip!r}"):
        call("run", batches(1), optimizer=REFUSING, clip=clip)


@pytest.mark.parametrize("way", ["run", "evaluate", "failing"])
def test_stages_end_with_their_run(way, monkeypatch):
    # Was: every stage, with its weights and data, was kept until the next garbage collection.
    made, init = [], JaxStage.__init__

    def watched(self, *arguments, **ends):
        init(self, *arguments, **ends)
        made.append(weakref.ref(self))

    monkeypatch.setattr(JaxStage, "__init__", watched)
    data = batches(1)
    gc.collect()
    gc.disable()
    try:
        if way == "failing":
            with pytest.raises(RunError, match="is nan"):
                call("run", [(np.nan * x, y) for x, y in data])
        else:
            call(way, data, check=False)
        assert [stage() for stage in made] == [None, None]
    finally:
        gc.enable()


def test_stages_that_share_an_array_are_refused():
    # Was: each trained a copy of its own, so that they were tied no more, and the check passed.
    (_, first), (_, second) = stages(layer, layer)
    tied = [(layer, first), (layer, {"w": first["w"]})]
    message = (
        r"stage 1, parameters\['w'\]: shared with stage 0, but jax does not support tied weights"
    )
    with pytest.raises(ValueError, match=message):
        call("run", batches(1), modules=tied, optimizer=REFUSING)
    assert call("evaluate", batches(1), modules=tied).check.passed
    assert call("run", batches(1), modules=[(layer, first), (layer, second)]).check.passed


@pytest.mark.parametrize("wrong", [optax.sgd, 0.1])
def test_what_is_no_optimizer_is_refused(wrong):
    with pytest.raises(ValueError, match=r"optimizer is a .*: give an optax transformation"):
        call("run", batches(1), modules=stages(layer, layer), optimizer=wrong)


def clipped(optimizer):
    return optax.chain(optax.clip_by_global_norm(1.0), optimizer)


def by_shape(of_matrices, of_others):
    """One optimizer for matrices, another one for the rest."""

    def kinds(parameters):
        return jax.tree.map(lambda w: "matrix" if w.ndim > 1 else "other", parameters)

    return optax.multi_transform({"matrix": of_matrices, "other": of_others}, kinds)


def squares(parameters):
    return sum(jnp.vdot(w, w) for w in jax.tree.leaves(parameters))


SCALED = optax.GradientTransformation(
    squares, lambda g, first, _: (jax.tree.map(lambda g: g / first, g), first)
)


@pytest.mark.parametrize(
    "optimizer",
    [
        clipped(optax.adam(0.1)),
        optax.MultiSteps(clipped(optax.adam(0.1)), 100),
        optax.inject_hyperparams(lambda rate: clipped(optax.sgd(rate)))(0.1),
        by_shape(clipped(optax.sgd(0.1)), optax.sgd(0.1)),
        optax.apply_if_finite(optax.sgd(0.1), 3),
        optax.contrib.prodigy(),
        SCALED,
    ],
    ids=["clip", "multi", "inject", "masked", "finite", "prodigy", "at first"],
)
def test_an_optimizer_that_looks_at_all_parameters_is_refused(optimizer):
    # Was: trained, each stage by its own norm: only a check that ran into the clip told.
    data = Wrapping(batches(1))
    with pytest.raises(ValueError, match=r"stage's step depend on other stages.*finite.* clip="):
        call("run", data, optimizer=optimizer)
    assert not data.asked


def test_an_optimizer_made_for_the_parameters_of_one_stage_trains():
    (f, first), (g, second) = stages(layer, layer)
    modules = [(f, first | {"b": first["w"] + 1}), (g, second | {"b": second["w"] + 1})]
    alone = optax.masked(optax.adam(0.1), {"w": True, "b": True})
    assert call("run", batches(1), modules=modules, optimizer=alone, check=False).losses


def test_an_optimizer_that_draws_random_numbers_is_refused():
    # Was: all stages drew the same, and the check failed.
    optimizer = optax.noisy_sgd(0.1, key=0)
    with pytest.raises(ValueError, match="the optimizer draws random numbers"):
        call("run", batches(1), optimizer=optimizer)
    assert call("run", batches(1), make("gpipe", 1, 2), stages(layer), optimizer).check.passed


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.MultiSteps(optax.lamb(0.1), 2),
        by_shape(optax.adafactor(0.1), clipped(optax.sgd(0.1))),  # one stage has all others
        optax.chain(optax.clip_by_block_rms(0.1), optax.contrib.schedule_free_sgd(0.1)),
    ],
    ids=["multi", "masked", "block"],
)
def test_an_optimizer_that_looks_at_each_tensor_alone_trains(optimizer):
    data = batches(3)
    assert call("run", data, modules=[*stages(layer), Kernel()], optimizer=optimizer).check.passed


@pytest.mark.parametrize(
    ("devices", "of_rows"),
    [
        (lambda all: all, [0, 1]),  # Was: 8 devices for 2 rows: name one per row.
        (lambda all: all, [*range(8)]),
        (lambda all: "cpu", [0, 1]),
        (lambda all: all[3:4], [3, 3]),
        (lambda all: ["cpu:1", all[0]], [1, 0]),
    ],
)
def test_devices_themselves_are_taken_in_turn(devices, of_rows):
    meshes = jax_meshes(devices(jax.devices()), len(of_rows))
    assert [device.id for mesh in meshes for device in mesh.devices.flat] == of_rows


def test_neighbouring_rows_are_one_processs():
    pool = [SimpleNamespace(process_index=q, id=2 * q + i) for q in range(3) for i in range(2)]
    assert [device.id for device in in_turn(pool, 4)] == [0, 1, 2, 4]


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (np.ones(6, int), "int64"),
        (jnp.ones(6, bool), "bool"),
        (3, "int"),
        ("words", "str"),
        (0.5, "float"),
    ],
)
def test_parameters_that_cannot_be_trained_are_refused(value, kind):
    # Was: an error of jax's own in an action, about float0.
    (f, first), (g, second) = stages(layer, layer)
    modules = [(f, first), (g, second | {"count": value})]
    message = rf"stage 1, parameters\['count'\]: type .*{kind}.*only floating-point arrays"
    with pytest.raises(ValueError, match=message):
        call("run", batches(1), modules=modules, optimizer=REFUSING)


class Kernel(nnx.Module):
    """A layer with what an nnx module may hold beside its parameters."""

    def __init__(self, *, dropout=False, norm=False):
        rngs = nnx.Rngs(0)
        self.inner = nnx.Linear(6, 6, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs) if dropout else lambda x: x
        self.norm = nnx.BatchNorm(6, rngs=rngs) if norm else lambda x: x

    def __call__(self, x):
        return self.norm(self.dropout(self.inner(x)))


DENSE = linen.Dense(6)


@pytest.mark.parametrize(
    ("stage", "found"),
    [
        (Kernel, "ModuleMeta"),
        (DENSE, "Dense"),
        ((DENSE,), "tuple"),
        (({}, layer), "tuple"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_no_stage_is_named(stage, found):
    # Was: whatever broke first when an action called it.
    (first,) = stages(layer)
    with pytest.raises(ValueError, match=f"stage 1 is a {found}: give an nnx module, or a pair"):
        call("run", batches(1), modules=[first, stage], optimizer=REFUSING)


@pytest.mark.parametrize("kind", ["dropout", "norm"])
def test_an_nnx_module_may_have_state_that_stays(kind):
    # Was: refused although .eval() had been called, as the message advised.
    modules = [Kernel(**{kind: True}), Kernel()]
    with pytest.raises(RunError, match=r"stage 0, an nnx module, changes its state .*\.eval\(\)"):
        call("run", batches(1), modules=modules, optimizer=REFUSING_TO_STEP)
    modules[0].eval()
    assert call("run", batches(1), modules=modules).check.passed


@pytest.mark.parametrize(
    "wrong", [lambda y, t: (y - t) ** 2, lambda y, t: jnp.sum(y > t)], ids=["unreduced", "counted"]
)
def test_a_loss_that_is_no_mean_is_refused(wrong):
    # Was: an error about arrays of size 1, or about float0.
    arguments = (make("gpipe", 2, 2), stages(layer, layer), batches(1), wrong)
    with pytest.raises(RunError, match=r"1F0: ValueError: the loss is .*: give the mean over"):
        run(*arguments, REFUSING_TO_STEP, backend="jax")


class Linen(linen.Module):
    kind: str

    @linen.compact
    def __call__(self, x):
        x = linen.Dense(6)(x)
        if self.kind == "norm":
            return linen.BatchNorm(use_running_average=False)(x)
        if self.kind == "count":
            number = self.variable("counts", "number", lambda: jnp.zeros(()))
            number.value += 1
        if self.kind == "noise":
            x += jax.random.normal(self.make_rng("noise"), x.shape)
        return linen.Dropout(0.5, deterministic=self.kind != "dropout")(x)


@pytest.mark.parametrize(
    ("kind", "match"),
    [
        ("dropout", 'draws random numbers: .* pass a seed.* needs PRNG for "dropout"'),
        ("noise", 'draws random numbers: .* pass a seed.* needs PRNG for "noise"'),
        ("norm", 'changes variables .*: use LayerNorm .*running averages.*"batch_stats"'),
        ("count", 'changes variables .*"counts"'),
        (
            "parameters alone",
            'lacks variables: give everything that module.init returns.*"batch_stats"',
        ),
    ],
)
def test_a_linen_module_that_does_not_fit_is_named(kind, match):
    # Was: an error of flax's own, without the stage and the remedy.
    alone = make("gpipe", 1, 2)
    module = Linen("norm" if kind == "parameters alone" else kind)
    keys = dict.fromkeys(["params", "dropout", "noise"], jax.random.key(0))
    variables = module.init(keys, jnp.ones((2, 6)))
    if kind == "parameters alone":
        variables = variables["params"]
    with pytest.raises(RunError, match=f"(?s)stage 0, a linen module, {match}"):
        call("run", batches(1), alone, [(module, variables)], REFUSING_TO_STEP)
    if kind == "noise":  # whatever the name of what it draws from
        assert call("run", batches(1), alone, [(module, variables)], seed=0).check.passed
