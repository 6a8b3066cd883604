"""PipeDream's dynamic program, one entry of its table after the other."""

from dataclasses import dataclass
from html import escape
from typing import Any

import ipywidgets


@dataclass(frozen=True)
class Entry:
    """A(j, n): the best pace of the first j layers on n devices.

    candidates  in words, with their pace
    best        the number of the smallest
    """

    j: int
    n: int
    candidates: list[tuple[str, float]]
    best: int

    @property
    def pace(self) -> float:
        return self.candidates[self.best][1]


def entries(profile: Any, devices: int, bandwidth: float = 1e9) -> list[Entry]:
    """The table by the paper's formula, for a chain of layers: see `Steps`.

    In the order of filling: everything on one device first. ValueError for a graph with branches.
    """
    if not profile.is_chain:
        raise ValueError("the steps are shown for a chain of layers: leave out the branches")
    time, weights, output = (profile.of(name) for name in ("time", "weights", "output"))
    known: dict[tuple[int, int], Entry] = {}
    for n in range(1, devices + 1):
        for j in range(1, len(time) + 1):
            candidates = []
            for i in range(j):
                # The first stage has all that is left, others leave something.
                for mine in range(1, n) if i else [n]:
                    work = sum(time[i:j])
                    sync = 4 * (mine - 1) / mine * sum(weights[i:j]) / bandwidth
                    # Each of them takes every m'-th micro-batch, and the gradients cross meanwhile.
                    pace = max(work, sync) / mine
                    words = f"layers {i} to {j - 1}" if j > i + 1 else f"layer {i}"
                    words += f" on {mine}: max({work:.3g}, {sync:.3g}) / {mine} = {pace:.3g}"
                    if i:
                        # The output there, its gradient back.
                        before, link = known[i, n - mine].pace, 2 * output[i - 1] / bandwidth
                        words += f"; A({i}, {n - mine}) = {before:.3g}; link {link:.3g}"
                        pace = max(pace, before, link)
                    candidates.append((words, float(pace)))
            best = min(range(len(candidates)), key=lambda n: candidates[n][1])
            known[j, n] = Entry(j, n, candidates, best)
    return list(known.values())


class Steps(ipywidgets.VBox):
    """A slider over the entries of the table; below, how the chosen one comes about.

    profile    has the `time`, `weights` and `output` of every layer: `profile.of(name)`
    bandwidth  bytes a second
    """

    def __init__(self, profile: Any, devices: int, bandwidth: float = 1e9) -> None:
        self.entries = entries(profile, devices, bandwidth)
        self.slider = ipywidgets.IntSlider(0, 0, len(self.entries) - 1, description="entry")
        self.view = ipywidgets.HTML()
        self.slider.observe(lambda change: self._show(), "value")
        super().__init__([self.slider, self.view])
        self._show()

    def __repr__(self) -> str:
        return f"<Steps: a table of {len(self.entries)} entries, to be gone through>"

    def _show(self) -> None:
        done, now = self.entries[: self.slider.value + 1], self.entries[self.slider.value]
        # What is not filled yet stays blank.
        paces = {(e.j, e.n): f"{e.pace:.3g}" for e in done}
        last = self.entries[-1]
        lines = ["<th></th>" + "".join(f"<th>n = {n + 1}</th>" for n in range(last.n))]
        for j in range(1, last.j + 1):
            lines.append(f"<th>j = {j}</th>")
            for n in range(1, last.n + 1):
                mark = ' style="outline:2px solid #E69F00"' if (j, n) == (now.j, now.n) else ""
                lines[-1] += f"<td{mark}>{paces.get((j, n), '')}</td>"
        table = "".join(f"<tr>{line}</tr>" for line in lines)
        items = [f"{escape(words)} &rarr; {pace:.3g}" for words, pace in now.candidates]
        items[now.best] = f"<b>{items[now.best]}</b>"
        self.view.value = (
            f"<table>{table}</table><p>A({now.j}, {now.n}), the smallest of:</p>"
            f"<ul>{''.join(f'<li>{item}</li>' for item in items)}</ul>"
        )
