"""The command line: where its output goes, what files it reads, and what ends it early."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import pipelab
from pipelab import Action, ScheduleError, make
from pipelab.cli import main
from pipelab.optimize.cut import Layer, Profile
from tests.cli.test_cli import SMALL, call, refused
from tests.conftest import thorough


def shell(line, tmp_path, **variables):
    """A line of shell in which $PIPELAB is the command; output is buffered, as by default."""
    variables |= {"PIPELAB": f"{sys.executable} -m pipelab", "PYTHONUNBUFFERED": ""}
    paths = [str(Path(pipelab.__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
    return subprocess.run(
        line,
        shell=True,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | variables | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
    )


@pytest.mark.parametrize("unbuffered", ["", *thorough("1")])
@pytest.mark.parametrize(
    ("line", "message"),
    [
        (f"simulate {SMALL} >&-", "pipelab simulate: error: standard output is closed: send it"),
        ("--help >&-", "pipelab: error: standard output is closed"),
        (f"simulate {SMALL} > /dev/full", "No space left on device"),
        ("simulate --help > /dev/full", "No space left on device"),
        ("--version > /dev/full", "No space left on device"),
        (f"simulate {SMALL} --csv /dev/full", "cannot write /dev/full: No space left on device"),
        (f"simulate {SMALL} --plot /dev/full", "--plot /dev/full: Format '' is not supported"),
    ],
)
def test_output_that_cannot_be_written_is_one_line_and_status_2(
    line, message, unbuffered, tmp_path
):
    done = shell(f"PYTHONUNBUFFERED={unbuffered} $PIPELAB {line}", tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert message in done.stderr
    assert list(tmp_path.iterdir()) == [] and not Path("/dev/full.png").exists()


@pytest.mark.parametrize("errors", ["2>&-", "2>/dev/full"])
def test_errors_that_cannot_be_written_are_told_by_the_status(errors, tmp_path):
    for line in ("simulate gpipe", "bogus"):
        done = shell(f"$PIPELAB {line} {errors}", tmp_path)
        assert (done.returncode, done.stdout, done.stderr) == (2, "", "")


def test_ranks_need_no_open_stderr(tmp_path):
    one = "gpipe --devices 1 --microbatches 1"
    done = shell(f"$PIPELAB run {one} --backend processes --json 2>&-", tmp_path)
    assert done.returncode == 0 and json.loads(done.stdout)["check"]["passed"]


@pytest.mark.parametrize(
    "start",
    [
        "$PIPELAB",
        f'exec {sys.executable} -c \'import sys; sys.argv[0] = "/bin/pipelab"\n'
        "from pipelab.cli import main; sys.exit(main())'",
    ],
    ids=["module", "script"],
)
def test_an_interrupt_while_the_command_is_loaded_leaves_no_traceback(start, tmp_path):
    (tmp_path / "argparse.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\n")
    done = shell(f"{start} simulate {SMALL}", tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize(
    ("module", "line", "extra"),
    [("matplotlib", f"simulate {SMALL} --plot x.png", "plot"), ("torch", f"run {SMALL}", "torch")],
)
def test_what_a_missing_module_comes_with_is_said(module, line, extra, tmp_path):
    """Was: `No module named 'torch'`, and no word of what to do."""
    (tmp_path / f"{module}.py").write_text(
        f"raise ModuleNotFoundError('No module named {module}', name='{module}')"
    )
    done = shell(f"PYTHONPATH=$PWD:$PYTHONPATH; $PIPELAB {line}", tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert f"{module}: pip install 'pipelab[{extra}]'" in done.stderr


def test_too_little_memory_is_one_line_and_status_2(tmp_path):
    line = "ulimit -v 250000; $PIPELAB validate gpipe --devices 1000 --microbatches 1000"
    done = shell(line, tmp_path, OPENBLAS_NUM_THREADS="1")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "error: out of memory: make a size smaller" in done.stderr


def test_the_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"pipelab {pipelab.__version__}\n"


def test_files_may_begin_with_a_byte_order_mark(capsys, tmp_path):
    table, profile = tmp_path / "marked.csv", tmp_path / "profile.json"
    table.write_text(make("gpipe", 2, 2).to_csv(), encoding="utf-8-sig")
    profile.write_text(
        Profile([Layer("a", 1.0, 2.0), Layer("b", 1.0, 2.0)]).to_json(), encoding="utf-8-sig"
    )
    assert call(capsys, f"validate {table}")[0] == 0
    assert call(capsys, f"partition --profile {profile} --devices 2")[0] == 0


def test_a_bad_cell_is_quoted_in_short(capsys, tmp_path):
    table = tmp_path / "long.csv"
    for text in ("0F0," + "x" * 10**6, "# " + "x" * 10**6 + "=1\n0F0,0B0"):
        table.write_text(text)
        assert len(refused(capsys, f"validate {table}")) < 2000
    with pytest.raises(ScheduleError) as error:
        Action.parse("x" * 10**6)
    assert len(str(error.value)) < 200


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"layers": ' + 10**5 * "[", "cannot be read: "),
        ('{"layers": [{"name": "a", "forward": 1}], "edges": [[0, 1e999]]}', "edge 0 -> inf: "),
    ],
    ids=["deep", "infinite"],
)
def test_a_profile_that_python_cannot_hold_is_one_line_and_status_2(capsys, tmp_path, text, why):
    profile = tmp_path / "odd.json"
    profile.write_text(text)
    assert why in refused(capsys, f"partition --profile {profile} --devices 1")
