"""Masks that a few numbers describe are arguments of the attention, and no tensors of queries by keys.

A mask that is an *and* of comparisons of positions (causal, with a window or without) and of one that hides
keys alone (padding) becomes ``causal``, ``window`` and a mask [.., 1, t] of keys (`ops.attention`). Layers
that take turns with several masks become segments of their own, as their attention differs then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch

from autoshard.ir import Arg, Folded, Graph, Node, Ref, TensorType, refs_of
from autoshard.passes.segment_parts import fresh, without_dead
from autoshard.passes.simplify.causal_masks import BOTH, MOST, NUMBERS, evaluated

ATTENTION = {"autoshard.sdpa.default": 3, "autoshard.sdpa_backward.default": 6}
_SAME = ("aten.expand.default", "aten.alias.default", "aten.clone.default", "aten.detach.default")
_VIEWS = ("aten.unsqueeze.default", "aten.view.default", "aten.reshape.default")
#: comparison -> (key minus query at least, at most) where keys come first, for equal numbers of both
_COMPARED = {
    "aten.le.Tensor": (None, 0),
    "aten.lt.Tensor": (None, -1),
    "aten.ge.Tensor": (0, None),
    "aten.gt.Tensor": (1, None),
}
#: (number of a call, -1 for what the model is given; value of its segment, or of main)
_Place: TypeAlias = tuple[int, str]


@dataclass(frozen=True)
class _Band:
    """Which keys a query attends to. lower, upper: of the position of the key minus that of the query, None:
    any. keys: where masks of keys alone are made."""

    lower: int | None = None
    upper: int | None = None
    keys: frozenset[_Place] = frozenset()

    def __and__(self, other: _Band) -> _Band:
        lower = [n for n in (self.lower, other.lower) if n is not None]
        upper = [n for n in (self.upper, other.upper) if n is not None]
        return _Band(max(lower, default=None), min(upper, default=None), self.keys | other.keys)


@dataclass(frozen=True)
class _Attended:
    """What the attention is told instead of its mask. window: 0 for none. keys: where the mask of keys is
    made, None without one."""

    window: int
    keys: _Place | None


def band_masks(folded: Folded) -> Folded:
    """The model whose attention is told which keys it attends to where that can be said."""
    masks = _Masks(folded)
    wanted = [masks.attended(number) for number in range(len(folded.calls))]
    for segment in folded.segments:
        # an attention that one call knows nothing of keeps its mask in all of them
        own = [w for w, call in zip(wanted, folded.calls, strict=True) if call.segment == segment]
        known = set.intersection(*({*w} for w in own)) if own else set()
        for each in own:
            for name in [n for n in each if n not in known]:
                del each[name]
    return _Writer(folded, masks, wanted).run() if any(wanted) else folded


class _Masks:
    """What is known of the masks of a model."""

    def __init__(self, folded: Folded) -> None:
        self.folded = folded
        self.makers = {s: {o: n for n in g.nodes for o in n.outs} for s, g in folded.segments.items()}
        self.types = {s: g.types() for s, g in folded.segments.items()}
        self.ports = {p.name: p.type for p in folded.joint.ports}
        self.made = {o: (k, c.segment, p) for k, c in enumerate(folded.calls) for p, o in enumerate(c.outs)}
        self.given = {s: {n: k for k, (n, _) in enumerate(g.inputs)} for s, g in folded.segments.items()}
        self.counts = folded.counts()
        self._known: dict[_Place, _Band | None] = {}

    def attended(self, number: int) -> dict[str, _Attended]:
        """Attention (the name of its node) of a call -> what may take the place of its mask."""
        graph = self.folded.segments[self.folded.calls[number].segment]
        found = {}
        for node in graph.nodes:
            place = ATTENTION.get(node.op)
            mask = None if place is None else node.args[place]
            if place is not None and isinstance(mask, Ref) and not node.args[place + 1]:
                how = self._told(number, mask.name)
                if how is not None:
                    found[node.name] = how
        return found

    def _told(self, number: int, mask: str) -> _Attended | None:
        place = self._place(number, mask)
        shape, band = self.type_of(place).shape, self.band(place)
        if band is None or band.upper != 0 or len(band.keys) > 1 or shape[-1] != shape[-2]:
            return None
        window = shape[-1] if band.lower is None else 1 - band.lower
        keys = next(iter(band.keys), None)
        if window < 1 or (keys is not None and not self._handed(number, keys, shape[-1])):
            return None
        return _Attended(window if window < shape[-1] else 0, keys)

    def _handed(self, number: int, keys: _Place, length: int) -> bool:
        """Whether attention can be given a mask of keys."""
        shape = self.type_of(keys).shape
        at = keys[0]
        alone = at in (-1, number) or self.counts[self.folded.calls[at].segment] == 1
        return alone and len(shape) in (2, 4) and shape[-1] == length

    def _place(self, number: int, value: str) -> _Place:
        """Where a value of a call is made."""
        while True:
            call = self.folded.calls[number]
            position = self.given[call.segment].get(value)
            if position is None:
                return number, value
            main = call.args[position]
            if main not in self.made:
                return -1, main
            number, segment, place = self.made[main]
            value = self.folded.segments[segment].outputs[place]

    def type_of(self, place: _Place) -> TensorType:
        number, value = place
        return self.ports[value] if number < 0 else self.types[self.folded.calls[number].segment][value]

    def _node(self, place: _Place) -> Node | None:
        number, value = place
        return None if number < 0 else self.makers[self.folded.calls[number].segment][value]

    def _uses(self, place: _Place, node: Node) -> list[_Place]:
        return [self._place(place[0], ref) for ref in refs_of(node)]

    def band(self, place: _Place) -> _Band | None:
        """Which keys a mask lets queries attend to; None if that is not known."""
        if place not in self._known:
            self._known[place] = self._find(place)
        return self._known[place]

    def _find(self, place: _Place) -> _Band | None:
        type_, node = self.type_of(place), self._node(place)
        if type_.dtype != "bool":
            return None
        if node is not None and node.op == "aten.full.default" and node.args[1] in (True, 1):
            return _Band()
        if len(type_.shape) > 1 and type_.shape[-2] == 1:
            return _Band(keys=frozenset((place,)))
        if node is None:
            return None
        uses = self._uses(place, node)
        if node.op in BOTH and len(uses) == 2:
            first, second = self.band(uses[0]), self.band(uses[1])
            return None if first is None or second is None else first & second
        if node.op in _SAME or node.op in _VIEWS:
            band, source = self.band(uses[0]), self.type_of(uses[0]).shape
            # keys alone may be repeated for every query; views may exchange leading dims, which keys have
            repeated = node.op in _SAME and len(source) > 1 and source[-2:] == (1, type_.shape[-1])
            same = source[-2:] == type_.shape[-2:] and (node.op in _SAME or not (band and band.keys))
            return band if repeated or same else None
        if node.op in _COMPARED and len(uses) == 2:
            return self._compared(node.op, uses, type_.shape)
        return None

    def _compared(self, op: str, uses: Sequence[_Place], shape: Sequence[int]) -> _Band | None:
        """A comparison of the positions of keys [.., 1, t] with those of queries [.., s, 1]."""
        lower, upper = _COMPARED[op]
        first, second = (self._offset(u, shape) for u in uses)
        if first is None or second is None or first[1] == second[1]:
            return None
        # keys + a <= queries + b: their difference is b - a at most; queries may be the first of them
        apart = second[0] - first[0]
        if first[1] == "queries":
            apart, (lower, upper) = -apart, (upper, lower)
            lower, upper = (None if n is None else -n for n in (lower, upper))
        return _Band(None if lower is None else lower + apart, None if upper is None else upper + apart)

    def _offset(self, place: _Place, shape: Sequence[int]) -> tuple[int, str] | None:
        """(the number of the first position, whose they are) of positions that follow each other."""
        own = self.type_of(place).shape
        sides: dict[tuple[int, ...], str] = {(1, shape[-1]): "keys", (shape[-2], 1): "queries"}
        side = sides.get(tuple(own[-2:]))
        if side is None or shape[-1] == 1 or max(own[-2:]) != self.type_of(place).numel:
            return None
        numbers = self._numbers(place)
        if numbers is None or numbers.dtype.is_floating_point:
            return None
        flat = numbers.reshape(-1)
        first = int(flat[0])
        return (first, side) if torch.equal(flat, torch.arange(first, first + len(flat))) else None

    def _numbers(self, place: _Place) -> torch.Tensor | None:
        """A value that depends on no input; None if it does, or is not that simple."""
        node = self._node(place)
        if node is None or node.op not in NUMBERS or self.type_of(place).numel > MOST:
            return None
        given = [self._numbers(use) for use in self._uses(place, node)]
        known = [n for n in given if n is not None]
        return evaluated(node, iter(known)) if len(known) == len(given) else None


class _Writer:
    """Writes the model down. wanted: per call, see `_Masks.attended`."""

    def __init__(self, folded: Folded, masks: _Masks, wanted: Sequence[Mapping[str, _Attended]]) -> None:
        self.folded, self.masks, self.wanted = folded, masks, wanted
        self.segments = dict(folded.segments)
        self.calls = list(folded.calls)
        self.taken = (
            {v for types in masks.types.values() for v in types} | masks.ports.keys() | masks.made.keys()
        )
        self.handed: dict[_Place, str] = {}

    def run(self) -> Folded:
        kinds: dict[tuple[str, tuple[tuple[str, int, str], ...]], list[int]] = {}
        for number, call in enumerate(self.folded.calls):
            kinds.setdefault((call.segment, self._kind(number)), []).append(number)
        shared = [segment for segment, _ in kinds]
        for (segment, kind), numbers in kinds.items():
            if kind:
                name = self._named(segment, kind) if shared.count(segment) > 1 else segment
                self._write(segment, name, numbers)
        used = {c.segment for c in self.calls}
        made = Folded(
            {s: g for s, g in self.segments.items() if s in used}, tuple(self.calls), self.folded.joint
        )
        return _without_unused(made)

    def _kind(self, number: int) -> tuple[tuple[str, int, str], ...]:
        """What calls of a segment must share to remain one: (attention, window, its mask of keys in here)."""
        told = self.wanted[number].items()

        def keys(place: _Place | None) -> str:
            if place is None:
                return ""
            return place[1] if place[0] == number else str(self.masks.type_of(place))

        return tuple(sorted((name, how.window, keys(how.keys)) for name, how in told))

    def _named(self, segment: str, kind: Sequence[tuple[str, int, str]]) -> str:
        window = kind[0][1]
        name = f"{segment}_window{window}" if window else f"{segment}_full"
        return name if name not in self.segments else fresh(name, {*self.segments})

    def _write(self, segment: str, name: str, numbers: Sequence[int]) -> None:
        graph = self.segments[segment]
        inputs, mains = list(graph.inputs), {n: list(self.calls[n].args) for n in numbers}
        inner: dict[tuple[str, ...], str] = {}
        nodes = []
        for node in graph.nodes:
            told = [self.wanted[n].get(node.name) for n in numbers]
            first = told[0]
            if first is None:
                nodes.append(node)
                continue
            keys = [how.keys for how in told if how is not None and how.keys is not None]
            mask: Arg = None
            if keys and keys[0][0] == numbers[0]:
                mask = Ref(keys[0][1])
            elif keys:
                given = tuple(self._main(place) for place in keys)
                if given not in inner:
                    inner[given] = fresh(keys[0][1], self.taken, "keys")
                    inputs.append((inner[given], self.masks.type_of(keys[0])))
                    for number, main in zip(numbers, given, strict=True):
                        mains[number].append(main)
                mask = Ref(inner[given])
            nodes.append(_told(node, mask, first.window))
        self.segments[name] = without_dead(Graph(graph.name, tuple(inputs), tuple(nodes), graph.outputs))
        for number in numbers:
            self.calls[number] = replace(self.calls[number], segment=name, args=tuple(mains[number]))

    def _main(self, place: _Place) -> str:
        """What a value is called in main, handed out if it was not."""
        number, value = place
        if number < 0:
            return value
        if place not in self.handed:
            call = self.calls[number]
            graph = self.segments[call.segment]
            if value in graph.outputs:
                self.handed[place] = call.outs[graph.outputs.index(value)]
            else:
                self.handed[place] = fresh(value, self.taken, "keys")
                self.segments[call.segment] = replace(graph, outputs=(*graph.outputs, value))
                self.calls[number] = replace(call, outs=(*call.outs, self.handed[place]))
        return self.handed[place]


def _told(node: Node, keys: Arg, window: int) -> Node:
    """Attention that is told which keys it attends to."""
    place = ATTENTION[node.op]
    rest = node.args[place + 2 :]
    return replace(node, args=(*node.args[:place], keys, True, *rest, *((window,) if window else ())))


def _without_unused(folded: Folded) -> Folded:
    """Without values that no call is given any more, and what only they were made of."""
    results = {r.value for r in folded.joint.results}
    segments, calls = dict(folded.segments), list(folded.calls)
    for segment in dict.fromkeys(c.segment for c in reversed(folded.calls)):
        own = [k for k, c in enumerate(calls) if c.segment == segment]
        graph = segments[segment]
        used = results | {a for c in calls for a in c.args}
        left = [p for p in range(len(graph.outputs)) if any(calls[k].outs[p] in used for k in own)]
        graph = without_dead(replace(graph, outputs=tuple(graph.outputs[p] for p in left)))
        needed = {*graph.outputs, *(r for n in graph.nodes for r in refs_of(n))}
        taken = [p for p, (n, _) in enumerate(graph.inputs) if n in needed]
        segments[segment] = replace(graph, inputs=tuple(graph.inputs[p] for p in taken))
        for k in own:
            args, outs = (calls[k].args[p] for p in taken), (calls[k].outs[p] for p in left)
            calls[k] = replace(calls[k], args=tuple(args), outs=tuple(outs))
    return Folded(segments, tuple(calls), folded.joint)
