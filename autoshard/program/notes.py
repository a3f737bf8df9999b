"""What a dump says beside each node."""

from __future__ import annotations

from autoshard.ir.lowered import Lowered
from autoshard.program.program import NodeNote


def notes_of_segment(lowered: Lowered, name: str) -> tuple[NodeNote, ...]:
    """Where each node comes from and why it is as it is."""
    segment = lowered.segments[name]
    return tuple(
        NodeNote(n.origin.fqn, n.origin.source, segment.why.get(n.name, "")) for n in segment.graph.nodes
    )
