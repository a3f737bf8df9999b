"""From the factors of a call to all its states on a mesh: every legal way to run it on shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product, repeat
from math import prod
from typing import TypeAlias, cast

from autoshard.ir import TensorType
from autoshard.ir.placement import (
    Layout,
    P,
    Partial,
    Placement,
    R,
    Shard,
    dims_compatible,
    layout_ok,
    local_extent,
    shard_of_digit,
)
from autoshard.rules.core import Dims, Factored

#: a part of a factor: (elements above it, its own elements, class number)
Digit: TypeAlias = tuple[int, int, int]
#: (axis index, classes that the split would cut) -> may this axis split it
AxisFilter: TypeAlias = Callable[[int, frozenset[int]], bool]


@dataclass(frozen=True, slots=True)
class OpState:
    """One way to run a call on the mesh.

    ways: over how many ranks the work is divided.
    """

    inputs: tuple[Layout, ...]
    outputs: tuple[Layout | None, ...]
    ways: int


@dataclass(frozen=True, slots=True)
class AxisState:
    """What one axis does. factor, part: the factor it splits, and how, seen as a dim of its own.

    owners: the factor that it splits at the same time, if it exchanges rows, or passes keys round.
    """

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement | None, ...]
    factor: int | None = None
    part: Shard | None = None
    owners: int | None = None

    @property
    def split(self) -> bool:
        return self.factor is not None


def placement_of(
    dims: Dims, type_: TensorType, sizes: Sequence[int], factor: int, digit: Digit, ways: int
) -> Placement | None:
    """Placement of a tensor when a part of a factor is split; None if that cannot be; R if it lacks it."""
    for dim, factors in enumerate(dims):
        if factor not in factors:
            continue
        above = 1
        for f in factors:
            if f == factor:
                break
            above *= sizes[f]
        return shard_of_digit(type_.shape[dim], dim, above * digit[0], digit[1], ways)
    return R


def digit_of(dims: Dims, sizes: Sequence[int], placed: Placement, ways: int) -> tuple[int, Digit] | None:
    """The factor, and the part of it, that a placement of a tensor splits; None if it splits none."""
    if not isinstance(placed, Shard):
        return None
    above, full = 1, prod(sizes[f] for f in dims[placed.dim])
    for factor in dims[placed.dim]:
        size = sizes[factor]
        part, rest = divmod(placed.outer, above)
        if part and not rest and size % part == 0:
            digit: Digit = (part, size // abs(part), -1)
            if shard_of_digit(full, placed.dim, placed.outer, digit[1], ways) == placed:
                return factor, digit
        above *= size
    return None


def split_state(
    rule: Factored,
    ins: Sequence[TensorType],
    outs: Sequence[TensorType | None],
    factor: int,
    digit: Digit,
    ways: int,
) -> AxisState | None:
    """What an axis of ``ways`` ranks does that splits a part of a factor; None if that cannot be."""
    reduce = dict(rule.reduce).get(factor)
    inputs: list[Placement] = []
    for dims, type_ in zip(rule.inputs, ins, strict=True):
        placed = placement_of(dims, type_, rule.sizes, factor, digit, ways)
        if placed is None:
            return None
        inputs.append(placed)
    outputs: list[Placement | None] = []
    for out_dims, out_type in zip(rule.outputs, outs, strict=True):
        if out_dims is None or out_type is None:
            outputs.append(None)
            continue
        placed = placement_of(out_dims, out_type, rule.sizes, factor, digit, ways)
        if placed is None:
            return None
        if placed == R:
            if reduce is None:
                return None
            placed = Partial(reduce)
        outputs.append(placed)
    part = shard_of_digit(rule.sizes[factor], 0, digit[0], digit[1], ways)
    return AxisState(tuple(inputs), tuple(outputs), factor, part)


def exchange_state(
    rule: Factored,
    ins: Sequence[TensorType],
    outs: Sequence[TensorType | None],
    pair: tuple[int, int],
    digit: Digit,
    ways: int,
) -> AxisState | None:
    """Rows split at ``digit``, and owners in contiguous ranges where a tensor has both; None if that cannot
    be. Keys of a ring are split as their rows are."""
    rows, owners = pair
    full: Digit = (1, rule.sizes[owners], -1)
    if pair in rule.ring:
        if not _rounds(rule, rows, digit, ways):
            return None
        full = digit
    placed: list[Placement | None] = []
    tensors = [*zip(rule.inputs, ins, strict=True), *zip(rule.outputs, outs, strict=True)]
    for number, (dims, type_) in enumerate(tensors):
        if dims is None or type_ is None:
            placed.append(None)
            continue
        by_rows = placement_of(dims, type_, rule.sizes, rows, digit, ways)
        by_owner = placement_of(dims, type_, rule.sizes, owners, full, ways)
        if by_rows is None or by_owner is None:
            return None
        placed.append(by_rows if by_owner == R else by_owner)
        if number >= len(ins) and placed[-1] == R:
            return None
    part = shard_of_digit(rule.sizes[rows], 0, digit[0], digit[1], ways)
    inputs = tuple(p for p in placed[: len(ins)] if p is not None)
    return AxisState(inputs, tuple(placed[len(ins) :]), rows, part, owners)


def _rounds(rule: Factored, rows: int, digit: Digit, ways: int) -> bool:
    """Whether keys may go round an axis that splits rows at ``digit``: in equal parts, in the order of their
    positions or in a zigzag."""
    outer, size, _ = digit
    fits = rule.may_split(rows, outer) and outer in (1, -2) and size * abs(outer) == rule.sizes[rows]
    return fits and size % ways == 0


def _axis_states(
    rule: Factored,
    ins: Sequence[TensorType],
    outs: Sequence[TensorType | None],
    digits: Sequence[Sequence[Digit]],
    axis: int,
    ways: int,
    allowed: AxisFilter,
    must: bool,
) -> list[AxisState]:
    full: tuple[Placement | None, ...] = tuple(None if o is None else R for o in outs)
    result: dict[AxisState, frozenset[int]] = {AxisState((R,) * len(ins), full): frozenset()}
    if ways > 1:
        for factor in rule.shardable():
            # smaller parts first: where two parts give the same placement, the split cuts them both
            for digit in sorted(digits[factor], key=lambda d: (d[1], d[0])):
                if not rule.may_split(factor, digit[0]):
                    continue
                state = split_state(rule, ins, outs, factor, digit, ways)
                if state is not None:
                    result[state] = result.get(state, frozenset()) | {digit[2]}
        for pair in (*rule.exchange, *rule.ring):
            for digit in digits[pair[0]]:
                state = exchange_state(rule, ins, outs, pair, digit, ways)
                if state is not None:
                    result[state] = result.get(state, frozenset()) | {digit[2]}
        for group in rule.linear:
            if any(ins[k].dtype == "bool" for k in group):
                continue  # the sum of truth values is not one
            partial = tuple(P if k in group else R for k in range(len(ins)))
            sums: tuple[Placement | None, ...] = tuple(None if o is None else P for o in outs)
            result[AxisState(partial, sums)] = frozenset()
    states = [s for s, classes in result.items() if not s.split or allowed(axis, classes)]
    split = [s for s in states if s.split]
    return split if must and split else states


def op_states(
    rule: Factored,
    ins: Sequence[TensorType],
    outs: Sequence[TensorType | None],
    digits: Sequence[Sequence[Digit]],
    mesh_sizes: Sequence[int],
    allowed: AxisFilter,
    must: Sequence[bool] = (),
) -> list[OpState]:
    """All states of a call on the mesh.

    digits: per factor the parts that may be split (see `autoshard.rules.factor_splits`). must: per axis,
    whether the work has to be divided over it where that is possible at all.
    """
    forced = tuple(must) or (False,) * len(mesh_sizes)
    states = _combined(rule, ins, outs, digits, mesh_sizes, allowed, forced)
    return states or _combined(rule, ins, outs, digits, mesh_sizes, allowed, (False,) * len(mesh_sizes))


def _combined(
    rule: Factored,
    ins: Sequence[TensorType],
    outs: Sequence[TensorType | None],
    digits: Sequence[Sequence[Digit]],
    mesh_sizes: Sequence[int],
    allowed: AxisFilter,
    must: Sequence[bool],
) -> list[OpState]:
    """Every legal combination of the axes' states."""
    per_axis = [
        _axis_states(rule, ins, outs, digits, axis, ways, allowed, must[axis])
        for axis, ways in enumerate(mesh_sizes)
    ]
    result: dict[tuple[tuple[Layout, ...], tuple[Layout | None, ...]], OpState] = {}
    outside = with_inner(rule)
    sizes = repeat(mesh_sizes)
    # many combinations lay a tensor out alike
    fine_in: list[dict[Layout, bool]] = [{} for _ in ins]
    fine_out: list[dict[Layout, bool]] = [{} for _ in outs]
    for combo in product(*per_axis):
        inputs: tuple[Layout, ...] = tuple(zip(*[s.inputs for s in combo], strict=True))
        if not all(map(_fine, ins, inputs, fine_in, sizes)):
            continue
        outputs = tuple([_join(placed) for placed in zip(*[s.outputs for s in combo], strict=True)])
        if not all(map(_fine_output, outs, outputs, fine_out, sizes)):
            continue
        if not nests(rule, outside, combo, mesh_sizes) or not one_exchange(rule, combo):
            continue
        ways = 1
        for state, size in zip(combo, mesh_sizes, strict=True):
            ways *= size if state.split else 1
        key = (inputs, outputs)
        if key not in result or result[key].ways < ways:
            result[key] = OpState(inputs, outputs, ways)
    return list(result.values())


