"""Programs for reading: with times, payloads, reasons, and for one rank with its local shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from autoshard.cluster.cluster import Cluster
from autoshard.cluster.mesh import Mesh
from autoshard.errors import UsageError
from autoshard.ir import Arg, Call, Graph, LocalOffset, LocalSize, Node, Port, TensorType, refs_of
from autoshard.ir.boundaries import ends_of, part_name
from autoshard.ir.collectives import is_message
from autoshard.ir.lowered import LoweredSegment, PlacedValue
from autoshard.ir.placement import Layout, local_shape
from autoshard.ir.units import bytes_text, seconds_text
from autoshard.passes.pipeline import NUMBERED
from autoshard.program.program import NodeNote, Program
from autoshard.program.text import axis_names, main_lines, numbered_notes, segment_lines
from autoshard.report.stage_table import (
    held_json,
    held_text,
    memory_text,
    step_text,
    table_lines,
    timeline_json,
)
from autoshard.runtime.resolve import RankView
from autoshard.simulate.estimate import Estimator
from autoshard.simulate.pricing import NodeCost
from autoshard.simulate.saved_for_backward import ResidentBytes

#: above the columns at the end of every op's line, which begin there
_COLUMNS = "   time | payload/rank | reason"
_AT = 100


@dataclass(frozen=True)
class InspectView:
    """What to show. rank: of all ranks, with its shapes and its stages. segment, stage: only this one."""

    rank: int | None = None
    segment: str | None = None
    stage: int | None = None


@dataclass(frozen=True)
class _Shown:
    """What a view comes to. rank: of the ranks of a stage. stages, segments: those to show."""

    rank: int
    stages: tuple[int, ...]
    segments: tuple[str, ...]


def _shown(program: Program, view: InspectView) -> _Shown:
    """Raises UsageError if the program has no such rank, stage or segment."""
    stages: tuple[int, ...] = tuple(sorted({p.stage for p in program.lowered.parts}))
    inner = 0
    if view.rank is not None:
        inner, stages = _place(program, view.rank)
    if view.stage is not None:
        if view.stage not in stages:
            who = "the program" if view.rank is None else f"rank {view.rank}"
            raise UsageError(f"{who} has no stage {view.stage}", hint=f"one of {', '.join(map(str, stages))}")
        stages = (view.stage,)
    parts = [p for p in program.lowered.parts if p.stage in stages]
    called = {i.segment for p in parts for i in program.lowered.of(p) if isinstance(i, Call)}
    names = [name for name in program.lowered.segments if name in called]
    if view.segment is not None and view.segment not in names:
        raise UsageError(f"there is no segment {view.segment!r}", hint=f"one of {', '.join(names)}")
    return _Shown(inner, stages, tuple(n for n in names if view.segment in (None, n)))


def _place(program: Program, rank: int) -> tuple[int, tuple[int, ...]]:
    """A rank's place among those of its stages, and these stages."""
    coords = list(Mesh.parse(program.full_mesh).coords(rank))
    if program.stages is None:
        return rank, (0,)
    pipe_rank = coords.pop(program.stages.position)
    owner = program.stages.schedule.owner
    stages = tuple(s for s, r in enumerate(owner) if r == pipe_rank)
    return Mesh.parse(program.mesh).rank(coords), stages


def pass_name(program: Program, name: str) -> str:
    """The pass that a name, its number or an unambiguous part of it means (``16``, ``bucket``)."""
    passes = [p for p in NUMBERED.values() if p in program.dumps] or list(program.dumps)
    matches = [p for p in passes if name in (p, p.partition("_")[2])] or [p for p in passes if name in p]
    if len(matches) != 1:
        raise UsageError(
            f"no pass is called {name!r}" if not matches else f"{name!r} could be {', '.join(matches)}",
            hint=f"one of {', '.join(passes)}",
        )
    return matches[0]


