"""A program in which every row of experts is a group of its own: what it computes is what the model does.

Which rows are alike depends on the tokens of a rank, and nearly equal values may be hashed unlike. A row that
is its group's mean gets back what its expert made of it: faults in all else still show.
"""

from __future__ import annotations

from dataclasses import replace

from autoshard.ir import Node
from autoshard.ir.lowered import LoweredSegment
from autoshard.ir.similar_rows import LSH_GROUPS
from autoshard.program.program import Program


def with_rows_alone(program: Program) -> Program:
    """The same program without hashes; itself where it groups no rows."""
    segments = {name: _segment(segment) for name, segment in program.lowered.segments.items()}
    main = tuple(_node(item) if isinstance(item, Node) else item for item in program.lowered.main)
    lowered = replace(program.lowered, segments=segments, main=main)
    return program if lowered == program.lowered else replace(program, lowered=lowered)


def _segment(segment: LoweredSegment) -> LoweredSegment:
    return replace(segment, graph=replace(segment.graph, nodes=tuple(map(_node, segment.graph.nodes))))


def _node(node: Node) -> Node:
    return replace(node, args=(*node.args[:3], 0, *node.args[4:])) if node.op == LSH_GROUPS else node
