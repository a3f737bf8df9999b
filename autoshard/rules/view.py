"""Views: dims as products of common factors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from math import prod
from types import MappingProxyType

from autoshard.ir import Node, TensorType
from autoshard.rules.core import Builder, Dim, Dims, Factored, Localizer, RuleFn, broadcast
from autoshard.rules.local import LocalCall, shape_arg


def reshape_factors(source: Sequence[int], target: Sequence[int]) -> tuple[list[int], Dims, Dims, set[int]]:
    """(sizes, dims of the source, dims of the target, fixed factors) of a reshape.

    Both shapes are cut where their running products meet; inside such a group every boundary of
    either side becomes a boundary between factors if all of them divide each other, else the group
    is one fixed factor per dim.
    """
    sizes: list[int] = []
    fixed: set[int] = set()
    left: list[tuple[int, ...]] = [()] * len(source)
    right: list[tuple[int, ...]] = [()] * len(target)
    for from_dims, to_dims in _groups(source, target):
        bounds = sorted({*_bounds(source, from_dims), *_bounds(target, to_dims)})
        if all(b % a == 0 for a, b in pairwise(bounds)):
            _refine(source, from_dims, bounds, sizes, left)
            start = len(sizes) - (len(bounds) - 1)
            _assign(target, to_dims, bounds, start, right)
        else:
            for shape, dims, out in ((source, from_dims, left), (target, to_dims, right)):
                for dim in dims:
                    fixed.add(len(sizes))
                    out[dim] = (len(sizes),)
                    sizes.append(shape[dim])
    return sizes, tuple(left), tuple(right), fixed


def _groups(source: Sequence[int], target: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Dims of both sides cut into the smallest groups with equal products; size-1 dims left out."""
    a = [d for d, n in enumerate(source) if n != 1]
    b = [d for d, n in enumerate(target) if n != 1]
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(a) and j < len(b):
        ga, gb = [a[i]], [b[j]]
        i, j = i + 1, j + 1
        pa, pb = source[ga[0]], target[gb[0]]
        while pa != pb:
            if pa < pb:
                pa *= source[a[i]]
                ga.append(a[i])
                i += 1
            else:
                pb *= target[b[j]]
                gb.append(b[j])
                j += 1
        groups.append((ga, gb))
    return groups


def _bounds(shape: Sequence[int], dims: Sequence[int]) -> list[int]:
    return [prod(shape[d] for d in dims[:k]) for k in range(len(dims) + 1)]


