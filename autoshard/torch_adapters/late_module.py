"""Modules whose bodies run when something of them is used.

A late module stands in ``sys.modules`` under its own name from the start, so that whoever imports it gets the
very object that its body runs in later.

Leans on ``torch.utils._python_dispatch``, ``torch._C.DisableTorchFunction`` and the compiling flag of
``torch.compiler``. Run with torch 2.13.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from threading import RLock
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import _disable_current_modes

#: attributes that importing and testing tools look for in any module
_PROBED = frozenset({"__path__", "__wrapped__", "__warningregistry__", "__getattr__", "__dir__"})
_LOADING = RLock()


class LateModule(ModuleType):
    """A module whose body has not run."""

    def __init__(self, spec: ModuleSpec) -> None:
        super().__init__(spec.name)
        self.__spec__, self.__loader__, self.__file__ = spec, spec.loader, spec.origin
        self.__package__ = spec.parent
        if spec.submodule_search_locations is not None:
            self.__package__, self.__path__ = spec.name, list(spec.submodule_search_locations)

    def __getattr__(self, name: str) -> Any:
        if name in _PROBED:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(loaded(self), name)

    def finish(self) -> None:
        """What is to be done once the body has run; then it is a module like any other."""


def is_late(module: object) -> bool:
    """Whether the body of a module has not run."""
    return isinstance(module, LateModule)


def loaded(module: ModuleType) -> ModuleType:
    """Run the body of a late module, outside of whatever is being traced."""
    with _LOADING, ExitStack() as stack:
        kind = type(module)
        if not issubclass(kind, LateModule):
            return module
        spec = module.__spec__
        assert spec is not None and spec.loader is not None
        stack.enter_context(_disable_current_modes())
        stack.enter_context(torch._C.DisableTorchFunction())
        stack.enter_context(patch.object(torch.compiler, "_is_compiling_flag", False))
        plain: Any = module
        plain.__class__ = ModuleType
        try:
            spec.loader.exec_module(module)
        except BaseException:
            plain.__class__ = kind
            raise
        kind.finish(plain)
    return module


def put_late(name: str, kind: type[LateModule] = LateModule) -> LateModule | None:
    """Put a late module in the place of one; None if it is there already, or there is none of that name."""
    if name in sys.modules:
        return None
    parent, _, last = name.rpartition(".")
    package = importlib.import_module(parent) if parent else None
    spec = PathFinder.find_spec(name, None if package is None else package.__path__)
    if spec is None or spec.loader is None:
        return None
    module = sys.modules[name] = kind(spec)
    if package is not None:
        setattr(package, last, module)
    if spec.submodule_search_locations is not None and not any(isinstance(f, _Inside) for f in sys.meta_path):
        sys.meta_path.insert(0, _Inside())
    return module


class _Present(Loader):
    """Gives a module that loading its package has brought along."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """It has run."""


class _Inside(MetaPathFinder):
    """Runs the body of a late package before the first of its modules, but for those that need nothing of it
    (``light`` of the package, if it has any)."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        parts = fullname.split(".")
        for count in range(1, len(parts)):
            package = sys.modules.get(".".join(parts[:count]))
            if isinstance(package, LateModule):
                if ".".join(parts[count:]) in vars(package).get("light", ()):
                    return None
                loaded(package)
                return ModuleSpec(fullname, _Present()) if fullname in sys.modules else None
        return None
