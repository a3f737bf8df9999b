"""Causal depthwise convolutions (Mamba, gated delta nets, short convolutions) over chunks of a sequence.

Models write them as a convolution that is padded at both ends, and drop its last positions: no rank can do
that with a part of the sequence. In chunks that are given the ends of their neighbours (`ops.causal_conv`),
ranks with some of the chunks gather these ends alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from autoshard.ir import Arg, Folded, Graph, Node, Ref, TensorType, refs_of
from autoshard.passes.rewrite import Steps, Types
from autoshard.passes.segment_parts import fresh, without_dead

_CONVOLUTION, _BACKWARD = "aten.convolution.default", "aten.convolution_backward.default"
_SLICE, _SLICE_BACKWARD = "aten.slice.Tensor", "aten.slice_backward.default"
#: chunks of a sequence at most, as many as ranks may divide it, and how many times as long as its halo a
#: chunk is at least: the halos of all of them are gathered
_MOST, _LONG = 256, 16


def causal_convs(folded: Folded) -> Folded:
    """The model with causal depthwise convolutions in chunks."""
    return replace(folded, segments={name: _graph(g) for name, g in folded.segments.items()})


def _graph(graph: Graph) -> Graph:
    if not any(node.op in (_CONVOLUTION, _BACKWARD) for node in graph.nodes):
        return graph
    uses = Counter((*graph.outputs, *(ref for node in graph.nodes for ref in refs_of(node))))
    makers = {node.name: node for node in graph.nodes if uses[node.name] == 1}
    taken, nodes = {*graph.types()}, list[Node]()
    for node in graph.nodes:
        conv = _conv_of(node, makers, graph.types())
        nodes += [node] if conv is None else conv.in_chunks(Steps(node, lambda: fresh("halo", taken, "of")))
    return without_dead(replace(graph, nodes=tuple(nodes)))


def _conv_of(node: Node, makers: Mapping[str, Node], types: Types) -> _Conv | None:
    """The causal convolution of which a node is the result, or makes the gradients."""
    if node.op == _SLICE and (conv := makers.get(node.args[0].name)) and conv.op == _CONVOLUTION:
        x, weight, bias, *how = conv.args
        result = _Conv(x, types[x.name], weight, types[weight.name], how[2], bias)
        dim, start, end, step = (node.arg(1, default=0), node.arg(2), node.arg(3), node.arg(4, default=1))
    elif node.op == _BACKWARD and (cut := makers.get(node.args[0].name)) and cut.op == _SLICE_BACKWARD:
        _, x, weight, _, *how, mask = node.args
        result = _Conv(x, types[x.name], weight, types[weight.name], how[2], None, cut.args[0], mask)
        dim, start, end, step = cut.args[2:]
    else:
        return None
    if len(result.x_type.shape) != 3 or (dim % 3, start or 0, end, step) != (2, 0, result.length, 1):
        return None
    return result if tuple(how) == result.how else None


@dataclass(frozen=True)
class _Conv:
    """x: [b, c, t]. weight: [c, 1, k]. dilations: of the one dim. grad: of its result. mask: which gradients
    are asked for."""

    x: Ref
    x_type: TensorType
    weight: Ref
    weight_type: TensorType
    dilations: tuple[int, ...]
    bias: Ref | None = None
    grad: Ref | None = None
    mask: tuple[bool, ...] = ()

    @property
    def length(self) -> int:
        return self.x_type.shape[2]

    @property
    def halo(self) -> int:
        """Positions that one is of, besides itself."""
        return (self.weight_type.shape[2] - 1) * self.dilations[0]

    @property
    def how(self) -> tuple[Arg, ...]:
        """Stride, padding, dilation, whether it is transposed, output padding and groups, if it is causal and
        depthwise; () where it is not, or every position is of itself alone."""
        channels = self.x_type.shape[1]
        if not self.halo or self.weight_type.shape[:2] != (channels, 1):
            return ()
        return (1,), (self.halo,), self.dilations, False, (0,), channels

    @property
    def chunks(self) -> int:
        """As many as there may be."""
        least = max(_LONG * self.halo, -(-self.length // _MOST))
        return next((self.length // n for n in range(least, self.length) if not self.length % n), 1)

    def in_chunks(self, steps: Steps) -> list[Node]:
        """What makes the result, or the gradients, of chunks and the ends of their neighbours."""
        several, (dilation,) = self.chunks > 1, self.dilations
        before = self._shifted(steps, self.x, last=True) if several else None
        op = "causal_conv"
        args: tuple[Arg, ...] = (self.x, before, self.weight, self.bias, dilation)
        if self.grad is not None:
            after = self._shifted(steps, self.grad, last=False) if several else None
            op = "causal_conv_backward"
            args = (self.grad, self.x, before, after, self.weight, dilation, self.mask)
        return [*steps.made, replace(steps.node, op=f"autoshard.{op}.default", args=args, kwargs=())]

    def _shifted(self, steps: Steps, x: Ref, *, last: bool) -> Ref:
        """The last positions of the chunk before each chunk, or the first of the one after it; zeros where
        there is none."""
        rows, channels, length = self.x_type.shape
        n, size = self.chunks, length // self.chunks

        def type_(*shape: int) -> TensorType:
            return TensorType((rows, channels, *shape), self.x_type.dtype)

        chunks = steps.add("aten.reshape.default", (x, type_(n, size).shape), type_(n, size))
        start = size - self.halo if last else 0
        ends = steps.add(_SLICE, (chunks, 3, start, start + self.halo, 1), type_(n, self.halo))
        start, pad = (0, (0, 0, 1, 0)) if last else (1, (0, 0, 0, 1))
        others = steps.add(_SLICE, (ends, 2, start, start + n - 1, 1), type_(n - 1, self.halo))
        return steps.add("aten.constant_pad_nd.default", (others, pad, 0.0), type_(n, self.halo))
