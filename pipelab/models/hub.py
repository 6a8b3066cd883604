"""Models as Hugging Face's libraries load them: from a folder, their hub, or its cache."""

import json
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import torch
from huggingface_hub import constants
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

PATIENCE = 5.0  # seconds for the hub to answer
WEIGHTS = (".safetensors", ".bin", ".h5", ".msgpack", ".gguf", ".index.json")  # endings of files
# Else the libraries ask, on standard output, whether to run a folder's own code.
SAFE = {"trust_remote_code": False}


@contextmanager
def loading(name: str) -> Iterator[None]:
    """Load `name` inside, without progress bars in a file and without the libraries' warnings.

    ValueError, in one line, for whatever goes wrong: a folder may hold anything, and the libraries
    fail with any class of error. If no hub answers, they are set offline meanwhile and use their
    cache; else they would retry for minutes.
    """
    folder = Path(name)
    for path in folder.glob("*"):
        if not path.is_file() and not path.is_dir():  # a pipe, say, which would be waited for
            raise ValueError(f"cannot load {name!r}: {path} is not a file: remove it")
    offline = constants.HF_HUB_OFFLINE
    absent = offline or not (folder.is_dir() or _answers())
    constants.HF_HUB_OFFLINE = absent
    bars, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.set_verbosity_error()
    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    except Exception as error:
        if isinstance(error, OSError) and not folder.is_dir():
            reason = "no hub answers at " + constants.ENDPOINT if absent else _line(error)
            raise ValueError(
                f"cannot load {name!r}: it is not a folder with a saved model or tokenizer, and "
                f"not in the cache ({reason}); name such a folder, or a model on the hub, if it "
                "can be reached"
            ) from None
        raise ValueError(
            f"cannot load {name!r} ({_line(error)}){_doubtful(folder)}: use a folder as "
            "transformers saves it"
        ) from None
    finally:
        constants.HF_HUB_OFFLINE = offline
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _line(error: Exception) -> str:
    """An error of the libraries in one short line; without torch's advice to run a pickle."""
    text = " ".join(str(error).split())
    if isinstance(error, UnpicklingError):
        text = "its weights are not a file of tensors"
    elif "ignore_mismatched_sizes" in text:
        text = "its weights have other shapes than its config says"
    return f"{type(error).__name__}: {text[:300]}".removesuffix(": ")


def _doubtful(folder: Path) -> str:
    """Sizes of a folder's config that may be why it fails: 0, negative, nan."""
    found: list[str] = []
    with suppress(Exception):  # it may be why
        content = json.loads((folder / "config.json").read_text())
        for key, value in content.items():
            if type(value) in (int, float) and not value > 0 and str(value) != "0.0":
                found.append(f"{key}={value}")
    return f", with {', '.join(found)} in its config.json" if found else ""


def language_model(
    name: str, *, trained: bool = False, most_layers: int = sys.maxsize, **sizes: Any
) -> Any:
    """A causal language model as transformers saves it; random if a folder has only its config.

    trained  it must have weights
    sizes    replace those of the config

    ValueError, before anything large is made, for more layers than `most_layers`, or more bytes
    than this machine has; and for weights that are not all of the model's.
    """
    with loading(name):
        config = AutoConfig.from_pretrained(name, **SAFE, **sizes)
        numbers = config.get_text_config().to_dict()
    for key in (key for key in numbers if key.endswith(("layer", "layers"))):
        if isinstance(numbers[key], int) and numbers[key] > most_layers:
            raise ValueError(f"{name}: {key}={numbers[key]:,}: give at most {most_layers:,}")
    with loading(name), torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config, **SAFE)
    needed, memory = sum(p.nbytes for p in empty.parameters()), _memory()
    if needed > memory:
        raise ValueError(
            f"{name}: its weights take {needed / 2**30:,.0f} GiB, but this machine has "
            f"{memory / 2**30:,.0f}: give a smaller model"
        )
    folder = Path(name)
    saved = trained or not folder.is_dir()
    saved = saved or any(path.name.endswith(WEIGHTS) for path in folder.iterdir())
    with loading(name):
        if not saved:
            return AutoModelForCausalLM.from_config(config, **SAFE)
        for index in folder.glob("*.index.json"):
            for file in {*json.loads(index.read_text())["weight_map"].values()}:
                if Path(file).name != file:
                    raise ValueError(f"{index.name} names {file!r}, which is not in the folder")
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            name, config=config, output_loading_info=True, **SAFE
        )
    model, info = loaded
    if lacking := info["missing_keys"]:
        raise ValueError(
            f"{name}: its files lack {len(lacking)} of the model's weights, such as "
            f"{min(lacking)}: give all, or the config alone for random ones"
        )
    if more := info["unexpected_keys"]:
        told = f"{name}: {len(more)} weights are not of this model, such as {min(more)}"
        warnings.warn(told, stacklevel=2)
    for key, weight in model.named_parameters():
        if not weight.isfinite().all():
            raise ValueError(f"{name}: {key} is not finite: give weights without inf and nan")
    return model.train()


def tokens_of(text: str, name: str) -> Tensor:
    """A text in the tokens of a model's own tokenizer: (count,)."""
    with loading(name):
        tokenizer = AutoTokenizer.from_pretrained(name, **SAFE)
        tokens = torch.tensor(tokenizer(text)["input_ids"], dtype=torch.long)
    if not len(tokens):
        raise ValueError(f"{name}: its tokenizer makes no tokens of a text: save a trained one")
    return tokens


def _memory() -> int:
    """Bytes of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _answers() -> bool:
    try:
        urlopen(constants.ENDPOINT, timeout=PATIENCE).close()
    except HTTPError:  # an answer, too
        return True
    except OSError:
        return False
    return True
