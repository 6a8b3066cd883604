"""Models as lists of layers, to be cut into stages: an MLP here, GPT-2 in `pipelab.models.gpt2` (it loads transformers)."""

from pipelab.models.layers import mlp, parameters, split

__all__ = ["mlp", "parameters", "split"]
