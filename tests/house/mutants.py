"""How many wrong tokens a room's own tests catch: make mutants.

mutmut changes one token of a function at a time, in a copy of the repository, and runs the tests in
the folder that bears the room's name, no others. A sample of all such mutants, the same each time:

    python tests/house/mutants.py [ROOM ...] [--sample N]

prints those that survive. Exit status 1 if fewer than 95 % are killed.
"""

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROOMS = ("table", "predict")
LEAST = 0.95
SETTINGS = """
[tool.mutmut]
source_paths = ["pipelab/{room}"]
pytest_add_cli_args_test_selection = ["tests/{room}"]
pytest_add_cli_args = ["-q", "-x", "-p", "no:cacheprovider", "-o", "addopts="]
also_copy = ["pipelab", "tests", "conftest.py"]
"""
SURVIVED, NOT_TESTED = 0, 33  # mutmut's exit codes; any other is a mutant that was killed


def outcomes(copy: Path) -> dict[str, int | None]:
    """The exit code of every mutant, by its name; None: it was not run."""
    found = {}
    for file in copy.glob("mutants/**/*.meta"):
        found |= json.loads(file.read_text())["exit_code_by_key"]
    return found


def run_mutants(room: str, sample: int) -> dict[str, int]:
    """The exit codes of a sample of a room's mutants."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in ("pipelab", "tests"):
            shutil.copytree(ROOT / name, copy / name)
        shutil.copy(ROOT / "conftest.py", copy)
        (copy / "pyproject.toml").write_text(
            (ROOT / "pyproject.toml").read_text() + SETTINGS.format(room=room)
        )

        def mutmut(*names: str) -> None:
            command = [sys.executable, "-m", "mutmut", "run", *names]
            subprocess.run(command, cwd=copy, capture_output=True)

        mutmut("none of them")  # writes all mutants and learns which test calls what
        names = sorted(outcomes(copy))
        chosen = random.Random(0).sample(names, min(sample, len(names)))
        mutmut(*chosen)
        done = outcomes(copy)
        return {name: code for name in chosen if (code := done[name]) is not None}


def main() -> int:
    """Print what survived; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rooms", nargs="*", default=ROOMS)
    parser.add_argument("--sample", type=int, default=200, help="mutants of a room")
    options = parser.parse_args()
    passed = True
    for room in options.rooms:
        codes = run_mutants(room, options.sample)
        for name, code in sorted(codes.items()):
            if code in (SURVIVED, NOT_TESTED):
                print("survived " if code == SURVIVED else "not called ", name)
        count = Counter(codes.values())
        killed = 1 - (count[SURVIVED] + count[NOT_TESTED]) / max(len(codes), 1)
        passed = passed and bool(codes) and killed >= LEAST
        print(f"{room}: {killed:.0%} of {len(codes)} mutants killed by tests/{room}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