def dump_after(program: Program, name: str, segment: str | None = None) -> str:
    """The graph after a pass, as it was written when the program was compiled."""
    text = program.dumps[pass_name(program, name)]
    if segment is None:
        return text
    head, *blocks = text.split("\n\n")
    wanted_blocks = [b for b in blocks if f"def {segment}(" in b]
    if not wanted_blocks:
        names = [b.split("def ")[1].split("(")[0] for b in blocks if "def " in b]
        raise UsageError(
            f"there is no segment {segment!r} after this pass", hint=f"one of {', '.join(names)}"
        )
    return "\n\n".join([head, *wanted_blocks]).rstrip("\n") + "\n"


def annotated(program: Program, cluster: Cluster, view: InspectView) -> str:
    """The final program with what each op costs on a rank, and sums at the end of every segment."""
    view_of = _shown(program, view)
    names = axis_names(program.mesh)
    estimator = Estimator(program, cluster, view_of.rank)
    shown = program if view.rank is None else for_rank(program, view_of.rank)
    lines = _head(program, estimator, view)
    numbered = numbered_notes(program)
    for name in view_of.segments:
        segment, lowered = shown.lowered.segments[name], program.lowered.segments[name]
        notes = _columns(estimator, lowered, numbered[name])
        lines += ["", "", *_segment_head(program, name), *segment_lines(segment, notes, names)]
        lines.append(_sum_line(estimator, name))
    if view.segment is None:
        lines += ["", "", *_of_stages(program, view_of.stages, main_lines(shown, names))]
        lines += footer(estimator, program)
    return "\n".join(lines).rstrip("\n") + "\n"


def _of_stages(program: Program, stages: Sequence[int], lines: Sequence[str]) -> list[str]:
    """The lines of main that belong to some stages: what they take from outside, and their parts."""
    lowered = program.lowered
    if set(stages) == {p.stage for p in lowered.parts}:
        return list(lines)
    parts = [p for p in lowered.parts if p.stage in stages]
    used = {v for p in parts for v in ends_of(lowered, p).uses}
    ports = {p.name for p in program.signature.ports} - used
    heads = {f"def {part_name(lowered, p)}():": p.stage in stages for p in lowered.parts}
    kept_lines: list[str] = []
    keep = True
    for line in lines:
        keep = heads.get(line, keep)
        if keep and line.partition(":")[0] not in ports:
            kept_lines.append(line)
    return kept_lines


def _head(program: Program, estimator: Estimator, view: InspectView) -> list[str]:
    mesh = Mesh.parse(program.full_mesh)
    if view.rank is None:
        shapes = "GLOBAL shapes"
        who = f"all {mesh.world_size} ranks; costs are those of the rank with the largest shards"
    else:
        shapes = "LOCAL shapes"
        coords = mesh.coords(view.rank)
        coordinates = " ".join(f"{n}={c}" for n, c in zip(mesh.names, coords, strict=True))
        parameters = _held_by(program, estimator, view.rank).parameters
        who = f"rank {view.rank} of {mesh.world_size} at {coordinates} | parameters {bytes_text(parameters)}"
    return [
        f"# autoshard | program | mesh {program.full_mesh} | {shapes} | "
        f"cost model of {estimator.cluster.name}",
        f"# {who}",
        "# R Replicate, S(d) Shard along dim d, P Partial (pending reduction)",
        f"{'#':<{_AT}}  # {_COLUMNS}",
    ]


def _held_by(program: Program, estimator: Estimator, rank: int) -> ResidentBytes:
    """What one of all ranks holds."""
    if program.stages is None:
        return estimator.held()
    pipe_rank = Mesh.parse(program.full_mesh).coords(rank)[program.stages.position]
    return estimator.pipeline.ranks[pipe_rank].held


def _segment_head(program: Program, name: str) -> list[str]:
    calls = [i for i in program.lowered.main if isinstance(i, Call) and i.segment == name]
    labels = list(dict.fromkeys(c.label for c in calls if c.label))
    labels_text = "" if not labels else f" | {labels[0]}" + (f" to {labels[-1]}" if len(labels) > 1 else "")
    half = "backward" if calls and calls[0].backward else "forward"
    times = f"called {len(calls)} time{'' if len(calls) == 1 else 's'}"
    return [f"# {name} | {half}{labels_text} | {times}"]


