"""Runs a step's ops on residues in place of numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from autoshard.auditing.field.functions import Functions
from autoshard.auditing.field.ops import MOVES, each_of, operation
from autoshard.auditing.field.residues import COUNTS, InexactError
from autoshard.auditing.recording import PLAIN, Recorder, are_wrapped, tensors
from autoshard.torch_adapters.decompositions import decomposition_of

#: integers up to this are exact
_EXACT = {torch.float32: 1 << 24, torch.float16: 1 << 11, torch.bfloat16: 1 << 8}


class FieldMode(TorchDispatchMode):
    """Of one thread.

    functions: of the reference and all ranks. recorder: while it is paused, ops are the audit's, on numbers.
    error: the first thing that has no exact form.
    """

    def __init__(self, functions: Functions, recorder: Recorder) -> None:
        super().__init__()
        self.functions, self._recorder = functions, recorder
        self.error: InexactError | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if are_wrapped(types):
            return NotImplemented  # a DTensor comes back as the ops of its shard
        try:
            return self._dispatched(func, args, kwargs or {})
        except InexactError as error:
            if self.error is None:
                error.line, self.error = str(self._recorder.line()), error
            raise

    def _dispatched(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        given = tensors((args, kwargs))
        namespace, _, name = func._schema.name.partition("::")
        elsewhere = any(x.is_meta or type(x) not in PLAIN for x in given)
        if self._recorder.paused or namespace != "aten" or elsewhere:
            return func(*args, **kwargs)
        # rounding is left out: what would have fewer bits has all
        kwargs = {
            k: torch.float64 if isinstance(v, torch.dtype) and v in _EXACT else v for k, v in kwargs.items()
        }
        if name == "_local_scalar_dense":
            return _number(func(*args))
        if name.removesuffix("_") in MOVES or func.is_view:
            out = func(*args, **kwargs)
            if not func.is_view:  # of bits, too
                _check_types(given, out)
            return out
        if name.startswith("_foreach_"):
            return self._on_lists(name.removeprefix("_foreach_"), args, kwargs)
        if not any(x.is_floating_point() or x.is_complex() for x in given):
            return func(*args, **kwargs)
        return self._run(func, name, args, kwargs)

    def _run(self, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        """An op of numbers; in place, or to an ``out``, it is that op with its result copied."""
        written = [a.name for a in func._schema.arguments if a.alias_info and a.alias_info.is_write]
        targets = [kwargs.pop(k) for k in written if k in kwargs]
        base = name
        if name.endswith("_") and not targets:
            targets, base = [args[0]], name.removesuffix("_")
        packet = getattr(torch.ops.aten, base, None)
        if packet is None:
            raise InexactError(f"{name} has no exact form")
        out = self._value(packet, base, func, args, kwargs)
        if not targets:
            return out
        for target, value in zip(targets, [out] if isinstance(out, Tensor) else out, strict=True):
            copied = value.to(target.dtype)
            _check_types([value], copied)
            target.copy_(copied)
        return targets[0] if len(targets) == 1 else tuple(targets)

    def _value(self, packet: Any, base: str, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        known = operation(base, packet)
        if known is not None:
            return known(self.functions, *args, **kwargs)
        decomposition = decomposition_of(packet, func)
        if decomposition is None:
            raise InexactError(f"{base} has no exact form")
        with self:
            return decomposition(*args, **kwargs)

    def _on_lists(self, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        name = {"norm": "linalg_vector_norm"}.get(name, name)
        op: Callable[..., Any] = getattr(torch.ops.aten, name)
        with self:
            if name.startswith("addc") and len(args) == 4:  # whose last argument has a name
                outs = [op(*each, value=value) for *each, value in each_of(args)]
            else:
                outs = [op(*each, **kwargs) for each in each_of(args)]
        return None if name.endswith("_") else outs


def _number(value: Any) -> Any:
    """A value that Python reads."""
    if isinstance(value, float) and abs(value) >= COUNTS and value.is_integer():
        raise InexactError("Python reads a value")
    return value


def _check_types(given: list[Tensor], out: Any) -> None:
    """Results of fewer bits hold what they are given, or the step computes in fewer bits."""
    for x in tensors(out) if given else ():
        if x.dtype in (torch.float64, torch.complex128):
            continue
        wide = [g for g in given if g.is_floating_point() and g.dtype != x.dtype and g.numel()]
        limit = _EXACT.get(x.dtype, COUNTS) if x.dtype is not torch.bool else None
        if limit and any(bool((g.isfinite() & (g.abs() > limit)).any()) for g in wide):
            raise InexactError(f"it computes in {str(x.dtype).removeprefix('torch.')}")
