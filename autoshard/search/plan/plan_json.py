"""Plans as JSON text: stable order, no costs but the margins."""

from __future__ import annotations

import json
from typing import Any

from autoshard.errors import UsageError, VerificationError
from autoshard.ir.offload import Offload
from autoshard.ir.placement import Layout, Placement, parse_placement
from autoshard.rules.states import OpState
from autoshard.search.plan.plan import Cut, OptimalityGap, Pipeline, Plan, Recompute, Why
from autoshard.search.problem.decisions import ParamState

SCHEMA = 5


def plan_to_json(plan: Plan) -> str:
    """The same plan gives the same text, byte for byte."""
    document = {
        "schema": SCHEMA,
        "mesh": plan.mesh,
        "cluster": plan.cluster,
        "budget_bytes": plan.budget,
        "fingerprint": plan.fingerprint,
        "target": plan.target,
        "nodes": [
            [seg, number, [_out(x) for x in s.inputs], [_out(x) for x in s.outputs], s.ways]
            for (seg, number), s in plan.nodes.items()
        ],
        "values": [[*place, _out(layout)] for place, layout in plan.values.items()],
        "params": [[*place, _out(p.stored), _out(p.use), p.keep, p.late] for place, p in plan.params.items()],
        "ports": [[*place, _out(layout)] for place, layout in plan.ports.items()],
        "results": [[number, _out(layout)] for number, layout in plan.results.items()],
        "why": {k: [w.reason, w.alternative, w.margin] for k, w in plan.why.items()},
        "warnings": list(plan.warnings),
        "replicated": list(plan.replicated),
        "microbatches": plan.microbatches,
        "batch": plan.batch,
        "order": list(plan.order),
        "recompute": {name: [r.policy, r.calls] for name, r in plan.recompute.items()},
        "pipeline": _pipeline_out(plan.pipeline),
        **({"offload": plan.offload} if plan.offload else {}),
        **({"step_fingerprint": plan.step_fingerprint} if plan.step_fingerprint else {}),
        "proof": [
            plan.proof.seconds,
            plan.proof.lower_bound,
            plan.proof.gap,
            plan.proof.method,
            plan.proof.variables,
            plan.proof.states,
            plan.proof.own_bound,
        ],
    }
    return json.dumps(document, indent=None, separators=(",", ":")) + "\n"


def plan_from_json(text: str) -> Plan:
    """Raises VerificationError if the text is not a plan of this schema."""
    try:
        raw: dict[str, Any] = json.loads(text)
        if raw["schema"] != SCHEMA:
            raise VerificationError(
                f"the plan has schema {raw['schema']}, this version reads {SCHEMA}", hint="plan again"
            )
        return Plan(
            raw["mesh"],
            raw["cluster"],
            None if raw["budget_bytes"] is None else int(raw["budget_bytes"]),
            raw["fingerprint"],
            {
                (seg, int(n)): OpState(tuple(_in(x) for x in i), tuple(_maybe(x) for x in o), int(w))
                for seg, n, i, o, w in raw["nodes"]
            },
            {(a, b): _in(x) for a, b, x in raw["values"]},
            {
                (a, b): ParamState(_in(s), _in(u), bool(k), bool(late))
                for a, b, s, u, k, late in raw["params"]
            },
            {(a, b): _in(x) for a, b, x in raw["ports"]},
            {int(n): _in(x) for n, x in raw["results"]},
            {k: Why(r, a, float(m)) for k, (r, a, m) in raw["why"].items()},
            tuple(raw["warnings"]),
            OptimalityGap(*raw["proof"]),
            raw["target"],
            tuple(map(str, raw["replicated"])),
            int(raw["microbatches"]),
            int(raw["batch"]),
            tuple(int(d) for d in raw["order"]),
            {str(name): _recompute(*entry) for name, entry in raw["recompute"].items()},
            _pipeline_in(raw["pipeline"]),
            str(Offload.parse(raw.get("offload", ""))),
            str(raw.get("step_fingerprint", "")),
        )
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        OverflowError,
        RecursionError,
        UsageError,
    ) as error:
        raise VerificationError(f"not a plan: {error}", hint="plan again") from None


def _pipeline_out(pipeline: Pipeline | None) -> list[Any] | None:
    if pipeline is None:
        return None
    cuts = [[c.call, c.value, c.label] for c in pipeline.cuts]
    return [pipeline.ranks, pipeline.position, pipeline.schedule, pipeline.chunks, cuts, pipeline.slices]


def _pipeline_in(raw: list[Any] | None) -> Pipeline | None:
    if raw is None:
        return None
    ranks, position, schedule, chunks, cuts, slices = raw
    made = tuple(Cut(int(call), str(value), str(label)) for call, value, label in cuts)
    return Pipeline(int(ranks), int(position), str(schedule), int(chunks), made, int(slices))


def _recompute(policy: str, calls: int) -> Recompute:
    if policy == "full":
        return Recompute("full", int(calls))
    if policy == "selective":
        return Recompute("selective", int(calls))
    raise ValueError(f"{policy!r} is no recompute policy")


def _out(layout: Layout | None) -> list[str] | None:
    return None if layout is None else [str(p) for p in layout]


def _maybe(words: list[str] | None) -> Layout | None:
    return None if words is None else _in(words)


def _in(words: list[str]) -> Layout:
    placed: tuple[Placement, ...] = tuple(parse_placement(w) for w in words)
    return placed
