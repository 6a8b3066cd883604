"""One process a device: the same results, one clear error for every fault, nothing left behind."""

import multiprocessing
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from importlib import import_module
from multiprocessing import forkserver, spawn
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pipelab import Costs, Reads, Recompute, RunError, Schedule, make, simulate, validate
from pipelab.runtime.torch import processes
from pipelab.runtime.torch.imported import check_same, facts_of
from pipelab.runtime.torch.settings import settings, use
from tests.conftest import thorough
from tests.support import (
    PYTHON,
    Failing,
    Fork,
    Join,
    batches,
    explode,
    inputs_come_first,
    run_of,
    same,
    stages,
)

GUARD = 60  # seconds within which any fault has to be reported
TWO = make("gpipe", 2, 2)
apart = partial(run_of, backend="processes")


def left_behind():
    """Folders, shared memory, processes, threads and open files (and sockets) of this test."""
    folders = set(Path(tempfile.gettempdir()).glob("pipelab-*"))
    shared = set(Path("/dev/shm").glob("torch_*"))
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    ranks = {
        c
        for child in children
        for c in Path(f"/proc/{child}/task/{child}/children").read_text().split()
    }
    threads = {t for t in threading.enumerate() if t.name.startswith("pipelab")}
    return folders, shared, ranks, threads, len(os.listdir("/proc/self/fd"))


@pytest.fixture(scope="module", autouse=True)
def _the_fork_server_is_a_child():
    """As it is for users; elsewhere tests' servers are forks of another process."""
    for rank in multiprocessing.active_children():  # of a test that failed: the end waits for it
        rank.kill()
    forkserver._forkserver._stop()
    before = spawn.get_executable()
    multiprocessing.set_executable(sys.executable)
    apart(TWO, check=False)
    yield
    multiprocessing.set_executable(before)


@pytest.fixture(autouse=True)
def nothing_is_left_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # nobody else's folders
    before = left_behind()
    began = time.monotonic()
    yield
    assert time.monotonic() - began < GUARD
    assert left_behind() == before


class Asking(nn.Linear):
    """Fails where torch is not set as it was told."""

    def forward(self, x):
        found = settings()
        assert found == self.set, (found, self.set)
        assert torch.empty(0).device == self.where
        return super().forward(x)


@pytest.mark.parametrize("backend", ["threads", "processes"])
def test_what_is_set_in_torch_reaches_the_workers(backend):
    # Was: processes had torch's own settings, and threads its own default device.
    before = settings()
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(torch.get_num_threads() + 2)
    torch.set_float32_matmul_precision("high")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.autograd.set_detect_anomaly(True, check_nan=False)
    torch.set_flush_denormal(True)
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.enable_flash_sdp(False)
    try:
        modules, data = [Asking(6, 6), Asking(6, 6)], batches(1)
        torch.set_default_device("meta")
        for module in modules:
            module.set, module.where = settings(), torch.empty(0).device
        run_of(TWO, modules, data, backend=backend, check=False)
    finally:
        torch.set_default_device(None)
        use(before)


@pytest.mark.parametrize(
    "schedule",
    [
        make("interleaved", 3, 4, batches=2),
        make("pipedream", 3, 4, batches=2, reads=Reads.FIRST),
        make("pipedream_2bw", 3, 4, batches=3),
        *thorough(
            make("inter_layer", 3, 4, batches=2),
            make("gpipe", 3, 4, batches=2),
            make("pipedream_flush", 3, 4, batches=2),
            make("pipedream", 3, 4, batches=2),
        ),
    ],
    ids=lambda s: f"{s.name}-{s.reads.name}",
)
def test_all_schedules_as_on_threads(schedule):
    data = batches(schedule.batches, 10)
    options = {"optimizer": torch.optim.Adam, "recompute": Recompute.EXCEPT_LAST}
    result = apart(schedule, data=data, **options)
    assert result.check.passed and result.check.ratio == 0
    threads = run_of(schedule, data=data, **options, check=False)
    assert result.losses == threads.losses and same(result, threads)
    assert result.weight_versions == threads.weight_versions == schedule.weight_versions
    # Threads pass tensors by reference, so that two stages may keep one; processes never less.
    assert all(
        a >= b
        for a, b in zip(*(r.memory.peak("activations") for r in (result, threads)), strict=True)
    )
    assert inputs_come_first(result.timeline)  # one clock for all ranks


