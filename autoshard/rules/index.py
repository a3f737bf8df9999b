"""Indexing: the indexed dims stay whole, all others may be split."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from autoshard.ir import Arg, Node, Ref, TensorType
from autoshard.rules.core import Builder, Dim, Dims, Factored, Localizer, RuleFn, opaque
from autoshard.rules.local import LocalCall

#: element types of indices that say of each element whether it is meant
_MASKS = ("bool", "u8")


def _aligned(shape: Sequence[int], common: Sequence[Dim], sizes: Sequence[int]) -> Dims:
    lead = len(common) - len(shape)
    return tuple(common[lead + k] if n != 1 and n == sizes[lead + k] else () for k, n in enumerate(shape))


def _layout(
    x_shape: Sequence[int], indices: Sequence[Arg], index_types: Sequence[TensorType], build: Builder
) -> tuple[Dims, Dims, list[Dims], set[int]]:
    """Dims of x, of x[indices], of each index tensor, and the fixed factors (the indexed dims)."""
    x_dims = build.dims(x_shape)
    where = [d for d, i in enumerate(indices) if isinstance(i, Ref)]
    rank = max(len(t.shape) for t in index_types)
    sizes = [1] * rank
    for type_ in index_types:
        for k, n in enumerate(type_.shape):
            sizes[rank - len(type_.shape) + k] = max(sizes[rank - len(type_.shape) + k], n)
    common = build.dims(sizes)
    rest = [x for d, x in enumerate(x_dims) if d not in where]
    adjacent = where == list(range(where[0], where[-1] + 1))
    at = where[0] if adjacent else 0
    out = (*rest[:at], *common, *rest[at:])
    fixed = {f for d in where for f in x_dims[d]}
    return x_dims, out, [_aligned(t.shape, common, sizes) for t in index_types], fixed


def index(node: Node, ins: Sequence[TensorType]) -> Factored:
    """x[indices]: dims of x without an index, and the dims of the index tensors, may be split."""
    build = Builder()
    x, out, indices, fixed = _layout(ins[0].shape, node.args[1], ins[1:], build)
    linear = ((0,),) if ins[0].is_float else ()
    return Factored(tuple(build.sizes), (x, *indices), (out,), frozenset(fixed), linear=linear)


def index_put(node: Node, ins: Sequence[TensorType]) -> Factored:
    """x with values put (or added) at indices; only dims without an index may be split.

    If values are added, the dims of the index tensors may be split too: every rank adds what it has.
    """
    if any(t.dtype in _MASKS for t in ins[1:-1]):
        return _mask_put(node, ins)
    build = Builder()
    x, shape, indices, fixed = _layout(ins[0].shape, node.args[1], ins[1:-1], build)
    where = {f for dims in indices for d in dims for f in d}
    sizes = [build.sizes[d[0]] if d else 1 for d in shape]
    values = _aligned(ins[-1].shape, shape, sizes)
    accumulate = bool(node.arg(3, "accumulate", False))
    linear = ((0, len(ins) - 1),) if accumulate and ins[0].is_float else ()
    dims = (x, *indices, values)
    if accumulate and ins[0].dtype != "bool":
        return _added(tuple(build.sizes), dims, frozenset(fixed), where, linear, _local_index_add)
    return Factored(tuple(build.sizes), dims, (x,), frozenset(fixed | where), linear=linear)


def _mask_put(node: Node, ins: Sequence[TensorType]) -> Factored:
    """x with values put (or added) where a mask is true, which has as many dims of x as it has itself.

    If all elements of the mask get the same value, its dims may be split like those of x.
    """
    given, places = iter(ins[1:-1]), list[tuple[int, TensorType]]()
    at = 0
    for i in node.args[1]:
        type_ = next(given) if isinstance(i, Ref) else None
        if type_ is not None:
            places.append((at, type_))
        at += len(type_.shape) if type_ is not None and type_.dtype in _MASKS else 1
    (at, mask), values = places[0], ins[-1]
    after = len(ins[0].shape) - at - len(mask.shape)
    alike = len(values.shape) <= after or values.shape[len(values.shape) - after - 1] == 1
    if len(places) > 1 or not alike:
        return opaque(ins, node.types)
    build = Builder()
    x = build.dims(ins[0].shape)
    laid = (*x[:at], (), *x[len(x) - after :])  # of what is put, with one element for the mask
    sizes = (*ins[0].shape[:at], 1, *ins[0].shape[len(x) - after :])
    dims = (x, x[at : len(x) - after], _aligned(values.shape, laid, sizes))
    linear = ((0, 2),) if node.arg(3, "accumulate", False) and ins[0].is_float else ()
    return Factored(tuple(build.sizes), dims, (x,), linear=linear)


def _added(
    sizes: tuple[int, ...],
    dims: tuple[Dims, ...],
    fixed: frozenset[int],
    where: set[int],
    linear: tuple[tuple[int, ...], ...],
    local: Localizer,
) -> Factored:
    """The first input with terms added to it. where: factors of the terms; split, they leave partial sums."""
    return Factored(
        sizes,
        dims,
        (dims[0],),
        fixed,
        tuple((f, "sum") for f in sorted(where)),
        linear,
        local=local,
        contiguous=frozenset(where),
    )


def _local_index_add(call: LocalCall) -> Node:
    """The first rank alone counts the tensor that is added to."""
    indices = range(1, len(call.ins) - 1)
    offsets = tuple(call.in_offset(k, d) for k in indices for d in range(len(call.ins[k].shape)))
    if not any(offsets):
        return call.node
    x, where, values = call.node.args[:3]
    args = (x, where, values, offsets)
    return replace(call.node, op="autoshard.index_add_part.default", args=args, kwargs=())


def gather(node: Node, ins: Sequence[TensorType]) -> Factored:
    """x gathered along a dim by an index of the same rank."""
    dim = node.args[1] % max(1, len(ins[0].shape))
    build = Builder()
    at = build.dims(ins[1].shape)
    x, fixed = _beside(ins[0].shape, ins[1].shape, at, dim, build)
    linear = ((0,),) if ins[0].is_float else ()
    return Factored(tuple(build.sizes), (x, at), (at,), frozenset(fixed), linear=linear)


def _beside(
    shape: Sequence[int], index_shape: Sequence[int], at: Dims, dim: int, build: Builder
) -> tuple[Dims, set[int]]:
    """Dims of a tensor indexed along ``dim``: shared with the index where both have the same size."""
    fixed: set[int] = set()
    dims: list[Dim] = []
    for d, n in enumerate(shape):
        if d != dim and n == index_shape[d]:
            dims.append(at[d])
            continue
        own = build.new(n)
        fixed.update(own)
        if d != dim:
            fixed.update(at[d])
        dims.append(own)
    return tuple(dims), fixed


def scatter(node: Node, ins: Sequence[TensorType]) -> Factored:
    """x with src (a tensor or a number) written or added along a dim, which stays whole in x.

    If it is added, that dim of index and src may be split: every rank adds what it has.
    """
    dim = node.args[1] % max(1, len(ins[0].shape))
    build = Builder()
    at = build.dims(ins[1].shape)
    x, fixed = _beside(ins[0].shape, ins[1].shape, at, dim, build)
    fixed |= set(at[dim])
    rest: list[Dims] = []
    if len(ins) > 2:
        if ins[2].shape != ins[1].shape:
            fixed |= {f for d in (*x, *at) for f in d}
            own = build.dims(ins[2].shape)
            fixed |= {f for d in own for f in d}
            rest.append(own)
        else:
            rest.append(at)
    adds = node.op == "aten.scatter_add.default"
    linear = ((0, 2),) if adds and ins[0].is_float else ()
    sizes = tuple(build.sizes)
    if adds and rest[0] == at and ins[0].dtype != "bool":
        # dims other than this one are shared with x, or fixed
        where = set(at[dim])
        return _added(sizes, (x, at, at), frozenset(fixed - where), where, linear, _local_scatter_add)
    return Factored(sizes, (x, at, *rest), (x,), frozenset(fixed), linear=linear)


def _local_scatter_add(call: LocalCall) -> Node:
    """The first rank alone counts the tensor that is added to."""
    x, dim, index, src = call.node.args
    offset = call.in_offset(1, dim % len(call.ins[1].shape)) if call.ins[1].shape else 0
    if offset == 0:
        return call.node
    return replace(call.node, op="autoshard.scatter_add_part.default", args=(x, dim, index, src, (offset,)))


def index_select(node: Node, ins: Sequence[TensorType]) -> Factored:
    dim = node.args[1] % len(ins[0].shape)
    build = Builder()
    x, at = build.dims(ins[0].shape), build.dims(ins[1].shape)
    out = (*x[:dim], *(at or ((),)), *x[dim + 1 :])
    linear = ((0,),) if ins[0].is_float else ()
    return Factored(tuple(build.sizes), (x, at), (out,), frozenset(x[dim]), linear=linear)


def index_add(node: Node, ins: Sequence[TensorType]) -> Factored:
    """x with rows of src [..., k, ...] added or written at index [k] along a dim, which stays whole."""
    dim = node.args[1] % len(ins[0].shape)
    build = Builder()
    x = build.dims(ins[0].shape)
    rows = build.new(ins[2].shape[dim])
    src = (*x[:dim], rows, *x[dim + 1 :])
    linear = ((0, 2),) if ins[0].is_float else ()
    fixed = frozenset((*x[dim], *rows))
    return Factored(tuple(build.sizes), (x, (rows,), src), (x,), fixed, linear=linear)


def index_fill(node: Node, ins: Sequence[TensorType]) -> Factored:
    """x with a number (or scalar tensor) written at index [k] along a dim, which stays whole."""
    dim = node.args[1] % len(ins[0].shape)
    build = Builder()
    x, at = build.dims(ins[0].shape), build.dims(ins[1].shape)
    inputs = (x, at) if len(ins) == 2 else (x, at, ())
    fixed = frozenset((*x[dim], *(f for d in at for f in d)))
    return Factored(tuple(build.sizes), inputs, (x,), fixed)


def masked_scatter(node: Node, ins: Sequence[TensorType]) -> Factored:
    """Where each element of the source goes (or its gradient comes from) depends on the whole mask."""
    return opaque(ins, node.types)


def bucketize(node: Node, ins: Sequence[TensorType]) -> Factored:
    """Each element of the first input beside all others: its place among sorted boundaries, or whether it is
    one of them."""
    build = Builder()
    dims, others = build.dims(ins[0].shape), build.dims(ins[1].shape)
    return Factored(tuple(build.sizes), (dims, others), (dims,), frozenset(f for d in others for f in d))


def searchsorted(node: Node, ins: Sequence[TensorType]) -> Factored:
    """The place of every element of the second input among sorted rows [n] or [..., n]."""
    if len(ins) > 2:
        return opaque(ins, node.types)
    build = Builder()
    dims, own = build.dims(ins[1].shape), build.new(ins[0].shape[-1])
    lead = dims[:-1] if len(ins[0].shape) > 1 else ()
    return Factored(tuple(build.sizes), ((*lead, own), dims), (dims,), frozenset(own))


RULES: Mapping[str, RuleFn] = MappingProxyType(
    {
        "aten.index.Tensor": index,
        "aten.index_put.default": index_put,
        "aten._unsafe_index.Tensor": index,
        "aten._unsafe_index_put.default": index_put,
        "aten.index_select.default": index_select,
        "aten.gather.default": gather,
        "aten.scatter.src": scatter,
        "aten.scatter.value": scatter,
        "aten.scatter_add.default": scatter,
        "aten.scatter_reduce.two": scatter,
        "aten.index_add.default": index_add,
        "aten.index_copy.default": index_add,
        "aten.index_fill.int_Scalar": index_fill,
        "aten.index_fill.int_Tensor": index_fill,
        "aten.masked_scatter.default": masked_scatter,
        "aten.masked_scatter_backward.default": masked_scatter,
        "aten.isin.Tensor_Tensor": bucketize,
        "aten.searchsorted.Tensor": searchsorted,
        "aten.bucketize.Tensor": bucketize,
    }
)
