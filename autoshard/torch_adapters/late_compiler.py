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
from collections.abc import Callable, Sequence
from types import FunctionType, ModuleType
from typing import Any

from autoshard.torch_adapters.late_module import LateModule, is_late, loaded, put_late

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


class _Package(LateModule):
    """A package of the compiler. noted: what to note of functions once its body has run. light: modules that
    may be loaded without it."""

    noted: list[tuple[str, FunctionType]]
    light: Sequence[str]

    def __getattr__(self, name: str) -> Any:
        if name in self.light:
            return importlib.import_module(f"{self.__name__}.{name}")
        return super().__getattr__(name)

    def finish(self) -> None:
        del self.light
        for name, fn in vars(self).pop("noted"):
            getattr(self, name)(fn)


def defer_compiler() -> None:
    """Have torch's compiler loaded when it is used, unless it is there."""
    for name, light in _LIGHT.items():
        package = put_late(name, _Package)
        if package is None:
            continue
        made: Any = package
        made.noted, made.light = [], light
        if name == "torch._dynamo":
            made.disable = functools.partial(_disable, package)
            for note in _NOTES:
                setattr(package, note, functools.partial(_note, package, note))


def _note(package: ModuleType, name: str, fn: Any) -> Any:
    """``torch._dynamo.allow_in_graph`` and the like, once there is somebody to tell."""
    if not isinstance(fn, FunctionType):
        loaded(package)
    if not isinstance(package, _Package):
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
        loaded(package)
    if not is_late(package):
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
        return (fn if is_late(package) else disabled())(*args, **kwargs)

    marked: Any = through
    marked._torchdynamo_disable = True
    marked._torchdynamo_disable_msg = reason
    marked._torchdynamo_disable_recursive = recursive
    marked._torchdynamo_orig_callable = fn
    marked._torchdynamo_wrapper_id = id(through)
    return through
