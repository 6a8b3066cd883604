"""The stored lectures' hygiene, and their exercises: right answers pass, wrong ones do not."""

import ast
import re
from itertools import pairwise
from pathlib import Path

import nbformat
import pytest

import draw

FOLDER = Path(__file__).parent.parent / "notebooks"
BOOKS = sorted(FOLDER.glob("*.ipynb"))
PICTURE = re.compile(r"!\[([^\]]*)\]\(\.\./images/([^)]*)\)")
TAGS = {"nbval-ignore-output", "exercise"}
LECTURES = [p for p in BOOKS if p.stem < "90"]  # the others are to play with
by_name = pytest.mark.parametrize("path", BOOKS, ids=lambda p: p.stem)
by_lecture = pytest.mark.parametrize("path", LECTURES, ids=lambda p: p.stem)


def cells(path, kind):
    return [c for c in nbformat.read(path, as_version=4).cells if c.cell_type == kind]


def tags(cell):
    return set(cell.metadata.get("tags", []))


PARTS = (
    "After this you can",
    "Recall.",
    "Predict",
    "Break it",
    "For real",
    "Memory",
    "Exercises",
    "Takeaways",
    "References",
)


# ---- hygiene


def test_there_are_lectures():
    assert [p.stem for p in BOOKS] == [
        "00_start_here",
        "01_inter_layer",
        "02_gpipe",
        "03_pipedream_1f1b",
        "04_work_partitioning",
        "05_pipedream_2bw",
        "06_pipedream_flush",
        "07_interleaved",
        "08_jax_pipelines",
        "09_pipeshard_manual",
        "10_pipeshard_auto",
        "11_sharding_and_pmap",
        "90_design_your_own",
    ]


@by_name
def test_outputs_are_from_one_run_from_top_to_bottom(path):
    code = cells(path, "code")
    assert [c.execution_count for c in code] == list(range(1, len(code) + 1))
    assert any(c.outputs for c in code)


@by_name
def test_no_cell_ends_in_an_error_or_writes_to_stderr(path):
    for cell in cells(path, "code"):
        assert not any(o.output_type == "error" for o in cell.outputs), cell.source
        assert not any(o.output_type == "stream" and o.name == "stderr" for o in cell.outputs), (
            cell.source
        )


@by_name
def test_tags_kernel_and_size(path):
    book = nbformat.read(path, as_version=4)
    assert book.metadata.kernelspec.name == "python3"
    assert path.stat().st_size < 1_500_000
    for cell in cells(path, "code"):
        assert tags(cell) <= TAGS
        assert "clear_output" not in cell.source
        assert len(cell.source.splitlines()) <= 20
    prose = sum(len(PICTURE.sub("", c.source).split()) for c in cells(path, "markdown"))
    assert prose <= 1800
    assert "sanitize" not in book.metadata


@by_name
def test_measured_cells_are_followed_by_one_that_asserts(path):
    code = cells(path, "code")
    for i, cell in enumerate(code):
        if "nbval-ignore-output" in tags(cell):
            asserts = "assert " in cell.source
            following = next(c for c in code[i + 1 :] if "nbval-ignore-output" not in tags(c))
            assert asserts or "assert " in following.source, cell.source


@by_name
def test_a_widget_comes_after_a_static_figure_and_a_line_of_words(path):
    code = cells(path, "code")
    for before, cell in pairwise(code):
        if any(
            "application/vnd.jupyter.widget-view+json" in o.get("data", {}) for o in cell.outputs
        ):
            assert any("image/png" in o.get("data", {}) for o in before.outputs)
            assert any(o.output_type == "stream" for o in before.outputs)
            assert re.match("Explorer of|Editor of|<Steps: ", cell.outputs[0].data["text/plain"])


@by_lecture
def test_the_skeleton(path):
    text = "\n".join(c.source for c in cells(path, "markdown"))
    for part in PARTS:
        assert f"**{part}**" in text or f"## {part}" in text, part


@by_name
def test_the_links_and_a_verdict(path):
    text = "\n".join(c.source for c in cells(path, "markdown"))
    for link in re.findall(r"\]\(([^)]+\.ipynb)\)", text):
        assert (FOLDER / link).exists(), link
    shown = (
        o.get("data", {}).get("text/plain", "") + o.get("text", "")
        for c in cells(path, "code")
        for o in c.outputs
    )
    assert "Check passed" in "".join(shown)


