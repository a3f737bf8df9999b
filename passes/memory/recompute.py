"""Backward recomputes what the plan does not want kept (Chen et al., "Training Deep Nets with Sublinear
Memory Cost", 2016).

A call of a forward segment that is recomputed no longer hands its activations to backward. A call of a
new segment, the slice of it that makes them, stands right before their first use:

* ``full``: it starts from the inputs of the forward call;
* ``selective``: also from values inside it, such that no matrix product and no attention runs again; of
  all such sets the one of fewest bytes, a minimum cut (`keep_least`). Korthikanti et al., "Reducing
  Activation Recomputation in Large Transformer Models", 2022, choose by op instead.

What is held for other reasons stays: what a call hands to the next one, results of the model, parameters
that the plan keeps gathered. Other parameters are regathered, once for the slice and the backward
call together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autoshard.errors import VerificationError
from autoshard.ir import Call, Graph, Node, Ref, refs_of, substitute
from autoshard.ir.local_bytes import held_bytes
from autoshard.ir.lowered import Instruction, Lowered, LoweredSegment, PlacedValue
from autoshard.ir.min_cut_recompute import keep_least
from autoshard.ir.placement import Layout
from autoshard.passes.segment_parts import fresh, moved_inputs, roots_of, sliced
from autoshard.rules.core import RuleFn
from autoshard.rules.local import MeshShape
from autoshard.search.plan.plan import Recompute

_AGAIN = "again"


def recompute(
    lowered: Lowered, chosen: Mapping[str, Recompute], rules: Mapping[str, RuleFn], mesh: MeshShape
) -> Lowered:
    """The program in which backward computes the first calls of the chosen segments again.

    chosen: forward segment -> what to do. The program must still have the ops that the rules know: this
    comes right after `insert_collectives`. Raises VerificationError if a segment does not exist, belongs to
    the backward half, or has fewer calls.
    """
    _check(lowered, chosen)
    if not any(choice.calls for choice in chosen.values()):
        return lowered
    return _Pass(lowered, chosen, rules, mesh).run()


def _check(lowered: Lowered, chosen: Mapping[str, Recompute]) -> None:
    forward = [i.segment for i in lowered.main if isinstance(i, Call) and not i.backward]
    for name, choice in chosen.items():
        if name not in lowered.segments:
            _refuse(name, f"the program has no such segment, only {', '.join(lowered.segments)}")
        if name not in forward:
            _refuse(name, "it is no segment of the forward half")
        if not 0 <= choice.calls <= forward.count(name):
            _refuse(name, f"it is called {forward.count(name)} times, the plan says {choice.calls}")
        if choice.policy not in ("full", "selective"):
            _refuse(name, f"{choice.policy!r} is neither 'full' nor 'selective'")


def _refuse(name: str, why: str) -> None:
    raise VerificationError(
        f"segment {name!r} cannot be computed again",
        where="the plan's recompute",
        why=why,
        hint="plan again, or name forward segments and at most as many calls as they have",
    )


@dataclass(frozen=True)
class _Slice:
    """What backward recomputes of one forward call; the names are those inside its segment.

    lost: made again. kept: handed over by the forward call, and start of the slice. given: values in the
    slice that main has anyway -> the main value.
    """

    lost: tuple[str, ...]
    kept: frozenset[str]
    given: dict[str, str]


@dataclass(frozen=True)
class _Ends:
    """What decides how a forward call is cut: equal for all layers but those at the ends of the model.

    read: outputs that backward reads. staying: outputs that are held in any case. given: values that main
    has anyway. there: inputs that main still has in backward.
    """

    segment: str
    read: tuple[str, ...]
    staying: frozenset[str]
    given: frozenset[str]
    there: frozenset[str]


@dataclass
class _Again:
    """One call that is recomputed, as it is put together.

    outs: value inside the segment -> the main value that backward has for it. gathers: parameters that the
    slice gathers, (port, layout) -> value inside.
    """

    call: Call
    slice: _Slice
    args: dict[str, str]
    outs: dict[str, str]
    gathers: dict[tuple[str, Layout], str] = field(default_factory=dict)
    before: list[Node] = field(default_factory=list)


@dataclass(frozen=True)
class _Variant:
    """A part of the segment ``base``. again: whether it makes forward's values for backward."""

    base: str
    again: bool
    segment: LoweredSegment