def one_exchange(rule: Factored, combo: Sequence[AxisState]) -> bool:
    """Whether at most one axis exchanges rows, and then no other splits their owners; nor the rows, if their
    keys go round."""
    pairs = [(s.factor, s.owners) for s in combo if s.owners is not None]
    if not pairs:
        return True
    factors = [s.factor for s in combo]
    rows, owners = pairs[0]
    alone = factors.count(rows) == 1 or pairs[0] not in rule.ring
    return len(pairs) == 1 and owners not in factors and alone


def nested_exchanges(rule: Factored, combo: Sequence[AxisState], mesh_sizes: Sequence[int]) -> bool:
    """Whether the axes that exchange rows do so with the same owners, of which each has as many ranks as any
    other: rows go to the ranks of the first, and from there to those of the next."""
    pairs = {(s.factor, s.owners) for s in combo if s.owners is not None}
    if len(pairs) != 1 or not pairs.isdisjoint(rule.ring):
        return not pairs
    ((_, owners),) = pairs
    assert owners is not None
    ways = prod(size for s, size in zip(combo, mesh_sizes, strict=True) if s.owners is not None)
    return rule.sizes[owners] % ways == 0 and all(s.factor != owners for s in combo)


def nests(
    rule: Factored, outside: frozenset[int], combo: Sequence[AxisState], mesh_sizes: Sequence[int]
) -> bool:
    """Whether axes that split the same factor cut every tensor that has it at the same places.

    Placements do not say which factor they come from: 6 rows of 4 on 2 x 2 ranks are (2, 1, 2, 1) rows,
    but 24 elements are 6 on every rank. So a factor in ``outside``, which has others inside it in some
    tensor, can only be split several times if that is even.
    """
    factors = [s.factor for s in combo if s.factor is not None]
    if len(set(factors)) == len(factors):
        return True
    splits: dict[int, list[tuple[Shard, int]]] = {}
    for state, ways in zip(combo, mesh_sizes, strict=True):
        if state.factor is not None and state.part is not None:
            splits.setdefault(state.factor, []).append((state.part, ways))
    return all(
        len(shards) == 1 or _nested_ok(rule.sizes[factor], tuple(shards), factor not in outside)
        for factor, shards in splits.items()
    )


