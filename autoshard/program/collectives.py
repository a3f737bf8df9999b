"""The collectives of a program by the names that texts and errors give them: ``c000``, ``c001``, ..."""

from __future__ import annotations

from dataclasses import dataclass

from autoshard.ir import Node
from autoshard.ir.collectives import COLLECTIVES, axes_of, is_message
from autoshard.program.program import Program


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective of a program.

    name: ``c017``; numbers follow the text of the program. segment: that it stands in, "" for a part. op:
    ``all_gather``. axis: of the mesh. value: that it makes, the first if there are several. fqn, source: the
    user's module and line, "" where unknown. gradients: names of the parameters whose gradients it makes.
    """

    name: str
    segment: str
    op: str
    axis: str
    value: str
    fqn: str = ""
    source: str = ""
    gradients: tuple[str, ...] = ()

    def __str__(self) -> str:
        """``c017 all_gather over tp, layers.0.o_proj (model.py:31)``"""
        text = f"{self.name} {self.op} over {self.axis}"
        if self.fqn:
            text += f", {self.fqn}"
        elif self.gradients:
            more = f" and {len(self.gradients) - 1} others" if len(self.gradients) > 1 else ""
            text += f", gradient of {self.gradients[0]}{more}"
        return f"{text} ({self.source})" if self.source else text


#: (segment, value): the segment is "" for what stands in a part
Place = tuple[str, str]


def collectives_of(program: Program) -> dict[Place, Collective]:
    """All collectives by where they stand, in the order of the text: segments first, then the parts."""
    results: dict[Place, Collective] = {}
    for name, segment in program.lowered.segments.items():
        notes = program.notes.get(name, ())
        for number, node in enumerate(segment.graph.nodes):
            if is_message(node):
                note = notes[number] if number < len(notes) else None
                fqn, source = (note.fqn, note.source) if note is not None else ("", "")
                results.setdefault((name, node.name), _made(len(results), name, node, fqn, source))
    owners: dict[str, list[str]] = {}
    for result in program.signature.results:
        if result.kind == "grad":
            owners.setdefault(result.value, []).append(result.target)
    for item in program.lowered.main:
        if isinstance(item, Node) and is_message(item):
            gradients = tuple(target for out in item.outs for target in owners.get(out, ()))
            new = _made(len(results), "", item, item.origin.fqn, item.origin.source, gradients)
            # every stage, and every slice, may have its own term of one value
            results.setdefault(("", item.name), new)
    return results


def _made(
    number: int, segment: str, node: Node, fqn: str, source: str, gradients: tuple[str, ...] = ()
) -> Collective:
    op, axes = COLLECTIVES[node.op].name, "+".join(axes_of(node))
    return Collective(f"c{number:03}", segment, op, axes, node.name, fqn, source, gradients)