class _Segments:
    """Parts of segments, each made once."""

    def __init__(self, base: Mapping[str, LoweredSegment]) -> None:
        self.base = base
        self.made: dict[str, _Variant] = {}
        self.names: dict[tuple[object, ...], str] = {}

    def part(
        self, name: str, outputs: Sequence[str], given: Sequence[str], suffix: str, *, backward: bool
    ) -> LoweredSegment:
        """The part of a segment that makes ``outputs`` from its inputs and the values given."""
        key = (name, tuple(outputs), tuple(given), suffix)
        if key not in self.names:
            wish, k = f"{name}_{suffix}", 1
            while wish in self.base or wish in self.made:
                k += 1
                wish = f"{name}_{suffix}{k}"
            self.names[key] = wish
            part = sliced(self.base[name], wish, outputs, given, backward=backward)
            self.made[wish] = _Variant(name, suffix == _AGAIN, part)
        return self.made[self.names[key]].segment

    def called(self, main: Iterable[Instruction]) -> tuple[dict[str, LoweredSegment], dict[str, str]]:
        """(the segments that main calls, variant -> its final name).

        A variant that is called in place of all calls of its base takes the name of that.
        """
        names = list(dict.fromkeys(i.segment for i in main if isinstance(i, Call)))
        at = {name: k for k, name in enumerate(self.base)}
        names.sort(key=lambda n: at[self.made[n].base if n in self.made else n])
        final = {n: n for n in names}
        for base in self.base:
            baselines = [n for n in names if n == base or (n in self.made and self._stands_for(n, base))]
            if len(baselines) == 1:
                final[baselines[0]] = base
        result = {n: self.made[n].segment if n in self.made else self.base[n] for n in names}
        return {final[n]: replace(s, graph=replace(s.graph, name=final[n])) for n, s in result.items()}, final

    def _stands_for(self, name: str, base: str) -> bool:
        return self.made[name].base == base and not self.made[name].again


