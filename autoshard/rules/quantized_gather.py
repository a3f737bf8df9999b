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

from math import prod

from autoshard.ir import TensorType
from autoshard.ir.lowered import PlacedValue
from autoshard.ir.placement import Partial, R, Shard
from autoshard.ir.quantized import WIRE_BITS, packed_bytes
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
#: types whose values may travel with fewer bits
FLOATS = ("f32", "bf16", "f16")


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
    nbytes = packed_bytes((prod(shape),), (WIRE_BITS,), group, 0)
    return PlacedValue(TensorType((ways * nbytes,), "u8"), tuple(Shard(0) if s else R for s in split))
