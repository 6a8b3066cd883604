"""A Trainer: what `run` does, batch after batch, from whatever gives them, and for any time."""

import gc
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from pipelab import Reads, RunError, Trainer, make
from tests.conftest import thorough
from tests.support import (
    ADAM,
    ENVIRONMENT,
    GUARD,
    PYTHON,
    SGD,
    WORKERS,
    Failing,
    Layer,
    batches,
    explode,
    passing,
    plainly,
    run_of,
    same,
    stages,
    torchrun,
)

BACKENDS = ["threads", "processes"]
SCHEDULES = {
    "1f1b": (("pipedream_flush", 3, 4), {}),
    "interleaved": (("interleaved", 2, 4), {"virtual": 2}),
    "pipedream": (("pipedream", 3, 2), {}),
    "one micro-batch": (("pipedream", 3, 1), {}),
    "vertical": (("pipedream", 3, 2), {"reads": Reads.FIRST}),
    "2bw": (("pipedream_2bw", 3, 3), {}),
}


def table(name, count=1):
    sizes, options = SCHEDULES[name]
    return make(*sizes, batches=count, **options)


def training(name="1f1b", modules=None, loss=F.mse_loss, **options):
    """A Trainer by one of these, on small stages where a test gives none."""
    one = table(name)
    return Trainer(one, modules or stages(one.stages), loss, ADAM, **options)


def in_one_run(name, data, modules=None, **options):
    """What the training has to be: the same batches by one long table, unchecked."""
    return run_of(table(name, len(data)), modules, data, optimizer=ADAM, check=False, **options)


def dropping(count, rate=0.2):
    return [nn.Sequential(stage, nn.Dropout(rate)) for stage in stages(count)]


@pytest.mark.parametrize("name", SCHEDULES)
def test_batch_by_batch_is_the_long_table_to_the_last_bit(name):
    """Also where the pipeline is emptied meanwhile: for the check, to evaluate, to see weights."""
    data, modules = batches(7), dropping(table(name).stages)
    whole = in_one_run(name, data, modules, seed=3)
    with training(name, modules, check=3, seed=3) as trainer:
        found = list(trainer.fit(data[:2]))
        found += list(trainer.fit(iter(data[2:6])))
        held_out = trainer.evaluate(data[:1])
        middle = trainer.weights
        found += list(trainer.fit(data[6:]))
        assert same(trainer, whole)
    assert [batch.loss for batch in found] == whole.losses
    assert [batch.number for batch in found] == [*range(1, 8)]
    assert [batch.number for batch in found if batch.check] == [1, 4, 7]
    assert all(batch.check.passed and batch.check.seconds > 0 for batch in found if batch.check)
    for stage, weights in zip(modules, middle, strict=True):
        stage.load_state_dict(weights)
        stage.eval()
    with torch.no_grad():
        x = data[0][0]
        for stage in modules:
            x = stage(x)
    assert held_out == [pytest.approx(float(F.mse_loss(x, data[0][1])), rel=1e-12)]


def test_a_checked_batch_leaves_the_weights_that_later_ones_read():
    # Was: those that the second batch after it reads were gone: KeyError.
    whole = run_of(make("pipedream", 4, 2, batches=8), optimizer=ADAM, check=False)
    with Trainer(make("pipedream", 4, 2), stages(4), F.mse_loss, ADAM, check=2) as trainer:
        found = list(trainer.fit(batches(8)))
        assert same(trainer, whole)
    assert [batch.loss for batch in found] == whole.losses
    assert all(batch.check.passed for batch in found if batch.check)


@pytest.mark.parametrize("name", ["1f1b", *thorough("pipedream")])
def test_processes_stay_up(name):
    data = batches(5)
    whole = in_one_run(name, data)
    with training(name, backend="processes", check=3) as trainer:
        losses = [batch.loss for batch in trainer.fit(data[:4])]
        ranks = children()
        trainer.evaluate(data[:2])
        losses += [batch.loss for batch in trainer.fit(data[4:])]
        assert same(trainer, whole)
        assert children() == ranks
    assert losses == whole.losses
    assert not children()


def children():
    """Processes of the ranks."""
    return {process.pid for process in multiprocessing.active_children()}


def test_replicas_and_clipping_over_stages():
    data, options = batches(4, samples=16), {"replicas": 2, "clip": 0.1}
    whole = in_one_run("1f1b", data, **options)
    with training(**options, check=False) as trainer:
        assert [batch.loss for batch in trainer.fit(data)] == whole.losses
        assert same(trainer, whole)


