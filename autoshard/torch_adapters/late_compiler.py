"""Load torch's compiler when something asks for more of it than its settings.

Tracing needs a few settings of ``torch._dynamo`` and ``torch._inductor``, and libraries decorate functions
with ``torch.compiler.disable``; either pulls in the whole compiler, which takes longer than planning a small
model. ``defer_compiler`` puts packages in their place whose bodies run when an attribute or a module of
theirs is asked for that is not light. Whoever uses the compiler, ``torch.compile`` among them, gets the real
one in the very same module objects; if it is there already, nothing happens.

Leans on how ``torch._dynamo`` and ``torch._inductor`` are laid out and on the attributes by which dynamo
knows functions that are not for it. Run with torch 2.13.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from threading import RLock
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

#: modules that need nothing of their package, by package
_LIGHT = {
    "torch._dynamo": ("config", "_trace_wrapped_higher_order_op"),
    "torch._inductor": (
        "config",
        "custom_graph_pass",
        "compiler_bisector",
        "runtime",
        "runtime.cache_dir_utils",
    ),
}


#: what dynamo notes of a function, which it gives back as it is
_NOTES = ("allow_in_graph", "assume_constant_result")


class _Package(ModuleType):
    """A package whose body has not run. noted: what to note of functions once it has."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.noted: list[tuple[str, FunctionType]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        if name in _LIGHT[self.__name__]:
            return importlib.import_module(f"{self.__name__}.{name}")
        _load(self)
        return getattr(self, name)


_LOADING = RLock()


def _load(package: ModuleType) -> None:
    """Run the body of a package, outside of whatever is being traced."""
    with _LOADING, ExitStack() as stack:
        if not _is_deferred(package):
            return
        spec = package.__spec__
        assert spec is not None and spec.loader is not None
        stack.enter_context(_disable_current_modes())
        stack.enter_context(torch._C.DisableTorchFunction())
        package.__class__ = ModuleType
        try:
            spec.loader.exec_module(package)
        except BaseException:
            package.__class__ = _Package
            raise
        for name, fn in vars(package).pop("noted"):
            getattr(package, name)(fn)


def _is_deferred(package: ModuleType) -> bool:
    return type(package) is _Package


class _Present(Loader):
    """Gives a module that loading its package has brought along."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """It has run."""


class _Modules(MetaPathFinder):
    """Runs the body of a deferred package before the first of its modules that is not light."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        first, _, rest = fullname.partition(".")
        second, _, last = rest.partition(".")
        package = sys.modules.get(f"{first}.{second}")
        if not last or package is None or not _is_deferred(package) or last in _LIGHT[package.__name__]:
            return None
        _load(package)
        return ModuleSpec(fullname, _Present()) if fullname in sys.modules else None


def defer_compiler() -> None:
    """Have torch's compiler loaded when it is used, unless it is there."""
    for name in _LIGHT:
        if name in sys.modules:
            continue
        spec = PathFinder.find_spec(name, torch.__path__)
        if spec is None:
            continue
        package = _Package(name)
        package.__spec__, package.__loader__, package.__package__ = spec, spec.loader, name
        package.__file__, package.__path__ = spec.origin, list(spec.submodule_search_locations or ())
        if name == "torch._dynamo":
            package.disable = functools.partial(_disable, package)  # type: ignore[attr-defined]
            for note in _NOTES:
                setattr(package, note, functools.partial(_note, package, note))
        sys.modules[name] = package
        setattr(torch, name.rpartition(".")[2], package)
        if not any(isinstance(finder, _Modules) for finder in sys.meta_path):
            sys.meta_path.insert(0, _Modules())


def _note(package: ModuleType, name: str, fn: Any) -> Any:
    """``torch._dynamo.allow_in_graph`` and the like, once there is somebody to tell."""
    if not isinstance(fn, FunctionType):
        _load(package)
    if not _is_deferred(package):
        return getattr(package, name)(fn)
    package.noted.append((name, fn))
    return fn


def _disable(
    package: ModuleType, fn: Any = None, recursive: bool = True, *, reason: Any = None, wrapping: bool = True
) -> Any:
    """``torch._dynamo.disable``: while nothing compiles, a function that calls through."""
    if fn is None:
        return functools.partial(_disable, package, recursive=recursive, reason=reason, wrapping=wrapping)
    if not isinstance(fn, FunctionType):
        _load(package)
    if not _is_deferred(package):
        return package.disable(fn, recursive, reason=reason, wrapping=wrapping)
    return _through(package, fn, recursive, reason, wrapping)


def _through(
    package: ModuleType, fn: FunctionType, recursive: bool, reason: Any, wrapping: bool
) -> Callable[..., Any]:
    @functools.cache
    def disabled() -> Callable[..., Any]:
        found: Callable[..., Any] = package.disable(fn, recursive, reason=reason, wrapping=wrapping)
        return found

    @functools.wraps(fn)
    def through(*args: Any, **kwargs: Any) -> Any:
        return (fn if _is_deferred(package) else disabled())(*args, **kwargs)

    marked: Any = through
    marked._torchdynamo_disable = True
    marked._torchdynamo_disable_msg = reason
    marked._torchdynamo_disable_recursive = recursive
    marked._torchdynamo_orig_callable = fn
    marked._torchdynamo_wrapper_id = id(through)
    return through
