"""How many wrong tokens a room's own tests catch: make mutants.

A mutant is a function of the room with one thing changed: `<` to `<=`, `+` to `-`, `and` to `or`, a
number to the next one, a condition to its opposite, a returned value to None. A room is a folder or
a module, and its tests are those of the same name, which are collected once. Then each mutant of a
random sample, the same each time, gets a forked process in which the function has the changed code,
and the tests that call it run there until one fails or takes too long, the quickest first.

    python tests/house/mutants.py [ROOM ...] [--sample N] [--seed K] [--file PART_OF_A_PATH]

prints those that survive. Exit status 1 if fewer than 95 % of those that change anything are
killed; `mutants_without_effect.txt` has the others, each with the reason. Strings are not changed,
nor what a module does when it is imported.
"""

import argparse
import ast
import gc
import os
import pickle
import random
import signal
import sys
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path
from types import CodeType, FunctionType

import pytest
from _pytest.runner import runtestprotocol
from hypothesis import HealthCheck, Phase, settings

ROOT = Path(__file__).parents[2]
WITHOUT_EFFECT = Path(__file__).with_name("mutants_without_effect.txt")
ROOMS = ("table", "predict", "optimize/bounds")
LEAST = 0.95
PROCESSES = 2
EXAMPLES = 40  # of a property, in each mutant

# ---- what is changed

OTHER_OPERATOR = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt},
    **{ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is},
    **{ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And},
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult},
    **{ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv, ast.BitOr: ast.BitAnd},
}
OTHER_NAME = {"min": "max", "max": "min", "any": "all", "all": "any"}
NOT_OF_A_BODY = {
    "annotation",
    "returns",
    "decorator_list",
    "defaults",
    "kw_defaults",
    "format_spec",
}


def opposite(condition):
    return ast.UnaryOp(ast.Not(), condition)


def changes(node):
    """(attribute, new value) for everything that can be changed of one node."""
    if isinstance(node, ast.BinOp | ast.BoolOp | ast.AugAssign) and type(node.op) in OTHER_OPERATOR:
        yield "op", OTHER_OPERATOR[type(node.op)]()
    elif isinstance(node, ast.Compare):
        for i, op in enumerate(node.ops):
            yield "ops", [*node.ops[:i], OTHER_OPERATOR[type(op)](), *node.ops[i + 1 :]]
    elif isinstance(node, ast.If | ast.While | ast.IfExp):
        yield "test", opposite(node.test)
    elif isinstance(node, ast.UnaryOp):
        yield "operand", ast.UnaryOp(node.op, node.operand)  # twice is never
    elif isinstance(node, ast.Constant) and type(node.value) in (int, float, bool):
        yield (
            "value",
            not node.value if node.value is True or node.value is False else node.value + 1,
        )
    elif isinstance(node, ast.Return) and node.value and ast.unparse(node.value) != "None":
        yield "value", ast.Constant(None)
    elif isinstance(node, ast.Name) and node.id in OTHER_NAME:
        yield "id", OTHER_NAME[node.id]


def within(node, in_function=False):
    """Every node of the functions below this one."""
    if in_function:
        yield node
    if isinstance(node, ast.keyword) and node.arg == "strict":
        return  # a guard: nothing is told of lengths that differ
    here = in_function or isinstance(node, ast.FunctionDef | ast.Lambda)
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and name not in NOT_OF_A_BODY:
                yield from within(child, here)


def pairs(before, after):
    """The code objects of a module and of the changed one."""
    yield before, after
    inner = [[c for c in code.co_consts if isinstance(c, CodeType)] for code in (before, after)]
    if len(inner[0]) == len(inner[1]):  # else the change has taken a function's functions away
        for both in zip(*inner, strict=True):
            yield from pairs(*both)


class Mutant:
    """A change of a file, by its number among all of them."""

    def __init__(self, path, number):
        tree = ast.parse(text := path.read_text())
        before = compile(tree, str(path), "exec")
        node, name, value = [*every_change(tree)][number]
        old = node.test if name == "test" else node
        setattr(node, name, value)
        changed = compile(ast.fix_missing_locations(tree), str(path), "exec")
        self.codes = {a: b for a, b in pairs(before, changed) if a != b}
        # The line before and after, whose columns are counted in bytes.
        first, last = text.splitlines()[old.lineno - 1], text.splitlines()[old.end_lineno - 1]
        begin, end = first.encode()[: old.col_offset], last.encode()[old.end_col_offset :]
        new = begin.decode() + ast.unparse(value if name == "test" else node) + end.decode()
        file = path.relative_to(ROOT / "pipelab")
        self.line, self.text = old.lineno, f"{file}: {first.strip()} -> {new.strip()}"


def every_change(tree):
    return [(node, *change) for node in within(tree) for change in changes(node)]


# ---- which tests see it