# ---- data


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_loader_with_workers_shuffling_and_an_uneven_last_batch(backend):
    torch.manual_seed(1)
    data = TensorDataset(*torch.randn(2, 30, 6, dtype=torch.float64))
    loader = partial(DataLoader, data, batch_size=8, shuffle=True)  # 8, 8, 8, 6
    epochs = []
    for epoch in range(2):
        order = torch.Generator().manual_seed(epoch)
        epochs += list(loader(generator=order))
    whole = in_one_run("1f1b", epochs)
    with training(backend=backend) as trainer:
        losses = []
        for epoch in range(2):
            order = torch.Generator().manual_seed(epoch)
            losses += [b.loss for b in trainer.fit(loader(generator=order, num_workers=2))]
        assert same(trainer, whole)
    assert losses == whole.losses


@pytest.mark.parametrize("name", ["1f1b", "pipedream"])
def test_a_batch_is_read_when_the_loop_goes_on(name):
    read = []

    def endless():
        for x in iter(lambda: batches(1)[0], None):
            read.append(x)
            yield x

    with training(name) as trainer:
        source = endless()
        assert [len(read) for _ in trainer.fit(source, steps=4)] == [1, 2, 3, 4]
        for batch in trainer.fit(source):
            assert trainer.number == batch.number == len(read)
            if batch.number == 6:
                break
        assert [batch.number for batch in trainer.fit(source, steps=1)] == [7]
        assert list(trainer.fit([])) == []
        assert trainer.number == len(read) == 7


@pytest.mark.parametrize(
    ("name", "options", "looks"),
    [
        *((name, {"check": 3}, True) for name in SCHEDULES),
        *((name, {"check": False}, False) for name in SCHEDULES),
        ("pipedream", {"check": False, "backend": "processes"}, True),
        *thorough(("pipedream", {"check": False, "backend": "processes"}, False)),
    ],
)
def test_at_a_step_all_is_after_its_batch(name, options, looks, tmp_path):
    # Was: of two batches more, and `number` came twice.
    data, modules = batches(6), dropping(table(name).stages)
    whole = in_one_run(name, data, modules, seed=3)
    until = {count: in_one_run(name, data[:count], modules, seed=3) for count in (2, 5)}
    each = len(whole.norms) // 6
    norms = whole.norms[each - 1 :: each]  # of last updates
    with training(name, modules, seed=3, **options) as trainer:
        steps = []
        for step in trainer.fit(data):
            steps.append(step)
            assert step.number == trainer.number == len(steps)
            if looks:
                assert step.loss == whole.losses[step.number - 1]
                assert step.norm == pytest.approx(norms[step.number - 1])
            if step.number in until:
                trainer.save(tmp_path / str(step.number))
                held_out = trainer.evaluate(data[:1])
                assert same(trainer, until[step.number])
        assert all(step.known for step in steps)
    assert [step.loss for step in steps] == whole.losses
    with training(name, modules, **options | {"check": 1, "resume": tmp_path / "5"}) as trainer:
        assert trainer.number == 5
        assert trainer.evaluate(data[:1]) == held_out
        (last,) = trainer.fit(data[5:])
        assert last.number == 6 and last.check.passed and last.loss == whole.losses[5]
        assert same(trainer, whole)


def test_a_fit_inside_a_fit_and_two_loaders_by_turns():
    data = batches(6)
    with training(check=False) as trainer:
        steps = []
        for step in trainer.fit(data[:2]):
            steps += [step, *trainer.fit([data[2 * step.number]])]  # after 0 comes 2
            break
        one, other = trainer.fit(iter(data[1:2])), trainer.fit(data[3:])
        steps += [next(one), next(other), *one, *other]
        assert [step.number for step in steps] == [1, 2, 3, 4, 5, 6]
        assert same(trainer, in_one_run("1f1b", [data[i] for i in (0, 2, 1, 3, 4, 5)]))
        assert not same(trainer, in_one_run("1f1b", data))


def test_a_loaders_error_or_a_bad_batch_loses_nothing():
    def failing():
        yield from batches(3)
        raise OSError("no more disk")

    with training(check=False) as trainer:
        with pytest.raises(OSError, match="no more disk"):
            list(trainer.fit(failing()))
        x, y = batches(1)[0]
        with pytest.raises(ValueError, match=r"batch 3: its tensors have \[2, 8\] samples"):
            list(trainer.fit([(x[:2], y)]))
        rest = list(trainer.fit(batches(1)))
        assert [batch.number for batch in rest] == [4]


