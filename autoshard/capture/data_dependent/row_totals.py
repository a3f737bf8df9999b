"""What rows that a mask chooses come to: sums, means and losses, without the rows that do not count.

``loss[mask].mean()`` is then a sum over all rows, in which the others are zero, divided by the number of
those that count. The others hold a number of which no usual function makes an infinity or NaN, so that their
gradients, which are zero, stay zero.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import Any

import torch

#: what the rows that do not count hold: logarithms, roots, quotients and arc functions of it are finite
_HARMLESS = 0.5
#: losses of elements, and those of rows of classes
ELEMENTWISE = frozenset(
    """
    mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div
    soft_margin_loss poisson_nll_loss gaussian_nll_loss
    """.split()  # noqa: SIM905 - a table reads better than quoted names
)
CLASSWISE = frozenset(("cross_entropy", "nll_loss"))
#: functions along some dims, with the place of the argument that says which, and what it is if left out
_ALONG: Mapping[str, tuple[int, int | None]] = MappingProxyType(
    {
        **dict.fromkeys(("sum", "mean", "amax", "amin", "logsumexp", "argmax", "argmin", "prod"), (1, None)),
        **dict.fromkeys(("any", "all", "cumsum", "max", "min", "var", "std", "softmax"), (1, None)),
        **dict.fromkeys(("norm", "vector_norm", "linalg_vector_norm"), (2, None)),
        **{"log_softmax": (1, None), "sort": (1, -1), "topk": (2, -1), "normalize": (2, 1)},
    }
)


def chosen(x: torch.Tensor, counts: torch.Tensor, dims: int) -> torch.Tensor:
    """Rows [rows, ...] of all places of the first ``dims`` dims. counts: flat, which of them count."""
    rows = x.reshape(len(counts), *x.shape[dims:])
    harmless = _HARMLESS if x.is_floating_point() or x.is_complex() else 0
    return rows.masked_fill(~_beside(counts, rows), harmless)


def _beside(counts: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The flags of rows [rows, ...], to broadcast."""
    return counts.reshape(-1, *[1] * (rows.dim() - 1))


def reduced_dims(args: Sequence[Any], kwargs: Mapping[str, Any], rank: int) -> tuple[int, ...]:
    """The dims that a reduction of one tensor is over, ascending; all of them if none is named.

    An argument that is true or false, as that of ``var``, names none.
    """
    args = [a for a in args if not isinstance(a, bool)]
    given = kwargs.get("dim", kwargs.get("axis", args[1] if len(args) > 1 else None))
    if given is None or given == () or given == []:
        return tuple(range(rank))
    return tuple(sorted(d % rank for d in (given if isinstance(given, tuple | list) else (given,))))


