"""GPT-2 as layers, and the text that ships with Python."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

from pipelab import make, run
from pipelab.models import data, losses, mlp, split
from pipelab.models.gpt2 import gpt2, next_token_loss
from pipelab.optimize.cut import uniform


def test_the_layers_are_the_model(tmp_path):
    """The path of published weights, on a folder as transformers saves it."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "n_positions": 16, "n_embd": 8, "n_layer": 3, "n_head": 2}
    config = GPT2Config(**sizes, bos_token_id=None, eos_token_id=None)
    model = GPT2LMHeadModel(config).eval()
    model.save_pretrained(tmp_path)
    layers = gpt2(pretrained=str(tmp_path))
    assert len(layers) == 5
    tokens = torch.randint(50, (2, 16))
    logits = torch.nn.Sequential(*layers)(tokens)
    assert torch.allclose(logits, model(tokens).logits, atol=1e-6)
    # and its loss, and every gradient of it
    shifted, target = tokens[:, :-1], tokens[:, 1:]
    next_token_loss(torch.nn.Sequential(*layers)(shifted), target).backward()
    model(tokens, labels=tokens).loss.backward()
    (embedding, *_, head) = layers
    tied = embedding.word.weight.grad + head.project.weight.grad
    assert torch.allclose(tied, model.transformer.wte.weight.grad, atol=1e-6)
    others = [p for p in model.transformer.parameters()][1:]
    mine = [p for layer in layers for p in layer.parameters()][1:-1]
    assert len(mine) == len(others)
    for a, b in zip(mine, others, strict=True):
        assert a.shape == b.shape and torch.allclose(a.grad, b.grad, atol=1e-6)


def test_it_learns_on_real_text():
    torch.manual_seed(0)
    corpus = data.corpus(300)
    batches = data.batches(corpus.tokens, 30, 16, 16)
    stages = split(gpt2(vocabulary=300, length=16, width=32, blocks=2), [2, 2])
    result = run(
        make("gpipe", 2, 4, batches=30),
        stages,
        batches,
        next_token_loss,
        partial(torch.optim.Adam, lr=1e-2),
    )
    assert result.check.passed
    assert result.losses[-1] < result.losses[0] - 1


def test_the_text_is_prose_with_known_words():
    assert 300_000 < len(data.text()) < 1_000_000
    corpus = data.corpus(1024)
    assert len(corpus.vocabulary) == 1024 and corpus.tokens.max() == 1023
    words = [corpus.vocabulary[i] for i in corpus.tokens[:2000]]
    assert {"Ġthe", "Ġof"} <= set(words)


def test_batches_are_shifted_by_one_and_seeded():
    tokens = torch.arange(100)
    (x, y), _ = data.batches(tokens, 2, 3, 5)
    assert x.shape == y.shape == (3, 5)
    assert torch.equal(x + 1, y)
    assert torch.equal(x, data.batches(tokens, 2, 3, 5)[0][0])
    assert not torch.equal(x, data.batches(tokens, 2, 3, 5, seed=1)[0][0])


def test_uniform_and_mlp():
    assert uniform(14, 4) == [4, 4, 3, 3]
    with pytest.raises(ValueError, match="5 stages for 4 layers"):
        uniform(4, 5)
    assert torch.nn.Sequential(*mlp(layers=3, width=4, inputs=7, outputs=2))(
        torch.ones(1, 7)
    ).shape == (1, 2)


@pytest.mark.parametrize("seed", range(3))
def test_gradients_of_the_mlp_keep_their_size(seed):
    """Of every layer's weights and biases: no gradient of a deep model is a rounding error."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(*mlp(layers=32, width=64))
    x, y = torch.randn(32, 64), torch.randn(32, 64)
    torch.nn.functional.mse_loss(model(x), y).backward()
    assert_alike([[p.grad.norm().item() for p in layer.parameters()] for layer in model])


def test_gradients_of_the_flax_mlp_keep_their_size():
    import jax

    from pipelab.models import flax_mlp

    stages = flax_mlp.mlp(stages=24, width=64)
    x, y = (jax.random.normal(jax.random.key(k), (32, 64)) for k in (0, 1))

    def loss(variables):
        out = x
        for (module, _), own in zip(stages, variables, strict=True):
            out = module.apply(own, out)
        return ((out - y) ** 2).mean()

    gradients = jax.jit(jax.grad(loss))([variables for _, variables in stages])
    layers = [layer for stage in gradients for layer in stage["params"].values()]
    assert_alike([[float((g**2).sum()) ** 0.5 for g in (d["kernel"], d["bias"])] for d in layers])


def assert_alike(norms):
    """All within a factor of 10 of the last layer's: weights with weights, biases with biases."""
    for of_layers in zip(*norms, strict=True):
        for norm in of_layers:
            assert 0.1 < norm / of_layers[-1] < 10


def test_split_into_a_number_of_stages():
    layers = [nn.Linear(2, 2) for _ in range(7)]
    assert [len(stage) for stage in split(layers, 3)] == [3, 2, 2]
    assert [len(stage) for stage in split(layers, torch.tensor([7]).numpy()[0])] == [1] * 7
    for stages, why in ((8, "stages=8 for 7 layers"), (0, "stages=0")):
        with pytest.raises(ValueError, match=why):
            split(layers, stages)


def test_padding_without_a_count_is_warned_of():
    """A mean over the tokens of each micro-batch is not that of the batch."""
    tokens = torch.randint(8, (4, 6))
    tokens[0, 1:] = losses.PADDING
    stages = [nn.Embedding(8, 8), nn.Linear(8, 8)]
    x = tokens.clamp(min=0)
    given = make("gpipe", 2, 2), stages, [(x, tokens)]
    # Also behind a batch of probabilities, which cannot be padded.
    soft = [(x, torch.rand(4, 6, 8).softmax(-1)), (x, tokens)]

    def mean(y, target):
        return F.cross_entropy(y.flatten(0, 1), target.flatten(0, 1))

    for batches in given[2], soft:
        arguments = make("gpipe", 2, 2, batches=len(batches)), stages, batches, mean
        with pytest.warns(UserWarning, match=r"targets hold -100, .* no count: .* \(mean, coun"):
            run(*arguments, partial(torch.optim.SGD, lr=0.1), check=False)
    found = run(*given, losses.masked_loss, partial(torch.optim.SGD, lr=0.1)).losses[0]
    logits = stages[1](stages[0](tokens.clamp(min=0)))
    assert found == pytest.approx(float(losses.next_token_loss(logits, tokens)))
