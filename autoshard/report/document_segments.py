"""The segments of a program as plain data: every op with its placement, its cost and its reason."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autoshard.ir import Node, refs_of
from autoshard.ir.collectives import axes_of, is_collective, is_message, kind_of
from autoshard.ir.lowered import PlacedValue
from autoshard.ir.views import VIEWS
from autoshard.passes.segment_parts import derived_values
from autoshard.program.program import NodeNote, Program
from autoshard.program.text import axis_names, layout_text, op_text
from autoshard.report.decided import Decisions
from autoshard.simulate.pricing import Pricer

#: what stands for instructions outside segments, of every microbatch and of once a step
MAIN, ONCE = "main", "once"


@dataclass(frozen=True)
class Segment:
    """A segment of the program. layers: labels of its calls. calls: of a microbatch. runs: of a step."""

    name: str
    calls: int
    runs: int
    backward: bool
    layers: tuple[str, ...]
    stages: tuple[int, ...]
    inputs: tuple[dict[str, Any], ...]
    outputs: tuple[str, ...]
    nodes: tuple[dict[str, Any], ...]

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "calls": self.calls,
            "runs": self.runs,
            "backward": self.backward,
            "layers": list(self.layers),
            "stages": list(self.stages),
            "inputs": list(self.inputs),
            "outputs": list(self.outputs),
            "nodes": list(self.nodes),
        }


@dataclass
class _Called:
    """How a segment is called."""

    calls: int = 0
    runs: int = 0
    backward: bool = False
    layers: dict[str, None] = field(default_factory=dict)
    stages: set[int] = field(default_factory=set)


def segments_of(program: Program, pricer: Pricer, decisions: Decisions) -> Iterator[Segment]:
    lowered, names = program.lowered, axis_names(program.mesh)
    called: dict[str, _Called] = {}
    between: dict[str, list[Node]] = {MAIN: [], ONCE: []}
    for part in lowered.parts:
        once = part.phase in ("gather", "reduce")
        for item in lowered.of(part):
            if isinstance(item, Node):
                between[ONCE if once else MAIN].append(item)
            else:
                entry = called.setdefault(item.segment, _Called())
                entry.calls += 1
                entry.runs += 1 if once else program.microbatches
                entry.backward = item.backward
                entry.stages.add(part.stage)
                if item.label:
                    entry.layers[item.label] = None
    stored = [p.name for p in program.signature.ports if p.kind in ("param", "buffer", "const")]
    weights, sources = derived_values(program.lowered, stored, is_collective), _sources(program)
    for name, segment in lowered.segments.items():
        entry = called.get(name, _Called())
        values = segment.placed()
        nodes = tuple(
            _node(node, note, values, names, pricer, decisions, name)
            for node, note in zip(segment.graph.nodes, program.notes[name], strict=True)
        )
        inputs = tuple(
            {
                "name": n,
                "type": str(t),
                "layout": layout_text(segment.layouts[n], names),
                "kind": "weight" if n in weights.get(name, ()) else "value",
                "from": sources.get((name, n), []),
            }
            for n, t in segment.graph.inputs
        )
        yield Segment(
            name,
            entry.calls,
            entry.runs,
            entry.backward,
            tuple(entry.layers),
            tuple(sorted(entry.stages)),
            inputs,
            segment.graph.outputs,
            nodes,
        )
    for name, items in between.items():
        nodes = tuple(
            _node(n, NodeNote(n.origin.fqn, n.origin.source), lowered.values, names, pricer, decisions)
            for n in items
        )
        runs = 1 if name == ONCE else program.microbatches
        if nodes:
            yield Segment(name, 1, runs, any(n.backward for n in items), (), (), (), (), nodes)


def _sources(program: Program) -> dict[tuple[str, str], list[list[str]]]:
    """(segment, input) -> the (segment, value) that its calls take, through collectives in main."""
    producers: dict[str, list[str]] = {}
    sources_of: dict[tuple[str, str], dict[tuple[str, ...], list[str]]] = {}
    for item in program.lowered.main:
        if isinstance(item, Node):
            ins = list(refs_of(item))
            pairs = zip(
                item.outs, ins if len(ins) == len(item.outs) else ins[:1] * len(item.outs), strict=False
            )
            producers.update((out, producers[ref]) for out, ref in pairs if ref in producers)
            continue
        graph = program.lowered.segments[item.segment].graph
        for (name, _), arg in zip(graph.inputs, item.args, strict=True):
            if arg in producers:
                sources_of.setdefault((item.segment, name), {})[tuple(producers[arg])] = producers[arg]
        producers.update((o, [item.segment, i]) for o, i in zip(item.outs, graph.outputs, strict=True))
    return {place: list(sources.values()) for place, sources in sources_of.items()}


def _node(
    node: Node,
    note: NodeNote,
    values: Mapping[str, PlacedValue],
    names: Sequence[str],
    pricer: Pricer,
    decisions: Decisions,
    segment: str = "",
) -> dict[str, Any]:
    cost = pricer.node(node, values, pricer.kernel(segment, node))
    refs = list(dict.fromkeys(refs_of(node)))
    placed = [values[o] for o, t in zip(node.outs, node.types, strict=True) if t is not None]
    row: dict[str, Any] = {
        "outs": list(node.outs),
        "op": op_text(node.op),
        "type": str(placed[0].type) if placed else "",
        "layout": layout_text(placed[0].layout, names) if placed else "",
        "refs": refs,
        "module": decisions.starred(note.fqn),
        "source": note.source,
        "why": note.why,
        "compute": cost.compute,
        "comm": cost.comm,
        "payload": cost.wire,
    }
    if node.op in VIEWS:
        row["view"] = True
    if is_collective(node):
        row["kind"] = kind_of(node)
        row["axis"] = "+".join(axes_of(node))
        row["message"] = is_message(node)
        row["before"] = layout_text(values[refs[0]].layout, names) if refs else ""
    return row


def collective_rows(segments: Sequence[Segment]) -> Iterator[dict[str, Any]]:
    """Those that send something; runs: in a step. Between calls, equal ones are one row."""
    rows: dict[object, dict[str, Any]] = {}
    for segment in segments:
        for number, node in enumerate(segment.nodes):
            if node.get("message"):
                row = {
                    "segment": segment.name,
                    "node": number,
                    "value": node["outs"][0],
                    "values": len(node["outs"]),
                    "kind": node["kind"],
                    "axis": node["axis"],
                    "before": node["before"],
                    "after": node["layout"],
                    "type": node["type"],
                    "seconds": node["comm"],
                    "payload": node["payload"],
                    "runs": segment.runs,
                    "module": node["module"],
                    "source": node["source"],
                    "backward": segment.backward,
                }
                fields = [v for k, v in row.items() if k not in ("node", "value")]
                key: object = tuple(fields) if segment.name in (MAIN, ONCE) else (segment.name, number)
                if key in rows:
                    rows[key]["runs"] += segment.runs
                else:
                    rows[key] = row
    yield from rows.values()