def test_every_picture_is_used_with_its_words():
    pages = [c.source for path in BOOKS for c in cells(path, "markdown")]
    used = {name: alt for page in pages for alt, name in PICTURE.findall(page)}
    assert used == {
        name: alt for name in draw.PICTURES if (alt := draw.alt(name)) and name != "overview.png"
    }
    assert "](images/overview.png)" in (FOLDER.parent / "README.md").read_text()


# ---- exercises

EXERCISES = {
    ("00_start_here", 1): {
        "right": ["answer = 27.0", "answer = 9 * 3"],
        "wrong": ["answer = 30", "answer = 26", "answer = None or 'many'"],
    },
    ("00_start_here", 2): {
        "right": [
            'answer = pl.make("gpipe", 2, 2)',
            'answer = "0F1 0F0 0B1 0B0\\n1F1 1F0 1B1 1B0"',
        ],
        "wrong": [
            'answer = pl.make("inter_layer", 2, 2)',
            'answer = "0F0 0F1 0B0\\n1F0 1F1 1B0"',
            "answer = 9",
        ],
    },
    ("01_inter_layer", 1): {
        "right": ["answer = 4 / 5", "from fractions import Fraction\nanswer = Fraction(4, 5)"],
        "wrong": ["answer = 0.2", "answer = 1 - 1 / 4", "answer = 'most'"],
    },
    ("01_inter_layer", 2): {
        "right": [
            'answer = pl.make("pipedream_flush", 2, 2)',
            'answer = "0F1 0F0 0B1 0B0\\n1F1 1B1 1F0 1B0"',
        ],
        "wrong": [
            'answer = pl.make("inter_layer", 2, 2)',
            'answer = "0F0 0F1 0B1 0B0\\n1F0 1B0 1F1"',
            "answer = 9",
            'answer = "0F0 0B0 0F1 0B1\\n1F1 1F0 1B0 1B1"',
            'answer = pl.make("gpipe", 2, 1)',
            'answer = "0F0, 0B0"',
        ],
    },
    ("02_gpipe", 1): {
        "right": [
            "def answer(p, m=1):\n    while pl.simulate(gpipe(p, m)).bubble.of_total > 0.1001:\n        m += 1\n    return m",
            "answer = lambda p: 9 * p - 9 or 1",
        ],
        "wrong": [
            "answer = lambda p: 10 * (p - 1) or 1",
            "answer = lambda p: 4 * p",
            "answer = lambda p: 9 * (p - 1)",
            "def answer(p):\n    return 1 / 0",
        ],
    },
    ("02_gpipe", 2): {
        "right": ["answer = [3, 5, 5, 1]", "answer = (5, 5, 3, 1)"],
        "wrong": [
            "answer = [4, 3, 3, 4]",
            "answer = [2, 6, 5, 1]",
            "answer = [5, 4, 4]",
            "answer = [5, 5, 4, 0]",
        ],
    },
    ("02_gpipe", 3): {
        "right": [
            'answer = pl.make("pipedream_flush", 4, 8)',
            'answer = pl.make("pipedream_flush", 4, 8).to_torch_csv().replace(",", " ")',
        ],
        "wrong": [
            'answer = pl.make("gpipe", 4, 8)',
            'answer = pl.make("inter_layer", 4, 8)',
            'answer = pl.make("pipedream_flush", 4, 4)',
        ],
    },
    ("03_pipedream_1f1b", 1): {
        "right": ["answer = 4.0", "answer = pipedream(6, 40).weight_versions[2]"],
        "wrong": ["answer = 6", "answer = 3", "answer = 5"],
    },
    ("03_pipedream_1f1b", 2): {
        "right": [
            "answer = lambda t, s, n: t - (n - 1 - s) if t > n - 1 - s else 0",
            "def answer(t, s, n):\n    row = pipedream(n, 8).rows[s]\n    forward = row.index(Action(s, Kind.F, t))\n"
            "    return sum(a.kind is Kind.U for a in row[:forward])",
        ],
        "wrong": [
            "answer = lambda t, s, n: max(0, t - (n - 1))",
            "answer = lambda t, s, n: max(0, t - (n - s))",
            "answer = lambda t, s, n: t - (n - 1 - s)",
            "answer = lambda t, s, n: t",
        ],
    },
    ("04_work_partitioning", 1): {
        "right": ["answer = [2, 3, 3]", "answer = (3, 3, 2)"],
        "wrong": ["answer = [2, 2, 4]", "answer = [8]", "answer = 3", "answer = [4, 4, 0]"],
    },
    ("04_work_partitioning", 2): {
        "right": ["answer = 9.0"],
        "wrong": ["answer = 6", "answer = 8", "answer = 'more than 6'"],
    },
    ("04_work_partitioning", 3): {
        "right": ["answer = lambda n: 2 if n > 6 else 12 / (n - 1)"],
        "wrong": ["answer = lambda n: 12 / (n - 1)", "answer = lambda n: 14 / n"],
    },
    ("04_work_partitioning", 4): {
        "right": [],
        "wrong": ["answer = 'time'", "answer = 'uniform'", "answer = 'size'", "answer = 4"],
    },
    ("05_pipedream_2bw", 1): {
        "right": [
            "from math import ceil\nanswer = lambda p, batches: max(p, ceil(9 * (p - 1) / batches))",
            "def answer(p, batches):\n    m = p\n"
            '    while pl.simulate(pl.make("pipedream_2bw", p, m, batches=batches)).bubble.of_total > 0.1001:\n'
            "        m += 1\n    return m",
        ],
        "wrong": [
            "answer = lambda p, batches: p",
            "answer = lambda p, batches: 9 * (p - 1)",
            "answer = lambda p, batches: max(1, -(-9 * (p - 1) // batches))",
            "answer = lambda p, batches: max(p, 9 * (p - 1) / batches)",
            "answer = lambda p, batches: max(p, -(-10 * (p - 1) // batches))",
        ],
    },
    ("05_pipedream_2bw", 2): {
        "right": [
            "answer = 38.0",
            "answer = sum([10, 10]) + 10 + pl.make('pipedream_2bw', 8, 8).peak_in_flight[0]",
        ],
        "wrong": [
            "answer = 28",
            "answer = 2 * 20 + 8",
            "answer = 8 * 10 + 10 + 8",
            "answer = '38 bytes'",
        ],
    },
    ("06_pipedream_flush", 1): {
        "right": ["answer = pl.make('pipedream_flush', 3, 5)"],
        "wrong": ["answer = pl.make('gpipe', 3, 5)", "answer = '0F0 0F1'", "answer = 3"],
    },
    ("06_pipedream_flush", 2): {
        "right": ["answer = lambda s, p, m, a: a / p * (p - s if m > p - s else m)"],
        "wrong": [
            "answer = lambda s, p, m, a: (p - s) * a / p",
            "answer = lambda s, p, m, a: m * a",
        ],
    },
    ("06_pipedream_flush", 3): {
        "right": ["answer = 66 / 57"],
        "wrong": ["answer = 1", "answer = 2", "answer = '22/19'"],
    },
    ("06_pipedream_flush", 4): {"right": [], "wrong": ["answer = 2", "answer = 0"]},
    ("07_interleaved", 1): {
        "right": [
            "answer = 4.0",
            "def time(v):\n"
            '    return pl.simulate(pl.make("interleaved", 8, 16, virtual=v), Costs(transfer=0.1).split(v)).makespan\n'
            "answer = min(range(1, 9), key=time)",
        ],
        "wrong": [
            "answer = 8",
            "answer = 3",
            "answer = 5",
            "answer = 59.45",
            "answer = 'four'",
            'answer = min(range(1, 9), key=lambda v: pl.simulate(pl.make("interleaved", 8, 16, virtual=v)).bubble.over_ideal)',
        ],
    },
    ("07_interleaved", 2): {
        "right": ["answer = [4, 5]", "answer = (5, 4)"],
        "wrong": [
            "answer = [4, 4, 1]",
            "answer = [3, 3, 3]",
            "answer = [9]",
            "answer = [6, 3]",
            "answer = [4, 4]",
            "answer = [5, 5]",
            "answer = [3, 2]",
            "answer = 63",
            "answer = []",
        ],
    },
    ("08_jax_pipelines", 1): {
        "right": [
            "from math import ceil\nanswer = lambda p, v: max(p, ceil(9 * (p - 1) / v))",
            "def answer(p, v):\n    m = p\n    while spmd.wasted(p, m, v) > 0.1001:\n        m += 1\n    return m",
        ],
        "wrong": [
            "answer = lambda p, v: max(1, 9 * (p - 1))",
            "answer = lambda p, v: max(1, -(-9 * (p - 1) // v))",
            "answer = lambda p, v: max(p, 9 * (p - 1) / v)",
            "answer = lambda p, v: p",
            "answer = lambda p, v: max(p if v > 1 else 1, -(-10 * (p - 1) // v))",
            "answer = lambda p, v: next(m for m in range(1, 99) if spmd.wasted(p, m, v) <= 0.1)",
        ],
    },
    ("08_jax_pipelines", 2): {
        "right": [
            "answer = 56.0",
            "answer = round(8 * spmd.iterations(8, 32, 4) * spmd.wasted(8, 32, 4))",
        ],
        "wrong": [
            "answer = 7",
            "answer = 224",
            "answer = 14",
            "answer = 8 * 8",
            "answer = spmd.wasted(8, 32, 4)",
        ],
    },
    ("09_pipeshard_manual", 1): {
        "right": [
            "def answer(n, d):\n    k = max(1, n // (d + 1))\n"
            "    return min(max(k, (n - k) / d), max(k + 1, (n - k - 1) / d) if k + 1 < n else n)",
            "from fractions import Fraction\nanswer = lambda n, d: min(max(k, Fraction(n - k, d)) for k in range(1, n))",
        ],
        "wrong": [
            "answer = lambda n, d: n / (d + 1)",
            "answer = lambda n, d: max(1, n / (d + 1))",
            "answer = lambda n, d: max(1, (n - 1) / d)",
            "answer = lambda n, d: -(-n // (d + 1))",
            "answer = lambda n, d: min(max(k, (n - k) / d) for k in range(0, n))",
            "def answer(n, d):\n    return n / 0",
        ],
    },
    ("09_pipeshard_manual", 2): {
        "right": ["answer = 648.0", "answer = 12 * sum(16 - min(16, 4 - s) for s in range(4))"],
        "wrong": [
            "answer = 54",
            "answer = 12 * 12",
            "answer = 120",
            "answer = 12 * 4 * (16 - 4)",
            "answer = '648 MiB'",
        ],
    },
    ("10_pipeshard_auto", 1): {
        "right": ["answer = 34.67", "answer = 8 * 4 + 8 / 3"],
        "wrong": [
            "answer = 40",
            "answer = 36",
            "answer = 8 * 10 / 4",
            "answer = 4 / 1.5 + 7 * 4",
            "answer = '35 ms'",
        ],
    },
    ("10_pipeshard_auto", 2): {
        "right": [
            "answer = lambda n, d: n * (n + 1) / 2 * sum(k.bit_length() for k in range(1, d + 1) if d % k == 0)",
        ],
        "wrong": [
            "answer = lambda n, d: n * (n + 1) // 2 * d.bit_length()",
            "answer = lambda n, d: n * d * (d + 1) // 2",
            "answer = lambda n, d: 10 * 6",
            "answer = lambda n, d: n * n * sum(k.bit_length() for k in range(1, d + 1) if d % k == 0)",
            "answer = lambda n, d: 1 / 0",
        ],
    },
    ("10_pipeshard_auto", 3): {
        "right": [
            "def answer(pairs, m):\n    pairs = sorted(pairs)\n    seen = 0\n    best = 10 ** 9\n"
            "    while seen < len(pairs) and m * pairs[seen][0] < best:\n"
            "        best = min(best, pairs[seen][1] + (m - 1) * pairs[seen][0])\n        seen += 1\n"
            "    return seen",
        ],
        "wrong": [
            "answer = lambda pairs, m: len(pairs)",
            "def answer(pairs, m):\n    best, count = float('inf'), 0\n    for t, least in pairs:\n"
            "        if m * t >= best:\n            break\n        best = min(best, least + (m - 1) * t)\n"
            "        count += 1\n    return count",  # not sorted
            "def answer(pairs, m):\n    best, count = float('inf'), 0\n    for t, least in sorted(pairs):\n"
            "        if t >= best:\n            break\n        best = min(best, least + (m - 1) * t)\n"
            "        count += 1\n    return count",
            "answer = lambda pairs, m: None if m == 2 else 3",
        ],
    },
    ("10_pipeshard_auto", 4): {
        "right": [
            "def answer(stages, m):\n    sizes = []\n    for s, (held, more) in enumerate(stages):\n"
            "        sizes.append(held + min(m, len(stages) - s) * more)\n    return max(sizes)",
        ],
        "wrong": [
            "answer = lambda stages, m: max(held + m * more for held, more in stages)",
            "answer = lambda stages, m: max(h + (len(stages) - s) * a for s, (h, a) in enumerate(stages))",
            "answer = lambda stages, m: max(h + min(m, s + 1) * a for s, (h, a) in enumerate(stages))",
            "answer = lambda stages, m: sum(h + a for h, a in stages)",
        ],
    },
    ("11_sharding_and_pmap", 1): {
        "right": [
            "answer = lambda matrices, axes: 9 ** matrices if axes == 2 else (3 ** axes) ** matrices",
            "from itertools import product\nanswer = lambda matrices, axes: sum(1 for _ in product(range(3), repeat=matrices * axes))",
        ],
        "wrong": [
            "answer = lambda matrices, axes: 3 ** matrices",
            "answer = lambda matrices, axes: (3 * axes) ** matrices",
            "answer = lambda matrices, axes: (2 * axes + 1) ** matrices",
            "answer = 81",
        ],
    },
    ("11_sharding_and_pmap", 2): {
        "right": [
            "answer = lambda n, B, N, W: 8 * (n - 1) / n * N * (2 * W if B > 2 * W else B)",
            "from fractions import Fraction\nanswer = lambda n, B, N, W: min(Fraction(n - 1, n) * 16 * N * W, Fraction(n - 1, n) * 8 * B * N)",
        ],
        "wrong": [
            "answer = lambda n, B, N, W: 2 * (n - 1) / n * 4 * min(N * W, B * N)",
            "answer = lambda n, B, N, W: 4 * min(2 * N * W, B * N)",
            "answer = lambda n, B, N, W: 1.5 * 4 * min(2 * N * W, B * N)",
            "answer = lambda n, B, N, W: 2 * (n - 1) / n * 4 * max(2 * N * W, B * N)",
            "answer = lambda n, B, N, W: 2 * (n - 1) / n * 8 * N * W",
        ],
    },
    ("11_sharding_and_pmap", 3): {
        "right": ["answer = 2.0"],
        "wrong": ["answer = 1", "answer = 3", "answer = 'two'"],
    },
    ("11_sharding_and_pmap", 4): {
        "right": ["answer = lambda R, W: 4 * R / (5 * W)"],
        "wrong": [
            "answer = lambda R, W: 0.6 * R / W",
            "answer = lambda R, W: 1.5 * 4 * R * 0.75 / (10 * W)",
            "answer = lambda R, W: 0.8 * W / R",
        ],
    },
}