def test_outputs_are_taken_in_another_order_than_they_were_made():
    rows = "0F0 0F1 0F2 0B1 0B2 0B0 0U0\n1F2 1F0 1B0 1F1 1B2 1B1 1U0"
    schedule = validate(Schedule.from_grid(rows))
    assert apart(schedule, data=batches(1, 6), loss=F.l1_loss).check.passed


def test_trees_uneven_sizes_bfloat16_and_clipping_cross_processes():
    uneven, half = batches(1, 9), torch.bfloat16
    assert apart(make("gpipe", 2, 4), [Fork(), Join()], uneven, clip=1e-3).check.passed
    assert apart(TWO, stages(2, dtype=half), batches(1, dtype=half)).check.passed


def test_a_paced_run_shows_the_predicted_times():
    schedule, costs = make("gpipe", 3, 4), Costs(transfer=0.5)
    result = apart(schedule, pace=0.01, costs=costs)
    predicted = simulate(schedule, costs)
    assert max(result.timeline.end) / 0.01 >= predicted.makespan * 0.99
    assert result.check.passed


def test_a_stage_that_raises():
    modules, said = stages(3), "device 1, action 1F1: ZeroDivisionError: by design"
    modules[1] = Failing(1, explode)
    with pytest.raises(RunError, match=said) as error:
        apart(make("gpipe", 3, 4), modules)
    assert (error.value.device, str(error.value.action)) == (1, "1F1")
    assert "in explode" in str(error.value.__cause__)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def hang():
    time.sleep(1000)


@pytest.mark.parametrize("where", thorough(0, 1, 2))
def test_a_rank_that_is_killed(where):
    modules = stages(3)
    said = f"device {where}, action {where}F1: its process was killed by SIGKILL"
    modules[where] = Failing(1, die)
    with pytest.raises(RunError, match=said) as error:
        apart(make("gpipe", 3, 4), modules)
    assert error.value.device == where


def test_a_replica_that_is_killed_names_the_device_of_its_row():
    # Was: the number of its process.
    said = r"device 1 of replica [01], action 1F1: its process was killed by SIGKILL"
    with pytest.raises(RunError, match=said) as error:
        apart(TWO, [*stages(1), Failing(1, die)], replicas=2)
    assert error.value.device == 1


def die_soon():
    threading.Timer(0.02, die).start()


