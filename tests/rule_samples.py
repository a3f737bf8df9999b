"""At least one sample call of every op that has a sharding rule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import transformers.integrations.moe  # noqa: F401 - defines ops of its own

from autoshard.ir import Graph, Node, Ref, TensorType
from autoshard.ir.row_tiles import TILES, RowTiles
from autoshard.ir.scans import SCAN, Scan, StepSlice, StepValue
from autoshard.verify.rule_check import OpSample

f64, f32, i64 = torch.float64, torch.float32, torch.int64


UNARY = tuple(
    """
    rsqrt sqrt exp exp2 expm1 log log2 log1p tanh sigmoid silu gelu relu erf sin cos tan abs sign
    floor ceil round trunc reciprocal softplus elu leaky_relu hardtanh hardswish hardsigmoid mish
    logical_not isnan isinf isfinite nan_to_num neg clone detach alias lift_fresh_copy zeros_like
    ones_like acos asin asinh atan atanh sinh cosh erfc erfinv lgamma digamma sgn signbit frac logit
    log10 square celu hardshrink softshrink angle isneginf isposinf sinc i0 deg2rad rad2deg zero frexp.Tensor
    special_i0e special_i1 special_i1e special_entr special_erfcx special_ndtri special_log_ndtr
    special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1 special_spherical_bessel_j0
    special_airy_ai special_modified_bessel_i0 special_modified_bessel_i1 special_modified_bessel_k0
    special_modified_bessel_k1 special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1
    """.split()  # noqa: SIM905 - a table reads better than 40 quoted lines
)
BINARY = tuple(
    """
    eq.Tensor ne.Tensor lt.Tensor le.Tensor gt.Tensor ge.Tensor logical_and logical_or logical_xor
    maximum minimum fmod.Tensor remainder.Tensor floor_divide rsub.Tensor atan2 copysign.Tensor
    heaviside pow.Tensor_Tensor add.Tensor sub.Tensor mul.Tensor div.Tensor xlogy.Tensor logaddexp
    logaddexp2 hypot fmax fmin clamp_min.Tensor clamp_max.Tensor polar complex nextafter igamma igammac
    ldexp.Tensor special_xlog1py special_zeta
    """.split()  # noqa: SIM905 - a table reads better than 20 quoted lines
)


class Make:
    """Draws reproducible tensors."""

    def __init__(self) -> None:
        self.source = torch.Generator().manual_seed(0)

    def real(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=f64, generator=self.source)

    def unit(self, *shape: int) -> torch.Tensor:
        """Between 0.05 and 0.95: inside the domain of every function sampled here."""
        return torch.rand(shape, dtype=f64, generator=self.source) * 0.9 + 0.05

    def ints(self, top: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, top, shape, generator=self.source)

    def bools(self, *shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=self.source) < 0.5

    def complex(self, *shape: int) -> torch.Tensor:
        return torch.complex(self.real(*shape), self.real(*shape))

    def order(self, n: int) -> torch.Tensor:
        return torch.randperm(n, generator=self.source)


def _op(name: str) -> str:
    return f"aten.{name}" if "." in name else f"aten.{name}.default"


def _pointwise(m: Make) -> Iterator[OpSample]:
    """Broadcasting in every direction that an op allows."""
    for name in UNARY:
        yield OpSample(_op(name), (m.unit(5, 6),))
    for name in BINARY:
        yield OpSample(_op(name), (m.unit(5, 6), m.unit(6)))
        yield OpSample(_op(name), (m.unit(4, 1, 6), m.unit(5, 1)))
    for name in ("eq", "ne", "lt", "le", "gt", "ge", "add", "sub"):
        yield OpSample(f"aten.{name}.Scalar", (m.real(5, 6), 0.25))
    for name in ("fmod", "remainder", "mul", "div", "rsub"):
        yield OpSample(f"aten.{name}.Scalar", (m.real(5, 6), 2))
    for name in ("bitwise_and", "bitwise_or", "bitwise_xor", "__and__", "__or__"):
        yield OpSample(f"aten.{name}.Tensor", (m.ints(9, 5, 6), m.ints(9, 6)))
    yield OpSample("aten.bitwise_and.Tensor", (m.bools(4, 1, 6), m.bools(5, 1)))
    for name in ("bitwise_and", "bitwise_or"):
        yield OpSample(f"aten.{name}.Scalar", (m.ints(9, 5, 6), 3))
    yield OpSample("aten.bitwise_not.default", (m.bools(5, 6),))
    yield OpSample("aten.pow.Tensor_Scalar", (m.unit(5, 6), 3))
    yield OpSample("aten.pow.Scalar", (2, m.real(5, 6)))
    yield OpSample("aten.clamp.default", (m.real(5, 6), -0.5, 0.5))
    yield OpSample("aten.clamp.Tensor", (m.real(5, 6), m.unit(6) - 1, m.unit(5, 1)))
    yield OpSample("aten.clamp.Tensor", (m.real(5, 6), None, m.unit(5, 1)))
    yield OpSample("aten.clamp_min.default", (m.real(5, 6), 0.1))
    yield OpSample("aten.clamp_max.default", (m.real(5, 6), 0.1))
    yield OpSample("aten.floor_divide.Scalar", (m.ints(9, 5, 6), 2))
    yield OpSample("aten.div.Tensor_mode", (m.real(5, 6), m.unit(6)), {"rounding_mode": "floor"})
    yield OpSample("aten.div.Scalar_mode", (m.real(5, 6), 0.3), {"rounding_mode": "trunc"})
    yield OpSample("aten.masked_fill.Tensor", (m.real(5, 6), m.bools(5, 1), torch.tensor(0.5, dtype=f64)))
    yield OpSample("aten.masked_fill.Scalar", (m.real(5, 6), m.bools(6), 0))
    yield OpSample("aten.masked_fill.Scalar", (m.real(5, 6), m.bools(6), float("-inf")))
    yield OpSample("aten.addcmul.default", (m.real(5, 6), m.real(6), m.real(5, 1)), {"value": 0.5})
    yield OpSample("aten.addcdiv.default", (m.real(5, 6), m.real(6), m.unit(5, 1)))
    yield OpSample("aten.lerp.Scalar", (m.real(5, 6), m.real(5, 6), 0.3))
    yield OpSample("aten.lerp.Tensor", (m.real(5, 6), m.real(5, 6), m.unit(6)))
    yield OpSample("aten.full_like.default", (m.real(5, 6), 2.5))
    yield OpSample("aten.empty_like.default", (m.real(5, 6),), shapes_only=True)
    yield OpSample("aten.log_sigmoid_forward.default", (m.real(5, 6),))
    yield OpSample("aten.add.Tensor", (m.real(5, 6), m.real(5, 6)), {"alpha": 2})
    yield OpSample("aten.add.Tensor", (m.real(5, 6), 3))
    yield OpSample("aten.add.Tensor", (m.bools(5, 6), m.bools(6)))
    yield OpSample("aten.sub.Tensor", (m.ints(9, 6), m.ints(9, 5, 1)))
    yield OpSample("aten.mul.Tensor", (m.real(5, 6), m.bools(6)))
    yield OpSample("aten.mul.Tensor", (m.real(5, 6), 0.5))
    yield OpSample("aten.mul.Tensor", (m.real(5, 6), torch.tensor(0.5, dtype=f64)))
    yield OpSample("aten.div.Tensor", (m.ints(9, 5, 6), 4))
    yield OpSample("aten.reciprocal.default", (m.unit(5, 6),))
    yield OpSample("aten.threshold.default", (m.real(5, 6), 0.1, -0.2))
    yield OpSample("aten.clone.default", (m.bools(5, 6),))
    for dtype in (f32, i64, torch.bool, torch.bfloat16):
        yield OpSample("aten._to_copy.default", (m.real(5, 6),), {"dtype": dtype})
        yield OpSample("prims.convert_element_type.default", (m.real(5, 6), dtype))
    yield OpSample("aten._to_copy.default", (m.real(5, 6).float(),), {"dtype": f64})
    yield OpSample("aten._to_copy.default", (m.ints(9, 5, 6),), {"dtype": f64})
    yield OpSample("aten.where.self", (m.bools(5, 6), m.real(5, 6), m.real(6)))
    yield OpSample("aten.where.self", (m.bools(5, 1), m.real(6), torch.tensor(0.0, dtype=f64)))
    yield OpSample("aten.where.self", (m.bools(5, 6), m.bools(5, 6), m.bools(6)))
    yield OpSample("aten.where.ScalarOther", (m.bools(5, 6), m.real(6), 1.5))
    yield OpSample("aten.where.ScalarSelf", (m.bools(5, 6), 1.5, m.real(6)))
    yield OpSample("aten.acosh.default", (m.unit(5, 6) + 1,))
    yield OpSample("aten.where.Scalar", (m.bools(5, 6), 1.5, -2.0))
    yield OpSample("aten._prelu_kernel.default", (m.real(4, 5, 6), m.real(1, 5, 1)))
    yield OpSample("aten.__xor__.Tensor", (m.ints(9, 5, 6), m.ints(9, 6)))
    for name in (
        "bitwise_xor.Scalar",
        "__lshift__.Scalar",
        "__rshift__.Scalar",
        "bitwise_left_shift.Tensor_Scalar",
        "bitwise_right_shift.Tensor_Scalar",
    ):
        yield OpSample(_op(name), (m.ints(9, 5, 6), 2))
    for name in ("bitwise_left_shift", "bitwise_right_shift", "__lshift__", "__rshift__", "gcd", "lcm"):
        tensors = (m.ints(9, 5, 6), m.ints(4, 6))
        yield OpSample(f"aten.{name}.{'default' if name in ('gcd', 'lcm') else 'Tensor'}", tensors)
    for name in ("and", "or", "xor"):
        yield OpSample(f"aten.bitwise_{name}.Scalar_Tensor", (5, m.ints(9, 5, 6)))
    for name in ("remainder.Scalar_Tensor", "xlogy.Scalar_Self", "special_xlog1py.self_scalar"):
        yield OpSample(f"aten.{name}", (0.7, m.unit(5, 6)))
    for name in (
        "copysign.Scalar",
        "xlogy.Scalar_Other",
        "special_xlog1py.other_scalar",
        "isin.Tensor_Scalar",
    ):
        yield OpSample(f"aten.{name}", (m.real(5, 6), 0.7))
    yield OpSample("aten.round.decimals", (m.real(5, 6),), {"decimals": 1})
    yield OpSample("aten.polygamma.default", (1, m.unit(5, 6)))
    yield OpSample("aten.mvlgamma.default", (m.unit(5, 6) + 2, 3))
    for name in ("conj_physical", "_conj_physical"):
        yield OpSample(f"aten.{name}.default", (m.complex(5, 6),))
    one, zero = torch.full((1,), 0.1), torch.zeros(1, dtype=torch.int32)
    x = m.real(5, 6).float()
    yield OpSample("aten.fake_quantize_per_tensor_affine_cachemask.default", (x, 0.1, 0, -8, 7))
    name = "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams"
    yield OpSample(f"aten.{name}.default", (x, one, zero, torch.ones(1, dtype=i64), -8, 7))
    name = "fake_quantize_per_channel_affine_cachemask"
    yield OpSample(f"aten.{name}.default", (x, m.unit(6).float(), m.ints(3, 6).int(), 1, -8, 7))
    yield OpSample("aten.copy.default", (m.real(5, 6), m.real(6)))
    yield OpSample("aten.fill.Scalar", (m.real(5, 6), 1.5))
    yield OpSample("aten.fill.Tensor", (m.real(5, 6), torch.tensor(1.5, dtype=f64)))
    yield OpSample("aten._conj.default", (m.complex(5, 6),))
    yield OpSample("aten.mul.Tensor", (m.complex(5, 6), m.complex(6)))
    yield OpSample("aten.glu.default", (m.real(5, 12),))
    yield OpSample("aten.glu.default", (m.real(10, 6), 0))
    yield OpSample("aten.glu_backward.default", (m.real(5, 6), m.real(5, 12), -1))
    g, x = m.real(5, 6), m.real(5, 6)
    for name, rest in {
        "gelu_backward": (x,),
        "silu_backward": (x,),
        "tanh_backward": (x.tanh(),),
        "sigmoid_backward": (x.sigmoid(),),
        "threshold_backward": (x, 0.1),
        "elu_backward": (1.0, 1.0, 1.0, False, x),
        "leaky_relu_backward": (x, 0.1, False),
        "hardtanh_backward": (x, -0.5, 0.5),
        "hardswish_backward": (x,),
        "hardsigmoid_backward": (x,),
        "softplus_backward": (x, 1.0, 20.0),
        "mish_backward": (x,),
        "hardshrink_backward": (x, 0.5),
        "softshrink_backward": (x, 0.5),
        "log_sigmoid_backward": (x, torch.ops.aten.log_sigmoid_forward(x)[1]),
        "_prelu_kernel_backward": (x, m.real(1, 6)),
        "logit_backward": (x.sigmoid(), None),
    }.items():
        yield OpSample(_op(name), (g, *rest))
    yield OpSample("aten.gelu_backward.default", (g, x), {"approximate": "tanh"})


def _views(m: Make) -> Iterator[OpSample]:
    reshapes: list[tuple[Sequence[int], Sequence[int]]] = [
        ((6, 4), (24,)),
        ((24,), (6, 4)),
        ((4, 6, 5), (24, 5)),
        ((2, 6, 8), (2, 6, 2, 4)),
        ((2, 6, 4, 2), (12, 8)),
        ((5, 6), (6, 5)),
        ((6, 4), (4, 6)),
        ((12, 5), (2, 1, 6, 5, 1)),
        ((7, 6), (7, 2, 3)),
        ((1, 6), (6,)),
        ((1,), ()),
        ((4, 3, 5), (12, 5)),
        ((5, 4), (20,)),
    ]
    for source, target in reshapes:
        yield OpSample("aten.view.default", (m.real(*source), list(target)))
        yield OpSample("aten.reshape.default", (m.real(*source), list(target)))
    yield OpSample("aten._unsafe_view.default", (m.real(4, 6, 5), [24, -1]))
    yield OpSample("aten.reshape.default", (m.ints(9, 5, 6), [30]))
    yield OpSample("aten.permute.default", (m.real(4, 5, 6), [2, 0, -2]))
    yield OpSample("aten.transpose.int", (m.real(4, 5, 6), -1, 1))
    yield OpSample("aten.t.default", (m.real(5, 6),))
    yield OpSample("aten.t.default", (m.real(5),))
    yield OpSample("aten.expand.default", (m.real(5, 1), [4, 5, 6]))
    yield OpSample("aten.expand.default", (m.real(1, 6), [-1, 6]))
    yield OpSample("aten.expand.default", (m.real(), [4, 5]))
    yield OpSample("aten.unsqueeze.default", (m.real(5, 6), -1))
    yield OpSample("aten.unsqueeze.default", (m.real(5, 6), 0))
    yield OpSample("aten.squeeze.default", (m.real(1, 5, 1, 6),))
    yield OpSample("aten.squeeze.dim", (m.real(5, 1, 6), -2))
    yield OpSample("aten.squeeze.dim", (m.real(5, 1, 6), 0))
    yield OpSample("aten.squeeze.dims", (m.real(1, 5, 1, 6), [0, 1, 2]))
    yield OpSample("aten.slice.Tensor", (m.real(5, 6), 1, 1, 5, 2))
    yield OpSample("aten.slice.Tensor", (m.real(5, 6), 0, 0, 9223372036854775807))
    yield OpSample("aten.slice.Tensor", (m.real(5, 6), -1, -3, 9223372036854775807))
    yield OpSample("aten.slice.Tensor", (m.real(5, 6),))
    yield OpSample("aten.slice_backward.default", (m.real(5, 2), [5, 6], 1, 1, 5, 2))
    yield OpSample("aten.slice_backward.default", (m.real(5, 6), [5, 6], 1, 0, 9223372036854775807, 1))
    yield OpSample("aten.select.int", (m.real(4, 5, 6), 1, -1))
    yield OpSample("aten.select_backward.default", (m.real(4, 6), [4, 5, 6], -2, 3))
    yield OpSample("aten.split.Tensor", (m.real(5, 12), 4, 1))
    yield OpSample("aten.split.Tensor", (m.real(15, 5), 5))
    yield OpSample("aten.split.Tensor", (m.real(5, 12), 5, -1))
    yield OpSample("aten.split.Tensor", (m.real(6, 5), 1))
    yield OpSample("aten.split.Tensor", (m.real(1, 5), 1))
    yield OpSample("aten.split.Tensor", (m.real(5, 6), 6, 1))
    yield OpSample("aten.split_with_sizes.default", (m.real(5, 18), [6, 6, 6], -1))
    yield OpSample("aten.split_with_sizes.default", (m.real(5, 12), [8, 2, 2], 1))
    yield OpSample("aten.split_with_sizes.default", (m.real(15, 4), [5, 5, 5]))
    yield OpSample("aten.unbind.int", (m.real(3, 5, 6),))
    yield OpSample("aten.unbind.int", (m.real(4, 5, 2), -1))
    yield OpSample("aten.cat.default", ([m.real(5, 6), m.real(5, 6), m.real(5, 6)], 1))
    yield OpSample("aten.cat.default", ([m.real(5, 6), m.real(2, 6)],))
    yield OpSample("aten.cat.default", ([m.real(4, 1), m.real(4, 1)], -1))
    yield OpSample("aten.cat.default", ([m.real(1, 5)],))
    yield OpSample("aten.cat.default", ([torch.empty(0, dtype=f64), m.real(4, 5)], 1))
    yield OpSample("aten.cat.default", ([m.ints(9, 4, 6), m.ints(9, 4, 6)], 1))
    yield OpSample("aten.stack.default", ([m.real(5, 6), m.real(5, 6)], -1))
    yield OpSample("aten.stack.default", ([m.real(5, 6), m.real(5, 6), m.real(5, 6)],))
    yield OpSample("aten.repeat.default", (m.real(5, 6), [2, 1, 3]))
    yield OpSample("aten.repeat.default", (m.real(1, 6), [4, 1]))
    yield OpSample("aten.slice_scatter.default", (m.real(5, 6), m.real(5, 2), 1, 1, 5, 2))
    yield OpSample("aten.select_scatter.default", (m.real(4, 5, 6), m.real(4, 6), -2, 3))
    yield OpSample("aten.constant_pad_nd.default", (m.real(4, 5, 6), [1, 2, 0, 1]))
    yield OpSample("aten.constant_pad_nd.default", (m.real(4, 5, 6), [0, 0, -1, 2], 1.5))
    yield OpSample("aten.roll.default", (m.real(4, 5, 6), [2, -1], [-1, 0]))
    yield OpSample("aten.roll.default", (m.real(5, 6), [3]))
    yield OpSample("aten.unfold.default", (m.real(4, 7, 6), 1, 3, 2))
    yield OpSample("aten.unfold_backward.default", (m.real(4, 3, 6, 3), [4, 7, 6], -2, 3, 2))
    yield OpSample("aten.diagonal.default", (m.real(4, 5, 6), 1, 0, -1))
    yield OpSample("aten.diagonal.default", (m.real(5, 5),))
    yield OpSample("aten.diagonal_backward.default", (m.real(5, 4), [4, 5, 6], 1, 0, 2))
    yield OpSample("aten.view_as_complex.default", (m.real(4, 6, 2),))
    yield OpSample("aten.view_as_real.default", (m.complex(4, 6),))


def _reductions(m: Make) -> Iterator[OpSample]:
    x = m.real(4, 5, 6)
    for name in ("sum.dim_IntList", "amax", "amin"):
        yield OpSample(_op(name), (x, [1]))
        yield OpSample(_op(name), (x, [-1, 0], True))
        yield OpSample(_op(name), (x, [0, 2]))
        yield OpSample(_op(name), (x, []))
    yield OpSample("aten.sum.dim_IntList", (x, None), {"dtype": f64})
    yield OpSample("aten.sum.dim_IntList", (m.bools(5, 6), [0]))
    yield OpSample("aten.sum.dim_IntList", (m.real(), [-1]))
    yield OpSample("aten.sum.default", (x,))
    yield OpSample("aten.sum.default", (m.ints(9, 5, 6),))
    yield OpSample("aten.max.default", (x,))
    yield OpSample("aten.min.default", (x,))
    for name in ("max.dim", "min.dim", "argmax", "argmin", "prod.dim_int"):
        yield OpSample(_op(name), (x, 1))
        yield OpSample(_op(name), (x, -1, True))
    yield OpSample("aten.argmax.default", (x,))
    yield OpSample("aten.any.default", (m.bools(5, 6),))
    yield OpSample("aten.all.default", (m.bools(5, 6),))
    yield OpSample("aten.any.dim", (m.bools(5, 6), 1))
    yield OpSample("aten.all.dim", (m.bools(5, 6), 0, True))
    yield OpSample("aten.logsumexp.default", (x, [1, 2]))
    yield OpSample("aten.var.correction", (x, [1]), {"correction": 0, "keepdim": True})
    yield OpSample("aten.var.correction", (x,), {"correction": 1})
    for name in ("std", "var_mean", "std_mean"):
        yield OpSample(f"aten.{name}.correction", (x, [-1]), {"correction": 1, "keepdim": True})
        yield OpSample(f"aten.{name}.correction", (x,), {"correction": 0})
    yield OpSample("aten.median.dim", (x, 1))
    yield OpSample("aten.kthvalue.default", (x, 2, 1))
    yield OpSample("aten.linalg_vector_norm.default", (x, 2, [1]))
    yield OpSample("aten.linalg_vector_norm.default", (x,))
    yield OpSample("aten.norm.ScalarOpt_dim", (x, 2, [0, -1], True))
    yield OpSample("aten.norm.Scalar", (x, 2))
    yield OpSample("aten.prod.default", (x,))
    yield OpSample("aten.any.dims", (m.bools(4, 5, 6), [0, -1]))
    yield OpSample("aten.all.dims", (m.bools(4, 5, 6), [1], True))
    yield OpSample("aten.aminmax.default", (x,), {"dim": 1, "keepdim": True})
    yield OpSample("aten.aminmax.default", (x,))
    yield OpSample("aten.nansum.default", (x, [1]))
    yield OpSample("aten.count_nonzero.dim_IntList", (m.ints(3, 4, 5, 6), [0, 2]))
    for name in ("cumprod", "logcumsumexp", "cummax", "cummin"):
        yield OpSample(_op(name), (x, -2))
    for name in ("_softmax", "_log_softmax"):
        yield OpSample(_op(name), (x, -1, False))
        yield OpSample(_op(name), (x, 1, False))
    yield OpSample("aten._safe_softmax.default", (x, 2))
    yield OpSample("aten._softmax_backward_data.default", (m.real(4, 5, 6), x.softmax(-1), -1, f64))
    yield OpSample("aten._log_softmax_backward_data.default", (m.real(4, 5, 6), x.log_softmax(1), 1, f64))
    yield OpSample("aten.cumsum.default", (x, 1))
    yield OpSample("aten.cumsum.default", (m.ints(9, 5, 6), -1), {"dtype": i64})
    yield OpSample("aten.sort.default", (x, 1, True))
    yield OpSample("aten.sort.default", (x,))
    yield OpSample("aten.argsort.default", (x, 1))
    yield OpSample("aten.sort.stable", (m.ints(3, 5, 6),), {"stable": True, "dim": 0})
    yield OpSample("aten.argsort.stable", (m.ints(3, 5, 6),), {"stable": True, "dim": -1})
    yield OpSample("aten.flip.default", (x, [0, -1]))
    yield OpSample("aten.tril.default", (x,))
    yield OpSample("aten.triu.default", (x, 1))
    yield OpSample("aten.topk.default", (x, 2))
    yield OpSample("aten.topk.default", (x, 3, 1, False))


def _scaled(m: Make) -> Iterator[OpSample]:
    """Casts to 8 bits with one scale, scales of rows, and scales of blocks of 4; and their products."""
    e4, e8, ops = torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.ops.autoshard
    for k, block, kind in ((None, 0, f32), (1, 0, f32), (1, 4, e8), (1, 8, e8)):
        n = None if k is None else 0
        a, b = m.real(6, 8).float(), m.real(8, 12).float()
        sa, sb = ops.amax_scale(a, k, block, e4, kind), ops.amax_scale(b, n, block, e4, kind)
        qa, qb = ops.cast_scaled(a, sa, e4), ops.cast_scaled(b, sb, e4)
        yield OpSample("autoshard.amax_scale.default", (a, k, block, e4, kind))
        yield OpSample("autoshard.cast_scaled.default", (a, sa, e4))
        yield OpSample("autoshard.scaled_mm.default", (sa, sb, qa, qb, f32))


def _packed(m: Make) -> Iterator[OpSample]:
    """Two elements of 4 bits in a byte, with scales of 16 in a row, of 16 by 16, and of 16 in a column."""
    e4, u8, ops = torch.float8_e4m3fn, torch.uint8, torch.ops.autoshard
    made: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    for x, block, dim in (
        (m.real(64, 128).float(), (1, 16), 1),
        (m.real(128, 64).float(), (16, 16), 1),
        (m.real(128, 64).float(), (16, 1), 0),
        (m.real(64, 128).float(), (16, 16), 0),
    ):
        whole = ops.amax_scale(x, None, 0, u8, f32)
        scale = ops.block_scale(x, whole, e4, block)
        yield OpSample("autoshard.block_scale.default", (x, whole, e4, block))
        args = (x, scale, u8, whole, dim, block == (16, 1))
        yield OpSample("autoshard.cast_packed.default", args)
        made.append((whole, scale, ops.cast_packed(*args)))
        yield OpSample("autoshard.rotated.default", (x, dim))
    for (a, packed_a), (b, packed_b) in (
        ((made[0], 1), (made[1], 1)),
        ((made[0], 1), (made[2], 0)),
        ((made[3], 0), (made[2], 0)),
    ):
        pairs = (x for both in zip(a, b, strict=True) for x in both)
        yield OpSample("autoshard.packed_mm.default", (*pairs, packed_a, packed_b, f32))


def _matmuls(m: Make) -> Iterator[OpSample]:
    yield OpSample("aten.mm.default", (m.real(5, 6), m.real(6, 7)))
    yield OpSample("aten.mm.default", (m.real(8, 1), m.real(1, 12)))
    yield OpSample("aten.bmm.default", (m.real(4, 5, 6), m.real(4, 6, 7)))
    for bias in (m.real(7), m.real(5, 7), m.real(5, 1)):
        yield OpSample("aten.addmm.default", (bias, m.real(5, 6), m.real(6, 7)), {"alpha": 0.5, "beta": 2})
        yield OpSample("aten.addbmm.default", (bias, m.real(3, 5, 6), m.real(3, 6, 7)), {"beta": 2})
        yield OpSample("aten.addr.default", (bias, m.real(5), m.real(7)), {"alpha": 0.5})
    yield OpSample("aten.addmv.default", (m.real(5), m.real(5, 6), m.real(6)), {"alpha": 0.5})
    yield OpSample("aten.addmv.default", (m.real(), m.real(5, 6), m.real(6)))
    # torch.bilinear's, and its gradient of the weight
    left, right, weight = m.real(4, 6), m.real(4, 3), m.real(5, 6, 3)
    yield OpSample("aten._trilinear.default", (left, weight, right, [1, 3], [0], [1, 2], [2, 3]))
    yield OpSample("aten._trilinear.default", (left, m.real(4, 5), right, [1, 3], [2, 3], [1, 2], [0]))
    yield OpSample("aten.baddbmm.default", (m.real(4, 1, 7), m.real(4, 5, 6), m.real(4, 6, 7)))
    yield OpSample("aten.mv.default", (m.real(5, 6), m.real(6)))
    yield from _scaled(m)
    yield from _packed(m)
    yield OpSample("aten.dot.default", (m.real(6), m.real(6)))
    plain = [[2, 1], [1, 1], [1, 1], False, [0, 0], 1]
    for bias in (None, m.real(6)):
        yield OpSample("aten.convolution.default", (m.real(5, 3, 7, 6), m.real(6, 3, 3, 3), bias, *plain))
    grouped = [[1], [1], [1], False, [0], 2]
    yield OpSample("aten.convolution.default", (m.real(4, 4, 7), m.real(6, 2, 3), m.real(6), *grouped))
    for out in (6, 12):  # one filter a channel, and two
        depthwise = [[1], [1], [1], False, [0], 6]
        x, w = m.real(4, 6, 7), m.real(out, 1, 3)
        yield OpSample("aten.convolution.default", (x, w, m.real(out), *depthwise))
        g = torch.ops.aten.convolution(x, w, None, *depthwise)
        for mask in ([True, True, True], [True, False, False]):
            sizes = [out] if mask[2] else None
            yield OpSample("aten.convolution_backward.default", (g, x, w, sizes, *depthwise, mask))
    turned = [[2], [0], [1], True, [0], 1]
    yield OpSample("aten.convolution.default", (m.real(4, 3, 5), m.real(3, 6, 2), m.real(6), *turned))
    for mask in ([True, True, True], [False, True, False]):
        x, w = m.real(5, 3, 7, 6), m.real(6, 3, 3, 3)
        g = torch.ops.aten.convolution(x, w, None, *plain)
        yield OpSample("aten.convolution_backward.default", (g, x, w, [6] if mask[2] else None, *plain, mask))
    x, w = m.real(4, 4, 7), m.real(6, 2, 3)
    g = torch.ops.aten.convolution(x, w, None, *grouped)
    yield OpSample("aten.convolution_backward.default", (g, x, w, [6], *grouped, [True, True, True]))
    x, w = m.real(4, 3, 5), m.real(3, 6, 2)
    g = torch.ops.aten.convolution(x, w, None, *turned)
    yield OpSample("aten.convolution_backward.default", (g, x, w, [6], *turned, [True, True, True]))
    yield from _causal_convs(m)
    offs = torch.tensor([2, 5, 9], dtype=torch.int32)
    rows, weights = m.real(9, 6).float(), m.real(3, 6, 4).float()
    yield OpSample("transformers.grouped_mm_fallback.default", (rows, weights, offs))
    args = (rows, weights, offs, m.real(9, 4).float())
    yield OpSample("transformers.grouped_mm_fallback_backward.default", args)
    rows, weights = m.real(9, 64).bfloat16() / 8, m.real(3, 64, 32).bfloat16() / 8
    yield OpSample("aten._grouped_mm.default", (rows, weights, offs))
    rows, offs = m.real(64, 16).bfloat16() / 8, torch.tensor([2, 5, 16], dtype=torch.int32)
    yield OpSample("aten._grouped_mm.default", (rows, m.real(16, 32).bfloat16() / 8, offs))
    yield OpSample("aten._grouped_mm.default", (m.real(3, 8, 24).float(), m.real(24, 16).float(), offs))
    yield OpSample("aten._grouped_mm.default", (m.real(3, 7, 8).float(), m.real(3, 8, 16).float()))


def _norms(m: Make) -> Iterator[OpSample]:
    x, w, b = m.real(4, 5, 6), m.real(6), m.real(6)
    yield OpSample("aten.native_layer_norm.default", (x, [6], w, b, 1e-5))
    yield OpSample("aten.native_layer_norm.default", (x, [6], None, None, 1e-5))
    yield OpSample("aten.native_layer_norm.default", (x, [5, 6], m.real(5, 6), None, 1e-5))
    yield OpSample("aten.native_layer_norm.default", (m.real(6), [6], w, b, 1e-5))
    _, mean, rstd = torch.ops.aten.native_layer_norm(x, [6], w, b, 1e-5)
    for mask in ([True, True, True], [True, False, False], [False, True, False]):
        args = (m.real(4, 5, 6), x, [6], mean, rstd, w, b, mask)
        yield OpSample("aten.native_layer_norm_backward.default", args)
    args = (m.real(4, 5, 6), x, [6], mean, rstd, None, None, [True, False, False])
    yield OpSample("aten.native_layer_norm_backward.default", args)


def _image_norms(m: Make) -> Iterator[OpSample]:
    for v, g, dim in ((m.real(6, 5, 4), m.unit(6, 1, 1), 0), (m.real(4, 5, 6), m.unit(1, 1, 6), 2)):
        yield OpSample("aten._weight_norm_interface.default", (v, g, dim))
        w, norms = torch.ops.aten._weight_norm_interface(v, g, dim)
        args = (torch.randn_like(w), v, g, norms, dim)
        yield OpSample("aten._weight_norm_interface_backward.default", args)
    x, w, b = m.real(4, 12, 3, 2), m.real(12), m.real(12)
    for groups in (1, 3, 4, 12):
        args = (4, 12, 6, groups)
        yield OpSample("aten.native_group_norm.default", (x, w, b, *args, 1e-5))
        _, mean, rstd = torch.ops.aten.native_group_norm(x, w, b, *args, 1e-5)
        for mask in ([True, True, True], [True, False, False]):
            grads = (m.real(*x.shape), x, mean, rstd, w, *args, mask)
            yield OpSample("aten.native_group_norm_backward.default", grads)
    yield OpSample("aten.native_group_norm.default", (x, None, None, 4, 12, 6, 2, 1e-5))
    x, w, b, mean, var = m.real(4, 6, 5), m.real(6), m.real(6), m.real(6), m.unit(6)
    for training in (True, False):
        rest = (w, b, mean, var, training, 0.1, 1e-5)
        yield OpSample("aten._native_batch_norm_legit_functional.default", (x, *rest))
        found = torch.ops.aten._native_batch_norm_legit_functional(x, *rest)
        for mask in ([True, True, True], [True, False, False]):
            args = (m.real(4, 6, 5), x, w, mean, var, *found[1:3], training, 1e-5, mask)
            yield OpSample("aten.native_batch_norm_backward.default", args)
    yield OpSample("aten.native_batch_norm.default", (x, w, b, None, None, True, 0.1, 1e-5))
    yield OpSample("aten.native_batch_norm.default", (x, w, b, mean, var, False, 0.1, 1e-5))
    yield OpSample("aten._native_batch_norm_legit.no_stats", (x, w, None, True, 0.1, 1e-5))
    yield OpSample("aten._native_batch_norm_legit_no_training.default", (x, w, b, mean, var, 0.1, 1e-5))


def _images(m: Make) -> Iterator[OpSample]:
    ops = torch.ops.aten
    x = m.real(4, 6, 8, 6)
    pool = ([2, 2], [2, 2], [0, 0])
    yield OpSample("aten.avg_pool2d.default", (x, *pool))
    yield OpSample("aten.avg_pool2d.default", (x[0], *pool))
    yield OpSample("aten.avg_pool2d_backward.default", (m.real(4, 6, 4, 3), x, *pool, False, True, None))
    out, where = ops.max_pool2d_with_indices(x, *pool)
    yield OpSample("aten.max_pool2d_with_indices.default", (x, *pool))
    grads = (torch.randn_like(out), x, *pool, [1, 1], False, where)
    yield OpSample("aten.max_pool2d_with_indices_backward.default", grads)
    deep = m.real(3, 4, 4, 6, 4)
    pool3 = ([2, 2, 2], [2, 2, 2], [0, 0, 0])
    yield OpSample("aten.avg_pool3d.default", (deep, *pool3))
    grads = (m.real(3, 4, 2, 3, 2), deep, *pool3, False, True, None)
    yield OpSample("aten.avg_pool3d_backward.default", grads)
    out, where = ops.max_pool3d_with_indices(deep, *pool3)
    yield OpSample("aten.max_pool3d_with_indices.default", (deep, *pool3))
    grads = (torch.randn_like(out), deep, *pool3, [1, 1, 1], False, where)
    yield OpSample("aten.max_pool3d_with_indices_backward.default", grads)
    yield OpSample("aten._adaptive_avg_pool2d.default", (x, [3, 2]))
    yield OpSample("aten._adaptive_avg_pool2d_backward.default", (m.real(4, 6, 3, 2), x))
    out, where = ops.adaptive_max_pool2d(x, [3, 2])
    yield OpSample("aten.adaptive_max_pool2d.default", (x, [3, 2]))
    yield OpSample("aten.adaptive_max_pool2d_backward.default", (torch.randn_like(out), x, where))
    volume = m.real(3, 4, 5, 6, 4)
    yield OpSample("aten._adaptive_avg_pool3d.default", (volume, [3, 2, 2]))
    yield OpSample("aten._adaptive_avg_pool3d_backward.default", (m.real(3, 4, 3, 2, 2), volume))
    out, where = ops.adaptive_max_pool3d(volume, [3, 2, 2])
    yield OpSample("aten.adaptive_max_pool3d.default", (volume, [3, 2, 2]))
    yield OpSample("aten.adaptive_max_pool3d_backward.default", (torch.randn_like(out), volume, where))
    for kind in ("reflection", "replication"):
        yield OpSample(f"aten.{kind}_pad3d.default", (volume, [1, 2, 0, 3, 1, 1]))
        given = (m.real(3, 4, 7, 9, 7), volume, [1, 2, 0, 3, 1, 1])
        yield OpSample(f"aten.{kind}_pad3d_backward.default", given)
        yield OpSample(f"aten.{kind}_pad2d.default", (x, [1, 2, 0, 3]))
        yield OpSample(f"aten.{kind}_pad2d_backward.default", (m.real(4, 6, 11, 9), x, [1, 2, 0, 3]))
        yield OpSample(f"aten.{kind}_pad1d.default", (m.real(4, 6, 5), [1, 2]))
        yield OpSample(f"aten.{kind}_pad1d_backward.default", (m.real(4, 6, 8), m.real(4, 6, 5), [1, 2]))
    yield OpSample("aten.pixel_shuffle.default", (m.real(3, 4, 8, 2, 3), 2))
    yield OpSample("aten.pixel_unshuffle.default", (x, 2))
    yield OpSample("aten.im2col.default", (x, [2, 2], [1, 1], [0, 0], [2, 2]))
    yield OpSample("aten.col2im.default", (m.real(4, 24, 12), [8, 6], [2, 2], [1, 1], [0, 0], [2, 2]))
    for kind in ("upsample_nearest2d", "_upsample_nearest_exact2d"):
        yield OpSample(f"aten.{kind}.default", (x, [16, 9]))
        yield OpSample(f"aten.{kind}.vec", (x, None, [2.0, 2.0]))
        yield OpSample(f"aten.{kind}_backward.default", (m.real(4, 6, 16, 9), [16, 9], [4, 6, 8, 6]))
    for kind in (
        "upsample_bilinear2d",
        "upsample_bicubic2d",
        "_upsample_bilinear2d_aa",
        "_upsample_bicubic2d_aa",
    ):
        yield OpSample(f"aten.{kind}.default", (x, [16, 9], False))
        yield OpSample(f"aten.{kind}.vec", (x, [16, 9], False, None))
        args = (m.real(4, 6, 16, 9), [16, 9], [4, 6, 8, 6], False)
        yield OpSample(f"aten.{kind}_backward.default", args)
    for kind, told in (
        ("upsample_nearest1d", ()),
        ("_upsample_nearest_exact1d", ()),
        ("upsample_linear1d", (False,)),
        ("upsample_nearest3d", ()),
        ("_upsample_nearest_exact3d", ()),
        ("upsample_trilinear3d", (False,)),
    ):
        shape = (4, 6, 8) if "1d" in kind else (3, 4, 5, 6, 4)
        size = [2 * n for n in shape[2:]]
        yield OpSample(f"aten.{kind}.default", (m.real(*shape), size, *told))
        yield OpSample(f"aten.{kind}.vec", (m.real(*shape), size, *told, None))
        yield OpSample(f"aten.{kind}_backward.default", (m.real(*shape[:2], *size), size, list(shape), *told))
    places = m.real(3, 5, 4, 2, 3).tanh()
    yield OpSample("aten.grid_sampler_3d.default", (volume, places, 0, 0, False))
    args = (m.real(3, 4, 5, 4, 2), volume, places, 0, 0, False, [True, True])
    yield OpSample("aten.grid_sampler_3d_backward.default", args)
    grid = m.real(4, 5, 4, 2).tanh()
    yield OpSample("aten.grid_sampler_2d.default", (x, grid, 0, 0, False))
    args = (m.real(4, 6, 5, 4), x, grid, 0, 0, False, [True, True])
    yield OpSample("aten.grid_sampler_2d_backward.default", args)


def _matrices(m: Make) -> Iterator[OpSample]:
    """Ops on the last dims that are no products."""
    yield OpSample("aten._fft_c2c.default", (m.complex(4, 5, 6), [1, 2], 0, True))
    yield OpSample("aten._fft_r2c.default", (m.real(4, 5, 6), [0, 2], 0, True))
    yield OpSample("aten._fft_c2r.default", (m.complex(4, 5, 4), [2], 2, 6))
    square = m.real(4, 5, 5).tril() + 3 * torch.eye(5, dtype=f64)
    yield OpSample("aten.linalg_solve_triangular.default", (square, m.real(4, 5, 6)), {"upper": False})
    args = (square[:1], m.real(4, 6, 5))
    yield OpSample("aten.linalg_solve_triangular.default", args, {"upper": False, "left": False})
    yield from _linear_algebra(m)
    a, b = m.real(4, 5, 3), m.real(4, 6, 3)
    far = torch.ops.aten._cdist_forward(a, b, 2.0, None)
    yield OpSample("aten._cdist_forward.default", (a, b, 2.0, None))
    yield OpSample("aten._cdist_backward.default", (m.real(4, 5, 6), a, b, 2.0, far))
    points = m.real(4, 3)
    near = torch.nn.functional.pdist(points)
    yield OpSample("aten._pdist_forward.default", (points, 2.0))
    yield OpSample("aten._pdist_backward.default", (m.real(6), points, 2.0, near))


def _linear_algebra(m: Make) -> Iterator[OpSample]:
    """Matrices of several dims before their rows, with what a gradient needs."""
    aten = torch.ops.aten
    a = m.real(4, 6, 3, 3) + 4 * torch.eye(3, dtype=f64)
    spd = a @ a.mT
    low = torch.linalg.cholesky(spd)
    yield OpSample("aten.cholesky.default", (spd,))
    tall = m.real(4, 6, 5, 3)
    for name in ("cholesky_ex", "matrix_exp", "qr", "lu", "lu_factor_ex"):
        yield OpSample(f"aten.linalg_{name}.default", (spd,))
    for name in ("linalg_inv_ex", "_linalg_det", "_linalg_slogdet", "linalg_lu"):
        yield OpSample(f"aten.{name}.default", (a,))
    yield OpSample("aten.linalg_eig.default", (a.to(torch.complex128),), shapes_only=True)
    yield OpSample("aten._linalg_eigvals.default", (spd,), shapes_only=True)
    for vectors in (True, False):
        yield OpSample("aten._linalg_eigh.default", (spd, "L", vectors))
        yield OpSample("aten._linalg_svd.default", (tall, False, vectors))
    yield OpSample("aten.linalg_qr.default", (tall, "r"))
    yield OpSample("aten.linalg_qr.default", (tall, "complete"))
    yield OpSample("aten.linalg_householder_product.default", (tall, m.real(4, 6, 3)))
    vectors = m.real(4, 6, 3)
    for b in (vectors, vectors[..., None], m.real(4, 6, 3, 2), m.real(1, 6, 3, 2)):
        yield OpSample("aten._linalg_solve_ex.default", (a, b))
    yield OpSample("aten._linalg_solve_ex.default", (a[0, 0], m.real(4, 6, 3, 2)))
    yield OpSample("aten._linalg_solve_ex.default", (a, m.real(4, 6, 3, 3)), {"left": False})
    yield OpSample("aten._linalg_solve_ex.default", (a[:, :1], m.real(6, 3, 2)))
    factors, pivots, _ = aten.linalg_lu_factor_ex.default(a)
    yield OpSample("aten.linalg_lu_solve.default", (factors, pivots, m.real(4, 6, 3, 2)))
    yield OpSample("aten.lu_unpack.default", (factors, pivots))
    yield OpSample("aten.cholesky_solve.default", (m.real(4, 6, 3, 2), low))
    yield OpSample("aten.cholesky_inverse.default", (low,))
    yield OpSample("aten.triangular_solve.default", (m.real(4, 6, 3, 2), a))
    zero = torch.tensor(0.0, dtype=f64)
    yield OpSample("aten.linalg_pinv.atol_rtol_tensor", (tall,), {"atol": zero, "rtol": zero})
    yield OpSample("aten.linalg_pinv.atol_rtol_tensor", (spd,))
    yield OpSample("aten.linalg_cross.default", (m.real(4, 3, 5), m.real(1, 3, 5)), {"dim": 1})
    yield OpSample("aten.linalg_cross.default", (m.real(4, 3), m.real(4, 3)))
    yield OpSample("aten.diag_embed.default", (m.real(4, 6, 5),))
    yield OpSample("aten.diag_embed.default", (m.real(4, 6, 5), 1, 0, 2))
    yield OpSample("aten.diagonal_scatter.default", (m.real(4, 6, 5), m.real(4, 5), 0, 1, 2))
    yield OpSample("aten.diagonal_scatter.default", (m.real(6, 6), m.real(5), 1))
    yield OpSample("aten.trace.default", (m.real(6, 6),))
    yield OpSample("aten.vdot.default", (m.complex(8), m.complex(8)))
    yield OpSample("aten.unsafe_split.Tensor", (m.real(8, 6), 2, 1))
    for name in ("median.default", "nanmedian.default", "mode.default", "count_nonzero.default"):
        yield OpSample(f"aten.{name}", (m.ints(3, 5, 7),))
    yield OpSample("aten.nanmedian.dim", (m.real(5, 7), 1))
    yield OpSample("aten.count_nonzero.default", (m.ints(3, 5, 7), -1))


def _embeddings(m: Make) -> Iterator[OpSample]:
    yield OpSample("aten.embedding.default", (m.real(7, 6), m.ints(7, 4, 5)))
    yield OpSample("aten.embedding.default", (m.real(8, 4), m.ints(8, 5), 2))
    yield OpSample("aten.embedding.default", (m.real(6, 4), torch.tensor(3)))
    for rows, padding, scaled in ((7, -1, False), (7, 2, False), (8, 0, False), (8, -1, True)):
        ids = m.ints(rows, 4, 5)
        args = (m.real(4, 5, 6), ids, rows, padding, scaled)
        yield OpSample("aten.embedding_dense_backward.default", args)


def _losses(m: Make) -> Iterator[OpSample]:
    logits = m.real(5, 7) * 3
    target = torch.tensor([0, 6, -100, 3, 5])
    yield OpSample("autoshard.xent_stats.default", (logits, target, 0))
    yield OpSample("autoshard.xent_stats.default", (m.real(6, 12), m.ints(12, 6), 0))
    stats = torch.ops.autoshard.xent_stats(logits, target, 0)
    for ignore, smoothing in ((-100, 0.0), (-100, 0.1), (3, 0.2)):
        rest = (target, ignore, smoothing, 7, f64)
        yield OpSample("autoshard.xent_finish.default", (stats, *rest))
        lse = logits.logsumexp(1)
        args = (m.real(5), logits, target, lse, ignore, smoothing, 7, 0)
        yield OpSample("autoshard.xent_part_backward.default", args)


def _tiles(m: Make) -> Iterator[OpSample]:
    """Two products with what is wide between them, and the gradient of the second one's factor."""
    for batch, rows in ((2, 6), (1, 5)):
        count = batch * rows
        types = {
            "x": ((batch, rows, 4), "bs."),
            "a": ((4, 8), ".."),
            "b": ((8, 6), ".."),
            "flat": ((count, 4), "n."),
            "wide": ((count, 8), "n."),
            "act": ((count, 8), "n."),
            "y": ((count, 6), "n."),
            "turned": ((8, count), ".n"),
            "grad": ((8, 4), ".."),
        }
        kinds = {v: k if batch > 1 else k.replace("n", "s").replace("b", ".") for v, (_, k) in types.items()}

        def node(op: str, out: str, *args: Any, types: Any = types) -> Node:
            given = tuple(Ref(a) if isinstance(a, str) else a for a in args)
            return Node(f"aten.{op}.default", given, (), (out,), (TensorType(types[out][0], "f64"),))

        nodes = (
            node("reshape", "flat", "x", (-1, 4)),
            node("mm", "wide", "flat", "a"),
            node("relu", "act", "wide"),
            node("mm", "y", "act", "b"),
            node("t", "turned", "act"),
            node("mm", "grad", "turned", "flat"),
        )
        inputs = tuple((v, TensorType(types[v][0], "f64")) for v in "xab")
        body = Graph("tile", inputs, nodes, ("y", "grad"))
        given = [m.real(*types[v][0]) for v in "xab"]
        for most in (2, 100):
            args = RowTiles(most, body, kinds).args([Ref(v) for v in "xab"])
            yield OpSample(TILES, (tuple(given), *args[1:]))


