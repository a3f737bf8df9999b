"""Everything that a run of a model may replace or add, as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from autoshard.torch_adapters.compiled import eagerly, uncompiled

#: a dict, and what it held
_Before = tuple[dict[str, Any], dict[str, Any]]


@dataclass(frozen=True)
class ModuleSnapshot:
    """A module, and the attributes, parameters, buffers and hooks that it had.

    A context puts them back at its end, and may be entered again and again: looking at all of a deep model
    takes longer than that.
    """

    module: nn.Module
    before: tuple[_Before, ...]

    @staticmethod
    def of(module: nn.Module) -> ModuleSnapshot:
        """As it is now."""
        result: list[_Before] = []
        for each in module.modules():
            attributes = each.__dict__
            result.append((attributes, dict(attributes)))
            # tables come after what holds them
            result += [(value, dict(value)) for value in attributes.values() if isinstance(value, dict)]
        return ModuleSnapshot(module, tuple(result))

    def __enter__(self) -> ModuleSnapshot:
        return self

    def __exit__(self, *args: object) -> None:
        for now, before in self.before:
            if now or before:  # most are hooks, of which there are none
                now.clear()
                now.update(before)


@contextmanager
def as_written(model: nn.Module) -> Iterator[nn.Module]:
    """The model for a while without what ``torch.compile`` wrapped around it and its modules."""
    with ModuleSnapshot.of(model), eagerly():
        yield uncompiled(model)
