"""Names of torch's devices, as `devices` has them."""

from typing import Any

import torch

from pipelab.runtime.devices import parts_called
from pipelab.table.schedule import Schedule


def find_device(name: str | torch.device) -> torch.device:
    """A torch device by its name, or a part's GPU; "cuda" is the caller's current one, by number.

    ValueError if this machine does not have it.
    """
    whole, count = str(name), torch.cuda.device_count()
    if parts_called(whole):
        whole = whole.partition("/")[0]
    here = ["cpu", *["cuda"][:count], *(f"cuda:{i}" for i in range(count))]
    if whole not in here:
        raise ValueError(f"device {str(name)!r}: this machine has {', '.join(here)}")
    if whole == "cuda":
        # Tensors say which GPU they are on: without a number, theirs would be another device's.
        whole = f"cuda:{torch.cuda.current_device()}"
    return torch.device(whole)


def device_names(schedule: Schedule, devices: Any) -> list[str]:
    """A device per row."""
    count = torch.cuda.device_count()
    if devices is None:
        devices = [f"cuda:{d % count}" if count else "cpu" for d in range(schedule.devices)]
    one = isinstance(devices, (str, torch.device))
    asked = [devices] * schedule.devices if one else list(devices)
    if len(asked) != schedule.devices:
        raise ValueError(
            f"{len(asked)} devices for the {schedule.devices} rows of {schedule.name}: name one "
            "per row; repeats are allowed"
        )
    names = []
    for row, name in enumerate(asked):
        module = parts_called(str(name))
        names.append(module.part_of_row(name, row) if module else str(find_device(name)))
    return names