@lru_cache(maxsize=1 << 14)
def _nested_ok(size: int, shards: tuple[tuple[Shard, int], ...], uneven: bool) -> bool:
    """Whether axes may split a dim together; uneven: also into parts that are not all equal."""
    if not dims_compatible(size, shards):
        return False
    last = [(part, ways, ways - 1) for part, ways in shards]
    return uneven or local_extent(size, last)[1] * prod(w for _, w in shards) == size


def with_inner(rule: Factored) -> frozenset[int]:
    """Factors that are not the innermost of a dim of some tensor."""
    tensors = [*rule.inputs, *(o for o in rule.outputs if o is not None)]
    return frozenset(f for dims in tensors for dim in dims for f in dim[:-1])


def _join(placed: tuple[Placement | None, ...]) -> Layout | None:
    return None if None in placed else cast("Layout", placed)


def _fine(type_: TensorType, layout: Layout, known: dict[Layout, bool], sizes: Sequence[int]) -> bool:
    """Whether a tensor can lie like that; known: what was found out about this tensor."""
    result = known.get(layout)
    if result is None:
        result = known[layout] = layout_ok(type_.shape, layout, sizes)
    return result


def _fine_output(
    type_: TensorType | None, layout: Layout | None, known: dict[Layout, bool], sizes: Sequence[int]
) -> bool:
    """The same of a result, which may be missing."""
    if layout is None:
        return True
    result = known.get(layout)
    if result is None:
        lies = type_ is None or layout_ok(type_.shape, layout, sizes)
        result = known[layout] = lies and not mixed_partial(layout)
    return result


def mixed_partial(layout: Layout) -> bool:
    """Sums and maxima pending on one tensor do not commute."""
    return len({p.reduce for p in layout if isinstance(p, Partial)}) > 1
