"""Why a parameter, a module or a value is as it is in a program, back to the user's own lines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from autoshard.cluster.cluster import Cluster
from autoshard.ir import Call, Node, Port, refs_of
from autoshard.ir.collectives import ALL_GATHER_MM, axes_of, is_collective, is_message, is_ring, kind_of
from autoshard.ir.lowered import LoweredSegment
from autoshard.program.program import Program
from autoshard.program.text import axis_names, layout_text, op_text
from autoshard.report.chain import Chain, Chains
from autoshard.report.decided import Decisions
from autoshard.report.lookup import LookupSubject, Place, ProgramIndex, result_of
from autoshard.rules.chains import ALONE, InKernel
from autoshard.simulate.pricing import Pricer

#: decisions of a module that are listed, largest margin first
_MOST_OPS = 6
#: parameters of a module that are listed
_MOST_PARAMETERS = 12


@dataclass(frozen=True)
class Choice:
    """One decision. what: a parameter, or a value and its op. count: how many are decided about together.

    layout: stored and used, for a parameter. rank_bytes: on the fullest rank. seconds: of the op,
    each time it runs. margin: seconds that a step would lose with the alternative, all else decided anew.
    """

    what: str
    op: str
    count: int
    type: str
    layout: str
    rank_bytes: float
    global_bytes: float
    seconds: float
    source: str
    reason: str
    alternative: str
    margin: float


@dataclass(frozen=True)
class CollectiveRow:
    """A collective. value: its result. payload: bytes that a rank sends each time. calls: of a step of one
    microbatch. for_op: who uses it first."""

    value: str
    kind: str
    axis: str
    before: str
    after: str
    seconds: float
    payload: float
    calls: int
    source: str
    for_op: str


@dataclass(frozen=True)
class Explanation:
    """What was asked about, what was decided, and why.

    equivalent: modules of repeated layers with the same decisions. result: the value whose chains are told.
    compute, comm: seconds of a microbatch in a module, forward and backward, in all equivalent layers.
    fused: ops of the kernel that makes the result, where Inductor compiles the program; what passes between
    them is neither written nor read.
    """

    kind: str
    name: str
    equivalent: tuple[str, ...]
    source: str
    parameters: tuple[Choice, ...]
    more_parameters: int
    result: Choice | None
    chains: tuple[Chain, ...]
    ops: tuple[Choice, ...]
    collectives: tuple[CollectiveRow, ...]
    compute: float = 0.0
    comm: float = 0.0
    fused: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        document: dict[str, Any] = msgspec.to_builtins(asdict(self))
        return document


def explain_name(program: Program, cluster: Cluster, name: str) -> Explanation:
    """The explanation of what a name means; UsageError if it means nothing, or several things."""
    return _Explainer(program, cluster).of(name)


class _Explainer:
    def __init__(self, program: Program, cluster: Cluster) -> None:
        self.program, self.lowered = program, program.lowered
        self.decisions, self.index = Decisions.of(program), ProgramIndex(program)
        self.chains = Chains(self.decisions, self.index)
        self.prices = Pricer(program, cluster)
        self.names = axis_names(program.mesh)  # which emitting may have taken apart by level

    def of(self, name: str) -> Explanation:
        subject = self.index.find(name)
        if subject.port is not None:
            return self._port(subject, subject.port)
        if subject.place is not None:
            return self._value(subject, subject.place)
        return self._module(subject)

    # -- parameters and inputs -------------------------------------------------------------------------

    def _port(self, subject: LookupSubject, port: Port) -> Explanation:
        equivalent = [self.index.name_of(p) for p in self._class_of(port)]
        uses = list(self._uses(port))
        first = next((place for place, node in uses if not is_collective(node)), None)
        source = self._source(first) if first is not None else ""
        place = Place(None, port.name)
        return Explanation(
            subject.kind,
            subject.name,
            tuple(equivalent),
            source,
            (self._choice_of_port(port),),
            0,
            None,
            self.chains.of(place) if subject.kind == "input" else (),
            tuple(self._choice(p, n) for p, n in uses if not is_collective(n))[:_MOST_OPS],
            tuple(self._moves_of(port, uses)),
        )

    def _class_of(self, port: Port) -> Sequence[Port]:
        return self.decisions.classes.get(self.program.classes.get(port.name, ""), (port,))

    def _uses(self, port: Port) -> Iterator[tuple[Place, Node]]:
        """Ops that read a parameter, or copies of it that collectives make; each segment once."""
        values = {port.name}
        seen: set[str] = set()
        for number, item in enumerate(self.lowered.main):
            if isinstance(item, Node):
                if result_of(item) and values & set(refs_of(item)):
                    yield Place(None, result_of(item)), item
                    if is_collective(item):
                        values |= _moved(item, values)
                continue
            if item.segment in seen or not values & set(item.args):
                continue
            seen.add(item.segment)
            graph = self.lowered.segments[item.segment].graph
            inside = {n for (n, _), arg in zip(graph.inputs, item.args, strict=True) if arg in values}
            for node in graph.nodes:
                if result_of(node) and inside & set(refs_of(node)):
                    yield Place(number, result_of(node)), node
                    if is_collective(node):
                        inside |= _moved(node, inside)
            values |= {o for o, i in zip(item.outs, graph.outputs, strict=True) if i in inside}

    def _moves_of(self, port: Port, uses: Sequence[tuple[Place, Node]]) -> Iterator[CollectiveRow]:
        """Collectives of a parameter and of its gradient."""
        yield from (self._move(p, n) for p, n in uses if is_message(n))
        grad = next(
            (r for r in self.program.signature.results if r.kind == "grad" and r.target == port.target), None
        )
        current = None if grad is None else Place(None, grad.value)
        while current is not None:
            producer = self.chains.maker(current)
            if producer is None or not is_collective(producer.node):
                return
            place = Place(producer.call, result_of(producer.node))
            if is_message(producer.node):
                yield self._move(place, producer.node)
            ins = list(refs_of(producer.node))
            at = producer.node.outs.index(self.chains.defining_place(current).value)
            current = Place(producer.call, ins[at] if len(ins) == len(producer.node.outs) else ins[0])

    # -- values and modules ----------------------------------------------------------------------------

    def _value(self, subject: LookupSubject, place: Place) -> Explanation:
        place = self.chains.defining_place(place)
        producer = self.chains.maker(place)
        assert producer is not None
        # under the name that it has in the plan, which can be pinned
        op = (
            self.decisions.op_of(self._call(place).segment, producer.node.name)
            if place.call is not None
            else None
        )
        layers = self.index.same_layers(place)
        uses = self._users(place)
        return Explanation(
            subject.kind,
            subject.name if op is None else f"{op.segment}/{place.value}",
            layers,
            self._source(place),
            (),
            0,
            self._choice(place, producer.node),
            self.chains.of(place),
            tuple(self._choice(p, n) for p, n in uses if not is_collective(n))[:_MOST_OPS],
            tuple(self._move(p, n) for p, n in uses if is_message(n)),
            fused=self._fused(place),
        )

    def _module(self, subject: LookupSubject) -> Explanation:
        places = self.index.modules[subject.name]
        nodes = [(place, self._node(place)) for place in places]
        result = self._result(subject.name, nodes)
        inside = f"{subject.name}."
        ports = [
            p for n, p in self.index.ports.items() if n.startswith(inside) and p.kind in ("param", "buffer")
        ]
        ports.sort(key=lambda p: -p.type.nbytes)
        layers = self.index.same_layers(result)
        label = next((x for x in layers if subject.name == x or subject.name.startswith(f"{x}.")), "")
        equivalent = tuple(x + subject.name[len(label) :] for x in layers) if label else (subject.name,)
        ranked = sorted(
            (self._choice(p, n) for p, n in nodes if not is_collective(n)), key=lambda c: -c.margin
        )
        compute, comm = self._spent(subject.name)
        return Explanation(
            subject.kind,
            subject.name,
            equivalent,
            self._source(result),
            tuple(map(self._choice_of_port, ports[:_MOST_PARAMETERS])),
            max(0, len(ports) - _MOST_PARAMETERS),
            self._choice(result, self._node(result)),
            self.chains.of(result),
            tuple(ranked[:_MOST_OPS]),
            tuple(self._moves_inside(subject.name)),
            compute,
            comm,
            self._fused(result),
        )

    def _result(self, module: str, nodes: Sequence[tuple[Place, Node]]) -> Place:
        """The last value of a module that something outside it uses, before any collective."""
        last = nodes[-1][0]
        for place, node in nodes:
            if is_collective(node):
                continue
            users = list(self._users(place))
            outside = [p for p, _ in users if not self._within(p, module)]
            if outside or not users:
                last = place
        return last

    def _within(self, place: Place, module: str) -> bool:
        producer = self.chains.maker(place)
        assert producer is not None
        return f"{self.chains.note(producer)[0]}.".startswith(f"{module}.")

    def _inside(self, module: str) -> Iterator[tuple[Place, Node, LoweredSegment]]:
        """Nodes of a module and of those alike, forward and backward, each segment once."""
        path = self.decisions.starred(module)
        seen: set[str] = set()
        for number, item in enumerate(self.lowered.main):
            if not isinstance(item, Call) or item.segment in seen:
                continue
            seen.add(item.segment)
            segment = self.lowered.segments[item.segment]
            for node, note in zip(segment.graph.nodes, self.program.notes[item.segment], strict=True):
                inside = f"{self.decisions.starred(note.fqn)}.".startswith(f"{path}.")
                if inside and result_of(node):
                    yield Place(number, result_of(node)), node, segment

    def _spent(self, module: str) -> tuple[float, float]:
        """Seconds (computing, communication) of a microbatch in a module and those alike."""
        compute = comm = 0.0
        for place, node, segment in self._inside(module):
            cost = self.prices.node(node, segment.placed(), self._kernel(place, node))
            calls = self._calls(place)
            compute, comm = compute + calls * cost.compute, comm + calls * cost.comm
        return compute, comm

    def _moves_inside(self, module: str) -> Iterator[CollectiveRow]:
        for place, node, _ in self._inside(module):
            if is_message(node):
                yield self._move(place, node)

    # -- pieces ----------------------------------------------------------------------------------------

    def _node(self, place: Place) -> Node:
        producer = self.chains.maker(place)
        assert producer is not None
        return producer.node

    def _users(self, place: Place) -> list[tuple[Place, Node]]:
        if place.call is None:
            nodes: Iterable[Node] = (i for i in self.lowered.main if isinstance(i, Node))
        else:
            nodes = self.lowered.segments[self._call(place).segment].graph.nodes
        users = [(Place(place.call, result_of(n)), n) for n in nodes if place.value in refs_of(n)]
        return [(p, n) for p, n in users if p.value]

    def _call(self, place: Place) -> Call:
        assert place.call is not None
        call = self.lowered.main[place.call]
        assert isinstance(call, Call)
        return call

    def _kernel(self, place: Place, node: Node) -> InKernel:
        """The fused kernel that an op is a part of."""
        return ALONE if place.call is None else self.prices.kernel(self._call(place).segment, node)

    def _fused(self, place: Place) -> tuple[str, ...]:
        """Ops of the fused kernel that makes a value."""
        if place.call is None or not self.prices.ops.behaviour.fused:
            return ()
        name = self._call(place).segment
        return self.prices.fusions[name].beside(self.lowered.segments[name].graph.nodes, place.value)

    def _calls(self, place: Place) -> int:
        """How often a microbatch runs what makes a value."""
        if place.call is None:
            return 1
        segment = self._call(place).segment
        return sum(isinstance(i, Call) and i.segment == segment for i in self.lowered.main)

    def _source(self, place: Place) -> str:
        producer = self.chains.maker(place)
        return "" if producer is None else self.chains.note(producer)[1]

    def _choice_of_port(self, port: Port) -> Choice:
        why, value = self.decisions.why_of_port(port), self.lowered.values[port.name]
        return Choice(
            self.index.name_of(port),
            "",
            len(self._class_of(port)),
            str(port.type),
            self.decisions.strategy_of_port(port),
            self.prices.bytes_of(value.type, value.layout),
            float(port.type.nbytes),
            0.0,
            "",
            why.reason,
            why.alternative,
            why.margin,
        )

    def _choice(self, place: Place, node: Node) -> Choice:
        """The decision about the op that makes a value."""
        producer = self.chains.maker(place)
        assert producer is not None
        _, source, why = self.chains.note(producer)
        values = self.lowered.values if producer.segment is None else producer.segment.placed()
        type_ = next((t for t in node.types if t is not None), None)
        if is_ring(node) and place.value in node.outs:
            type_ = node.types[node.outs.index(place.value)]
        layout = self.chains.layout(place)
        return Choice(
            place.value,
            op_text(node.op),
            self._calls(place),
            str(type_ or ""),
            layout_text(layout, self.names),
            0.0 if type_ is None else self.prices.bytes_of(type_, layout),
            0.0 if type_ is None else float(type_.nbytes),
            self.prices.node(node, values, self._kernel(place, node)).seconds,
            source,
            why.reason,
            why.alternative,
            why.margin,
        )

    def _move(self, place: Place, node: Node) -> CollectiveRow:
        producer = self.chains.maker(place)
        assert producer is not None
        values = self.lowered.values if producer.segment is None else producer.segment.placed()
        cost = self.prices.node(node, values)
        before = self.chains.layout(Place(place.call, next(refs_of(node))))
        module, source, _ = self.chains.note(producer)
        user = next((f"{op_text(n.op)} {n.name}" for p, n in self._users(place) if not is_collective(n)), "")
        many = f" and {len(node.outs) - 1} more" if len(node.outs) > 1 else ""
        return CollectiveRow(
            place.value + many,
            kind_of(node),
            "+".join(axes_of(node)),
            layout_text(before, self.names),
            layout_text(self.chains.layout(place), self.names),
            cost.seconds,
            cost.wire,
            self._calls(place),
            source or module,
            user,
        )


def _moved(node: Node, values: set[str]) -> set[str]:
    """Of the results of a collective, those that are copies of some values."""
    ins = list(refs_of(node))
    if is_ring(node):  # but for what is gathered, its results are products
        return {node.outs[0]} if node.op == ALL_GATHER_MM.op and ins[0] in values else set()
    if len(ins) != len(node.outs):
        return set(node.outs)
    return {out for out, ref in zip(node.outs, ins, strict=True) if ref in values}
