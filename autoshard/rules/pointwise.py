"""Pointwise ops: every dim of the output is a factor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from autoshard.ir import Dtype, Node, Ref, TensorType
from autoshard.rules.core import Builder, Factored, RuleFn, broadcast

_NONLINEAR = tuple(
    """
    pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar rsqrt sqrt exp exp2 expm1 log log2 log1p tanh
    sigmoid silu gelu relu erf sin cos tan abs sign floor ceil round trunc reciprocal softplus elu
    leaky_relu hardtanh hardswish hardsigmoid mish eq.Tensor eq.Scalar ne.Tensor ne.Scalar lt.Tensor
    lt.Scalar le.Tensor le.Scalar gt.Tensor gt.Scalar ge.Tensor ge.Scalar logical_and logical_or
    logical_not logical_xor bitwise_and.Tensor bitwise_and.Scalar bitwise_or.Tensor
    bitwise_or.Scalar bitwise_not bitwise_xor.Tensor __and__.Tensor __or__.Tensor isnan isinf
    isfinite clamp clamp.Tensor clamp_min clamp_max maximum minimum fmod.Scalar fmod.Tensor
    remainder.Scalar remainder.Tensor floor_divide floor_divide.Scalar div.Tensor_mode
    div.Scalar_mode rsub.Scalar rsub.Tensor atan2 nan_to_num masked_fill.Tensor addcmul addcdiv
    lerp.Scalar lerp.Tensor copysign.Tensor full_like zeros_like ones_like empty_like threshold
    log_sigmoid_forward heaviside acos acosh asin asinh atan atanh sinh cosh erfc erfinv lgamma
    digamma sgn signbit frac logit log10 square celu hardshrink softshrink _prelu_kernel xlogy.Tensor
    logaddexp logaddexp2 hypot fmax fmin clamp_min.Tensor clamp_max.Tensor where.Scalar
    bitwise_xor.Scalar bitwise_left_shift.Tensor_Scalar bitwise_right_shift.Tensor_Scalar
    __lshift__.Scalar __rshift__.Scalar __xor__.Tensor polar complex angle copy fill.Scalar fill.Tensor
    bitwise_left_shift.Tensor bitwise_right_shift.Tensor __lshift__.Tensor __rshift__.Tensor
    bitwise_and.Scalar_Tensor bitwise_or.Scalar_Tensor bitwise_xor.Scalar_Tensor copysign.Scalar
    remainder.Scalar_Tensor xlogy.Scalar_Self xlogy.Scalar_Other round.decimals zero isneginf isposinf
    nextafter gcd lcm sinc i0 igamma igammac polygamma mvlgamma frexp.Tensor special_i0e special_i1
    special_i1e special_entr special_erfcx special_ndtri special_log_ndtr special_xlog1py special_zeta
    special_xlog1py.self_scalar special_xlog1py.other_scalar special_bessel_j0 special_bessel_j1
    special_bessel_y0 special_bessel_y1 special_spherical_bessel_j0 special_airy_ai
    special_modified_bessel_i0 special_modified_bessel_i1 special_modified_bessel_k0
    special_modified_bessel_k1 special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1
    isin.Tensor_Scalar fake_quantize_per_tensor_affine_cachemask
    _fake_quantize_per_tensor_affine_cachemask_tensor_qparams
    """.split()  # noqa: SIM905 - a table reads better than 60 quoted lines
)
#: linear in their first tensor
_LINEAR_FIRST = tuple(
    """
    neg div.Tensor div.Scalar mul.Scalar clone detach alias lift_fresh_copy gelu_backward
    silu_backward tanh_backward sigmoid_backward threshold_backward elu_backward leaky_relu_backward
    hardtanh_backward hardswish_backward hardsigmoid_backward softplus_backward mish_backward
    log_sigmoid_backward hardshrink_backward softshrink_backward _prelu_kernel_backward _conj
    logit_backward _conj_physical conj_physical deg2rad rad2deg ldexp.Tensor
    """.split()  # noqa: SIM905 - a table reads better than 60 quoted lines
)


def _plain(node: Node, ins: Sequence[TensorType]) -> Factored:
    return broadcast(ins, node.types)


def _linear_first(node: Node, ins: Sequence[TensorType]) -> Factored:
    return broadcast(ins, node.types, linear=((0,),) if isinstance(node.args[0], Ref) else ())


def _total(node: Node, ins: Sequence[TensorType]) -> Factored:
    """A sum over microbatches of what may be a sum over ranks, of whatever type."""
    return broadcast(ins, node.types, linear=((0,),), kind="view")


def _sum(node: Node, ins: Sequence[TensorType]) -> Factored:
    """add and sub: both terms partial, or neither; a number added to a partial sum would count often."""
    return broadcast(ins, node.types, linear=((0, 1),) if len(ins) == 2 else ())


def _product(node: Node, ins: Sequence[TensorType]) -> Factored:
    return broadcast(ins, node.types, linear=tuple((k,) for k in range(len(ins))))


def _cast(node: Node, ins: Sequence[TensorType]) -> Factored:
    """A cast between float types is linear up to rounding; one to narrower types is kept out of sums."""
    out = node.types[0]
    assert out is not None
    widens = ins[0].is_float and out.is_float and out.nbytes >= ins[0].nbytes
    return broadcast(ins, node.types, linear=((0,),) if widens else ())


def _where(node: Node, ins: Sequence[TensorType]) -> Factored:
    return broadcast(ins, node.types, linear=((1, 2),) if len(ins) == 3 else ())


def _where_number(node: Node, ins: Sequence[TensorType]) -> Factored:
    """A number elsewhere: zero is as good a part of a sum as the sum itself."""
    number = next(arg for arg in node.args[1:] if not isinstance(arg, Ref))
    return broadcast(ins, node.types, linear=((1,),) if number == 0 else ())


def _masked_fill(node: Node, ins: Sequence[TensorType]) -> Factored:
    return broadcast(ins, node.types, linear=((0,),) if node.args[2] == 0 else ())


def _prims_cast(node: Node, ins: Sequence[TensorType]) -> Factored:
    assert isinstance(node.args[1], Dtype)
    return _cast(node, ins)


def _glu(node: Node, ins: Sequence[TensorType]) -> Factored:
    """One half of a dim gated by the other: the dim is (2, half), and the half may be split."""
    return _halved(node, ins[0], node.types[0], node.arg(1, "dim", -1), backward=False)


def _glu_backward(node: Node, ins: Sequence[TensorType]) -> Factored:
    return _halved(node, ins[1], ins[0], node.args[2], backward=True)


def _halved(node: Node, x: TensorType, half: TensorType | None, raw: int, *, backward: bool) -> Factored:
    assert half is not None
    dim = raw % len(x.shape)
    build = Builder()
    after = build.dims(half.shape)
    two = build.new(2)
    full = (*after[:dim], (*two, *after[dim]), *after[dim + 1 :])
    sizes, fixed = tuple(build.sizes), frozenset(two)
    if backward:
        return Factored(sizes, (after, full), (full,), fixed, linear=((0,),))
    return Factored(sizes, (full,), (after,), fixed)


def _fake_quantize_per_channel(node: Node, ins: Sequence[TensorType]) -> Factored:
    """A scale and a zero point for each element of one dim."""
    build, at = Builder(), node.args[3] % len(ins[0].shape)
    dims = build.dims(ins[0].shape)
    return Factored(tuple(build.sizes), (dims, (dims[at],), (dims[at],)), (dims, dims))


def _named(names: Sequence[str], fn: RuleFn) -> dict[str, RuleFn]:
    return {f"aten.{n}" if "." in n else f"aten.{n}.default": fn for n in names}


RULES: Mapping[str, RuleFn] = MappingProxyType(
    {
        **_named(_NONLINEAR, _plain),
        **_named(_LINEAR_FIRST, _linear_first),
        "autoshard.total.default": _total,
        "aten.add.Tensor": _sum,
        "aten.sub.Tensor": _sum,
        "aten.add.Scalar": _plain,
        "aten.sub.Scalar": _plain,
        "aten.mul.Tensor": _product,
        "aten._to_copy.default": _cast,
        "prims.convert_element_type.default": _prims_cast,
        "aten.where.self": _where,
        "aten.where.ScalarOther": _where_number,
        "aten.where.ScalarSelf": _where_number,
        "aten.masked_fill.Scalar": _masked_fill,
        "aten.fake_quantize_per_channel_affine_cachemask.default": _fake_quantize_per_channel,
        "aten.glu.default": _glu,
        "aten.glu_backward.default": _glu_backward,
    }
)
