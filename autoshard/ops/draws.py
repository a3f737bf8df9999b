"""Random numbers (``torch.rand``, ``randn``, ``bernoulli_`` and their like) made of dropout masks.

The numbers are then a function of the seed, the call and global positions, as dropout masks are: the same on
any mesh, and on no mesh those that eager PyTorch draws.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

#: drops elements with a probability and scales the others, as dropout does
Drop = Callable[[torch.Tensor, float], torch.Tensor]
_BITS = 24
_ABOVE = ("high", "size")
_NORMAL = torch.normal


def _wide(dtype: torch.dtype) -> torch.dtype:
    """In which to take logarithms: the last bit of float32 varies with memory."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def uniform(drop: Drop, shape: Sequence[int]) -> torch.Tensor:
    """Numbers in [0, 1), of 24 fair bits, in float32."""
    bits = drop(torch.ones((*shape, _BITS), dtype=torch.float32), 0.5) != 0
    return (bits * 0.5 ** torch.arange(1, _BITS + 1, dtype=torch.float32)).sum(-1)


class Draws:
    """Our versions of torch's random functions. A call with a generator of its own is left to torch."""

    def __init__(self, drop: Drop) -> None:
        self._drop = drop

    def table(self) -> dict[Callable[..., Any], Callable[..., Any]]:
        new = (torch.rand, self._uniform), (torch.randn, self._normal)
        like = (torch.rand_like, self._uniform), (torch.randn_like, self._normal)
        placed: tuple[tuple[Callable[..., Any], Callable[..., Any]], ...] = (
            (torch.Tensor.uniform_, self._uniform_in),
            (torch.Tensor.normal_, self._normal_in),
            (torch.Tensor.exponential_, self._exponential_in),
            (torch.Tensor.bernoulli_, self._bernoulli_in),
            (torch.Tensor.log_normal_, self._log_normal_in),
            (torch.Tensor.cauchy_, self._cauchy_in),
            (torch.Tensor.geometric_, self._geometric_in),
        )
        return {
            **{fn: _made(fn, draw) for fn, draw in new},
            **{fn: _like(fn, draw) for fn, draw in like},
            **{fn: _placed(fn, draw) for fn, draw in placed},
            torch.bernoulli: self._bernoulli,
            torch.Tensor.bernoulli: self._bernoulli,
            torch.randint: self._integers,
            torch.randint_like: self._integers_like,
            torch.normal: self._normal_of,
            F.rrelu: self._rrelu,
            F.gumbel_softmax: self._gumbel_softmax,
            torch.randperm: self._order,
            torch.multinomial: self._choice,
            torch.Tensor.multinomial: self._choice,
        }

    def _uniform(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return uniform(self._drop, shape).to(dtype)

    def _normal(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """By the transformation of Box and Muller (1958)."""
        wide = _wide(dtype)
        radius = torch.sqrt(-2 * torch.log1p(-self._uniform(shape, wide)))
        angle = 2 * math.pi * self._uniform(shape, wide)
        return (radius * torch.cos(angle)).to(dtype)

    def _integers(self, *args: Any, **options: Any) -> torch.Tensor:
        """``randint(high, size)``, ``randint(low, high, size)``; of more than 24 bits are left to torch."""
        names = (
            ("low", "high", "size") if len(args) + len({"low", "high", "size"} & set(options)) > 2 else _ABOVE
        )
        given = {**dict(zip(names, args, strict=False)), **options}
        low, high = given.get("low", 0), given["high"]
        if given.get("generator") is not None or not 0 < high - low <= 1 << _BITS:
            return torch.ops.aten.randint.low(low, high, given["size"], dtype=torch.int64)
        full = (self._uniform(tuple(given["size"]), torch.float32) * (high - low)).floor()
        return full.clamp(max=high - low - 1).to(given.get("dtype") or torch.int64) + low

    def _integers_like(self, input: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        options.setdefault("dtype", input.dtype)
        bounds = dict(zip(("low", "high") if len(args) > 1 else ("high",), args, strict=False))
        return self._integers(**bounds, **options, size=input.shape)

    def _normal_of(self, mean: Any, std: Any = 1.0, *size: Any, **options: Any) -> torch.Tensor:
        """Of means and spreads of which one may be a number, or both of a size."""
        given = [x for x in (mean, std) if isinstance(x, torch.Tensor)]
        if options.get("generator") is not None or options.get("out") is not None:
            return _NORMAL(mean, std, *size, **options)
        if not given:
            dtype = options.get("dtype") or torch.get_default_dtype()
            return self._normal(tuple(options.get("size", size[0] if size else ())), dtype) * std + mean
        shape = torch.broadcast_shapes(*(x.shape for x in given))
        return (self._normal(shape, given[0].dtype) * std + mean).detach()

    def _rrelu(
        self,
        input: torch.Tensor,
        lower: float = 1 / 8,
        upper: float = 1 / 3,
        training: bool = False,
        inplace: bool = False,
    ) -> torch.Tensor:
        if not training:
            return F.leaky_relu(input, (lower + upper) / 2, inplace)
        slope = self._uniform(input.shape, input.dtype) * (upper - lower) + lower
        out = torch.where(input < 0, input * slope, input)
        return input.copy_(out) if inplace else out

    def _gumbel_softmax(
        self, logits: torch.Tensor, tau: float = 1, hard: bool = False, eps: float = 1e-10, dim: int = -1
    ) -> torch.Tensor:
        waits = self._exponential_in(logits.detach()).clamp(min=0.5**_BITS)  # of which one may be 0
        soft = ((logits - waits.log()) / tau).softmax(dim)
        if not hard:
            return soft
        one = torch.zeros_like(logits).scatter(dim, soft.argmax(dim, keepdim=True), 1.0)
        return one - soft.detach() + soft

    def _order(self, n: int, *, dtype: torch.dtype = torch.int64, **options: Any) -> torch.Tensor:
        if options.get("generator") is not None:
            return torch.ops.aten.randperm(n, dtype=dtype)
        return torch.argsort(self._uniform((n,), torch.float32)).to(dtype)

    def _choice(
        self, input: torch.Tensor, num_samples: int, replacement: bool = False, *, generator: Any = None
    ) -> torch.Tensor:
        """Of waiting times with these rates the shortest come first."""
        if generator is not None:
            return torch.ops.aten.multinomial(input, num_samples, replacement)
        rates = input.detach().float()
        if replacement:
            rates = rates.unsqueeze(-2).expand(*rates.shape[:-1], num_samples, rates.shape[-1])
        waits = -torch.log1p(-self._uniform(rates.shape, torch.float32))
        keys = rates / waits.clamp(min=torch.finfo(torch.float32).tiny)
        return keys.argmax(-1) if replacement else keys.topk(num_samples, -1).indices

    def _uniform_in(self, x: torch.Tensor, low: float = 0.0, high: float = 1.0) -> torch.Tensor:
        return self._uniform(x.shape, x.dtype) * (high - low) + low

    def _normal_in(self, x: torch.Tensor, mean: float = 0.0, std: float = 1.0) -> torch.Tensor:
        return self._normal(x.shape, x.dtype) * std + mean

    def _exponential_in(self, x: torch.Tensor, lambd: float = 1.0) -> torch.Tensor:
        return -torch.log1p(-self._uniform(x.shape, _wide(x.dtype))).to(x.dtype) / lambd

    def _log_normal_in(self, x: torch.Tensor, mean: float = 1.0, std: float = 2.0) -> torch.Tensor:
        return torch.exp(self._normal_in(x, mean, std))

    def _cauchy_in(self, x: torch.Tensor, median: float = 0.0, sigma: float = 1.0) -> torch.Tensor:
        return median + sigma * torch.tan(math.pi * (self._uniform(x.shape, x.dtype) - 0.5))

    def _geometric_in(self, x: torch.Tensor, p: float) -> torch.Tensor:
        if p >= 1:
            return torch.ones_like(x)
        waits = torch.log1p(-self._uniform(x.shape, _wide(x.dtype))) / math.log1p(-p)
        return waits.ceil().clamp(min=1.0).to(x.dtype)

    def _bernoulli_in(self, x: torch.Tensor, p: float | torch.Tensor = 0.5) -> torch.Tensor:
        if isinstance(p, torch.Tensor):
            return (self._uniform(x.shape, torch.float32) < p).to(x.dtype)
        if not 0.0 < p < 1.0:
            return torch.full_like(x, round(p))
        return (self._drop(torch.ones(x.shape), 1.0 - p) != 0).to(x.dtype)

    def _bernoulli(self, input: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        if options or len(rest) > 1:
            return torch.ops.aten.bernoulli(input, *rest, **options)
        return self._bernoulli_in(input.detach(), rest[0] if rest else input.detach())


def _made(plain: Callable[..., Any], draw: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """``torch.rand(2, 3)``, ``torch.rand((2, 3))``, ``torch.rand(size=(2, 3))``."""

    def run(*size: Any, **options: Any) -> Any:
        if options.get("generator") is not None or options.get("out") is not None:
            return plain(*size, **options)
        given = options.get("size", size[0] if len(size) == 1 and not isinstance(size[0], int) else size)
        return draw(tuple(given), options.get("dtype") or torch.get_default_dtype())

    return run


def _like(plain: Callable[..., Any], draw: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    def run(input: torch.Tensor, **options: Any) -> Any:
        if options.get("generator") is not None:
            return plain(input, **options)
        return draw(input.shape, options.get("dtype") or input.dtype)

    return run


def _placed(plain: Callable[..., Any], draw: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """Functions that fill a tensor in place."""

    def run(x: torch.Tensor, *args: Any, generator: Any = None, **options: Any) -> Any:
        if generator is not None or not x.is_floating_point():
            return plain(x, *args, generator=generator, **options)
        return x.copy_(draw(x, *args, **options))

    return run
