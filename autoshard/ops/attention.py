"""Attention as one op: softmax(cap(q k^T * scale) + mask) v with its log-sum-exp, and its gradient.

With a ``softcap`` c, cap(x) = c tanh(x / c) (Gemma Team, "Gemma 2", 2024, section 2); 0: cap(x) = x.

A mask (True: attend) may be one of keys alone, [.., 1, t]. If that is of integers, they number the
documents that lie in one sequence (s = t), and a query attends to the keys of its own. With a ``window`` w a
query attends to w keys up to its own position, and without ``causal`` to the w - 1 behind it; 0: to all.

All tensors are [batch, heads, positions, channels]. Keys and values may have fewer heads, each for as many
queries' heads that follow each other; where they are [batch, heads, 1, positions, channels], so are their
gradients. The output lies in memory as [batch, positions, heads, channels], as torch's own kernels leave it,
so that joining the heads again is free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch.torch_version import TorchVersion

from autoshard.kernels.attention import Gradients, written_out, written_out_backward
from autoshard.kernels.launch import dense, has_triton
from autoshard.torch_adapters.op_library import define

T = TypeVar("T")
#: scores that are written out at a time, on a CPU and on a GPU, and rows of them at least
_SCORES, _SCORES_GPU, _FEWEST = 1 << 20, 1 << 25, 16
#: whether torch's CPU kernel takes fewer heads of keys than of queries
_GROUPED_ON_CPUS = TorchVersion(torch.__version__) >= "2.13"


def _by_positions(like: torch.Tensor, heads: torch.Tensor, channels: torch.Tensor) -> torch.Tensor:
    """Uninitialised [b, h, s, d] in the memory order [b, s, h, d]."""
    b, h, s = heads.shape[:3]
    return like.new_empty((b, s, h, channels.shape[3])).transpose(1, 2)


def zeros_like_all(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Gradients:
    """To add gradients of parts to, in the memory order [b, s, h, d]."""
    return _by_positions(q, q, q).zero_(), _by_positions(k, k, k).zero_(), _by_positions(v, v, v).zero_()


def in_bshd(x: torch.Tensor) -> torch.Tensor:
    """The same values in the memory order [b, s, h, d]; free if they lie like that already."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def repeat_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """[b, h, s, d] -> [b, heads, s, d], each head repeated in place."""
    b, h, s, d = x.shape
    if h == heads:
        return x
    return x[:, :, None].expand(b, h, heads // h, s, d).reshape(b, heads, s, d)


def repeated(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of every head of the queries."""
    return repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])


def in_groups(attend: Callable[..., T]) -> Callable[..., T]:
    """Attention that takes keys and values as [b, h, 1, t, d] too, of one that takes them as [b, h, t, d]."""

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> T:
        return attend(q, _by_heads(k), _by_heads(v), *rest)

    return run


