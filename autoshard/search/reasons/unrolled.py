"""Which copy of a repeated layer each cost of a problem belongs to.

A problem counts repeated layers together: a variable stands for one decision in all of them, a cost for the
sum over all calls. The calls of the folded model say how that sum splits: which call feeds which, and which
layer a parameter belongs to. Every call of a segment has the same share of what the segment costs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from autoshard.ir import Folded, TensorType, refs_of
from autoshard.ir.flow import Place, PortClass
from autoshard.placement import Layout
from autoshard.search.networks.chain import Pair
from autoshard.search.networks.network import Array
from autoshard.search.problem.problem import Model
from autoshard.search.problem.terms import Time, TimeWeight
from autoshard.search.problem.variables import NodeVar, ParamVar, ValueVar, Variable
from autoshard.search.solving.problems import Posed

#: what is not in a copy
OUTSIDE = -1


class NotAChain(Exception):
    """The layers do not form a chain of equal copies. The message says why."""


@dataclass(frozen=True)
class Run:
    """Layers of one kind in a row. labels: in the order of forward. segments: that they call."""

    labels: tuple[str, ...]
    segments: frozenset[str]


def runs_of(folded: Folded) -> tuple[Run, ...]:
    """All runs of two layers and more, the longest first."""
    calls: dict[str, list[str]] = {}
    for call in folded.calls:
        if call.label:
            calls.setdefault(call.label, []).append(call.segment)
    found: list[list[str]] = []
    kinds: list[tuple[str, ...]] = []
    for label, segments in calls.items():
        kind = tuple(sorted(segments))
        if kinds and kinds[-1] == kind:
            found[-1].append(label)
        else:
            found.append([label])
            kinds.append(kind)
    runs = [Run(tuple(ls), frozenset(k)) for ls, k in zip(found, kinds, strict=True) if len(ls) > 1]
    return tuple(sorted(runs, key=lambda run: -len(run.labels)))


@dataclass(frozen=True)
class Spread:
    """How the cost of a pair of variables (a, b) splits, in shares of the whole.

    same: per copy, between a and b of it. onward: per neighbours, a of a copy and b of the next; back: b of a
    copy and a of the next. a_every, a_first, a_last: a outside and b of every, the first, the last copy (the
    last two: beyond every); b_every, b_first, b_last: the other way round. outside: neither is in a copy.
    The shares of all copies and ``lost`` add up to 1; lost: what fits none of these.
    """

    same: float = 0.0
    onward: float = 0.0
    back: float = 0.0
    a_every: float = 0.0
    a_first: float = 0.0
    a_last: float = 0.0
    b_every: float = 0.0
    b_first: float = 0.0
    b_last: float = 0.0
    outside: float = 0.0
    lost: float = 0.0

    def turned(self) -> Spread:
        """That of (b, a)."""
        return replace(
            self,
            onward=self.back,
            back=self.onward,
            a_every=self.b_every,
            a_first=self.b_first,
            a_last=self.b_last,
            b_every=self.a_every,
            b_first=self.a_first,
            b_last=self.a_last,
        )


def spread_of(events: Mapping[tuple[int, int], int], copies: int) -> Spread:
    """events: (copy of a, copy of b) -> how often; `OUTSIDE` for neither copy."""
    total = sum(events.values())
    links = copies - 1
    same = min(events.get((i, i), 0) for i in range(copies))
    onward = min(events.get((i, i + 1), 0) for i in range(links))
    back = min(events.get((i + 1, i), 0) for i in range(links))
    a = [events.get((OUTSIDE, i), 0) for i in range(copies)]
    b = [events.get((i, OUTSIDE), 0) for i in range(copies)]
    counts = {
        "same": same,
        "onward": onward,
        "back": back,
        "a_every": min(a),
        "a_first": a[0] - min(a),
        "a_last": a[-1] - min(a),
        "b_every": min(b),
        "b_first": b[0] - min(b),
        "b_last": b[-1] - min(b),
        "outside": events.get((OUTSIDE, OUTSIDE), 0),
    }
    times = {"same": copies, "onward": links, "back": links, "a_every": copies, "b_every": copies}
    lost = total - sum(times.get(name, 1) * count for name, count in counts.items())
    return Spread(**{name: count / total for name, count in counts.items()}, lost=lost / total)


@dataclass(frozen=True)
class Joined:
    """One reason for costs between two variables: a use of a value. source, target: the variables.

    flow: for a use across segments (place of the value, place of the use, how often); its costs can be told
    apart from others of the pair.
    """

    source: int
    target: int
    spread: Spread
    flow: tuple[Place, Place, int] | None = None


@dataclass(frozen=True)
class Unrolled:
    """A problem with one run of layers taken apart.

    share: per variable, (of its cost, in one copy; outside). joined: reasons per pair of variables (a < b).
    """

    posed: Posed
    run: Run
    share: tuple[tuple[float, float], ...]
    joined: Mapping[Pair, tuple[Joined, ...]]

    @property
    def copies(self) -> int:
        return len(self.run.labels)

    def parts(self, pair: Pair, table: Array, weight: TimeWeight) -> Iterator[tuple[Spread, Array]]:
        """The costs of a pair, split by how they spread. weight: that the costs were composed with."""
        reasons = self.joined.get(pair)
        if reasons is None:
            raise NotAChain(f"the costs between the variables {pair} come from no use of a value")
        spreads = [r.spread if (r.source, r.target) == pair else r.spread.turned() for r in reasons]
        if all(spread == spreads[0] for spread in spreads):
            yield spreads[0], table
            return
        # what uses across segments cost is known by itself, the rest is inside
        inside, rest = None, table
        for reason, spread in zip(reasons, spreads, strict=True):
            if reason.flow is None:
                if inside not in (None, spread):
                    raise NotAChain(f"the costs between the variables {pair} cannot be told apart")
                inside = spread
                continue
            own = self._flow(reason, weight)
            own = own if (reason.source, reason.target) == pair else own.T
            yield spread, own
            # where the flow cannot be, what else there is does not matter
            rest = np.where(np.isfinite(own), rest - np.where(np.isfinite(own), own, 0.0), 0.0)
        if inside is not None:
            yield inside, np.maximum(rest, 0.0)

    def _flow(self, reason: Joined, weight: TimeWeight) -> Array:
        """Seconds of all uses of a value by one input of another segment."""
        assert reason.flow is not None
        source, target, count = reason.flow
        variables = self.posed.problem.variables
        used = variables[reason.target]
        assert isinstance(used, ValueVar)
        given = _offered(self.posed.model, variables[reason.source], source)
        type_ = _type(self.posed.model, target)
        layouts = [layout for layout in dict.fromkeys([*given, *used.states]) if layout is not None]
        table = self.posed.prices.ops.reshard.table(type_, layouts)
        rows = [0 if layout is None else table.index[layout] for layout in given]
        columns = [table.index[wanted] for wanted in used.states]
        key = Time("talk", self.posed.model.folded.is_backward()[target[0]])
        return np.asarray(weight(key) * count * table.seconds[np.ix_(rows, columns)])


def _type(model: Model, place: Place) -> TensorType:
    return model.folded.segments[place[0]].types()[place[1]]


def _offered(model: Model, variable: Variable, place: Place) -> list[Layout | None]:
    if isinstance(variable, NodeVar):
        nodes = model.folded.segments[place[0]].nodes
        position = next(node.outs.index(place[1]) for node in nodes if place[1] in node.outs)
        return [state.outputs[position] for state in variable.states]
    if isinstance(variable, ParamVar):
        return [life.use for life in variable.states]
    return list(variable.states)


def unroll(posed: Posed, run: Run) -> Unrolled:
    """Take one run of layers of a problem apart. Raises NotAChain where that is not possible."""
    if posed.model.alike.across:
        raise NotAChain("layers that differ in numbers decide together")
    return _Unrolling(posed, run).done()


class _Unrolling:
    def __init__(self, posed: Posed, run: Run) -> None:
        self.posed, self.run = posed, run
        self.model, self.index = posed.model, posed.problem.index
        folded = self.model.folded
        self.copies = len(run.labels)
        numbers = {label: i for i, label in enumerate(run.labels)}
        self.copy = [numbers.get(call.label, OUTSIDE) for call in folded.calls]
        self.maker = {out: k for k, call in enumerate(folded.calls) for out in call.outs}
        self.nodes = {
            (name, out): ("node", name, number)
            for name, graph in folded.segments.items()
            for number, node in enumerate(graph.nodes)
            for out in node.outs
        }
        self.joined: dict[Pair, list[Joined]] = {}

    def done(self) -> Unrolled:
        share = [(0.0, 1.0)] * len(self.posed.problem.variables)
        calls: dict[str, Counter[int]] = {name: Counter() for name in self.model.folded.segments}
        for copy, call in zip(self.copy, self.model.folded.calls, strict=True):
            calls[call.segment][copy] += 1
        for number, variable in enumerate(self.posed.problem.variables):
            if isinstance(variable, NodeVar):
                share[number] = self._share(calls[variable.segment])
            elif isinstance(variable, ValueVar):
                share[number] = self._share(calls[variable.place[0]])
        owners = self._owners()
        for key, group in self.model.flow.classes.items():
            share[self.index[key]] = self._share(Counter(owners[port.name] for port in group.ports))
        for name, counts in calls.items():
            self._inside(name, spread_of({(i, i): n for i, n in counts.items()}, self.copies))
        self._flows(owners)
        for group in self.model.flow.classes.values():
            self._gradients(group, owners)
        for number, (place, kind, _) in enumerate(self.model.flow.results):
            if kind != "grad":
                value = self.model.folded.joint.results[number].value
                events = {(self._home(value, owners), OUTSIDE): 1}
                spread = spread_of(events, self.copies)
                self._join(self._source(place), self.index["result", number], spread)
        joined = {pair: tuple(reasons) for pair, reasons in self.joined.items()}
        return Unrolled(self.posed, self.run, tuple(share), joined)

    def _share(self, counts: Counter[int]) -> tuple[float, float]:
        """Of a variable, given how often it stands for something in each copy."""
        total = sum(counts.values())
        each = {counts[i] for i in range(self.copies)}
        if len(each) > 1:
            raise NotAChain("some layers have parameters or calls that others of the run have not")
        return each.pop() / total, counts[OUTSIDE] / total

    def _owners(self) -> dict[str, int]:
        """The copy that a port belongs to, if it is a parameter that only this one uses."""
        users: dict[str, set[int]] = {}
        for copy, call in zip(self.copy, self.model.folded.calls, strict=True):
            for value in call.args:
                users.setdefault(value, set()).add(copy)
        found = dict.fromkeys(self.model.flow.class_of, OUTSIDE)
        for group in self.model.flow.classes.values():
            for port in group.ports if len(group.ports) > 1 else ():
                where = users.get(port.name, set())
                if where == {OUTSIDE} or not where:
                    continue
                if len(where) > 1:
                    raise NotAChain("several layers share some of the parameters that others have alone")
                found[port.name] = next(iter(where))
        return found

    def _home(self, value: str, owners: Mapping[str, int]) -> int:
        return self.copy[self.maker[value]] if value in self.maker else owners[value]

    def _source(self, place: Place) -> int:
        """The variable that offers a value."""
        return self.index[place] if place in self.index else self.index[self.nodes[place]]

    def _join(
        self, source: int, target: int, spread: Spread, flow: tuple[Place, Place, int] | None = None
    ) -> None:
        pair = (min(source, target), max(source, target))
        self.joined.setdefault(pair, []).append(Joined(source, target, spread, flow))

    def _inside(self, name: str, spread: Spread) -> None:
        graph = self.model.folded.segments[name]
        for number, node in enumerate(graph.nodes):
            target = self.index["node", name, number]
            for ref in dict.fromkeys(refs_of(node)):
                self._join(self._source((name, ref)), target, spread)
            for out in node.outs:
                if (name, out) in self.index:
                    self._join(target, self.index[name, out], spread)

    def _flows(self, owners: Mapping[str, int]) -> None:
        segments, sources = self.model.folded.segments, self.model.flow.sources
        events: dict[tuple[Place, Place], Counter[tuple[int, int]]] = {}
        for copy, call in zip(self.copy, self.model.folded.calls, strict=True):
            for value, (inner, _) in zip(call.args, segments[call.segment].inputs, strict=True):
                counts = events.setdefault((sources[value], (call.segment, inner)), Counter())
                counts[self._home(value, owners), copy] += 1
        for (source, target), counts in events.items():
            spread = spread_of(counts, self.copies)
            flow = (source, target, sum(counts.values()))
            self._join(self._source(source), self.index[target], spread, flow)

    def _gradients(self, group: PortClass, owners: Mapping[str, int]) -> None:
        made: dict[Place, Counter[tuple[int, int]]] = {place: Counter() for place in group.grads}
        ports = {port.target: port.name for port in group.ports if port.kind == "param"}
        sources = self.model.flow.sources
        for result in self.model.folded.joint.results:
            if result.kind == "grad" and result.target in ports and result.value in self.maker:
                home = self.copy[self.maker[result.value]]
                made[sources[result.value]][home, owners[ports[result.target]]] += 1
        for place, counts in made.items():
            self._join(self._source(place), self.index[group.key], spread_of(counts, self.copies))


def lost(unrolled: Unrolled) -> int:
    """How many uses of values are left out of the chain, at least in part."""
    return sum(any(r.spread.lost > 0 for r in reasons) for reasons in unrolled.joined.values())