def _scans(m: Make) -> Iterator[OpSample]:
    """A state that decays, with keys added to it, read by queries; sums of all steps of its gradient."""

    def node(op: str, out: str, *args: str, shape: tuple[int, ...]) -> Node:
        return Node(f"aten.{op}", tuple(map(Ref, args)), (), (out,), (TensorType(shape, "f64"),))

    nodes = (
        node("mul.Tensor", "kept", "state", "decay", shape=(4, 6, 8)),
        node("bmm.default", "added", "k", "v", shape=(4, 6, 8)),
        node("add.Tensor", "next", "kept", "added", shape=(4, 6, 8)),
        node("bmm.default", "out", "q", "next", shape=(4, 2, 8)),
        Node("aten.sum.dim_IntList", (Ref("out"), (0, 1)), (), ("term",), (TensorType((8,), "f64"),)),
    )
    shapes = {"state": (4, 6, 8), "decay": (8,), "k": (4, 6, 2), "v": (4, 2, 8), "q": (4, 2, 6)}
    inputs = tuple((v, TensorType(shape, "f64")) for v, shape in shapes.items())
    body = Graph("step", inputs, nodes, ("next", "out", "term", "next"))
    for first, stride in ((0, 1), (4, -2)):
        read = StepSlice(1, 5, first, stride)
        given: tuple[StepValue, ...] = ("carry", "same", read, read, StepSlice(0, 5, first, stride))
        scan = Scan(3, body, given, ("carry", StepSlice(2, 3, 2, -1), "sum", StepSlice(0, 3)))
        pairs = zip(given, inputs, strict=True)
        full = [how.full(t).shape if isinstance(how, StepSlice) else t.shape for how, (_, t) in pairs]
        args = scan.args([Ref(v) for v in shapes])
        yield OpSample(SCAN, (tuple(m.real(*shape) for shape in full), *args[1:]))