def in_groups_backward(attend: Callable[..., Gradients]) -> Callable[..., Gradients]:
    """The same of gradients, which are in the shapes of keys and values."""

    def run(grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> Gradients:
        grads = attend(grad, q, _by_heads(k), _by_heads(v), *rest)
        return grads[0], _like(grads[1], k), _like(grads[2], v)

    return run


def _by_heads(x: torch.Tensor) -> torch.Tensor:
    """Keys or values as [b, h, t, d]."""
    return x.squeeze(2) if x.dim() == 5 else x


def _like(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The gradient of keys or values in their shape; it may be of every head of the queries."""
    if grad.shape[1] != x.shape[1]:
        grad = in_bshd(grad.unflatten(1, (x.shape[1], -1)).sum(2))
    return grad.unsqueeze(2) if x.dim() == 5 else grad


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _float_mask(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """A boolean mask (True: attend) as numbers to add."""
    if mask is None or mask.dtype != torch.bool:
        return mask if mask is None else mask.to(dtype)
    return torch.zeros((), dtype=dtype, device=mask.device).masked_fill(~mask, float("-inf"))


def _causally(
    q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None, causal: bool, first: int
) -> torch.Tensor | None:
    """The mask with keys behind a row hidden. first: position of the first row."""
    if not causal:
        return mask
    seen = torch.ones((q.shape[2], k.shape[2]), dtype=torch.bool, device=q.device).tril_(first)
    if mask is None:
        return seen
    return mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, float("-inf"))


def sdpa_math(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float,
    softcap: float = 0.0,
    first: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention written out, for any device and shape, in fp32 (fp64 for fp64). first: see `_causally`."""
    out, lse = written_out(q, *repeated(q, k, v), _causally(q, k, mask, causal, first), scale, softcap)
    return in_bshd(out), lse


def sdpa_math_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float,
    softcap: float = 0.0,
    first: int = 0,
) -> Gradients:
    """Gradients of q, k, v, written out."""
    mask = _causally(q, k, mask, causal, first)
    new = written_out_backward(grad, q, *repeated(q, k, v), out, lse, mask, scale, softcap)
    return in_bshd(new[0]), _like(in_bshd(new[1]), k), _like(in_bshd(new[2]), v)


def _parts(
    q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None, causal: bool
) -> Iterator[tuple[slice, slice, torch.Tensor | None]]:
    """(rows, keys that they may see, their part of the mask), so few rows that their scores take little."""
    scores = _SCORES_GPU if q.is_cuda else _SCORES
    step = max(_FEWEST, scores // max(1, q.shape[0] * q.shape[1] * k.shape[2]))
    for at in range(0, q.shape[2], step):
        rows = slice(at, min(at + step, q.shape[2]))
        keys = slice(0, min(rows.stop, k.shape[2]) if causal else k.shape[2])
        part = mask
        if part is not None:
            part = part[..., keys] if part.shape[-1] > 1 else part
            part = part[..., rows, :] if part.dim() > 1 and part.shape[-2] > 1 else part
        yield rows, keys, part


def _capped(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float,
    softcap: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention with a soft cap, which no kernel of torch knows: written out for some rows at a time."""
    out, lse = fake(q, k, v, mask, causal, scale)
    for rows, keys, part in _parts(q, k, mask, causal):
        given = q[:, :, rows], k[:, :, keys], v[:, :, keys]
        out[:, :, rows], lse[:, :, rows] = sdpa_math(*given, part, causal, scale, softcap, rows.start)
    return out, lse


def _capped_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float,
    softcap: float,
) -> Gradients:
    grads = zeros_like_all(q, k, v)
    for rows, keys, part in _parts(q, k, mask, causal):
        given = (
            grad[:, :, rows],
            q[:, :, rows],
            k[:, :, keys],
            v[:, :, keys],
            out[:, :, rows],
            lse[:, :, rows],
        )
        added = sdpa_math_backward(*given, part, causal, scale, softcap, rows.start)
        for gradient, at, more in zip(grads, (rows, keys, keys), added, strict=True):
            gradient[:, :, at] += more
    return grads


def documents_of(mask: torch.Tensor | None) -> torch.Tensor | None:
    """The document of each position [b or 1, t], if the mask of keys says that."""
    if mask is None or mask.dtype == torch.bool or mask.is_floating_point():
        return None
    return mask.reshape(-1, mask.shape[-1])


def by_triton(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, window: int, softcap: float
) -> bool:
    """Whether `kernels.attention` is needed, and takes it: on a GPU, 16 bits, masks of keys alone."""
    if not (softcap or window or documents_of(mask) is not None):
        return False
    by_keys = mask is None or (mask.dim() == 4 and mask.shape[1:3] == (1, 1) and not mask.is_floating_point())
    half = q.is_cuda and q.dtype in (torch.float16, torch.bfloat16)
    full = all(x.numel() > 0 for x in (q, k, v))
    return half and by_keys and full and max(q.shape[3], v.shape[3]) <= 256 and has_triton()


def _needs_rows(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, window: int, softcap: float
) -> bool:
    """Whether `ops.attention_rows` computes it."""
    told = window > 0 or documents_of(mask) is not None
    return told or by_triton(q, k, v, mask, window, softcap)


def _by_rows(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float,
    window: int,
    softcap: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Some rows at a time, with the keys in their reach."""
    result: tuple[torch.Tensor, torch.Tensor] = torch.ops.autoshard.sdpa_rows(
        q, k, v, scale, 0, False, mask, window, causal, softcap
    )
    return result


def _by_rows_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float,
    window: int,
    softcap: float,
) -> Gradients:
    result: Gradients = torch.ops.autoshard.sdpa_rows_backward(
        grad, q, k, v, out, lse, scale, 0, False, mask, window, causal, softcap
    )
    return result


def _cpu_kernel_fits(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> bool:
    """What torch's CPU kernel takes: equal channels, dense last dims, masks of 2 or 4 dims, nothing empty;
    fewer heads of keys since torch 2.13."""
    return (
        q.shape[3] == v.shape[3]
        and all(x.stride(-1) == 1 and x.numel() > 0 for x in (q, k, v))
        and (mask is None or mask.dim() in (2, 4))
        and (q.shape[1] == k.shape[1] or _GROUPED_ON_CPUS)
    )


def _sdpa_cpu(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    if _needs_rows(q, k, v, mask, window, softcap):
        return _by_rows(q, k, v, mask, causal, scale, window, softcap)
    if softcap:
        return _capped(q, k, v, mask, causal, scale, softcap)
    if not _cpu_kernel_fits(q, k, v, mask):
        return sdpa_math(q, k, v, mask, causal, scale)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=_float_mask(mask, q.dtype), scale=scale
    )
    return in_bshd(out), lse.contiguous()


def _sdpa_backward_cpu(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> Gradients:
    if _needs_rows(q, k, v, mask, window, softcap):
        return _by_rows_backward(grad, q, k, v, out, lse, mask, causal, scale, window, softcap)
    if softcap:
        return _capped_backward(grad, q, k, v, out, lse, mask, causal, scale, softcap)
    if not _cpu_kernel_fits(q, k, v, mask):
        return sdpa_math_backward(grad, q, k, v, out, lse, mask, causal, scale)
    grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse, 0.0, causal, attn_mask=_float_mask(mask, q.dtype), scale=scale
    )
    return in_bshd(grads[0]), in_bshd(grads[1]), in_bshd(grads[2])


def _flash_fits(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: bool
) -> bool:
    """What FlashAttention takes on CUDA without padding; it aligns causal masks to the end."""
    d = q.shape[3]
    return (
        mask is None
        and q.dtype in (torch.float16, torch.bfloat16)
        and d == v.shape[3]
        and d % 8 == 0
        and d <= 256
        and (not causal or q.shape[2] == k.shape[2])
        and all(x.numel() > 0 for x in (q, k, v))
        and torch.cuda.get_device_capability(q.device) >= (8, 0)
    )


def _efficient_fits(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """What the memory-efficient kernel takes: rows of whole 16-byte words."""
    words = 16 // q.element_size()
    known = q.dtype in (torch.float16, torch.bfloat16, torch.float32)
    full = all(x.numel() > 0 for x in (q, k, v))
    return known and full and q.shape[3] % words == 0 and v.shape[3] % words == 0


def _aligned_bias(q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor | None:
    """The mask as numbers, expanded to [b, h, s, t], its rows beginning at multiples of 16 elements."""
    bias = _float_mask(mask, q.dtype)
    if bias is None:
        return None
    t = k.shape[2]
    bias = bias.expand(*bias.shape[:-1], t)
    bias = torch.nn.functional.pad(bias, (0, -t % 16))[..., :t]
    return bias.expand(q.shape[0], q.shape[1], q.shape[2], t)


def _reach(window: int, causal: bool) -> dict[str, int]:
    """Keys before and behind its own that a query of FlashAttention attends to."""
    return {"window_size_left": window - 1, "window_size_right": 0 if causal else window - 1}


def _sdpa_cuda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v = dense(q), dense(k), dense(v)
    if window and not softcap and _flash_fits(q, k, v, mask, causal):
        by_position = (x.transpose(1, 2) for x in (q, k, v))
        result = torch.ops.aten._flash_attention_forward(
            *by_position,
            *(None, None, q.shape[2], k.shape[2], 0.0, causal, False),
            scale=scale,
            **_reach(window, causal),
        )
        return in_bshd(result[0].transpose(1, 2)), result[1][..., : q.shape[2]].contiguous()
    if _needs_rows(q, k, v, mask, window, softcap):
        return _by_rows(q, k, v, mask, causal, scale, window, softcap)
    if softcap:
        return _capped(q, k, v, mask, causal, scale, softcap)
    if _flash_fits(q, k, v, mask, causal):
        result = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
        return in_bshd(result[0]), result[1][..., : q.shape[2]].contiguous()
    if not _efficient_fits(q, k, v):
        return sdpa_math(q, k, v, mask, causal, scale)
    out, lse, _, _ = torch.ops.aten._scaled_dot_product_efficient_attention(
        q, *repeated(q, k, v), _aligned_bias(q, k, mask), True, 0.0, causal, scale=scale
    )
    return in_bshd(out), lse[..., : q.shape[2]].contiguous()


def _sdpa_backward_cuda(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> Gradients:
    q, k, v, grad = dense(q), dense(k), dense(v), dense(grad)
    state = torch.zeros((2,), dtype=torch.int64, device=q.device)  # of the random numbers: none are drawn
    if window and not softcap and _flash_fits(q, k, v, mask, causal):
        by_position = (x.transpose(1, 2) for x in (grad, q, k, v, out))
        sizes, none = (q.shape[2], k.shape[2]), (None, None)
        result = torch.ops.aten._flash_attention_backward(
            *by_position, lse, *none, *sizes, 0.0, causal, state, state, scale=scale, **_reach(window, causal)
        )
        grads = tuple(x.transpose(1, 2) for x in result)
    elif _needs_rows(q, k, v, mask, window, softcap):
        return _by_rows_backward(grad, q, k, v, out, lse, mask, causal, scale, window, softcap)
    elif softcap:
        return _capped_backward(grad, q, k, v, out, lse, mask, causal, scale, softcap)
    elif _flash_fits(q, k, v, mask, causal):
        grads = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            grad,
            q,
            k,
            v,
            out,
            lse,
            None,
            None,
            q.shape[2],
            k.shape[2],
            0.0,
            causal,
            state,
            state,
            scale=scale,
        )
    elif _efficient_fits(q, k, v):
        # the kernel reads full blocks of 32 rows
        rows = torch.nn.functional.pad(lse, (0, -lse.shape[2] % 32), value=float("inf"))
        grads = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            grad,
            q,
            *repeated(q, k, v),
            _aligned_bias(q, k, mask),
            out,
            rows,
            state[0],
            state[1],
            0.0,
            [True, True, True, False],
            causal,
            scale=scale,
        )
    else:
        return sdpa_math_backward(grad, q, k, v, out, lse, mask, causal, scale)
    return in_bshd(grads[0]), in_bshd(grads[1]), in_bshd(grads[2])


def fake(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    return _by_positions(q, q, v), q.new_empty(q.shape[:3], dtype=_wide(q.dtype))


def fake_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> Gradients:
    return _by_positions(q, q, q), _by_positions(k, k, k), _by_positions(v, v, v)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, mask, ctx.causal, ctx.scale, ctx.window, ctx.softcap = inputs
    ctx.save_for_backward(q, k, v, *output, *(() if mask is None else (mask,)))
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: torch.Tensor | None, grad_lse: object) -> tuple[Any, ...]:
    if grad is None:
        return (None,) * 8
    q, k, v, out, lse, *masks = ctx.saved_tensors
    mask = masks[0] if masks else None
    grads = torch.ops.autoshard.sdpa_backward(
        grad, q, k, v, out, lse, mask, ctx.causal, ctx.scale, ctx.window, ctx.softcap
    )
    return (*grads, None, None, None, None, None)


define(
    "sdpa(Tensor q, Tensor k, Tensor v, Tensor? mask, bool causal, float scale, int window=0, "
    "float softcap=0.0) -> (Tensor, Tensor)",
    in_groups(_sdpa_cpu),
    in_groups(fake),
    cuda=in_groups(_sdpa_cuda),
    backward=_backward,
    save=_save,
)
define(
    "sdpa_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? mask, "
    "bool causal, float scale, int window=0, float softcap=0.0) -> (Tensor, Tensor, Tensor)",
    in_groups_backward(_sdpa_backward_cpu),
    in_groups_backward(fake_backward),
    cuda=in_groups_backward(_sdpa_backward_cuda),
)
