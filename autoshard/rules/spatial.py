"""Ops on the last dims of images and matrices: those stay whole, batch and channels may be split."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from autoshard.ir import Node, TensorType
from autoshard.rules.core import Builder, Dim, Dims, Factored, RuleFn, einsum, opaque_rule
from autoshard.rules.local import shape_arg


def _leading(
    kept: int, ins: Sequence[TensorType], outs: Sequence[TensorType | None]
) -> tuple[list[int], list[Dims], list[Dims | None], frozenset[int]]:
    """(sizes, dims of the inputs, dims of the outputs, fixed factors) if all share their first dims.

    kept: dims of the first input that stay whole; its other dims are the first ones of every tensor.
    """
    build = Builder()
    lead = build.dims(ins[0].shape[: len(ins[0].shape) - kept])
    fixed: set[int] = set()

    def laid(type_: TensorType) -> Dims:
        own = build.dims(type_.shape[len(lead) :])
        fixed.update(f for d in own for f in d)
        return lead + own

    before = [laid(t) for t in ins]
    after = [None if t is None else laid(t) for t in outs]
    return build.sizes, before, after, frozenset(fixed)


def _whole(kept: int, *, linear: bool = False, shape_at: int | None = None) -> RuleFn:
    """Rule of an op whose ``kept`` last dims stay whole.

    linear: in its first tensor. shape_at: positional argument that is the shape of the output.
    """

    def rule(node: Node, ins: Sequence[TensorType]) -> Factored:
        sizes, before, after, fixed = _leading(kept, ins, node.types)
        return Factored(
            tuple(sizes),
            tuple(before),
            tuple(after),
            fixed,
            linear=((0,),) if linear and ins[0].is_float else (),
            local=None if shape_at is None else shape_arg(shape_at),
        )

    return rule


def grid_sampler(node: Node, ins: Sequence[TensorType]) -> Factored:
    """image [n, c, h, w], grid [n, y, x, 2] -> [n, c, y, x]; of volumes with a dim more each."""
    d, z = _depth(ins[0])
    spec = f"n c {d} h w, n {z} y x two -> n c {z} y x"
    return einsum(spec, ins, node.types, fixed=f"{d} h w two", linear=((0,),))


def grid_sampler_backward(node: Node, ins: Sequence[TensorType]) -> Factored:
    """gradient [n, c, y, x], image [n, c, h, w], grid [n, y, x, 2] -> gradients of image and grid."""
    d, z = _depth(ins[1])
    spec = f"n c {z} y x, n c {d} h w, n {z} y x two -> n c {d} h w, n {z} y x two"
    return einsum(spec, ins, node.types, fixed=f"{d} h w two", linear=((0,),))


def _depth(image: TensorType) -> tuple[str, str]:
    """Names of the dim that volumes have more, before and after."""
    return ("d", "z") if len(image.shape) == 5 else ("", "")


def fft(node: Node, ins: Sequence[TensorType]) -> Factored:
    """A Fourier transform over some dims, which stay whole."""
    out = node.types[0]
    assert out is not None
    rank = len(out.shape)
    over = {d % rank for d in node.args[1]}
    build = Builder()
    before = build.dims(ins[0].shape)
    after = tuple(build.new(out.shape[d]) if d in over else x for d, x in enumerate(before))
    fixed = frozenset(f for d in over for f in (*before[d], *after[d]))
    return Factored(tuple(build.sizes), (before,), (after,), fixed, linear=((0,),))


def solve_triangular(node: Node, ins: Sequence[TensorType]) -> Factored:
    """Triangular a [..., n, n], b [..., n, k] -> [..., n, k] (b and the result turned if not ``left``)."""
    out = node.types[0]
    assert out is not None
    build = Builder()
    dims = build.dims(out.shape)
    of_a = build.new(ins[0].shape[-1])
    solved = dims[-2] if node.kwarg("left", True) else dims[-1]

    def lead(type_: TensorType) -> tuple[Dim, ...]:
        common, skipped = dims[:-2], len(out.shape) - len(type_.shape)
        return tuple(x if n != 1 else () for x, n in zip(common[skipped:], type_.shape[:-2], strict=True))

    inputs = ((*lead(ins[0]), of_a, of_a), (*lead(ins[1]), *dims[-2:]))
    return Factored(tuple(build.sizes), inputs, (dims,), frozenset((*of_a, *solved)), linear=((1,),))


def cdist(node: Node, ins: Sequence[TensorType]) -> Factored:
    """Distances of a [..., m, d] and b [..., n, d] -> [..., m, n]."""
    build = Builder()
    lead = build.dims(ins[-2].shape[:-2])
    m, n, d = build.new(ins[-2].shape[-2]), build.new(ins[-1].shape[-2]), build.new(ins[-1].shape[-1])
    return Factored(
        tuple(build.sizes), ((*lead, m, d), (*lead, n, d)), ((*lead, m, n),), frozenset(d), kind="matmul"
    )


def cdist_backward(node: Node, ins: Sequence[TensorType]) -> Factored:
    """gradient [..., m, n], a [..., m, d], b [..., n, d], distances [..., m, n] -> gradient of a."""
    build = Builder()
    lead = build.dims(ins[0].shape[:-2])
    m, n, d = build.new(ins[0].shape[-2]), build.new(ins[0].shape[-1]), build.new(ins[1].shape[-1])
    far, left, right = (*lead, m, n), (*lead, m, d), (*lead, n, d)
    reduce = tuple((f, "sum") for f in n)
    return Factored(
        tuple(build.sizes), (far, left, right, far), (left,), frozenset(), reduce, ((0,),), "matmul"
    )


def _upsampling() -> dict[str, RuleFn]:
    rules: dict[str, RuleFn] = {}
    for kind, dims in (
        ("upsample_nearest2d", 2),
        ("upsample_bilinear2d", 2),
        ("upsample_bicubic2d", 2),
        ("_upsample_nearest_exact2d", 2),
        ("_upsample_bilinear2d_aa", 2),
        ("_upsample_bicubic2d_aa", 2),
        ("upsample_nearest1d", 1),
        ("upsample_linear1d", 1),
        ("_upsample_nearest_exact1d", 1),
        ("upsample_nearest3d", 3),
        ("upsample_trilinear3d", 3),
        ("_upsample_nearest_exact3d", 3),
    ):
        rules[f"aten.{kind}.default"] = rules[f"aten.{kind}.vec"] = _whole(dims, linear=True)
        rules[f"aten.{kind}_backward.default"] = _whole(dims, linear=True, shape_at=2)
    return rules


def _padding() -> dict[str, RuleFn]:
    return {
        f"aten.{kind}_pad{dims}d{backward}.default": _whole(dims, linear=True)
        for kind in ("reflection", "replication")
        for dims in (1, 2, 3)
        for backward in ("", "_backward")
    }


RULES: Mapping[str, RuleFn] = MappingProxyType(
    {
        **_upsampling(),
        **_padding(),
        "aten.avg_pool2d.default": _whole(2, linear=True),
        "aten.avg_pool2d_backward.default": _whole(2, linear=True),
        "aten.avg_pool3d.default": _whole(3, linear=True),
        "aten.avg_pool3d_backward.default": _whole(3, linear=True),
        "aten._adaptive_avg_pool2d.default": _whole(2, linear=True),
        "aten._adaptive_avg_pool2d_backward.default": _whole(2, linear=True),
        "aten._adaptive_avg_pool3d.default": _whole(3, linear=True),
        "aten._adaptive_avg_pool3d_backward.default": _whole(3, linear=True),
        "aten.adaptive_max_pool3d.default": _whole(3),
        "aten.adaptive_max_pool3d_backward.default": _whole(3, linear=True),
        "aten.max_pool2d_with_indices.default": _whole(2),
        "aten.max_pool2d_with_indices_backward.default": _whole(2, linear=True),
        "aten.max_pool3d_with_indices.default": _whole(3),
        "aten.max_pool3d_with_indices_backward.default": _whole(3, linear=True),
        "aten.adaptive_max_pool2d.default": _whole(2),
        "aten.adaptive_max_pool2d_backward.default": _whole(2, linear=True),
        "aten.pixel_shuffle.default": _whole(3, linear=True),
        "aten.pixel_unshuffle.default": _whole(3, linear=True),
        "aten.im2col.default": _whole(3, linear=True),
        "aten.col2im.default": _whole(2, linear=True),
        "aten.grid_sampler_2d.default": grid_sampler,
        "aten.grid_sampler_2d_backward.default": grid_sampler_backward,
        "aten.grid_sampler_3d.default": grid_sampler,
        "aten.grid_sampler_3d_backward.default": grid_sampler_backward,
        "aten._fft_c2c.default": fft,
        "aten._fft_r2c.default": fft,
        "aten._fft_c2r.default": fft,
        "aten.linalg_solve_triangular.default": solve_triangular,
        "aten._cdist_forward.default": cdist,
        "aten._cdist_backward.default": cdist_backward,
        "aten._pdist_forward.default": opaque_rule,
        "aten._pdist_backward.default": opaque_rule,
    }
)