def _ctc(m: Make) -> Iterator[OpSample]:
    counted = torch.tensor([[1, 1, 0], [1, 0, 1], [0, 0, 1], [1, 1, 1], [0, 0, 0]]).bool()
    log_probs, lengths = m.real(7, 5, 6).log_softmax(-1), torch.tensor([7, 6, 7, 5, 7])
    args = (log_probs, m.ints(5, 5, 3) + 1, counted, lengths, counted.sum(1), 0)
    yield OpSample("autoshard.ctc.default", (*args, False))
    yield OpSample("autoshard.ctc.default", (*args, True))


def _recurrent(m: Make) -> Iterator[OpSample]:
    kinds = ((0, 4, 1, True), (0, 4, 2, False), (1, 3, 1, True), (2, 1, 1, False), (3, 1, 1, True))
    for kind, gates, directions, bias in kinds:
        rows = 4 * gates
        size = directions * (rows * 3 + rows * 4 + (2 * rows if bias else 0))
        args = (m.real(6, 5, 3), m.real(directions, 5, 4), m.real(directions, 5, 4), m.real(size) * 0.3)
        rest = (kind, bias, directions == 2)
        yield OpSample("autoshard.recurrent.default", (*args, *rest))
        grads = (m.real(6, 5, 4 * directions), m.real(directions, 5, 4), m.real(directions, 5, 4))
        yield OpSample("autoshard.recurrent_backward.default", (*grads, *args, *rest))


