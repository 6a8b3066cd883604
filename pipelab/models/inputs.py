"""What a model is given, by name, as its layers hand it on."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipelab.models.placeholder import SHOW, Differs, leaves_of, mapped

INPUT = "input "  # begins the names of what the model itself is given
PLAIN = int, float, str, torch.dtype, torch.device  # what stays as it is in the sample


class Inputs:
    """A model's inputs: tensors, which change from batch to batch, and what stays as in the sample.

    main     the name of the input that may be given alone
    forms    by name: a number for each leaf, in its place; and leaves, or their types if not plain
    strange  the name of an input with a leaf that is neither tensor nor plain, and its type
    """

    def __init__(self, model: nn.Module, given: Mapping[str, Any]) -> None:
        parameters = inspect.signature(model.forward).parameters
        main = getattr(model, "main_input_name", "")
        names = [main, *parameters, *given]
        self.main = next((name for name in names if name in given), "")
        self.forms = {name: _form(x) for name, x in given.items()}
        every = [(name, leaf) for name, (_, fixed) in self.forms.items() for leaf in fixed]
        kinds = [(name, leaf) for name, leaf in every if isinstance(leaf, type)]
        self.strange = [(name, kind.__name__) for name, kind in kinds if kind is not Tensor]
        # What a batch without them has.
        absent = {name for name, (_, fixed) in self.forms.items() if Tensor not in fixed}
        defaults = {n: p.default for n, p in parameters.items() if p.default is not p.empty}
        self._defaults = {name: defaults.get(name) for name in absent}

    @property
    def names(self) -> set[str]:
        """The names of tensors, as they are handed on."""
        return {INPUT + at for name in self.forms for at in self._places(name)}

    def handed(self, batch: Any) -> dict[str, Tensor]:
        """A batch's tensors, by their names. Differs if other layers would not see the rest."""
        inputs = dict(batch) if isinstance(batch, Mapping) else {self.main: batch}
        if strange := [repr(name) for name in inputs if name not in self.forms]:
            raise Differs(
                f"this batch has {', '.join(strange)}, which the sample of layers_of did not "
                f"have: {SHOW}"
            )
        found: dict[str, Tensor] = {}
        for name, x in (self._defaults | inputs).items():
            if (form := _form(x)) != self.forms[name]:
                raise Differs(
                    f"this batch has {_told(name, form)}, but the sample of layers_of had "
                    f"{_told(name, self.forms[name])}: only tensors may change from batch to batch"
                )
            leaves = [leaf for leaf in leaves_of(x) if isinstance(leaf, Tensor)]
            found |= dict(zip(self._places(name), leaves, strict=True))
        return {INPUT + at: leaf for at, leaf in found.items()}

    def of(self, values: Mapping[str, Tensor]) -> dict[str, Any]:
        """The inputs again. A batch may have left out tensors."""
        found = {}
        for name, (form, fixed) in self.forms.items():
            places = [INPUT + at for at in self._places(name)]
            if all(at in values for at in places):
                tensors = iter([values[at] for at in places])
                leaves = [next(tensors) if leaf is Tensor else leaf for leaf in fixed]
                found[name] = mapped(int, leaves.__getitem__, form)
        return found

    def _places(self, name: str) -> list[str]:
        form, fixed = self.forms[name]
        return [
            name if form == 0 else f"{name}[{i}]" for i, leaf in enumerate(fixed) if leaf is Tensor
        ]


def _form(x: Any) -> tuple[Any, list[Any]]:
    if isinstance(x, Tensor):
        return 0, [Tensor]
    leaves, spec = pytree.tree_flatten(x)
    plain = [leaf if leaf is None or isinstance(leaf, PLAIN) else type(leaf) for leaf in leaves]
    return pytree.tree_unflatten(range(len(leaves)), spec), [
        Tensor if isinstance(leaf, Tensor) else of for leaf, of in zip(leaves, plain, strict=True)
    ]


def _told(name: str, form: tuple[Any, list[Any]]) -> str:
    places, fixed = form
    if places != 0:
        return f"another {name}"
    return f"a tensor as {name}" if fixed[0] is Tensor else f"{name}={fixed[0]!r}"
