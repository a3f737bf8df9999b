"""How values travel between segments, with repeated layers counted instead of listed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from autoshard.ir.folded import Folded
from autoshard.ir.joint import Port

#: a value as one segment sees it: (segment, value); ports have segment "" and value "@class"
Place: TypeAlias = tuple[str, str]


@dataclass(frozen=True)
class PortClass:
    """Ports used in the same way: the same weight of every repeated layer.

    key: ``("", "@n")``. grads: where the gradients come from.
    """

    key: Place
    ports: tuple[Port, ...]
    grads: tuple[Place, ...]

    @property
    def first(self) -> Port:
        return self.ports[0]


@dataclass(frozen=True)
class Flow:
    """Edges between segments.

    sources: main value -> the place that makes it. edges: (from, to) -> how many calls.
    classes: all port classes, by key. results: (place, kind, target) of every result of the model.
    """

    sources: dict[str, Place]
    edges: dict[tuple[Place, Place], int]
    classes: dict[Place, PortClass]
    class_of: dict[str, Place]
    results: tuple[tuple[Place, str, str], ...]

    @cached_property
    def targets(self) -> Mapping[Place, tuple[Place, ...]]:
        """Where each value goes, by the place that makes it."""
        result: dict[Place, list[Place]] = {}
        for source, target in self.edges:
            result.setdefault(source, []).append(target)
        return {source: tuple(targets) for source, targets in result.items()}


def flow_of(folded: Folded) -> Flow:
    """Analyse the calls of a folded model; time linear in the number of call arguments."""
    new: dict[str, Place] = {}
    uses: dict[str, set[Place]] = {}
    for call in folded.calls:
        graph = folded.segments[call.segment]
        for value, (inner, _) in zip(call.args, graph.inputs, strict=True):
            uses.setdefault(value, set()).add((call.segment, inner))
        for position, value in enumerate(call.outs):
            new[value] = (call.segment, graph.outputs[position])
    grads: dict[str, set[Place]] = {}
    for result in folded.joint.results:
        if result.kind == "grad" and result.value in new:
            grads.setdefault(result.target, set()).add(new[result.value])
    classes, class_of = _classes(folded, uses, grads)
    sources = {**new, **class_of}
    edges: Counter[tuple[Place, Place]] = Counter()
    for call in folded.calls:
        graph = folded.segments[call.segment]
        for value, (inner, _) in zip(call.args, graph.inputs, strict=True):
            edges[sources[value], (call.segment, inner)] += 1
    results = tuple((sources[r.value], r.kind, r.target) for r in folded.joint.results)
    return Flow(sources, dict(edges), classes, class_of, results)


def _classes(
    folded: Folded, uses: dict[str, set[Place]], grads: dict[str, set[Place]]
) -> tuple[dict[Place, PortClass], dict[str, Place]]:
    groups: dict[Hashable, list[Port]] = {}
    returned = {r.value for r in folded.joint.results}
    frozen = set(folded.joint.frozen)
    for port in folded.joint.ports:
        own = port.kind in ("input", "tangent") or port.name in returned
        key: Hashable = (
            port.name
            if own
            else (
                port.kind,
                port.type,
                port.stored,
                folded.joint.apart.get(port.name),
                frozenset(uses.get(port.name, ())),
                frozenset(grads.get(port.target, ())),
                port.target in frozen,
            )
        )
        groups.setdefault(key, []).append(port)
    classes: dict[Place, PortClass] = {}
    class_of: dict[str, Place] = {}
    for number, ports in enumerate(groups.values()):
        place = ("", f"@{number}")
        new = grads.get(ports[0].target, set()) if ports[0].kind == "param" else set()
        classes[place] = PortClass(place, tuple(ports), tuple(sorted(new)))
        class_of.update((p.name, place) for p in ports)
    return classes, class_of
