"""Why a value lies as it does on one mesh axis: from value to value, back to where that was decided."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from autoshard.cluster.mesh import Mesh
from autoshard.ir import Call, Node, refs_of
from autoshard.ir.collectives import (
    ALL_GATHER_MM,
    MM_REDUCE_SCATTER,
    axes_of,
    is_collective,
    is_ring,
    transfer_of,
)
from autoshard.ir.lowered import LoweredSegment
from autoshard.ir.placement import Layout, Partial, Placement, R
from autoshard.program.text import op_text
from autoshard.report.decided import Decisions
from autoshard.report.lookup import Place, ProgramIndex
from autoshard.search.plan.plan import Why


@dataclass(frozen=True)
class Link:
    """One value on the way. how: the op that makes it. source: the user's line. times: of further layers
    through which the way goes alike."""

    value: str
    how: str
    placement: str
    module: str
    source: str
    times: int = 0


@dataclass(frozen=True)
class Chain:
    """From a value back to the origin of its placement on an axis.

    end: why it begins there. why: the decision at that point, if the search took one.
    """

    axis: str
    placement: str
    links: tuple[Link, ...]
    end: str
    why: Why


@dataclass(frozen=True)
class _Made:
    """Who makes a value: a node of a segment (call: which one) or of main."""

    node: Node
    call: int | None
    segment: LoweredSegment | None


class Chains:
    """Walks through a program against the direction in which values flow."""

    def __init__(self, decisions: Decisions, index: ProgramIndex) -> None:
        self.decisions, self.index = decisions, index
        self.program, self.lowered = decisions.program, decisions.program.lowered
        self.mesh = Mesh.parse(self.program.mesh)

    def of(self, place: Place) -> tuple[Chain, ...]:
        """One chain per mesh axis."""
        return tuple(self._chain(place, axis) for axis in range(len(self.mesh.names)))

    def _chain(self, place: Place, axis: int) -> Chain:
        links: list[Link] = []
        seen: set[tuple[str, str]] = set()
        skipped = gap = 0
        current: Place | None = place
        end, why = "", Why("")
        while current is not None:
            producer = self.maker(current)
            layout = self.layout(current)
            if isinstance(producer, _Made):
                key = (self._segment_name(producer.call), current.value)
                # between layers that are passed over, so are the collectives that main has there
                if key in seen or (skipped and producer.call is None):
                    gap = gap or len(links)
                    skipped += 1
                else:
                    seen.add(key)
                    links.append(self._link(producer, current, layout[axis]))
                current, end, why = self._before(producer, current.value, layout, axis)
            else:
                port = self.index.ports_by_value[current.value]
                name = self.index.name_of(port)
                links.append(Link(name, port.kind, str(layout[axis]), "", ""))
                end, why = self._port_end(current.value, axis)
                current = None
        if skipped:
            links.insert(gap, Link("...", "same path through earlier layers", "", "", "", skipped))
        return Chain(self.mesh.names[axis], str(self.layout(place)[axis]), tuple(links), end, why)

    # -- one step --------------------------------------------------------------------------------------

    def maker(self, place: Place) -> _Made | None:
        """Who makes a value; None for an input or a parameter of the program."""
        if place.call is None:
            producer = self.index.makers.get(place.value)
            if producer is None:
                return None
            item = self.lowered.main[producer[0]]
            if isinstance(item, Node):
                return _Made(item, None, None)
            inner = self.lowered.segments[item.segment].graph.outputs[producer[1]]
            return self.maker(Place(producer[0], inner))
        call = self.lowered.main[place.call]
        assert isinstance(call, Call)
        segment = self.lowered.segments[call.segment]
        node = self._nodes[call.segment].get(place.value)
        if node is not None:
            return _Made(node, place.call, segment)
        return self.maker(Place(None, self._outer(call, segment, place.value)))

    def defining_place(self, place: Place) -> Place:
        """The same value where it is computed: inside the call that makes it."""
        while True:
            if place.call is None:
                producer = self.index.makers.get(place.value)
                item = None if producer is None else self.lowered.main[producer[0]]
                if producer is None or not isinstance(item, Call):
                    return place
                place = Place(producer[0], self.lowered.segments[item.segment].graph.outputs[producer[1]])
                continue
            call = self.lowered.main[place.call]
            assert isinstance(call, Call)
            if place.value in self._nodes[call.segment]:
                return place
            place = Place(None, self._outer(call, self.lowered.segments[call.segment], place.value))

    @cached_property
    def _nodes(self) -> Mapping[str, Mapping[str, Node]]:
        return {
            name: {out: node for node in segment.graph.nodes for out in node.outs}
            for name, segment in self.lowered.segments.items()
        }

    @cached_property
    def _numbers(self) -> Mapping[str, Mapping[str, int]]:
        return {
            name: {out: k for k, node in enumerate(segment.graph.nodes) for out in node.outs}
            for name, segment in self.lowered.segments.items()
        }

    def _outer(self, call: Call, segment: LoweredSegment, value: str) -> str:
        """The main value that a segment's input is given by a call."""
        inputs = [n for n, _ in segment.graph.inputs]
        return call.args[inputs.index(value)]

    def layout(self, place: Place) -> Layout:
        """Of a value, over the axes of the mesh of one stage."""
        if place.call is None:
            return self.lowered.values[place.value].layout
        call = self.lowered.main[place.call]
        assert isinstance(call, Call)
        return self.lowered.segments[call.segment].layouts[place.value]

    def note(self, producer: _Made) -> tuple[str, str, Why]:
        """(module, the user's line, the reason) of a node."""
        if producer.call is None:
            return producer.node.origin.fqn, producer.node.origin.source, Why("")
        call = self.lowered.main[producer.call]
        assert isinstance(call, Call)
        note = self.program.notes[call.segment][self._numbers[call.segment][producer.node.name]]
        why = self.decisions.why_of_op(call.segment, producer.node.name, note.why)
        return self.index.relabelled(note.fqn, call.label), note.source, why

    def _segment_name(self, call: int | None) -> str:
        item = None if call is None else self.lowered.main[call]
        return item.segment if isinstance(item, Call) else ""

    def _link(self, producer: _Made, place: Place, placement: Placement) -> Link:
        module, source, _ = self.note(producer)
        return Link(place.value, op_text(producer.node.op), str(placement), module, source)

    def _begins(self, producer: _Made, value: str, begin: str) -> tuple[None, str, Why]:
        """`_before` of what a message brings, and for whom."""
        user = self._required_by(producer, value)
        as_required = f", as {user[0]} requires" if user else ""
        return None, begin + as_required, user[1] if user else self.note(producer)[2]

    def _before(
        self, producer: _Made, value: str, layout: Layout, axis: int
    ) -> tuple[Place | None, str, Why]:
        """(the value that a placement comes from, why it begins here if there is none, the decision)."""
        name = self.mesh.names[axis]
        ins = [Place(producer.call, ref) for ref in refs_of(producer.node)]
        why = self.note(producer)[2]
        if producer.node.op == MM_REDUCE_SCATTER.op and axes_of(producer.node) == (name,):
            begin = f"{op_text(producer.node.op)} reduces it over {name} and leaves a shard on every rank"
            return self._begins(producer, value, begin)
        if _moves(producer.node, value) and ins:
            # of several values in one message, each result is that of the input in its place
            moved = ins[producer.node.outs.index(value)] if len(ins) == len(producer.node.outs) else ins[0]
            before = self.layout(moved)[axis]
            if before == layout[axis]:
                return self.defining_place(moved), "", Why("")
            begin = f"{op_text(producer.node.op)} reshards it from {before} to {layout[axis]} on {name}"
            return self._begins(producer, value, begin)
        sharded = [p for p in ins if self.layout(p)[axis] != R]
        placement = layout[axis]
        if placement == R:
            gathered = self._unsplit(ins, axis)
            if gathered is not None:
                return gathered, "", Why("")
            text = "its op computes the full result on every rank" if sharded else "no input is sharded"
            return None, f"{text}{' of' if sharded else ' over'} {name}", why
        if not sharded:
            return None, f"each rank of {name} computes its own shard", why
        if isinstance(placement, Partial) and all(self.layout(p)[axis] != placement for p in sharded):
            return None, f"each rank of {name} reduces over its shard of a dim", why
        return self.defining_place(self._likeliest(sharded, layout, axis)), "", Why("")

    def _unsplit(self, ins: Sequence[Place], axis: int) -> Place | None:
        """Of whole inputs, the one that a collective made whole, if any did directly."""
        for place in ins:
            producer = self.maker(place)
            if producer is not None and _moves(producer.node, place.value) and self._moves(producer, axis):
                return self.defining_place(place)
        return None

    def _moves(self, producer: _Made, axis: int) -> bool:
        return str(self.mesh.names[axis]) in [str(a) for a in producer.node.args[1:2]]

    def _likeliest(self, split: Sequence[Place], layout: Layout, axis: int) -> Place:
        """The input to follow: one that lies as the result does, made by an op rather than stored."""
        candidates = [p for p in split if self.layout(p)[axis] == layout[axis]] or list(split)
        computed = [p for p in candidates if self.maker(p) is not None]
        return (computed or candidates)[0]

    def _required_by(self, producer: _Made, value: str) -> tuple[str, Why] | None:
        """The first op that uses what a collective makes, in words, with its reason."""
        user = self._first_user(producer.call, value)
        if user is None:
            return None
        module, source, why = self.note(user)
        location = " ".join(filter(None, (module, f"({source})" if source else "")))
        return f"{op_text(user.node.op)} {user.node.name}{f' in {location}' if location else ''}", why

    def _first_user(self, call: int | None, value: str) -> _Made | None:
        """The first op that reads a value, in its own segment or in one that it is handed to."""
        if call is not None:
            item = self.lowered.main[call]
            assert isinstance(item, Call)
            graph = self.lowered.segments[item.segment].graph
            for node in graph.nodes:
                if value in refs_of(node) and not is_collective(node):
                    return _Made(node, call, self.lowered.segments[item.segment])
            if value not in graph.outputs:
                return None
            value = item.outs[graph.outputs.index(value)]
        for number, item in enumerate(self.lowered.main):
            if isinstance(item, Call) and value in item.args:
                inner = self.lowered.segments[item.segment].graph.inputs[item.args.index(value)][0]
                return self._first_user(number, inner)
        return None

    def _port_end(self, value: str, axis: int) -> tuple[str, Why]:
        """Why an input or a parameter lies on an axis as it does."""
        port = self.index.ports_by_value[value]
        name, why = self.mesh.names[axis], self.decisions.why_of_port(port)
        placement = self.lowered.values[value].layout[axis]
        meaning = self.mesh.axes[axis].meaning
        if port.kind in ("input", "tangent"):
            if placement != R and meaning.splits_batch:
                return f"{name} shards the batch", why
            return f"the input is {'replicated' if placement == R else 'sharded'} over {name}", why
        return f"it is stored {'replicated' if placement == R else 'sharded'} over {name}", why


def _moves(node: Node, value: str) -> bool:
    """Whether a node only changes where a value lies (products that exchange rows do more, and so does a
    ring, but for what it gathers)."""
    if is_ring(node):
        return node.op == ALL_GATHER_MM.op and value == node.outs[0]
    return transfer_of(node) is not None
