"""Contractions: matrix products and convolutions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from types import MappingProxyType

from autoshard.ir import Arg, Node, Ref, TensorType
from autoshard.rules.core import Builder, Dim, Factored, RuleFn, einsum, opaque
from autoshard.rules.local import LocalCall


def mm(node: Node, ins: Sequence[TensorType]) -> Factored:
    (m, k), n = ins[0].shape, ins[1].shape[1]
    spec, flops = "m k, k n -> m n", 2.0 * m * k * n
    rule = einsum(spec, ins, node.types, linear=((0,), (1,)), kind="matmul", flops=flops)
    return replace(rule, kernel="product")


def bmm(node: Node, ins: Sequence[TensorType]) -> Factored:
    (b, m, k), n = ins[0].shape, ins[1].shape[2]
    spec, flops = "b m k, b k n -> b m n", 2.0 * b * m * k * n
    rule = einsum(spec, ins, node.types, linear=((0,), (1,)), kind="matmul", flops=flops)
    return replace(rule, kernel="product")


def addmm(node: Node, ins: Sequence[TensorType]) -> Factored:
    return _plus(ins[0], (mm if len(ins[1].shape) == 2 else bmm)(node, ins[1:]))


def _plus(bias: TensorType, rule: Factored) -> Factored:
    """A product plus a tensor that must be added once: the sum stays whole."""
    out = rule.outputs[0]
    assert out is not None
    lead = len(out) - len(bias.shape)
    added = tuple(d if n != 1 else () for d, n in zip(out[lead:], bias.shape, strict=True))
    summed = frozenset(f for f, _ in rule.reduce)
    return replace(rule, inputs=(added, *rule.inputs), fixed=summed, reduce=(), linear=())


def mv(node: Node, ins: Sequence[TensorType]) -> Factored:
    return einsum("m k, k -> m", ins, node.types, linear=((0,), (1,)), flops=2.0 * ins[0].numel)


def addmv(node: Node, ins: Sequence[TensorType]) -> Factored:
    return _plus(ins[0], mv(node, ins[1:]))


def addr(node: Node, ins: Sequence[TensorType]) -> Factored:
    return _plus(ins[0], einsum("m, n -> m n", ins[1:], node.types))


def addbmm(node: Node, ins: Sequence[TensorType]) -> Factored:
    flops = 2.0 * ins[1].numel * ins[2].shape[2]
    rule = einsum("b m k, b k n -> m n", ins[1:], node.types, kind="matmul", flops=flops)
    return _plus(ins[0], rule)


def trilinear(node: Node, ins: Sequence[TensorType]) -> Factored:
    """Three tensors, each with dims of size 1 put in where it has none, multiplied and summed over dims."""
    absent, summed = node.args[3:6], node.args[6]
    rank = len(ins[0].shape) + len(absent[0])
    shapes = [iter(x.shape) for x in ins]
    sizes = [[1 if d in absent[k] else next(shapes[k]) for d in range(rank)] for k in range(3)]
    full = [max(each) for each in zip(*sizes, strict=True)]
    build = Builder()
    dims = build.dims(full)
    inputs = tuple(
        tuple(dims[d] if sizes[k][d] == full[d] else () for d in range(rank) if d not in absent[k])
        for k in range(3)
    )
    return Factored(
        tuple(build.sizes),
        inputs,
        (tuple(dims[d] for d in range(rank) if d not in summed),),
        reduce=tuple((f, "sum") for d in summed for f in dims[d]),
        linear=((0,), (1,), (2,)),
        kind="matmul",
        flops=2.0 * prod(full),
    )


def dot(node: Node, ins: Sequence[TensorType]) -> Factored:
    return einsum("k, k -> ", ins, node.types, linear=((0,), (1,)), flops=2.0 * ins[0].numel)


def convolution(node: Node, ins: Sequence[TensorType]) -> Factored:
    """Input [b, c, ...], weight [o, c/groups, k...], bias [o]; batch and output channels may be split, and
    with a group for each input channel these, too."""
    out = node.types[0]
    assert out is not None
    build = Builder()
    transposed, groups = node.args[6], node.args[8]
    batch = build.new(ins[0].shape[0])
    channels, new, still = _channels(build, ins[0], out, transposed, groups)
    space = build.dims(ins[0].shape[2:])
    after = build.dims(out.shape[2:])
    weight_in = build.new(ins[1].shape[1])
    kernel = build.dims(ins[1].shape[2:])
    laid = [(batch, channels, *space), (new, weight_in, *kernel), (new,)]
    fixed = {*still, *(f for d in (weight_in, *space, *after, *kernel) for f in d)}
    if transposed:
        laid = [(batch, channels, *space), tuple(build.dims(ins[1].shape)), (new,)]
        fixed.update(range(len(build.sizes)))
        fixed.difference_update(batch)
    flops = 2.0 * out.numel * prod(ins[1].shape[1:])
    return Factored(
        tuple(build.sizes),
        tuple(laid[: len(ins)]),
        ((batch, new, *after),),
        frozenset(fixed),
        kind="matmul",
        flops=flops,
        local=_local_groups if _is_depthwise(ins[0], transposed, groups) else None,
    )


def _is_depthwise(image: TensorType, transposed: bool, groups: int) -> bool:
    """Whether each input channel is a group."""
    return not transposed and groups == image.shape[1]


def _channels(
    build: Builder, image: TensorType, out: TensorType, transposed: bool, groups: int
) -> tuple[Dim, Dim, Dim]:
    """Dims of the channels of a convolution's input and of its output, and those of their factors that stay
    whole. Where each input channel is a group, its output channels go with it."""
    channels = build.new(image.shape[1])
    if _is_depthwise(image, transposed, groups):
        return channels, (*channels, *build.new(out.shape[1] // groups)), ()
    new = build.new(out.shape[1])
    return channels, new, (*channels, *(new if groups > 1 or transposed else ()))


def convolution_backward(node: Node, ins: Sequence[TensorType]) -> Factored:
    """(input gradient, weight gradient, bias gradient) from gradient, input and weight."""
    grad, image, weight = ins
    build = Builder()
    transposed, groups = node.args[7], node.args[9]
    batch = build.new(image.shape[0])
    channels, new, still = _channels(build, image, grad, transposed, groups)
    space, after = build.dims(image.shape[2:]), build.dims(grad.shape[2:])
    weight_in = build.new(weight.shape[1])
    kernel = build.dims(weight.shape[2:])
    fixed = {*still, *(f for d in (weight_in, *space, *after, *kernel) for f in d)}
    weight_dims: tuple[Dim, ...] = (new, weight_in, *kernel)
    if transposed:
        weight_dims = build.dims(weight.shape)
        fixed.update(range(len(build.sizes)))
        fixed.difference_update(batch)
    outs = ((batch, channels, *space), weight_dims, (new,))
    laid = tuple(d if t is not None else None for d, t in zip(outs, node.types, strict=True))
    reduce = [(f, "sum") for f in (*batch, *new) if f not in still and f not in channels]
    # of the input gradient and the weight gradient, those that are made
    products = sum(t is not None for t in node.types[:2])
    return Factored(
        tuple(build.sizes),
        ((batch, new, *after), (batch, channels, *space), weight_dims),
        laid,
        frozenset(fixed),
        tuple(reduce),
        ((0,),),
        "matmul",
        2.0 * products * grad.numel * prod(weight.shape[1:]),
        _local_gradients,
    )


def _local_groups(call: LocalCall) -> Node:
    """As many groups as the rank has input channels."""
    return call.with_args({8: call.in_shape(0)[1]})


def _local_gradients(call: LocalCall) -> Node:
    """bias_sizes is the bias's local shape; groups as in `_local_groups`."""
    node = call.node
    depthwise = _is_depthwise(call.ins[1], node.args[7], node.args[9])
    local: dict[int, Arg] = {9: call.in_shape(1)[1]} if depthwise else {}
    if node.args[3] is not None:
        local[3] = (call.in_shape(0)[1],)
    return call.with_args(local)


