"""A bar of what takes long: for whoever looks, and nothing of it is left."""

import re
import sys
import time
from functools import partial

import pytest
from tqdm import std

from pipelab.show.bar import Bar, seen


@pytest.fixture
def looking(monkeypatch):
    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)


def count(steps, seconds, delay=3.0):
    with Bar("check", steps, delay) as bar:
        for _ in range(steps):
            time.sleep(seconds)
            bar.step()


def test_what_is_short_has_none(looking, capsys):
    count(20, 0.001)
    assert capsys.readouterr().err == ""


def test_a_long_one_shows_what_is_left(looking, capsys, monkeypatch):
    # A terminal's, whatever tests before have loaded; TQDM_DISABLE counts when it is loaded.
    monkeypatch.setattr("tqdm.auto.tqdm", partial(std.tqdm, disable=False))
    count(8, 0.15, delay=0.05)
    shown = capsys.readouterr().err
    assert re.search(r"check:.*/8 \[\d\d:\d\d<\d\d:\d\d", shown), shown  # done<left


def test_phases_add_up(looking, capsys, monkeypatch):
    monkeypatch.setattr("tqdm.auto.tqdm", partial(std.tqdm, disable=False))
    with Bar("first", 1) as bar:
        bar.step()
        bar.phase("second", 3)
        bar.step(3)
    shown = capsys.readouterr().err
    assert "first: 100%" in shown and "1/1" in shown
    assert "second:  25%" in shown and "second: 100%" in shown and "4/4" in shown


def test_nobody_looks_or_it_is_not_wanted(looking, capsys, monkeypatch):
    assert seen()
    monkeypatch.setenv("TQDM_DISABLE", "1")
    count(3, 0.01, delay=0.0)
    monkeypatch.delenv("TQDM_DISABLE")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)
    monkeypatch.setitem(sys.modules, "ipykernel", None)
    assert seen()  # in a notebook
    monkeypatch.delitem(sys.modules, "ipykernel")
    count(3, 0.01, delay=0.0)
    assert capsys.readouterr().err == ""