def _elementwise_losses(m: Make) -> Iterator[OpSample]:
    x, y, weight = m.unit(5, 6), m.unit(5, 6), m.unit(6)
    for reduction in (0, 1, 2):
        grad = m.real(5, 6) if reduction == 0 else m.real()
        for name, rest in {
            "mse_loss": (),
            "soft_margin_loss": (),
            "smooth_l1_loss": (0.3,),
            "huber_loss": (0.3,),
        }.items():
            yield OpSample(_op(name), (x, y, reduction, *rest))
            yield OpSample(_op(f"{name}_backward"), (grad, x, y, reduction, *rest))
        yield from _margins(m, reduction)
        for given in (None, weight):
            yield OpSample("aten.binary_cross_entropy.default", (x, y, given, reduction))
            yield OpSample("aten.binary_cross_entropy_backward.default", (grad, x, y, given, reduction))
            args = (x, y, None, given, reduction)
            yield OpSample("aten.binary_cross_entropy_with_logits.default", args)
    flat, classes = m.real(5, 7).log_softmax(1), torch.tensor([0, 6, -100, 3, 5])
    image, labels = m.real(4, 5, 3, 6).log_softmax(1), m.ints(5, 4, 3, 6)
    for name, scores, target in (("nll_loss", flat, classes), ("nll_loss2d", image, labels)):
        for reduction in (0, 1, 2):
            for given in (None, m.unit(scores.shape[1])):
                args = (target, given, reduction, -100)
                yield OpSample(f"aten.{name}_forward.default", (scores, *args))
                loss, total = getattr(torch.ops.aten, f"{name}_forward")(scores, *args)
                grads = (torch.randn_like(loss), scores, *args, total)
                yield OpSample(f"aten.{name}_backward.default", grads)
    yield OpSample("aten.nll_loss_forward.default", (flat[0], classes[0], None, 2, -100))


