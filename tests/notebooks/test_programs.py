"""The program that grows from lecture to lecture, under torchrun.

Each step runs the schedule of its name, trains as one device does by that schedule's rule, and
differs from an earlier step in one thing.
"""

import difflib
import os
import re
import subprocess
import sys
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import teach
from pipelab import make
from tests.conftest import thorough
from tests.house.books import book
from tests.support import PYTHON

FOLDER = Path(__file__).parents[2] / "notebooks" / "programs"
RUN = Path(__file__).parents[1] / "workers" / "lecture_programs.py"
EARLIER = {  # the step that each one changes
    "01_inter_layer": None,
    "02_gpipe": "01_inter_layer",
    "03_pipedream": "02_gpipe",
    "05_pipedream_2bw": "03_pipedream",
    "06_pipedream_flush": "02_gpipe",
    "07_interleaved": "06_pipedream_flush",
    "12_zb_h1": "06_pipedream_flush",
    "16_overlapped_1f1b": "06_pipedream_flush",
}


def flush(s, k, p, m):
    """The version that micro-batch k reads on stage s of p."""
    return k // m


def stashing(s, k, p, m):
    return max(0, k // m - (p - 1 - s))


def double_buffered(s, k, p, m):
    return max(0, k // m - 1)


RULES = {"01_inter_layer": flush, "03_pipedream": stashing, "05_pipedream_2bw": double_buffered}
by_step = pytest.mark.parametrize("step", EARLIER)


def lines(step):
    """What follows the docstring."""
    source = (FOLDER / f"{step}.py").read_text()
    return source.partition('\n"""\n')[2].splitlines()


@pytest.fixture(scope="module", params=[2, *thorough(4)])
def ended(request, tmp_path_factory):
    """What the ranks know in the end, by step."""
    folder = tmp_path_factory.mktemp("programs")
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={request.param}"]
    programs = [FOLDER / f"{step}.py" for step in EARLIER]
    done = subprocess.run(
        [PYTHON, *torchrun, RUN, folder, *programs],
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return {
        step: [
            torch.load(folder / f"{step}.{rank}", weights_only=False)
            for rank in range(request.param)
        ]
        for step in EARLIER
    }


@pytest.fixture(scope="module")
def one_device(ended):
    """What one device gets, from a step's data and rule."""
    return {step: replay(ended[step][-1], first(ended[step]), rule) for step, rule in RULES.items()}


def first(ranks):
    """The model before the training: each rank still has the layers that it does not train."""
    layers = [*ranks[0]["model"]]
    for s, stage in ranks[0]["stages"].items():
        start = s * ranks[0]["depth"]
        layers[start : start + len(stage)] = ranks[1]["model"][start : start + len(stage)]
    return nn.Sequential(*layers)


def replay(last, model, rule):
    """The losses of all micro-batches, and the last weights."""
    xs, ys, m, depth = (last[name] for name in ("xs", "ys", "m", "depth"))
    versions, p, losses = [model], len(model) // depth, []
    for b in range(len(xs) // m):
        new = deepcopy(versions[b])
        for k in range(m * b, m * b + m):
            layers = [versions[rule(i // depth, k, p, m)][i] for i in range(len(model))]
            read = nn.Sequential(*layers)
            loss = cross_entropy(read(xs[k]), ys[k])
            losses.append(loss.item())
            gradients = torch.autograd.grad(loss / m, [*read.parameters()])
            for w, gradient in zip(new.parameters(), gradients, strict=True):
                w.data -= 0.3 * gradient
        versions.append(new)
    return losses, versions[-1]


def far(found, right):
    """The largest difference of losses or weights."""
    losses = (abs(a - b) for a, b in zip(found[0], right[0], strict=True))
    pairs = zip(found[1].parameters(), right[1].parameters(), strict=True)
    return max(*losses, *((a - b).abs().max().item() for a, b in pairs))


def test_every_step_is_tested():
    assert [p.stem for p in sorted(FOLDER.glob("[0-9]*.py"))] == [*EARLIER]


@by_step
def test_the_order_is_the_librarys(ended, step):
    ranks = ended[step]
    steps, m = ranks[0]["steps"], ranks[0]["m"]
    virtual = 2 if step == "07_interleaved" else 1
    table = make(step[3:], len(ranks), m, virtual=virtual, batches=steps)
    for rank, line in zip(ranks, table.grid().splitlines(), strict=True):
        right = [sorted(cell.split("+")) for cell in line.split() if cell != "."]
        cells = [cell if isinstance(cell, list) else [cell] for cell in rank["row"]]
        found = [sorted("".join(map(str, action)) for action in cell) for cell in cells]
        assert found == right


@by_step
def test_it_trains_as_one_device_by_its_rule(ended, one_device, step):
    """All losses and the last weights."""
    ranks = ended[step]
    layers = [None] * len(ranks[0]["model"])
    for rank in ranks:
        for s, stage in rank["stages"].items():
            if "versions" in rank:
                stage = rank["versions"][max(rank["versions"])]
            layers[s * rank["depth"] : (s + 1) * rank["depth"]] = stage
    trained = ranks[-1]["losses"], nn.Sequential(*layers)
    assert far(trained, one_device.get(step, one_device["01_inter_layer"])) < 1e-9


@pytest.mark.parametrize(
    ("step", "rule"),
    [("03_pipedream", flush), ("03_pipedream", double_buffered), ("05_pipedream_2bw", flush)],
)
def test_another_rule_trains_otherwise(ended, one_device, step, rule):
    assert far(replay(ended[step][-1], first(ended[step]), rule), one_device[step]) > 0.01


@by_step
def test_what_it_prints(ended, step):
    """One device's gradients on every stage, and a falling loss."""
    printed = "".join(rank["printed"] for rank in ended[step])
    found = re.findall(
        r"^stage (\d): the gradients differ from one device's by (\S+)$", printed, re.M
    )
    assert sorted(int(s) for s, _ in found) == sorted(
        s for rank in ended[step] for s in rank["stages"]
    )
    assert all(float(by) < 1e-12 for _, by in found)
    losses = [float(loss) for loss in re.findall(r"^step +\d+: loss ([\d.]+)$", printed, re.M)]
    assert len(losses) == 6 and losses[-1] < 0.7 * losses[0]


def test_versions_are_dropped(ended):
    for step, count in (("03_pipedream", 1), ("05_pipedream_2bw", 2)):
        assert [len(rank["versions"]) for rank in ended[step]] == [count] * len(ended[step])


@by_step
def test_a_step_is_short_and_plain(step):
    code = lines(step)
    imported = re.findall(r"^(?:import|from) (\w+)", "\n".join(code), re.M)
    assert {*imported} <= {"torch", "pydoc_data", "statistics", "copy", "concurrent"}
    assert max(map(len, code)) <= 92
    if EARLIER[step]:
        changed = [line[0] for line in difflib.ndiff(lines(EARLIER[step]), code)]
        assert 0 < changed.count("+") <= 15 and changed.count("-") <= 15
    else:
        assert len([line for line in code if line]) <= 80


def test_lecture_1_types_the_first_program():
    lecture = book(FOLDER.parent / "01_inter_layer.ipynb")
    typed = [c.source for c in lecture.cells if c.source.startswith("%%writefile")]
    program = "".join(source.partition("\n")[2] + "\n" for source in typed)
    assert program == (FOLDER / "01_inter_layer.py").read_text()


@pytest.mark.parametrize("step", [step for step, earlier in EARLIER.items() if earlier])
def test_a_lecture_shows_what_a_step_changes(step):
    (path,) = FOLDER.parent.glob(f"{step[:2]}_*.ipynb")
    sources = [cell.source for cell in book(path).cells]
    shown = f'teach.difference("programs/{EARLIER[step]}.py", "programs/{step}.py")'
    assert shown in sources and f'teach.torchrun("programs/{step}.py")' in sources
    difference = teach.difference(FOLDER / f"{EARLIER[step]}.py", FOLDER / f"{step}.py")
    kept = [line for sign, line in difference.lines if sign in " -"]
    added = [line for sign, line in difference.lines if sign in " +"]
    assert set(kept) <= {*lines(EARLIER[step])} and set(added) <= {*lines(step)}


def test_a_program_that_fails_says_why(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", PYTHON)
    program = tmp_path / "broken.py"
    program.write_text("raise SystemExit('no such rank')")
    with pytest.raises(RuntimeError, match=r"broken.py failed:(.|\n)*no such rank"):
        teach.torchrun(program)
