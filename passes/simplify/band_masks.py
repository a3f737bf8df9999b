"""MaskReader that a few numbers describe are arguments of the attention, and no tensors of queries by keys.

A mask that says where in the sequence keys may lie (causal, a window), which keys are hidden (padding) or
which documents are packed into one sequence becomes ``causal``, ``window`` and a mask [.., 1, t] of keys
(`ops.attention`). Layers that take turns with several masks become segments of their own, as their attention
differs then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from autoshard.ir import Arg, Folded, Graph, Node, Ref, TensorType, refs_of
from autoshard.passes.segment_parts import fresh, without_dead
from autoshard.passes.simplify.mask_bands import MaskReader, Place

ATTENTION = {"autoshard.sdpa.default": 3, "autoshard.sdpa_backward.default": 6}
_RESHAPE = "aten.reshape.default"


@dataclass(frozen=True)
class _Attended:
    """What the attention is told instead of its mask. window: 0 for none. keys: where the mask of keys is
    made, or the numbers of documents [b, s]; None without one."""

    causal: bool
    window: int
    keys: Place | None = None
    documents: bool = False


def band_masks(folded: Folded) -> Folded:
    """The model whose attention is told which keys it attends to where that can be said."""
    masks = _Told(folded)
    wanted = [masks.attended(number) for number in range(len(folded.calls))]
    for segment in folded.segments:
        # an attention that one call knows nothing of keeps its mask in all of them
        own = [w for w, call in zip(wanted, folded.calls, strict=True) if call.segment == segment]
        known = set.intersection(*({*w} for w in own)) if own else set()
        for each in own:
            for name in [n for n in each if n not in known]:
                del each[name]
    return _Writer(folded, masks, wanted).run() if any(wanted) else folded


class _Told(MaskReader):
    """What the attention of a model can be told."""

    def __init__(self, folded: Folded) -> None:
        super().__init__(folded)
        self._counts = folded.counts()

    def attended(self, number: int) -> dict[str, _Attended]:
        """Attention (the name of its node) of a call -> what may take the place of its mask."""
        graph = self.folded.segments[self.folded.calls[number].segment]
        result = {}
        for node in graph.nodes:
            place = ATTENTION.get(node.op)
            mask = None if place is None else node.args[place]
            if place is not None and isinstance(mask, Ref) and not node.args[place + 1]:
                how = self._told(number, self.place(number, mask.name))
                if how is not None:
                    result[node.name] = how
        return result

    def _told(self, number: int, mask: Place) -> _Attended | None:
        shape, band = self.type_of(mask).shape, self.band(mask)
        if band is None or len(band.keys) + len(band.documents) > 1 or (band.keys and band.lowest):
            return None
        lower, upper = band.by_place.lower, band.by_place.upper
        causal = upper == 0
        both_sides = upper is not None and lower == -upper
        if not (causal or both_sides or lower is upper is None) or (lower is not None and lower > 0):
            return None
        window = 0 if lower is None else 1 - lower
        if shape[-1] != shape[-2] and (causal or window or band.documents):
            return None
        told = _Attended(causal, window if window < shape[-1] else 0)
        for keys in band.keys:
            return replace(told, keys=keys) if self._handed(number, keys, shape[-1]) else None
        for numbers in band.documents:
            fits = self._numbered(number, numbers, shape)
            return replace(told, keys=numbers, documents=True) if fits else None
        return told

    def _alone(self, number: int, place: Place) -> bool:
        """Whether a value can be handed to a call from where it is made."""
        at = place[0]
        return at in (-1, number) or self._counts[self.folded.calls[at].segment] == 1

    def _handed(self, number: int, keys: Place, length: int) -> bool:
        """Whether attention can be given a mask of keys."""
        shape = self.type_of(keys).shape
        return self._alone(number, keys) and len(shape) in (2, 4) and shape[-1] == length

    def _numbered(self, number: int, documents: Place, mask: tuple[int, ...]) -> bool:
        """Whether attention can be given the numbers of documents: they are the same for all heads."""
        batch = self.type_of(documents).shape[0]
        return self._alone(number, documents) and (batch == 1 or mask[:-2] == (batch, 1))


#: of every attention: (name, what it is told, its mask of keys in here or the type of one from outside)
_Kind: TypeAlias = tuple[tuple[str, _Attended, str], ...]


class _Writer:
    """Writes the model down. wanted: per call, see `_Told.attended`."""

    def __init__(self, folded: Folded, masks: _Told, wanted: Sequence[Mapping[str, _Attended]]) -> None:
        self.folded, self.masks, self.wanted = folded, masks, wanted
        self.segments = dict(folded.segments)
        self.calls = list(folded.calls)
        self.taken = (
            {v for types in masks.types.values() for v in types} | masks.ports.keys() | masks.made.keys()
        )
        self.handed: dict[Place, str] = {}

    def run(self) -> Folded:
        kinds: dict[tuple[str, _Kind], list[int]] = {}
        for number, call in enumerate(self.folded.calls):
            kinds.setdefault((call.segment, self._kind(number)), []).append(number)
        shared = [segment for segment, _ in kinds]
        for (segment, kind), numbers in kinds.items():
            if kind:
                name = self._named(segment, kind) if shared.count(segment) > 1 else segment
                self._write(segment, name, numbers)
        used = {c.segment for c in self.calls}
        new = Folded(
            {s: g for s, g in self.segments.items() if s in used}, tuple(self.calls), self.folded.joint
        )
        return _without_unused(new)

    def _kind(self, number: int) -> _Kind:
        """What calls of a segment must share to remain one."""
        told = self.wanted[number].items()

        def keys(place: Place | None) -> str:
            if place is None:
                return ""
            return place[1] if place[0] == number else str(self.masks.type_of(place))

        return tuple(sorted((name, replace(how, keys=None), keys(how.keys)) for name, how in told))

    def _named(self, segment: str, kind: _Kind) -> str:
        window = kind[0][1].window
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
            if first.documents and isinstance(mask, Ref):
                rows = self.masks.type_of(keys[0]).shape
                shape = rows[0], 1, 1, rows[1]
                nodes.append(self._laid(node, mask, TensorType(shape, self.masks.type_of(keys[0]).dtype)))
                mask = Ref(nodes[-1].name)
            nodes.append(_told(node, mask, first))
        self.segments[name] = without_dead(Graph(graph.name, tuple(inputs), tuple(nodes), graph.outputs))
        for number in numbers:
            self.calls[number] = replace(self.calls[number], segment=name, args=tuple(mains[number]))

    def _laid(self, node: Node, numbers: Ref, type_: TensorType) -> Node:
        """Numbers of documents as a mask of keys, ahead of an attention."""
        name = fresh(numbers.name, self.taken, "keys")
        args = (numbers, type_.shape)
        return Node(_RESHAPE, args, (), (name,), (type_,), node.origin, node.backward)

    def _main(self, place: Place) -> str:
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


def _told(node: Node, keys: Arg, how: _Attended) -> Node:
    """Attention that is told which keys it attends to."""
    place = ATTENTION[node.op]
    scale, *rest = node.args[place + 2 :]
    if rest or how.window:
        rest[:1] = [how.window]
    return replace(node, args=(*node.args[:place], keys, how.causal, scale, *rest))


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
