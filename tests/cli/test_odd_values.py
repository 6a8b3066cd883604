"""Every option with odd numbers, every file as something else: finite numbers, or one line."""

import json
import os
import re

import pytest

from pipelab import make, simulate
from pipelab.cli import COMMANDS, main
from pipelab.cli.options import COSTS
from pipelab.measure.trace import to_trace
from pipelab.optimize.cut import Layer, Profile
from tests.cli.test_cli import SMALL, call, refused

PLAN = "--devices 4 --batch 8 --model layers=4,hidden=64,heads=4,sequence=32,vocabulary=100"
PLAN += " --machine flops=1e12,memory=1e10,bandwidth=1e9"
ODD = ["inf", "nan", "-1", "0", "-0.0", "1e308", "1e-320", "1e400", "9" * 30, "3k", "", "1,nan"]
ODD += ["1e308,1e308", "²"]
NOT_FINITE = re.compile(r"\b(nan|inf|NaN|Infinity)\b|\"makespan\": null")


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A folder to work in, with one good file of each kind."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "table.csv").write_text(make("gpipe", 2, 2).to_csv())
    (tmp_path / "trace.json").write_text(json.dumps(to_trace(simulate(make("gpipe", 2, 2)))))
    layers = [Layer(name, 1.0, 2.0, 1.0, 100.0, 10.0, 5.0) for name in "abcd"]
    (tmp_path / "profile.json").write_text(Profile(tuple(layers)).to_json())
    return tmp_path


def options_of(command):
    """The options of a command, but those that name files to write; each cost is one."""
    files = ("--csv", "--trace", "--plot")
    found = [f"{option}=" for option in COMMANDS[command].options if option not in files]
    return found + [f"--costs={name}=" for name in COSTS if "--costs=" in found]


@pytest.mark.parametrize(
    "line",
    [
        f"simulate {SMALL} --json",
        "compare --costs forward=1 --devices 2 --microbatches 2 --json",
        "partition --profile profile.json --devices 2 --json",
        "search --devices 2 --microbatches 2 --seconds 0 --json",
    ],
)
def test_each_option_takes_odd_numbers_or_says_what_it_takes(capsys, files, line):
    command, *given = line.split()
    options = options_of(command)
    assert len(options) > 5
    for option in options:
        for value in ODD:
            words = [command, *given, f"{option}{value}"]
            status = main(words)
            out, err = capsys.readouterr()
            if status == 0:
                assert err == "" and not NOT_FINITE.search(out), words
            else:
                assert (status, out, err.count("\n")) == (2, "", 1), (words, err)
    assert {path.name for path in files.iterdir()} == {"table.csv", "trace.json", "profile.json"}


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (f"simulate {SMALL} --costs forward=1e308", "forward=1e+308: give numbers from 1e-100 to"),
        (f"simulate {SMALL} --costs speed=1e-320", "speed=1e-320: give numbers from 1e-100 to"),
        (f"plan {PLAN} --training optimizer=1e308", "at least 0, at most 1e+100"),
        (f"plan {PLAN},latency=1e308", "latency=1e+308 of this machine: give 0 to 1e+100"),
        (f"plan {PLAN.replace('64', '9' * 30)}", "hidden=" + "9" * 30 + ": give at most 9,007"),
        (f"run {SMALL} --replicas {10**30}", "give at most 268,435,456 numbers in all"),
    ],
)
def test_a_number_too_large_is_named(capsys, line, told):
    assert told in refused(capsys, line)


def test_a_node_of_any_size_is_no_loop(capsys):
    assert call(capsys, f"plan {PLAN},node={10**30}")[0] == 0


# ---- files


def become(path, kind):
    """Make `path` something else than the file that is asked for."""
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif isinstance(kind, bytes):
        path.write_bytes(kind)
    elif kind != "missing":
        path.symlink_to({"dangling": "nowhere", "circle": path.name}.get(kind, kind))


@pytest.mark.parametrize(
    "line",
    [
        *("simulate odd.csv", "validate odd.csv", "diagnose odd.csv", "run odd.csv"),
        *("diagnose trace.json --schedule odd.csv", "partition --devices 2 --profile odd.csv"),
    ],
)
@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("pipe", "odd.csv: a pipe that nobody writes to: name a file"),
        ("folder", "odd.csv: Is a directory: name a file that can be read"),
        ("missing", "odd.csv: No such file or directory: name a file"),
        ("dangling", "odd.csv: No such file or directory: name a file"),
        ("circle", "odd.csv: Too many levels of symbolic links: name a file"),
        ("/proc/self/mem", "odd.csv: Input/output error: name a file"),
        ("/dev/null", "odd.csv: "),
        (b"\xff\xfe0", "odd.csv"),
        (b"\0" * 99, "odd.csv: "),
        (b"\x1f\x8b\x08", "odd.csv: cut off"),
        (b"[" * 10**5, "odd.csv"),
    ],
    ids=lambda x: str(x)[:12],
)
def test_a_file_that_is_something_else_is_one_line(capsys, files, line, kind, told):
    become(files / "odd.csv", kind)
    assert told in refused(capsys, line)


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("pipe", "cannot write odd: No such device or address: name another place"),
        ("folder", "--csv odd is a folder: name a file"),
        ("circle", "--csv odd is a link to itself: name another place"),
        ("/dev/full", "cannot write odd: No space left on device: name another place"),
    ],
)
def test_a_target_that_is_something_else_is_one_line(capsys, files, kind, told):
    become(files / "odd", kind)
    assert told in refused(capsys, f"simulate {SMALL} --csv odd")


@pytest.mark.parametrize("line", [f"run {SMALL}", "train gpt2 --steps 1"])
@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("/etc/passwd", "--save /etc/passwd exists and is not a folder: name a new one"),
        ("odd", "--save odd is a link to itself: name another place"),
        ("x" * 300, "File name too long"),
    ],
)
def test_a_place_for_a_checkpoint_that_is_something_else(capsys, files, line, name, told):
    become(files / "odd", "circle")
    assert told in refused(capsys, f"{line} --save {name}")


def test_a_pipe_with_a_writer_is_read_and_one_with_a_reader_is_written(capsys, files):
    """As a shell's `<(...)` and `>(...)` make them."""
    for line, mode, expected in (
        ("validate {}", "w", ""),
        (f"simulate {SMALL} --csv {{}}", "r", make("gpipe", 2, 2).to_csv()),
    ):
        ends = os.pipe()
        mine, theirs = ends if mode == "r" else ends[::-1]
        with os.fdopen(mine, mode) as file:
            if mode == "w":
                file.write(make("gpipe", 2, 2).to_csv())
                file.close()
            assert call(capsys, line.format(f"/dev/fd/{theirs}"))[::2] == (0, "")
            os.close(theirs)
            assert mode == "w" or file.read() == expected


@pytest.mark.parametrize("time", [float("nan"), float("inf"), "x", None])
def test_a_time_in_a_trace_is_a_finite_number(capsys, files, time):
    content = json.loads((files / "trace.json").read_text())
    content["otherData"]["times"][0][1] = time
    (files / "trace.json").write_text(json.dumps(content))
    assert "trace.json: " in refused(capsys, "diagnose trace.json")
