"""Rewrite ops whose shards need more than a local call into ops that do not.

A mean over a split dim is not a mean of means (uneven shards), a bias must be added once and not by
every partial product, a tensor ``like`` another needs only its shape, and cross-entropy becomes
row statistics (which merge over vocabulary shards) and what follows from them. Losses and norms that
are sums in disguise are in files of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod
from types import MappingProxyType

from autoshard.ir import Arg, Dtype, Folded, Graph, Node, Ref, TensorType
from autoshard.passes.rewrite import Fresh, Rewrite, Types, first_type
from autoshard.passes.simplify import decompose_loss, decompose_norm


def decompose(folded: Folded) -> Folded:
    """The same calls, with every segment rewritten."""
    return replace(folded, segments={name: decomposed(g) for name, g in folded.segments.items()})


def decomposed(graph: Graph) -> Graph:
    """A graph, rewritten."""
    types = graph.types()
    fresh_names = _names(set(types))
    nodes: list[Node] = []
    for node in graph.nodes:
        rewrite = REWRITES.get(node.op)
        new = rewrite(node, types, lambda: next(fresh_names)) if rewrite else None
        nodes.extend([node] if new is None else new)
    return replace(graph, nodes=tuple(nodes))


def _names(taken: set[str]) -> Iterator[str]:
    k = 0
    while True:
        k += 1
        name = f"d{k}"
        if name not in taken:
            yield name


def _like(
    node: Node,
    op: str,
    args: tuple[Arg, ...],
    out: str,
    type_: TensorType,
    kwargs: tuple[tuple[str, Arg], ...] = (),
) -> Node:
    """A helper node with the origin of the node it serves."""
    return Node(op, args, kwargs, (out,), (type_,), node.origin, node.backward)


def _addmm(node: Node, types: Types, fresh: Fresh) -> list[Node] | None:
    """bias + a @ b (or its batched form) as a product and a sum."""
    if node.kwarg("alpha", 1) != 1 or node.kwarg("beta", 1) != 1:
        return None
    bias, a, b = node.args
    out = first_type(node)
    product = fresh()
    op = "aten.mm.default" if len(out.shape) == 2 else "aten.bmm.default"
    return [
        _like(node, op, (a, b), product, out),
        replace(node, op="aten.add.Tensor", args=(Ref(product), bias), kwargs=()),
    ]


def _mean(node: Node, types: Types, fresh: Fresh) -> list[Node] | None:
    """A sum divided by the global number of elements."""
    source = types[node.args[0].name]
    out = first_type(node)
    raw = node.arg(1, "dim")
    dims: Arg = raw if isinstance(raw, tuple) else None if raw is None else (raw,)
    total = fresh()
    kwargs = tuple((k, v) for k, v in node.kwargs if k == "dtype")
    if not dims:
        count = source.numel
        summed = _like(node, "aten.sum.default", (node.args[0],), total, out, kwargs)
    else:
        count = prod(source.shape[d] for d in dims) if source.shape else 1
        keep = bool(node.arg(2, "keepdim", False))
        summed = _like(node, "aten.sum.dim_IntList", (node.args[0], dims, keep), total, out, kwargs)
    return [summed, replace(node, op="aten.div.Tensor", args=(Ref(total), count), kwargs=())]


def _filled(value: Arg) -> Rewrite:
    """``*_like`` and ``new_*``: a constant of the output's shape."""

    def rewrite(node: Node, types: Types, fresh: Fresh) -> list[Node] | None:
        out = first_type(node)
        fill = node.args[-1] if value is None else value
        if isinstance(fill, Ref):
            return None
        args = (out.shape, fill)
        return [replace(node, op="aten.full.default", args=args, kwargs=(("dtype", Dtype(out.dtype)),))]

    return rewrite


def _overwrite(node: Node, types: Types, fresh: Fresh) -> list[Node] | None:
    """``copy(x, src)`` and ``fill(x, value)``: the source, as a tensor of the output's type."""
    source = node.args[1]
    if not isinstance(source, Ref):
        return _filled(None)(node, types, fresh)
    out = first_type(node)
    cast = fresh()
    given = types[source.name]
    kwargs = (("dtype", Dtype(out.dtype)),)
    return [
        _like(node, "aten._to_copy.default", (source,), cast, TensorType(given.shape, out.dtype), kwargs),
        replace(node, op="aten.expand.default", args=(Ref(cast), out.shape), kwargs=()),
    ]


def _conjugated(node: Node, types: Types, fresh: Fresh) -> list[Node] | None:
    """Now, not where a value is read, since a view as real numbers refuses what is yet to be conjugated."""
    return [replace(node, op="aten._conj_physical.default")]


def _xent(node: Node, types: Types, fresh: Fresh) -> list[Node] | None:
    """Row statistics over the vocabulary, then the loss of each row."""
    logits, target, ignore, smoothing = node.args
    rows, vocabulary = types[logits.name].shape
    wide = "f64" if types[logits.name].dtype == "f64" else "f32"
    stats = fresh()
    dtype = first_type(node).dtype
    return [
        _like(
            node,
            "autoshard.xent_stats.default",
            (logits, target, 0),
            stats,
            TensorType((rows, 4), wide),
        ),
        replace(
            node,
            op="autoshard.xent_finish.default",
            args=(Ref(stats), target, ignore, smoothing, vocabulary, Dtype(dtype)),
            kwargs=(),
        ),
    ]


def _xent_backward(node: Node, types: Types, fresh: Fresh) -> list[Node] | None:
    grad, logits, target, lse, ignore, smoothing = node.args
    vocabulary = types[logits.name].shape[1]
    args = (grad, logits, target, lse, ignore, smoothing, vocabulary, 0)
    return [replace(node, op="autoshard.xent_part_backward.default", args=args, kwargs=())]


REWRITES: Mapping[str, Rewrite] = MappingProxyType(
    {
        "aten.addmm.default": _addmm,
        "aten.baddbmm.default": _addmm,
        "aten.mean.default": _mean,
        "aten.mean.dim": _mean,
        "aten.zeros_like.default": _filled(0),
        "aten.ones_like.default": _filled(1),
        # no values are promised, so zeros will do, on every rank
        "aten.empty.memory_format": _filled(0),
        "aten.empty_like.default": _filled(0),
        "aten.new_empty.default": _filled(0),
        "aten.new_empty_strided.default": _filled(0),
        "aten.full_like.default": _filled(None),
        "aten.new_zeros.default": _filled(0),
        "aten.new_ones.default": _filled(1),
        "aten.new_full.default": _filled(None),
        "aten.zeros.default": _filled(0),
        "aten.zero.default": _filled(0),
        "aten._conj.default": _conjugated,
        "aten.ones.default": _filled(1),
        "aten.copy.default": _overwrite,
        "aten.fill.Tensor": _overwrite,
        "aten.fill.Scalar": _overwrite,
        "autoshard.xent.default": _xent,
        "autoshard.xent_backward.default": _xent_backward,
        **decompose_loss.REWRITES,
        **decompose_norm.REWRITES,
    }
)
