"""The costs of a transformer, by the published formulas.

A micro-batch of b samples, on one of t devices that share every layer and of c that share every
sequence of s tokens: T = b s / c tokens. h hidden, a heads, k the width of all key heads, f of the
feed-forward layer with g matrices (2; 3 with a gate), e of E experts used by a token.

| quantity | formula | source |
|---|---|---|
| a product's seconds | 2 T x y / (flops share) (1 + narrow (1/T + 1/x + 1/y)) | fitted |
| products of a layer | h (h + 2 k) / t, h^2 / t, e g f h / t | arXiv 2104.04473, appendix |
| scores and values | 4 T s h / t FLOPs; causal flash kernels do half | the same; 2307.08691 |
| their backward | twice that, all of it in I; flash: 2.5 times | 2401.10241, table 1; 2307.08691 |
| read and written besides | T (22 h + 2 g e f / t) bytes; without flash 13 a s T / t | counted |
| all-reduces of a pass | 2 of 2 T h bytes among t | 2104.04473, section 3.2 |
| keys and values of a pass | an all-gather of 4 T k / t bytes among c | 2407.21783, section 3.3.2 |
| tokens to their experts | an all-to-all of 2 e T h / t bytes there and one back | 2006.16668 |
| kept, all | T (10 h + (4 h + 4 k + 4 e f) / t); without flash 5 a s T / t | 2205.05198 |
| kept, selective | the same without 5 a s T / t, which I makes again | 2205.05198, section 5 |
| kept, full | the layer's input, 2 T h; I makes the forward again | 2205.05198, section 5 |
| with a gate | 8 for 10: no dropout; gate and width are multiplied again, not kept | assumed |
| with sequence parallelism | the 10, the input, the 22 are over t, too | 2205.05198, section 4.2 |
"""

from dataclasses import dataclass

from pipelab.optimize.cut.profiles import Layer, Profile
from pipelab.optimize.plan.machine import Machine
from pipelab.table.action import check_counts

KEEP = ("all", "selective", "full")  # what is kept of a layer from its forward to its backward
MOST_LAYERS = 2000  # of which a plan can cut


