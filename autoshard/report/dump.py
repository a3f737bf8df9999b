"""Text of a graph after any pass."""

from __future__ import annotations

from autoshard.ir import Folded, Graph
from autoshard.ir.lowered import Lowered
from autoshard.program.notes import notes_of_segment
from autoshard.program.text import axis_names, call_text, segment_lines


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
    return "\n".join(lines) + "\n"


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
