"""What ops are on residues. An op that is not here has its decomposition, or none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from autoshard.auditing.field.functions import Functions
from autoshard.auditing.field.residues import (
    bilinear,
    hashed,
    inverse,
    power,
    product,
    reduced,
    residue,
    residues,
)

Op = Callable[..., Any]
Value = Tensor | float | int | bool
aten = torch.ops.aten

#: ops that put elements elsewhere, or make them of nothing: as they are
MOVES = frozenset(
    """
    complex resolve_conj resolve_neg view_as_complex _conj_physical
    alias arange as_strided as_strided_scatter bernoulli broadcast_tensors cat chunk clone
    constant_pad_nd contiguous copy detach diagonal diagonal_copy diagonal_scatter diag_embed
    embedding empty empty_like empty_permuted empty_strided expand expand_copy eye fill flip full
    full_like gather index index_copy index_fill index_select isfinite isinf isnan lift lift_fresh
    lift_fresh_copy linspace masked_fill masked_scatter masked_select movedim narrow
    new_empty new_empty_strided new_full new_ones new_zeros normal ones ones_like permute pixel_shuffle
    pixel_unshuffle rand rand_like randn randn_like random randint randint_like randperm
    reflection_pad1d reflection_pad2d repeat repeat_interleave replication_pad2d reshape resize roll
    rot90 scalar_tensor scatter select select_backward select_copy select_scatter set slice
    slice_backward slice_copy slice_scatter split split_copy split_with_sizes split_with_sizes_copy
    squeeze squeeze_copy stack swapaxes t t_copy take transpose transpose_copy tril triu unbind
    unbind_copy unfold uniform unsqueeze unsqueeze_copy upsample_nearest1d upsample_nearest2d view
    view_as_real view_copy where zero zeros zeros_like _reshape_alias _to_copy _unsafe_view
    _reshape_copy _chunk_cat record_stream is_same_size equal
    """.split()  # noqa: SIM905
)
#: ops that add up some of what they take
SUMS = frozenset(
    """
    sum cumsum index_put index_add scatter_add embedding_dense_backward trace unfold_backward im2col
    col2im nansum upsample_nearest1d_backward upsample_nearest2d_backward reflection_pad1d_backward
    reflection_pad2d_backward replication_pad2d_backward max_pool2d_with_indices_backward
    """.split()  # noqa: SIM905
)
#: products of two tensors, summed
PRODUCTS = frozenset("mm bmm mv dot vdot convolution _grouped_mm".split())  # noqa: SIM905
#: ops on the order of elements
ORDERS = frozenset(
    """
    max min amax amin maximum minimum sort topk argmax argmin argsort cummax cummin median kthvalue
    max_pool2d_with_indices gt lt ge le searchsorted bucketize
    """.split()  # noqa: SIM905
)
COMPARISONS = frozenset("gt lt ge le maximum minimum searchsorted bucketize".split())  # noqa: SIM905
#: functions of each element of which no law is used
UNKNOWN = frozenset(
    """
    erf erfc erfinv sin cos tan asin acos atan sinh cosh tanh log2 log10 log1p expm1 exp2 lgamma
    digamma ceil floor round trunc frac cbrt
    """.split()  # noqa: SIM905
)


def _tensor(x: Value) -> Tensor:
    """A tensor, or a number, as residues."""
    return residues(x) if isinstance(x, Tensor) else torch.tensor(residue(float(x)), dtype=torch.float64)


def _add(f: Functions, a: Value, b: Value, alpha: float = 1) -> Tensor:
    other = _tensor(b) if alpha == 1 else f.product(_tensor(b), _tensor(alpha))
    return f.sum(_tensor(a), other)


def _sub(f: Functions, a: Value, b: Value, alpha: float = 1) -> Tensor:
    other = _tensor(b) if alpha == 1 else f.product(_tensor(b), _tensor(alpha))
    return f.difference(_tensor(a), other)


def _rsub(f: Functions, a: Value, b: Value, alpha: float = 1) -> Tensor:
    return _sub(f, b, _tensor(a) if alpha == 1 else f.product(_tensor(a), _tensor(alpha)))


def _mul(f: Functions, a: Value, b: Value) -> Tensor:
    if any(isinstance(x, Tensor) and x.is_complex() for x in (a, b)):
        (a, ai), (b, bi) = _parts(a), _parts(b)
        real, imaginary = product(a, b) - product(ai, bi), product(a, bi) + product(ai, b)
        return torch.complex(reduced(real), reduced(imaginary))
    return f.product(_operand(f, a), _operand(f, b))


def _operand(f: Functions, x: Value) -> Tensor:
    """As residues; numbers, which torch may have made tensors without dims, as `Functions.number`."""
    if isinstance(x, Tensor) and (x.dim() or not x.is_floating_point() or float(x.detach()).is_integer()):
        return residues(x)
    return f.number(float(x.detach()) if isinstance(x, Tensor) else float(x))


def _parts(x: Value) -> tuple[Tensor, Tensor]:
    """Real and imaginary parts."""
    if isinstance(x, Tensor) and x.is_complex():
        return _tensor(x.resolve_conj().real), _tensor(x.resolve_conj().imag)
    return _tensor(x), _tensor(0)


def _polar(f: Functions, size: Tensor, angle: Tensor) -> Tensor:
    size, angle = _tensor(size), _tensor(angle)
    return torch.complex(product(size, f.unknown("cos", angle)), product(size, f.unknown("sin", angle)))


def _div(f: Functions, a: Value, b: Value, rounding_mode: str | None = None) -> Tensor:
    quotient = f.quotient(_operand(f, a), _operand(f, b))
    return quotient if rounding_mode is None else hashed(rounding_mode, quotient)


def _neg(f: Functions, a: Tensor) -> Tensor:
    return reduced(-_tensor(a))


def _pow(f: Functions, base: Value, exponent: Value) -> Tensor:
    if isinstance(exponent, Tensor) and exponent.dim() == 0:
        exponent = float(exponent)
    if not isinstance(base, Tensor):
        return hashed(f"{base} to the", _tensor(exponent))
    if isinstance(exponent, Tensor):
        return hashed("pow", _tensor(base), _tensor(exponent))
    return f.power(_tensor(base), float(exponent))


def _mean(f: Functions, x: Tensor, *how: Any, **more: Any) -> Tensor:
    total = reduced(aten.sum(_tensor(x), *how, **more))
    return product(total, inverse(_tensor(x.numel() / max(total.numel(), 1))))


def _norm(
    f: Functions, x: Tensor, ord: float = 2, dim: Any = None, keepdim: bool = False, dtype: Any = None
) -> Tensor:
    x = _tensor(x)
    dims = list(range(x.dim())) if dim is None else dim
    if ord in (float("inf"), float("-inf")):
        extreme = torch.amax if ord > 0 else torch.amin
        return f.at_place(extreme(f.place(x).abs(), dims, keepdim))
    if ord == 1:
        return reduced(torch.sum(product(x, _tensor(f.sign(x))), dims, keepdim))
    total = reduced(torch.sum(f.power(x, ord), dims, keepdim))
    return f.sqrt(total) if ord == 2 else hashed(f"root {ord}", total)


def _variance(
    f: Functions,
    x: Tensor,
    dim: Any = None,
    unbiased: bool = True,
    keepdim: bool = False,
    *,
    correction: float | None = None,
) -> Any:
    x = _tensor(x)
    if isinstance(dim, bool):  # an overload without dims
        dim, unbiased = None, dim
    dims = list(range(x.dim())) if not dim else list(dim)
    mean = _mean(f, x, dims, True)
    square = reduced(torch.sum(power(reduced(x - mean), 2), dims, keepdim))
    kept = mean if keepdim else mean.reshape(square.shape)
    less = float(unbiased) if correction is None else float(correction)
    count = x.numel() / max(square.numel(), 1)
    return product(square, inverse(_tensor(count - less))), kept


def _relu(f: Functions, x: Tensor) -> Tensor:
    return product(_tensor(x), f.is_positive(_tensor(x)))


def _threshold_backward(f: Functions, gradient: Tensor, x: Tensor, threshold: float) -> Tensor:
    return product(_tensor(gradient), f.is_positive(_sub(f, x, threshold)))


def _clamp(f: Functions, x: Tensor, low: Value | None = None, high: Value | None = None) -> Tensor:
    if high is None and low is not None and not isinstance(low, Tensor) and low == 0:
        return _relu(f, x)
    if isinstance(low, Tensor) or isinstance(high, Tensor):
        bounds = [_tensor(0 if b is None else b) for b in (low, high)]
        return hashed(f"clamp {low is None} {high is None}", _tensor(x), *bounds)
    return f.clamp(
        _tensor(x), -torch.inf if low is None else float(low), torch.inf if high is None else float(high)
    )


def _solve_triangular(
    f: Functions, a: Tensor, b: Tensor, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> Tensor:
    """The x of a x = b, or of x a = b: for a = 1 - m it is (1 + m)(1 + m^2)(1 + m^4) ... b."""
    if not left:
        return _solve_triangular(f, a.mT, b.mT, upper=not upper, unitriangular=unitriangular).mT
    a, x = _tensor(a), _tensor(b)
    if not unitriangular:
        over = inverse(a.diagonal(0, -2, -1))[..., None]
        a, x = product(a, over), product(x, over)
    m, done = reduced(-(a.triu(1) if upper else a.tril(-1))), 1
    while done < a.shape[-1]:
        x = reduced(x + bilinear(torch.matmul, m, x))
        m, done = bilinear(torch.matmul, m, m), 2 * done
    return x


def _dropout(f: Functions, x: Tensor, p: float, train: bool | None) -> Any:
    scaled, mask = aten.native_dropout(torch.ones_like(x), p, train)
    return product(_tensor(x), _tensor(scaled)), mask


def _convolution_backward(
    f: Functions, gradient: Tensor, x: Tensor, weight: Tensor, sizes: Any, *how: Any
) -> Any:
    gradient, x, weight, (*rest, mask) = _tensor(gradient), _tensor(x), _tensor(weight), how
    op = aten.convolution_backward
    of_input = of_weight = of_bias = None
    if mask[0]:
        only = [True, False, False]
        of_input = bilinear(lambda g, w: op(g, x, w, sizes, *rest, only)[0], gradient, weight)
    if mask[1]:
        only_weight = [False, True, False]
        of_weight = bilinear(lambda g, i: op(g, i, weight, sizes, *rest, only_weight)[1], gradient, x)
    if mask[2]:
        of_bias = reduced(gradient.sum([d for d in range(gradient.dim()) if d != 1]))
    return of_input, of_weight, of_bias


def _attention(
    f: Functions, q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, is_causal: bool = False,
    *, attn_mask: Tensor | None = None, scale: float | None = None,
) -> Any:  # fmt: skip
    k, v = _per_head(k, q), _per_head(v, q)
    weights, total = _weights(f, q, k, is_causal, attn_mask, scale)
    return bilinear(torch.matmul, weights, _tensor(v)), total


def _per_head(x: Tensor, q: Tensor) -> Tensor:
    """Keys or values for each head of queries, several of which may share them."""
    return x if x.shape[-3] == q.shape[-3] else x.repeat_interleave(q.shape[-3] // x.shape[-3], -3)


def _per_group(gradient: Tensor, x: Tensor) -> Tensor:
    """The gradient of what heads share."""
    if gradient.shape == x.shape:
        return gradient
    return reduced(gradient.unflatten(-3, (x.shape[-3], -1)).sum(-3))


def _weights(
    f: Functions, q: Tensor, k: Tensor, is_causal: bool, mask: Tensor | None, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Probabilities, and the logarithms of the sums that they are divided by."""
    scores = product(bilinear(torch.matmul, _tensor(q), _tensor(k).transpose(-1, -2)), _scale(f, q, scale))
    if is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).tril().logical_not()
        scores = scores.masked_fill(later, -torch.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype is torch.bool else _add(f, scores, mask)
    top = f.at_place(f.place(scores).amax(-1, keepdim=True))
    powers = f.exp(f.difference(scores, top))
    total = reduced(powers.sum(-1, keepdim=True))
    return product(powers, inverse(total)), f.sum(top, f.log(total)).squeeze(-1)


def _scale(f: Functions, q: Tensor, scale: float | None) -> Tensor:
    return f.number(q.shape[-1] ** -0.5 if scale is None else scale)


def _attention_backward(
    f: Functions, gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor,
    dropout_p: float, is_causal: bool, *, attn_mask: Tensor | None = None, scale: float | None = None,
) -> Any:  # fmt: skip
    gradient, q, keys, values = map(_tensor, (gradient, q, k, v))
    k, v = _per_head(keys, q), _per_head(values, q)
    weights, _ = _weights(f, q, k, is_causal, attn_mask, scale)
    of_weights = bilinear(torch.matmul, gradient, v.transpose(-1, -2))
    row = reduced(product(gradient, _tensor(out)).sum(-1, keepdim=True))
    of_scores = product(product(weights, reduced(of_weights - row)), _scale(f, q, scale))
    return (
        bilinear(torch.matmul, of_scores, k),
        _per_group(bilinear(torch.matmul, of_scores.transpose(-1, -2), q), keys),
        _per_group(bilinear(torch.matmul, weights.transpose(-1, -2), gradient), values),
    )


OPS: dict[str, Op] = {
    "add": _add,
    "sub": _sub,
    "rsub": _rsub,
    "mul": _mul,
    "div": _div,
    "polar": _polar,
    "neg": _neg,
    "pow": _pow,
    "mean": _mean,
    "linalg_vector_norm": _norm,
    "var": lambda f, *args, **how: _variance(f, *args, **how)[0],
    "var_mean": _variance,
    "relu": _relu,
    "threshold_backward": _threshold_backward,
    "clamp": _clamp,
    "clamp_min": lambda f, x, low: _clamp(f, x, low),
    "clamp_max": lambda f, x, high: _clamp(f, x, None, high),
    "linalg_solve_triangular": _solve_triangular,
    "native_dropout": _dropout,
    "convolution_backward": _convolution_backward,
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "reciprocal": lambda f, x: inverse(_tensor(x)),
    "square": lambda f, x: f.power(_tensor(x), 2),
    "sqrt": lambda f, x: f.sqrt(_tensor(x)),
    "rsqrt": lambda f, x: f.rsqrt(_tensor(x)),
    "exp": lambda f, x: f.exp(_tensor(x)),
    "log": lambda f, x: f.log(_tensor(x)),
    "sigmoid": lambda f, x: f.sigmoid(_tensor(x)),
    "log_sigmoid_forward": lambda f, x: (f.log(f.sigmoid(_tensor(x))), x.new_empty(0)),
    "log_sigmoid_backward": lambda f, g, x, _: product(_tensor(g), f.sigmoid(_neg(f, x))),
    "logaddexp": lambda f, a, b: f.log(reduced(f.exp(_tensor(a)) + f.exp(_tensor(b)))),
    "abs": lambda f, x: product(_tensor(x), _tensor(f.sign(x))),
    "sign": lambda f, x: f.sign(x),
    "sgn": lambda f, x: f.sign(x),
    "eq": lambda f, a, b: aten.eq(_tensor(a), _tensor(b)),
    "ne": lambda f, a, b: aten.ne(_tensor(a), _tensor(b)),
    "allclose": lambda f, a, b, *_, **how: torch.equal(_tensor(a), _tensor(b)),
    "logical_not": lambda f, x: _tensor(x) == 0,
    "any": lambda f, x, *how: aten.any(_tensor(x) != 0, *how),
    "all": lambda f, x, *how: aten.all(_tensor(x) != 0, *how),
}  # fmt: skip


def _summed(op: Op, f: Functions, *args: Any, **kwargs: Any) -> Any:
    """An op of `SUMS`."""
    args, kwargs = tree_map_only(
        Tensor, lambda x: residues(x) if x.is_floating_point() else x, (args, kwargs)
    )
    out = op(*args, **kwargs)
    return tree_map_only(Tensor, lambda x: reduced(x) if x.is_floating_point() else x, out)


def _multiplied(op: Op, f: Functions, a: Tensor, b: Tensor, *rest: Any, **kwargs: Any) -> Any:
    """An op of `PRODUCTS`."""
    bias = None
    if rest and isinstance(rest[0], Tensor) and rest[0].is_floating_point():
        bias, rest = rest[0], (None, *rest[1:])
    out = bilinear(lambda u, v: op(u, v, *rest, **kwargs), _tensor(a), _tensor(b))
    return out if bias is None else reduced(out + _tensor(bias).reshape(-1, *[1] * (out.dim() - 2)))


def _ordered(op: Op, compared: int, f: Functions, *args: Any, **kwargs: Any) -> Any:
    """An op of `ORDERS`. compared: how many of its arguments it compares."""

    def place(x: Any) -> Any:
        if isinstance(x, Tensor):
            return f.place(x) if x.is_floating_point() or compared > 1 else x
        return float(f.place(_tensor(x)))

    placed = [place(x) if k < compared else x for k, x in enumerate(args)]
    placed[1:] = tree_map_only(Tensor, place, placed[1:]) if compared == 1 else placed[1:]
    return tree_map_only(
        Tensor, lambda x: f.at_place(x) if x.is_floating_point() else x, op(*placed, **kwargs)
    )


def operation(name: str, op: Op) -> Op | None:
    """What an op with a name is on residues, None if nothing is known."""
    if name in OPS:
        return OPS[name]
    if name in UNKNOWN:
        return lambda f, x: f.unknown(name, _tensor(x))
    if name in SUMS:
        return partial(_summed, op)
    if name in PRODUCTS:
        return partial(_multiplied, op)
    if name in ORDERS:
        return partial(_ordered, op, 2 if name in COMPARISONS else 1)
    return None


def each_of(lists: Sequence[Any]) -> list[tuple[Any, ...]]:
    """The arguments of an op on lists (``_foreach_*``), one op after the other."""
    count = max(len(x) for x in lists if isinstance(x, list | tuple))
    return [tuple(x[k] if isinstance(x, list | tuple) else x for x in lists) for k in range(count)]
