"""Values of tensors that a model makes from numbers alone, so that its Python code may ask for them.

A mask of ones, positions, tables of relative distances: what they hold follows from shapes and from the
config. Such a tensor is traced as any other, and a real one goes along with it, on which the same functions
run. Where Python asks for a value, or a shape depends on one, the real tensor answers.

Leans on the private ``torch.utils._python_dispatch._disable_current_modes`` and on the exceptions of
``torch._subclasses.fake_tensor``. Run with torch 2.13.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

#: elements of the largest tensor whose values are kept
_MOST = 1 << 20
_NUMBERS = frozenset(
    """
    tensor as_tensor scalar_tensor arange linspace logspace eye ones zeros full tril_indices triu_indices
    """.split()  # noqa: SIM905 - a table reads better than quoted names
)
#: of their first argument these need the shape and the type only
_LIKE = frozenset({"ones_like", "zeros_like", "full_like"})
_NEW = frozenset({"new_tensor", "new_ones", "new_zeros", "new_full"})
#: what these give is determined by nothing
_UNDETERMINED = ("empty", "new_empty", "resize")
_IN_PLACE = frozenset(
    f"__{name}__"
    for name in (
        *("setitem", "set", "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul"),
        *("iand", "ior", "ixor", "ilshift", "irshift"),
    )
)


class Shadows(TorchFunctionMode):
    """Runs functions on real tensors beside those of the trace, as long as all that goes in is known."""

    def __init__(self) -> None:
        super().__init__()
        # with the traced tensor, lest another one gets its identity
        self._held: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "").partition(".")[0]
        changed = changed_by(name, args, kwargs)
        result = self._run(func, name, args, kwargs) if self._is_known(name, args, kwargs) else None
        if result is None:
            out = self._traced(func, name, args, kwargs)
            self._forget(changed)
            return out
        (real,) = result
        ends = _tensors(real)
        if not ends and not changed:
            return real
        try:
            out = self._traced(func, name, args, kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            if changed:
                raise
            out = pytree.tree_map_only(torch.Tensor, _constant, real)
        new = _tensors(out)
        if len(new) != len(ends) or any(a.shape != b.shape for a, b in zip(new, ends, strict=True)):
            self._forget(changed)
            return out
        for tensor, values in zip(new, ends, strict=True):
            self._held.setdefault(id(tensor), (tensor, values))
        return out

    def _traced(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The call as the trace sees it: numbers in place of known tensors where it needs numbers."""
        args = self._with_places(name, args)
        try:
            return func(*args, **kwargs)
        except DataDependentOutputException:
            if changed_by(name, args, kwargs):
                raise
            with_numbers = pytree.tree_map_only(torch.Tensor, self._number, (args, kwargs))
            if name == "__getitem__":
                return _selected(*with_numbers[0])
            return func(*with_numbers[0], **with_numbers[1])

    def _number(self, tensor: torch.Tensor) -> int | torch.Tensor:
        """A known integer as such, and any other tensor as it is."""
        values = self._of(tensor) if tensor.dim() == 0 and not tensor.is_floating_point() else None
        if values is None:
            return tensor
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            return int(values)

    def _is_known(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether the result of a function follows from numbers and known tensors."""
        if name.startswith(_UNDETERMINED) or name == "__set__":
            return False
        shape_only = name in _LIKE or name in _NEW
        values = _tensors((args[1:] if shape_only else args, dict(kwargs)))
        return all(self._of(t) is not None for t in values) and (
            bool(values) or shape_only or name in _NUMBERS
        )

    def _of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The values of a tensor; one that was made outside of the trace has its own."""
        if id(tensor) in self._held:
            return self._held[id(tensor)][1]
        return tensor if type(tensor) is torch.Tensor and not tensor.is_meta else None

    def _run(
        self, func: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Any] | None:
        """What a function gives on real tensors; None if that is unknown after all, or large."""

        def real(value: torch.Tensor) -> torch.Tensor:
            result = self._of(value)
            return torch.zeros(value.shape, dtype=value.dtype) if result is None else result

        changed = changed_by(name, args, kwargs)
        if any(id(t) not in self._held for t in changed) or _makes_many(name, args):
            return None
        with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
            real_args, real_kwargs = pytree.tree_map_only(torch.Tensor, real, (args, dict(kwargs)))
            if real_kwargs.get("device") is not None:
                real_kwargs["device"] = torch.device("cpu")
            before = torch.get_rng_state()
            try:
                out = func(*real_args, **real_kwargs)
            except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError):
                return None  # the trace meets the same, and names the line
            if not torch.equal(before, torch.get_rng_state()):
                torch.set_rng_state(before)
                return None
        return None if any(t.numel() > _MOST for t in _tensors(out)) else (out,)

    def _with_places(self, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """``x[mask]`` with a known mask as ``x[places]``, whose shape is known, ``x[number]`` as a view."""
        if name not in ("__getitem__", "__setitem__") or len(args) < 2:
            return args
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        result: list[Any] = []
        for i in index:
            values = self._of(i) if isinstance(i, torch.Tensor) else None
            with _disable_current_modes(), torch._C.DisableTorchFunction():
                result += [i] if values is None else _as_index(values, i, alone=len(index) == 1)
        given = [_constant(i) if isinstance(i, torch.Tensor) and self._of(i) is i else i for i in result]
        return (args[0], tuple(given), *args[2:])

    def _forget(self, tensors: list[torch.Tensor]) -> None:
        """These, and whatever shares their memory, have values that are not known any more."""
        for tensor in tensors:
            held = self._held.get(id(tensor))
            if held is None:
                continue
            storage = held[1].untyped_storage().data_ptr()
            shared = [k for k, (_, v) in self._held.items() if v.untyped_storage().data_ptr() == storage]
            for key in shared:
                del self._held[key]


def _constant(values: torch.Tensor) -> torch.Tensor:
    """A tensor of the trace with these values."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        numbers, shape, dtype = values.flatten().tolist(), values.shape, values.dtype
    return torch.tensor(numbers, dtype=dtype).reshape(shape)


def _selected(x: torch.Tensor, index: Any) -> torch.Tensor:
    """``x[:, number]`` with a number that is a tensor, without asking for its value."""
    full = index if isinstance(index, tuple) else (index,)
    at = [k for k, i in enumerate(full) if isinstance(i, torch.Tensor) and i.dim() == 0]
    if len(at) != 1 or any(isinstance(i, torch.Tensor) and i.dim() for i in full) or Ellipsis in full:
        return x[index]
    (place,) = at
    dim = sum(not isinstance(i, int) for i in full[:place])
    rest = x[(*full[:place], slice(None), *full[place + 1 :])]
    number = full[place].to(torch.int64)
    number = torch.where(number < 0, number + rest.shape[dim], number)
    return rest.index_select(dim, number.reshape(1)).squeeze(dim)


def _as_index(values: torch.Tensor, traced: torch.Tensor, *, alone: bool) -> list[Any]:
    """What to index by in place of a tensor with these values."""
    if values.dtype == torch.bool:
        return list(values.nonzero(as_tuple=True)) if values.dim() else [traced]
    if values.is_floating_point() or values.numel() != 1 or values.dim() > 1:
        return [traced]
    number = int(values)
    if values.dim() == 0:
        return [number]
    return [slice(number, number + 1)] if alone and number >= 0 else [traced]


def _makes_many(name: str, args: tuple[Any, ...]) -> bool:
    """Whether a function makes a large tensor of nothing but numbers."""
    if name in _LIKE:
        return bool(args[0].numel() > _MOST)
    sizes = [n for n in pytree.tree_leaves(args) if type(n) is int]
    return name in ("zeros", "ones", "full", *_NEW) and prod(sizes[: -1 if "full" in name else None]) > _MOST


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [t for t in pytree.tree_leaves(tree) if isinstance(t, torch.Tensor)]


def attribute_of(func: Any) -> str:
    """The attribute that a function gets the value of, or sets, "" for any other function."""
    return getattr(getattr(func, "__self__", None), "__name__", "")


def changed_by(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors that a function of this name changes in place."""
    named = name.endswith("_") and not name.endswith("__")
    first = args[0] if args and (named or name in _IN_PLACE) else ()
    return _tensors((first, kwargs.get("out")))
