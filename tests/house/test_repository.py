"""The files around the package keep in step with it."""

import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import pipelab
from tests.support import PYTHON

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
README = (ROOT / "README.md").read_text()
GUIDES = sorted((ROOT / "docs").glob("*.md"))
ROOT_PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"]
PAGES = [*(ROOT / name for name in ROOT_PAGES), *GUIDES]


def test_environment_yml_installs_the_project_and_pins_nothing_itself():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    *conda, pip = environment["dependencies"]
    assert conda == [f"python{PROJECT['requires-python']}", "pip"]
    assert pip == {"pip": ["-e .[all]"]}
    extras = PROJECT["optional-dependencies"]
    everything = set(re.findall(r"\w+", extras["all"][0])) - {"pipelab"}
    assert everything == set(extras) - {"all", "gpu"}  # which only some machines can use


@pytest.mark.thorough
def test_what_environment_yml_asks_for_can_be_installed():
    """Dry: what Binder's build reads, resolved against what is installed here."""
    (line,) = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"][-1]["pip"]
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-index", "--quiet"]
    command += ["--no-build-isolation", "--report", "-", *line.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    would = [entry["metadata"]["name"] for entry in json.loads(done.stdout)["install"]]
    assert would == ["pipelab"]


def test_the_citation_and_the_wheel_are_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["title"], citation["version"]) == ("pipelab", pipelab.__version__)
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert "py.typed" in tool["package-data"]["*"] and (ROOT / "pipelab" / "py.typed").exists()


def test_the_workflow_runs_the_two_commands_on_both_pythons():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text())
    job = workflow["jobs"]["test"]
    assert job["strategy"]["matrix"] == {"python": ["3.11", "3.13"]}
    assert [s["run"] for s in job["steps"] if s.get("run", "").startswith("make")] == [
        "make check",
        "make test",
    ]


def test_versions_live_in_one_place():
    for name in ("Makefile", "environment.yml", ".ci/run"):
        assert not re.search(r"(torch|jax|numpy|nbval)[=<>]=?\d", (ROOT / name).read_text())


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_a_page_names_what_there_is(page):
    text = page.read_text()
    for target in re.findall(r"`make ([\w-]+)", text):
        assert re.search(rf"^{target}[: ]", (ROOT / "Makefile").read_text(), re.M), target
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        assert link.startswith("https://") or (page.parent / link).exists(), link


def test_the_readme_is_read_in_three_minutes():
    lines = README.splitlines()
    assert len(lines) <= 110 and len(README.split()) <= 1000 and max(map(len, lines)) <= 120
    for book in (ROOT / "notebooks").glob("*.ipynb"):
        assert f"notebooks/{book.name}" in README
    assert f"| {len(pipelab.SCHEDULES)} by name" in README


def test_schedules_md_names_them_all():
    named = set(re.findall(r"`(\w+)`", (ROOT / "docs" / "schedules.md").read_text()))
    assert set(pipelab.SCHEDULES) <= named


def test_the_site_leads_to_every_guide():
    index = (ROOT / "docs" / "index.md").read_text()
    for page in PAGES:
        name = page.relative_to(ROOT).with_suffix("").as_posix()
        assert name == "docs/index" or f"/{name}" in index, name


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_a_pages_examples_run(page, capsys):
    scope = {}
    text = page.read_text()
    for example in re.findall(r"```python\n(.*?)```", text, re.S):  # one goes on from the other
        exec(example, scope)
        assert "run" not in scope or scope["run"].check.passed
    for output in re.findall(r"```text\n(.*?)```", text, re.S):
        assert output.split() == capsys.readouterr().out.split()


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_a_pages_commands_are_read(page, tmp_path, monkeypatch):
    """Every line of shell that begins pipelab has a command and options that there are."""
    from pipelab.cli import COMMANDS

    monkeypatch.chdir(tmp_path)
    (tmp_path / "costs.json").write_text("{}")
    text = page.read_text()
    lines = "\n".join(re.findall(r"```sh\n(.*?)```", text, re.S)).replace("\\\n", " ").splitlines()
    lines += re.findall(r"`(pipelab [^`]+)`", text)
    found = [re.search(r"(?:^|[ ])pipelab ([a-z]+ .*)", line) for line in lines if line[:1] != "#"]
    for command, *words in (shlex.split(line[1], comments=True) for line in found if line):
        COMMANDS[command].read([word for word in words if word != "&"])
    assert any(found) or page.name not in ("README.md", "schedules.md", "jobs.md", "scaling.md")


def test_make_help_lists_the_targets():
    listed = subprocess.run(
        ["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    for target in (
        "lab",
        "test",
        "test-all",
        "check",
        "notebooks",
        "bench",
        "site",
        "images",
        "clean",
    ):
        assert re.search(rf"^{target} ", listed, re.M), target


def test_a_schedule_is_added_by_one_file(tmp_path):
    """What extending.md says, on a copy of the package: a file, and its name in `__init__`."""
    guide = (ROOT / "docs" / "extending.md").read_text()
    (source,) = re.findall(r"```py\n(.*?)```", guide, re.S)
    name = re.search(r"def (\w+)", source)[1]
    shutil.copytree(Path(pipelab.__file__).parent, tmp_path / "pipelab")
    folder = tmp_path / "pipelab" / "schedules"
    (folder / f"{name}.py").write_text(source)
    listed = (folder / "__init__.py").read_text()
    listed = listed.replace(
        "from pipelab.schedules.looped_bfs",
        f"from pipelab.schedules.{name} import {name}\nfrom pipelab.schedules.looped_bfs",
    ).replace("        looped_bfs,\n", f"        {name},\n        looped_bfs,\n")
    (folder / "__init__.py").write_text(listed)
    command = [PYTHON, "-m", "pipelab", "run", name, "--devices", "3", "--microbatches", "4"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"{name}, measured" in done.stdout
    assert "Check passed" in done.stdout


@pytest.mark.parametrize(
    "path",
    ["pipelab", "tests", "notebooks", "benchmarks", "images", "docs", "Makefile", *ROOT_PAGES],
)
def test_no_path_of_a_machine(path):
    kinds = (".py", ".ipynb", ".md")
    files = (
        [ROOT / path]
        if (ROOT / path).is_file()
        else [p for p in (ROOT / path).rglob("*") if p.suffix in kinds]
    )
    for file in files:
        text = file.read_text()
        assert str(ROOT) not in text, file
        assert not re.search(r"/home/\w|/Users/\w|lib/python3", text) or file == Path(__file__), (
            file
        )
