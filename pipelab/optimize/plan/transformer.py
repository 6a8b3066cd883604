"""The costs of a transformer, by the published formulas.

A micro-batch of b samples, on one of t devices that share every layer and of c that share every
sequence of s tokens: T = b s / c tokens. h hidden, a heads, k the width of all key heads, f of the
feed-forward layer with g matrices (2; 3 with a gate), e of E experts used by a token, z experts
used by all; q, k, v, o the widths of all heads' queries, keys, values and outputs (h, k, k, h;
wider with a `head_size` above h / a, or in latent attention).

| quantity | formula | source |
|---|---|---|
| a product's seconds | 2 T x y / (flops share) (1 + narrow (1/T + 1/x + 1/y)) | fitted |
| products of a layer | h (q + k + v) / t, o h / t, (e + z) g f h / t | arXiv 2104.04473, appendix |
| of latent attention | `_attention`: all devices make the latents | 2405.04434, section 2.1 |
| scores and values | 2 T s (q + o) / t FLOPs; causal flash ones do half | 2104.04473; 2307.08691 |
| their backward | twice that, all of it in I; flash: 2.5 times | 2401.10241, table 1; 2307.08691 |
| read and written besides | T (22 h + 2 g (e + z) f / t) bytes; no flash: 13 a s T / t | counted |
| all-reduces of a pass | 2 of 2 T h bytes among t | 2104.04473, section 3.2 |
| keys and values of a pass | an all-gather of 4 T k / t bytes among c (or latents) | 2407.21783 |
| tokens to their experts | an all-to-all of 2 e T h / t bytes there and one back | 2006.16668 |
| kept, all | T (10 h + (2 (q + k + v + o) + 4 (e + z) f) / t); no flash: 5 a s T / t | 2205.05198 |
| kept, selective | the same without 5 a s T / t, which I makes again | 2205.05198, section 5 |
| the same, latent | 2 T (q + k + v) / t less, which I makes again of latents | 2412.19437, 3.2.3 |
| kept, full | the layer's input, 2 T h; I makes the forward again | 2205.05198, section 5 |
| with a gate | 8 for 10: no dropout; gate and width are multiplied again, not kept | assumed |
| with sequence parallelism | the 10, the input, the 22 are over t, too | 2205.05198, section 4.2 |
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from pipelab.optimize.cut.profiles import Layer, Profile
from pipelab.optimize.plan.machine import Machine
from pipelab.table.action import check_counts

KEEP = ("all", "selective", "full")  # what is kept of a layer from its forward to its backward
MOST_LAYERS = 2000  # that a plan can cut
LARGEST_SIZE = 2**53  # a float holds every whole number up to here


class Latent(NamedTuple):
    """Multi-head latent attention (arXiv 2405.04434, section 2.1).

    query  rank of all heads' queries
    key    rank of all heads' keys and values
    nope   width of a head's query and key without positions
    rope   width of the same with rotary positions; all heads share the key's
    value  width of a head's value
    """

    query: int
    key: int
    nope: int
    rope: int
    value: int


@dataclass(frozen=True)
class Transformer:
    """A GPT in half precision; its layers are equal, except perhaps the first ones.

    key_heads  for grouped-query attention; default: heads
    head_size  width of a head; default: hidden / heads
    feed       width of the feed-forward layer, or of an expert; default: 4 times hidden
    gated      whether that layer has a gate (SwiGLU): three matrices, no biases, no learned
               positions, and a head that does not share the embedding's weights
    experts    copies of that layer; a token uses `active` of them
    shared     more copies, which every token uses
    dense      feed-forward widths of the first layers, which have no experts
    latent     sizes of latent attention; default: plain or grouped-query attention

    >>> gpt3 = Transformer(layers=96, hidden=12288, heads=96, sequence=2048, vocabulary=51200)
    >>> f"{gpt3.parameters:.4g} parameters, {gpt3.flops(1536):.3g} FLOPs a batch"
    '1.746e+11 parameters, 4.51e+18 FLOPs a batch'
    >>> deepseek = MODELS["deepseek-v3"]
    >>> f"{deepseek.parameters:.4g} parameters, {deepseek.active_parameters:.3g} a token"
    '6.709e+11 parameters, 3.65e+10 a token'
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
    shared: int = 0
    dense: tuple[int, ...] = ()
    latent: Latent | None = None
    head_size: int = 0

    def __post_init__(self) -> None:
        feed = self.feed or 4 * self.hidden
        vars(self).update(key_heads=self.key_heads or self.heads, feed=feed)
        others = ("gated", "shared", "dense", "latent", "head_size")
        check_counts(**{name: size for name, size in vars(self).items() if name not in others})
        check_counts(
            shared=self.shared or 1,
            head_size=self.head_size or 1,
            **{f"dense[{i}]": x for i, x in enumerate(self.dense)},
        )
        if self.latent is not None:
            if len(self.latent) != len(Latent._fields):
                raise ValueError(f"latent={self.latent}: give {', '.join(Latent._fields)}")
            vars(self)["latent"] = Latent(*self.latent)
            check_counts(**{f"latent {name}": x for name, x in self.latent._asdict().items()})
            if self.head_size:
                raise ValueError(
                    f"head_size={self.head_size}: latent attention has widths of its own; give one "
                    "of the two"
                )
        sizes = {name: size for name, size in vars(self).items() if isinstance(size, int)}
        sizes |= {"dense": max(self.dense, default=0), "latent": max(self.latent or (0,))}
        for name, size in sizes.items():
            if size > LARGEST_SIZE:
                raise ValueError(f"{name}={size}: give at most {LARGEST_SIZE:,}")
        if len(self.dense) > self.layers:
            raise ValueError(
                f"dense has {len(self.dense)} widths, but there are {self.layers} layers: give at "
                "most one width per layer"
            )
        if self.hidden % self.heads and not self.head_size and not self.latent:
            raise ValueError(
                f"heads={self.heads} hidden={self.hidden}: give heads that divide hidden, or "
                "head_size"
            )
        if self.heads % self.key_heads:
            raise ValueError(
                f"key_heads={self.key_heads}: give a number that divides heads={self.heads}"
            )
        if self.active > self.experts:
            raise ValueError(f"active={self.active}: give at most experts={self.experts}")
        if self.layers > MOST_LAYERS:
            raise ValueError(f"layers={self.layers}: give at most {MOST_LAYERS:,}")

    @property
    def _matrices(self) -> int:
        """The matrices of a feed-forward layer: g of the table above."""
        return 3 if self.gated else 2

    @property
    def _feed_weights(self) -> int:
        return self._matrices * self.hidden * self.feed

    def _heads(self, tensor: int = 1) -> tuple[float, float, float, float]:
        """Widths of queries, keys, values and outputs on one of `tensor` devices; of all, q, k, v
        and o of the table above. A device has at least one head's keys and values."""
        if self.latent is None:
            each = self.head_size or self.hidden // self.heads
            query, key = each * self.heads / tensor, each * max(self.key_heads / tensor, 1)
            return query, key, key, query
        query = self.heads * (self.latent.nope + self.latent.rope) / tensor
        value = self.heads * self.latent.value / tensor
        return query, query, value, value

    @property
    def _latents(self) -> int:
        """The latents' width, with the key's rotary part; 0 without latent attention."""
        return self.latent.query + self.latent.key + self.latent.rope if self.latent else 0

    def _attention(self, tensor: int = 1) -> list[tuple[float, float]]:
        """Sides of attention's weights on one of `tensor` devices, the output's first. With latent
        attention, every device makes the latents, and the last two weights take those as input."""
        h = self.hidden
        query, key, value, output = self._heads(tensor)
        if self.latent is None:
            return [(output, h), (h, query + key + value)]
        up = self.heads * self.latent.nope / tensor + value
        return [(output, h), (h, self._latents), (self.latent.query, query), (self.latent.key, up)]

    def _sum(self, of: Callable[["Transformer"], float]) -> float:
        """The sum over all layers, each as a model of such layers."""
        return sum(map(of, self._dense)) + (self.layers - len(self.dense)) * of(self)

    @property
    def _dense(self) -> list["Transformer"]:
        """The first layers, each as a model of such layers."""
        alike = replace(self, experts=1, active=1, shared=0, dense=())
        return [replace(alike, feed=width) for width in self.dense]

    @property
    def parameters(self) -> float:
        """12 l h^2 (1 + 13 / 12 h + (V + s) / 12 l h): arXiv 2104.04473, section 5.1; with all
        experts, without the routers."""
        own_head = self.vocabulary if self.gated else 0
        words = self.hidden * (self._words + own_head)
        return self._sum(lambda layer: sum(layer.sizes())) + words

    @property
    def active_parameters(self) -> float:
        """Parameters of weights that multiply a token: the head's, but not the embedding's."""
        return self._sum(Transformer._met) + self.hidden * self.vocabulary

    def sizes(self, tensor: int = 1) -> tuple[float, float]:
        """Parameters of the last layer on one of `tensor` devices: all but its experts, and those
        of its experts (0 if there is only one)."""
        attention = sum(x * y for x, y in self._attention(tensor))
        feeds = self.experts * self._feed_weights / tensor
        # Biases of q, k, v, o and of both feed-forward matrices; two norms: 13 h of equal heads.
        query, key, value, _ = self._heads()
        vectors = 0 if self.gated else query + key + value + self.feed + 6 * self.hidden
        rest = attention + (vectors + self.shared * self._feed_weights) / tensor
        return (rest, feeds) if self.experts > 1 else (rest + feeds, 0)

    def _met(self) -> float:
        """Weights of a layer's matrices that a token meets."""
        feeds = (self.active + self.shared) * self._feed_weights
        return sum(x * y for x, y in self._attention()) + feeds

    def _scores(self, causal: bool) -> float:
        """FLOPs of a token's scores and values in a layer."""
        query, _, _, output = self._heads()
        return (1 if causal else 2) * self.sequence * (query + output)

    @property
    def _words(self) -> int:
        """Rows of the embeddings: words, and learned positions."""
        return self.vocabulary + (0 if self.gated else self.sequence)

    def flops(self, batch: int, recompute: bool = True, causal: bool = False) -> float:
        """96 B s l h^2 (1 + s / 6 h + V / 16 l h): arXiv 2104.04473, section 5.1.

        A forward counts once, a backward twice, and a layer's recomputation (not the head's) once.
        All scores count, or the half that a causal mask leaves.
        """
        layers = self._sum(lambda layer: 2 * layer._met() + layer._scores(causal))
        head = 2 * self.hidden * self.vocabulary  # the logits alone: an embedding is looked up
        return batch * self.sequence * ((4 if recompute else 3) * layers + 3 * head)

    def profile(
        self,
        machine: Machine,
        tensor: int = 1,
        samples: int = 1,
        context: int = 1,
        expert: int = 1,
        keep: str = "all",
        slices: int = 1,
        *,
        flash: bool = True,
        sequence: bool = True,
    ) -> Profile:
        """Its layers for a micro-batch, on one of the `tensor` times `context` devices that share
        it, by the table above.

        A pipeline keeps the word embedding twice: in its first layer and in the head. `expert`
        replicas share the experts. If sequences are cut into `slices`, costs are of an average one.
        """
        h, t, tokens = self.hidden, tensor, samples * self.sequence / context / slices
        split = t if sequence else 1
        blocks = [
            model._block(machine, tokens, tensor, context, expert, keep, flash=flash, split=split)
            for model in (*self._dense, self)
        ]
        words = 2 * h * self.vocabulary / t
        output = 2 * tokens * h
        place = 2 * h * (self._words - self.vocabulary)  # learned positions
        embedding = Layer("embedding", weights=words + place, output=output)
        logits = machine.product(tokens, h, self.vocabulary / t)
        size = 4 * tokens * (h / split + self.vocabulary / t)
        head = Layer("head", logits, logits, logits, words, size, output)
        blocks += blocks[-1:] * (self.layers - len(blocks))
        return Profile(
            (embedding, *blocks[: self.layers], head), samples=samples, machine=machine.name
        )

    def _block(
        self,
        machine: Machine,
        tokens: float,
        tensor: int,
        context: int,
        expert: int,
        keep: str,
        *,
        flash: bool,
        split: int,
    ) -> Layer:
        """The last layer, for `profile`."""
        h, s, f, t, c = self.hidden, self.sequence, self.feed, tensor, context
        e, g, shared = self.active, self._matrices, self.shared
        expert = expert if self.experts > 1 else 1
        query, key, value, out = self._heads(t)

        def feed(rows: float) -> float:
            up, down = machine.product(rows, h, f / t), machine.product(rows, f / t, h)
            return (g - 1) * up + down

        # [1] seconds of a forward: products, scores, what is read and written, messages
        rows = max(tokens * e * expert / self.experts, 1.0)  # of an expert
        attention = [machine.product(tokens, x, y) for x, y in self._attention(t)]
        products = sum(attention) + feed(rows) * tokens * e / rows + shared * feed(tokens)
        scores = tokens * self._scores(causal=flash) / t / (machine.flops * machine.share)
        squares = 0 if flash else 13 * self.heads * s * tokens / t / machine.hbm
        moved = tokens * (22 * h / split + 2 * g * (e + shared) * f / t) / machine.hbm
        gathered = key + value if self.latent is None else self.latent.key + self.latent.rope
        sent = 2 * machine.collective(2 * tokens * h, t, 1)
        sent += machine.collective(2 * tokens * gathered * c, c, t, 1)
        sent += self.exchange(machine, tokens, t, c, expert)
        forward = products + scores + squares + moved + sent
        # [2] its backward, and what that recomputes
        inputs = products + (2.5 if flash else 2) * scores + 2 * (squares + moved) + sent
        selective = sum(attention[2:]) + (0.0 if flash else scores + squares)
        again = {"all": 0.0, "selective": selective, "full": forward}[keep]
        # [3] bytes
        heads = (0 if self.latent and keep == "selective" else query + key + value) + out
        whole = tokens * ((8 if self.gated else 10) * h / split + 2 * self._latents)
        whole += tokens * (2 * heads + 4 * (e + shared) * f / t)
        squared = 0 if flash else 5 * self.heads * s * tokens / t
        kept = {"all": whole + squared, "selective": whole, "full": 2 * tokens * h / split}[keep]
        rest, feeds = self.sizes(t)
        weights = 2 * (rest + feeds / expert)
        return Layer(
            "layer", forward, inputs + again, products, weights, kept, output=2 * tokens * h
        )

    def exchange(
        self, machine: Machine, tokens: float, tensor: int, context: int, expert: int
    ) -> float:
        """Seconds for tokens to travel to their experts and back, in one pass of a layer."""
        among = machine.slowest(expert * tensor * context)  # by each one's own card
        return machine.allreduce(2 * self.active * tokens * self.hidden / tensor, expert, among)


MODELS = {
    # arXiv 2412.19437, section 4.2, without the part that predicts a second token.
    "deepseek-v3": Transformer(
        *(61, 7168, 128, 4096, 129280),
        feed=2048,
        gated=True,
        experts=256,
        active=8,
        shared=1,
        dense=(18432,) * 3,
        latent=Latent(query=1536, key=512, nope=128, rope=64, value=128),
    ),
    # arXiv 2401.04088, table 1.
    "mixtral-8x7b": Transformer(
        *(32, 4096, 32, 32768, 32000), key_heads=8, feed=14336, gated=True, experts=8, active=2
    ),
    # arXiv 2505.09388, table 2, and its published configuration: wider heads than hidden / heads.
    "qwen3-235b-a22b": Transformer(
        *(94, 4096, 64, 4096, 151936),
        key_heads=4,
        head_size=128,
        feed=1536,
        gated=True,
        experts=128,
        active=8,
    ),
    # arXiv 2407.21783, table 3.
    "llama-3-405b": Transformer(
        *(126, 16384, 128, 8192, 128256), key_heads=8, feed=53248, gated=True
    ),
}
"""Published models, by name."""