class _Pass:
    def __init__(
        self,
        lowered: Lowered,
        chosen: Mapping[str, Recompute],
        rules: Mapping[str, RuleFn],
        mesh: MeshShape,
    ) -> None:
        self.lowered, self.chosen, self.rules, self.mesh = lowered, chosen, rules, mesh
        self.segments = _Segments(lowered.segments)
        self.values = dict(lowered.values)
        self.taken = set(lowered.values)
        self.makers = {o: i for i in lowered.main for o in i.outs}
        self.read = {a for i in lowered.main if i.backward for a in _arguments(i)}
        self.passed_on = {a for i in lowered.main if not i.backward for a in _arguments(i)}
        self.passed_on.update(lowered.results)
        self.moved = {name: moved_inputs(s.graph) for name, s in lowered.segments.items()}
        self.kinds = {name: self._kinds(s.graph) for name, s in lowered.segments.items() if name in chosen}
        self.starts: dict[_Ends, frozenset[str]] = {}
        self.port_of = self._port_copies()
        # what a forward call hands over gathered is what the plan keeps, whether backward reads it or not
        self.copies = {
            (port, lowered.values[value].layout): value
            for value, port in self.port_of.items()
            if (value in self.read or isinstance(self.makers.get(value), Call))
            and not self._is_backward(value)
        }

    # -- what main has -------------------------------------------------------------------------------

    def _kinds(self, graph: Graph) -> dict[str, str]:
        """Value -> the kind of op that makes it; "" for collectives and ops without a rule."""
        types = graph.types()
        result: dict[str, str] = {}
        for node in graph.nodes:
            rule = self.rules.get(node.op)
            kind = "" if rule is None else rule(node, [types[r] for r in refs_of(node)]).kind
            result.update(dict.fromkeys(node.outs, kind))
        return result

    def _port_copies(self) -> dict[str, str]:
        """Main values that are an input of the program, placed as it is or in another way -> that input."""
        result = {name: name for name in self.values if name not in self.makers}
        for item in self.lowered.main:
            if isinstance(item, Call):
                args = self._args(item)
                for name, out in self._outs(item):
                    source = args.get(self.moved[item.segment].get(name, ""))
                    if source in result:
                        result[out] = result[source]
            elif len(item.outs) == 1 and next(refs_of(item)) in result:
                result[item.name] = result[next(refs_of(item))]
        return result

    def _is_backward(self, value: str) -> bool:
        return value in self.makers and self.makers[value].backward

    def _inputs(self, segment: str) -> list[str]:
        return [n for n, _ in self.lowered.segments[segment].graph.inputs]

    def _args(self, call: Call) -> dict[str, str]:
        """Input of the segment -> the main value given for it."""
        return dict(zip(self._inputs(call.segment), call.args, strict=True))

    def _outs(self, call: Call) -> list[tuple[str, str]]:
        """(value inside the segment, main value) of every output."""
        return list(zip(self.lowered.segments[call.segment].graph.outputs, call.outs, strict=True))

    # -- one forward call ------------------------------------------------------------------------------

    def _slice_of(self, call: Call) -> _Slice:
        """What of a forward call's results backward recomputes, and from what."""
        segment, args = self.lowered.segments[call.segment], self._args(call)
        staying, read = set[str](), list[str]()
        given: dict[str, str] = {}
        for value, out in self._outs(call):
            if out in self.passed_on or out in self.port_of:
                staying.add(value)
                if out in self.read:
                    given[value] = out
            if out in self.read:
                read.append(value)
        for value, source in self.moved[call.segment].items():
            copy = self.copies.get((self.port_of.get(args[source], ""), segment.layouts[value]))
            if copy is not None and value != source:
                given[value] = copy
        there = frozenset(v for v, arg in args.items() if arg in self.port_of or arg in self.read)
        ends = _Ends(call.segment, tuple(read), frozenset(staying), frozenset(given), there)
        if ends not in self.starts:
            self.starts[ends] = self._kept(ends)
        kept = self.starts[ends]
        lost = dict.fromkeys(v for v in read if v not in staying and v not in kept)
        return _Slice(tuple(lost), kept, given)

    def _kept(self, ends: _Ends) -> frozenset[str]:
        """Values inside a forward segment that its calls hand over to start from, beside its inputs."""
        segment, kinds = self.lowered.segments[ends.segment], self.kinds[ends.segment]
        inputs = set(self._inputs(ends.segment))
        views = {name for name, kind in kinds.items() if kind == "view"}
        roots = roots_of(segment.graph, views)
        # storage that is passed on is held for that: a view of it is free
        held = {roots[v] for v in ends.staying} & {roots[v] for v in ends.read}
        kept = held - inputs - ends.given
        if self.chosen[ends.segment].policy == "full":
            return frozenset(kept)
        lost = [v for v in ends.read if v not in ends.staying]
        free = {*ends.there, *ends.given, *kept, *({roots[v] for v in lost} & inputs)}
        nbytes = {
            v: 0 if v in free else held_bytes(type_, segment.layouts[v], self.mesh.sizes)
            for v, type_ in segment.graph.types().items()
        }
        dear = {v for v, kind in kinds.items() if kind == "matmul"} | ends.given | kept
        cut = keep_least(segment.graph, lost, dear, views - ends.given, nbytes)
        return frozenset(kept | (cut - inputs - ends.given))

    def _again(self, call: Call) -> _Again | None:
        """The call of the slice; None if backward reads nothing that it would make."""
        result = self._slice_of(call)
        if not result.lost:
            return None
        outs = dict(self._outs(call))
        args = self._args(call) | result.given
        for value in sorted(result.kept):
            args[value] = outs[value] if value in outs else self._new_value(call.segment, value)
        repeated = _Again(call, result, args, {})
        segment = self.lowered.segments[call.segment]
        part = sliced(segment, call.segment, result.lost, self._given(repeated), backward=True)
        for name, _ in part.graph.inputs:
            repeated.args[name] = self._in_backward(repeated.args[name], repeated.before)
        repeated.outs = {v: self._new_value(call.segment, v, outs[v]) for v in result.lost}
        for value, source in moved_inputs(part.graph).items():
            port = self.port_of.get(repeated.args[source])
            if port is not None and value != source:
                repeated.gathers[port, part.layouts[value]] = value
        return repeated

    def _part(self, again: _Again) -> LoweredSegment:
        """The slice with all that is asked of it so far."""
        result = again.slice
        outputs = (*result.lost, *(v for v in again.outs if v not in result.lost))
        return self.segments.part(again.call.segment, outputs, self._given(again), _AGAIN, backward=True)

    def _given(self, again: _Again) -> list[str]:
        return sorted({*again.slice.kept, *again.slice.given})

    def _new_value(self, segment: str, inner: str, base: str | None = None) -> str:
        """A fresh main value for a value inside a segment."""
        held = self.lowered.segments[segment]
        name = fresh(base or inner, self.taken)
        self.values[name] = PlacedValue(held.graph.types()[inner], held.layouts[inner])
        return name

    def _in_backward(self, value: str, before: list[Node]) -> str:
        """The value itself, or for a parameter gathered in main that no one keeps: regathered."""
        maker = self.makers.get(value)
        if value in self.read or value not in self.port_of or not isinstance(maker, Node):
            return value
        source = self._in_backward(next(refs_of(maker)), before)
        out = fresh(value, self.taken)
        self.values[out] = self.values[value]
        before.append(replace(substitute(maker, lambda _: Ref(source)), outs=(out,), backward=True))
        return out

    # -- main ------------------------------------------------------------------------------------------

    def run(self) -> Lowered:
        agains = self._chosen_calls()
        renamed = {
            out: repeated.outs[inner]
            for repeated in agains
            for inner, out in self._outs(repeated.call)
            if inner in repeated.outs
        }
        maker = {out: k for k, repeated in enumerate(agains) for out in repeated.outs.values()}
        backward = [_with_names(i, renamed) for i in self.lowered.main if i.backward]
        feeding = [dict.fromkeys(maker[a] for a in _arguments(i) if a in maker) for i in backward]
        # which gathers slices share with backward calls is settled before any slice is cut
        backward = [
            self._with_gathers(item, [agains[k] for k in numbers])
            for item, numbers in zip(backward, feeding, strict=True)
        ]
        tail: list[Instruction] = []
        done: set[int] = set()
        for item, numbers in zip(backward, feeding, strict=True):
            for k in numbers:
                if k not in done:
                    tail += [*agains[k].before, self._again_call(agains[k])]
            done.update(numbers)
            tail.append(item)
        used = {a for i in tail for a in _arguments(i)} | self.passed_on
        of_call = {repeated.call.outs: repeated for repeated in agains}
        head = [
            self._lean(of_call[i.outs], used) if isinstance(i, Call) and i.outs in of_call else i
            for i in self.lowered.main
            if not i.backward
        ]
        return self._finished((*head, *tail))

    def _chosen_calls(self) -> list[_Again]:
        left = {name: choice.calls for name, choice in self.chosen.items()}
        result: list[_Again] = []
        for item in self.lowered.main:
            if isinstance(item, Call) and not item.backward and left.get(item.segment, 0) > 0:
                left[item.segment] -= 1
                repeated = self._again(item)
                if repeated is not None:
                    result.append(repeated)
        return result

    def _with_gathers(self, item: Instruction, sources: Sequence[_Again]) -> Instruction:
        """A backward call that takes parameters as the slices before it gathered them."""
        if not isinstance(item, Call) or not sources:
            return item
        segment = self.lowered.segments[item.segment]
        args = self._args(item)
        for value, source in self.moved[item.segment].items():
            port = self.port_of.get(args[source])
            if port is None or value == source:
                continue
            key = (port, segment.layouts[value])
            repeated = next((a for a in sources if key in a.gathers), None)
            if repeated is not None:
                inner = repeated.gathers[key]
                if inner not in repeated.outs:
                    repeated.outs[inner] = self._new_value(repeated.call.segment, inner, port)
                args[value] = repeated.outs[inner]
        given = sorted(v for v in args if v not in self._inputs(item.segment))
        if not given:
            return item
        part = self.segments.part(item.segment, segment.graph.outputs, given, "given", backward=True)
        return replace(item, segment=part.graph.name, args=tuple(args[name] for name, _ in part.graph.inputs))

    def _again_call(self, again: _Again) -> Call:
        part = self._part(again)
        return Call(
            part.graph.name,
            tuple(again.args[name] for name, _ in part.graph.inputs),
            tuple(again.outs[name] for name in part.graph.outputs),
            again.call.label,
            True,
            again.call.site,
        )

    def _lean(self, again: _Again, used: set[str]) -> Call:
        """The forward call, which hands over only what is used, and what its slice starts from."""
        call = again.call
        outs = [(inner, out) for inner, out in self._outs(call) if out in used]
        new = {out for _, out in outs}
        starts = [(v, again.args[v]) for v in sorted(again.slice.kept)]
        outs += [(v, out) for v, out in starts if out in used and out not in new]
        part = self.segments.part(call.segment, [v for v, _ in outs], (), "lean", backward=False)
        args = self._args(call)
        return replace(
            call,
            segment=part.graph.name,
            args=tuple(args[name] for name, _ in part.graph.inputs),
            outs=tuple(out for _, out in outs),
        )

    def _finished(self, main: tuple[Instruction, ...]) -> Lowered:
        """Only segments that are called and values that are made."""
        segments, final = self.segments.called(main)
        items = tuple(replace(i, segment=final[i.segment]) if isinstance(i, Call) else i for i in main)
        ports = [name for name in self.lowered.values if name not in self.makers]
        names = [*ports, *(o for i in items for o in i.outs)]
        return Lowered(segments, items, {n: self.values[n] for n in names}, self.lowered.results)


def _arguments(item: Instruction) -> tuple[str, ...]:
    return item.args if isinstance(item, Call) else tuple(refs_of(item))


def _with_names(item: Instruction, renamed: Mapping[str, str]) -> Instruction:
    if isinstance(item, Call):
        return replace(item, args=tuple(renamed.get(a, a) for a in item.args))
    return substitute(item, lambda name: Ref(renamed.get(name, name)))
