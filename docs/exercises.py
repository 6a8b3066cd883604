"""Exercises that a page can check: what of a lecture each needs, and if plain Python is enough.

python docs/exercises.py < cells.json    which library each cell lacks in plain Python
"""

import ast
import json
import re
import subprocess
import symtable
import sys
import threading
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
ABSENT = ("torch", "jax", "numpy", "matplotlib", "flax", "optax", "ortools", "pandas", "scipy")
ASKED = re.compile(r'^teach\.(?:check|guess)\("(\d\d-\w)", \w+\)$', re.M)
MAGIC = re.compile(r"(?m)^[%!].*$")
SOLUTION = re.compile(r"Solution</summary>\s+```python\n(.*?)```", re.S)


# ---- what a cell needs of the cells before it


def needed(code: str) -> set[str]:
    """The names that code takes from outside."""
    top = symtable.symtable(code, "cell", "exec")
    tables, names = [top], set()
    while tables:
        table = tables.pop()
        tables += table.get_children()
        for symbol in table.get_symbols():
            if symbol.is_global() or (table is top and symbol.is_referenced()):
                names.add(symbol.get_name())
    return names


def statements(code: str) -> Iterator[tuple[set[str], str]]:
    """The statements of a cell as (names that it makes, its code); imports one name at a time."""
    for node in ast.parse(MAGIC.sub("", code)).body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                one = ast.Import([alias])
                if isinstance(node, ast.ImportFrom):
                    one = ast.ImportFrom(node.module, [alias], node.level)  # type: ignore[assignment]
                yield {alias.asname or alias.name.split(".")[0]}, ast.unparse(one)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield {node.name}, ast.unparse(node)
        elif isinstance(node, ast.Assign):
            stored = (n for target in node.targets for n in ast.walk(target))
            yield {n.id for n in stored if isinstance(n, ast.Name)}, ast.unparse(node)


def before(earlier: list[tuple[set[str], str]], cell: str) -> str:
    """The earlier statements that a cell needs, and those that these need."""
    names, found = needed(cell), []
    for made, code in reversed(earlier):
        if made & names:
            names = (names - made) | needed(code)
            found.append(code)
    return "\n".join(reversed(found))


# ---- what plain Python can check


def exercises(notebook: dict[str, Any]) -> Iterator[tuple[str, dict[str, str]]]:
    """Name -> the code before it, its cell, and the cell with an answer in it."""
    sources = [("".join(c["source"]), c) for c in notebook["cells"]]
    text = "\n".join(source for source, c in sources if c["cell_type"] == "markdown")
    solutions = iter(SOLUTION.findall(text))
    earlier: list[tuple[set[str], str]] = []
    for source, cell in sources:
        if cell["cell_type"] != "code":
            continue
        if found := ASKED.search(source):
            above, last = source[: found.start()], found[0]
            is_guess = "teach.guess" in last
            solved = "my_guess = 0.123" if is_guess else next(solutions)
            yield (
                found[1],
                {
                    "before": before(earlier, f"{above}\n{solved}\n{last}"),
                    "cell": source,
                    "solved": f"{above}\n{solved}\n{last}",
                },
            )
        if "answer" not in source and "my_guess" not in source:
            earlier += statements(source)


@cache
def answerable() -> dict[str, dict[str, str]]:
    """Of every exercise and guess: what `exercises` says, and the library it `lacks`, or ""."""
    books = sorted((ROOT / "notebooks").glob("[0-8]*.ipynb"))
    found = dict(pair for book in books for pair in exercises(json.loads(book.read_text())))
    done = subprocess.run(
        [sys.executable, __file__],
        input=json.dumps([*found.values()]),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    lacks = json.loads(done.stdout.splitlines()[-1])
    return {n: asked | {"lacks": x} for (n, asked), x in zip(found.items(), lacks, strict=True)}


def lacking(asked: dict[str, str]) -> str:
    """The library that a check lacks here, or ""; AssertionError where its own answer fails."""
    *given, last = ast.parse(asked["solved"]).body
    assert isinstance(last, ast.Expr)
    scope: dict[str, Any] = {"__name__": "__main__"}
    try:
        exec(asked["before"], scope)
        exec(compile(ast.Module(given, []), "cell", "exec"), scope)
        feedback = eval(compile(ast.Expression(last.value), "cell", "eval"), scope)
    except ModuleNotFoundError as error:
        return str(error.name).partition(".")[0]
    except NameError:
        return "the lecture's run"
    if "teach.guess" in asked["solved"]:
        return ""
    if missing := re.search(r"import of (\w+) halted|start new (thread)", feedback.text):
        return missing[1] or "threads"
    assert feedback.passed, (asked["solved"], feedback)
    return ""


def no_thread(*_: Any) -> None:
    raise RuntimeError("can't start new thread")  # as in a page


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "notebooks")]
    sys.modules |= dict.fromkeys(ABSENT)  # type: ignore[arg-type]  # importing one fails
    threading.Thread.start = no_thread  # type: ignore[assignment, method-assign]
    print(json.dumps([lacking(asked) for asked in json.load(sys.stdin)]))