class Run:
    """A pytest plugin that takes the place of the run: every mutant of a sample, and its tests."""

    def __init__(self, room, options):
        place = ROOT / "pipelab" / room
        self.paths = sorted(place.rglob("*.py")) if place.is_dir() else [place.with_suffix(".py")]
        self.files = {str(path) for path in self.paths}
        self.options, self.survivors, self.done = options, [], 0

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self):
        """After the tests' settings are loaded, and before any test is."""
        quick = {"max_examples": EXAMPLES, "phases": [Phase.explicit, Phase.generate]}
        checks = {"suppress_health_check": list(HealthCheck), "deadline": None}
        settings.register_profile("mutants", derandomize=True, database=None, **quick, **checks)
        settings.load_profile("mutants")

    def pytest_runtestloop(self, session):
        self.items = session.items
        gc.unfreeze()  # conftest has hidden what is imported
        self.functions = defaultdict(list)
        for each in gc.get_objects():
            if isinstance(each, FunctionType) and self.of_room(each.__code__):
                self.functions[each.__code__].append(each)
        self.seconds, self.called = self.in_a_fork(self.watch)
        known = {line.rpartition("  # ")[0] for line in WITHOUT_EFFECT.read_text().splitlines()}
        running = {}
        for mutant in self.sample():
            if mutant.text in known:
                continue
            if len(running) == PROCESSES:
                self.wait(running)
            running[self.fork(mutant)] = mutant
        while running:
            self.wait(running)
        return True

    def of_room(self, code):
        return code.co_filename in self.files

    def sample(self):
        paths = [p for p in self.paths if self.options.file in str(p)]
        numbered = [
            (path, number)
            for path in paths
            for number in range(len(every_change(ast.parse(path.read_text()))))
        ]
        count = min(self.options.sample, len(numbered))
        for path, number in sorted(random.Random(self.options.seed).sample(numbered, count)):
            yield Mutant(path, number)

    def watch(self):
        """Of each test how long it takes, and the room's code that it calls."""
        seconds, called = [], []
        for item in self.items:
            seen = set()
            start = time.perf_counter()

            def note(frame, event, _, seen=seen):
                seen.add(frame.f_code)

            sys.setprofile(note)
            threading.setprofile(note)
            assert passes(item), f"{item.nodeid} fails without a mutant"
            sys.setprofile(None)
            threading.setprofile(None)
            seconds.append(time.perf_counter() - start)
            called.append({key(code) for code in seen if self.of_room(code)})
        return seconds, called

    def in_a_fork(self, function):
        """What a function returns in a process of its own, which leaves nothing behind here."""
        with tempfile.TemporaryFile() as file:
            if not (child := os.fork()):
                pickle.dump(function(), file)
                file.flush()
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0, "the tests fail without a mutant"
            file.seek(0)
            return pickle.load(file)

    def fork(self, mutant):
        """A process that exits with 1 when a test fails, and 0 when none does."""
        if child := os.fork():
            return child
        for before, after in mutant.codes.items():
            for function in self.functions.get(before, ()):
                function.__code__ = after
        changed = {key(code) for code in mutant.codes}
        those = [i for i, called in enumerate(self.called) if called & changed]
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(10 + int(5 * sum(self.seconds[i] for i in those)))  # a mutant may never end
        quickest = sorted(those, key=self.seconds.__getitem__)
        killed = True
        try:
            killed = not all(passes(self.items[i]) for i in quickest)
        finally:
            os._exit(killed)

    def wait(self, running):
        child, status = os.wait()
        mutant = running.pop(child)
        self.done += 1
        if status == 0:
            self.survivors.append(mutant)
            print(f"line {mutant.line} of {mutant.text}", file=sys.__stdout__, flush=True)


def key(code):
    return code.co_filename, code.co_firstlineno, code.co_qualname


def passes(item):
    reports = runtestprotocol(item, nextitem=None, log=False)
    return not any(report.failed for report in reports)


def main() -> int:
    """Print what survived; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rooms", nargs="*", default=ROOMS)
    parser.add_argument("--sample", type=int, default=200, help="mutants of a room")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--file", default="", help="of these files alone: a part of their path")
    options = parser.parse_args()
    good = True
    for room in options.rooms:
        start, plugin = time.perf_counter(), Run(room, options)
        folder, _, module = room.rpartition("/")
        tests = f"tests/{folder}/test_{module}.py" if folder else f"tests/{room}"
        how = ["-p", "no:terminal", "-p", "no:xdist", "--hypothesis-profile", "pipelab"]
        pytest.main([*how, tests], plugins=[plugin])
        killed = 1 - len(plugin.survivors) / max(plugin.done, 1)
        good = good and plugin.done and killed >= LEAST
        took = time.perf_counter() - start
        print(f"{room}: {killed:.1%} of {plugin.done} mutants killed by {tests}, {took:.0f} s")
    return 0 if good else 1


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
