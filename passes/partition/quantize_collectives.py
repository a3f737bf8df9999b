"""Weights and activations are gathered, and gradients reduced, with fewer bits, where the user allows it and
it is faster.

A gather of parameters becomes: quantise the rank's shard in blocks, gather, dequantise (qwZ); a reduction
of gradients: quantise, exchange, dequantise and add up in fp32 (qgZ), so that a gradient is rounded once per
axis and not once per hop of a ring (G. Wang et al., "ZeRO++: Extremely Efficient Collective Communication for
Giant Model Training", 2023, sections 3.1 and 3.3). Only matrices are quantised: norms and biases travel in
the same message as they are.

A gather of rows of activations, as tensor parallel ranks do that work on parts of the sequence, is quantised
like one of parameters, in groups that do not cross rows. What backward gathers again is the same value in the
same groups, at the same price: it is rounded where the forward gather is, and to the same numbers. Gradients
of activations keep all bits.

Tokens go to their experts with 8 bits, in groups that do not cross rows, and sums come back with all bits
(DeepSeek-AI, "DeepSeek-V3 technical report", 2024, section 3.3.2). A row is rounded once, also where it is
sent on inside a node. Gradients on their way to experts keep all bits.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, TypeAlias

from autoshard.errors import UsageError
from autoshard.ir import DTYPES, Call, Graph, Node, Ref, refs_of
from autoshard.ir.collectives import (
    ALL_GATHER_Q,
    DISPATCHES,
    EXPERT_RELAY,
    REDUCE_SCATTER_Q,
    axes_of,
    exact_transfer,
    transfer_of,
    wheres_of,
)
from autoshard.ir.experts import destinations
from autoshard.ir.local_bytes import held_numel
from autoshard.ir.lowered import Lowered, LoweredSegment, PlacedValue
from autoshard.ir.quantized import WIRE_BITS, packed_bytes
from autoshard.options import allowed
from autoshard.passes.rewrite import replaced_in, replaced_in_main
from autoshard.passes.simplify.activations import Activations
from autoshard.rules.local import MeshShape
from autoshard.rules.quantized_gather import FLOATS, rows_of_rank

GROUP = 256
#: the smallest number of elements that may share a scale (`kernels.quant`)
_LEAST = 32
_ALLOWED = re.compile(r"^int(8|4)-(weights|gradients)$|^int(8)-(activations|tokens)$")
#: what a collective moves
Kind: TypeAlias = Literal["weights", "gradients", "activations"]


@dataclass(frozen=True)
class Precision:
    """How few bits may travel: 8, 4 (of weights and gradients), or 0 for all of them. tokens: on their way to
    experts. group: the most elements that share a scale."""

    weights: int = 0
    gradients: int = 0
    activations: int = 0
    tokens: int = 0
    group: int = GROUP

    @classmethod
    def parse(cls, text: str) -> Precision:
        """The precision that a text such as ``int8-weights,int4-gradients`` allows; "" allows nothing. Words
        for plans (`options.allowed`) are passed over.

        Raises UsageError for any other word, and for what is said twice.
        """
        result: dict[str, int] = {}
        for word in allowed(text)[1]:
            match = _ALLOWED.match(word)
            bits, what = [g for g in match.groups() if g is not None] if match else ("0", "")
            if match is None or what in result:
                raise UsageError(
                    f"{word!r} cannot be allowed" + (" twice" if match else ""),
                    where=f"allow {text!r}",
                    hint="int8-weights or int4-weights, int8-gradients or int4-gradients, int8-activations "
                    "and int8-tokens (no kernel makes 4 bits of them), or one of each, and lsh-moe:SHARE",
                )
            result[what] = int(bits)
        return cls(**result)

    def __str__(self) -> str:
        named = (
            ("weights", self.weights),
            ("gradients", self.gradients),
            ("activations", self.activations),
            ("tokens", self.tokens),
        )
        return ",".join(f"int{bits}-{what}" for what, bits in named if bits)


@dataclass(frozen=True)
class Sent:
    """Names by which it is told what a collective moves.

    params, batch, tangents: inputs that are parameters, of a batch, or gradients of outputs. grads: values
    that are gradients of parameters.
    """

    params: Collection[str]
    grads: Collection[str]
    batch: Collection[str] = ()
    tangents: Collection[str] = ()


@dataclass(frozen=True)
class Quantising:
    """message: seconds of a collective of a kind (as in `cost.collective`) with so many bytes over an axis.
    copy: seconds to read and write so many bytes in memory.
    """

    precision: Precision
    message: Callable[[str, float, int], float]
    copy: Callable[[float], float]


def quantise_collectives(lowered: Lowered, sent: Sent, mesh: MeshShape, how: Quantising) -> Lowered:
    """The program with collectives in fewer bits where that is allowed, and predicted to pay."""
    chosen = _Chosen(mesh, how)
    weights, reduced = Weights(lowered, sent.params), Gradients(lowered, sent.grads)
    activations = None
    if how.precision.activations or how.precision.tokens:
        activations = Activations(lowered, sent.batch, sent.params, sent.tangents)

    def kind(node: Node, inside: str) -> Kind | None:
        if weights.are_gathered(node, inside):
            return "weights"
        if reduced.are_scattered(node, inside):
            return "gradients"
        if activations is None or not how.precision.activations:
            return None
        return "activations" if activations.are_gathered(node, inside) else None

    segments: dict[str, LoweredSegment] = {}
    for name, segment in lowered.segments.items():
        types = segment.graph.types()
        values = {n: PlacedValue(t, segment.layouts[n]) for n, t in types.items()}
        uses = Counter(r for n in segment.graph.nodes for r in refs_of(n)) + Counter(segment.graph.outputs)
        kinds = {n.name: k for n in segment.graph.nodes if (k := kind(n, name)) is not None}
        result = chosen.among([n for n in segment.graph.nodes if n.name in kinds], kinds, uses, values)
        tokens = _Found({}, {})
        if activations is not None and how.precision.tokens:
            tokens = _tokens(segment, values, mesh, how, partial(activations.is_gradient, inside=name))
        new = replaced_in(segment, {**result.nodes, **tokens.nodes})
        segments[name] = replace(new, why={**segment.why, **result.why, **tokens.why})
    uses = Counter(r for i in lowered.main for r in (i.args if isinstance(i, Call) else refs_of(i)))
    nodes_of_main = [i for i in lowered.main if isinstance(i, Node)]
    kinds = {n.name: k for n in nodes_of_main if (k := kind(n, "")) is not None}
    own = [n for n in nodes_of_main if n.name in kinds]
    result = chosen.among(own, kinds, uses + Counter(lowered.results), lowered.values)
    return replace(replaced_in_main(lowered, result.nodes), segments=segments)


@dataclass(frozen=True)
class _Found:
    """nodes: name -> what stands in its place, None for nothing. why: reasons of those that are new."""

    nodes: dict[str, Node | None]
    why: dict[str, str]


def _tokens(
    segment: LoweredSegment,
    values: Mapping[str, PlacedValue],
    mesh: MeshShape,
    how: Quantising,
    is_gradient: Callable[[str], bool],
) -> _Found:
    """Dispatches of tokens, also where forward is computed again, and what sends them on, with 8 bits where
    that is faster."""
    found = _Found({}, {})
    told: dict[str, tuple[tuple[str, int], ...]] = {}
    for node in segment.graph.nodes:
        if node.op == EXPERT_RELAY.op and (bits := told.get(next(refs_of(node)))):
            told[node.name] = bits
            continue
        if node.op not in DISPATCHES or is_gradient(node.args[0][0].name):
            continue
        tokens, slots = (values[r.name] for r in (node.args[0][0], node.args[0][2]))
        width, group = tokens.type.shape[-1], how.precision.group
        while group > _LEAST and width % group:
            group //= 2
        if tokens.type.dtype not in FLOATS or width % group:
            continue
        axis = mesh.names.index(axes_of(node)[0])
        own = float(held_numel(tokens.type.shape, tokens.layout, mesh.sizes)) * DTYPES[tokens.type.dtype][1]
        less = packed_bytes([width], (WIRE_BITS,), group, 0) / (width * DTYPES[tokens.type.dtype][1])
        sent = own * destinations(slots.type, mesh.sizes[axis])
        exact, fewer = (how.message("all_to_all", n, axis) for n in (sent, less * sent))
        fewer += how.copy((1 + less) * (own + sent))
        if fewer < exact:
            told[node.name] = ("bits", WIRE_BITS), ("group", group)
            found.why[node.name] = f"int8 tokens: {fewer * 1e6:.0f} us, exact {exact * 1e6:.0f} us"
    nodes = (n for n in segment.graph.nodes if n.name in told)
    found.nodes.update((n.name, replace(n, kwargs=(*n.kwargs, *told[n.name]))) for n in nodes)
    return found


class _Chosen:
    """Collectives with fewer bits, where that is faster."""

    def __init__(self, mesh: MeshShape, how: Quantising) -> None:
        self.mesh, self.how = mesh, how

    def among(
        self,
        nodes: Collection[Node],
        kinds: Mapping[str, Kind],
        uses: Mapping[str, int],
        values: Mapping[str, PlacedValue],
    ) -> _Found:
        """Those of some nodes of a graph. kinds: of each of them. uses: how often each value is read.

        Gathers of the same tensors over one axis after the other are one: rounded once, and unpacked once.
        """
        result = _Found({}, {})
        gathered = {o for n in nodes if exact_transfer(n) == "all_gather" for o in n.outs}
        for chain in _chains(nodes, uses):
            kind = kinds[chain[0].name]
            if kind == "activations" and not gathered.isdisjoint(refs_of(chain[0])):
                continue  # rounded already, in other groups
            apart = [[n] for n in chain] if len(chain) > 1 and kind != "activations" else []
            for links in (chain, *apart):
                if links[-1].name in result.nodes:
                    continue
                new, reason = self._of(links, kind, values)
                if new is not None:
                    result.nodes.update((n.name, None) for n in links[:-1])
                    result.nodes[links[-1].name] = new
                    result.why[new.name] = reason
                    if links is chain:
                        break
        return result

    def _of(
        self, chain: list[Node], kind: Kind, values: Mapping[str, PlacedValue]
    ) -> tuple[Node | None, str]:
        """Gathers one after the other, or a reduction, as they are sent with fewer bits, and the reason; None
        if they had better have all of them."""
        first, last = chain[0], chain[-1]
        gathers = kind != "gradients"
        precision = self.how.precision
        allowed = int(getattr(precision, kind))
        types = [t for t in first.types if t is not None]
        bits = tuple(allowed if len(t.shape) > 1 else 0 for t in types)
        if not any(bits) or any(t.dtype not in FLOATS for t in types):
            return None, ""
        sources = list(refs_of(first))
        parts = [values[n] for n in (sources if gathers else first.outs)]
        group = self._row_group(chain, parts) if kind == "activations" else precision.group
        if not group:
            return None, ""
        axes = tuple(str(n.args[1]) for n in chain)
        exact, fewer, volume = self._seconds(gathers, axes, parts, bits, group)
        if fewer >= exact:
            return None, ""
        over = axes if len(axes) > 1 else axes[0]
        args = (tuple(map(Ref, sources)), over, wheres_of(first), bits, group)
        new = replace(last, op=(ALL_GATHER_Q if gathers else REDUCE_SCATTER_Q).op, args=args, kwargs=())
        reason = (
            f"int{allowed} {kind}: {fewer * 1e6:.0f} us, exact {exact * 1e6:.0f} us; "
            f"{volume:.2g} x less to send"
        )
        return new, reason

    def _row_group(self, chain: list[Node], parts: list[PlacedValue]) -> int:
        """The most elements that may share a scale such that rows are full groups, 0 if there are none, or
        if ranks hold shards of unlike sizes."""
        rows = [rows_of_rank(p, self.mesh) for p in parts]
        uneven = any(where[2:] != (1, None) for node in chain for where in wheres_of(node))
        if uneven or not all(rows):
            return 0
        group = self.how.precision.group
        while group >= _LEAST and any(shape[-1] % group for shape in rows if shape):
            group //= 2
        return group if group >= _LEAST else 0

    def _seconds(
        self,
        gathers: bool,
        axes: tuple[str, ...],
        parts: list[PlacedValue],
        bits: tuple[int, ...],
        group: int,
    ) -> tuple[float, float, float]:
        """(seconds with all bits, with fewer, how many times fewer bytes)."""
        copy, message = self.how.copy, self.how.message
        numbers = [self.mesh.names.index(name) for name in axes]
        numels = [held_numel(p.type.shape, p.layout, self.mesh.sizes) for p in parts]
        width = DTYPES[parts[0].type.dtype][1]
        own = float(sum(numels) * width)
        packed = float(packed_bytes(numels, bits, group, width))
        exact, ways = 0.0, 1
        fewer = copy(3 * own + packed)
        if gathers:
            for axis in numbers:
                ways *= self.mesh.sizes[axis]
                exact += message("all_gather", ways * own, axis) + copy(2 * ways * own)
                fewer += message("all_gather", ways * packed, axis)
            return exact, fewer + copy(ways * (packed + own)), own / packed
        (axis,) = numbers
        ways = self.mesh.sizes[axis]
        exact = copy(2 * ways * own) + message("reduce_scatter", ways * own, axis)
        fewer = copy(3 * ways * own + ways * packed) + message("all_to_all", ways * packed, axis)
        return exact, fewer + copy(ways * packed + own), own / packed


def _chains(nodes: Collection[Node], uses: Mapping[str, int]) -> list[list[Node]]:
    """Nodes in rows: a gather stands before the one that alone reads its results, all of them in order."""
    before = {node.outs: node for node in nodes if exact_transfer(node) == "all_gather"}
    follows: dict[str, Node] = {}
    for node in nodes:
        first = before.get(tuple(refs_of(node))) if exact_transfer(node) == "all_gather" else None
        if first is not None and all(uses[o] == 1 for o in first.outs):
            follows[first.name] = node
    later = {n.name for n in follows.values()}
    result: list[list[Node]] = []
    for node in nodes:
        if node.name not in later:
            chain = [node]
            while chain[-1].name in follows:
                chain.append(follows[chain[-1].name])
            result.append(chain)
    return result


def _calls_of(lowered: Lowered) -> dict[str, list[Call]]:
    """The calls of every segment."""
    result: dict[str, list[Call]] = {name: [] for name in lowered.segments}
    for item in lowered.main:
        if isinstance(item, Call):
            result[item.segment].append(item)
    return result


class Weights:
    """Which values of a program are parameters, or parts of them that were gathered.

    inside: segment -> such values in it; "" for main.
    """

    def __init__(self, lowered: Lowered, params: Collection[str]) -> None:
        self.inside: dict[str, set[str]] = {name: set() for name in lowered.segments}
        main = self.inside[""] = set(params)
        calls_of = _calls_of(lowered)
        while True:
            before = {name: len(result) for name, result in self.inside.items()}
            for name, segment in lowered.segments.items():
                calls = calls_of[name]
                for k, (inner, _) in enumerate(segment.graph.inputs):
                    if calls and all(call.args[k] in main for call in calls):
                        self.inside[name].add(inner)
                self._gathered(segment.graph.nodes, self.inside[name])
            self._gathered([i for i in lowered.main if isinstance(i, Node)], main)
            for item in lowered.main:
                if isinstance(item, Call):
                    given = lowered.segments[item.segment].graph.outputs
                    own = self.inside[item.segment]
                    main.update(out for out, inner in zip(item.outs, given, strict=True) if inner in own)
            if before == {name: len(result) for name, result in self.inside.items()}:
                break

    @staticmethod
    def _gathered(nodes: Collection[Node], result: set[str]) -> None:
        for node in nodes:
            if transfer_of(node) == "all_gather":
                result.update(o for o, r in zip(node.outs, refs_of(node), strict=True) if r in result)

    def are_gathered(self, node: Node, inside: str) -> bool:
        """Whether a node gathers parameters and nothing else."""
        return exact_transfer(node) == "all_gather" and all(r in self.inside[inside] for r in refs_of(node))


class Gradients:
    """Which values of a program become gradients of parameters by reductions alone.

    inside: segment -> such values in it; "" for main.
    """

    def __init__(self, lowered: Lowered, grads: Collection[str]) -> None:
        used = {r for i in lowered.main for r in (i.args if isinstance(i, Call) else refs_of(i))}
        nodes = [i for i in lowered.main if isinstance(i, Node)]
        main = self._before(nodes, {g for g in grads if g not in used})
        self.inside: dict[str, set[str]] = {"": main}
        calls_of = _calls_of(lowered)
        for name, segment in lowered.segments.items():
            calls = calls_of[name]
            graph: Graph = segment.graph
            used = {r for n in graph.nodes for r in refs_of(n)}
            ends = {
                out
                for k, out in enumerate(graph.outputs)
                if calls and out not in used and all(call.outs[k] in main for call in calls)
            }
            self.inside[name] = self._before(graph.nodes, ends)

    @staticmethod
    def _before(nodes: Collection[Node], ends: set[str]) -> set[str]:
        """``ends``, and what only reductions read that lead to them."""
        uses: dict[str, list[Node]] = {}
        for node in nodes:
            for name in refs_of(node):
                uses.setdefault(name, []).append(node)
        result = set(ends)
        for node in reversed(list(nodes)):
            reduces = exact_transfer(node) in ("reduce_scatter", "all_reduce")
            if reduces and node.kwarg("op", "sum") == "sum":
                for out, source in zip(node.outs, refs_of(node), strict=True):
                    if out in result and len(uses[source]) == 1:
                        result.add(source)
        return result

    def are_scattered(self, node: Node, inside: str) -> bool:
        """Whether a node scatters sums of gradients and nothing else."""
        return exact_transfer(node) == "reduce_scatter" and all(o in self.inside[inside] for o in node.outs)
