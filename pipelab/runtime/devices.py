"""Parts of devices that the runtime does not know: a room above makes them."""

import re
from importlib import import_module
from typing import Any

# how they are called, the device before a slash -> the module with part_of_row(name, row), the name
# of a row's part, and stream_of(part)
PARTS: dict[str, str] = {}


def parts_called(name: str) -> Any:
    """The module of the parts with such names; None for whole devices."""
    for form, module in PARTS.items():
        if re.fullmatch(form, name):
            return import_module(module)
    return None