@pytest.mark.parametrize("name", ["1f1b", "pipedream"])
def test_a_loader_that_reuses_its_memory(name):
    """The next batch is read while one is under way."""
    data = batches(12)
    whole = in_one_run(name, data)
    memory = tuple(map(torch.empty_like, data[0]))

    def reusing():
        for batch in data:
            for mine, new in zip(memory, batch, strict=True):
                mine.copy_(new)
            yield memory

    with training(name, check=False) as trainer:
        assert [batch.loss for batch in trainer.fit(reusing())] == whole.losses
        assert same(trainer, whole)


def test_a_first_batch_that_is_none():
    with training() as trainer:
        with pytest.raises(ValueError, match=r"batch 0 is not a pair: give \(input, target\)"):
            list(trainer.fit([None]))
        assert len(list(trainer.fit(batches(1)))) == 1


# ---- batches with fewer samples than micro-batches


def cut_to(sizes):
    pairs = zip(batches(len(sizes), max(sizes)), sizes, strict=True)
    return [(x[:size], y[:size]) for (x, y), size in pairs]


@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        (make("interleaved", 2, 4, virtual=2), {"check": False}),
        (make("pipedream_flush", 2, 4), {"check": 2, "clip": 1e3}),
        (make("zb_h1", 3, 4), {"check": 1}),
        (make("gpipe", 2, 2), {"check": 2, "replicas": 2}),
        (make("gpipe", 2, 4), {"check": 2, "backend": "processes"}),
    ],
    ids=["interleaved", "1f1b", "zb_h1", "replicas", "processes"],
)
def test_a_short_batch_is_trained_on_as_by_a_plain_loop(schedule, options):
    # Was: "batch 1 has 3 samples for 4 micro-batches", and the training had to go on without it.
    modules, data = stages(schedule.stages), cut_to([8, 3, 2, 8, 3])
    model, losses = plainly(modules, data, optimizer=ADAM)
    with Trainer(schedule, modules, F.mse_loss, ADAM, **options) as trainer:
        found = list(trainer.fit(data))
        evaluated = trainer.evaluate(data[-2:])
        trained = trainer.weights
    assert [batch.number for batch in found] == [1, 2, 3, 4, 5]
    assert [batch.loss for batch in found] == pytest.approx(losses, rel=1e-12)
    assert all(batch.check.passed for batch in found if batch.check)
    for stage, of_stage in zip(model, trained, strict=True):
        torch.testing.assert_close(of_stage, dict(stage.state_dict()), rtol=1e-9, atol=1e-12)
        stage.load_state_dict(of_stage)
    expected = [F.mse_loss(model(x), y).item() for x, y in data[-2:]]
    assert evaluated == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", ["1f1b", "2bw"])
def test_a_short_batch_draws_its_own_numbers_and_can_be_gone_on_from(name, tmp_path):
    data, given = cut_to([8, 2, 8, 1, 8]), (name, dropping(3))
    with training(*given, seed=3, check=1) as whole:
        found = list(whole.fit(data))
        assert all(batch.check.passed for batch in found)
        with training(*given, seed=3, check=False) as trainer:
            first = list(trainer.fit(data[:2]))
            trainer.save(tmp_path / "two")
        with training(*given, resume=tmp_path / "two", check=False) as trainer:
            rest = list(trainer.fit(data[2:]))
            assert same(trainer, whole)
    assert [batch.loss for batch in first + rest] == [batch.loss for batch in found]


def test_a_short_batch_that_no_update_fits_is_left_out_visibly():
    sizes = [8, 1, 8]
    with training("pipedream") as trainer:
        with pytest.warns(UserWarning, match="batch 1 is skipped: .* pipedream updates wi"):
            found = list(trainer.fit(cut_to(sizes)))
        assert [batch.number for batch in found] == [1, 2]
        assert len(trainer.evaluate(cut_to(sizes))) == 3
    with training(replicas=2) as trainer:
        with pytest.warns(UserWarning, match="batch 1 is skipped: .* fewer samples than replicas"):
            assert len(list(trainer.fit(cut_to(sizes)))) == 2
        ((x, y),) = cut_to([1])
        twice = torch.cat([x, x]), torch.cat([y, y])
        assert trainer.evaluate([(x, y)]) == pytest.approx(trainer.evaluate([twice]), rel=1e-12)
        with pytest.raises(ValueError, match="has 0 samples for 2 micro-batches: give at least"):
            trainer.evaluate([(x[:0], y[:0])])


