"""The bar of a check that takes long: for whoever looks, and nothing of it is left."""

import re
import sys
import time
from functools import partial

import pytest
from tqdm import std

from pipelab.runtime.verdict import judge


@pytest.fixture
def looking(monkeypatch):
    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)


def count(steps, seconds):
    with judge._bar(steps) as bar:
        for _ in range(steps):
            time.sleep(seconds)
            bar()


def test_a_short_check_has_none(looking, capsys):
    count(20, 0.001)
    assert capsys.readouterr().err == ""


def test_a_long_one_shows_what_is_left(looking, capsys, monkeypatch):
    monkeypatch.setattr(judge, "DELAY", 0.05)
    # A terminal's, whatever tests before have loaded; TQDM_DISABLE counts when it is loaded.
    monkeypatch.setattr("tqdm.auto.tqdm", partial(std.tqdm, disable=False))
    count(8, 0.15)
    shown = capsys.readouterr().err
    assert re.search(r"check:.*/8 \[\d\d:\d\d<\d\d:\d\d", shown), shown  # done<left


def test_nobody_looks_or_it_is_not_wanted(looking, capsys, monkeypatch):
    monkeypatch.setattr(judge, "DELAY", 0.0)
    monkeypatch.setenv("TQDM_DISABLE", "1")
    count(3, 0.01)
    monkeypatch.delenv("TQDM_DISABLE")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    count(3, 0.01)
    assert capsys.readouterr().err == ""
