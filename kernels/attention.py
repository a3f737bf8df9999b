"""Attention of some rows of a sequence over its keys, as `ops.attention_rows` describes it: reference and op.

Row r of s has the position ``start + r``; of a zigzag, the second half of the rows lies as far from the end
of the keys as the first from their beginning. A row attends to the keys up to its position (``causal``), to
those at less than ``window`` positions from it (0: all), to those that ``keys`` [b or 1, t] does not hide
(bool) or that have its own number (documents). Scores x are c tanh(x / c) with a ``softcap`` c, 0 for none.
Rows that attend to nothing give zeros, and minus infinity as their log-sum-exp.

The kernels are those of T. Dao, "FlashAttention-2", 2023, algorithms 1 and 2: scores never leave the chip.
Blocks of keys out of reach, or of other documents only, are passed over.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from autoshard.kernels.launch import launched
from autoshard.kernels.norm import wide
from autoshard.kernels.registry import KernelSpec, all_moved
from autoshard.kernels.samples import Generator, normal, whole
from autoshard.torch_adapters.op_library import define

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def halves(rows: int, keys: int, start: int, zigzag: bool) -> tuple[int, int, int]:
    """(rows of a half, position of the first row, of the first one of the second half)."""
    return (rows // 2, start, keys - start - rows // 2) if zigzag else (rows, start, 0)


def _allowed(
    q: torch.Tensor, k: torch.Tensor, keys: torch.Tensor | None, told: tuple[int, bool, int, bool]
) -> torch.Tensor:
    """Which keys rows attend to, [b or 1, 1, s, t]."""
    start, zigzag, window, causal = told
    rows, length = q.shape[2], k.shape[2]
    half, first, second = halves(rows, length, start, zigzag)
    at = torch.arange(rows, device=q.device)
    at = torch.where(at < half, at + first, at - half + second)
    apart = torch.arange(length, device=q.device) - at.unsqueeze(1)
    allowed = torch.ones_like(apart, dtype=torch.bool)
    if causal:
        allowed &= apart <= 0
    if window:
        allowed &= apart.abs() < window
    if keys is None:
        return allowed[None, None]
    seen = keys[:, None] if keys.dtype == torch.bool else keys[:, at].unsqueeze(2) == keys[:, None]
    return (allowed & seen).unsqueeze(1)


def _scores(
    q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None, scale: float, softcap: float
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(scores [b, h, s, t], tanh of those before with a soft cap). mask: True: attend, or numbers to add."""
    scores = (wide(q) * scale) @ wide(k).transpose(-1, -2)
    flat: torch.Tensor | None = None
    if softcap:
        flat = scores.div_(softcap).tanh_()
        scores = flat * softcap
    if mask is not None and mask.dtype == torch.bool:
        scores.masked_fill_(~mask, float("-inf"))
    elif mask is not None:
        scores += mask.to(scores.dtype)
    return scores, flat


