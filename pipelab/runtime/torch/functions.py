"""What Python functions lead to: the values of their closures and of globals."""

import sys
from collections.abc import Iterator
from contextlib import suppress
from dis import get_instructions
from types import CodeType, FunctionType, ModuleType
from typing import Any

INSTALLED = "site-packages", "dist-packages", "<frozen", "/lib/python"


def closure_of(function: FunctionType) -> dict[str, Any]:
    """The values of a function's closure, by name."""
    values, cells = {}, function.__closure__ or ()
    for name, cell in zip(function.__code__.co_freevars, cells, strict=True):
        with suppress(ValueError):  # not set yet
            values[name] = cell.cell_contents
    return values


def globals_of(function: FunctionType, code: CodeType | None = None) -> Iterator[tuple[str, Any]]:
    """The values of globals that a function names, through modules: SCALE, and settings.SCALE.

    Nothing for one of an installed library, which leads to all of it.
    """
    holder: Any = None
    code = code or function.__code__
    if is_installed(function):
        return
    for step in get_instructions(code):
        if step.opname == "LOAD_GLOBAL":
            name, holder = step.argval, function.__globals__.get(step.argval)
            where = f"{function.__module__}.{name}"
        elif step.opname in ("LOAD_ATTR", "LOAD_METHOD") and isinstance(holder, ModuleType):
            where = f"{holder.__name__}.{step.argval}"
            holder = getattr(holder, step.argval, None)
        else:
            holder = None
            continue
        if not isinstance(holder, ModuleType):
            yield where, holder
            holder = None
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from globals_of(function, inner)


def is_installed(value: FunctionType | type) -> bool:
    if isinstance(value, FunctionType):
        file = value.__code__.co_filename
    else:  # whose plain values may be counters
        file = getattr(sys.modules.get(value.__module__), "__file__", None) or ""
    return any(part in file for part in INSTALLED)