def grouped_mm(node: Node, ins: Sequence[TensorType]) -> Factored:
    """Rows sorted by expert [t, k] times one weight per expert [e, k, n]; rows and experts stay whole."""
    return _grouped(ins, node.types, 1)


def aligned_grouped_mm(node: Node, ins: Sequence[TensorType]) -> Factored:
    """As `grouped_mm`, for a kernel that wants rows of whole 16-byte words; either side may be ragged."""
    if isinstance(node.arg(3, "bias"), Ref):
        return opaque(ins, node.types)
    return _grouped(ins, node.types, max(1, 16 * ins[0].numel // max(1, ins[0].nbytes)))


def _grouped(ins: Sequence[TensorType], outs: Sequence[TensorType | None], word: int) -> Factored:
    """left [e?, m, k] @ right [e?, k, n], with offsets [e] into the ragged dim unless both have experts.

    word: elements that a shard of a row must be a multiple of.
    """
    left, right = ins[:2]
    build = Builder()
    fixed: set[int] = set()

    def words(size: int) -> Dim:
        full = build.new(size // word) if size % word == 0 else ()
        rest = build.new(word if size % word == 0 else size)
        fixed.update(rest)
        return (*full, *rest)

    m, k, n = (words(size) for size in (left.shape[-2], left.shape[-1], right.shape[-1]))
    experts = [t.shape[0] for t in (*ins[:2], *outs) if t is not None and len(t.shape) == 3]
    e = build.new(experts[0])
    if len(ins) > 2:
        ragged = {(2, 3): m, (3, 2): n, (2, 2): k}[len(left.shape), len(right.shape)]
        fixed.update(e, ragged)
    dims = [(e, m, k)[-len(left.shape) :], (e, k, n)[-len(right.shape) :], (e,)]
    out = outs[0]
    assert out is not None
    return Factored(
        tuple(build.sizes),
        tuple(dims[: len(ins)]),
        ((e, m, n)[-len(out.shape) :],),
        frozenset(fixed),
        tuple((f, "sum") for f in k),
        ((0,), (1,)),
        "matmul",
        2.0 * prod(left.shape[-2:]) * right.shape[-1] * (experts[0] if len(ins) == 2 else 1),
    )


RULES: Mapping[str, RuleFn] = MappingProxyType(
    {
        "aten.mm.default": mm,
        "aten.bmm.default": bmm,
        "aten.addmm.default": addmm,
        "aten.baddbmm.default": addmm,
        "aten.mv.default": mv,
        "aten.addmv.default": addmv,
        "aten.addr.default": addr,
        "aten.addbmm.default": addbmm,
        "aten._trilinear.default": trilinear,
        "aten.dot.default": dot,
        "aten.vdot.default": dot,
        "aten.convolution.default": convolution,
        "aten.convolution_backward.default": convolution_backward,
    }
)
