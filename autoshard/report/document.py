"""Everything the report page shows, as one document of plain data; see ``VERSION`` for its schema."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autoshard._version import __version__
from autoshard.cluster.cluster import Cluster
from autoshard.cluster.mesh import Mesh
from autoshard.ir import Call, Node, refs_of
from autoshard.ir.lowered import Placed
from autoshard.program.program import Note, Program
from autoshard.program.text import axis_names, layout_text, op_text
from autoshard.report.decided import Decisions, starred
from autoshard.report.levels import Levels
from autoshard.report.lookup import Index, upwards
from autoshard.report.simulation import memory_of, parts_of, rates
from autoshard.search.plan import Plan
from autoshard.simulate.ops import VIEWS, collective_kind, is_message, placed_of
from autoshard.simulate.pricing import Pricer
from autoshard.simulate.stage_costs import StagePrices
from autoshard.simulate.step import StepEstimate, simulated

#: raised when a field of the document changes its meaning or goes away
VERSION = 1
#: actions of a timeline that the page holds; of larger ones, those of the first ranks
_MOST_SPANS = 60_000
#: what stands for instructions outside segments, of every microbatch and of once a step
MAIN, ONCE = "main", "once"


def document(program: Program, cluster: Cluster) -> dict[str, Any]:
    """Version 1. Seconds, bytes; costs of nodes are of one call on the fullest rank; shapes are global.

    ``segments``: straight-line code, every segment once, with how often a microbatch calls it and how often
    it runs in a step (``main`` and ``once``: what stands between calls, in every microbatch and once a
    step); ``modules``: the model's tree with the costs of a step, all stages together, repeated layers as one
    (``model.layers.*``); ``parameters``: by class; ``collectives``: every one of the text; ``passes``: the
    text of each segment after each pass, as numbers of ``lines``; ``timeline``: actions of pipeline ranks;
    ``streams``: the ops of one microbatch of each stage, computing and one stream per mesh axis.
    """
    found, prices = simulated(program, cluster)
    pricer, decisions = prices.pricer, Decisions.of(program)
    segments = list(_segments(program, pricer, decisions))
    lines, passes = _passes(program)
    rate = rates(program, found)
    mesh = Mesh.parse(program.whole_mesh)
    return {
        "version": VERSION,
        "autoshard": __version__,
        "title": program.target or "program",
        "mesh": program.whole_mesh,
        "axes": [{"name": a.name, "size": a.size, "meaning": str(a.meaning)} for a in mesh.axes],
        "ranks": mesh.world_size,
        "cluster": cluster.name,
        "device": cluster.device.name,
        "microbatches": program.microbatches,
        "options": dict(program.options),
        "step": _step(found, rate.per_second, rate.what),
        "memory": _memory(found, cluster),
        "plan": _plan(decisions.plan),
        "segments": [s.as_json() for s in segments],
        "modules": module_rows(segments, _modules_of_parameters(program, decisions)),
        "parameters": list(_parameters(program, pricer, decisions)),
        "collectives": list(_collectives(segments)),
        "lines": lines,
        "passes": passes,
        "timeline": _timeline(found, prices),
        "streams": list(_streams(prices)),
    }


# -- segments --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Segment:
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


def _segments(program: Program, pricer: Pricer, decisions: Decisions) -> Iterator[_Segment]:
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
    weights, sources = _weights(program), _sources(program)
    for name, segment in lowered.segments.items():
        entry = called.get(name, _Called())
        values = placed_of(segment)
        nodes = tuple(
            _node(node, note, values, names, pricer, decisions)
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
        yield _Segment(
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
            _node(n, Note(n.origin.fqn, n.origin.source), lowered.values, names, pricer, decisions)
            for n in items
        )
        runs = 1 if name == ONCE else program.microbatches
        if nodes:
            yield _Segment(name, 1, runs, any(n.backward for n in items), (), (), (), (), nodes)


def _sources(program: Program) -> dict[tuple[str, str], list[list[str]]]:
    """(segment, input) -> the (segment, value) that its calls take, through collectives in main."""
    made: dict[str, list[str]] = {}
    found: dict[tuple[str, str], dict[tuple[str, ...], list[str]]] = {}
    for item in program.lowered.main:
        if isinstance(item, Node):
            ins = list(refs_of(item))
            pairs = zip(
                item.outs, ins if len(ins) == len(item.outs) else ins[:1] * len(item.outs), strict=False
            )
            made.update((out, made[ref]) for out, ref in pairs if ref in made)
            continue
        graph = program.lowered.segments[item.segment].graph
        for (name, _), arg in zip(graph.inputs, item.args, strict=True):
            if arg in made:
                found.setdefault((item.segment, name), {})[tuple(made[arg])] = made[arg]
        made.update((o, [item.segment, i]) for o, i in zip(item.outs, graph.outputs, strict=True))
    return {place: list(sources.values()) for place, sources in found.items()}


def _weights(program: Program) -> dict[str, set[str]]:
    """Segment -> its inputs that are parameters or buffers, or copies of them that collectives made."""
    lowered = program.lowered
    stored = {p.name for p in program.signature.ports if p.kind in ("param", "buffer", "const")}
    found: dict[str, set[str]] = {}
    for item in lowered.main:
        if isinstance(item, Node):
            if item.op.startswith("comm.") and stored >= set(refs_of(item)):
                stored |= set(item.outs)
            continue
        graph = lowered.segments[item.segment].graph
        own = {n for (n, _), arg in zip(graph.inputs, item.args, strict=True) if arg in stored}
        found.setdefault(item.segment, set()).update(own)
        for node in graph.nodes:
            if node.op.startswith("comm.") and own >= set(refs_of(node)):
                own |= set(node.outs)
        stored |= {o for o, inner in zip(item.outs, graph.outputs, strict=True) if inner in own}
    return found


def _node(
    node: Node,
    note: Note,
    values: Mapping[str, Placed],
    names: Sequence[str],
    pricer: Pricer,
    decisions: Decisions,
) -> dict[str, Any]:
    cost = pricer.node(node, values)
    refs = list(dict.fromkeys(refs_of(node)))
    placed = [values[o] for o, t in zip(node.outs, node.types, strict=True) if t is not None]
    made: dict[str, Any] = {
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
        "wire": cost.wire,
    }
    if node.op in VIEWS:
        made["view"] = True
    if node.op.startswith("comm."):
        made["kind"] = collective_kind(node) or "slice"
        made["axis"] = str(node.args[1])
        made["message"] = is_message(node)
        made["before"] = layout_text(values[refs[0]].layout, names) if refs else ""
    return made


def _collectives(segments: Sequence[_Segment]) -> Iterator[dict[str, Any]]:
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
                    "wire": node["wire"],
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


# -- modules ---------------------------------------------------------------------------------------------


def module_rows(segments: Sequence[_Segment], parameters: Iterable[str]) -> list[dict[str, Any]]:
    """The tree of modules, parents before children, in the order in which the forward meets them.

    path: with ``*`` for the number of a layer; layers: how many of them. Costs are of all layers and stages
    in a step, forward and backward, with everything inside; "" is the whole model.
    """
    rows: dict[str, dict[str, Any]] = {"": _row("", 1)}
    layers: dict[str, set[str]] = {}
    for segment in [*[s for s in segments if not s.backward], *[s for s in segments if s.backward]]:
        for node in segment.nodes:
            for path in (*upwards(node["module"]), ""):
                row = rows.setdefault(path, _row(path, 1))
                if "*" in path:
                    layers.setdefault(path, set()).update(segment.layers)
                half = "backward" if segment.backward else "forward"
                row[half] += segment.runs * (node["compute"] + node["comm"])
                row["compute"] += segment.runs * node["compute"]
                row["comm"] += segment.runs * node["comm"]
                row["wire"] += segment.runs * node["wire"]
    for path, found in layers.items():
        rows[path]["layers"] = max(1, len(found))
    for module in parameters:
        for path in upwards(module):
            rows.setdefault(path, _row(path, 1))
    return [rows[path] for path in _parents_first(list(rows))]


def _row(path: str, layers: int) -> dict[str, Any]:
    zero = dict.fromkeys(("forward", "backward", "compute", "comm", "wire"), 0.0)
    return {"path": path, "layers": layers, **zero}


def _parents_first(paths: Sequence[str]) -> list[str]:
    """Depth first; children in the order in which they come."""
    children: dict[str, list[str]] = {}
    for path in paths:
        if path:
            children.setdefault(path.rpartition(".")[0], []).append(path)
    order: list[str] = []
    left = [""]
    while left:
        path = left.pop()
        order.append(path)
        left += reversed(children.get(path, []))
    return order


def _modules_of_parameters(program: Program, decisions: Decisions) -> list[str]:
    ports = [p for p in program.signature.ports if p.kind in ("param", "buffer")]
    return list(dict.fromkeys(decisions.starred(p.target).rpartition(".")[0] for p in ports))


def _parameters(program: Program, pricer: Pricer, decisions: Decisions) -> Iterator[dict[str, Any]]:
    """Classes of parameters that are decided about together and whose names differ in layers alone."""
    index = Index(program)
    groups: dict[tuple[str, str], dict[str, Any]] = {}
    for port in program.signature.ports:
        if port.kind not in ("param", "buffer", "input"):
            continue
        name = index.name_of(port)
        path, life = starred(name, index.labels), decisions.life_of_port(port)
        placed = program.lowered.values[port.name]
        row = groups.get((path, life))
        if row is None:
            why = decisions.why_of_port(port)
            row = groups[path, life] = {
                "name": path,
                "kind": port.kind,
                "module": path.rpartition(".")[0] if port.kind != "input" else "",
                "count": 0,
                "type": str(port.type),
                "layout": life,
                "bytes": 0.0,
                "whole": 0.0,
                "reason": why.reason,
                "alternative": why.alternative,
                "margin": why.margin,
            }
        row["count"] += 1
        row["bytes"] += pricer.bytes_of(placed.type, placed.layout)
        row["whole"] += float(port.type.nbytes)
    yield from groups.values()


# -- the step --------------------------------------------------------------------------------------------


def _step(found: StepEstimate, per_second: float, what: str) -> dict[str, Any]:
    return {
        "seconds": found.seconds,
        "parts": [{"name": name, "seconds": s} for name, s in parts_of(found)],
        "mfu": found.mfu,
        "model_flop": found.model_flop,
        "per_second": per_second,
        "what": what,
    }


def _memory(found: StepEstimate, cluster: Cluster) -> dict[str, Any]:
    return {
        "capacity": cluster.device.memory_bytes,
        "rank": found.fullest.rank,
        "peak": found.fullest.peak,
        "parts": [{"name": name, "bytes": n} for name, n in memory_of(found)],
        "ranks": [
            {"rank": r.rank, "stages": list(r.stages), "peak": r.peak, "busy": r.busy, "idle": r.idle}
            for r in found.ranks
        ],
        "stages": [
            {
                "stage": s.stage,
                "rank": s.rank,
                "layers": s.layers,
                "forward": s.forward,
                "backward": s.backward,
                "in_flight": s.in_flight,
                "kept": s.kept,
            }
            for s in found.stages
        ],
    }


def _plan(plan: Plan) -> dict[str, Any]:
    proof, mesh = plan.proof, plan.why.get("mesh")
    pipeline = plan.pipeline
    return {
        "budget": plan.budget,
        "batch": plan.batch,
        "warnings": list(plan.warnings),
        "mesh_reason": "" if mesh is None else str(mesh),
        "proof": {"seconds": proof.seconds, "lower_bound": proof.lower_bound, "gap": proof.gap},
        "decisions": proof.variables,
        "choices": proof.states,
        "recompute": [
            {"segment": name, "policy": again.policy, "calls": again.calls}
            for name, again in plan.recompute.items()
        ],
        "pipeline": None
        if pipeline is None
        else {"ranks": pipeline.ranks, "schedule": pipeline.schedule, "chunks": pipeline.chunks},
    }


def _timeline(found: StepEstimate, prices: StagePrices) -> dict[str, Any]:
    """spans: per rank, five numbers an action: kind (its place in ``kinds``), stage, microbatch, start and
    length in units of ``unit`` seconds. levels: per rank, four numbers an action and the end of the step:
    start, length, bytes held as it begins, bytes at its own peak."""
    timeline, levels = found.timeline, Levels(found, prices)
    kinds = ["F", "B", "I", "W"]
    unit = timeline.makespan / 1e6 or 1.0
    ranks: list[list[int]] = []
    held = 0
    for spans in timeline.spans:
        held += len(spans)
        if ranks and held > _MOST_SPANS:
            break
        flat: list[int] = []
        for span in spans:
            what, start = span.action, round(span.start / unit)
            kind = kinds.index(what.kind)
            flat += [kind, what.stage, what.microbatch, start, max(0, round(span.end / unit) - start)]
        ranks.append(flat)
    return {
        "name": timeline.name,
        "seconds": timeline.makespan,
        "bubble": timeline.bubble,
        "unit": unit,
        "kinds": kinds,
        "ranks": timeline.ranks,
        "owner": list(timeline.owner),
        "spans": ranks,
        "update": [x / unit for x in timeline.update],
        "levels": [
            [
                round(x)
                for start, end, at_start, peak in levels.of(rank)
                for x in (start / unit, (end - start) / unit, at_start, peak)
            ]
            for rank in range(len(ranks))
        ],
    }


def _streams(prices: StagePrices) -> Iterator[dict[str, Any]]:
    """Per stage and phase of one microbatch. spans: four numbers an op: stream (0 computes, 1 + axis sends),
    its place in ``ops``, start and length in units of ``unit`` seconds. Left out where the page would grow
    too big."""
    lowered, left = prices.program.lowered, _MOST_SPANS
    for part in lowered.parts:
        if part.phase not in ("forward", "backward", "weight") or part.slice:
            continue
        items = lowered.of(part)
        played = prices.parts.play(items, spans=True)
        left -= len(played.spans)
        if left < 0:
            return
        unit = played.seconds / 1e6 or 1.0
        ops: dict[str, int] = {}
        flat: list[int] = []
        for span in sorted(played.spans, key=lambda s: (s.stream, s.start)):
            item = items[span.step]
            task = prices.parts.sheet(item).tasks[span.task]
            where = f"{item.segment}/" if isinstance(item, Call) else ""
            label = f" in {item.label}" if isinstance(item, Call) and item.label else ""
            number = ops.setdefault(f"{task.op.removeprefix('aten.')} {where}{task.name}{label}", len(ops))
            start = round(span.start / unit)
            flat += [span.stream, number, start, max(1, round(span.end / unit) - start)]
        yield {
            "stage": part.stage,
            "phase": part.phase,
            "seconds": played.seconds,
            "unit": unit,
            "streams": ["compute", *prices.pricer.mesh.names],
            "ops": list(ops),
            "spans": flat,
        }


# -- passes ----------------------------------------------------------------------------------------------


def _passes(program: Program) -> tuple[list[str], list[dict[str, Any]]]:
    """(lines, each once; per pass, the numbers of the lines of each segment)."""
    numbers: dict[str, int] = {}
    found = []
    for name in sorted(program.dumps):
        blocks: dict[str, list[int]] = {}
        for block in program.dumps[name].split("\n\n")[1:]:
            rows = block.strip("\n").splitlines()
            head = next((r for r in rows if r.startswith("def ")), "")
            if head:
                segment = head.removeprefix("def ").partition("(")[0]
                own = [r for r in rows if not r.startswith("# ")]
                blocks[segment] = [numbers.setdefault(r.rstrip(), len(numbers)) for r in own]
        found.append({"name": name, "segments": blocks})
    return list(numbers), found
