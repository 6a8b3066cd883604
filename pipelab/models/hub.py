"""Models as Hugging Face's libraries load them: from a folder, their hub, or its cache."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

from huggingface_hub import constants
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

PATIENCE = 5.0  # seconds for the hub to answer


@contextmanager
def loading(name: str) -> Iterator[None]:
    """Load `name` inside, without progress bars in a file; ValueError if it cannot be loaded.

    If no hub answers, the libraries are set offline meanwhile and use their cache; else they would
    retry for minutes.
    """
    offline = constants.HF_HUB_OFFLINE
    absent = offline or not (Path(name).is_dir() or _answers())
    constants.HF_HUB_OFFLINE = absent
    bars = logging.is_progress_bar_enabled()
    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    try:
        yield
    except OSError as error:
        reason = f"no hub answers at {constants.ENDPOINT}" if absent else str(error).split("\n")[0]
        raise ValueError(
            f"cannot load {name!r}: it is not a folder with a saved model or tokenizer, and not in "
            f"the cache ({reason}); name such a folder, or a model on the hub, if it can be reached"
        ) from None
    finally:
        constants.HF_HUB_OFFLINE = offline
        if bars:
            logging.enable_progress_bar()


def language_model(folder: str) -> nn.Module:
    """A causal language model as transformers saves it; random if there is only a config."""
    with loading(folder):
        kinds = "model*.safetensors", "pytorch_model*.bin"
        if any(file for kind in kinds for file in Path(folder).glob(kind)):
            return AutoModelForCausalLM.from_pretrained(folder).train()
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))


def tokens_of(text: str, name: str) -> Tensor:
    """A text in the tokens of a model's own tokenizer: (count,)."""
    with loading(name):
        tokenizer = AutoTokenizer.from_pretrained(name)
    return tokenizer(text, return_tensors="pt")["input_ids"][0]


def _answers() -> bool:
    try:
        urlopen(constants.ENDPOINT, timeout=PATIENCE).close()
    except HTTPError:  # an answer, too
        return True
    except OSError:
        return False
    return True
