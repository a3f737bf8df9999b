"""Linear layers and experts that cast the operands of their products to 8 or 4 bits by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM

from autoshard.ops.packed import dither, rotated
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


#: 16 by 16, of +-1/4, orthogonal: by blocks of rows that are summed over
ROTATION = rotated(torch.eye(16), 1)
CODES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def in_4_bits(x: torch.Tensor, down: int, across: int, stochastic: bool = False) -> torch.Tensor:
    """What is left of a matrix in e2m1, with scales in e4m3 of blocks and one of all of it."""
    whole = x.abs().max() / (6 * 448)
    blocks = x.unflatten(1, (-1, across)).unflatten(0, (-1, down))
    eighths = (blocks.abs().amax((1, 3), keepdim=True) / 6 / whole).clamp(2**-9, 448).to(E4)
    scale = eighths.float() * whole
    size = (blocks / scale).abs().clamp(max=6)
    above = torch.bucketize(size, CODES).clamp(max=7)
    below = (above - 1).clamp(min=0)
    lower, upper = size - CODES[below], CODES[above] - size
    code = torch.where((lower < upper) | ((lower == upper) & (below % 2 == 0)), below, above)
    if stochastic:
        dim = 0 if across == 1 else 1
        nearest = (code + 8 * (blocks < 0)).to(torch.uint8).flatten(2, 3).flatten(0, 1)
        noise = dither(nearest.movedim(dim, -1), eighths[:, 0, :, 0].movedim(dim, -1), whole).movedim(-1, dim)
        noise = noise.unflatten(1, (-1, across)).unflatten(0, (-1, down))
        code = torch.where(lower / (lower + upper) + noise >= 1, above, below)
    return (CODES[code] * blocks.sign() * scale).flatten(2, 3).flatten(0, 1)


def turned_tokens(x: torch.Tensor) -> torch.Tensor:
    return torch.einsum("bik,ij->bjk", x.unflatten(0, (-1, 16)), ROTATION).flatten(0, 1)


class In4Bits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return in_4_bits(x, 1, 16) @ in_4_bits(weight, 16, 16).t()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x, weight), (dy,) = ctx.saved_tensors, grads
        left, right = (in_4_bits(turned_tokens(v), 16, 1, v is dy) for v in (dy, x))
        return in_4_bits(dy, 1, 16, True) @ in_4_bits(weight, 16, 16), left.t() @ right


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


class ScaledOfExperts(torch.autograd.Function):
    """Rows [s, k] times the matrices [E, n, k] of their experts."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, expert: torch.Tensor, how: str) -> Any:
        ctx.save_for_backward(x, weight, expert)
        ctx.how = how
        along, block = how_of(how)
        rows = rounded(x, along(1), E4, block)
        return torch.einsum("sk,snk->sn", rows, rounded(weight, along(2), E4, block)[expert])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x, weight, expert), (dy,), how = ctx.saved_tensors, grads, ctx.how
        along, block = how_of(how)
        kind = E5 if how == "float8-tensorwise" else E4
        rows, matrices = rounded(dy, along(1), kind, block), rounded(weight, along(1), E4, block)
        dx = torch.einsum("sn,snk->sk", rows, matrices[expert])
        if how == "float8-tensorwise":
            x, dy = rounded(x, None, E4, 0), rounded(dy, None, kind, 0)
        dw = torch.zeros_like(weight)
        for number in expert.unique().tolist():
            left, right = dy[expert == number], x[expert == number]
            if how == "float8-rowwise":  # of blocks there are none: experts have as many rows as it happens
                left, right = rounded(left, 0, E4, 0), rounded(right, 0, E4, 0)
            dw[number] = left.t() @ right
        return dx, dw, None, None


def how_of(how: str) -> tuple[Callable[[int], int | None], int]:
    """(dim that is summed over -> that along which elements share a scale, elements of a block)."""
    return (lambda dim: None if how == "float8-tensorwise" else dim), 32 if how == "mxfp8" else 0


class ExpertsByHand(nn.Module):
    """Mixtral's experts; a row is weighed before the last product, as programs do."""

    def __init__(self, experts: nn.Module, how: str) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj, self.how = experts.gate_up_proj, experts.down_proj, how

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        token = torch.arange(len(x)).repeat_interleave(chosen.shape[1])
        expert = chosen.flatten()
        both = ScaledOfExperts.apply(x[token], self.gate_up_proj, expert, self.how)
        gate, up = both.chunk(2, dim=-1)
        rows = nn.functional.silu(gate) * up * weights.flatten()[:, None]
        given = ScaledOfExperts.apply(rows, self.down_proj, expert, self.how)
        return torch.zeros_like(x).index_add(0, token, given)


class ByHand(nn.Module):
    """A linear layer with the parameters of another."""

    def __init__(self, linear: nn.Linear, how: str) -> None:
        super().__init__()
        self.weight, self.bias, self.how = linear.weight, linear.bias, how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(0, -2)
        y: torch.Tensor = (
            In4Bits.apply(rows, self.weight)
            if self.how == "nvfp4"
            else Scaled.apply(rows, self.weight, self.how)
        )
        return (y if self.bias is None else y + self.bias).unflatten(0, x.shape[:-1])


def by_hand(model: nn.Module, how: str, chosen: Callable[[str], bool]) -> nn.Module:
    made = copy.deepcopy(model)
    for name, module in list(made.named_modules()):
        if isinstance(module, nn.Linear) and chosen(name):
            made.set_submodule(name, ByHand(module, how))
        elif type(module).__name__ == "MixtralExperts" and chosen(name) and how != "nvfp4":
            made.set_submodule(name, ExpertsByHand(module, how))
    return made


def wide_mixtral(layers: int = 2, experts: int = 4, hidden: int = 64, inside: int = 128) -> nn.Module:
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    sizes = {
        "vocab_size": 64,
        "hidden_size": hidden,
        "intermediate_size": inside,
        "num_hidden_layers": layers,
    }
    torch.manual_seed(0)
    made: nn.Module = MixtralForCausalLM(MixtralConfig(**sizes, **heads, num_local_experts=experts))
    return made


def wide_llama(layers: int = 4) -> nn.Module:
    case = StepCase(layers, 128, 2, 2, 256, 64, 8, 32, torch.float32)
    return case.model(torch.device("cpu"))