class Wide(nn.Module):
    """Outputs 200 MB, which take longer on their way than the sender lives."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))

    def forward(self, x):
        out = torch.ones(25_000_000, 2) * self.w
        die_soon()
        return out


class Total(nn.Module):
    def forward(self, x):
        return x.sum()[None, None]


def test_a_rank_that_is_killed_in_a_transfer():
    data = [(torch.ones(1, 1), torch.ones(1, 1))]
    said = r"device 0, action 0[FB]0: its process was killed by SIGKILL"
    with pytest.raises(RunError, match=said) as error:
        apart(make("gpipe", 2, 1), [Wide(), Total()], data, check=False)
    assert error.value.device == 0


def test_a_rank_that_hangs():
    modules = stages(3)
    modules[1] = Failing(1, hang)
    said = "no action ended within 3 s: device 0 at 0B0; device 1 at 1F1; device 2 at 2F1"
    with pytest.raises(RunError, match=said):
        apart(make("gpipe", 3, 4), modules, timeout=3)


def test_a_job_that_cannot_be_pickled(capfd):
    modules = stages(2)
    modules[1].lock = threading.Lock()
    with pytest.raises(TypeError, match=r"cannot pickle '_thread.lock' object"):
        apart(TWO, modules)
    assert capfd.readouterr().err == ""  # was: the traceback of a rank that had no folder


def test_a_slice_is_sent_without_the_batch_around_it():
    assert len(processes._dumps(torch.ones(1000, 100)[:1])) < 10_000


def test_what_ranks_print_comes_in_the_order_of_ranks(capsys):
    class Loud(nn.Module):
        def __init__(self, name):
            super().__init__()
            self.w, self.name = nn.Parameter(torch.ones(6, dtype=torch.float64)), name

        def forward(self, x):
            print("forward of", self.name)
            return x * self.w

    apart(TWO, [Loud("zero"), Loud("one")], check=False)
    assert capsys.readouterr().out.splitlines() == ["forward of zero"] * 2 + ["forward of one"] * 2


SCRIPT = """
import time, torch
import pipelab
from torch.nn.functional import mse_loss
class Mine(torch.nn.Linear):
    def forward(self, x):
        if WAIT: print("running", flush=True); time.sleep(1000)
        return helper(super().forward(x))
def helper(x): return x.tanh()
def loss(y, t): return mse_loss(helper(y), t)
ones = torch.ones(4, 4)
for WAIT in (False, True):
    run = pipelab.run(pipelab.make("gpipe", 2, 2), [Mine(4, 4), Mine(4, 4)], [(ones, ones)], loss,
                      lambda p: torch.optim.SGD(p, lr=0.1), backend="processes")
    print(run.check.passed, flush=True)
"""


def start(folder, python=PYTHON):
    """A script without a main guard, which defines its own models, in a session of its own."""
    script = folder / "script.py"
    script.write_text(SCRIPT)
    where = {"PYTHONPATH": str(Path(__file__).parents[3]), "TMPDIR": str(folder)}
    return subprocess.Popen(
        [python, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | where,
    )


def members(session):
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (OSError, IndexError):
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


# Killed in make test, too: test_ranks.
@pytest.mark.parametrize("how", [signal.SIGINT, *thorough(signal.SIGKILL)])
def test_a_script_without_a_guard_trains_and_leaves_no_process_behind(how, short_path):
    """One that is interrupted, or killed, in its second training."""
    process = start(short_path, sys.executable)
    assert select.select([process.stdout], [], [], GUARD)[0], "it says nothing"
    trained, logs = process.stdout.readline(), []
    if trained != "True\n":
        process.kill()
    assert trained == "True\n", trained + process.stderr.read()
    deadline = time.monotonic() + GUARD
    while not logs and time.monotonic() < deadline:
        logs = [log for log in short_path.glob("pipelab-*/log*") if log.read_text()]
        time.sleep(0.1)
    assert logs, "no rank came to its first forward"
    assert len(members(process.pid)) >= 3
    process.send_signal(how)
    process.communicate(timeout=GUARD)
    while members(process.pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert members(process.pid) == []
    assert list(short_path.glob("pipelab-*")) == []


def test_a_folder_with_too_long_a_path_for_a_socket_is_named(short_path):
    # Was: OSError: AF_UNIX path too long.
    deep = short_path / ("x" * 100)
    deep.mkdir()
    process = start(deep)
    _, err = process.communicate(timeout=GUARD)
    expected = f"a socket in {deep}, but its path is too long: set TMPDIR to a shorter path"
    assert expected in err.splitlines()[-1]
    assert process.returncode == 1 and [path.name for path in deep.iterdir()] == ["script.py"]


def test_a_rank_ends_quietly_if_its_caller_was_interrupted_meanwhile(tmp_path):
    # Was: it wrote an error about its log, in a folder that was removed already.
    script = f"""