def _columns(
    estimator: Estimator, segment: LoweredSegment, notes: Sequence[NodeNote]
) -> tuple[NodeNote, ...]:
    """Notes whose reason is preceded by time, in a fused kernel its part of it, and payload."""
    values, name = segment.placed(), segment.graph.name
    return tuple(
        replace(note, why=_row(estimator.node(node, values, estimator.kernel(name, node)), note.why))
        for node, note in zip(segment.graph.nodes, notes, strict=True)
    )


def _row(cost: NodeCost, why: str) -> str:
    time = seconds_text(cost.seconds) if cost.seconds else ""
    payload = bytes_text(cost.wire) if cost.wire else ""
    return f"{time:>7} | {payload:>12} | {why}".rstrip()


def _sum_line(estimator: Estimator, name: str) -> str:
    cost = estimator.segment(name)
    plural = "" if cost.collectives == 1 else "s"
    return (
        f"# segment {seconds_text(cost.compute + cost.comm)}: compute {seconds_text(cost.compute)} + "
        f"communication {seconds_text(cost.comm)} in {cost.collectives} collective{plural}, "
        f"payload {bytes_text(cost.wire)} per rank"
    )


def footer(estimator: Estimator, program: Program) -> list[str]:
    """Memory of a rank, cost of a step, and counts to check."""
    facts = checks(estimator, program)
    checked = (
        f"# checks  uneven shards {facts['uneven_shards']} | full gathers {facts['full_gathers']} | "
        f"ops without a rule {facts['ops_without_a_rule']}"
    )
    if program.stages is not None:
        estimate = estimator.pipeline
        table = [f"#   {line}" for line in table_lines(estimate)]
        step, memory = step_text(estimate), memory_text(estimate, estimator.cluster)
        name = f"{estimate.timeline.name}, {program.microbatches} microbatches"
        return [f"# stages  {name}", *table, f"# step    {step}", f"# memory  {memory}", checked]
    resident, cost = estimator.held(), estimator.step()
    times = f" for {program.microbatches} microbatches" if program.microbatches > 1 else ""
    return [
        f"# step    {seconds_text(cost.compute + cost.comm)}{times} without overlap: compute "
        f"{seconds_text(cost.compute)} + communication {seconds_text(cost.comm)} in "
        f"{cost.collectives} collectives, payload {bytes_text(cost.wire)} per rank",
        f"# memory  {held_text(resident)} of {bytes_text(estimator.cluster.device.memory_bytes)}",
        checked,
    ]


def checks(estimator: Estimator, program: Program) -> dict[str, int]:
    """The counts of the ``# checks`` line."""
    facts = estimator.facts()
    return {
        "uneven_shards": facts.uneven,
        "full_gathers": facts.full_gathers,
        "ops_without_a_rule": len(_replicated(program)),
    }


def _replicated(program: Program) -> tuple[str, ...]:
    from autoshard.search.plan.plan_json import plan_from_json

    return plan_from_json(program.plan).replicated if program.plan else ()


def for_rank(program: Program, rank: int) -> Program:
    """The program with the shapes and numbers of one of the ranks of a stage.

    Only for reading: it cannot be stored or run.
    """
    mesh = Mesh.parse(program.mesh)
    view = RankView(mesh.names, mesh.sizes, mesh.coords(rank))
    lowered = program.lowered
    segments = {name: _local_segment(s, view) for name, s in lowered.segments.items()}
    values = {n: PlacedValue(_local(p.type, p.layout, view), p.layout) for n, p in lowered.values.items()}
    main = tuple(_local_node(i, values, view) if isinstance(i, Node) else i for i in lowered.main)
    ports = tuple(Port(p.name, p.kind, p.target, values[p.name].type) for p in program.signature.ports)
    return replace(
        program,
        lowered=replace(lowered, segments=segments, values=values, main=main),
        signature=replace(program.signature, ports=ports),
    )


