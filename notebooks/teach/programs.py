"""The program that grows from lecture to lecture: what a step changes, and how to start it."""

import html
import os
import subprocess
import sys
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

COLOURS = {"-": "rgba(220, 80, 60, 0.22)", "+": "rgba(60, 160, 80, 0.25)"}  # on light and dark


def torchrun(program: str | Path, ranks: int = 2) -> None:
    """Start a program on each of so many ranks; print what they print, sorted.

    It is `torchrun --nproc-per-node 2 PROGRAM`. RuntimeError, with what the ranks said, if one of
    them fails.
    """
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    here = {"OMP_NUM_THREADS": "1"} | os.environ  # the ranks share the cores
    if sys.platform == "linux":
        here.setdefault("GLOO_SOCKET_IFNAME", "lo")  # they need no network
    with TemporaryDirectory() as folder:
        command += ["--redirects=1", f"--log-dir={folder}"]  # in one stream their lines would mix
        done = subprocess.run(
            [sys.executable, *command, str(program)],
            capture_output=True,
            text=True,
            timeout=240,
            env=here,
        )
        told = [file.read_text() for file in Path(folder).rglob("stdout.log")]
    if done.returncode:
        raise RuntimeError(f"{program} failed:\n{done.stderr[-4000:]}")
    print(*sorted("".join(told).splitlines()), sep="\n")


@dataclass(frozen=True)
class Difference:
    """A program's lines beside another one's, displayed as the changed ones and a line around.

    lines  (sign, line): "-" goes, "+" is new, " " stays, "⋮" leaves out what stays
    """

    before: str
    after: str
    lines: tuple[tuple[str, str], ...]

    @property
    def title(self) -> str:
        signs = [sign for sign, _ in self.lines]
        counts = f"{signs.count('+')} lines are new, {signs.count('-')} go"
        return f"{self.after}, beside {self.before}: {counts}"

    def __repr__(self) -> str:
        return "\n".join([self.title, *(f"{sign} {line}".rstrip() for sign, line in self.lines)])

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        shown = [
            f'<div style="background: {COLOURS.get(sign, "none")}">{sign} {html.escape(line)}</div>'
            for sign, line in self.lines
        ]
        pre = '<pre style="line-height: 1.4; overflow-x: auto">'
        page = f"<div>{html.escape(self.title)}</div>{pre}{''.join(shown)}</pre>"
        return {"text/plain": repr(self), "text/html": page}


def difference(before: str | Path, after: str | Path) -> Difference:
    """What a program changes of another one, without their docstrings."""
    before, after = Path(before), Path(after)
    old, new = (path.read_text().partition('\n"""\n')[2].splitlines() for path in (before, after))
    matcher = SequenceMatcher(None, old, new, autojunk=False)
    lines: list[tuple[str, str]] = []
    for group in matcher.get_grouped_opcodes(1):
        lines += [("⋮", "")] * bool(lines)
        for kind, a, b, c, d in group:
            if kind == "equal":
                lines += [(" ", line) for line in old[a:b] if line]
            else:
                lines += [("-", line) for line in old[a:b]]
                lines += [("+", line) for line in new[c:d]]
    return Difference(before.name, after.name, tuple(lines))
