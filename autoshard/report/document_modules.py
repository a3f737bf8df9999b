"""The tree of a model's modules with what they cost, and its parameters, repeated layers as one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from autoshard.program.layers import upwards
from autoshard.program.program import Program
from autoshard.report.decided import Decisions, starred
from autoshard.report.document_segments import Segment
from autoshard.report.lookup import ProgramIndex
from autoshard.simulate.pricing import Pricer


def module_rows(segments: Sequence[Segment], parameters: Iterable[str]) -> list[dict[str, Any]]:
    """The tree of modules, parents before children, in the order in which the forward meets them.

    path: with ``*`` for the number of a layer; layers: how many of them. Costs are of all layers and stages
    in a step, forward and backward, with everything inside; "" is the full model.
    """
    rows: dict[str, dict[str, Any]] = {"": _row("", 1)}
    layers: dict[str, set[str]] = {}
    # what computes says where a module stands; messages may be sent long before
    for segment in (s for s in segments if not s.backward):
        for node in segment.nodes:
            if "kind" not in node:
                for path in upwards(node["module"]):
                    rows.setdefault(path, _row(path, 1))
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
                row["payload"] += segment.runs * node["payload"]
    for path, labels in layers.items():
        rows[path]["layers"] = max(1, len(labels))
    for module in parameters:
        for path in upwards(module):
            rows.setdefault(path, _row(path, 1))
    return [rows[path] for path in _parents_first(list(rows))]


def _row(path: str, layers: int) -> dict[str, Any]:
    zero = dict.fromkeys(("forward", "backward", "compute", "comm", "payload"), 0.0)
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


def modules_of_parameters(program: Program, decisions: Decisions) -> list[str]:
    ports = [p for p in program.signature.ports if p.kind in ("param", "buffer")]
    return list(dict.fromkeys(decisions.starred(p.target).rpartition(".")[0] for p in ports))


def parameter_rows(program: Program, pricer: Pricer, decisions: Decisions) -> Iterator[dict[str, Any]]:
    """Classes of parameters that are decided about together and whose names differ in layers alone."""
    index = ProgramIndex(program)
    groups: dict[tuple[str, str], dict[str, Any]] = {}
    for port in program.signature.ports:
        if port.kind not in ("param", "buffer", "input"):
            continue
        name = index.name_of(port)
        path, strategy = starred(name, index.labels), decisions.strategy_of_port(port)
        placed = program.lowered.values[port.name]
        row = groups.get((path, strategy))
        if row is None:
            why = decisions.why_of_port(port)
            row = groups[path, strategy] = {
                "name": path,
                "kind": port.kind,
                "module": path.rpartition(".")[0] if port.kind != "input" else "",
                "count": 0,
                "type": str(port.type),
                "layout": strategy,
                "rank_bytes": 0.0,
                "global_bytes": 0.0,
                "reason": why.reason,
                "alternative": why.alternative,
                "margin": why.margin,
            }
        row["count"] += 1
        row["rank_bytes"] += pricer.bytes_of(placed.type, placed.layout)
        row["global_bytes"] += float(port.type.nbytes)
    yield from groups.values()
