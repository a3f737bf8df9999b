"""Text of a graph after any pass."""

from __future__ import annotations

from collections.abc import Sequence

from autoshard.ir import Folded, Graph
from autoshard.ir.boundaries import part_name
from autoshard.ir.lowered import Lowered
from autoshard.program.notes import notes_of_segment
from autoshard.program.text import axis_names, call_text, instruction_lines, segment_lines


def dump_text(name: str, graph: Folded | Lowered, mesh: str) -> str:
    """The graph as annotated, valid Python, headed by the pass that made it."""
    lines = [f"# autoshard | after {name} | mesh {mesh}"]
    if isinstance(graph, Folded):
        counts = graph.counts()
        for segment in graph.segments.values():
            lines += ["", f"# {segment.name} (called {counts[segment.name]} times)", *folded_lines(segment)]
        return "\n".join(lines) + "\n"
    names = axis_names(mesh)
    for key, lowered in graph.segments.items():
        lines += ["", *segment_lines(lowered, notes_of_segment(graph, key), names)]
    return "\n".join([*lines, *_main(graph, names)]) + "\n"


def _main(lowered: Lowered, names: Sequence[str]) -> list[str]:
    """What runs the segments: the parts, or forward and backward while it has not been cut into them."""
    if lowered.parts:
        parts = [(part_name(lowered, part), lowered.of(part)) for part in lowered.parts]
    else:
        halves = [tuple(i for i in lowered.main if i.backward == backward) for backward in (False, True)]
        parts = list(zip(("forward", "backward"), halves, strict=True))
    lines: list[str] = []
    for name, items in parts:
        lines += ["", f"def {name}():"]
        lines += [f"    {line}" for item in items for line in instruction_lines(item, lowered.values, names)]
        lines += [] if items else ["    pass"]
    return lines


def folded_lines(graph: Graph) -> list[str]:
    """A segment before the search: global types, no placements."""
    lines = [f"def {graph.name}("]
    lines += [f'    {n}: "{t}",' for n, t in graph.inputs]
    lines.append("):")
    here = ("", "")
    for node in graph.nodes:
        origin = (node.origin.fqn, node.origin.source)
        if origin != here and any(origin):
            here = origin
            lines.append(f"    # --- {origin[0]}  {origin[1]}".rstrip())
        typed = [f'{o}: "{t}"' for o, t in zip(node.outs, node.types, strict=True) if t is not None]
        right = call_text(node.op, node.args, node.kwargs)
        if len(node.outs) == 1 and typed:
            lines.append(f"    {typed[0]} = {right}")
        else:
            lines += [f"    {t}" for t in typed]
            lines.append(f"    {', '.join(node.outs)}{',' if len(node.outs) == 1 else ''} = {right}")
    lines.append(f"    return ({', '.join(graph.outputs)}{',' if len(graph.outputs) == 1 else ''})")
    return lines
