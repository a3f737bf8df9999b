"""What a model's code decides by the sizes of its arguments: for which sizes it is the same graph but for
numbers.

The model runs once on tensors without data whose sizes are symbols. Wherever Python asks for one (an ``if``
on a length, a mask of a window, a table of positions that is long enough), torch notes what was decided.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeAlias

import sympy
import torch
from torch import nn
from torch.utils import _pytree as pytree

from autoshard.capture import tracing
from autoshard.capture.capture import prepared
from autoshard.capture.host_random import no_host_random
from autoshard.capture.inputs import inputs_of, state_of
from autoshard.capture.module_snapshot import ModuleSnapshot
from autoshard.capture.precision import UNCHANGED, MixedPrecision
from autoshard.capture.traced_function import Function
from autoshard.torch_adapters.symbolic import decisions_of, running, symbolic_like, symbolic_mode, symbols_of

#: of every size that varies, (position of an argument, dim) of all that have it
SizedDims: TypeAlias = tuple[tuple[tuple[int, int], ...], ...]


@dataclass(frozen=True)
class SizeConditions:
    """symbols: of the sizes that vary, in the order of dims. conditions: that have to hold."""

    symbols: tuple[sympy.Symbol, ...]
    dims: SizedDims
    conditions: tuple[sympy.Basic, ...]

    def hold(self, shapes: Mapping[int, tuple[int, ...]]) -> bool:
        """Whether arguments of these shapes, by position, take the same way through the model's code."""
        values: dict[sympy.Symbol, int] = {}
        for symbol, places in zip(self.symbols, self.dims, strict=True):
            sizes = {shapes[position][dim] for position, dim in places}
            if len(sizes) > 1:
                return False
            values[symbol] = sizes.pop()
        return all(c.xreplace(values) == sympy.true for c in self.conditions)


def size_conditions(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    batched: Sequence[int] = (),
    precision: MixedPrecision = UNCHANGED,
) -> SizeConditions | None:
    """What the code decides by sizes; None where it cannot be run with symbols, and nothing is known.

    batched: positions of arguments with a batch. One of the size of another dim would share its symbol.
    """
    leaves, spec = pytree.tree_flatten((args, kwargs))
    shapes = {k: tuple(x.shape) for k, x in enumerate(leaves) if isinstance(x, torch.Tensor)}
    others = {n for k, shape in shapes.items() for n in (shape[1:] if k in batched else shape)}
    for k in batched:
        rows = shapes[k][0]
        while rows in others or rows < 2:
            rows += 1
        if rows != shapes[k][0]:
            leaves[k] = torch.zeros((rows, *shapes[k][1:]), dtype=leaves[k].dtype, device="meta")
    args, kwargs = pytree.tree_unflatten(leaves, spec)
    result = _conditions(model, args, kwargs, precision)
    return result if result is not None and result.hold(shapes) else None


def _conditions(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], precision: MixedPrecision
) -> SizeConditions | None:
    inputs = inputs_of(args, kwargs)
    positions = [k for k, leaf in enumerate(inputs.leaves) if leaf.position >= 0]
    mode = symbolic_mode()
    try:
        with ExitStack() as stack:
            model, _, _ = stack.enter_context(prepared(model, kwargs))
            stack.enter_context(ModuleSnapshot.of(model))
            state = state_of(model)
            held = [symbolic_like(t, mode, fixed=True) for t in state.tensors]
            given = [symbolic_like(t, mode, fixed=False) for t in inputs.tensors]
            symbols = [symbols_of(x) for x in given]
            seed = symbolic_like(torch.empty((), dtype=torch.int64, device="meta"), mode, fixed=True)
            function = Function(model, state, inputs, "none", None, precision=precision)
            for context in (torch.inference_mode(False), torch.enable_grad(), tracing.compiling()):
                stack.enter_context(context)
            stack.enter_context(no_host_random())
            stack.enter_context(running(mode))
            function(*held, *given, seed)
    except Exception:  # whatever has no symbolic form, of torch or of the model
        return None
    dims: dict[sympy.Symbol, list[tuple[int, int]]] = {}
    for position, row in zip(positions, symbols, strict=True):
        for dim, symbol in enumerate(row):
            if symbol is not None:
                dims.setdefault(symbol, []).append((position, dim))
    symbols_found = tuple(dims)
    return SizeConditions(
        symbols_found, tuple(map(tuple, dims.values())), tuple(decisions_of(mode, symbols_found))
    )
