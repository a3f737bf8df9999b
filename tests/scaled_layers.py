"""Linear layers that cast the operands of their products to 8 bits by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from autoshard.options import PRODUCTS
from benchmarks.gpu_steps import StepCase

FORMATS = PRODUCTS[1:]
E4, E5 = torch.float8_e4m3fn, torch.float8_e5m2


def rounded(x: torch.Tensor, dim: int | None, dtype: torch.dtype, block: int) -> torch.Tensor:
    """What is left of a matrix in 8 bits, whose scales are along a dim."""
    top = torch.finfo(dtype).max
    if block:
        parts = x.movedim(dim or 0, -1).unflatten(-1, (-1, block))
        exponent = torch.ceil(torch.log2(parts.abs().amax(-1, keepdim=True).clamp_min(1e-12) / top))
        codes = (parts / 2**exponent).clamp(-top, top).to(dtype).float() * 2**exponent
        return codes.flatten(-2).movedim(-1, dim or 0)
    size = x.abs().max() if dim is None else x.abs().amax(dim, keepdim=True)
    scale = size.clamp_min(1e-12) / top
    return (x / scale).clamp(-top, top).to(dtype).float() * scale


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, how: str) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.how = how
        whole, block = how == "float8-tensorwise", 32 if how == "mxfp8" else 0
        along = None if whole else 1
        return rounded(x, along, E4, block) @ rounded(weight, along, E4, block).t()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x, weight), (dy,), how = ctx.saved_tensors, grads, ctx.how
        whole, block = how == "float8-tensorwise", 32 if how == "mxfp8" else 0
        rows, columns = (None, None) if whole else (1, 0)
        kind = E5 if whole else E4
        dx = rounded(dy, rows, kind, block) @ rounded(weight, columns, E4, block)
        if how == "float8-rowwise-gw-hp":
            return dx, dy.t() @ x, None
        return dx, rounded(dy, columns, kind, block).t() @ rounded(x, columns, E4, block), None


class ByHand(nn.Module):
    """A linear layer with the parameters of another."""

    def __init__(self, linear: nn.Linear, how: str) -> None:
        super().__init__()
        self.weight, self.bias, self.how = linear.weight, linear.bias, how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = Scaled.apply(x.flatten(0, -2), self.weight, self.how)
        return (y if self.bias is None else y + self.bias).unflatten(0, x.shape[:-1])


def by_hand(model: nn.Module, how: str, chosen: Callable[[str], bool]) -> nn.Module:
    made = copy.deepcopy(model)
    for name, module in list(made.named_modules()):
        if isinstance(module, nn.Linear) and chosen(name):
            made.set_submodule(name, ByHand(module, how))
    return made


def wide_llama(layers: int = 4) -> nn.Module:
    case = StepCase(layers, 128, 2, 2, 256, 64, 8, 32, torch.float32)
    return case.model(torch.device("cpu"))