def is_over_rows(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a reduction is over the rows at dim 0 of its first argument, perhaps among others."""
    return 0 in reduced_dims(args, kwargs, args[0].dim())


def row_by_row(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], others: int) -> bool:
    """Whether a function of the rows at dim 0 of its first argument makes one of each that it is given.

    others: number of its tensors that are no rows of these.
    """
    rows: torch.Tensor = args[0]
    if name == "embedding":
        told = [kwargs.get(key) for key in ("max_norm", "scale_grad_by_freq", "sparse")]
        return others == 1 and len(args) == 2 and not any(told)
    if others:
        return False
    if name == "__getitem__":
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        used = sum(isinstance(i, int | slice) for i in index)
        kept = index[0] is Ellipsis and used < rows.dim()
        plain = all(i is None or i is Ellipsis or isinstance(i, int | slice) for i in index)
        return plain and (kept or (isinstance(index[0], slice) and index[0] == slice(None)))
    if name == "gather":
        return len(args) == 3 and isinstance(args[1], int) and args[1] % rows.dim() != 0
    if name == "one_hot":
        classes = kwargs.get("num_classes", args[1] if len(args) > 1 else -1)
        return isinstance(classes, int) and classes > 0
    if name not in _ALONG:
        return False
    place, default = _ALONG[name]
    given = kwargs.get("dim", kwargs.get("dims", args[place] if len(args) > place else default))
    dims = given if isinstance(given, tuple | list) else (given,)
    return all(isinstance(d, int) and not isinstance(d, bool) and d % rows.dim() for d in dims) and bool(dims)


def total(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any], counts: torch.Tensor
) -> torch.Tensor | None:
    """``sum`` or ``mean`` over the rows at dim 0 of the first argument, and over what other dims are named.

    args, kwargs: of the function. None if it is asked in a way that is not known.
    """
    rows: torch.Tensor = args[0]
    if set(kwargs) - {"dim", "axis", "keepdim", "dtype"}:
        return None
    if name == "mean" and not (rows.is_floating_point() or rows.is_complex()):
        return None
    over = reduced_dims(args, kwargs, rows.dim())
    keepdim = bool(kwargs.get("keepdim", args[2] if len(args) > 2 else False))
    if name == "mean":
        return _mean(rows, over, keepdim, counts).to(kwargs.get("dtype") or rows.dtype)
    return rows.masked_fill(~_beside(counts, rows), 0).sum(over, keepdim, dtype=kwargs.get("dtype"))


def _mean(rows: torch.Tensor, over: Sequence[int], keepdim: bool, counts: torch.Tensor) -> torch.Tensor:
    """In 32 bits at least, as sums of many rows are large."""
    kept = rows.masked_fill(~_beside(counts, rows), 0)
    wide = torch.promote_types(rows.dtype, torch.float32)
    return kept.sum(tuple(over), keepdim, dtype=wide) / _number(rows, over, counts)


def _number(rows: torch.Tensor, over: Sequence[int], counts: torch.Tensor) -> torch.Tensor:
    """How many elements of rows that count a reduction over dims, 0 among them, takes together."""
    return counts.sum() * prod(rows.shape[d] for d in over if d)


def spread(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any], counts: torch.Tensor
) -> torch.Tensor | None:
    """``var`` or ``std``, as `total`."""
    rows: torch.Tensor = args[0]
    unbiased = kwargs.get("unbiased", args[1] if len(args) > 1 and isinstance(args[1], bool) else True)
    correction = kwargs.get("correction", int(unbiased))
    known = set(kwargs) <= {"dim", "keepdim", "unbiased", "correction"} and len(args) <= 2
    if not known or not rows.is_floating_point() or not isinstance(correction, int):
        return None
    over = reduced_dims(args, kwargs, rows.dim())
    apart = (rows - _mean(rows, over, True, counts)).masked_fill(~_beside(counts, rows), 0).square()
    result = apart.sum(over, bool(kwargs.get("keepdim"))) / (_number(rows, over, counts) - correction).clamp(
        min=0
    )
    result = result.to(rows.dtype)
    if name == "var":
        return result
    # the gradient of the root of 0 is 0, as torch has it
    same = result == 0
    return result.masked_fill(same, 1.0).sqrt().masked_fill(same, 0.0)


def loss(
    function: Callable[..., Any],
    classwise: bool,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    counts: torch.Tensor,
) -> tuple[torch.Tensor, bool] | None:
    """(the loss of rows at dim 0, whether it still is one of each), None if it is not known how to divide.

    classwise: whether each row has a class, and weighs nothing if that is one to be ignored.
    """
    given = inspect.signature(function).bind(*args, **kwargs).arguments
    if given.get("size_average") is not None or given.get("reduce") is not None:
        return None
    reduction = given.get("reduction", "mean")
    each = function(**{**given, "reduction": "none"})
    if not isinstance(each, torch.Tensor) or each.dim() == 0 or len(each) != len(counts):
        return None
    if reduction == "none":
        return each, True
    summed = each.masked_fill(~_beside(counts, each), 0).sum()
    if reduction == "sum":
        return summed, False
    numbers: Any = counts.sum()
    target = given.get("target")
    if classwise and isinstance(target, torch.Tensor) and not target.is_floating_point():
        valid = target != given.get("ignore_index", -100)
        numbers = (valid & _beside(counts, valid)).sum()
    elif reduction == "mean":
        numbers = numbers * prod(each.shape[1:])
    elif reduction != "batchmean":
        return None
    return summed / numbers, False


def assigned(x: torch.Tensor, rows: torch.Tensor, counts: torch.Tensor, dims: int) -> torch.Tensor:
    """``x`` with rows in the places of the mask over its first ``dims`` dims that chose them."""
    flags = counts.reshape(*x.shape[:dims], *[1] * (x.dim() - dims))
    return torch.where(flags, rows.reshape(x.shape).to(x.dtype), x)
