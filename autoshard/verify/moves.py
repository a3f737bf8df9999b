"""Collectives: each brings one value from one placement into another on one axis, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from autoshard.cost.reshard import step_between
from autoshard.ir import Arg, Node, Origin, Ref, TensorType
from autoshard.ir.collectives import COLLECTIVES, TensorTransfer, TransferKind, transfers_of, wheres_of
from autoshard.ir.lowered import PlacedValue
from autoshard.ir.offload import HOST_OPS
from autoshard.ir.placement import Layout, Partial, Shard, layout_ok
from autoshard.passes.partition.insert_collectives import collective_node
from autoshard.rules.local import MeshShape
from autoshard.verify.hierarchical_collectives import wrong_precision, wrong_step
from autoshard.verify.indices import axes_of, coordinates, cut, held_at, in_runs, join
from autoshard.verify.result import Rule

#: what changes where a value lies, and not what it is
MOVES = frozenset((*(o for o, s in COLLECTIVES.items() if s.moves), *HOST_OPS))


def moves_of(node: Node) -> tuple[TensorTransfer, ...] | None:
    """The values of an op that moves them, one by one; None if its text is not that of one."""
    if node.op not in HOST_OPS:
        return transfers_of(node)
    sources = node.args[0] if len(node.args) == 1 and isinstance(node.args[0], tuple) else ()
    if len(sources) != len(node.outs) or not all(isinstance(s, Ref) for s in sources):
        return None
    return tuple(TensorTransfer(s.name, o, ()) for s, o in zip(sources, node.outs, strict=True))


def broken_moves(
    node: Node, values: Mapping[str, PlacedValue], mesh: MeshShape
) -> Iterator[tuple[Rule, str, str]]:
    """(rule, value, why) of everything that is wrong with a collective. values: those around it."""
    result = moves_of(node)
    if result is None:
        yield "collective", node.outs[0], "its arguments are not those of such a collective"
        return
    if node.op in HOST_OPS:
        for move in result:
            if values[move.source] != values[move.out]:
                yield "placement", move.out, "host memory changes neither type nor placement of a value"
        return
    spec = COLLECTIVES[node.op]
    names = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    if not names or len(set(names)) < len(names) or any(name not in mesh.names for name in names):
        yield "collective", node.outs[0], f"the mesh has no axis {node.args[1]!r}"
        return
    axes = tuple(mesh.names.index(name) for name in names)
    if spec.family == "quantised":
        why = wrong_precision(node.args[3:], len(result))
        if why:
            yield "collective", node.outs[0], why
    dtypes = {values[m.source].type.dtype for m in result}
    if len(dtypes) > 1:
        yield "collective", node.outs[0], f"one message cannot hold {' and '.join(sorted(dtypes))}"
    for move in result:
        why = _wrong(move, node, spec.transfer, axes, values, mesh)
        if why:
            yield "collective", move.out, why


def _wrong(
    move: TensorTransfer,
    node: Node,
    kind: TransferKind,
    axes: tuple[int, ...],
    values: Mapping[str, PlacedValue],
    mesh: MeshShape,
) -> str:
    """What is wrong with one value of a collective, "" if nothing."""
    axis = axes[0]
    before, after = values[move.source], values[move.out]
    if before.type != after.type:
        return f"it is given {before.type} and gives {after.type}"
    if not layout_ok(after.type.shape, after.layout, mesh.sizes):
        return f"{after.type} cannot lie as {_text(after.layout, mesh)}"
    dims = {
        p.dim for value in (before, after) for p in (value.layout[k] for k in axes) if isinstance(p, Shard)
    }
    if before.type.stays(*dims):
        return "the slots of experts, and tokens that they refer to, stay where they are"
    step = step_between(before.type.shape, before.layout, after.layout, mesh.sizes)
    came = f"{_text(before.layout, mesh)} becomes {_text(after.layout, mesh)}"
    if len(axes) > 1 or (step is None and kind in ("all_gather", "reduce_scatter")):
        why = wrong_step(kind, axes, move.where, before, after, mesh.sizes)
        return f"{came}, which no single collective does: {why}" if why else ""
    if step is None:
        return f"{came}, which no single collective does"
    if (step.kind, step.axis) != (kind, axis):
        return f"{came}: that is {step.kind} over {mesh.names[step.axis]}, not {kind} over {mesh.names[axis]}"
    given = before.layout[axis]
    reduce = given.reduce if isinstance(given, Partial) else "sum"
    if node.kwarg("op", "sum") != reduce:
        return f"what is pending is a {reduce}, it takes the {node.kwarg('op', 'sum')}"
    right = _where(kind, axis, before.type, (before.layout, after.layout), mesh)
    if _normal(move.where) != _normal(right):
        return f"it cuts or joins at {_normal(move.where)}; {came} is {_normal(right)}"
    if not _same_elements(kind, axis, move.where, before, after, mesh.sizes):
        return f"{came}, but ranks would hold other elements"
    return ""


@lru_cache(maxsize=8192)
def _same_elements(
    kind: TransferKind,
    axis: int,
    where: tuple[Arg, ...],
    before: PlacedValue,
    after: PlacedValue,
    sizes: tuple[int, ...],
) -> bool:
    """Whether a collective, done on indices, gives every rank the elements that its new placement names."""
    if kind == "all_reduce":
        return (
            before.layout[:axis] + before.layout[axis + 1 :] == after.layout[:axis] + after.layout[axis + 1 :]
        )
    dims = {int(where[0]), int(where[1])} if kind == "all_to_all" else {int(where[0])}
    ways = sizes[axis]
    for dim in dims:
        size, layouts, short = before.type.shape[dim], (before.layout, after.layout), False
        if kind == "all_to_all" or where[3] is None:
            size, layouts, short = in_runs(size, layouts, dim, sizes, _parts(kind, dim, where, ways))
        axes = sorted({*axes_of(before.layout, dim), *axes_of(after.layout, dim)} - {axis})
        single = (where[0], where[1], 1, None) if short and kind != "all_to_all" else where
        for at in coordinates(axes, sizes):
            have = [held_at(size, layouts[0], dim, sizes, {**at, axis: k}) for k in range(ways)]
            for k in range(ways):
                want = held_at(size, layouts[1], dim, sizes, {**at, axis: k})
                if not np.array_equal(_given(kind, dim, single, have, k, ways), want):
                    return False
    return True


def _parts(kind: str, dim: int, where: tuple[Arg, ...], ways: int) -> int:
    """The parts that a collective cuts what a rank has of a dim into, or joins it by."""
    if kind == "all_gather":
        return abs(int(where[1]))
    if kind in ("slice", "reduce_scatter"):
        return abs(int(where[1])) * int(where[2]) * ways
    return abs(int(where[2]) * ways if dim == where[0] else int(where[3]))


def _given(
    kind: str, dim: int, where: tuple[Arg, ...], have: list[NDArray[np.int64]], rank: int, ways: int
) -> NDArray[np.int64]:
    """The elements of a dim that a rank of the group has after the collective."""
    if kind == "all_gather":
        return join(have, where[1])
    if kind in ("slice", "reduce_scatter"):
        return cut(have[rank], where[1], where[2], ways, rank)
    # all to all: one dim is cut on every rank, the other joined
    if dim == where[0]:
        return cut(have[rank], where[2], 1, ways, rank)
    return join(have, where[3])


def _where(
    kind: TransferKind, axis: int, type_: TensorType, layouts: tuple[Layout, Layout], mesh: MeshShape
) -> tuple[Arg, ...]:
    """The place at which the collective between two layouts cuts or joins."""
    node = collective_node(mesh, kind, axis, "x", type_, layouts, "y", Origin(), False)
    return wheres_of(node)[0]


def _normal(where: tuple[Arg, ...]) -> tuple[Arg, ...]:
    """Where parts are even, how long the multiples are that they are made of does not matter."""
    if len(where) == 4 and where[3] is None:
        return (where[0], where[1], 1, None)
    return where


def _text(layout: Layout, mesh: MeshShape) -> str:
    return " ".join(f"{n}:{p}" for n, p in zip(mesh.names, layout, strict=True))
