"""A process that has imported torch, and whose forks do what a new Python would: a second later.

Most processes that tests and lectures start spend their time on imports. `make test` starts this
file once. Where a test is about what a process does, not about how it starts or is killed, it
starts tests.support.PYTHON: that sends its arguments, environment, folder, inheritable files and
blocked signals here, waits for the fork, and ends as it ends. Without this process, or with flags
that a fork does not know, it is Python itself. What a fork starts by multiprocessing (the server
of its ranks, the tracker of its resources) is a fork, too.
"""

import atexit
import ctypes
import fcntl
import gc
import importlib
import multiprocessing
import os
import runpy
import select
import signal
import socket
import sys
import tempfile
import threading
import time
import warnings
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from types import ModuleType

IMPORTED = (
    *("torch._dynamo", "torch.distributed.run", "transformers.models.gpt2.modeling_gpt2"),
    *("matplotlib.pyplot", "pandas", "ipykernel.ipkernel", "multiprocessing.spawn"),
    *("networkx", "pytest", "jax", "flax.nnx", "optax"),
)
PR_SET_PDEATHSIG = 1
SET_BY_IMPORTS: dict[str, str] = {}  # in the environment, by jax
# As jax reads them.
BOOLEANS = dict.fromkeys(("y", "yes", "t", "true", "on", "1"), True)
BOOLEANS |= dict.fromkeys(("n", "no", "f", "false", "off", "0"), False)
CLIENT = """#!/bin/sh
'''exec' '{python}' -IS "$0" "$@"
' '''
import os, signal, socket, sys
flags = []
for word in sys.argv[1:]:
    if word in ("-m", "-c") or not word.startswith("-"):
        break
    flags.append(word)
files = [0, 1, 2]
for number in range(3, 1000):
    try:
        files += [number] * os.get_inheritable(number)
    except OSError:
        pass
with socket.socket(socket.AF_UNIX) as server:
    try:
        assert {{*flags}} <= {{"-u", "-B"}}
        assert os.environ.get("OMP_NUM_THREADS") == {threads!r}  # which torch read there
        server.connect({address!r})
    except (AssertionError, OSError):
        os.execv({python!r}, [{python!r}, *sys.argv[1:]])
    blocked = list(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ())))
    told = repr((sys.argv[1:], dict(os.environ), os.getcwd(), files, blocked)).encode()
    socket.send_fds(server, [len(told).to_bytes(8, "big")], files)
    server.sendall(told)
    fork = int.from_bytes(server.recv(8), "big")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: os.kill(fork, number))
    code = int.from_bytes(server.recv(8) or b"\1", "big", signed=True)
if code < 0:
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
"""


def python(folder):
    """What asks for a fork, in the folder with which this file is started."""
    path, address = Path(folder) / "python", f"{folder}/address"
    threads = os.environ.get("OMP_NUM_THREADS")
    path.write_text(CLIENT.format(python=sys.executable, address=address, threads=threads))
    path.chmod(0o755)
    return str(path)


def wait(folder, server, seconds=60.0):
    """Until forks can be had of this process, if ever; who asks before gets a new Python."""
    deadline = time.monotonic() + seconds
    while not Path(folder, "address").exists() and server.poll() is None:
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)


def serve(address):
    """Fork for whoever asks, until the parent ends; returns in a fork, with its arguments."""
    parent, forks = os.getppid(), {}
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    wakes, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(woken)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(100)
        while os.getppid() == parent:
            ready = select.select([listener, wakes, *forks.values()], [], [], 1.0)[0]
            if wakes in ready:
                os.read(wakes, 1000)
            for pid, asked in list(forks.items()):
                if asked in ready:  # whoever asked was killed
                    os.kill(pid, signal.SIGKILL)
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    code = os.waitstatus_to_exitcode(status)
                    with forks.pop(pid) as told, suppress(BrokenPipeError):
                        told.send(code.to_bytes(8, "big", signed=True))
            if listener in ready:
                asked, _ = listener.accept()
                size, files, _, _ = socket.recv_fds(asked, 8, 200)
                with asked.makefile("rb") as told:
                    wanted = told.read(int.from_bytes(size, "big"))
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # jax has no thread yet
                    pid = os.fork()
                if pid:
                    forks[pid] = asked
                    with suppress(BrokenPipeError):  # it was killed meanwhile
                        asked.send(pid.to_bytes(8, "big"))
                    list(map(os.close, files))
                    continue
                for one in (asked, *forks.values()):
                    one.close()
                signal.set_wakeup_fd(-1)
                list(map(os.close, (wakes, woken)))
                return eval(wanted), files
    for pid in forks:
        os.kill(pid, signal.SIGKILL)
    os._exit(0)


