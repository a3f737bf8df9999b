"""Fake tensors with symbolic sizes, and what code decides by them. Tried on torch 2.13.

Leans on ``ShapeEnv``, its ``guards`` and ``var_to_range``, and on the expressions of ``SymInt`` nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import sympy
import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext


def symbolic_mode() -> FakeTensorMode:
    """Tensors without data, whose sizes may be symbols."""
    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())


@contextmanager
def running(mode: FakeTensorMode) -> Iterator[None]:
    """Inside, ops run on tensors of a mode; compound ones by torch's Python code, which keeps symbols."""
    with mode, enable_python_dispatcher():
        yield


def symbolic_like(tensor: torch.Tensor, mode: FakeTensorMode, *, fixed: bool) -> torch.Tensor:
    """A fake CPU tensor whose sizes are symbols, one for all dims that are of one size; unless fixed."""
    like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    kind = DimDynamic.STATIC if fixed else DimDynamic.DUCK
    context: StatelessSymbolicContext[..., None] = StatelessSymbolicContext([kind] * tensor.dim())
    with torch.no_grad():
        fake = mode.from_tensor(like, symbolic_context=context)
        with mode:
            new = torch.empty_strided(fake.shape, fake.stride(), dtype=tensor.dtype, device="cpu")
    return new.requires_grad_(tensor.requires_grad)


def symbols_of(tensor: torch.Tensor) -> list[sympy.Symbol | None]:
    """The symbol of every dim, None for one of a fixed size."""
    sizes = [s.node.expr if isinstance(s, torch.SymInt) else None for s in tensor.shape]
    return [s if isinstance(s, sympy.Symbol) else None for s in sizes]


def decisions_of(mode: FakeTensorMode, symbols: Sequence[sympy.Symbol]) -> list[sympy.Basic]:
    """What has to hold of the symbols for the code that ran to run alike."""
    env = mode.shape_env
    assert env is not None
    result = [guard.expr for guard in env.guards]
    for symbol in symbols:
        bounds = env.var_to_range.get(symbol)
        if bounds is not None:
            result.append(sympy.Ge(symbol, bounds.lower))
            if bounds.upper.is_finite and bounds.upper < 2**31:
                result.append(sympy.Le(symbol, bounds.upper))
    return result
