"""The AdamW step of a shard, with the gradient clipped on the way and the copy for the next gather written.

I. Loshchilov, F. Hutter, "Decoupled Weight Decay Regularization", 2019, algorithm 2, as torch.optim.AdamW
has it.
Clipping by the norm over all shards (Pascanu et al., 2013): ``sum_squares`` of each rank's gradients, an
all-reduce of that one number, and the factor min(1, limit / norm) as a tensor, so that the host never waits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import sqrt
from typing import Any

import torch

from autoshard.errors import UsageError
from autoshard.kernels.launch import launched
from autoshard.kernels.norm import wide
from autoshard.kernels.registry import Cost, KernelSpec, Operand
from autoshard.kernels.samples import Generator, normal
from autoshard.torch_adapters.op_library import define


def corrections(beta1: float, beta2: float, step: int) -> tuple[float, float]:
    """(1 - beta1^step, sqrt(1 - beta2^step)) of step 1, 2, ..."""
    return 1 - beta1**step, sqrt(1 - beta2**step)


def check_state(*tensors: torch.Tensor | None) -> None:
    """UsageError unless all tensors have one shape and lie in one piece: they are changed in place."""
    there = [t for t in tensors if t is not None]
    if any(t.shape != there[0].shape or not t.is_contiguous() for t in there):
        raise UsageError(
            "parameter, moments and copy of an optimizer step differ in shape, or are not contiguous",
            why=", ".join(f"{tuple(t.shape)} with strides {t.stride()}" for t in there),
            hint="hand over the local shards themselves, not views of them",
        )


def adamw_shard(
    param: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    copy: torch.Tensor | None,
    grad: torch.Tensor,
    factor: torch.Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
) -> None:
    """One step, in place: param, exp_avg, exp_avg_sq (fp32, of one shape), and param in the type of ``copy``.

    Elements of ``copy`` that are not those of param in its type were changed by others, and are taken.
    grad: of any floating type. factor: one number that the gradient is multiplied by. step: from 1.

    Raises UsageError unless what is changed lies in one piece.
    """
    check_state(param, exp_avg, exp_avg_sq, copy)
    if copy is not None:
        param.copy_(torch.where(param.to(copy.dtype) == copy, param, copy.to(param.dtype)))
    g = grad.to(param.dtype) * factor
    one, two = corrections(beta1, beta2, step)
    param.mul_(1 - lr * weight_decay)
    exp_avg.mul_(beta1).add_(g, alpha=1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    param.sub_(exp_avg / (exp_avg_sq.sqrt().div_(two).add_(eps)), alpha=lr / one)
    if copy is not None:
        copy.copy_(param)


def sum_squares(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sum of the squares of all elements, fp32 []."""
    parts = [torch.linalg.vector_norm(wide(t)).square() for t in tensors]
    return torch.stack(parts).sum()


define(
    "adamw_shard(Tensor(a!) param, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, Tensor(d!)? copy, Tensor grad, "
    "Tensor factor, float lr, float beta1, float beta2, float eps, float weight_decay, int step) -> ()",
    adamw_shard,
    lambda *args: None,
    cuda=launched("triton_optim", "adamw_shard", adamw_shard),
)
define(
    "sum_squares(Tensor[] tensors) -> Tensor",
    sum_squares,
    lambda tensors: wide(tensors[0].new_empty(())),
    cuda=launched("triton_optim", "sum_squares", sum_squares),
)

_RATES = (1e-3, 0.9, 0.95, 1e-8, 0.1, 3)


def _state(
    g: Generator, n: int, dtype: torch.dtype, device: torch.device, grad: torch.dtype
) -> tuple[Any, ...]:
    avg = normal(g, (n,), torch.float32, device)
    square = normal(g, (n,), torch.float32, device).square_()
    # numbers of the copy's type, some of which others have changed since
    copy = normal(g, (n,), dtype, device)
    param = copy.float()
    copy[: n // 4] += 1.0
    factor = torch.full((), 0.25, device=device)
    return param, avg, square, copy, normal(g, (n,), grad, device), factor, *_RATES


def _samples(g: Generator, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[Any, ...]]:
    yield _state(g, 5000, dtype, device, torch.float32)
    yield _state(g, 37, dtype, device, dtype)
    param, avg, square, _, *rest = _state(g, 64, dtype, device, dtype)
    yield param, avg, square, None, *rest


def _large(g: Generator, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[Any, ...]]:
    yield _state(g, 1 << 27, dtype, device, torch.float32)


def _square_samples(g: Generator, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[Any, ...]]:
    yield ([normal(g, (n,), dtype, device) for n in (5000, 3, 77)],)
    yield ([torch.zeros(0, dtype=dtype, device=device), normal(g, (9, 9), dtype, device)],)


def _large_squares(g: Generator, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[Any, ...]]:
    yield ([normal(g, (1 << 27,), dtype, device) for _ in range(2)],)


def _adamw_cost(ins: Sequence[Operand], outs: Sequence[Operand]) -> Cost:
    """Everything is read, everything but gradient and factor is written."""
    *state, _, _ = ins
    return Cost(sum(x.nbytes for x in ins), sum(x.nbytes for x in state), 12.0 * ins[0].numel)


def _squares_cost(ins: Sequence[Operand], outs: Sequence[Operand]) -> Cost:
    return Cost(
        sum(x.nbytes for x in ins), sum(x.nbytes for x in outs), 2.0 * sum(x.numel for x in ins), 1 + len(ins)
    )


SPECS = (
    KernelSpec(
        "adamw_shard",
        adamw_shard,
        ("triton_optim", "adamw_shard"),
        _adamw_cost,
        _samples,
        _large,
        mutated=4,
    ),
    KernelSpec(
        "sum_squares",
        sum_squares,
        ("triton_optim", "sum_squares"),
        _squares_cost,
        _square_samples,
        _large_squares,
    ),
)