def tell_jax(environment):
    """Give jax, which was imported in an environment without its variables, those of this one."""
    if jax := sys.modules.get("jax"):
        for name, text in environment.items():
            option = name.lower()
            if text and option in jax.config.values:
                known = jax.config.values[option]
                kind = str if known is None else type(known)
                value = BOOLEANS.get(text.lower(), text) if kind is bool else kind(text)
                jax.config.update(option, value)


def become(arguments, environment, folder, numbers, blocked, files, paths):
    """Run what `python *arguments` runs, with that environment, those files and blocked signals."""
    os.setsid()
    if sys.platform == "linux":  # none stays behind a server that was killed
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    free = max(numbers) + 1
    away = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, free) for file in files]
    list(map(os.close, files))
    for number, file in zip(numbers, away, strict=True):
        os.dup2(file, number)
        os.close(file)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if "JPY_PARENT_PID" in environment:  # a kernel ends with its parent
        environment["JPY_PARENT_PID"] = str(os.getppid())
    os.environ.clear()
    os.environ.update(SET_BY_IMPORTS | environment)
    tell_jax(environment)
    tempfile.tempdir = None  # an import has asked for it, and the environment may name another
    os.chdir(folder)
    sys.executable = environment.get("PIPELAB_PYTHON", sys.executable)
    multiprocessing.set_executable(sys.executable)
    plain = "PYTHONUNBUFFERED" in environment
    while arguments[0] in ("-u", "-B"):
        plain, arguments = plain or arguments[0] == "-u", arguments[1:]
    sys.stdin = os.fdopen(0, closefd=False)
    for number, name in ((1, "stdout"), (2, "stderr")):
        binary = os.fdopen(number, "wb", 0 if plain else -1, closefd=False)
        more = {"line_buffering": number == 2, "write_through": plain}
        setattr(sys, name, TextIOWrapper(binary, "utf-8", "backslashreplace", **more))
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    first, *rest = arguments
    given = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:] = [folder if first in ("-m", "-c") else str(Path(first).resolve().parent)]
    sys.path += [*given, *paths]
    if first == "-m":
        sys.argv[:] = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.argv[:] = ["-c", *rest[1:]]
        main = sys.modules["__main__"] = ModuleType("__main__")
        exec(rest[0], vars(main))
    else:
        sys.argv[:] = arguments
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    own = {*os.environ.get("PYTHONPATH", "").split(os.pathsep)}
    del sys.path[0]  # this folder, which has a jax of its own
    others = [path for path in sys.path if path not in own]
    for name in [name for name in os.environ if name.startswith("JAX_")]:
        del os.environ[name]  # a fork is told its own
    for name in IMPORTED:
        before = set(os.environ)
        with suppress(ImportError):  # of an extra that is not installed
            importlib.import_module(name)
        if name == "jax":
            SET_BY_IMPORTS |= {key: os.environ[key] for key in set(os.environ) - before}
    gc.freeze()
    (asked, files) = serve(f"{sys.argv[1]}/address")
    become(*asked, files, others)
    threading._shutdown()  # as a Python that ends well, but for a second of taking all apart
    atexit._run_exitfuncs()
    with suppress(ValueError):  # multiprocessing's servers close it
        sys.stdout.flush()
    os._exit(0)
