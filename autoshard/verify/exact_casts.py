"""A program whose casts to 8 bits round nothing: what it computes is what the model does.

Casts amplify: where sums are added up in another order, by 1e-7, some operands are rounded to other codes,
and gradients of two programs that are both right differ by as much as casting costs. Without rounding, a
quotient by a scale times that scale is the operand, if all ranks mean the same scale: faults still show.
"""

from __future__ import annotations

from dataclasses import replace

from autoshard.ir import Dtype, Node, TensorType
from autoshard.ir.lowered import LoweredSegment
from autoshard.ir.scaled import ELEMENTS, FP4, ROUNDS
from autoshard.program.program import Program

_WIDE, _PAIR = "f32", "c64"


def with_exact_casts(program: Program) -> Program:
    """The same program with 32 bits for every cast operand; itself where it casts none."""
    if not program.products:
        return program
    lowered = program.lowered
    main = tuple(_node(i) if isinstance(i, Node) else i for i in lowered.main)
    values = {n: replace(p, type=_type(p.type)) for n, p in lowered.values.items()}
    segments = {n: _segment(s) for n, s in lowered.segments.items()}
    return replace(program, lowered=replace(lowered, segments=segments, main=main, values=values))


def _segment(segment: LoweredSegment) -> LoweredSegment:
    graph = segment.graph
    inputs = tuple((n, _type(t)) for n, t in graph.inputs)
    return replace(segment, graph=replace(graph, inputs=inputs, nodes=tuple(map(_node, graph.nodes))))


def _node(node: Node) -> Node:
    types = tuple(t and _type(t) for t in node.types)
    args = node.args
    if node.op in ROUNDS:
        args = (*args[:2], Dtype(_of(args[2].name)), *args[3:])
    return replace(node, args=args, types=types)


def _type(type_: TensorType) -> TensorType:
    return replace(type_, dtype=_of(type_.dtype))


def _of(dtype: str) -> str:
    """The type of a cast that rounds nothing: a pair of 4-bit elements becomes one of two floats."""
    if dtype not in ELEMENTS:
        return dtype
    return _PAIR if dtype == FP4 else _WIDE
