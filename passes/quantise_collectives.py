"""Weights are gathered, and gradients reduced, with fewer bits, where the user allows it and it is faster.

A gather of parameters becomes: quantise the rank's shard in blocks, gather, dequantise (qwZ); a reduction
of gradients: quantise, exchange, dequantise and add up in fp32 (qgZ), so that a gradient is rounded once per
axis and not once per hop of a ring (G. Wang et al., "ZeRO++: Extremely Efficient Collective Communication for
Giant Model Training", 2023, sections 3.1 and 3.3). Only matrices are quantised: norms and biases travel in
the same message as they are. Activations never are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from math import prod

from autoshard.cost.wire import packed_bytes
from autoshard.errors import UsageError
from autoshard.ir import DTYPES, Call, Graph, Node, refs_of
from autoshard.ir.lowered import Instruction, Lowered, LoweredSegment, Placed
from autoshard.placement import local_shape
from autoshard.rules.local import MeshShape

GROUP = 256
_GATHERS = ("comm.all_gather.default", "comm.all_gather_bucket.default")
_SCATTERS = ("comm.reduce_scatter.default", "comm.reduce_scatter_bucket.default")
_REDUCTIONS = (*_SCATTERS, "comm.all_reduce.default", "comm.all_reduce_bucket.default")
_ALLOWED = re.compile(r"^int(8|4)-(weights|gradients)$")
_FLOATS = ("f32", "bf16", "f16")


@dataclass(frozen=True)
class Precision:
    """How few bits may travel: 8, 4, or 0 for all of them. group: elements that share a scale."""

    weights: int = 0
    gradients: int = 0
    group: int = GROUP

    @classmethod
    def parse(cls, text: str) -> Precision:
        """The precision that a text such as ``int8-weights,int4-gradients`` allows; "" allows nothing.

        Raises UsageError for any other word, and for what is said twice.
        """
        found: dict[str, int] = {}
        for word in filter(None, (w.strip() for w in text.split(","))):
            match = _ALLOWED.match(word)
            if match is None or match.group(2) in found:
                raise UsageError(
                    f"{word!r} cannot be allowed" + (" twice" if match else ""),
                    where=f"allow {text!r}",
                    hint="int8-weights or int4-weights, int8-gradients or int4-gradients, or one of each",
                )
            found[match.group(2)] = int(match.group(1))
        return cls(**found)

    def __str__(self) -> str:
        named = (("weights", self.weights), ("gradients", self.gradients))
        return ",".join(f"int{bits}-{what}" for what, bits in named if bits)


@dataclass(frozen=True)
class Quantising:
    """message: seconds of a collective of a kind (as in `cost.collective`) with so many bytes over an axis.
    copy: seconds to read and write so many bytes in memory.
    """

    precision: Precision
    message: Callable[[str, float, int], float]
    copy: Callable[[float], float]


def quantise_collectives(
    lowered: Lowered, params: Collection[str], grads: Collection[str], mesh: MeshShape, how: Quantising
) -> Lowered:
    """The program with collectives of parameters and gradients in fewer bits where that is predicted to pay.

    params: inputs that are parameters. grads: values that are gradients of parameters.
    """
    chosen = _Chosen(mesh, how)
    weights, reduced = Weights(lowered, params), Gradients(lowered, grads)

    def fits(node: Node, inside: str) -> bool:
        return weights.are_gathered(node, inside) or reduced.are_scattered(node, inside)

    segments: dict[str, LoweredSegment] = {}
    for name, segment in lowered.segments.items():
        types = segment.graph.types()
        values = {n: Placed(t, segment.layouts[n]) for n, t in types.items()}
        why = dict(segment.why)
        nodes: list[Node] = []
        for node in segment.graph.nodes:
            made, reason = chosen.of(node, values) if fits(node, name) else (node, "")
            nodes.append(made)
            if reason:
                why[made.name] = reason
        graph = replace(segment.graph, nodes=tuple(nodes))
        segments[name] = replace(segment, graph=graph, why=why)
    main: list[Instruction] = []
    for item in lowered.main:
        if isinstance(item, Node) and fits(item, ""):
            item = chosen.of(item, lowered.values)[0]
        main.append(item)
    return replace(lowered, segments=segments, main=tuple(main))


class _Chosen:
    """Collectives with fewer bits, where that is faster."""

    def __init__(self, mesh: MeshShape, how: Quantising) -> None:
        self.mesh, self.how = mesh, how

    def of(self, node: Node, values: Mapping[str, Placed]) -> tuple[Node, str]:
        """The collective as it is sent, and the reason if that is with fewer bits."""
        gathers = node.op in _GATHERS
        allowed = self.how.precision.weights if gathers else self.how.precision.gradients
        types = [t for t in node.types if t is not None]
        if not allowed or any(t.dtype not in _FLOATS for t in types):
            return node, ""
        sources = list(refs_of(node))
        bits = tuple(allowed if len(t.shape) > 1 else 0 for t in types)
        if not any(bits):
            return node, ""
        parts = [values[n] for n in (sources if gathers else node.outs)]
        exact, fewer, volume = self._seconds(gathers, str(node.args[1]), parts, bits)
        if fewer >= exact:
            return node, ""
        kind = "all_gather_q_bucket" if gathers else "reduce_scatter_q_bucket"
        args = (self._sources(node), node.args[1], self._wheres(node), bits, self.how.precision.group)
        made = Node(f"comm.{kind}.default", args, (), node.outs, node.types, node.origin, node.backward)
        reason = (
            f"int{allowed} {'weights' if gathers else 'gradients'}: {fewer * 1e6:.0f} us, exact "
            f"{exact * 1e6:.0f} us; {volume:.2g} x less to send"
        )
        return made, reason

    def _seconds(
        self, gathers: bool, name: str, parts: list[Placed], bits: tuple[int, ...]
    ) -> tuple[float, float, float]:
        """(seconds with all bits, with fewer, how many times fewer bytes)."""
        axis, copy, message = self.mesh.names.index(name), self.how.copy, self.how.message
        ways = self.mesh.sizes[axis]
        first = (0,) * len(self.mesh.sizes)
        numels = [prod(local_shape(p.type.shape, p.layout, self.mesh.sizes, first)) for p in parts]
        width = DTYPES[parts[0].type.dtype][1]
        own = float(sum(numels) * width)
        packed = float(packed_bytes(numels, bits, self.how.precision.group, width))
        if gathers:
            exact = message("all_gather", ways * own, axis) + copy(2 * ways * own)
            fewer = copy(3 * own + packed) + message("all_gather", ways * packed, axis)
            return exact, fewer + copy(ways * (packed + own)), own / packed
        exact = copy(2 * ways * own) + message("reduce_scatter", ways * own, axis)
        fewer = copy(3 * ways * own + ways * packed) + message("all_to_all", ways * packed, axis)
        return exact, fewer + copy(ways * packed + own), own / packed

    @staticmethod
    def _sources(node: Node) -> tuple[object, ...]:
        first = node.args[0]
        return first if isinstance(first, tuple) else (first,)

    @staticmethod
    def _wheres(node: Node) -> tuple[object, ...]:
        if isinstance(node.args[0], tuple):
            return tuple(node.args[2])
        rest = (node.kwarg(k, d) for k, d in (("outer", 1), ("inner", 1), ("size", None)))
        return ((node.args[2], *rest),)


class Weights:
    """Which values of a program are parameters, or parts of them that were gathered.

    inside: segment -> such values in it; "" for main.
    """

    def __init__(self, lowered: Lowered, params: Collection[str]) -> None:
        self.inside: dict[str, set[str]] = {name: set() for name in lowered.segments}
        main = self.inside[""] = set(params)
        while True:
            before = {name: len(found) for name, found in self.inside.items()}
            for name, segment in lowered.segments.items():
                calls = [i for i in lowered.main if isinstance(i, Call) and i.segment == name]
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
            if before == {name: len(found) for name, found in self.inside.items()}:
                break

    @staticmethod
    def _gathered(nodes: Collection[Node], found: set[str]) -> None:
        for node in nodes:
            if node.op in _GATHERS:
                found.update(o for o, r in zip(node.outs, refs_of(node), strict=True) if r in found)

    def are_gathered(self, node: Node, inside: str) -> bool:
        """Whether a node gathers parameters and nothing else."""
        return node.op in _GATHERS and all(r in self.inside[inside] for r in refs_of(node))


class Gradients:
    """Which values of a program become gradients of parameters by reductions alone.

    inside: segment -> such values in it; "" for main.
    """

    def __init__(self, lowered: Lowered, grads: Collection[str]) -> None:
        used = {r for i in lowered.main for r in (i.args if isinstance(i, Call) else refs_of(i))}
        nodes = [i for i in lowered.main if isinstance(i, Node)]
        main = self._before(nodes, {g for g in grads if g not in used})
        self.inside: dict[str, set[str]] = {"": main}
        for name, segment in lowered.segments.items():
            calls = [i for i in lowered.main if isinstance(i, Call) and i.segment == name]
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
        found = set(ends)
        for node in reversed(list(nodes)):
            if node.op in _REDUCTIONS and node.kwarg("op", "sum") == "sum":
                for out, source in zip(node.outs, refs_of(node), strict=True):
                    if out in found and len(uses[source]) == 1:
                        found.add(source)
        return found

    def are_scattered(self, node: Node, inside: str) -> bool:
        """Whether a node scatters sums of gradients and nothing else."""
        return node.op in _SCATTERS and all(o in self.inside[inside] for o in node.outs)