# ---- what the caller is in


def test_autocast_around_a_call_alone_is_refused_before_it():
    # Was: ignored, without a word.
    modules = stages(3, dtype=torch.float32)
    data = batches(2, dtype=torch.float32)
    mixed = partial(torch.autocast, "cpu", torch.bfloat16)
    with training(modules=modules) as trainer:
        for call in (lambda: list(trainer.fit(data)), lambda: trainer.evaluate(data)):
            with mixed(), pytest.raises(ValueError, match=r"in a torch.autocast of torch.bfloat16"):
                call()
        assert len(list(trainer.fit(data))) == 2
        for _ in trainer.fit(data):
            with mixed():  # of the caller's own
                pass
    with mixed():
        trainer = training(modules=modules)
    with trainer, mixed():
        assert all(batch.check is None or batch.check.passed for batch in trainer.fit(data))


def test_samples_coupled_on_purpose_are_judged_by_micro_batches():
    def balanced(y, target):
        return F.mse_loss(y, target) + y.softmax(-1).mean(0).square().sum()

    with training(loss=balanced, check=2, reference="microbatches") as trainer:
        found = list(trainer.fit(batches(3)))
    assert [bool(batch.check and batch.check.passed) for batch in found] == [True, False, True]


# ---- checkpoints


def test_checkpoints_of_run(tmp_path):
    """A flush makes all alike; without one a run has to be stopped before its table's end."""
    data = batches(6)
    for name in ("1f1b", "pipedream"):
        in_one_run(name, data, save=tmp_path / name, stop=3)
        whole = in_one_run(name, data, save=tmp_path / f"{name} end")
        with training(name, resume=tmp_path / name) as trainer:
            list(trainer.fit(data[3:]))
            assert same(trainer, whole)
    training("1f1b", resume=tmp_path / "1f1b end")
    with pytest.raises(ValueError, match="without the older weights that come next"):
        training("pipedream", resume=tmp_path / "pipedream end")
    with pytest.raises(ValueError, match="was made with a different table than pipedream"):
        training("vertical", resume=tmp_path / "pipedream")
    with training() as trainer:
        list(trainer.fit(data[:3]))
        trainer.save(tmp_path / "trainer")
        with pytest.raises(ValueError, match="is not an empty folder"):
            trainer.save(tmp_path / "trainer")
    passing(table("1f1b", 6), optimizer=ADAM, resume=tmp_path / "trainer")


# ---- the check


class Rotting(Layer):
    """Its gradients are right for so many forwards with a graph, and then too large."""

    def __init__(self, good):
        super().__init__()
        self.good = good

    def forward(self, x):
        y = super().forward(x)
        if threading.current_thread() is not threading.main_thread() and y.requires_grad:
            self.good -= 1
            if self.good < 0:
                y.register_hook(lambda gradient: gradient * 1.001)
        return y


def test_a_stage_that_begins_to_fail_is_seen_by_the_next_check():
    modules = [*stages(2), Rotting(good=4 * 3)]  # three batches
    told = r"batch 4: CHECK FAILED: .* in update 4 "
    with training(modules=modules, check=2) as trainer, pytest.warns(UserWarning, match=told):
        found = list(trainer.fit(batches(5)))
    checks = [batch.check for batch in found]
    assert [check and check.passed for check in checks] == [True, None, True, None, False]


def test_later_checks_are_of_the_modules_as_ranks_have_copied_them():
    # Was: of what the caller has made of them meanwhile, such as for an evaluation of its own.
    modules = dropping(3)
    modules[1][0].requires_grad_(False)
    with training(modules=modules, check=1, seed=1) as trainer:
        for step in trainer.fit(batches(2)):
            assert step.check.passed, step.check
            for stage, weights in zip(modules, trainer.weights, strict=True):
                stage.load_state_dict(weights)
                stage.eval().requires_grad_()
            modules[2][1] = nn.Identity()


class Hooked(nn.Linear):
    """Notes whether hooks see what autograd saves; in a worker, not in the check."""

    def forward(self, x):
        if threading.current_thread() is not threading.main_thread():
            HOOKED.append(torch._C._autograd._top_saved_tensors_default_hooks(False) is not None)
        return super().forward(x)


HOOKED = []


