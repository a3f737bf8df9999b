"""How two programs differ: decisions, step time, memory, payloads; repeated layers once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from autoshard.cluster.cluster import Cluster
from autoshard.cluster.mesh import Mesh
from autoshard.program.program import Program
from autoshard.program.text import layout_text
from autoshard.report.decided import Decisions, Op
from autoshard.report.simulation import memory_of, parts_of, rates
from autoshard.rules.states import OpState
from autoshard.search.plan.plan import Plan
from autoshard.simulate.estimate import Estimator
from autoshard.simulate.step import StepEstimate

#: kinds of parameters that a note names
_MOST_NAMES = 4


@dataclass(frozen=True)
class Figure:
    """One figure of both, None where one has no such part. unit: ``s``, ``B`` (bytes), ``%``, ``1``."""

    name: str
    a: float | None
    b: float | None
    unit: str


@dataclass(frozen=True)
class Decided:
    """One decision of both, in words. count: parameters or calls it holds for; "" where one has none."""

    what: str
    count: int
    a: str
    b: str


@dataclass(frozen=True)
class Diff:
    """Two programs compared. same_model: whether they run the same graph; same_axes: whether the axes of both
    have the same names. figures: all of them; decisions: those that differ.

    ops: those of ops, None where they cannot be compared one by one. identical_decisions: how many agree.
    """

    names: tuple[str, str]
    meshes: tuple[str, str]
    clusters: tuple[str, str]
    targets: tuple[str, str]
    same_model: bool
    same_axes: bool
    figures: tuple[Figure, ...]
    payloads: tuple[Figure, ...]
    model_wide: tuple[Decided, ...]
    parameters: tuple[Decided, ...]
    ops: tuple[Decided, ...] | None
    identical_decisions: int
    notes: tuple[str, ...]

    @property
    def identical(self) -> bool:
        """Whether nothing was decided otherwise."""
        return self.same_model and not (self.model_wide or self.parameters or self.ops)

    def as_json(self) -> dict[str, Any]:
        figures = [{**asdict(row), "name": row.name.strip()} for row in self.figures]
        return {**asdict(self), "figures": figures, "identical": self.identical}


@dataclass(frozen=True)
class Side:
    """One of the two. name: as the reader calls it."""

    name: str
    program: Program
    cluster: Cluster


def diff_of(a: Side, b: Side) -> Diff:
    """Compare two programs; each is priced on its own cluster."""
    one, two = _Side(a), _Side(b)
    same_model = one.plan.fingerprint == two.plan.fingerprint
    same_axes = one.decisions.mesh.names == two.decisions.mesh.names
    parameters, agreeing, notes = _parameters(one, two)
    ops = None
    if same_model and same_axes:
        ops, more = _ops(one, two)
        agreeing += more
    return Diff(
        (a.name, b.name),
        (a.program.full_mesh, b.program.full_mesh),
        (a.cluster.name, b.cluster.name),
        (a.program.target, b.program.target),
        same_model,
        same_axes,
        tuple(_figures(one, two)),
        tuple(_payloads(one, two)),
        tuple(_model_wide(one, two)),
        parameters,
        ops,
        agreeing,
        (*_notes(one, two, same_model, same_axes), *notes),
    )


class _Side:
    def __init__(self, side: Side) -> None:
        self.program, self.cluster = side.program, side.cluster
        self.decisions = Decisions.of(side.program)
        self.plan: Plan = self.decisions.plan
        self.estimator = Estimator(side.program, side.cluster)
        self.estimate: StepEstimate = self.estimator.pipeline


def _notes(a: _Side, b: _Side, same_model: bool, same_axes: bool) -> Iterator[str]:
    if not same_model:
        yield "the captured graphs differ (model, or more than the batch): ops are not compared one by one"
    elif not same_axes:
        yield "the meshes have different axes: ops are not compared one by one"
    if a.cluster.name != b.cluster.name:
        yield f"cost models differ, {a.cluster.name} and {b.cluster.name}: --cluster NAME sets both"
    if rates(a.program, a.estimate).items != rates(b.program, b.estimate).items:
        one, two = (f"{r.items:,} {r.what}" for r in (rates(s.program, s.estimate) for s in (a, b)))
        yield f"a step of a is {one}, of b {two}: compare the throughput"


def _figures(a: _Side, b: _Side) -> Iterator[Figure]:
    yield Figure("step time", a.estimate.seconds, b.estimate.seconds, "s")
    yield from _joined(dict(parts_of(a.estimate)), dict(parts_of(b.estimate)), "s")
    rate_a, rate_b = (rates(s.program, s.estimate) for s in (a, b))
    yield Figure(f"{rate_a.what}/s", rate_a.per_second, rate_b.per_second, "1")
    yield Figure("MFU", a.estimate.mfu, b.estimate.mfu, "%")
    yield Figure("peak memory", a.estimate.fullest.peak, b.estimate.fullest.peak, "B")
    yield from _joined(dict(memory_of(a.estimate)), dict(memory_of(b.estimate)), "B")


def _joined(a: Mapping[str, float], b: Mapping[str, float], unit: str) -> Iterator[Figure]:
    for name in dict.fromkeys((*a, *b)):
        if a.get(name) or b.get(name):
            yield Figure(f"  {name}", a.get(name), b.get(name), unit)


def _payloads(a: _Side, b: _Side) -> Iterator[Figure]:
    """Bytes that a rank sends in a step, by kind of collective and axis."""
    one, two = ({(t.kind, t.axis): t for t in s.estimator.traffic()} for s in (a, b))
    for key in dict.fromkeys((*one, *two)):
        kind, axis = key
        payloads = [t.wire if (t := side.get(key)) is not None else None for side in (one, two)]
        counts = [str(t.count) if (t := side.get(key)) is not None else "0" for side in (one, two)]
        times = counts[0] if counts[0] == counts[1] else f"{counts[0]} | {counts[1]}"
        yield Figure(f"{kind} on {axis}, {times} calls", payloads[0], payloads[1], "B")


def _model_wide(a: _Side, b: _Side) -> Iterator[Decided]:
    """Decisions about the full model."""
    for what, of in (
        ("mesh", lambda s: s.program.full_mesh),
        ("microbatches", lambda s: f"{s.program.microbatches} of {s.plan.batch}"),
        ("recompute", _recompute),
        ("chunks of experts' tokens", lambda s: str(s.plan.expert_chunks)),
        ("replicated experts", lambda s: s.plan.replicate_experts or "none"),
        ("approximations", lambda s: s.plan.allow or "none"),
        ("pipeline", _pipeline),
        ("device order", lambda s: ", ".join(map(str, s.plan.order)) or "rank r on device r"),
        ("memory budget", lambda s: "none" if s.plan.budget is None else f"{s.plan.budget:,} bytes"),
    ):
        one, two = of(a), of(b)
        if one != two:
            yield Decided(what, 1, one, two)
    only_a, only_b = (sorted({*x.program.dumps} - {*y.program.dumps}) for x, y in ((a, b), (b, a)))
    if only_a or only_b:
        yield Decided("passes", 1, ", ".join(only_a) or "none", ", ".join(only_b) or "none")


def _recompute(side: _Side) -> str:
    rows = [f"{r.policy} for {r.calls} calls of {name}" for name, r in side.plan.recompute.items()]
    return ", ".join(rows) or "nothing"


def _pipeline(side: _Side) -> str:
    pipeline = side.plan.pipeline
    if pipeline is None:
        return "none"
    slices = f", {pipeline.slices} slices" if pipeline.slices > 1 else ""
    cuts = ", ".join(c.label or f"call {c.call}" for c in pipeline.cuts)
    return f"{pipeline.schedule} x {pipeline.chunks} on {pipeline.ranks} ranks{slices}, ends after {cuts}"


def _parameters(a: _Side, b: _Side) -> tuple[tuple[Decided, ...], int, tuple[str, ...]]:
    """(those that differ, how many agree, notes on those that only one model has)."""
    one, two = _strategies(a), _strategies(b)
    differing: dict[tuple[str, str, str], int] = {}
    agreeing = 0
    for name in [n for n in one if n in two]:
        if one[name] == two[name]:
            agreeing += 1
        else:
            key = (a.decisions.starred(name), one[name], two[name])
            differing[key] = differing.get(key, 0) + 1
    rows = tuple(Decided(what, count, was, would) for (what, was, would), count in differing.items())
    notes = []
    for name, side, ours, other in (("a", a, one, two), ("b", b, two, one)):
        missing = [n for n in ours if n not in other]
        if missing:
            kinds = list(dict.fromkeys(side.decisions.starred(n) for n in missing))
            more = f" and {len(kinds) - _MOST_NAMES} more kinds" if len(kinds) > _MOST_NAMES else ""
            some = ", ".join(kinds[:_MOST_NAMES])
            notes.append(f"{len(missing)} parameters are only in {name}: {some}{more}")
    return rows, agreeing, tuple(notes)


def _strategies(side: _Side) -> dict[str, str]:
    ports = [p for p in side.program.signature.ports if p.kind == "param"]
    return {p.target: side.decisions.strategy_of_port(p) for p in ports}


def _ops(a: _Side, b: _Side) -> tuple[tuple[Decided, ...], int]:
    """(ops whose placement differs, how many agree); the graphs are the same."""
    names = a.decisions.mesh.names
    rows, agreeing = [], 0
    for key, op in a.decisions.ops.items():
        one, two = a.plan.nodes.get(key), b.plan.nodes.get(key)
        if one is None or two is None or _same(one, two, names, b.decisions.mesh):
            agreeing += 1
        else:
            rows.append(Decided(_op_name(op, a.decisions), op.calls, _face(one, names), _face(two, names)))
    return tuple(rows), agreeing


def _same(one: OpState, two: OpState, names: tuple[str, ...], mesh: Mesh) -> bool:
    return _face(one, names) == _face(two, mesh.names)


def _face(state: OpState, names: tuple[str, ...]) -> str:
    """The layout of the first result, or of the first input of an op that has none."""
    layout = next((x for x in (*state.outputs, *state.inputs) if x is not None), None)
    return "" if layout is None else layout_text(layout, names)


def _op_name(op: Op, decisions: Decisions) -> str:
    module = decisions.starred(op.module) if op.module else op.segment
    return f"{op.segment}/{op.name} = {op.op} in {module}"
