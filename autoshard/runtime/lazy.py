"""Parallelize at the first call, when the shapes are known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class LazyModule(nn.Module):
    """Mixed into the user's class until the first call."""

    _autoshard_make: Callable[[Any], nn.Module]
    _autoshard_class: type

    @torch.compiler.disable
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        lazy, make = type(self), self._autoshard_make
        self.__class__ = self._autoshard_class
        try:
            make((args, kwargs))
        except BaseException:
            # otherwise the next call would quietly run the model as it is
            self.__class__ = lazy
            raise
        del self._autoshard_make, self._autoshard_class
        return self(*args, **kwargs)


def make_lazy(model: nn.Module, make: Callable[[Any], nn.Module]) -> nn.Module:
    """The same module, whose first call runs ``make((args, kwargs))`` and then itself."""
    cls = type(model)
    model._autoshard_make = make  # type: ignore[assignment]
    model._autoshard_class = cls  # type: ignore[assignment]
    model.__class__ = type(cls.__name__, (LazyModule, cls), {"__module__": cls.__module__})
    return model
