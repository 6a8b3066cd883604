"""Folders that hold no model, or an odd one: one line, status 2, and nothing is written."""

import json
import os
import pickle
import re
import struct

import pytest
import torch
from safetensors.torch import save_file
from transformers import GPT2Config, GPT2LMHeadModel

from tests.cli.test_cli import refused

SIZES = {"vocab_size": 300, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 4}
CONFIG = GPT2Config(**SIZES, bos_token_id=1, eos_token_id=2)
NAN, INF = float("nan"), float("inf")

ODD_SIZES = [
    ({"n_head": 0}, "ZeroDivisionError: .*, with n_head=0 in its config.json"),
    ({"n_head": "four"}, "Field 'n_head' expected int, got str"),
    ({"n_head": 5}, "`embed_dim` must be divisible by num_heads"),
    ({"n_layer": 0}, "it never calls two blocks"),
    ({"n_layer": 2.5}, "Field 'n_layer' expected int, got float"),
    ({"n_layer": None}, "Field 'n_layer' expected int, got NoneType"),
    ({"n_layer": INF}, "Field 'n_layer' expected int, got float"),
    ({"n_layer": 10**9}, "n_layer=1,000,000,000: give at most 5,000"),
    ({"n_embd": NAN}, "with n_embd=nan in its config.json"),
    ({"n_embd": 0}, "with n_embd=0 in its config.json"),
    ({"n_embd": -1}, r"negative dimension -1: .*, with n_embd=-1 in its config.json"),
    ({"n_embd": 10**12}, "Storage size calculation overflowed"),
    ({"n_embd": 10**30}, "Overflow when unpacking"),
    ({"vocab_size": -1}, "with vocab_size=-1 in its config.json"),
    ({"vocab_size": 0}, "its vocabulary of 0 must hold all bytes: give at least 257"),
    ({"vocab_size": 10**10}, r"its weights take 1,192 GiB, but this machine has \d+: give"),
    ({"n_positions": 0}, "fails on this sample with"),
    ({"initializer_range": NAN}, "with initializer_range=nan"),
    ({"resid_pdrop": 2.0}, "dropout probability has to be between 0 and 1"),
    ({"model_type": "nosuch"}, "model type `nosuch`"),
    ({"model_type": ["gpt2"]}, "unhashable type"),
    ({"model_type": "vit"}, "Unrecognized configuration class"),
    ({"activation_function": "nosuch"}, "KeyError: 'nosuch'"),
    ({"dtype": "float17"}, "no attribute 'float17'"),
    ({"quantization_config": "x"}, "AttributeError"),
    ({"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}, "contains custom code"),
]

ODD_FILES = {
    "config.json": [b"", b"{", b"5", b"null", b"[]", b"\xff", b"[" * 10**5],
    "model.safetensors": [b"bad", b"", struct.pack("<Q", 2**60) + b"{}"],
    "pytorch_model.bin": [b"", b"bad", pickle.dumps({"a": print})],
    "model.safetensors.index.json": [b"{", b"[]", b'{"weight_map": {"a": "../../etc/passwd"}}'],
    "model.gguf": [b"x"],
    "tokenizer.json": [b"", b"{", b"[]", b"{}"],
    "tokenizer_config.json": [b"[]", b'{"tokenizer_class": "Nosuch"}', b"{}"],
}


@pytest.fixture
def folder(tmp_path):
    CONFIG.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def refusal(capsys, folder):
    """The one line that training from a folder ends with; nothing is left, or changed."""
    before, kept = sorted(os.listdir(folder)), folder.parent / "kept"
    capsys.readouterr()
    line = f"train {folder} --steps 1 --batch 4 --microbatches 2 --save {kept}"
    err = refused(capsys, line)
    assert str(folder) in err and len(err) < 1000
    assert sorted(os.listdir(folder)) == before and not kept.exists()
    return err


@pytest.mark.parametrize(("changes", "told"), ODD_SIZES, ids=lambda x: str(x)[:30])
def test_an_odd_config(capsys, folder, changes, told):
    content = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(content))
    assert re.search(told, refusal(capsys, folder))


@pytest.mark.parametrize(
    ("name", "content"),
    [(name, content) for name, contents in ODD_FILES.items() for content in contents],
    ids=lambda x: str(x)[:30],
)
def test_an_odd_file(capsys, folder, name, content):
    (folder / name).write_bytes(content)
    assert "cannot load" in refusal(capsys, folder) or name == "tokenizer_config.json"


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
@pytest.mark.parametrize("kind", ["pipe", "dangling link", "endless", "folder"])
def test_a_name_that_is_no_file(capsys, folder, name, kind):
    (folder / name).unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(folder / name)
    elif kind == "folder":
        (folder / name).mkdir()
    else:
        (folder / name).symlink_to("/dev/zero" if kind == "endless" else "nowhere")
    told = refusal(capsys, folder)
    assert kind == "folder" or f"{folder / name} is not a file: remove it" in told


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda name, w: {f"other.{name}": w}, "its files lack 29 of the model's weights, such as"),
        (lambda name, w: {name: w} if "h.0" in name else {}, "its files lack 17 of the model's"),
        (lambda name, w: {name: w[..., :1].clone()}, "other shapes than its config says"),
        (lambda name, w: {name: w * NAN}, "transformer.wte.weight is not finite: give weights"),
    ],
    ids=["names", "half", "shapes", "nan"],
)
def test_weights_that_are_not_the_models(capsys, folder, change, told):
    found = {}
    for name, weight in GPT2LMHeadModel(CONFIG).state_dict().items():
        found |= change(name, weight) if name != "lm_head.weight" else {}
    save_file(found, folder / "model.safetensors", metadata={"format": "pt"})
    assert told in refusal(capsys, folder)


def test_weights_in_another_folder(capsys, folder):
    GPT2LMHeadModel(CONFIG).save_pretrained(folder / "other")
    for file in ("other/model.safetensors", str(folder / "other" / "model.safetensors")):
        index = {"weight_map": dict.fromkeys(GPT2LMHeadModel(CONFIG).state_dict(), file)}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        assert f"index.json names {file!r}, which is not in the folder" in refusal(capsys, folder)


def test_weights_cut_off(capsys, folder):
    GPT2LMHeadModel(CONFIG).save_pretrained(folder)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert "SafetensorError" in refusal(capsys, folder)


def test_weights_beside_the_models_are_told(folder):
    from pipelab.models import hub

    weights = GPT2LMHeadModel(CONFIG).state_dict()
    weights["transformer.h.2.ln_1.weight"] = torch.ones(32)
    del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.warns(UserWarning, match=r"1 weights are not of this model, such as .*h\.2\.ln_1"):
        hub.language_model(str(folder))


def test_published_weights_of_another_kind(capsys, tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 9}
    LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2)).save_pretrained(tmp_path)
    capsys.readouterr()
    told = refused(capsys, f"train gpt2 --pretrained {tmp_path}")
    assert "is a LlamaForCausalLM: give GPT-2's weights" in told