@pytest.mark.parametrize(("name", "unchecked"), [("gpipe", False), ("zb_h1", True)])
def test_memory_is_counted_only_where_somebody_reads_it(name, unchecked):
    """For the report of a checked batch, or where W takes a part of what forwards keep."""
    HOOKED.clear()
    with Trainer(make(name, 1, 2), [Hooked(6, 6)], F.mse_loss, SGD, check=2) as trainer:
        steps = list(trainer.fit([(torch.randn(4, 6), torch.randn(4, 6)) for _ in range(3)]))
        assert [bool(step.check) for step in steps] == [True, False, True]
    assert HOOKED == [True, True, unchecked, unchecked, True, True]


@pytest.mark.parametrize("check", ["last", -1, 0, 1.5, None])
def test_a_check_that_makes_no_sense(check):
    with pytest.raises(ValueError, match=f"check={check!r}: give 'first'"):
        training(check=check)


@pytest.mark.parametrize("steps", [2.5, -1, "3"])
def test_steps_that_make_no_sense(steps):
    with training() as trainer:
        with pytest.raises(ValueError, match=f"steps={steps!r}: give a whole number"):
            next(trainer.fit(batches(3), steps))
        assert [*trainer.fit(batches(3), 0)] == []


# ---- failures


def test_outside_of_its_block_it_has_no_ranks():
    trainer = training()
    for _ in range(2):
        with pytest.raises(ValueError, match="works only inside `with Trainer"):
            list(trainer.fit(batches(1)))
        with trainer, pytest.raises(ValueError, match="has not begun: fit a batch first"):
            trainer.save("nowhere")
    with trainer:
        list(trainer.fit(batches(1)))
    with trainer, pytest.raises(RunError, match="has ended: its ranks were told to leave"):
        list(trainer.fit(batches(1)))


def bad(action):
    """A stage that does something in its third batch's first forward."""
    return Failing(8, action)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_stage_that_raises_ends_the_training(backend):
    modules = [*stages(2), bad(explode)]
    known = threading.active_count()
    with training(modules=modules, backend=backend, check=False) as trainer:
        with pytest.raises(RunError, match=r"device 2, action 2F8: ZeroDivisionError"):
            list(trainer.fit(batches(5)))
        with pytest.raises(RunError, match=r"this training has ended: .*2F8"):
            trainer.evaluate(batches(1))
    assert not children() and threading.active_count() == known


@pytest.mark.parametrize("how", [os._exit, *thorough(signal.raise_signal, time.sleep)])
def test_a_rank_that_dies_or_hangs_while_it_is_busy(how):
    value, told = {
        os._exit: (3, "action 2F8: its process ended with status 3"),
        signal.raise_signal: (signal.SIGKILL, "action 2F8: its process was killed by SIGKILL"),
        time.sleep: (1000, "no action ended within 15 s: .*device 2 at 2F8"),
    }[how]
    modules = [*stages(2), bad(partial(how, value))]
    options = {"backend": "processes", "check": False, "timeout": 15.0}
    with training(modules=modules, **options) as trainer, pytest.raises(RunError, match=told):
        list(trainer.fit(batches(5)))
    assert not children()


def test_a_rank_that_is_killed_while_it_is_idle():
    options = {"backend": "processes", "check": False}
    with training(**options) as trainer:
        list(trainer.fit(batches(2)))
        time.sleep(0.1)
        os.kill(max(children()), signal.SIGKILL)
        with pytest.raises(RunError, match=r"device \d, .*its process was killed by SIGKILL"):
            list(trainer.fit(batches(2)))
    assert not children()


def test_idle_ranks_have_no_timeout():
    options = {"backend": "processes", "check": False, "timeout": 3.0}
    with training(**options) as trainer:
        list(trainer.fit(batches(2)))
        time.sleep(3.5)
        assert len(list(trainer.fit(batches(2)))) == 2