def _margins(m: Make, reduction: int) -> Iterator[OpSample]:
    """Losses that compare the classes of a row, of some rows and of one."""
    for scores, target in (
        (m.real(5, 6), m.ints(6, 5)),
        (m.real(6, 6), m.ints(6, 6)),
        (m.real(6), m.ints(6)),
    ):
        grad = m.real(len(scores)) if reduction == 0 and scores.dim() == 2 else m.real()
        for weight in (None, m.unit(6)):
            args = (scores, target, 1, 1.0, weight, reduction)
            yield OpSample("aten.multi_margin_loss.default", args)
            yield OpSample("aten.multi_margin_loss_backward.default", (grad, *args))
        classes = torch.full(scores.shape, -1)
        classes[..., :2] = m.ints(6, *scores.shape[:-1], 2)
        _, among = torch.ops.aten.multilabel_margin_loss_forward(scores, classes, reduction)
        yield OpSample("aten.multilabel_margin_loss_forward.default", (scores, classes, reduction))
        args = (grad, scores, classes, reduction, among)
        yield OpSample("aten.multilabel_margin_loss_backward.default", args)


def _indexing(m: Make) -> Iterator[OpSample]:
    x = m.real(4, 5, 6)
    rows = m.ints(4, 7)
    indices: list[tuple[Any, ...]] = [
        (rows,),
        (None, m.ints(5, 3, 4)),
        (None, m.ints(5, 4), m.ints(6, 4)),
        (None, m.ints(5, 4, 1), m.ints(6, 3)),
        (rows, None, m.ints(6, 7)),
        (m.ints(4, 2, 1), None, m.ints(6, 6)),
        (rows, m.ints(5, 7), m.ints(6, 1)),
        (None, None, torch.tensor(2)),
    ]
    for each in indices:
        for name in ("index", "_unsafe_index"):
            yield OpSample(f"aten.{name}.Tensor", (x, list(each)))
    yield OpSample("aten.index.Tensor", (m.ints(9, 5, 6), [None, m.ints(6, 4)]))
    for name in ("index_put", "_unsafe_index_put"):
        for each in indices:
            used = [i for i in each if i is not None]
            picked = torch.ops.aten.index.Tensor(x, list(each))
            yield OpSample(f"aten.{name}.default", (x, list(each), torch.randn_like(picked), True))
            if len(used) == 1 and used[0].dim() == 1:
                unique = [None if i is None else m.order(4)[:3] for i in each]
                put = torch.randn_like(torch.ops.aten.index.Tensor(x, unique))
                yield OpSample(f"aten.{name}.default", (x, unique, put))
        yield OpSample(f"aten.{name}.default", (x, [None, m.ints(5, 3)], m.real(1, 6), True))
        for added in (False, True):
            masks = ([m.bools(4, 5, 6)], [m.bools(4, 5)], [None, m.bools(5, 6)], [None, m.bools(5), None])
            for mask in masks:
                for value in (m.real(), m.real(1), torch.ones(1, 1, dtype=f64)):
                    if value.dim() < 2 or mask[0] is None:
                        yield OpSample(f"aten.{name}.default", (x, mask, value, added))
            yield OpSample(f"aten.{name}.default", (x, [m.bools(4)], m.real(5, 6), added))
            yield OpSample(f"aten.{name}.default", (x, [None, m.bools(5)], m.real(4, 1, 6), added))
            kept = torch.tensor([True, False, True, True, False])
            yield OpSample(f"aten.{name}.default", (x, [None, kept], m.real(4, 3, 6), added))
            yield OpSample(f"aten.{name}.default", (x, [None, kept, m.ints(6, 3)], m.real(), added))
        yield OpSample(f"aten.{name}.default", (x, [m.ints(4, 3)], torch.tensor(1.5, dtype=f64), True))
    yield OpSample("aten.index_select.default", (x, 1, m.ints(5, 7)))
    yield OpSample("aten.index_select.default", (x, -1, torch.tensor(2)))
    yield OpSample("aten.gather.default", (x, 1, m.ints(5, 4, 7, 6)))
    yield OpSample("aten.gather.default", (x, -1, m.ints(6, 3, 5, 1)))
    yield OpSample("aten.gather.default", (m.ints(9, 5, 6), 0, m.ints(5, 1, 6)))
    order = torch.stack([m.order(6) for _ in range(20)]).view(4, 5, 6)
    yield OpSample("aten.scatter.src", (x, 2, order, m.real(4, 5, 6)))
    yield OpSample("aten.scatter.src", (x, 2, order[:3], m.real(4, 5, 6)))
    yield OpSample("aten.scatter.value", (x, 2, m.ints(6, 4, 5, 1), 1.5))
    yield OpSample("aten.scatter.value", (x, -2, m.ints(5, 4, 2, 6), 0))
    for index in (m.ints(5, 4, 7, 6), m.ints(5, 4, 7, 2), m.ints(5, 2, 7, 6)):
        src = torch.randn(index.shape, dtype=f64)
        yield OpSample("aten.scatter_add.default", (x, 1, index, src))
    yield OpSample("aten.scatter_add.default", (m.real(4), 0, m.ints(4, 12), m.real(12)))
    yield OpSample("aten.scatter_add.default", (m.ints(9, 4), -1, m.ints(4, 12), m.ints(9, 12)))
    for index in (m.ints(5, 4, 7, 6), m.ints(5, 4, 7, 2)):
        src = torch.randn(index.shape, dtype=f64)
        yield OpSample("aten.scatter_reduce.two", (x, 1, index, src, "amax"))
    yield OpSample("aten.index_add.default", (x, 1, m.ints(5, 7), m.real(4, 7, 6)), {"alpha": 2})
    yield OpSample("aten.index_copy.default", (x, -1, m.order(6)[:4], m.real(4, 5, 4)))
    yield OpSample("aten.index_fill.int_Scalar", (x, 1, m.order(5)[:3], 1.5))
    yield OpSample("aten.index_fill.int_Tensor", (x, 0, m.order(4)[:2], torch.tensor(1.5, dtype=f64)))
    yield OpSample("aten.masked_scatter.default", (x, m.bools(5, 6), m.real(120)))
    yield OpSample("aten.masked_scatter_backward.default", (x, m.bools(4, 5, 6), [20, 6]))
    edges = m.real(5).sort().values
    yield OpSample("aten.searchsorted.Tensor", (edges, m.real(4, 6)))
    yield OpSample("aten.searchsorted.Tensor", (m.real(4, 5).sort().values, m.real(4, 6)), {"right": True})
    yield OpSample("aten.bucketize.Tensor", (m.real(4, 6), edges))
    yield OpSample("aten.isin.Tensor_Tensor", (m.ints(9, 4, 6), m.ints(9, 3)))


