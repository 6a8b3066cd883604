"""The costs of a transformer, by the published formulas."""

from dataclasses import dataclass
from typing import Any

from pipelab.optimize.cut.profiles import Layer, Profile
from pipelab.optimize.plan.machine import Machine
from pipelab.table.action import check_counts


@dataclass(frozen=True)
class Transformer:
    """A GPT of equal layers, in half precision.

    >>> gpt3 = Transformer(layers=96, hidden=12288, heads=96, sequence=2048, vocabulary=51200)
    >>> f"{gpt3.parameters:.4g} parameters, {gpt3.flops(1536):.3g} FLOPs a batch"
    '1.746e+11 parameters, 4.51e+18 FLOPs a batch'
    """

    layers: int
    hidden: int
    heads: int
    sequence: int
    vocabulary: int

    def __post_init__(self) -> None:
        check_counts(**vars(self))
        if self.hidden % self.heads:
            raise ValueError(
                f"heads={self.heads} hidden={self.hidden}: give a number of heads that divides it"
            )

    @property
    def parameters(self) -> float:
        """12 l h^2 (1 + 13 / 12 h + (V + s) / 12 l h): arXiv 2104.04473, section 5.1."""
        h, words = self.hidden, self.vocabulary + self.sequence
        return self.layers * (12 * h**2 + 13 * h) + words * h

    def flops(self, batch: int, recompute: bool = True) -> float:
        """96 B s l h^2 (1 + s / 6 h + V / 16 l h): arXiv 2104.04473, section 5.1.

        A forward counts once, a backward twice, and a layer's recomputation (not the head's) once.
        """
        layers = (4 if recompute else 3) * self.layers * self._layer_flops
        return batch * (layers + 3 * self._head_flops)

    @property
    def _layer_flops(self) -> float:
        s, h = self.sequence, self.hidden
        # 12 h^2 weights of a layer, a product and a sum each; and per pair of tokens h for their
        # score and h for their value.
        return 24 * s * h**2 + 4 * s**2 * h

    @property
    def _head_flops(self) -> float:
        # The logits alone: an embedding is looked up.
        return 2 * self.sequence * self.hidden * self.vocabulary

    def profile(self, machine: Machine, tensor: int = 1) -> Profile:
        """Its layers for one sample, on one of `tensor` devices that share every layer.

        Bytes as in arXiv 2205.05198: activations of a layer s h (10 + 24 / t + 5 a s / h t), which
        is s h (34 + 5 a s / h) on one device; of the head 4 s h, and 4 s V / t for the logits. A
        pipeline keeps the word embedding twice: in its first layer and in the head.
        Tensor parallelism adds two all-reduces of 2 s h bytes to each forward and each backward of
        a layer (arXiv 2104.04473, section 3.2).
        """
        s, h, words = self.sequence, self.hidden, self.vocabulary
        # In half precision: 2 bytes an element.
        boundary = 2 * s * h
        reduce = 2 * machine.allreduce(boundary, tensor, machine.link(tensor))

        def layer(name: str, flops: float, reduce: float, **sizes: Any) -> Layer:
            # A weight gradient needs no all-reduce: each device has the input, and its part of the
            # output.
            seconds = flops / tensor / (machine.flops * machine.share)
            return Layer(
                name, seconds + reduce, seconds + reduce, seconds, output=boundary, **sizes
            )

        embedding = layer("embedding", 0, 0, weights=2 * h * (words / tensor + s))
        block = layer(
            "layer",
            self._layer_flops,
            reduce,
            weights=2 * (12 * h**2 + 13 * h) / tensor,
            activations=s * h * (10 + 24 / tensor) + 5 * self.heads * s**2 / tensor,
        )
        head = layer(
            "head",
            self._head_flops,
            0,
            weights=2 * h * words / tensor,
            activations=4 * s * h + 4 * s * words / tensor,
        )
        return Profile((embedding, *[block] * self.layers, head), machine=machine.name)