def exercises(path):
    return [c.source for c in cells(path, "code") if "exercise" in tags(c)]


def solutions(path):
    return [
        s
        for c in cells(path, "markdown")
        for s in re.findall(r"Solution</summary>\s+```python\n(.*?)```", c.source, re.S)
    ]


def grade(path, stub, answer):
    """What the exercise's own check says when the learner's part is `answer`."""
    scope = {}
    setup = re.sub(
        r"%matplotlib inline|jax\.config\.update.*", "", cells(path, "code")[0].source
    )  # jax may be in use here
    core = re.compile(r"def (gpipe|pipedream|inter_layer|interleaved|makespan)\(")
    taught = [
        c.source for c in cells(path, "code") if core.search(c.source) and "exercise" not in tags(c)
    ]
    functions = [
        ast.unparse(n)
        for source in taught
        for n in ast.parse(source).body
        if isinstance(n, ast.FunctionDef)
    ]
    helpers = "\n\n".join(functions)
    exec(f"{setup}\n\n{helpers}", scope)
    *given, check = ast.parse(stub).body
    assert isinstance(check, ast.Expr)
    exec(compile(ast.Module(given, []), "stub", "exec"), scope)
    exec(answer, scope)
    return eval(compile(ast.Expression(check.value), "check", "eval"), scope)


