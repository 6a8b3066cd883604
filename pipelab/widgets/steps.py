"""PipeDream's dynamic program, one entry of its table after the other."""

from dataclasses import dataclass
from html import escape

import ipywidgets
import numpy as np

from pipelab.partition import Profile


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


def entries(profile: Profile, devices: int, bandwidth: float = 1e9) -> list[Entry]:
    """The table by the paper's formula, in plain Python, for a chain of layers.

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
                for mine in range(1, n + 1):
                    if (i == 0) != (mine == n):
                        continue  # the first stage has all that is left, others leave something
                    work = time[i:j].sum()
                    sync = 4 * (mine - 1) / mine * weights[i:j].sum() / bandwidth
                    pace = max(work, sync) / mine
                    words = f"layers {i} to {j - 1}" if j > i + 1 else f"layer {i}"
                    words += f" on {mine}: max({work:.3g}, {sync:.3g}) / {mine} = {pace:.3g}"
                    if i:
                        before, link = known[i, n - mine].pace, 2 * output[i - 1] / bandwidth
                        words += f"; A({i}, {n - mine}) = {before:.3g}; link {link:.3g}"
                        pace = max(pace, before, link)
                    candidates.append((words, float(pace)))
            best = int(np.argmin([pace for _, pace in candidates]))
            known[j, n] = Entry(j, n, candidates, best)
    return list(known.values())


class Steps(ipywidgets.VBox):
    """A slider over the entries of the table; below, how the chosen one comes about.

    >>> from pipelab.partition import Layer
    >>> steps = Steps(Profile((Layer("a", forward=3), Layer("b", forward=1))), 2)
    >>> steps.slider.max
    3
    """

    def __init__(self, profile: Profile, devices: int, bandwidth: float = 1e9) -> None:
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
        paces = {(e.j, e.n): f"{e.pace:.3g}" for e in done}
        rows = sorted({e.j for e in self.entries})
        columns = sorted({e.n for e in self.entries})
        lines = ["<th></th>" + "".join(f"<th>n = {n}</th>" for n in columns)]
        for j in rows:
            cells = []
            for n in columns:
                mark = ' style="outline:2px solid #E69F00"' if (j, n) == (now.j, now.n) else ""
                cells.append(f"<td{mark}>{paces.get((j, n), '')}</td>")
            lines.append(f"<th>j = {j}</th>" + "".join(cells))
        table = "".join(f"<tr>{line}</tr>" for line in lines)
        items = "".join(
            f"<li>{'<b>' if k == now.best else ''}{escape(words)} &rarr; {pace:.3g}"
            f"{'</b>' if k == now.best else ''}</li>"
            for k, (words, pace) in enumerate(now.candidates)
        )
        self.view.value = (
            f"<table>{table}</table><p>A({now.j}, {now.n}), the smallest of:</p><ul>{items}</ul>"
        )