def _local(type_: TensorType, layout: Layout, view: RankView) -> TensorType:
    return TensorType(local_shape(type_.shape, layout, view.sizes, view.coords), type_.dtype)


def _local_segment(segment: LoweredSegment, view: RankView) -> LoweredSegment:
    graph = segment.graph
    values = {
        n: PlacedValue(_local(t, segment.layouts[n], view), segment.layouts[n])
        for n, t in graph.types().items()
    }
    inputs = tuple((n, values[n].type) for n, _ in graph.inputs)
    nodes = tuple(_local_node(n, values, view) for n in graph.nodes)
    return replace(segment, graph=Graph(graph.name, inputs, nodes, graph.outputs))


def _local_node(node: Node, values: dict[str, PlacedValue], view: RankView) -> Node:
    types = tuple(None if t is None else values[o].type for o, t in zip(node.outs, node.types, strict=True))
    args = tuple(_number(a, view) for a in node.args)
    return replace(node, args=args, kwargs=tuple((k, _number(v, view)) for k, v in node.kwargs), types=types)


def _number(arg: Arg, view: RankView) -> Arg:
    """Symbols as the rank's numbers; everything else stays as it prints."""
    if isinstance(arg, LocalSize | LocalOffset):
        return view.value(arg)
    return tuple(_number(a, view) for a in arg) if isinstance(arg, tuple) else arg


def as_json(program: Program, cluster: Cluster, view: InspectView) -> dict[str, Any]:
    """The same facts as a document: segments with their ops, costs and layouts, what a rank holds."""
    view_of = _shown(program, view)
    estimator = Estimator(program, cluster, view_of.rank)
    shown = program if view.rank is None else for_rank(program, view_of.rank)
    resident = estimator.held() if view.rank is None else _held_by(program, estimator, view.rank)
    step = estimator.step()
    document: dict[str, Any] = {
        "mesh": program.full_mesh,
        "cluster": cluster.name,
        "rank": view.rank,
        "shapes": "global" if view.rank is None else "local",
        "resident_bytes": held_json(resident),
        "step": {
            "compute_seconds": step.compute,
            "comm_seconds": step.comm,
            "collectives": step.collectives,
            "payload_bytes": int(step.wire),
        },
        "collectives": [
            {"kind": t.kind, "axis": t.axis, "count": t.count, "payload_bytes": int(t.wire)}
            for t in estimator.traffic()
        ],
        "checks": checks(estimator, program),
        "segments": [_segment_json(program, shown, estimator, name) for name in view_of.segments],
    }
    if program.stages is not None:
        document["timeline"] = timeline_json(estimator.pipeline)
    return document


def _segment_json(program: Program, shown: Program, estimator: Estimator, name: str) -> dict[str, Any]:
    cost = estimator.segment(name)
    values = program.lowered.segments[name].placed()
    local = shown.lowered.segments[name]
    rows = zip(
        local.graph.nodes, program.lowered.segments[name].graph.nodes, program.notes[name], strict=True
    )
    return {
        "name": name,
        "calls": sum(isinstance(i, Call) and i.segment == name for i in program.lowered.main),
        "compute_seconds": cost.compute,
        "comm_seconds": cost.comm,
        "collectives": cost.collectives,
        "payload_bytes": int(cost.wire),
        "nodes": [
            {
                "outs": [
                    {"name": o, "type": str(t), "layout": [str(p) for p in local.layouts[o]]}
                    for o, t in zip(node.outs, node.types, strict=True)
                    if t is not None
                ],
                "op": node.op,
                "inputs": list(refs_of(node)),
                "seconds": estimator.node(full, values, estimator.kernel(name, full)).seconds,
                "is_collective": is_message(node),
                "module": note.fqn,
                "source": note.source,
                "why": note.why,
            }
            for node, full, note in rows
        ],
    }