def _creations(m: Make) -> Iterator[OpSample]:
    yield OpSample("aten.full.default", ([5, 6], 2.5), {"dtype": f64})
    yield OpSample("aten.full.default", ([], 1), {"dtype": f64})
    yield OpSample("aten.zeros.default", ([5, 6],), {"dtype": f32})
    yield OpSample("aten.ones.default", ([5, 1, 8],), {"dtype": f32})
    yield OpSample("aten.empty.memory_format", ([5, 6],), {"dtype": f32}, shapes_only=True)
    yield OpSample("aten.new_empty.default", (m.real(5, 6), [4, 3]), shapes_only=True)
    yield OpSample("aten.new_empty.default", (m.real(5, 6), [5, 6]), {"dtype": f32}, shapes_only=True)
    yield OpSample("aten.new_empty_strided.default", (m.real(5, 6), [6, 5], [1, 6]), shapes_only=True)
    yield OpSample("aten.eye.default", (6,))
    yield OpSample("aten.eye.m", (5, 6))
    yield OpSample("aten.tril_indices.default", (5, 6))
    yield OpSample("aten.triu_indices.default", (5, 6))
    yield OpSample("aten.scalar_tensor.default", (2.5,), {"dtype": f64})
    yield OpSample("aten.arange.default", (6,))
    yield OpSample("aten.arange.start", (2, 8))
    yield OpSample("aten.arange.start_step", (2, 14, 3))
    yield OpSample("aten.linspace.default", (0, 1, 7), {"dtype": f64})
    seed = torch.tensor(1234567890123)
    for shape in ((6, 4), (5, 3, 4), (12,), ()):
        args = (0.4, seed, 3, [0] * len(shape), list(shape))
        yield OpSample("autoshard.dropout.default", (m.real(*shape), *args))
        yield OpSample("autoshard.total.default", (m.real(*shape),))


