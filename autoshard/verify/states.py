"""May a call run with these placements: membership in the states of its rule, without listing them.

The search enumerates states (`autoshard.rules.states`). Here placements are given, and for every mesh axis
the factor is looked for that would give exactly them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from autoshard.ir import TensorType
from autoshard.ir.placement import Layout, P, Partial, Placement, R, Shard, layout_ok
from autoshard.rules.core import Dims, Factored
from autoshard.rules.local import MeshShape
from autoshard.rules.states import (
    AxisState,
    Digit,
    exchange_state,
    mixed_partial,
    nested_exchanges,
    nests,
    one_exchange,
    split_state,
    with_inner,
)
from autoshard.verify.result import Rule

#: more combinations of factors than this are not tried: no op has so many readings
_COMBOS = 4096


def broken_state(
    rule: Factored,
    ins: Sequence[TensorType],
    outs: Sequence[TensorType | None],
    in_layouts: Sequence[Layout],
    out_layouts: Sequence[Layout | None],
    mesh: MeshShape,
) -> tuple[Rule, str] | None:
    """None if the call may run like that on the mesh; else the rule that it breaks, and why.

    ins, outs: global types of tensor inputs and outputs. out_layouts: None where an output is no tensor.
    """
    tensors = [*zip(ins, in_layouts, strict=True), *_tensors(outs, out_layouts)]
    for type_, layout in tensors:
        outside = any(isinstance(p, Shard) and p.dim >= len(type_.shape) for p in layout)
        if outside or not layout_ok(type_.shape, layout, mesh.sizes):
            return "placement", f"{type_} cannot lie as {_text(layout, mesh)}"
    if any(mixed_partial(layout) for _, layout in _tensors(outs, out_layouts)):
        return "partial", "sums and maxima are pending on one tensor: they do not commute"
    per_axis: list[list[AxisState]] = []
    for axis, ways in enumerate(mesh.sizes):
        given = tuple(layout[axis] for layout in in_layouts)
        new = tuple(None if layout is None else layout[axis] for layout in out_layouts)
        result = list(_axis_options(rule, ins, outs, given, new, ways))
        if not result:
            return _why_not(rule, ins, outs, given, new, ways, mesh.names[axis])
        per_axis.append(result)
    inner = with_inner(rule)
    for number, combo in enumerate(product(*per_axis)):
        if number >= _COMBOS:
            break
        exchanged = one_exchange(rule, combo) or nested_exchanges(rule, combo, mesh.sizes)
        if exchanged and nests(rule, inner, combo, mesh.sizes):
            return None
    return "placement", "axes that split the same factor do not cut all tensors at the same places"


def _tensors(
    types: Sequence[TensorType | None], layouts: Sequence[Layout | None]
) -> Iterator[tuple[TensorType, Layout]]:
    for type_, layout in zip(types, layouts, strict=True):
        if type_ is not None and layout is not None:
            yield type_, layout


def _axis_options(
    rule: Factored,
    ins: Sequence[TensorType],
    outs: Sequence[TensorType | None],
    given: tuple[Placement, ...],
    made: tuple[Placement | None, ...],
    ways: int,
) -> Iterator[AxisState]:
    """The ways to run the call on one axis that give exactly these placements."""
    if all(p == R for p in given) and all(p in (R, None) for p in made):
        yield AxisState(given, made)
        return
    for state in readings(rule, ins, outs, given, made, ways):
        if state.inputs == given and _same_outputs(state.outputs, made):
            yield state


def _same_outputs(state: Sequence[Placement | None], made: Sequence[Placement | None]) -> bool:
    return all(m is None or s == m for s, m in zip(state, made, strict=True))


def readings(
    rule: Factored,
    ins: Sequence[TensorType],
    outs: Sequence[TensorType | None],
    given: tuple[Placement, ...],
    made: tuple[Placement | None, ...],
    ways: int,
) -> Iterator[AxisState]:
    """Everything that an axis may do in which some tensor is split as it is here, and pending sums."""
    for group in rule.linear:
        if not any(ins[k].dtype == "bool" for k in group):
            terms = tuple(P if k in group else R for k in range(len(ins)))
            yield AxisState(terms, tuple(None if o is None else P for o in outs))
    if ways < 2:
        return
    digits = dict.fromkeys(_digits(rule, ins, outs, given, made))
    free = set(rule.shardable())
    for factor, digit in digits:
        if factor in free and rule.may_split(factor, digit[0]):
            state = split_state(rule, ins, outs, factor, digit, ways)
            if state is not None:
                yield state
        for pair in (*rule.exchange, *rule.ring):
            if pair[0] == factor:
                state = exchange_state(rule, ins, outs, pair, digit, ways)
                if state is not None:
                    yield state


def _digits(
    rule: Factored,
    ins: Sequence[TensorType],
    outs: Sequence[TensorType | None],
    given: tuple[Placement, ...],
    made: tuple[Placement | None, ...],
) -> Iterator[tuple[int, Digit]]:
    """(factor, part of it) that a split of some tensor may come from."""
    laid: list[tuple[Dims | None, TensorType | None, Placement | None]] = []
    laid += zip(rule.inputs, ins, given, strict=True)
    laid += zip(rule.outputs, outs, made, strict=True)
    for dims, type_, placed in laid:
        if dims is None or type_ is None or not isinstance(placed, Shard):
            continue
        middle = type_.shape[placed.dim] // (placed.blocks * placed.inner)
        above = 1
        for factor in dims[placed.dim]:
            size = rule.sizes[factor]
            outer = placed.outer // above
            paired = outer > 0 or outer % 2 == 0
            if paired and placed.outer % above == 0 and size % outer == 0 and abs(outer) < size:
                # an even split does not say how long the part is: the longest is divided if any is
                yield factor, (outer, size // abs(outer), 0)
                if outer > 0 and size % (outer * middle) == 0:
                    yield factor, (outer, middle, 0)
            above *= size


def _why_not(
    rule: Factored,
    ins: Sequence[TensorType],
    outs: Sequence[TensorType | None],
    given: tuple[Placement, ...],
    made: tuple[Placement | None, ...],
    ways: int,
    axis: str,
) -> tuple[Rule, str]:
    took = ", ".join(map(str, given)) or "nothing"
    pending = [k for k, p in enumerate(given) if isinstance(p, Partial)]
    right = [s for s in readings(rule, ins, outs, given, made, ways) if s.inputs == given]
    if all(p == R for p in given):
        right.append(AxisState(given, tuple(None if o is None else R for o in outs)))
    gives = " or ".join(dict.fromkeys(_row(s.outputs) for s in right))
    if pending and not right:
        terms = ", ".join(f"input {k} is {given[k]}" for k in pending)
        return "partial", f"on axis {axis} {terms}: a pending reduction, in which the op is not linear"
    if right:
        return "placement", f"on axis {axis} it takes {took}, which gives {gives}, not {_row(made)}"
    return "placement", f"on axis {axis} it cannot take {took} and give {_row(made)}"


def _row(placed: Sequence[Placement | None]) -> str:
    return ", ".join(str(p) for p in placed if p is not None)


def _text(layout: Layout, mesh: MeshShape) -> str:
    return " ".join(f"{n}:{p}" for n, p in zip(mesh.names, layout, strict=True))