def _refine(
    shape: Sequence[int], dims: Sequence[int], bounds: list[int], sizes: list[int], out: list[tuple[int, ...]]
) -> None:
    start = len(sizes)
    sizes.extend(b // a for a, b in pairwise(bounds))
    _assign(shape, dims, bounds, start, out)


def _assign(
    shape: Sequence[int], dims: Sequence[int], bounds: list[int], start: int, out: list[tuple[int, ...]]
) -> None:
    own = _bounds(shape, dims)
    for k, dim in enumerate(dims):
        first, last = bounds.index(own[k]), bounds.index(own[k + 1])
        out[dim] = tuple(start + f for f in range(first, last))


def _linear(ins: Sequence[TensorType]) -> tuple[tuple[int, ...], ...]:
    return ((0,),) if ins[0].is_float else ()


def reshape(node: Node, ins: Sequence[TensorType]) -> Factored:
    out = node.types[0]
    assert out is not None
    sizes, left, right, fixed = reshape_factors(ins[0].shape, out.shape)
    return Factored(
        tuple(sizes), (left,), (right,), frozenset(fixed), (), _linear(ins), "view", 0.0, shape_arg(1)
    )


def _moved(node: Node, ins: Sequence[TensorType], order: Sequence[int]) -> Factored:
    """A permutation: output dim k is input dim order[k]."""
    build = Builder()
    dims = build.dims(ins[0].shape)
    out = tuple(dims[d] for d in order)
    return Factored(tuple(build.sizes), (dims,), (out,), linear=_linear(ins), kind="view")


def permute(node: Node, ins: Sequence[TensorType]) -> Factored:
    rank = len(ins[0].shape)
    return _moved(node, ins, [d % rank for d in node.args[1]])


def transpose(node: Node, ins: Sequence[TensorType]) -> Factored:
    rank = len(ins[0].shape)
    order = list(range(rank))
    a, b = node.args[1] % rank, node.args[2] % rank
    order[a], order[b] = order[b], order[a]
    return _moved(node, ins, order)


def t(node: Node, ins: Sequence[TensorType]) -> Factored:
    return _moved(node, ins, list(range(len(ins[0].shape)))[::-1])


def expand(node: Node, ins: Sequence[TensorType]) -> Factored:
    rule = broadcast(ins, node.types, kind="view", linear=_linear(ins), local=shape_arg(1))
    return rule


def unsqueeze(node: Node, ins: Sequence[TensorType]) -> Factored:
    build = Builder()
    dims = build.dims(ins[0].shape)
    at = node.args[1] % (len(dims) + 1)
    return Factored(
        tuple(build.sizes), (dims,), ((*dims[:at], (), *dims[at:]),), linear=_linear(ins), kind="view"
    )


def squeeze(node: Node, ins: Sequence[TensorType]) -> Factored:
    rank = len(ins[0].shape)
    raw = node.arg(1, "dim", tuple(range(rank)))
    chosen = {d % rank for d in (raw if isinstance(raw, tuple) else (raw,))}
    gone = {d for d in chosen if ins[0].shape[d] == 1}
    build = Builder()
    dims = build.dims(ins[0].shape)
    out = tuple(x for d, x in enumerate(dims) if d not in gone)
    local = _squeezed(tuple(sorted(gone)))
    return Factored(tuple(build.sizes), (dims,), (out,), linear=_linear(ins), kind="view", local=local)


def _squeezed(gone: tuple[int, ...]) -> Localizer:
    """Removes just these dims: on a shard, others may have size 1 too."""

    def localize(call: LocalCall) -> Node:
        return replace(call.node, op="aten.squeeze.dims", args=(call.node.args[0], gone), kwargs=())

    return localize


def slice_(node: Node, ins: Sequence[TensorType]) -> Factored:
    """A slice of a dim; the dim must be whole unless all of it is taken."""
    out = node.types[0]
    assert out is not None
    dim = node.arg(1, "dim", 0) % len(ins[0].shape)
    build = Builder()
    dims = build.dims(ins[0].shape)
    if out.shape == ins[0].shape and node.arg(4, "step", 1) == 1:
        return Factored(tuple(build.sizes), (dims,), (dims,), linear=_linear(ins), kind="view", local=_whole)
    fixed = frozenset(dims[dim])
    after = list(dims)
    after[dim] = build.new(out.shape[dim])
    fixed |= frozenset(after[dim])
    return Factored(tuple(build.sizes), (dims,), (tuple(after),), fixed, linear=_linear(ins), kind="view")


def _whole(call: LocalCall) -> Node:
    """A slice that takes all is the value itself, whatever bounds were written."""
    return replace(call.node, op="aten.alias.default", args=call.node.args[:1], kwargs=())


def slice_backward(node: Node, ins: Sequence[TensorType]) -> Factored:
    """Zeros of the size of the slice's input with the gradient put in its place."""
    return _put_back(node, ins, node.args[2])


def select(node: Node, ins: Sequence[TensorType]) -> Factored:
    dim = node.args[1] % len(ins[0].shape)
    build = Builder()
    dims = build.dims(ins[0].shape)
    out = dims[:dim] + dims[dim + 1 :]
    return Factored(
        tuple(build.sizes), (dims,), (out,), frozenset(dims[dim]), linear=_linear(ins), kind="view"
    )


def select_backward(node: Node, ins: Sequence[TensorType]) -> Factored:
    out = node.types[0]
    assert out is not None
    dim = node.args[2] % len(out.shape)
    build = Builder()
    dims = build.dims(out.shape)
    grad = dims[:dim] + dims[dim + 1 :]
    return Factored(
        tuple(build.sizes), (grad,), (dims,), frozenset(dims[dim]), linear=_linear(ins), local=shape_arg(1)
    )


def _put_back(node: Node, ins: Sequence[TensorType], raw_dim: int) -> Factored:
    out = node.types[0]
    assert out is not None
    dim = raw_dim % len(out.shape)
    build = Builder()
    dims = list(build.dims(out.shape))
    grad = list(dims)
    grad[dim] = build.new(ins[0].shape[dim])
    fixed = frozenset(dims[dim]) | frozenset(grad[dim])
    return Factored(
        tuple(build.sizes), (tuple(grad),), (tuple(dims),), fixed, linear=_linear(ins), local=shape_arg(1)
    )


def split(node: Node, ins: Sequence[TensorType]) -> Factored:
    """Equal parts: the dim is (parts, part), and the part may be split; unequal parts keep it whole."""
    dim = node.arg(2, "dim", 0) % len(ins[0].shape)
    outs = [o for o in node.types if o is not None]
    build = Builder()
    dims = list(build.dims(ins[0].shape))
    parts = [o.shape[dim] for o in outs]
    fixed: set[int] = set()
    if len(set(parts)) == 1 and parts[0] * len(parts) == ins[0].shape[dim]:
        for factor in dims[dim]:
            build.sizes[factor] = len(parts)
            fixed.add(factor)
        part = build.new(parts[0])
        dims[dim] = (*dims[dim], *part)
        afters = [part] * len(parts)
    else:
        fixed.update(dims[dim])
        afters = [build.new(n) for n in parts]
        fixed.update(f for a in afters for f in a)
    laid = tuple((*dims[:dim], a, *dims[dim + 1 :]) for a in afters)
    return Factored(
        tuple(build.sizes),
        (tuple(dims),),
        laid,
        frozenset(fixed),
        linear=_linear(ins),
        kind="view",
        local=_local_split,
    )


def _local_split(call: LocalCall) -> Node:
    dim = call.node.arg(2, "dim", 0) % len(call.ins[0].shape)
    sizes = tuple(call.out_shape(k)[dim] for k in range(len(call.node.types)))
    given = call.node.args[1]
    return call.with_args({1: sizes if isinstance(given, tuple) else sizes[0]})


def unbind(node: Node, ins: Sequence[TensorType]) -> Factored:
    dim = node.arg(1, "dim", 0) % len(ins[0].shape)
    build = Builder()
    dims = build.dims(ins[0].shape)
    out = dims[:dim] + dims[dim + 1 :]
    return Factored(
        tuple(build.sizes),
        (dims,),
        tuple(out for _ in node.types),
        frozenset(dims[dim]),
        linear=_linear(ins),
        kind="view",
    )


def cat(node: Node, ins: Sequence[TensorType]) -> Factored:
    """Equal parts: the result's dim is (parts, part); unequal parts keep the dim whole."""
    out = node.types[0]
    assert out is not None
    dim = node.arg(1, "dim", 0) % len(out.shape)
    build = Builder()
    dims = list(build.dims(out.shape))
    # torch lets an empty tensor of one dim join any others
    parts = [t.shape[dim] if len(t.shape) == len(out.shape) else 0 for t in ins]
    fixed: set[int] = set(dims[dim])
    linear = (tuple(range(len(ins))),) if all(t.is_float for t in ins) else ()
    if len(set(parts)) == 1 and dims[dim]:
        build.sizes[dims[dim][0]] = len(parts)
        part = build.new(parts[0])
        befores = [part] * len(parts)
        dims[dim] = (*dims[dim], *part)
    else:
        befores = [build.new(n) for n in parts]
        fixed.update(f for b in befores for f in b)
    laid = tuple(
        (*dims[:dim], b, *dims[dim + 1 :]) if len(t.shape) == len(out.shape) else (b,)
        for b, t in zip(befores, ins, strict=True)
    )
    return Factored(tuple(build.sizes), laid, (tuple(dims),), frozenset(fixed), linear=linear)


def stack(node: Node, ins: Sequence[TensorType]) -> Factored:
    out = node.types[0]
    assert out is not None
    dim = node.arg(1, "dim", 0) % len(out.shape)
    build = Builder()
    dims = build.dims(out.shape)
    each = dims[:dim] + dims[dim + 1 :]
    linear = (tuple(range(len(ins))),) if all(t.is_float for t in ins) else ()
    return Factored(tuple(build.sizes), (each,) * len(ins), (dims,), frozenset(dims[dim]), linear=linear)


def repeat(node: Node, ins: Sequence[TensorType]) -> Factored:
    """Each repeated dim is (times, own); only the times may be split where it is over size-1 dims."""
    out = node.types[0]
    assert out is not None
    lead = len(out.shape) - len(ins[0].shape)
    build = Builder()
    own: list[Dim] = []
    after: list[Dim] = []
    fixed: set[int] = set()
    for d, n in enumerate(out.shape):
        before = ins[0].shape[d - lead] if d >= lead else 1
        times = build.new(n // before)
        part = build.new(before)
        fixed.update(times)
        after.append((*times, *part))
        if d >= lead:
            own.append(part)
    return Factored(tuple(build.sizes), (tuple(own),), (tuple(after),), frozenset(fixed), linear=_linear(ins))


def slice_scatter(node: Node, ins: Sequence[TensorType]) -> Factored:
    """x with src put in place of a slice of a dim; the dim stays whole."""
    dim = node.arg(2, "dim", 0) % len(ins[0].shape)
    build = Builder()
    dims = list(build.dims(ins[0].shape))
    source = list(dims)
    source[dim] = build.new(ins[1].shape[dim])
    fixed = frozenset((*dims[dim], *source[dim]))
    return Factored(
        tuple(build.sizes), (tuple(dims), tuple(source)), (tuple(dims),), fixed, linear=_both(ins)
    )


def select_scatter(node: Node, ins: Sequence[TensorType]) -> Factored:
    """x with src put in place of one index of a dim; the dim stays whole."""
    dim = node.arg(2, "dim") % len(ins[0].shape)
    build = Builder()
    dims = build.dims(ins[0].shape)
    source = dims[:dim] + dims[dim + 1 :]
    return Factored(tuple(build.sizes), (dims, source), (dims,), frozenset(dims[dim]), linear=_both(ins))


def _both(ins: Sequence[TensorType]) -> tuple[tuple[int, ...], ...]:
    return ((0, 1),) if ins[0].is_float else ()


def roll(node: Node, ins: Sequence[TensorType]) -> Factored:
    """Rolled dims stay whole; without dims all do, since the flattened elements are rolled."""
    rank = len(ins[0].shape)
    raw = node.arg(2, "dims", ())
    rolled = {d % rank for d in raw} if raw else range(rank)
    return broadcast(ins, node.types, fixed_dims=tuple(rolled), linear=_linear(ins))


def unfold(node: Node, ins: Sequence[TensorType]) -> Factored:
    """Windows along a dim, which stays whole: [..., n, ...] -> [..., windows, ..., size]."""
    out = node.types[0]
    assert out is not None
    return _windows(ins[0].shape, out.shape, node.args[1], ins, backward=False)


def unfold_backward(node: Node, ins: Sequence[TensorType]) -> Factored:
    out = node.types[0]
    assert out is not None
    return _windows(out.shape, ins[0].shape, node.args[2], ins, backward=True)


def _windows(
    shape: Sequence[int], windows: Sequence[int], raw_dim: int, ins: Sequence[TensorType], *, backward: bool
) -> Factored:
    dim = raw_dim % len(shape)
    build = Builder()
    before = build.dims(shape)
    at, inside = build.new(windows[dim]), build.new(windows[-1])
    after = (*before[:dim], at, *before[dim + 1 :], inside)
    fixed = frozenset((*before[dim], *at, *inside))
    if backward:
        sizes = tuple(build.sizes)
        return Factored(sizes, (after,), (before,), fixed, linear=_linear(ins), local=shape_arg(1))
    return Factored(tuple(build.sizes), (before,), (after,), fixed, linear=_linear(ins), kind="view")


def diagonal(node: Node, ins: Sequence[TensorType]) -> Factored:
    """The diagonal of two dims, which stay whole, as the last dim."""
    out = node.types[0]
    assert out is not None
    raw = (node.arg(2, "dim1", 0), node.arg(3, "dim2", 1))
    sizes, full, line, fixed = _diagonal(ins[0].shape, out.shape[-1], raw)
    return Factored(sizes, (full,), (line,), fixed, linear=_linear(ins), kind="view")


def diagonal_backward(node: Node, ins: Sequence[TensorType]) -> Factored:
    out = node.types[0]
    assert out is not None
    sizes, full, line, fixed = _diagonal(out.shape, ins[0].shape[-1], node.args[3:5])
    return Factored(sizes, (line,), (full,), fixed, linear=_linear(ins), local=shape_arg(1))


def diagonal_scatter(node: Node, ins: Sequence[TensorType]) -> Factored:
    """A tensor with other values on the diagonal of two dims, which stay whole."""
    raw = (node.arg(3, "dim1", 0), node.arg(4, "dim2", 1))
    sizes, full, line, fixed = _diagonal(ins[0].shape, ins[1].shape[-1], raw)
    return Factored(sizes, (full, line), (full,), fixed, linear=((0, 1),) if ins[0].is_float else ())


def diag_embed(node: Node, ins: Sequence[TensorType]) -> Factored:
    """The last dim as the diagonal of two new ones, which stay whole."""
    out = node.types[0]
    assert out is not None
    raw = (node.arg(2, "dim1", -2), node.arg(3, "dim2", -1))
    sizes, full, line, fixed = _diagonal(out.shape, ins[0].shape[-1], raw)
    return Factored(sizes, (line,), (full,), fixed, linear=_linear(ins))


def _diagonal(
    shape: Sequence[int], length: int, raw: Sequence[int]
) -> tuple[tuple[int, ...], Dims, Dims, frozenset[int]]:
    taken = {d % len(shape) for d in raw}
    build = Builder()
    full = build.dims(shape)
    own = build.new(length)
    line = (*(x for d, x in enumerate(full) if d not in taken), own)
    return tuple(build.sizes), full, line, frozenset((*own, *(f for d in taken for f in full[d])))


def view_as_complex(node: Node, ins: Sequence[TensorType]) -> Factored:
    """[..., 2] -> [...]; the pairs stay whole."""
    build = Builder()
    dims = build.dims(ins[0].shape)
    return Factored(
        tuple(build.sizes), (dims,), (dims[:-1],), frozenset(dims[-1]), linear=((0,),), kind="view"
    )


def view_as_real(node: Node, ins: Sequence[TensorType]) -> Factored:
    """[...] -> [..., 2]"""
    build = Builder()
    dims, pair = build.dims(ins[0].shape), build.new(2)
    return Factored(
        tuple(build.sizes), (dims,), ((*dims, pair),), frozenset(pair), linear=((0,),), kind="view"
    )


def pad(node: Node, ins: Sequence[TensorType]) -> Factored:
    """Padding (pairs for the last dims first); padded dims stay whole."""
    widths = node.args[1]
    rank = len(ins[0].shape)
    build = Builder()
    dims = build.dims(ins[0].shape)
    out = list(dims)
    fixed: set[int] = set()
    for k in range(len(widths) // 2):
        if widths[2 * k] or widths[2 * k + 1]:
            d = rank - 1 - k
            out[d] = build.new(ins[0].shape[d] + widths[2 * k] + widths[2 * k + 1])
            fixed.update((*dims[d], *out[d]))
    linear = ((0,),) if node.arg(2, "value", 0) == 0 and ins[0].is_float else ()
    return Factored(tuple(build.sizes), (dims,), (tuple(out),), frozenset(fixed), linear=linear)


RULES: Mapping[str, RuleFn] = MappingProxyType(
    {
        "aten.view.default": reshape,
        "aten.reshape.default": reshape,
        "aten._unsafe_view.default": reshape,
        "aten.permute.default": permute,
        "aten.transpose.int": transpose,
        "aten.t.default": t,
        "aten.expand.default": expand,
        "aten.unsqueeze.default": unsqueeze,
        "aten.squeeze.default": squeeze,
        "aten.squeeze.dim": squeeze,
        "aten.squeeze.dims": squeeze,
        "aten.slice.Tensor": slice_,
        "aten.slice_backward.default": slice_backward,
        "aten.select.int": select,
        "aten.select_backward.default": select_backward,
        "aten.split.Tensor": split,
        "aten.unsafe_split.Tensor": split,
        "aten.split_with_sizes.default": split,
        "aten.unbind.int": unbind,
        "aten.cat.default": cat,
        "aten.stack.default": stack,
        "aten.repeat.default": repeat,
        "aten.slice_scatter.default": slice_scatter,
        "aten.select_scatter.default": select_scatter,
        "aten.constant_pad_nd.default": pad,
        "aten.roll.default": roll,
        "aten.unfold.default": unfold,
        "aten.unfold_backward.default": unfold_backward,
        "aten.diagonal.default": diagonal,
        "aten.diagonal_backward.default": diagonal_backward,
        "aten.diagonal_scatter.default": diagonal_scatter,
        "aten.diag_embed.default": diag_embed,
        "aten.view_as_complex.default": view_as_complex,
        "aten.view_as_real.default": view_as_real,
    }
)
