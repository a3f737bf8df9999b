"""Load torch's symbolic shapes, and sympy with them, when there is a symbolic shape.

Fake tensors ask ``torch.fx.experimental.symbolic_shapes`` about sizes that are plain numbers all the time;
the module takes sympy along, which takes longer to load than a small model to trace. ``defer_symbols`` puts a
module in its place that answers for plain values as it would, and whose body runs when anything else is
asked. Sympy itself and another module with sympy in it are only asked whether something is an instance of
their classes: of none, while they are not loaded. What is loaded already stays as it is.

Leans on the names that torch's fake tensors and meta functions take from these modules, and on what they
return for plain values. Run with torch 2.13.
"""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch.utils._ordered_set import OrderedSet

from autoshard.torch_adapters.late_module import LateModule, is_late, loaded, put_late

SYMBOLS = "torch.fx.experimental.symbolic_shapes"
FUNCTIONS = "torch.utils._sympy.functions"
KERNELS = "torch._higher_order_ops.triton_kernel_wrap"
_PLAIN = (bool, int, float, str, type(None))


class _Symbols(LateModule):
    """Symbolic shapes, while there are none."""

    def __getattr__(self, name: str) -> Any:
        if name in _ANSWERS:
            return functools.partial(_asked, self, name)
        if name == GuardOnDataDependentSymNode.__name__:
            return GuardOnDataDependentSymNode
        return super().__getattr__(name)

    def finish(self) -> None:
        """What the module raises is of the class that was given away, too, so that it is caught as that."""
        made: Any = self
        own = made.GuardOnDataDependentSymNode
        about = {"__module__": SYMBOLS, "__doc__": own.__doc__}
        made.GuardOnDataDependentSymNode = type(own.__name__, (GuardOnDataDependentSymNode, own), about)


class GuardOnDataDependentSymNode(RuntimeError):
    """In the place of the class of this name until the module is loaded: raised by nobody."""


class _Unused(LateModule):
    """A module that is asked for classes of which nothing is yet."""

    def __getattr__(self, name: str) -> Any:
        if sys._getframe(1).f_globals.get("__name__") == _ASKED.get((self.__name__, name)):
            return _Nothing
        return super().__getattr__(name)


class _Nothing:
    """Nothing is of this class."""


#: (module, class) -> the module that asks whether something is one, or takes it and asks nothing
_ASKED = {
    ("sympy", "Basic"): "torch._prims_common",
    (FUNCTIONS, "Max"): "torch._prims_common",
    (KERNELS, "TritonKernelWrapperFunctional"): "torch.fx.experimental.proxy_tensor",
    (KERNELS, "TritonKernelWrapperMutation"): "torch.fx.experimental.proxy_tensor",
}


def defer_symbols() -> None:
    """Have symbolic shapes loaded when there are any, unless they are there."""
    put_late(SYMBOLS, _Symbols)
    put_late(KERNELS, _Unused)
    put_late("sympy", _Unused)
    put_late(FUNCTIONS, _Unused)


def symbols_module() -> ModuleType | None:
    """The module of symbolic shapes if it is loaded."""
    module = sys.modules.get(SYMBOLS)
    return None if is_late(module) else module


def _asked(module: ModuleType, name: str, *args: Any, **kwargs: Any) -> Any:
    """The answer for plain values, or else that of the module itself."""
    if is_late(module) and not kwargs and all(map(_is_plain, args)):
        answer, arity = _ANSWERS[name]
        if arity is None or arity == len(args):
            found = answer(*args)
            if found is not NotImplemented:
                return found
    return getattr(loaded(module), name)(*args, **kwargs)


def _is_plain(value: object) -> bool:
    """Whether nothing in a value is a symbol."""
    if isinstance(value, _PLAIN):
        return True
    if isinstance(value, torch.Tensor):
        return value.layout is torch.strided and not value._has_symbolic_sizes_strides
    return isinstance(value, (tuple, list)) and all(map(_is_plain, value))


def _same(value: object, skip: int = 0) -> object:
    """A comparison of plain numbers is known."""
    return value if isinstance(value, bool) else NotImplemented


def _number(value: object, *otherwise: object) -> object:
    """A plain number is what it is."""
    return value if type(value) is int else NotImplemented


def _folded(combine: Callable[[Any, Any], Any]) -> Callable[..., object]:
    def fold(*values: object) -> object:
        known = values and all(isinstance(v, bool) for v in values)
        return functools.reduce(combine, values) if known else NotImplemented

    return fold


def _equal(x: Any, y: Any) -> object:
    if isinstance(x, (tuple, list)) and isinstance(y, (tuple, list)):
        if len(x) != len(y):
            return False
        parts = [_equal(a, b) for a, b in zip(x, y, strict=True)]
        return NotImplemented if any(p is NotImplemented for p in parts) else all(parts)
    return x == y if isinstance(x, int) and isinstance(y, int) else NotImplemented


def _no_bindings(env: object, value: object, *more: object) -> object:
    """No environment of symbols, no symbols bound."""
    return None if env is None else NotImplemented


#: by name: (what is answered for plain values, NotImplemented if that is not known; how many are asked about)
_ANSWERS: dict[str, tuple[Callable[..., object], int | None]] = {
    "has_free_unbacked_symbols": (lambda value: False, 1),
    "free_unbacked_symbols": (lambda value: OrderedSet(), 1),
    "guard_or_false": (_same, 1),
    "guard_or_true": (_same, 1),
    "statically_known_true": (_same, 1),
    "expect_true": (_same, None),
    "guard_bool": (_same, 1),
    "guard_size_oblivious": (_same, 1),
    "guard_int": (_number, 1),
    "guarding_hint_or_throw": (_number, 1),
    "optimization_hint": (_number, None),
    "has_free_symbols": (lambda value: False, 1),
    "_iterate_exprs": (lambda value: iter(()), 1),
    "_iterate_nodes": (lambda value: iter(()), 1),
    "sym_and": (_folded(operator.and_), None),
    "sym_or": (_folded(operator.or_), None),
    "sym_eq": (_equal, 2),
    "is_nested_int": (lambda value: False, 1),
    "has_guarding_hint": (lambda value: True, 1),
    "compute_unbacked_bindings": (_no_bindings, None),
}
