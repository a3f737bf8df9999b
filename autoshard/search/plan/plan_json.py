"""Plans as JSON text: stable order, no costs but the margins."""

from __future__ import annotations

import json
from dataclasses import fields
from operator import methodcaller
from typing import TypeAlias

import msgspec

from autoshard.errors import UsageError, VerificationError
from autoshard.ir.decode import decoded
from autoshard.ir.offload import Offload
from autoshard.ir.placement import Layout, parse_placement
from autoshard.rules.states import OpState
from autoshard.search.plan.plan import OptimalityGap, Pipeline, Plan, Recompute, Why
from autoshard.search.problem.decisions import ParamState

SCHEMA = 6
#: a layout: one placement per mesh axis
_Words: TypeAlias = list[str]


class _PlanFile(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """A plan, of which layouts are texts and maps by place are rows that begin with the place."""

    schema: int
    mesh: str
    cluster: str
    budget: int | float | None = msgspec.field(name="budget_bytes")
    fingerprint: str
    target: str
    nodes: list[tuple[str, int, list[_Words], list[_Words | None], int]]
    values: list[tuple[str, str, _Words]]
    params: list[tuple[str, str, _Words, _Words, bool, bool]]
    ports: list[tuple[str, str, _Words]]
    results: list[tuple[int, _Words]]
    why: dict[str, Why]
    warnings: tuple[str, ...]
    replicated: tuple[str, ...]
    microbatches: int
    batch: int
    order: tuple[int, ...]
    recompute: dict[str, Recompute]
    pipeline: Pipeline | None
    offload: str = ""
    step_fingerprint: str = ""
    precision: str = ""
    tile_rows: int = 0
    products: str = ""
    expert_chunks: int = 1
    replicate_experts: str = ""
    allow: str = ""
    differentiate: str = "auto"
    optimality: OptimalityGap


_ROWS = ("nodes", "values", "params", "ports", "results")
#: fields that a plan and its file have in common
_SAME = tuple(f.name for f in fields(Plan) if f.name not in _ROWS)


def plan_to_json(plan: Plan) -> str:
    """The same plan gives the same text, byte for byte."""
    file = _PlanFile(
        schema=SCHEMA,
        nodes=[
            (*place, [_out(x) for x in s.inputs], [None if x is None else _out(x) for x in s.outputs], s.ways)
            for place, s in plan.nodes.items()
        ],
        values=[(*place, _out(layout)) for place, layout in plan.values.items()],
        params=[(*place, _out(p.stored), _out(p.use), p.keep, p.late) for place, p in plan.params.items()],
        ports=[(*place, _out(layout)) for place, layout in plan.ports.items()],
        results=[(number, _out(layout)) for number, layout in plan.results.items()],
        **{name: getattr(plan, name) for name in _SAME},
    )
    plain = msgspec.to_builtins(file, enc_hook=methodcaller("item"))  # of numbers of numpy
    return json.dumps(plain, separators=(",", ":")) + "\n"


def plan_from_json(text: str) -> Plan:
    """Raises VerificationError if the text is not a plan of this schema."""
    try:
        raw = json.loads(text)
        if isinstance(raw, dict) and raw.get("schema") != SCHEMA:
            what = f"the plan has schema {raw.get('schema')}, this version reads {SCHEMA}"
            raise VerificationError(what, hint="plan again")
        file = decoded(raw, _PlanFile, "the plan", fail=VerificationError, hint="plan again")
        file.budget = None if file.budget is None else int(file.budget)
        file.offload = str(Offload.parse(file.offload))
        return Plan(
            nodes={
                (segment, number): OpState(
                    tuple(map(_in, i)), tuple(None if x is None else _in(x) for x in o), ways
                )
                for segment, number, i, o, ways in file.nodes
            },
            values={(a, b): _in(x) for a, b, x in file.values},
            params={(a, b): ParamState(_in(s), _in(u), keep, late) for a, b, s, u, keep, late in file.params},
            ports={(a, b): _in(x) for a, b, x in file.ports},
            results={n: _in(x) for n, x in file.results},
            **{name: getattr(file, name) for name in _SAME},
        )
    except (ValueError, OverflowError, RecursionError, UsageError) as error:
        raise VerificationError(f"not a plan: {error}", hint="plan again") from None


def _out(layout: Layout) -> list[str]:
    return [str(p) for p in layout]


def _in(words: list[str]) -> Layout:
    return tuple(parse_placement(w) for w in words)
