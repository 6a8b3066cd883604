"""Imports only go down; read from the source, lazy ones too, not from what happens to be loaded.

And what else the source says: what prints, and how long a function is.
"""

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import networkx
import pytest

import pipelab

ROOT = Path(pipelab.__file__).parent

# From the ground up. A room imports what stands before it, and what its own folder holds.
SMALL = ["table", "schedules", "show", "predict", "runtime", "plot", "widgets"]
UPPER = [
    "gpu",
    "training",
    "editor",
    "models",
    "measure",
    "optimize",
    "peers",
    "jax",
    "pipeshard",
    "cli",
]
ROOMS = [*SMALL, *UPPER]
USERS = ("cli",)  # they may import the package itself, as users do
GROUND = ("table", "schedules", "predict")  # plain Python; what they show, too, but for the bar

NAMES = ast.Name | ast.expr_context
TORCH, JAX = {"torch", "safetensors"}, {"jax", "flax", "optax"}


def modules(root):
    """name -> path of every module under root, a package by its own name."""
    found = {}
    for path in sorted(root.rglob("*.py")):
        parts = [root.name, *path.relative_to(root).with_suffix("").parts]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def nodes(path):
    """Every node of a source but its names, which are half of all."""
    found = [ast.parse(path.read_text())]
    for node in found:  # which grows
        found += [n for n in ast.iter_child_nodes(node) if not isinstance(n, NAMES)]
    return found


@pytest.fixture(scope="module", autouse=True)
def _forget():
    yield
    nodes.cache_clear()


def imports(path, known):
    """(module, line) of every import, lazy or not: `from package import module` is the module.

    A string that is the name of one of our modules, or begins it, imports it, whoever takes it.
    """
    root = min(known, default="", key=len)
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in known else node.module, node.lineno
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(
            ("import_module", "__import__")
        ):
            name = [*node.args, *(keyword.value for keyword in node.keywords)][0]
            if isinstance(name, ast.Constant) and not name.value.startswith(f"{root}."):
                assert not name.value.startswith("."), f"{path}: relative import"
                yield name.value, node.lineno
        elif isinstance(node, ast.Constant) and re.fullmatch(rf"{root}\.[\w.:]*", str(node.value)):
            target = node.value.partition(":")[0].rstrip(".")
            if target == root or room(target) in ROOMS:
                yield target, node.lineno


def room(name):
    return name.split(".")[1]


def arrows_up(root):
    """Imports, lazy or not, that go to a room above, or to the package, which knows them all."""
    known = modules(root)
    for name, path in known.items():
        if name in (root.name, f"{root.name}.__main__"):
            continue
        for target, line in imports(path, known):
            if target == root.name and room(name) not in USERS:
                yield f"{path.relative_to(root)}:{line} imports the package itself"
            elif target.startswith(f"{root.name}.") and (
                ROOMS.index(room(target)) > ROOMS.index(room(name))
            ):
                yield f"{path.relative_to(root)}:{line} imports {target}, from a room above"


def test_imports_go_down():
    assert not list(arrows_up(ROOT))


@pytest.mark.parametrize(
    "planted",
    [
        "def f():\n    from pipelab.cli import report",
        "from pipelab import optimize",
        "import pipelab.cli",
        "from importlib import import_module\nf = lambda: import_module('pipelab.measure')",
        "from pipelab import Costs",
        "from importlib import import_module as load\nf = lambda: load('pipelab.measure')",
        "import importlib\nf = lambda x: importlib.import_module(f'pipelab.{x}')",
        "import importlib\nf = lambda: importlib.import_module(name='pipelab.measure.fit')",
        "import sys\nf = lambda: sys.modules['pipelab.measure.fit'].fit",
        "import pkgutil\nf = lambda: pkgutil.resolve_name('pipelab.measure.fit:fit')",
        "LATER = {'fit': 'pipelab.measure.fit'}",
    ],
)
def test_a_planted_arrow_is_seen(planted, tmp_path):
    root = tmp_path / "pipelab"
    for folder in (root, *(root / name for name in ROOMS)):
        folder.mkdir()
        (folder / "__init__.py").write_text("")
    assert not list(arrows_up(root))
    (root / "predict" / "planted.py").write_text(planted)
    (found,) = arrows_up(root)
    assert found.startswith("predict/planted.py:")


def test_every_module_is_in_a_room_and_no_room_imports_in_a_circle():
    known = modules(ROOT)
    assert {path.name for path in ROOT.glob("*.py")} == {"__init__.py", "__main__.py"}
    assert {room(name) for name in known if name.count(".")} == {*ROOMS, "__main__"}
    edges = networkx.DiGraph(
        (name, target)
        for name, path in known.items()
        for target, _ in imports(path, known)
        if name != "pipelab" and target in known and target != name
    )
    # A package may gather what its own modules hold.
    gathered = [(a, b) for a, b in edges.edges if b.startswith(f"{a}.") or a.startswith(f"{b}.")]
    edges.remove_edges_from(gathered)
    assert networkx.is_directed_acyclic_graph(edges), networkx.find_cycle(edges)


def test_the_ground_floor_is_plain_python():
    known = modules(ROOT)
    for name, path in known.items():
        plain = name.count(".") and room(name) in GROUND
        if plain or name.startswith("pipelab.editor.puzzle"):
            for target, line in imports(path, known):
                top = target.split(".")[0]
                assert top == "pipelab" or top in sys.stdlib_module_names, f"{path}:{line}"


@pytest.mark.parametrize("name", ["pipelab", "pipelab.editor.puzzle"])
def test_importing_it_loads_nothing_but_python(name):
    code = f"import sys; old = set(sys.modules); import {name}; print(*set(sys.modules) - old)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.split(".")[0] for name in done.stdout.split()}
    assert loaded - {"pipelab"} <= sys.stdlib_module_names


def test_the_library_prints_nothing():
    for name, path in modules(ROOT).items():
        script = name.startswith("pipelab.peers.scripts.")  # to be copied, and run elsewhere
        if name.count(".") and room(name) not in ("cli", "__main__") and not script:
            calls = (node.func for node in nodes(path) if isinstance(node, ast.Call))
            assert not any(isinstance(f, ast.Name) and f.id == "print" for f in calls), path


def test_functions_have_60_lines_at_most():
    long = [
        node.name
        for path in modules(ROOT).values()
        for node in nodes(path)
        if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno >= 60
    ]
    assert long == ["run"]  # whose docstring is the manual


def test_scripts_that_leave_the_house_need_nothing_of_it():
    known = modules(ROOT)
    scripts = [name for name in known if name.startswith("pipelab.peers.scripts.")]
    own = {name.rpartition(".")[2] for name in scripts}
    assert own
    for name in scripts:
        for target, line in imports(known[name], known):
            top = target.split(".")[0]
            assert top in {"torch", *own, *sys.stdlib_module_names}, f"{name}:{line}"


def test_what_runs_and_trains_knows_torch_in_one_folder_and_jax_nowhere():
    known = modules(ROOT)
    for name, path in known.items():
        if room(f"{name}.") in ("runtime", "training"):
            own = name.startswith("pipelab.runtime.torch")
            for target, line in imports(path, known):
                assert target.split(".")[0] not in (JAX if own else JAX | TORCH), f"{path}:{line}"
                if not own and name != "pipelab.runtime.backends":  # where a backend is chosen
                    assert not target.startswith("pipelab.runtime.torch"), f"{path}:{line}"