@by_lecture
def test_every_exercise_has_a_solution_a_hint_and_a_stub_that_runs(path):
    stubs = exercises(path)
    assert (
        len(stubs) == len(solutions(path)) == sum((path.stem, i) in EXERCISES for i in range(9)) > 0
    )
    text = "\n".join(c.source for c in cells(path, "markdown"))
    assert text.count("<summary>Hint</summary>") == len(stubs)
    for cell in cells(path, "code"):
        if "exercise" in tags(cell):
            assert "Not attempted yet" in cell.outputs[0].data["text/plain"]


@pytest.mark.parametrize(("name", "number"), EXERCISES)
def test_right_answers_pass_and_wrong_ones_do_not(name, number):
    path = FOLDER / f"{name}.ipynb"
    stub = exercises(path)[number - 1]
    answers = EXERCISES[name, number]
    for answer in [solutions(path)[number - 1], *answers["right"]]:
        assert grade(path, stub, answer).passed is True, answer
    for answer in answers["wrong"]:
        feedback = grade(path, stub, answer)
        assert feedback.passed is False, answer
        assert repr(feedback).startswith("Not yet"), answer


def test_nothing_but_notebooks_in_the_course():
    assert {p.suffix for p in FOLDER.iterdir() if p.is_file()} == {".ipynb"}
