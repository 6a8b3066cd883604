"""Evaluation: losses, metrics and outputs of batches, without training."""

from collections.abc import Sequence
from math import exp, inf
from typing import Any

from pipelab.runtime.batches import Trees, mean_losses
from pipelab.runtime.result import Run


class Evaluation(list):
    """The losses, one per batch, with the metrics and outputs that were asked for.

    outputs  by batch, the model's output for all its samples, on the host
    """

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Any] = []
        self._pieces: list[tuple[float, float]] = []  # (mean, count) of losses by micro-batch
        self._metrics: dict[str, list[tuple[float, float]]] = {}

    def __repr__(self) -> str:
        metrics = "".join(f", {name} {value:.4g}" for name, value in self.metrics.items())
        return f"<Evaluation of {len(self)} batches: loss {self.loss:.4g}{metrics}>"

    def __str__(self) -> str:
        known = {"loss": self.loss, "perplexity": self.perplexity, **self.metrics}
        return ", ".join(f"{name} {value:.4g}" for name, value in known.items())

    def add(self, run: Run, times: int, trees: Trees) -> None:
        """Add a run's results for a batch; the run repeated each sample this many `times`."""
        self += run.losses
        self._pieces += _shares(zip(run.microbatch_losses, run.counts, strict=True), times)
        for measured in run.metrics:
            for name, value in measured.items():
                if isinstance(value, str):
                    raise ValueError(value)
                self._metrics.setdefault(name, []).extend(_shares([value], times))
        if run.outputs:
            whole = trees.joined(run.outputs)
            once = trees.map(lambda leaf: leaf[::times] if times > 1 else leaf, whole)
            self.outputs.append(once)

    @property
    def loss(self) -> float:
        """The mean over everything that counts in all batches, such as tokens."""
        return _mean(self._pieces)

    @property
    def perplexity(self) -> float:
        """The exponential of the loss; of a cross entropy, the number of equally likely tokens."""
        return exp(self.loss) if self.loss < 700 else inf

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics' means over everything that they count in all batches."""
        return {name: _mean(pieces) for name, pieces in self._metrics.items()}


def _shares(pieces: Any, times: int) -> list[tuple[float, float]]:
    return [(mean, count / times) for mean, count in pieces]


def _mean(pieces: Sequence[tuple[float, float]]) -> float:
    return mean_losses(pieces, 1)[0] if pieces else float("nan")