from multiprocessing import Pipe
from pipelab.runtime.torch.child import Connected, rank_process
rank_process(Pipe()[0], 0, Connected(None, None, {str(tmp_path / "removed")!r}, {{}}))
"""
    ended = subprocess.run([PYTHON, "-c", script], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (1, "")


def test_runs_of_two_threads_start_their_ranks_in_turn():
    # Was: one showed __main__ again while the other started ranks, which then ran the script; and
    # __main__ lost its __spec__.
    before, inside = dict(vars(sys.modules["__main__"])), threading.Event()

    def other():
        with processes._main_hidden():
            inside.set()

    thread = threading.Thread(target=other)
    with processes._main_hidden():
        thread.start()
        assert not inside.wait(0.1)
    thread.join()
    assert inside.is_set() and dict(vars(sys.modules["__main__"])) == before


def test_an_unknown_backend():
    with pytest.raises(ValueError, match="backend='rays': give one of threads, processes, jax"):
        run_of(TWO, backend="rays")


# ---- what a process imports anew

HELPER = """
import torch
from torch import nn
from torch.nn import functional as F
import helper_settings as settings

SCALE, RATES, MASK = 1.0, {"a": [1]}, torch.ones(6)

def activation(x):
    return F.relu(x) * SCALE

class Layer(nn.Linear):
    gain = 1.0

    def forward(self, x):
        return activation(super().forward(x)) * self.gain * RATES["a"][0] * MASK

def loss(y, target):
    return (y - target).square().mean() * settings.FACTOR
"""

CHANGES = {
    "helper.SCALE": (lambda h: h, 2.0),
    "helper.RATES": (lambda h: h, {"a": [2]}),
    "helper.MASK": (lambda h: h, torch.zeros(6)),
    "helper_settings.FACTOR": (lambda h: h.settings, 2.0),
    "helper.Layer.gain": (lambda h: h.Layer, 2.0),
    "helper.Layer.forward": (lambda h: h.Layer, lambda self, x: x),
    "helper.activation": (lambda h: h, torch.tanh),
    "torch.nn.functional.relu": (lambda h: h.F, lambda x: x),
    "torch.nn.modules.linear.Linear.forward": (lambda h: nn.Linear, lambda self, x: x),
    "torch.optim.sgd.SGD.step": (lambda h: torch.optim.SGD, lambda self: None),
}


@pytest.fixture(scope="module")
def helper(tmp_path_factory):
    """A module of a user's, which another one has imported."""
    folder = tmp_path_factory.mktemp("modules")
    (folder / "helper_settings.py").write_text("FACTOR = 1.0")
    (folder / "helper.py").write_text(HELPER)
    sys.path.insert(0, str(folder))
    yield import_module("helper")
    sys.path.remove(str(folder))


def test_what_a_script_has_changed_in_a_module_is_noticed(helper, monkeypatch):
    # Was: another model, without a word.
    model, data = [helper.Layer(6, 6), helper.Layer(6, 6)], batches(1, dtype=torch.float32)
    assert apart(TWO, model, data, helper.loss, check=False).losses  # as they are
    before = facts_of(model, helper.loss, torch.optim.SGD)
    for place, (holder, value) in CHANGES.items():
        with monkeypatch.context() as patch:
            patch.setattr(holder(helper), place.rpartition(".")[2], value)
            with pytest.raises(ValueError, match=f"{place} is another one in the caller than"):
                check_same(facts_of(model, helper.loss, torch.optim.SGD), before)
            if place in ("helper.SCALE", "torch.nn.functional.relu"):
                with pytest.raises(RunError, match=f"{place} is another one in the caller than"):
                    apart(TWO, model, data, helper.loss, check=False)


def test_the_environment_is_the_callers(monkeypatch):
    # Was: that of the first run, from which the server of processes has it.
    def factory(weights):
        return torch.optim.SGD(weights, lr=float(os.environ["RATE"]))

    monkeypatch.setenv("RATE", "0.25")
    done = apart(TWO, optimizer=factory)
    assert done.check.passed and done.rates == [[0.25]]
