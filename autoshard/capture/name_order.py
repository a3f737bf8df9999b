"""Sets of names are gone through in one order, whichever process traces.

Python's own order of strings in a set is another one in every process, and models that loop over one (kinds
of layers, for a mask each) would give graphs that differ, which no plan of another process fits.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

from torch import nn


class _Kind(type):
    """Every set counts as one in order."""

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, set)

    def __subclasscheck__(cls, other: type) -> bool:
        return issubclass(other, set)


class OrderedSet(set[Any], metaclass=_Kind):
    """A set; if it holds nothing but strings, they come sorted."""

    def __iter__(self) -> Iterator[Any]:
        values = super().__iter__()
        return iter(sorted(values)) if _all_names(self) else values


def _all_names(values: set[Any]) -> bool:
    return all(isinstance(value, str) for value in set.__iter__(values))


@contextmanager
def sets_in_order(model: nn.Module) -> Iterator[None]:
    """For the time of a trace, have the code of a model's classes make sets that are in order.

    Those that its modules hold become such sets too; whoever calls this puts the modules' attributes back.
    Sets written as displays (``{"a", "b"}``) and those of other code keep Python's order.
    """
    with ExitStack() as stack:
        for code in _modules_of(model):
            if "set" not in vars(code):
                vars(code)["set"] = OrderedSet
                stack.callback(vars(code).pop, "set", None)
        for module in model.modules():
            for name, value in module.__dict__.items():
                if type(value) is set and value and _all_names(value):
                    module.__dict__[name] = OrderedSet(value)
        yield


def _modules_of(model: nn.Module) -> list[ModuleType]:
    """The Python modules of a model's classes and of those they are derived from, without torch's."""
    classes = {base for module in model.modules() for base in type(module).__mro__}
    names = sorted({cls.__module__ for cls in classes})
    result = (sys.modules.get(name) for name in names if name.partition(".")[0] not in ("torch", "builtins"))
    return [module for module in result if module is not None]
