"""Programs as readable Python text.

The text is straight-line: one ``def`` per segment, then one per part (``forward``, ``backward``,
``reduce``). It is valid Python but is never run as Python; `autoshard.program.parse` reads it back.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from autoshard.ir import Arg, Call, CallSite, Dtype, LocalOffset, LocalSize, Node, Ref, ShardOf, TensorType
from autoshard.ir.boundaries import Wire, part_name, returns_of, wires_of
from autoshard.ir.lowered import Lowered, LoweredSegment, PlacedValue, StagePart
from autoshard.ir.placement import Layout
from autoshard.ir.row_tiles import TILES
from autoshard.ir.scans import SCAN
from autoshard.program.collectives import collectives_of
from autoshard.program.program import FORMAT, NodeNote, Program

#: op namespaces that are written out; ``aten`` is not
NAMESPACES = ("autoshard", "comm", "host", "transformers", "prims")


def layout_text(layout: Layout, names: Sequence[str]) -> str:
    """``dp:S(0) tp:R``"""
    return " ".join(f"{n}:{p}" for n, p in zip(names, layout, strict=True))


def type_text(type_: TensorType, layout: Layout, names: Sequence[str]) -> str:
    return f"{type_} {layout_text(layout, names)}"


def op_text(op: str) -> str:
    """``mm``, ``sum.dim_IntList``, ``comm.all_gather``"""
    namespace, name, overload = op.split(".")
    head = name if namespace == "aten" else f"{namespace}.{name}"
    return head if overload == "default" else f"{head}.{overload}"


def arg_text(arg: Arg) -> str:
    """One argument as text."""
    if isinstance(arg, Ref):
        return arg.name
    if isinstance(arg, Dtype):
        return f"dt.{arg.name}"
    if isinstance(arg, tuple):
        inner = ", ".join(arg_text(a) for a in arg)
        return f"({inner},)" if len(arg) == 1 else f"({inner})"
    if isinstance(arg, LocalSize | LocalOffset):
        name = "local" if isinstance(arg, LocalSize) else "offset"
        return f"{name}({arg.size}, {', '.join(_shard_text(s) for s in arg.shards)})"
    if isinstance(arg, CallSite):
        return f"site({arg.offset})"
    if isinstance(arg, float) and not math.isfinite(arg):
        return {math.inf: "inf", -math.inf: "-inf"}.get(arg, "nan")
    return repr(arg)


def _shard_text(shard: ShardOf) -> str:
    if shard.outer == 1 and shard.inner == 1:
        return repr(shard.axis)
    return f"({shard.axis!r}, {shard.outer}, {shard.inner})"


def call_text(op: str, args: Iterable[Arg], kwargs: Iterable[tuple[str, Arg]]) -> str:
    parts = [arg_text(a) for a in args] + [f"{k}={arg_text(v)}" for k, v in kwargs]
    return f"{op_text(op)}({', '.join(parts)})"


def node_lines(node: Node, layouts: Mapping[str, Layout], names: Sequence[str]) -> list[str]:
    """One statement; several outputs have their types on lines of their own."""
    held = node.op in (TILES, SCAN)
    (right, *more) = body_lines(node) if held else [call_text(node.op, node.args, node.kwargs)]
    typed = [
        f'{out}: "{type_text(type_, layouts[out], names)}"'
        for out, type_ in zip(node.outs, node.types, strict=True)
        if type_ is not None
    ]
    if len(node.outs) == 1 and typed:
        return [f"{typed[0]} = {right}", *more]
    return [*typed, f"{', '.join(node.outs)}{',' if len(node.outs) == 1 else ''} = {right}", *more]


def body_lines(node: Node) -> list[str]:
    """The call of a body that runs in tiles or step after step, a line for each of its inputs and ops."""
    given, count, inputs, statements, *rest = node.args
    head = f"{op_text(node.op)}({arg_text(given)}, {count}, ("
    body = [f"    {arg_text(each)}," for each in statements]
    return [
        head,
        *(f"    {arg_text(each)}," for each in inputs),
        "), (",
        *body,
        f"), {', '.join(map(arg_text, rest))})",
    ]


def segment_lines(segment: LoweredSegment, notes: Sequence[NodeNote], names: Sequence[str]) -> list[str]:
    """The ``def`` of a segment, with the reason of each choice at the end of its line."""
    graph = segment.graph
    lines = [f"def {graph.name}("]
    lines += [f'    {n}: "{type_text(t, segment.layouts[n], names)}",' for n, t in graph.inputs]
    lines.append("):")
    here = ("", "")
    for node, note in zip(graph.nodes, notes, strict=True):
        if (note.fqn, note.source) != here and (note.fqn or note.source):
            here = (note.fqn, note.source)
            lines.append(f"    # --- {note.fqn}  {note.source}".rstrip())
        body = node_lines(node, segment.layouts, names)
        lines += [f"    {line}" for line in body[:-1]]
        last = f"    {body[-1]}"
        lines.append(f"{last:<100}  # {note.why}" if note.why else last)
    lines.append(f"    return {_names(graph.outputs)}")
    return lines


def numbered_notes(program: Program) -> dict[str, tuple[NodeNote, ...]]:
    """The notes of every segment, those of collectives with their names before the reason (``c017``)."""
    named = collectives_of(program)
    return {
        name: tuple(
            replace(note, why=f"{named[name, node.name].name} {note.why}".rstrip())
            if (name, node.name) in named
            else note
            for node, note in zip(segment.graph.nodes, program.notes[name], strict=True)
        )
        for name, segment in program.lowered.segments.items()
    }


def _names(values: Sequence[str]) -> str:
    return f"({', '.join(values)}{',' if len(values) == 1 else ''})"


def main_lines(program: Program, names: Sequence[str]) -> list[str]:
    lowered, signature = program.lowered, program.signature
    named = collectives_of(program)
    lines = []
    for port in signature.ports:
        placed = lowered.values[port.name]
        called = ", ".join(map(repr, (port.target, *filter(None, [port.stored]))))
        lines.append(f'{port.name}: "{type_text(placed.type, placed.layout, names)}" = {port.kind}({called})')
    lines.append("")
    returned = returns_of(lowered, {r.value for r in signature.results})
    wires = wires_of(lowered, {p.name for p in signature.ports})
    for part in lowered.parts:
        lines += ["", f"def {part_name(lowered, part)}():"]
        lines += [f"    # {text}" for text in _wire_notes(part, wires)]
        for item in lowered.of(part):
            written = [f"    {line}" for line in instruction_lines(item, lowered.values, names)]
            if isinstance(item, Node) and ("", item.name) in named:
                written[-1] = f"{written[-1]:<100}  # {named['', item.name].name}"
            lines += written
        lines += [f"    return {_names(returned[part])}", ""]
    return lines


def _wire_notes(part: StagePart, wires: Sequence[Wire]) -> list[str]:
    """What a part is sent and sends on, in words."""
    received: dict[int, list[str]] = {}
    sent: dict[int, list[str]] = {}
    for wire in wires:
        if (wire.target, wire.into, wire.into_slice) == (part.stage, part.phase, part.slice):
            received.setdefault(wire.source, []).append(wire.value)
        if (wire.source, wire.phase, wire.slice) == (part.stage, part.phase, part.slice):
            sent.setdefault(wire.target, []).append(wire.value)
    result = [f"from stage {stage}: {', '.join(values)}" for stage, values in received.items()]
    return result + [f"to stage {stage}: {', '.join(values)}" for stage, values in sent.items()]


def instruction_lines(
    item: Call | Node, values: Mapping[str, PlacedValue], names: Sequence[str]
) -> list[str]:
    """A statement of a part."""
    if isinstance(item, Node):
        return node_lines(item, {out: values[out].layout for out in item.outs}, names)
    args = ", ".join(item.args)
    site = f"{', ' if args else ''}site={item.site}" if item.site else ""
    label = f"  # {item.label}" if item.label else ""
    return [f"{_names(item.outs)} = {item.segment}({args}{site}){label}"]


def program_text(program: Program) -> str:
    """The full program as text."""
    names = axis_names(program.mesh)
    counts = _counts(program.lowered)
    notes = numbered_notes(program)
    lines = [
        f"# autoshard program, format {FORMAT} | mesh {program.mesh}",
        "# shapes are GLOBAL; what a rank holds follows from the placement of each mesh axis:",
        "# R whole on every rank, S(d) split along dim d, P partial (to be reduced)",
        *([f"# in host memory: {program.offload}"] if program.offload else []),
        "",
    ]
    for name, segment in program.lowered.segments.items():
        lines.append("")
        lines.append(f"# called {counts[name]} times")
        lines += segment_lines(segment, notes[name], names)
        lines.append("")
    lines.append("")
    lines += main_lines(program, names)
    return "\n".join(lines).rstrip("\n") + "\n"


def axis_names(mesh: str) -> tuple[str, ...]:
    return tuple(part.split("=")[0] for part in mesh.split(","))


def _counts(lowered: Lowered) -> dict[str, int]:
    table = dict.fromkeys(lowered.segments, 0)
    for item in lowered.main:
        if isinstance(item, Call):
            table[item.segment] += 1
    return table
