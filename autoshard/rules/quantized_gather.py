"""Rows of a norm that leave it quantised, and their gather: together what a norm and a quantised gather are.

* ``wire, rstd = autoshard.rms_norm_quantise(x, weight, eps, narrow, group)``, and ``add_rms_norm_quantise``
  with the sum in front, and ``wire, mean, rstd = autoshard.layer_norm_quantise(x, weight, bias, eps, group)``
  and ``add_layer_norm_quantise`` likewise: ``wire`` is the wire of `kernels.quant`, 8 bits, of a rank's
  normalised rows;
* ``y = comm.all_gather_wire(wire, axis, (dim, outer, inner, size), group, shape, dtype)``: the rows of all
  ranks, joined along a dim. shape, dtype: of a rank's rows.

A wire is no tensor whose elements a rule could follow: its type is the bytes of all ranks that hold different
rows, one after the other, and it is split on the axes on which rows are. All shards of rows are alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from autoshard.ir import Dtype, Node, Ref, TensorType
from autoshard.ir.comm import GATHER_WIRE
from autoshard.ir.lowered import PlacedValue
from autoshard.ir.placement import Partial, R, Shard
from autoshard.ir.quantized import packed_bytes
from autoshard.rules.local import MeshShape, symbolic_shape

#: norm -> the same with its rows as a wire
WIRED = {
    "autoshard.rms_norm.default": "autoshard.rms_norm_quantise.default",
    "autoshard.add_rms_norm.default": "autoshard.add_rms_norm_quantise.default",
    "autoshard.layer_norm.default": "autoshard.layer_norm_quantise.default",
    "autoshard.add_layer_norm.default": "autoshard.add_layer_norm_quantise.default",
}
#: such a norm -> (which of its outputs the wire is, which argument says how many elements share a scale)
NORMS = {made: (1, 5) if norm.startswith("autoshard.add_") else (0, 4) for norm, made in WIRED.items()}
BITS = 8
#: types whose values may travel with fewer bits
FLOATS = ("f32", "bf16", "f16")


@dataclass(frozen=True)
class WireGather:
    """A gather as its text says it; see the top of this file."""

    wire: str
    axis: str
    where: tuple[Any, ...]
    group: int
    shape: tuple[int, ...]
    dtype: str


def wire_gather(node: Node) -> WireGather | None:
    """What a gather of wires says, None if its text is not that of one."""
    args = node.args
    if node.op != GATHER_WIRE or len(args) != 6 or node.kwargs or len(node.outs) != 1:
        return None
    wire, axis, where, group, shape, dtype = args
    if not isinstance(wire, Ref) or not isinstance(axis, str):
        return None
    if not isinstance(where, tuple) or len(where) != 4 or not isinstance(dtype, Dtype):
        return None
    if type(group) is not int or not isinstance(shape, tuple) or not all(type(n) is int for n in shape):
        return None
    return WireGather(wire.name, axis, where, group, shape, dtype.name)


def rows_of_rank(rows: PlacedValue, mesh: MeshShape) -> tuple[int, ...] | None:
    """The shape of a rank's part of rows, None unless all ranks hold as many of them, and each whole."""
    last = len(rows.type.shape) - 1
    if any(isinstance(p, Partial) or (isinstance(p, Shard) and p.dim == last) for p in rows.layout):
        return None
    shape = symbolic_shape(rows.type.shape, rows.layout, mesh)
    return tuple(n for n in shape if isinstance(n, int)) if all(isinstance(n, int) for n in shape) else None


def wire_of(rows: PlacedValue, group: int, mesh: MeshShape) -> PlacedValue | None:
    """Type and placement of the wire of rows in groups of so many elements, None if there is none."""
    shape = rows_of_rank(rows, mesh)
    if not shape or group & (group - 1) or not 32 <= group <= 4096 or shape[-1] % group:
        return None
    split = [isinstance(p, Shard) for p in rows.layout]
    ways = prod(size for size, s in zip(mesh.sizes, split, strict=True) if s)
    nbytes = packed_bytes((prod(shape),), (BITS,), group, 0)
    return PlacedValue(TensorType((ways * nbytes,), "u8"), tuple(Shard(0) if s else R for s in split))
