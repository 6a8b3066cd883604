"""Imports only go down the layers; read from the source, not from what happens to be loaded."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import pipelab

ROOT = Path(pipelab.__file__).parent
LAYERS = [
    {
        "action",
        "earliest",
        "table",
        "versions",
        "text",
        "transform",
        "schedule",
        "costs",
        "placement",
        "interrupt",
    },
    {
        "schedules",
        "validate",
        "timeline",
        "trace",
        "kineto",
        "spans",
        "simulate",
        "diagnose",
        "idle",
        "memory",
        "theory",
        "fit",
        "halves",
        "explain",
        "partition",
        "plan",
        "puzzle",
        "search",
    },
    {"executors", "pipeshard", "models", "data", "peers", "plot"},
    {"widgets", "teach", "train", "compare", "cli", "__main__"},
]
LAYER = {name: i for i, names in enumerate(LAYERS) for name in names}
HEAVY = {
    "torch",
    "jax",
    "flax",
    "matplotlib",
    "transformers",
    "torchgpipe",
    "deepspeed",
    "ipywidgets",
    "anywidget",
    "playwright",
    "pandas",
    "safetensors",
    "ortools",
}
FILES = sorted(p for p in ROOT.rglob("*.py") if p != ROOT / "__init__.py")


def unit(path):
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            if node.module == "pipelab":
                yield from ((f"pipelab.{alias.name}", node) for alias in node.names)
            else:
                yield node.module, node


def test_every_file_has_a_layer():
    assert {unit(path) for path in FILES} == set(LAYER)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_down(path):
    here = LAYER[unit(path)]
    for name, node in imports(path):
        top, *rest = name.split(".")
        if top == "pipelab" and rest and rest[0] in LAYER:
            assert LAYER[rest[0]] <= here, f"{path}:{node.lineno} imports {name} from a layer above"
        if here < 2 and top in HEAVY:
            # loaded when first used
            lazy = {
                ("timeline", "pandas"),
                ("measure", "torch"),
                ("halves", "torch"),
                ("exact", "ortools"),
            }
            assert (path.stem, top) in lazy, (
                f"{path}:{node.lineno}: layers 1 and 2 need numpy alone, not {top}"
            )


def test_there_is_no_circle_of_imports():
    graph = {}
    for path in FILES:
        name = ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(
            ".__init__"
        )
        lazy = {
            n.lineno
            for f in ast.walk(ast.parse(path.read_text()))
            if isinstance(f, ast.FunctionDef)
            for n in ast.walk(f)
            if isinstance(n, ast.Import | ast.ImportFrom)
        }
        graph[name] = {
            n for n, node in imports(path) if n.startswith("pipelab.") and node.lineno not in lazy
        }
    import networkx

    edges = networkx.DiGraph(
        [(a, b) for a, targets in graph.items() for b in targets if b in graph and b != a]
    )
    packages = {name for name in graph if (ROOT.parent / Path(*name.split("."))).is_dir()}
    edges.remove_edges_from(
        [(a, b) for a, b in edges.edges if b in packages and a.startswith(f"{b}.")]
    )
    assert networkx.is_directed_acyclic_graph(edges), networkx.find_cycle(edges)


def test_importing_pipelab_loads_nothing_heavy():
    code = "import pipelab, sys; print(*sorted(set(sys.modules) & set(sys.argv[1].split())))"
    done = subprocess.run(
        [sys.executable, "-c", code, " ".join(HEAVY)], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == []


def test_the_library_prints_nothing():
    for path in FILES:
        if unit(path) not in ("cli", "__main__"):
            calls = (
                n.func for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)
            )
            assert not any(isinstance(f, ast.Name) and f.id == "print" for f in calls), path


@pytest.mark.parametrize("path", [p for p in FILES if unit(p) == "executors"], ids=lambda p: p.stem)
def test_the_executors_share_what_needs_no_library_and_the_wings_know_themselves_alone(path):
    place = path.relative_to(ROOT / "executors").parts
    wing = place[0] if len(place) > 1 else None
    lazy = {"run"}  # names its wings inside its two functions
    tree = ast.parse(path.read_text())
    inside = {n for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) for n in ast.walk(f)}
    nodes = {(node.lineno, node.col_offset) for node in inside if isinstance(node, ast.ImportFrom)}
    for name, node in imports(path):
        for other, libraries in (
            ("torch", {"torch", "safetensors"}),
            ("jax", {"jax", "flax", "optax"}),
        ):
            if wing == other or (path.stem in lazy and (node.lineno, node.col_offset) in nodes):
                continue
            assert name.split(".")[0] not in libraries, f"{path}:{node.lineno} imports {name}"
            assert not name.startswith(f"pipelab.executors.{other}"), f"{path}:{node.lineno}"


@pytest.mark.parametrize("names", [("run", "stage", "device", "trainer")])
def test_the_wings_mirror_each_other(names):
    for wing in ("torch", "jax"):
        assert {f"{name}.py" for name in names} <= {
            p.name for p in (ROOT / "executors" / wing).iterdir()
        }
