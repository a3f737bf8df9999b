"""A norm whose rows only go into a quantised gather quantises them itself (`kernels/norm_quant.py`).

The rows are then never written: the norm gives the wire that ranks send, and the gather begins with it. The
numbers are the same bit for bit. This comes after `fuse_kernels`, which makes the norms, and after
`quantise_collectives`, which decides what is quantised, and in which groups. A LayerNorm that `fuse_kernels`
left as it was, as a kernel in its place would move no less, moves less without its rows.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from autoshard.ir import DTYPES, Dtype, Node, Ref
from autoshard.ir.collectives import ALL_GATHER_Q, ALL_GATHER_WIRE
from autoshard.ir.lowered import Lowered, LoweredSegment, PlacedValue
from autoshard.ir.names import free_name
from autoshard.ir.quantized import WIRE_BITS
from autoshard.passes.fuse.norm_patterns import UseIndex
from autoshard.passes.fuse.norm_statistics import NORM, usual
from autoshard.rules.local import MeshShape
from autoshard.rules.quantized_gather import NORMS, WIRED, rows_of_rank, wire_of


def quantise_norms(lowered: Lowered, mesh: MeshShape) -> Lowered:
    """The program in which norms give wires where nothing but one quantised gather reads their rows."""
    segments = {name: _segment(segment, mesh) for name, segment in lowered.segments.items()}
    return replace(lowered, segments=segments)


def _segment(segment: LoweredSegment, mesh: MeshShape) -> LoweredSegment:
    index = UseIndex(segment.graph)
    changed: dict[str, Node] = {}
    layouts, why = dict(segment.layouts), dict(segment.why)
    for gather in segment.graph.nodes:
        norm = _norm_before(gather, index)
        if norm is None:
            continue
        new = WIRED[norm.op]
        place, _ = NORMS[new]
        rows = norm.outs[place]
        placed, group = PlacedValue(index.types[rows], layouts[rows]), gather.args[4]
        wire, shape = wire_of(placed, group, mesh), rows_of_rank(placed, mesh)
        if wire is None or shape is None:
            continue
        name = free_name(f"{rows}_wire", layouts)
        outs, types = list(norm.outs), list(norm.types)
        outs[place], types[place] = name, wire.type
        fused = replace(norm, op=new, args=(*norm.args, group), outs=tuple(outs), types=tuple(types))
        args = (Ref(name), gather.args[1], gather.args[2][0], group, shape, Dtype(placed.type.dtype))
        changed[norm.name] = fused
        changed[gather.name] = replace(gather, op=ALL_GATHER_WIRE.op, args=args)
        del layouts[rows]
        layouts[name] = wire.layout
        written = prod(shape) * DTYPES[placed.type.dtype][1] / 2**20
        note = f"its rows leave as int8: {written:.3g} MiB are not written"
        said = why.pop(norm.name, "")
        why[fused.name] = f"{said}; {note}" if said else note
    if not changed:
        return segment
    nodes = tuple(changed.get(n.name, n) for n in segment.graph.nodes)
    return LoweredSegment(replace(segment.graph, nodes=nodes), layouts, why)


def _norm_before(gather: Node, index: UseIndex) -> Node | None:
    """The norm whose rows a quantised gather takes, if nothing else does."""
    if gather.op != ALL_GATHER_Q.op or gather.args[3] != (WIRE_BITS,) or not isinstance(gather.args[1], str):
        return None
    (rows,) = gather.args[0]
    norm = index.made_by(rows, *WIRED, NORM)
    norm = _as_kernel(norm) if norm is not None and norm.op == NORM else norm
    if norm is None or norm.outs[NORMS[WIRED[norm.op]][0]] != rows.name:
        return None
    return norm if index.only_use(rows.name, ALL_GATHER_Q.op) is gather else None


def _as_kernel(norm: Node) -> Node | None:
    """A LayerNorm as the op that a kernel computes, whose statistics are never in half precision."""
    if not usual(norm) or any(t is None or t.dtype != "f32" for t in norm.types[1:]):
        return None
    x, _, weight, bias, eps = norm.args
    return replace(norm, op="autoshard.layer_norm.default", args=(x, weight, bias, eps))