def _shares(scores: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """Softmax from the log-sum-exp; zeros in rows where everything is masked."""
    return torch.exp(scores - lse.masked_fill(lse == float("-inf"), 0.0).unsqueeze(-1))


def written_out(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention with all scores at once, in fp32 (fp64 for fp64 inputs); mask: see `_scores`. The log-sum-exp
    of rows that attend to nothing is 0."""
    scores, _ = _scores(q, k, mask, scale, softcap)
    lse = torch.logsumexp(scores, -1)
    lse = lse.masked_fill(lse == float("-inf"), 0.0)
    return (_shares(scores, lse) @ wide(v)).to(q.dtype), lse


def written_out_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float,
) -> Gradients:
    """Gradients of q, k, v."""
    scores, flat = _scores(q, k, mask, scale, softcap)
    shares, upstream = _shares(scores, lse.to(scores.dtype)), wide(grad)
    inner = upstream @ wide(v).transpose(-1, -2)
    inner -= (upstream * wide(out)).sum(-1, keepdim=True)
    inner *= shares
    if flat is not None:
        inner *= 1 - flat.square()
    inner *= scale
    new = inner @ wide(k), inner.transpose(-1, -2) @ wide(q), shares.transpose(-1, -2) @ upstream
    return new[0].to(q.dtype), new[1].to(k.dtype), new[2].to(v.dtype)


def flash_rows(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    keys: torch.Tensor | None,
    scale: float,
    start: int,
    zigzag: bool,
    window: int,
    causal: bool,
    softcap: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [b, h, s, d], k [b, h, t, d], v [b, h, t, e] -> (out [b, h, s, e], log-sum-exp [b, h, s])."""
    return written_out(q, k, v, _allowed(q, k, keys, (start, zigzag, window, causal)), scale, softcap)


def flash_rows_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    keys: torch.Tensor | None,
    scale: float,
    start: int,
    zigzag: bool,
    window: int,
    causal: bool,
    softcap: float,
) -> Gradients:
    """Gradients of q, k, v; those of k and v are what these rows add to them."""
    mask = _allowed(q, k, keys, (start, zigzag, window, causal))
    return written_out_backward(grad, q, k, v, out, lse, mask, scale, softcap)


def _fake(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *told: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return q.new_empty((*q.shape[:3], v.shape[3])), wide(q.new_empty(q.shape[:3]))


def _fake_backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *told: Any
) -> Gradients:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


_TOLD = "Tensor? keys, float scale, int start, bool zigzag, int window, bool causal, float softcap"
define(
    f"flash_rows(Tensor q, Tensor k, Tensor v, {_TOLD}) -> (Tensor, Tensor)",
    flash_rows,
    _fake,
    cuda=launched("triton_attention", "flash_rows", flash_rows),
)
define(
    f"flash_rows_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {_TOLD}) "
    "-> (Tensor, Tensor, Tensor)",
    flash_rows_backward,
    _fake_backward,
    cuda=launched("triton_attention", "flash_rows_backward", flash_rows_backward),
)

#: (rows, keys, channels of q, of v), and what the rows are told: start, zigzag, window, causal, soft cap
_SAMPLES = (
    ((70, 70, 16, 16), "", (0, False, 0, True, 0.0)),
    ((70, 70, 24, 40), "numbers", (0, False, 0, True, 1.5)),
    ((70, 70, 16, 16), "numbers", (0, False, 0, False, 0.0)),
    ((70, 70, 16, 16), "padding", (0, False, 20, False, 0.5)),
    ((90, 180, 16, 16), "padding", (45, True, 33, True, 0.0)),
    ((90, 180, 16, 16), "numbers", (45, True, 0, True, 2.0)),
    ((50, 130, 16, 16), "", (40, False, 0, True, 0.0)),
    ((33, 130, 16, 16), "", (0, False, 0, False, 0.0)),
)


def _samples(g: Generator, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[Any, ...]]:
    for (rows, length, d, e), kind, told in _SAMPLES:
        q = normal(g, (2, 2, rows, d), dtype, device)
        k, v = normal(g, (2, 2, length, d), dtype, device), normal(g, (2, 2, length, e), dtype, device)
        keys: torch.Tensor | None = None
        if kind == "numbers":
            keys = (whole(g, 0, 30, (2, length), device) == 0).cumsum(-1).int()
        elif kind:
            keys = whole(g, 0, 4, (2, length), device) > 0
            keys[0, :9] = False
        yield q, k, v, keys, d**-0.5, *told


def _backward_samples(g: Generator, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[Any, ...]]:
    for args in _samples(g, dtype, device):
        out, lse = flash_rows(*args)
        yield (normal(g, out.shape, dtype, device), *args[:3], out, lse, *args[3:])


def _large(g: Generator, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[Any, ...]]:
    # torch's kernels are those of fp32 (`ops.attention`)
    dtype = torch.bfloat16 if dtype == torch.float32 else dtype
    for d, softcap in ((64, 0.0), (128, 30.0), (256, 50.0)):
        q, k, v = (normal(g, (1, 16, 8192, d), dtype, device) for _ in range(3))
        keys = torch.zeros((1, 8192), dtype=torch.int32, device=device)
        yield q, k, v, keys, d**-0.5, 0, False, 4096, True, softcap


def _large_backward(g: Generator, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[Any, ...]]:
    for q, k, v, *told in _large(g, dtype, device):
        lse = torch.full(q.shape[:3], 9.0, dtype=torch.float32, device=device)
        yield (torch.empty_like(q), q, k, v, torch.empty_like(q), lse, *told)


SPECS = (
    KernelSpec("flash_rows", flash_rows, ("triton_attention", "flash_rows"), all_moved, _samples, _large),
    KernelSpec(
        "flash_rows_backward",
        flash_rows_backward,
        ("triton_attention", "flash_rows_backward"),
        all_moved,
        _backward_samples,
        _large_backward,
    ),
)
