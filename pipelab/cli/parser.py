"""Commands: functions whose parameters are the options, and whose docstring is the help.

A positional parameter is an argument, a keyword-only one an option; one whose type is a dataclass
stands for its fields, of which those without a default are arguments. A type may be annotated with
the function that reads the text. Lines `name VALUE  text` of the docstrings are the options' help.
"""

import argparse
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, fields, is_dataclass
from difflib import get_close_matches
from functools import partial
from typing import Any, NoReturn

from pipelab.cli.options import HELP, LINE, told, written

LOOK = partial(argparse.RawDescriptionHelpFormatter, width=100)


class Command:
    """A function as a command, with examples, and with lists that its help names in braces."""

    def __init__(
        self, function: Callable[..., None], examples: Sequence[str], **lists: Iterable[str]
    ) -> None:
        self.function, self.examples, self.name = function, examples, function.__name__
        parameters = inspect.signature(function).parameters
        kinds = {name: parameter.annotation for name, parameter in parameters.items()}
        self.groups: dict[str, Any] = {
            name: kind for name, kind in kinds.items() if is_dataclass(kind)
        }
        text = (inspect.getdoc(function) or "").format_map(
            {name: ", ".join(words) for name, words in lists.items()}
        )
        self.about = LINE.sub("", text).strip()
        docs = [text, *(inspect.getdoc(kind) or "" for kind in self.groups.values())]
        self.told = HELP | told("\n".join(docs))
        self.options: list[str] = []
        usage = "".join(f"\n  pipelab {self.name} {example}" for example in examples)
        look: Any = {"formatter_class": LOOK, "add_help": False, "allow_abbrev": False}
        self.parser = _Parser(usage=usage, description=self.about, **look)
        for name, parameter in parameters.items():
            for field in fields(self.groups[name]) if name in self.groups else ():
                self._add(field.name, field.type, field.default, field.default is MISSING)
            if name not in self.groups:
                argument = parameter.kind is not parameter.KEYWORD_ONLY
                self._add(name, kinds[name], parameter.default, argument)

    def _add(self, name: str, kind: Any, default: Any, argument: bool) -> None:
        value, text = self.told[name]
        own: dict[str, Any] = {"metavar": value, "type": _reader(kind)}
        if argument:
            self.parser.add_argument(
                name, help=text, nargs="+" if kind == list[str] else None, **own
            )
            return
        if default is inspect.Parameter.empty:
            own, text = own | {"required": True}, f"{text} (required)"
        elif kind is bool:
            own = {"action": "store_true"}
        elif isinstance(default, str | int | float) and default != 1:
            text += f" (default: {default})"
        option = written(name)
        self.options.append(option)
        self.parser.add_argument(option, dest=name, default=default, help=text, **own)

    def read(self, words: Sequence[str]) -> Callable[[], None]:
        """What the words ask for, to be called. ValueError for words that do not fit."""
        parsed, strange = self.parser.parse_known_args(words)
        if strange:
            near = get_close_matches(strange[0], self.options, 1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ValueError(
                f"{strange[0]}: not an option; {hint}`pipelab {self.name} --help` lists the options"
            )
        found = vars(parsed)
        for name, kind in self.groups.items():
            found[name] = kind(**{field.name: found.pop(field.name) for field in fields(kind)})
        return partial(self.function, **found)


def command(*examples: str, **lists: Iterable[str]) -> Callable[[Callable[..., None]], Command]:
    """Make a command of a function."""
    return lambda function: Command(function, examples, **lists)


def _reader(kind: Any) -> Callable[[str], Any]:
    """Reads an option's value; argparse then says which option it is."""
    reader = getattr(kind, "__metadata__", (str,))[0]

    def read(text: str) -> Any:
        try:
            return reader(text)
        except (ValueError, OSError) as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


class _Parser(argparse.ArgumentParser):
    """Says by a ValueError what is wrong."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message.removeprefix("argument "))
