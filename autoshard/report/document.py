"""Everything the report page shows, as one document of plain data; see ``VERSION`` for its schema."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from autoshard._version import __version__
from autoshard.cluster.cluster import Cluster
from autoshard.cluster.mesh import Mesh
from autoshard.ir import Call
from autoshard.program.program import Program
from autoshard.report.decided import Decisions
from autoshard.report.document_modules import module_rows, modules_of_parameters, parameter_rows
from autoshard.report.document_segments import collective_rows, segments_of
from autoshard.report.levels import MemoryCurves
from autoshard.report.simulation import memory_of, parts_of, rates
from autoshard.search.plan.plan import Plan
from autoshard.simulate.stage_costs import StagePrices
from autoshard.simulate.step import StepEstimate, simulated

#: raised when a field of the document changes its meaning or goes away
VERSION = 2
#: actions of a timeline that the page holds; of larger ones, those of the first ranks
_MOST_SPANS = 60_000


def document(program: Program, cluster: Cluster) -> dict[str, Any]:
    """Version 2. Seconds, bytes; costs of nodes are of one call on the fullest rank; shapes are global.

    ``segments``: straight-line code, every segment once, with how often a microbatch calls it and how often
    it runs in a step (``main`` and ``once``: what stands between calls, in every microbatch and once a
    step); ``modules``: the model's tree with the costs of a step, all stages together, repeated layers as one
    (``model.layers.*``); ``parameters``: by class; ``collectives``: every one of the text; ``passes``: the
    text of each segment after each pass, as numbers of ``lines``; ``timeline``: actions of pipeline ranks;
    ``streams``: the ops of one microbatch of each stage, computing and one stream per mesh axis.
    """
    estimate, prices = simulated(program, cluster)
    pricer, decisions = prices.pricer, Decisions.of(program)
    segments = list(segments_of(program, pricer, decisions))
    lines, passes = _passes(program)
    rate = rates(program, estimate)
    mesh = Mesh.parse(program.full_mesh)
    return {
        "version": VERSION,
        "autoshard": __version__,
        "title": program.target or "program",
        "mesh": program.full_mesh,
        "axes": [{"name": a.name, "size": a.size, "meaning": str(a.meaning)} for a in mesh.axes],
        "ranks": mesh.world_size,
        "cluster": cluster.name,
        "device": cluster.device.name,
        "microbatches": program.microbatches,
        "options": dict(program.options),
        "step": _step(estimate, rate.per_second, rate.what),
        "memory": _memory(estimate, cluster),
        "plan": _plan(decisions.plan),
        "segments": [s.as_json() for s in segments],
        "modules": module_rows(segments, modules_of_parameters(program, decisions)),
        "parameters": list(parameter_rows(program, pricer, decisions)),
        "collectives": list(collective_rows(segments)),
        "lines": lines,
        "passes": passes,
        "timeline": _timeline(estimate, prices),
        "streams": list(_streams(prices)),
    }


# -- the step --------------------------------------------------------------------------------------------


def _step(estimate: StepEstimate, per_second: float, what: str) -> dict[str, Any]:
    return {
        "seconds": estimate.seconds,
        "parts": [{"name": name, "seconds": s} for name, s in parts_of(estimate)],
        "mfu": estimate.mfu,
        "model_flop": estimate.model_flop,
        "items_per_second": per_second,
        "items": what,
    }


def _memory(estimate: StepEstimate, cluster: Cluster) -> dict[str, Any]:
    return {
        "capacity": cluster.device.memory_bytes,
        "rank": estimate.fullest.rank,
        "peak": estimate.fullest.peak,
        "parts": [{"name": name, "bytes": n} for name, n in memory_of(estimate)],
        "ranks": [
            {"rank": r.rank, "stages": list(r.stages), "peak": r.peak, "busy": r.busy, "idle": r.idle}
            for r in estimate.ranks
        ],
        "stages": [
            {
                "stage": s.stage,
                "rank": s.rank,
                "layers": s.layers,
                "forward": s.forward,
                "backward": s.backward,
                "in_flight": s.in_flight,
                "saved_bytes": s.kept,
            }
            for s in estimate.stages
        ],
    }


def _plan(plan: Plan) -> dict[str, Any]:
    optimality, mesh, pipeline = plan.optimality, plan.why.get("mesh"), plan.pipeline
    return {
        "budget": plan.budget,
        "batch": plan.batch,
        "warnings": list(plan.warnings),
        "mesh_reason": "" if mesh is None else str(mesh),
        "optimality": {k: getattr(optimality, k) for k in ("seconds", "dual_bound", "gap")},
        "decisions": optimality.variables,
        "states": optimality.states,
        "recompute": [
            {"segment": name, "policy": row.policy, "calls": row.calls}
            for name, row in plan.recompute.items()
        ],
        "pipeline": None
        if pipeline is None
        else {"ranks": pipeline.ranks, "schedule": pipeline.schedule, "chunks": pipeline.chunks},
    }


def _timeline(estimate: StepEstimate, prices: StagePrices) -> dict[str, Any]:
    """spans: per rank, five numbers an action: kind (its place in ``kinds``), stage, microbatch, start and
    length in units of ``unit`` seconds. levels: per rank, four numbers an action and the end of the step:
    start, length, bytes held as it begins, bytes at its own peak."""
    timeline, levels = estimate.timeline, MemoryCurves(estimate, prices)
    kinds = ["F", "B", "I", "W"]
    unit = timeline.makespan / 1e6 or 1.0
    ranks: list[list[int]] = []
    span_count = 0
    for spans in timeline.spans:
        span_count += len(spans)
        if ranks and span_count > _MOST_SPANS:
            break
        flat: list[int] = []
        for span in spans:
            action, start = span.action, round(span.start / unit)
            kind = kinds.index(action.kind)
            flat += [kind, action.stage, action.microbatch, start, max(0, round(span.end / unit) - start)]
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
    lowered, remaining = prices.program.lowered, _MOST_SPANS
    for part in lowered.parts:
        if part.phase not in ("forward", "backward", "weight") or part.slice:
            continue
        items = lowered.of(part)
        played = prices.parts_of(part.stage).play(items, spans=True)
        remaining -= len(played.spans)
        if remaining < 0:
            return
        unit = played.seconds / 1e6 or 1.0
        ops: dict[str, int] = {}
        flat: list[int] = []
        for span in sorted(played.spans, key=lambda s: (s.stream, s.start)):
            item = items[span.step]
            task = prices.parts.sheet(item).tasks[span.task]
            location = f"{item.segment}/" if isinstance(item, Call) else ""
            label = f" in {item.label}" if isinstance(item, Call) and item.label else ""
            number = ops.setdefault(f"{task.op.removeprefix('aten.')} {location}{task.name}{label}", len(ops))
            start = round(span.start / unit)
            flat += [span.stream, number, start, max(1, round(span.end / unit) - start)]
        yield {
            "stage": part.stage,
            "phase": part.phase,
            "seconds": played.seconds,
            "unit": unit,
            "streams": list(prices.parts.streams),
            "ops": list(ops),
            "spans": flat,
        }


# -- passes ----------------------------------------------------------------------------------------------


def _passes(program: Program) -> tuple[list[str], list[dict[str, Any]]]:
    """(lines, each once; per pass, the numbers of the lines of each segment)."""
    numbers: dict[str, int] = {}
    passes = []
    for name in sorted(program.dumps):
        blocks: dict[str, list[int]] = {}
        for block in program.dumps[name].split("\n\n")[1:]:
            rows = block.strip("\n").splitlines()
            head = next((r for r in rows if r.startswith("def ")), "")
            if head:
                segment = head.removeprefix("def ").partition("(")[0]
                body = [r for r in rows if not r.startswith("# ")]
                blocks[segment] = [numbers.setdefault(r.rstrip(), len(numbers)) for r in body]
        passes.append({"name": name, "segments": blocks})
    return list(numbers), passes