@dataclass(frozen=True)
class Transformer:
    """A GPT of equal layers, in half precision.

    key_heads  of grouped-query attention; as many as heads unless given
    feed       width of the feed-forward layer; 4 times hidden unless given
    gated      whether that has a gate (SwiGLU): three matrices, no biases, no learned positions
    experts    copies of it, of which a token uses `active`

    >>> gpt3 = Transformer(layers=96, hidden=12288, heads=96, sequence=2048, vocabulary=51200)
    >>> f"{gpt3.parameters:.4g} parameters, {gpt3.flops(1536):.3g} FLOPs a batch"
    '1.746e+11 parameters, 4.51e+18 FLOPs a batch'
    >>> llama = Transformer(126, 16384, 128, 8192, 128256, key_heads=8, feed=53248, gated=True)
    >>> f"{llama.parameters + llama.hidden * llama.vocabulary:.4g} with its head"
    '4.058e+11 with its head'
    """

    layers: int
    hidden: int
    heads: int
    sequence: int
    vocabulary: int
    key_heads: int = 0
    feed: int = 0
    gated: bool = False
    experts: int = 1
    active: int = 1

    def __post_init__(self) -> None:
        feed = self.feed or 4 * self.hidden
        vars(self).update(key_heads=self.key_heads or self.heads, feed=feed)
        check_counts(**{name: size for name, size in vars(self).items() if name != "gated"})
        if self.hidden % self.heads:
            raise ValueError(
                f"heads={self.heads} hidden={self.hidden}: give a number of heads that divides it"
            )
        if self.heads % self.key_heads:
            raise ValueError(
                f"key_heads={self.key_heads}: give one that divides heads={self.heads}"
            )
        if self.active > self.experts:
            raise ValueError(f"active={self.active}: there are {self.experts} experts")
        if self.layers > MOST_LAYERS:
            raise ValueError(f"layers={self.layers}: give at most {MOST_LAYERS:,}")

    @property
    def _keys(self) -> int:
        return self.hidden // self.heads * self.key_heads

    @property
    def _matrices(self) -> int:
        """Of a feed-forward layer: g of the table above."""
        return 3 if self.gated else 2

    @property
    def _feed_weights(self) -> int:
        return self._matrices * self.hidden * self.feed

    @property
    def parameters(self) -> float:
        """12 l h^2 (1 + 13 / 12 h + (V + s) / 12 l h): arXiv 2104.04473, section 5.1; with all
        experts."""
        return self.layers * sum(self._shares()) + self.hidden * self._words

    @property
    def experts_size(self) -> float:
        """Parameters of a layer's experts; 0 where there is one."""
        return self._shares()[1]

    def _shares(self) -> tuple[float, float]:
        """Parameters of a layer: all but its experts, and these (where there are several)."""
        feeds = self.experts * self._feed_weights
        vectors = 0 if self.gated else 13 * self.hidden  # biases and norms
        rest = 2 * self.hidden * (self.hidden + self._keys) + vectors
        return (rest, feeds) if self.experts > 1 else (rest + feeds, 0)

    @property
    def _words(self) -> int:
        """Rows of the embeddings: words, and learned positions."""
        return self.vocabulary + (0 if self.gated else self.sequence)

    def flops(self, batch: int, recompute: bool = True, causal: bool = False) -> float:
        """96 B s l h^2 (1 + s / 6 h + V / 16 l h): arXiv 2104.04473, section 5.1.

        A forward counts once, a backward twice, and a layer's recomputation (not the head's) once;
        scores all of them, or the half that a causal mask leaves.
        """
        s, h = self.sequence, self.hidden
        weights = 2 * h * (h + self._keys) + self.active * self._feed_weights  # that a token meets
        layer = 2 * s * weights + (2 if causal else 4) * s**2 * h
        head = 2 * s * h * self.vocabulary  # the logits alone: an embedding is looked up
        return batch * ((4 if recompute else 3) * self.layers * layer + 3 * head)

    def profile(
        self,
        machine: Machine,
        tensor: int = 1,
        samples: int = 1,
        context: int = 1,
        expert: int = 1,
        keep: str = "all",
        *,
        flash: bool = True,
        sequence: bool = True,
    ) -> Profile:
        """Its layers for a micro-batch, on one of `tensor` times `context` devices that share it:
        the table above.

        A pipeline keeps the word embedding twice: in its first layer and in the head. Experts are
        shared out over `expert` replicas.
        """
        h, s, k, f, t, c = self.hidden, self.sequence, self._keys, self.feed, tensor, context
        tokens, e, g = samples * s / c, self.active, self._matrices
        peak = machine.flops * machine.share

        def product(x: float, y: float, rows: float = tokens) -> float:
            sides = 1 / rows + 1 / x + 1 / y if rows else 0.0
            return 2 * rows * x * y / peak * (1 + machine.narrow * sides)

        # [1] seconds of a forward: products, scores, what is read and written, messages
        rows = max(tokens * e * expert / self.experts, 1.0)  # of an expert
        feeds = (g - 1) * product(h, f / t, rows) + product(f / t, h, rows)
        products = product(h, (h + 2 * k) / t) + product(h / t, h) + feeds * tokens * e / rows
        scores = (2 if flash else 4) * tokens * s * h / t / peak
        squares = 0 if flash else 13 * self.heads * s * tokens / t / machine.hbm
        split = t if sequence else 1
        moved = tokens * (22 * h / split + 2 * g * e * f / t) / machine.hbm
        sent = 2 * machine.collective(2 * tokens * h, t, 1)
        sent += machine.collective(4 * tokens * k / t * c, c, t, 1)
        among = machine.slowest(expert * t * c)  # by each one's own card
        sent += machine.allreduce(2 * e * tokens * h / t, expert, among)  # there and back
        forward = products + scores + squares + moved + sent
        # [2] its backward, and what it makes again
        inputs = products + (2.5 if flash else 2) * scores + 2 * (squares + moved) + sent
        again = {"all": 0.0, "selective": scores + squares, "full": forward}[keep]
        # [3] bytes
        attention = 0 if flash else 5 * self.heads * s * tokens / t
        whole = tokens * ((8 if self.gated else 10) * h / split + (4 * h + 4 * k + 4 * e * f) / t)
        kept = {"all": whole + attention, "selective": whole, "full": 2 * tokens * h / split}[keep]
        rest, feeds_size = self._shares()
        weights = 2 * (rest + feeds_size / expert) / t
        words = 2 * h * self.vocabulary / t
        output = 2 * tokens * h
        place = 2 * h * (self._words - self.vocabulary)  # learned positions
        embedding = Layer("embedding", weights=words + place, output=output)
        block = Layer("layer", forward, inputs + again, products, weights, kept, output)
        logits = product(h, self.vocabulary / t)
        size = 4 * tokens * (h / split + self.vocabulary / t)
        head = Layer("head", logits, logits, logits, words, size, output)
        return Profile(
            (embedding, *[block] * self.layers, head), samples=samples, machine=machine.name
        )
