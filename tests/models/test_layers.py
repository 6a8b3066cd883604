"""Models of transformers in layers: equal to the model, trained as it is by a plain loop."""

import copy
import pickle
from collections import Counter
from functools import partial

import pytest
import torch
import transformers
from torch import nn

import pipelab
from pipelab.models import layers_of, load, split
from pipelab.models.losses import causal_loss, masked_loss
from tests.conftest import thorough
from tests.models.test_proof import through

SIZES = dict(
    vocab_size=64,
    hidden_size=32,
    num_hidden_layers=4,
    num_attention_heads=4,
    intermediate_size=48,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
GROUPED = SIZES | dict(num_key_value_heads=2)
T5 = dict(vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=3, num_heads=4)
NO_DROPOUT = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
KINDS = {
    "GPT2LMHeadModel": dict(
        vocab_size=64, n_positions=64, n_embd=32, n_layer=4, n_head=4, bos_token_id=1,
        eos_token_id=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    ),
    "LlamaForCausalLM": GROUPED | dict(tie_word_embeddings=True),
    "Qwen2ForCausalLM": GROUPED
    | dict(use_sliding_window=True, sliding_window=4, max_window_layers=2),
    "Qwen3ForCausalLM": GROUPED | dict(head_dim=8),
    "MistralForCausalLM": GROUPED | dict(sliding_window=4),
    "GemmaForCausalLM": GROUPED | dict(head_dim=8),
    "Gemma2ForCausalLM": GROUPED | dict(head_dim=8, sliding_window=4),
    "PhiForCausalLM": GROUPED,
    "OPTForCausalLM": SIZES | dict(ffn_dim=48, word_embed_proj_dim=16, dropout=0.0),
    "GPTNeoXForCausalLM": SIZES,
    "BertForMaskedLM": SIZES | NO_DROPOUT,
    "T5ForConditionalGeneration": T5 | dict(decoder_start_token_id=0, dropout_rate=0.0),
    "ViTForImageClassification": NO_DROPOUT
    | dict(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=48,
        image_size=16, patch_size=4, num_labels=5,
    ),
}  # fmt: skip
SHORT = ("LlamaForCausalLM", "T5ForConditionalGeneration", "ViTForImageClassification")
# Around their blocks they do what Llama, Qwen2 and Gemma2 do.
ALIKE = ("Qwen3ForCausalLM", "MistralForCausalLM", "GemmaForCausalLM")


def model_of(kind, **change):
    torch.manual_seed(0)
    made = getattr(transformers, kind)
    return made(made.config_class(**KINDS[kind] | change)).double()


def batch_of(model, width, samples=8):
    """Inputs, half of the samples with padding, and targets."""
    draw = torch.Generator().manual_seed(width)
    if model.main_input_name == "pixel_values":
        images = torch.rand(samples, 3, 16, 16, generator=draw, dtype=torch.float64)
        return {"pixel_values": images}, torch.randint(5, (samples,), generator=draw)
    tokens = torch.randint(3, 64, (samples, width), generator=draw)
    mask = torch.ones_like(tokens)
    for i in range(samples // 2):
        mask[i, width - i :] = 0
    given = {"input_ids": tokens, "attention_mask": mask}
    if model.config.is_encoder_decoder:
        given["decoder_input_ids"] = tokens.flip(1)
    return given, tokens.masked_fill(mask == 0, -100)


def loss_of(model):
    if model.main_input_name == "pixel_values":
        return nn.functional.cross_entropy
    return causal_loss if "Causal" in type(model).__name__ else masked_loss


@pytest.mark.parametrize("kind", [*(k for k in KINDS if k not in ALIKE), *thorough(*ALIKE)])
def test_the_layers_compute_what_the_model_does(kind):
    model = model_of(kind)
    layers = layers_of(model)
    assert model.training and all(layer.training for layer in layers)
    own = {id(p) for p in model.parameters()}
    assert {id(p) for layer in layers for p in layer.parameters()} == own
    # No weight is in two layers but that of the tokens, where it is the head's, too.
    held = Counter(id(p) for layer in layers for p in layer.parameters())
    repeated = {weight for weight, count in held.items() if count > 1}
    assert not repeated or repeated == {id(model.get_input_embeddings().weight)}
    for width in (7, 12):  # neither the sample's width nor its number of samples
        given, _ = batch_of(model, width, samples=6)
        for some in (given, {n: x[3:] for n, x in given.items()}):  # the latter without padding
            found = through(copy.deepcopy(layers), some)
            assert torch.equal(found, model(**some).logits)


@pytest.mark.parametrize("kind", [*SHORT, *thorough(*(k for k in KINDS if k not in SHORT))])
def test_trained_as_by_a_plain_loop_on_three_stages_then_on_two_and_put_back(kind, tmp_path):
    model, adam = model_of(kind), partial(torch.optim.AdamW, lr=1e-2)
    plain, layers, loss = copy.deepcopy(model), layers_of(model), loss_of(model)
    batches = [batch_of(model, width) for width in (9, 12, 7, 10)]
    third = len(layers) // 3

    def on(balance, more, resume=None):
        stages = split(layers, [*balance, len(layers) - sum(balance)])
        schedule = pipelab.make("pipedream_flush", len(stages), 4)
        with pipelab.Trainer(schedule, stages, loss, adam, resume=resume) as trainer:
            assert all(step.check.passed for step in trainer.fit(more) if step.check)
            trainer.save(tmp_path / str(trainer.number))

    on([third, third], batches[:2])
    on([third + 1], batches[2:], tmp_path / "2")
    steps = adam(plain.parameters())
    for x, y in batches:
        steps.zero_grad()
        found = loss(plain(**x).logits, y)
        (found[0] if isinstance(found, tuple) else found).backward()
        steps.step()
    load([nn.Sequential(*layers)], tmp_path / "4")
    # Some norms compute in float32, whatever they are given.
    exact = {"Llama", "Qwen", "Mistral", "Gemma", "T5"}
    off = 1e-4 if any(name in kind for name in exact) else 1e-11
    for (name, found), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        apart = float((found - expected).abs().max())
        assert apart <= off, name
    model.save_pretrained(tmp_path / "model")
    loaded = type(model).from_pretrained(tmp_path / "model", dtype=torch.float64)
    for (name, found), expected in zip(loaded.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(found, expected), name


def test_in_processes_with_other_widths_in_every_batch():
    model = model_of("GPT2LMHeadModel")
    stages = split(layers_of(model), [3, 3])
    schedule = pipelab.make("gpipe", 2, 4, batches=3)
    batches = [batch_of(model, width) for width in (9, 12, 5)]
    sgd = partial(torch.optim.SGD, lr=0.1)
    given = schedule, stages, batches, causal_loss, sgd
    run = pipelab.run(*given, backend="processes", timeout=120)
    assert run.check.passed
    assert run.losses == pytest.approx(pipelab.run(*given, check=False).losses)


def test_layers_are_kept_in_files_and_their_weights_in_the_model():
    model = model_of("LlamaForCausalLM")
    given, _ = batch_of(model, 9)
    layers, tokens = layers_of(model), given["input_ids"]
    kept = pickle.loads(pickle.dumps(layers))
    assert torch.equal(through(kept, given), model(**given).logits)
    assert torch.equal(through(layers, tokens), model(tokens).logits)  # the main input alone


class Glued(nn.Module):
    """Blocks as a user writes them; with what is hard to cut."""

    main_input_name = "x"

    def __init__(self, turns=1, gate=None, least=None, drop=0.0, rate=0.0):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 4), nn.Dropout(rate))
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.turns, self.least, self.drop = turns, least, drop
        self.gate = None if gate is None else nn.Parameter(torch.tensor(gate))
        self.extra = nn.Linear(4, 4)

    def forward(self, x, more=None):
        begun = x = self.first(given := x)
        for _ in range(self.turns):
            for block in self.blocks:
                if self.training and torch.rand([]) < self.drop:
                    continue
                x = block(x)
        x = x if self.gate is None else x + self.gate * begun
        x = x if self.least is None else x * (1 + (given - self.least).relu().sum())
        return x if more is None else x + self.extra(more)


def test_an_output_that_layers_leave_out_is_told_of():
    config = transformers.BertConfig(**KINDS["BertForMaskedLM"])
    with pytest.warns(UserWarning, match="a BertModel also returns pooler_output"):
        layers_of(transformers.BertModel(config))


def test_a_model_of_ones_own():
    model, x = Glued(), torch.randn(3, 4)
    layers = layers_of(model, {"x": x})
    assert len(layers) == 5
    assert torch.equal(through(layers, x), model(x))
    assert [len([*layer.parameters()]) for layer in layers] == [2, 2, 2, 2, 0]
    with pytest.raises(
        ValueError, match="this batch has 'more', which the sample of layers_of did not"
    ):
        through(layers, {"x": x, "more": x})
    layers = layers_of(model, {"x": x, "more": x})
    for given in ({"x": x, "more": 2 * x}, {"x": 9 * x}):
        assert torch.equal(through(layers, given), model(**given))


@pytest.mark.parametrize("rate", [0.0, 0.1])
@pytest.mark.parametrize("gate", [0.0, 0.5])
def test_what_is_read_after_the_blocks_is_found_though_the_sample_does_not_show_it(gate, rate):
    """Weights that begin as zeros, and inputs that count when they are large."""
    x = torch.randn(3, 4).clamp(max=4)
    for least in (None, 5.0):
        model = Glued(gate=gate, rate=rate, least=least)
        layers = layers_of(model, {"x": x})
        nn.init.ones_(model.gate)
        for given in (x, 9 * x, torch.randn(5, 4)):
            torch.manual_seed(1)
            found = through(layers, given)
            torch.manual_seed(1)
            assert torch.equal(found, model(given))


def test_a_module_that_the_sample_does_not_need_is_named():
    class Two(Glued):
        def forward(self, x, more):
            x = super().forward(x)
            return x + self.extra(more) if more.sum() > 0 else x

    layers = layers_of(Two(), {"x": torch.ones(3, 4), "more": torch.zeros(3, 4)})
    with pytest.raises(ValueError, match="needs its extra for this batch, but not for the sample"):
        through(layers, {"x": torch.ones(3, 4), "more": torch.ones(3, 4)})


def test_blocks_that_are_left_out_by_chance_are_told_of():
    x = {"x": torch.ones(3, 4)}
    with pytest.raises(ValueError, match="skips some of its blocks of blocks in training, but a"):
        layers_of(Glued(drop=0.999), x)
    layers = layers_of(model := Glued(), x)
    layers[0].shell.drop = 0.999
    assert model.drop == 0
    with pytest.raises(ValueError, match="skips some of its blocks for this batch"):
        through(layers, x)


class Telling(nn.Module):
    """Tells its blocks something besides what passes through them."""

    def __init__(self, what):
        super().__init__()
        self.blocks, self.what = nn.ModuleList(Told(4, 4) for _ in range(2)), what

    def forward(self, x):
        for block in self.blocks:
            x = block(x, self.what(x))
        return x


class Told(nn.Linear):
    def forward(self, x, what):
        return super().forward(x)


def test_other_numbers_than_in_the_sample_are_told_of():
    layers = layers_of(Telling(lambda x: len(x) / 10), {"x": torch.ones(3, 4)})
    through(layers, {"x": torch.ones(3, 4)})
    with pytest.raises(ValueError, match=r"calls a block with what=0\.5, but with 0\.3"):
        through(layers, {"x": torch.ones(5, 4)})


def test_what_is_no_tensor_and_no_number_is_refused():
    with pytest.raises(ValueError, match=r"blocks\.0 is called with what, a set that may change"):
        layers_of(Telling(lambda x: {1, 2}), {"x": torch.ones(3, 4)})


@pytest.mark.parametrize(
    ("model", "sample", "reason"),
    [
        (Glued(turns=2), True, "the blocks of blocks are not called once each, in order"),
        (nn.Linear(4, 4), True, "it never calls two blocks of an nn.ModuleList in a row"),
        (nn.Sequential(nn.Linear(4, 4)), True, "it is an nn.Sequential, whose children are layers"),
        (Glued(), False, "the inputs of a Glued are unknown: give layers_of a sample"),
    ],
    ids=["turns", "no blocks", "a row", "no sample"],
)
def test_what_cannot_be_cut_is_refused_with_the_reason(model, sample, reason):
    given = {"x" if isinstance(model, Glued) else "input": torch.randn(3, 4)} if sample else None
    with pytest.raises(ValueError, match=reason):
        layers_of(model, given)


def test_a_model_that_fails_on_the_sample():
    with pytest.raises(ValueError, match="a GPT2LMHeadModel fails on this sample with IndexError"):
        layers_of(model_of("GPT2LMHeadModel"), {"input_ids": torch.full((2, 3), 64)})


def test_a_run_with_a_convolution_in_front_is_checked():
    class Speech(nn.Module):
        main_input_name = "sound"

        def __init__(self):
            super().__init__()
            self.front = nn.Conv1d(2, 8, 3, padding=1)
            self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

        def forward(self, sound):
            x = self.front(sound).mT
            for block in self.blocks:
                x = block(x)
            return x

    torch.manual_seed(0)
    model, sound = Speech(), torch.randn(8, 2, 6)
    stages = split(layers_of(model, {"sound": sound}), [2, 2, 2])
    batch = {"sound": sound}, torch.randn(8, 6, 8)
    given = pipelab.make("gpipe", 3, 4), stages, [batch], nn.functional.mse_loss
    check = pipelab.run(*given, partial(torch.optim.SGD, lr=0.1)).check
    assert check.passed and not check.unjudged, check


@pytest.mark.parametrize("kind", ["MixtralForCausalLM", "Qwen2MoeForCausalLM"])
def test_a_balancing_loss_is_trained(kind, tmp_path):
    made = getattr(transformers, kind)
    sizes = GROUPED | dict(moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2)
    torch.manual_seed(0)
    model = made(made.config_class(**sizes, output_router_logits=True))
    plain, (x, y) = copy.deepcopy(model), batch_of(model, 9)

    def loss(found, tokens):
        mean, count = causal_loss(found["logits"], tokens)
        return mean + found["aux_loss"], count

    layers, sgd = layers_of(model), partial(torch.optim.SGD, lr=0.1)
    stages = split(pickle.loads(pickle.dumps(layers)), 3)
    run = pipelab.run(pipelab.make("gpipe", 3, 1), stages, [(x, y)], loss, sgd)
    expected = loss(plain(**x), y)[0]
    expected.backward()
    assert run.check.passed and run.losses[0] == pytest.approx(float(expected), 1e-6)
    sgd(plain.parameters()).step()
    load(split(layers, 3), run.weights)
    for (name, found), own in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.allclose(found, own, 1e-4, 1e-5), name


def test_convolutions_that_shorten_what_passes_through_them():
    """Wav2Vec2's: a first list of blocks in front of its encoder's."""
    few = dict(conv_dim=(16, 16), conv_kernel=(4, 4), conv_stride=(2, 2), num_feat_extract_layers=2)
    near = dict(num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2)
    sizes = dict(hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=48)
    made = partial(transformers.Wav2Vec2Config, **few, **near, **sizes)
    sound = {"input_values": torch.randn(2, 200)}
    with pytest.raises(
        ValueError, match=r"draws random numbers of numpy or Python .*: turn it off"
    ):
        layers_of(transformers.Wav2Vec2Model(made()), sound)
    model = transformers.Wav2Vec2Model(made(layerdrop=0.0, apply_spec_augment=False))
    layers = layers_of(model, sound)
    assert len(layers) == 8
    longer = torch.randn(3, 300)
    found = through([layer.eval() for layer in layers], {"input_values": longer})
    assert torch.equal(found, model.eval()(longer).last_hidden_state)