def _attention(m: Make) -> Iterator[OpSample]:
    masks: list[tuple[torch.Tensor | None, bool]] = [(None, False), (None, True)]
    for shape in ((4, 3, 5, 6), (4, 1, 5, 6), (1, 1, 5, 6), (1, 3, 1, 6), (5, 6), (1, 6), (4, 1, 1, 6)):
        masks.append((m.real(*shape), False))
    allowed = m.bools(4, 1, 5, 6)
    allowed[..., 0] = True
    masks.append((allowed, False))
    for channels in (4, 6):
        q, k, v = m.real(4, 3, 5, 4), m.real(4, 3, 6, 4), m.real(4, 3, 6, channels)
        for mask, causal in masks:
            yield OpSample("autoshard.sdpa.default", (q, k, v, mask, causal, 0.5))
            out, lse = torch.ops.autoshard.sdpa(q, k, v, mask, causal, 0.5)
            args = (torch.randn_like(out), q, k, v, out, lse, mask, causal, 0.5)
            yield OpSample("autoshard.sdpa_backward.default", args)
    yield from _few_queries(m)
    q, k, v = m.real(4, 3, 8, 4), m.real(4, 3, 8, 4), m.real(4, 3, 8, 6)
    for mask, window, causal in _bands(m):
        softcap = 0.0 if mask is None else 0.7
        told = (mask, causal, 0.5, window, softcap)
        yield OpSample("autoshard.sdpa.default", (q, k, v, *told))
        out, lse = torch.ops.autoshard.sdpa(q, k, v, *told)
        args = (torch.randn_like(out), q, k, v, out, lse, *told)
        yield OpSample("autoshard.sdpa_backward.default", args)


