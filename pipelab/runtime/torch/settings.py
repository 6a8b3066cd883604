"""The settings of torch that a run's processes copy from the caller.

Settings per thread are up to the devices.
"""

import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from operator import attrgetter
from typing import Any

import torch

backends: Any = torch.backends  # some of it is made while torch runs
Setting = tuple[Callable[[], Any], Callable[[Any], Any]]  # (get, set)


def _attribute(path: str) -> Setting:
    """An attribute, by its path in torch."""
    owner, _, name = path.rpartition(".")
    holder = attrgetter(owner)(torch)
    return partial(getattr, holder, name), partial(setattr, holder, name)


def _anomaly() -> tuple[bool, bool]:
    return torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()


def _flushes_denormal() -> bool:
    # It is set in the processor, which torch cannot ask.
    return sys.float_info.min * 0.5 == 0


# In this order, as the first ways to say how float32 is multiplied set the newer ones, too.
SETTINGS: list[Setting] = [
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_default_device, torch.set_default_device),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    _attribute("utils.deterministic.fill_uninitialized_memory"),
    (_anomaly, lambda both: torch.autograd.set_detect_anomaly(*both)),
    (_flushes_denormal, torch.set_flush_denormal),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    _attribute("backends.fp32_precision"),
    _attribute("backends.cuda.matmul.fp32_precision"),
    _attribute("backends.cuda.matmul.allow_fp16_reduced_precision_reduction"),
    _attribute("backends.cuda.matmul.allow_bf16_reduced_precision_reduction"),
    _attribute("backends.cuda.matmul.allow_fp16_accumulation"),
    _attribute("backends.cudnn.fp32_precision"),
    _attribute("backends.cudnn.enabled"),
    _attribute("backends.cudnn.benchmark"),
    _attribute("backends.cudnn.benchmark_limit"),
    _attribute("backends.cudnn.deterministic"),
    _attribute("backends.cudnn.conv.fp32_precision"),
    _attribute("backends.cudnn.rnn.fp32_precision"),
    _attribute("backends.mkldnn.fp32_precision"),
    _attribute("backends.mkldnn.enabled"),
    _attribute("backends.mkldnn.deterministic"),
    _attribute("backends.mkldnn.matmul.fp32_precision"),
    _attribute("backends.mkldnn.conv.fp32_precision"),
    _attribute("backends.mkldnn.rnn.fp32_precision"),
    _attribute("backends.opt_einsum.enabled"),
    _attribute("backends.opt_einsum.strategy"),
    (backends.mha.get_fastpath_enabled, backends.mha.set_fastpath_enabled),
    (backends.cuda.flash_sdp_enabled, backends.cuda.enable_flash_sdp),
    (backends.cuda.mem_efficient_sdp_enabled, backends.cuda.enable_mem_efficient_sdp),
    (backends.cuda.math_sdp_enabled, backends.cuda.enable_math_sdp),
    (backends.cuda.cudnn_sdp_enabled, backends.cuda.enable_cudnn_sdp),
    (
        backends.cuda.fp16_bf16_reduction_math_sdp_allowed,
        backends.cuda.allow_fp16_bf16_reduction_math_sdp,
    ),
    (backends.cuda.preferred_linalg_library, backends.cuda.preferred_linalg_library),
    (backends.cuda.preferred_blas_library, backends.cuda.preferred_blas_library),
]


def settings() -> list[Any]:
    """The values of this process's settings, for `use` in another; None if torch has none."""
    return [_value(get) for get, _ in SETTINGS]


def use(values: Sequence[Any]) -> None:
    """Set what differs: some settings can be set only once, or cost time."""
    for (get, set_to), value in zip(SETTINGS, values, strict=True):
        if value is not None and value != _value(get):
            set_to(value)


def _value(get: Callable[[], Any]) -> Any:
    with suppress(RuntimeError):  # where the older and the newer way to say it were mixed
        return get()
    return None


@contextmanager
def repeatable() -> Iterator[None]:
    """Kernels on a GPU that repeat themselves to the last bit, where torch has such.

    Processes that start inside copy the settings. A caller's stricter ones stay.
    """
    name, cudnn = "CUBLAS_WORKSPACE_CONFIG", backends.cudnn
    before = os.environ.get(name), torch.get_deterministic_debug_mode(), cudnn.benchmark
    with warnings.catch_warnings():
        # Where torch has none, the check says so.
        warnings.filterwarnings("ignore", "(?s).*determinis", UserWarning)
        try:
            os.environ.setdefault(name, ":4096:8")
            torch.set_deterministic_debug_mode(before[1] or "warn")
            cudnn.benchmark = False
            yield
        finally:
            torch.set_deterministic_debug_mode(before[1])
            cudnn.benchmark = before[2]
            if before[0] is None:
                os.environ.pop(name, None)  # another run may have put it back already
