"""Evaluation: losses, metrics and outputs of batches, without training."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, inf
from typing import Any

from pipelab.runtime.batches import Trees, mean_losses
from pipelab.runtime.orders import Seen
from pipelab.runtime.result import Run
from pipelab.runtime.stage import CountingStage


@dataclass(frozen=True)
class Observe:
    """What an evaluation asks about each micro-batch, where the model's output is.

    metrics  by name: (output, target) -> a mean, or it and its count
    outputs  whether to return the model's
    """

    metrics: Mapping[str, Callable[[Any, Any], Any]]
    outputs: bool

    def __call__(self, stage: CountingStage, microbatch: int, output: Any, target: Any) -> Seen:
        given_back = stage.given_back(output) if self.outputs else None
        samples, values = stage.fed[microbatch].samples, dict[str, Any]()
        for name, metric in self.metrics.items():
            # What fails is told where the evaluation was asked for: the training goes on.
            try:
                value = metric(*stage.copied((output, target)))
                mean, count = map(float, value if isinstance(value, tuple) else (value, samples))
                if not 0 <= count < inf:
                    raise ValueError(f"it counts {count}")
                values[name] = mean, count
            except Exception as error:
                values[name] = (
                    f"metric {name!r} fails ({type(error).__name__}: {error}): return its mean "
                    "over the samples, one number, or a pair (mean, count)"
                )
        return Seen(values, given_back)


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
        for told, _ in run.seen:
            for name, value in told.items():
                if isinstance(value, str):
                    raise ValueError(value)
                self._metrics.setdefault(name, []).extend(_shares([value], times))
        outputs = [output for _, output in run.seen if output is not None]
        if outputs:
            whole = trees.joined(outputs, run.timeline.schedule.per_sequence)
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