def _causal_convs(m: Make) -> Iterator[OpSample]:
    """In chunks with halos of any values, and in one piece."""
    for chunks, taps, dilation, bias in ((1, 4, 1, True), (4, 4, 1, False), (8, 3, 2, True)):
        x, grad, weight = m.real(4, 6, 6 * chunks), m.real(4, 6, 6 * chunks), m.real(6, 1, taps)
        shape = 4, 6, chunks, (taps - 1) * dilation
        before, after = (m.real(*shape), m.real(*shape)) if chunks > 1 else (None, None)
        args = (x, before, weight, m.real(6) if bias else None, dilation)
        yield OpSample("autoshard.causal_conv.default", args)
        for mask in ([True, True, bias], [False, True, bias], [True, False, False]):
            args = (grad, x, before, after, weight, dilation, mask)
            yield OpSample("autoshard.causal_conv_backward.default", args)


def _few_queries(m: Make) -> Iterator[OpSample]:
    """Of which parts of the keys are merged; some hide all of theirs from some rows, or from all."""
    padding, hidden = m.bools(4, 1, 1, 24), torch.zeros(4, 1, 2, 24)
    padding[0, ..., 6:], padding[1, ..., :12], padding[2] = False, False, False
    padding[3, ..., 7] = True
    hidden[..., 0, 12:] = hidden[1, ..., 1, :18] = float("-inf")
    q = m.real(4, 4, 2, 4)
    for mask in (None, padding, hidden, m.real(1, 24)):
        for heads in ((4,), (2, 1)):
            k, v = m.real(4, *heads, 24, 4), m.real(4, *heads, 24, 6)
            for softcap in (0.0, 0.7):
                yield OpSample("autoshard.sdpa_parts.default", (q, k, v, mask, 0.5, softcap))
                parts = torch.ops.autoshard.sdpa_parts(q, k, v, mask, 0.5, softcap)
                yield OpSample("autoshard.sdpa_joined.default", (parts, parts.dtype))
                out, lse = torch.ops.autoshard.sdpa_joined(parts, parts.dtype)
                args = (torch.randn_like(out), q, k, v, out, lse, mask, False, 0.5, 0, softcap)
                yield OpSample("autoshard.sdpa_backward.default", args)


def _bands(m: Make) -> list[tuple[torch.Tensor | None, int, bool]]:
    """(mask of 8 keys, window, causal)."""
    by_keys = m.bools(4, 1, 1, 8)
    by_keys[..., :2] = False  # whose first rows attend to nothing
    documents = m.bools(4, 1, 1, 8).cumsum(-1)
    masks = [(None, 0), (None, 3), (by_keys, 0), (by_keys, 3), (m.bools(1, 8), 5)]
    masks += [(documents, 0), (documents, 3), (documents[:1], 0), (m.ints(3, 4, 1, 1, 8), 0)]
    return [(mask, window, causal) for mask, window in masks for causal in (True, False)]


def _attention_of_rows(m: Make) -> Iterator[OpSample]:
    for rows, start, zigzag in ((2, 2, False), (4, 2, True), (8, 0, True)):
        q, k, v = m.real(4, 3, rows, 4), m.real(4, 3, 8, 4), m.real(4, 3, 8, 6)
        for band in [b for b in _bands(m) if b[0] is None or len(b[0]) == 4][::2]:
            rest = (0.5, start, zigzag, *band, 0.7 if band[1] else 0.0)
            yield OpSample("autoshard.sdpa_rows.default", (q, k, v, *rest))
            out, lse = torch.ops.autoshard.sdpa_rows(q, k, v, *rest)
            args = (torch.randn_like(out), q, k, v, out, lse, *rest)
            yield OpSample("autoshard.sdpa_rows_backward.default", args)


def _experts(m: Make) -> Iterator[OpSample]:
    yield OpSample("aten.bincount.default", (m.ints(6, 12), None, 8))
    yield OpSample("aten.histc.default", (m.real(12), 4, -3, 3))
    yield OpSample("aten.histc.default", (m.real(4, 6), 4))


def _similar_rows(m: Make) -> Iterator[OpSample]:
    """Rows that are alone, whose groups are the same however tokens are divided."""
    x, made, means, weights = m.real(4, 6), m.real(8, 6), m.real(8, 6), m.real(4, 2)
    chosen, alone = m.ints(5, 4, 2), torch.zeros(4, 2, dtype=torch.long)
    yield OpSample("autoshard.lsh_groups.default", (x, chosen, 5, 9, 0))
    yield OpSample("autoshard.group_choices.default", (chosen, alone))
    yield OpSample("autoshard.group_means.default", (x, alone))
    yield OpSample("autoshard.ungroup.default", (made, x, means, weights, alone))
    yield OpSample("autoshard.ungroup_to_rows.default", (x, weights, alone))
    yield OpSample("autoshard.ungroup_to_weights.default", (x, made, x + 1, means, weights, alone))
    yield OpSample("autoshard.ungroup_to_tokens.default", (made, means, x, weights, alone))


FAMILIES: tuple[Callable[[Make], Iterator[OpSample]], ...] = (
    _pointwise,
    _views,
    _reductions,
    _matmuls,
    _norms,
    _image_norms,
    _images,
    _matrices,
    _embeddings,
    _losses,
    _ctc,
    _recurrent,
    _elementwise_losses,
    _indexing,
    _creations,
    _attention,
    _experts,
    _similar_rows,
    _attention_of_rows,
    _tiles,
    _scans,
)


def all_samples() -> list[OpSample]:
    """All samples, in the same order and with the same values every time."""
    torch.manual_seed(0)
    make = Make()
    return [sample for family in FAMILIES for sample in family(make)]