def in_a_session(script, *arguments, python=PYTHON):
    """A script that has ended well, in a process group that it may interrupt as a whole."""
    done = subprocess.run(
        [python, *map(str, (WORKERS / script, *arguments))],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=GUARD,
        start_new_session=True,
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_interrupt_leaves_what_can_be_saved_and_gone_on_with(backend, tmp_path):
    """It comes while batches are under way, to this process and to all of its ranks."""
    # Ranks of a fork are in a process group of their own.
    python = sys.executable if backend == "processes" else PYTHON
    done = in_a_session("interrupted.py", backend, tmp_path, python=python)
    assert done.stdout == "interrupted, and the same\n"


def test_an_interrupt_while_ranks_start():
    """It comes while the server that they are forked from imports torch."""
    done = in_a_session("interrupted_start.py", python=sys.executable)
    assert done.stdout == "interrupted, and gone on\n"
    assert done.stderr == ""


class Interrupting(Layer):
    """Ctrl-C in a forward of this thread, `again` a second one."""

    def __init__(self, thread, again):
        super().__init__()
        self.thread, self.again = thread, again

    def forward(self, x):
        if (threading.current_thread() is threading.main_thread()) == (self.thread == "main"):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.2)  # the main thread hears of it
            if self.again == "error":
                raise OSError("it came here, too")
            os.kill(os.getpid(), signal.SIGINT)
        return super().forward(x)


def test_a_second_interrupt_ends_the_training():
    """Here in the check of a batch that is done."""
    modules = [*stages(2), Interrupting("main", again="interrupt")]
    with training(modules=modules) as trainer:
        with pytest.raises(KeyboardInterrupt):
            list(trainer.fit(batches(2)))
        with pytest.raises(RunError, match="this training has ended: Keyboard"):
            list(trainer.fit(batches(2)))


def test_what_another_process_told_ends_the_training(monkeypatch):
    # Was: the next call took what others had told for another one: "'NoneType' is not iterable".
    with Trainer(make("gpipe", 2, 2), stages(2), F.mse_loss, SGD, check=False) as trainer:
        steps = trainer.fit(batches(4))
        next(steps)

        def share(*_, **options):
            raise RunError("process 1 has not made the call")

        monkeypatch.setattr(trainer._session.launcher, "share", share)
        with pytest.raises(RunError, match="process 1 has not made the call"):
            next(steps)
        with pytest.raises(RunError, match="training has ended: RunError: process 1 has not"):
            trainer.evaluate(batches(1))


def test_an_interrupt_that_makes_others_fail_is_an_interrupt():
    modules = [*stages(2), Interrupting("worker", again="error")]
    with training(modules=modules, check=False) as trainer:
        with pytest.raises(KeyboardInterrupt) as caught:
            list(trainer.fit(batches(2)))
        assert isinstance(caught.value.__cause__, RunError)


def test_an_evaluation_is_interrupted_while_it_reads():
    read = []

    def endless():
        for batch in iter(lambda: batches(1)[0], None):
            read.append(batch)
            if len(read) == 2:
                os.kill(os.getpid(), signal.SIGINT)
            assert len(read) < 4
            yield batch

    with training(check=False) as trainer:
        list(trainer.fit(batches(1)))
        with pytest.raises(KeyboardInterrupt):
            trainer.evaluate(endless())
        assert len(read) == 2
        assert [batch.number for batch in trainer.fit(batches(1))] == [2]


# ---- several processes


def all_well(ranks, script, *arguments):
    """All ranks that torchrun has started say so."""
    done = torchrun(ranks, WORKERS / script, *arguments)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split()) == [f"ok{rank}" for rank in range(ranks)]


def test_ranks_of_torchrun_make_the_same_calls(tmp_path):
    all_well(3, "fitted.py", tmp_path)
    read = {p.name: p.read_text() for p in tmp_path.glob("read_by_*")}
    assert set(read) == {"read_by_0", "read_by_2"}  # not by the middle of the model


def test_one_rank_alone_may_look_at_losses():
    all_well(3, "looking.py")


def test_an_interrupt_while_ranks_wait_for_another_can_be_gone_on_from(tmp_path):
    # Was: the one that waited was a value ahead of the other from then on: a TypeError of both.
    all_well(2, "interrupted_ranks.py", tmp_path)


# ---- memory


@pytest.mark.parametrize("name", ["pipedream", *thorough("1f1b")])
def test_memory_stays_as_it_is(name):
    """Nothing is kept of batches that are done, whatever their losses counted."""

    def loss(y, target):
        counted = 1 + int(target[0, 0].abs() * 1e6)
        return F.mse_loss(y, target), counted

    source = (batches(1, seed=i)[0] for i in range(10**6))
    with training(name, loss=loss, check=False, clip=1.0) as trainer:

        def objects(steps):
            for _ in trainer.fit(source, steps=steps):
                pass
            gc.collect()
            return len(gc.get_objects()), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

        objects(20)
        count, size = objects(20)
        more, larger = objects(120)
    assert more - count < 50
    assert larger - size < 2**13  # KiB
