"""Fold a captured model whose repeated layers stand in it as calls.

Written out, every layer of a deep model would be cut and compared anew, to be found the same. Of layers that
follow each other in the same way (`passes.stages.layer_runs`) a few are written out and folded; the calls of
the others are those with other names. This is checked on two of those that are there: where one does not turn
into the other by renaming, the full model is written out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from autoshard.capture.expand_repeats import behind, expand_repeats, in_order
from autoshard.ir import Call, Folded, Graph, Joint, Node, Ref, Result, substitute
from autoshard.passes.memory.repeat_views import repeat_views
from autoshard.passes.simplify.fold import DROPOUT, fold, layer_of
from autoshard.passes.stages.layer_runs import CallOfLayer, Stretch, Wiring, calls_of

#: units of a stretch that are written out: the first ones, whose last one stands for those left out, and the
#: last one; leaving out fewer than that is not worth it
_HEAD, _LEFT_OUT = 3, 2
_NAME = re.compile("(.*)" + behind(r"(\d+)") + r"(_bw\d*)?")


class _NotAlike(Exception):
    """Layers that are wired alike were folded in different ways."""


def fold_repeats(joint: Joint) -> Folded:
    """What `fold` makes of the flat graph; ``joint`` of the result is the captured one with all its ends."""
    if joint.apart:  # layers that are alike here may be kept apart
        return _told(fold(flat(joint)), joint)
    calls = calls_of(joint)
    wiring = Wiring(joint, calls)
    stretches = list(wiring.stretches(_HEAD + 1 + _LEFT_OUT))
    labels = {layer_of(node) for call in calls for node in call.nodes()}
    if stretches and len(labels) == len(calls):
        short = flat(_without_middle(joint, calls, stretches))
        try:
            full = _Lengthening(joint, calls, wiring, short)
            for stretch in stretches:
                full.lengthen(stretch)
        except _NotAlike:
            return _told(fold(flat(joint)), joint)
        return full.folded()
    return _told(fold(flat(joint)), joint)


def flat(joint: Joint) -> Joint:
    """A captured model with all its layers written out, and views where they are used."""
    return repeat_views(expand_repeats(joint))


def _told(folded: Folded, joint: Joint) -> Folded:
    """With the graph as it was captured: the flat one is the segments and their calls."""
    ends = replace(folded.joint, graph=joint.graph, bodies=joint.bodies, away=joint.away)
    return replace(folded, joint=ends)


def _without_middle(joint: Joint, calls: Sequence[CallOfLayer], stretches: Iterable[Stretch]) -> Joint:
    """The model without the calls between the first units and the last one of every stretch."""
    gone: set[str] = set()
    instead: dict[str, str] = {}
    for stretch in stretches:
        for number in range(_HEAD, stretch.units - 1):
            gone.update(node.name for k in stretch.unit(number) for node in calls[k].nodes())
        for old, new in zip(stretch.unit(-2), stretch.unit(_HEAD - 1), strict=True):
            instead.update(zip(calls[old].forward.outs, calls[new].forward.outs, strict=True))
        for old, new in zip(stretch.unit(_HEAD), stretch.unit(-1), strict=True):
            before, after = calls[old].backward, calls[new].backward
            if before is not None and after is not None:
                instead.update(zip(before.outs, after.outs, strict=True))
    nodes = [node for node in joint.graph.nodes if node.name not in gone]
    lost = {out for node in joint.graph.nodes if node.name in gone for out in node.outs}
    results = tuple(r for r in joint.results if r.value not in lost)

    def rewired(node: Node) -> Node:
        return substitute(node, lambda name: Ref(instead.get(name, name)))

    kept = tuple(map(rewired, nodes))
    graph = Graph(joint.graph.name, joint.graph.inputs, kept, tuple(r.value for r in results))
    return replace(joint, graph=graph, results=results)


@dataclass(frozen=True)
class _Renaming:
    """From calls of layers to others that take their places.

    calls: number of a call -> the other one's. ports: the same of what they alone use. labels: the same of
    layers, with what is added to the numbers of dropouts. outer: values of the model outside layers.
    """

    calls: Mapping[int, int]
    ports: Mapping[str, str]
    labels: Mapping[str, tuple[str, int]]
    outer: frozenset[str]

    def name(self, name: str) -> str:
        if name in self.ports:
            return self.ports[name]
        if name in self.outer:
            return name
        result = _NAME.fullmatch(name)
        if result is None:
            return name
        base, call, copy = result.groups()
        return f"{base}{behind(self.calls.get(int(call), int(call)))}{copy or ''}"

    def names(self, names: Sequence[str]) -> tuple[str, ...]:
        return tuple(map(self.name, names))

    def call(self, call: Call, *, sown: bool) -> Call:
        """sown: whether its segment holds a dropout."""
        label, site = self.labels.get(call.label, (call.label, 0))
        site = call.site + site if sown else call.site
        return Call(call.segment, self.names(call.args), self.names(call.outs), label, call.backward, site)

    def graph(self, graph: Graph) -> Graph:
        """A segment whose values are named after those of the model."""
        inputs = tuple([(self.name(name), type_) for name, type_ in graph.inputs])
        nodes = tuple(
            [substitute(n, lambda v: Ref(self.name(v)), outs=self.names(n.outs)) for n in graph.nodes]
        )
        return Graph(graph.name, inputs, nodes, self.names(graph.outputs))


class _Lengthening:
    """The short model folded, and the calls that were left out of it put in again, stretch by stretch."""

    def __init__(self, joint: Joint, layers: Sequence[CallOfLayer], wiring: Wiring, short: Joint) -> None:
        self.joint, self.layers, self.wiring = joint, layers, wiring
        self.short = fold(short)
        self.segments = dict(self.short.segments)
        self.calls = list(self.short.calls)
        self.results = list(short.results)
        self.labels = [layer_of(layer.forward) for layer in layers]
        self.targets = {p.name: p.target for p in joint.ports}
        self.outer = frozenset(joint.graph.types()) | {p.name for p in short.ports}
        self.sown = {n for n, g in self.segments.items() if any(x.op == DROPOUT for x in g.nodes)}

    def folded(self) -> Folded:
        ends = replace(self.short.joint, results=in_order(self.results, self.joint.ports))
        return _told(Folded(self.segments, tuple(self.calls), ends), self.joint)

    def lengthen(self, stretch: Stretch) -> None:
        """Put in what was left out of a stretch; _NotAlike unless its layers were folded in the same way.

        What stands from the first call of one unit to that of the next one comes again for every unit.
        """
        last = stretch.units - 1
        # units that are there -> those that they stand for, each with its neighbours
        alike = self._renaming(stretch, {0: 1, 1: 2, 2: last})
        others = [self._renaming(stretch, {1: k - 1, 2: k, last: k + 1}) for k in range(_HEAD, last)]
        next_to_last, third = others[-1], self._renaming(stretch, {last: _HEAD})
        at = self._starts(stretch, backward=False)
        unit = range(at[2], at[last])
        self._check(alike, range(at[1], at[2]), unit)
        until, rest = len(self.calls), list[Call]()
        back = self._starts(stretch, backward=True)
        if back:
            # here the last unit comes first
            unit_back = range(back[2], back[1])
            self._check(alike, range(back[1], back[0]), unit_back)
            until = back[2]
            rest = [*self._moved([*others[::-1], third], unit_back), *self.calls[back[1] :]]
        self._add_results(others, stretch)
        self._rename_segments(next_to_last, range(at[last], back[1] if back else until))
        self.calls = [
            *self.calls[: at[last]],
            *self._moved(others, unit),
            # they follow what was put in, no longer the unit that stands for it
            *self._moved([next_to_last], range(at[last], until)),
            *rest,
        ]

    def _check(self, alike: _Renaming, one: range, other: range) -> None:
        if self._moved([alike], one) != [self.calls[k] for k in other]:
            raise _NotAlike

    def _moved(self, renamings: Iterable[_Renaming], places: range) -> list[Call]:
        """Calls renamed in each way, one way after the other."""
        calls = [self.calls[k] for k in places]
        return [how.call(call, sown=call.segment in self.sown) for how in renamings for call in calls]

    def _starts(self, stretch: Stretch, *, backward: bool) -> dict[int, int]:
        """Unit -> place of the first call of its layers; empty if nothing has a gradient."""
        first: dict[str, int] = {}
        for place, call in enumerate(self.calls):
            if call.backward == backward:
                first.setdefault(call.label, place)
        result: dict[int, int] = {}
        for unit in (0, 1, 2, stretch.units - 1):
            places = [first[label] for k in stretch.unit(unit) if (label := self.labels[k]) in first]
            if places:
                result[unit] = min(places)
        order = sorted(result.values(), reverse=backward)
        if (result or not backward) and (len(result) != _HEAD + 1 or order != list(result.values())):
            raise _NotAlike
        return result

    def _renaming(self, stretch: Stretch, units: Mapping[int, int]) -> _Renaming:
        calls: dict[int, int] = {}
        ports: dict[str, str] = {}
        labels: dict[str, tuple[str, int]] = {}
        for old, new in units.items():
            for a, b in zip(stretch.unit(old), stretch.unit(new), strict=True):
                before, after = self.layers[a].key, self.layers[b].key
                calls[before.call] = after.call
                ports.update(zip(self.wiring.own(a), self.wiring.own(b), strict=True))
                labels[self.labels[a]] = self.labels[b], after.site - before.site
        return _Renaming(calls, ports, labels, self.outer)

    def _rename_segments(self, how: _Renaming, places: range) -> None:
        """Segments are named like the values of their first call, which has got other ones."""
        first: dict[str, int] = {}
        for place, call in enumerate(self.calls):
            first.setdefault(call.segment, place)
        for name, place in first.items():
            if place in places:
                self.segments[name] = how.graph(self.segments[name])

    def _add_results(self, others: Sequence[_Renaming], stretch: Stretch) -> None:
        """Gradients of the parameters of a unit as those of the others."""
        names = {name for k in stretch.unit(_HEAD - 1) for name in self.wiring.own(k)}
        targets = {self.targets[name]: name for name in names}
        results = [r for r in self.short.joint.results if r.kind == "grad" and r.target in targets]
        grads = [(r.value, targets[r.target]) for r in results]
        for how in others:
            self.results += [Result(how.name(v), "grad", self.targets[how.ports[n]]) for v, n in grads]
