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
    return rows.masked_fill(~_beside(counts, rows, 0), harmless)


def _beside(counts: torch.Tensor, rows: torch.Tensor, dim: int) -> torch.Tensor:
    """The flags of rows at ``dim``, to broadcast."""
    return counts.reshape([len(counts) if d == dim else 1 for d in range(rows.dim())])


def reduced_dims(args: Sequence[Any], kwargs: Mapping[str, Any], rank: int) -> tuple[int, ...]:
    """The dims that a reduction of one tensor is over, ascending; all of them if none is named."""
    given = kwargs.get("dim", kwargs.get("axis", args[1] if len(args) > 1 else None))
    if given is None or given == () or given == []:
        return tuple(range(rank))
    return tuple(sorted(d % rank for d in (given if isinstance(given, tuple | list) else (given,))))


def is_over_rows(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a reduction is over the rows at dim 0 of its first argument, perhaps among others."""
    plain = [a for a in args if not isinstance(a, bool)]
    return 0 in reduced_dims(plain, kwargs, args[0].dim())


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
    name: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    counts: torch.Tensor,
    dim: int,
) -> torch.Tensor | None:
    """``sum`` or ``mean`` over the rows, which are at ``dim`` of the first argument; None if it is neither.

    args, kwargs: of the function; over the dims that it names, the rows among them.
    """
    rows: torch.Tensor = args[0]
    if name not in ("sum", "mean") or set(kwargs) - {"dim", "axis", "keepdim", "dtype"}:
        return None
    if name == "mean" and not (rows.is_floating_point() or rows.is_complex()):
        return None
    over = reduced_dims(args, kwargs, rows.dim())
    kept = rows.masked_fill(~_beside(counts, rows, dim), 0)
    keepdim = bool(kwargs.get("keepdim", args[2] if len(args) > 2 else False))
    if name == "sum":
        return kept.sum(over, keepdim, dtype=kwargs.get("dtype"))
    found = kept.sum(over, keepdim, dtype=torch.promote_types(rows.dtype, torch.float32))
    found = found / (counts.sum() * prod(rows.shape[d] for d in over if d != dim))
    return found.to(kwargs.get("dtype") or rows.dtype)


def spread(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any], counts: torch.Tensor, dim: int
) -> torch.Tensor | None:
    """``var`` or ``std`` over the rows, as `total`; None if it is asked in a way that is not known."""
    rows: torch.Tensor = args[0]
    unbiased = kwargs.get("unbiased", args[1] if len(args) > 1 and isinstance(args[1], bool) else True)
    correction = kwargs.get("correction", int(unbiased))
    known = set(kwargs) <= {"dim", "keepdim", "unbiased", "correction"} and len(args) <= 2
    if not known or not rows.is_floating_point() or not isinstance(correction, int):
        return None
    over = reduced_dims([a for a in args if not isinstance(a, bool)], kwargs, rows.dim())
    flags, number = _beside(counts, rows, dim), counts.sum() * prod(rows.shape[d] for d in over if d != dim)
    mean = rows.masked_fill(~flags, 0).sum(over, True) / number
    apart = (rows - mean).masked_fill(~flags, 0).square().sum(over, bool(kwargs.get("keepdim")))
    found = apart / (number - correction).clamp(min=0)
    if name == "var":
        return found
    # the gradient of the root of 0 is 0, as torch has it
    same = found == 0
    return found.masked_fill(same, 1.0).sqrt().masked_fill(same, 0.0)


def loss(
    function: Callable[..., Any],
    name: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    counts: torch.Tensor,
) -> tuple[torch.Tensor, bool] | None:
    """(the loss of rows at dim 0, whether it still is one of each), None if it is not known how to divide."""
    given = inspect.signature(function).bind(*args, **kwargs).arguments
    if given.get("size_average") is not None or given.get("reduce") is not None:
        return None
    if name in CLASSWISE and given.get("weight") is not None:
        return None
    reduction = given.get("reduction", "mean")
    each = function(**{**given, "reduction": "none"})
    if not isinstance(each, torch.Tensor) or each.dim() == 0 or len(each) != len(counts):
        return None
    if reduction == "none":
        return each, True
    summed = each.masked_fill(~_beside(counts, each, 0), 0).sum()
    if reduction == "sum":
        return summed, False
    numbers: Any = counts.sum()
    target = given.get("target")
    if name in CLASSWISE and isinstance(target, torch.Tensor) and not target.is_floating_point():
        valid = target != given.get("ignore_index", -100)
        numbers = (valid & _beside(counts, valid, 0)).sum()
    elif reduction == "mean":
        numbers = numbers * prod(each.shape[1:])
    elif reduction != "batchmean":
        return None
    return summed / numbers, False


def assigned(x: torch.Tensor, rows: torch.Tensor, counts: torch.Tensor, dims: int) -> torch.Tensor:
    """``x`` with rows in the places of the mask over its first ``dims`` dims that chose them."""
    flags = counts.reshape(*x.shape[:dims], *[1] * (x.dim() - dims))
    return torch.where(flags, rows.reshape(x.shape).to(x.dtype), x)
