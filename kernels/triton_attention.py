"""Launches of `kernels/attention.py`: one for out and log-sum-exp; one for the gradients of keys and values,
one for that of queries."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
import triton
import triton.language as tl

from autoshard.kernels.attention import halves
from autoshard.kernels.lang import dot, to_out
from autoshard.kernels.launch import Launch, Prepared, ceil_div, dense, next_power

_Blocks: TypeAlias = tuple[tuple[int, tuple[int, int, int]], ...]
_LEAST, _MOST = tl.constexpr(1 - 2**63), tl.constexpr(2**63 - 1)
#: what ``keys`` says: nothing, which are hidden, the documents of all
_NONE, _HIDDEN, _NUMBERS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def _tile(ptr, rows, columns, stride, most, width):  # type: ignore[no-untyped-def]
    """[rows, columns] of a matrix, zeros beyond its end."""
    at = rows[:, None].to(tl.int64) * stride + columns[None, :]
    return tl.load(ptr + at, mask=(rows < most)[:, None] & (columns < width)[None, :], other=0.0)


@triton.jit
def _capped(scores, softcap):  # type: ignore[no-untyped-def]
    """tanh(scores / softcap): 1 - 2 / (exp(2x) + 1) has an error of one rounding of 1."""
    return 1.0 - 2.0 / (tl.exp(scores * (2.0 / softcap)) + 1.0)


@triton.jit
def _seen(  # type: ignore[no-untyped-def]
    place, key, keys, own, theirs, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, KEYS: tl.constexpr
):
    """Which keys rows attend to, [rows, keys]. place: positions of rows; own, theirs: what ``keys`` says."""
    apart = key[None, :] - place[:, None]
    seen = (key < keys)[None, :] & (apart == apart)
    if CAUSAL:
        seen = seen & (apart <= 0)
    if WINDOW:
        seen = seen & (apart > -window) & (apart < window)
    if KEYS == _HIDDEN:
        seen = seen & (theirs != 0)[None, :]
    if KEYS == _NUMBERS:
        seen = seen & (theirs[None, :] == own[:, None])
    return seen


@triton.jit
def _said(key_ptr, at, valid, KEYS: tl.constexpr):  # type: ignore[no-untyped-def]
    """What ``keys`` says of some positions, and of documents the least and the most number among them."""
    if KEYS == _NONE:
        return at, 0, 0
    numbers = tl.load(key_ptr + at, mask=valid, other=0).to(tl.int64)
    if KEYS == _HIDDEN:
        return numbers, 0, 0
    return numbers, tl.min(tl.where(valid, numbers, _MOST), 0), tl.max(tl.where(valid, numbers, _LEAST), 0)


@triton.jit
def _place(block, blocks, half, first, second, M: tl.constexpr):  # type: ignore[no-untyped-def]
    """(numbers of the rows of a block, position of the first, end of the rows of its half)."""
    part = block // blocks
    begin = part * half
    row = begin + (block % blocks) * M
    low = tl.where(part == 0, first, second) + row - begin
    return row + tl.arange(0, M), low, begin + half


@triton.jit
def _reach(low, M: tl.constexpr, keys, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):  # type: ignore[no-untyped-def]
    """(first key, end of keys) that a block of rows from position ``low`` on may attend to."""
    begin = low * 0
    end = begin + keys
    if WINDOW:
        begin = tl.maximum(0, low - window + 1)
        end = tl.minimum(end, low + M - 1 + window)
    if CAUSAL:
        end = tl.minimum(end, low + M)
    return begin, end


@triton.jit
def _forward(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, key_ptr, out_ptr, lse_ptr,
    heads, rows, keys, width, wide, q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s, o_b, o_h, o_s, key_b,
    blocks, half, first, second, window, scale, softcap,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, KEYS: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """A block of rows of one head."""
    head = tl.program_id(1).to(tl.int64)
    b, h = head // heads, head % heads
    row, low, last = _place(tl.program_id(0), blocks, half, first, second, M)
    place = low + tl.arange(0, M)
    d, e = tl.arange(0, D), tl.arange(0, E)
    q = _tile(q_ptr + b * q_b + h * q_h, row, d, q_s, last, width)
    k_ptr += b * k_b + h * k_h
    v_ptr += b * v_b + h * v_h
    key_ptr += b * key_b
    own, least, most = _said(key_ptr, place, (row < last) & (place < keys), KEYS)
    top = tl.full((M,), -float("inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    out = tl.zeros((M, E), tl.float32)
    begin, end = _reach(low, M, keys, window, CAUSAL, WINDOW)
    for at in range(begin // N * N, end, N):
        key = at + tl.arange(0, N)
        theirs, low_key, high_key = _said(key_ptr, key, key < keys, KEYS)
        if (high_key >= least) & (low_key <= most):
            k = _tile(k_ptr, key, d, k_s, keys, width)
            scores = dot(q, tl.trans(k)) * scale
            if SOFTCAP:
                scores = _capped(scores, softcap) * softcap
            seen = _seen(place, key, keys, own, theirs, window, CAUSAL, WINDOW, KEYS)
            scores = tl.where(seen, scores, -float("inf"))
            higher = tl.maximum(top, tl.max(scores, 1))
            base = tl.where(higher == -float("inf"), 0.0, higher)
            shares = tl.exp(scores - base[:, None])
            less = tl.exp(top - base)
            total = total * less + tl.sum(shares, 1)
            v = _tile(v_ptr, key, e, v_s, keys, wide)
            out = out * less[:, None] + dot(to_out(shares, v_ptr.dtype.element_ty), v)
            top = higher
    empty = total == 0
    lse = tl.where(empty, -float("inf"), top + tl.log(tl.where(empty, 1.0, total)))
    tl.store(lse_ptr + head * rows + row, lse, mask=row < last)
    out = out / tl.where(empty, 1.0, total)[:, None]
    at = row[:, None].to(tl.int64) * o_s + e[None, :]
    mask = (row < last)[:, None] & (e < wide)[None, :]
    tl.store(out_ptr + b * o_b + h * o_h + at, to_out(out, out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _gradients(  # type: ignore[no-untyped-def]
    q, k, g, v, lse, delta, seen, scale, softcap, SOFTCAP: tl.constexpr
):
    """(shares of keys, gradients of q k^T but for the scale), [rows, keys]."""
    scores = dot(q, tl.trans(k)) * scale
    if SOFTCAP:
        flat = _capped(scores, softcap)
        shares = tl.where(seen, tl.exp(flat * softcap - lse[:, None]), 0.0)
        inner = shares * (dot(g, tl.trans(v)) - delta[:, None]) * (1.0 - flat * flat)
    else:
        shares = tl.where(seen, tl.exp(scores - lse[:, None]), 0.0)
        inner = shares * (dot(g, tl.trans(v)) - delta[:, None])
    return shares, inner


@triton.jit
def _keys_backward(  # type: ignore[no-untyped-def]
    g_ptr, q_ptr, k_ptr, v_ptr, lse_ptr, delta_ptr, key_ptr, dk_ptr, dv_ptr,
    heads, rows, keys, width, wide, g_b, g_h, g_s, q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s, key_b,
    parts, half, first, second, window, scale, softcap,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, KEYS: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """What all rows of one head add to a block of keys and values."""
    head = tl.program_id(1).to(tl.int64)
    b, h = head // heads, head % heads
    at = tl.program_id(0) * N
    key = at + tl.arange(0, N)
    d, e = tl.arange(0, D), tl.arange(0, E)
    k = _tile(k_ptr + b * k_b + h * k_h, key, d, k_s, keys, width)
    v = _tile(v_ptr + b * v_b + h * v_h, key, e, v_s, keys, wide)
    q_ptr += b * q_b + h * q_h
    g_ptr += b * g_b + h * g_h
    lse_ptr += head * rows
    delta_ptr += head * rows
    key_ptr += b * key_b
    theirs, least, most = _said(key_ptr, key, key < keys, KEYS)
    dk = tl.zeros((N, D), tl.float32)
    dv = tl.zeros((N, E), tl.float32)
    for part in range(parts):
        offset = tl.where(part == 0, first, second)
        begin, end = 0, half
        if CAUSAL:
            begin = tl.maximum(begin, at - offset)
        if WINDOW:
            begin = tl.maximum(begin, at - offset - window + 1)
            end = tl.minimum(end, at + N - 1 + window - offset)
        last = (part + 1) * half
        for block in range(tl.minimum(begin, half) // M * M, end, M):
            row = part * half + block + tl.arange(0, M)
            place = offset + block + tl.arange(0, M)
            own, low_row, high_row = _said(key_ptr, place, (row < last) & (place < keys), KEYS)
            if (high_row >= least) & (low_row <= most):
                q = _tile(q_ptr, row, d, q_s, last, width)
                g = _tile(g_ptr, row, e, g_s, last, wide)
                # rows that attend to nothing have shares of zero, whatever their log-sum-exp
                lse = tl.load(lse_ptr + row, mask=row < last, other=0.0)
                delta = tl.load(delta_ptr + row, mask=row < last, other=0.0)
                seen = (
                    _seen(place, key, keys, own, theirs, window, CAUSAL, WINDOW, KEYS) & (row < last)[:, None]
                )
                shares, inner = _gradients(q, k, g, v, lse, delta, seen, scale, softcap, SOFTCAP)
                dv += dot(tl.trans(to_out(shares, g_ptr.dtype.element_ty)), g)
                dk += dot(tl.trans(to_out(inner, q_ptr.dtype.element_ty)), q)
    line = (b * keys + key) * heads + h
    inside = (key < keys)[:, None]
    to = dk_ptr + line[:, None] * width + d[None, :]
    tl.store(to, to_out(dk * scale, dk_ptr.dtype.element_ty), mask=inside & (d < width)[None, :])
    to = dv_ptr + line[:, None] * wide + e[None, :]
    tl.store(to, to_out(dv, dv_ptr.dtype.element_ty), mask=inside & (e < wide)[None, :])


@triton.jit
def _queries_backward(  # type: ignore[no-untyped-def]
    g_ptr, q_ptr, k_ptr, v_ptr, lse_ptr, delta_ptr, key_ptr, dq_ptr,
    heads, rows, keys, width, wide, g_b, g_h, g_s, q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s, key_b,
    blocks, half, first, second, window, scale, softcap,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, KEYS: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """The gradient of a block of rows of one head."""
    head = tl.program_id(1).to(tl.int64)
    b, h = head // heads, head % heads
    row, low, last = _place(tl.program_id(0), blocks, half, first, second, M)
    place = low + tl.arange(0, M)
    d, e = tl.arange(0, D), tl.arange(0, E)
    q = _tile(q_ptr + b * q_b + h * q_h, row, d, q_s, last, width)
    g = _tile(g_ptr + b * g_b + h * g_h, row, e, g_s, last, wide)
    lse = tl.load(lse_ptr + head * rows + row, mask=row < last, other=0.0)
    delta = tl.load(delta_ptr + head * rows + row, mask=row < last, other=0.0)
    k_ptr += b * k_b + h * k_h
    v_ptr += b * v_b + h * v_h
    key_ptr += b * key_b
    own, least, most = _said(key_ptr, place, (row < last) & (place < keys), KEYS)
    dq = tl.zeros((M, D), tl.float32)
    begin, end = _reach(low, M, keys, window, CAUSAL, WINDOW)
    for at in range(begin // N * N, end, N):
        key = at + tl.arange(0, N)
        theirs, low_key, high_key = _said(key_ptr, key, key < keys, KEYS)
        if (high_key >= least) & (low_key <= most):
            k = _tile(k_ptr, key, d, k_s, keys, width)
            v = _tile(v_ptr, key, e, v_s, keys, wide)
            seen = _seen(place, key, keys, own, theirs, window, CAUSAL, WINDOW, KEYS)
            _, inner = _gradients(q, k, g, v, lse, delta, seen, scale, softcap, SOFTCAP)
            dq += dot(to_out(inner, k_ptr.dtype.element_ty), k)
    to = dq_ptr + ((b * rows + row) * heads + h)[:, None] * width + d[None, :]
    tl.store(
        to, to_out(dq * scale, dq_ptr.dtype.element_ty), mask=(row < last)[:, None] & (d < width)[None, :]
    )


#: channels up to which -> (rows of a block, keys of a block, warps): the largest without register spills
_FORWARD: _Blocks = ((64, (128, 64, 4)), (128, (128, 64, 8)), (256, (64, 32, 8)))
_KEYS: _Blocks = ((64, (64, 32, 8)), (128, (32, 64, 8)), (256, (32, 32, 8)))
_QUERIES: _Blocks = ((64, (64, 64, 4)), (128, (64, 64, 8)), (256, (32, 32, 8)))


def _constants(
    blocks: _Blocks, q: torch.Tensor, v: torch.Tensor, keys: torch.Tensor | None, told: tuple[Any, ...]
) -> tuple[dict[str, Any], int]:
    """(constants of a launch, warps). told: window, causal, softcap."""
    window, causal, softcap = told
    d, e = (max(16, next_power(x.shape[3])) for x in (q, v))
    rows, columns, warps = next(sizes for most, sizes in blocks if max(d, e) <= most)
    kind = 0 if keys is None else 1 if keys.dtype == torch.bool else 2
    sizes = {"M": rows, "N": columns, "D": d, "E": e}
    return {
        **sizes, "CAUSAL": causal, "WINDOW": window > 0, "KEYS": kind, "SOFTCAP": softcap > 0
    }, warps  # fmt: skip


def _keys(keys: torch.Tensor | None, like: torch.Tensor) -> tuple[torch.Tensor, int]:
    """(what rows may attend to, its stride from sequence to sequence); any tensor where nothing is said."""
    if keys is None:
        return like, 0
    keys = keys.contiguous()
    return (keys.view(torch.int8) if keys.dtype == torch.bool else keys), (
        keys.stride(0) if keys.shape[0] > 1 else 0
    )


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
) -> Prepared:
    q, k, v = dense(q), dense(k), dense(v)
    (b, heads, rows, d), length, e = q.shape, k.shape[2], v.shape[3]
    out = q.new_empty((b, rows, heads, e)).transpose(1, 2)
    lse = q.new_empty((b, heads, rows), dtype=torch.float32)
    half, first, second = halves(rows, length, start, zigzag)
    constants, warps = _constants(_FORWARD, q, v, keys, (window, causal, softcap))
    blocks = ceil_div(half, constants["M"])
    said, key_b = _keys(keys, q)
    strides = (n for x in (q, k, v, out) for n in x.stride()[:3])
    args = (
        *(q, k, v, said, out, lse, heads, rows, length, d, e, *strides, key_b),
        *(blocks, half, first, second, window, scale, softcap or 1.0),
    )
    grid = (blocks * (2 if zigzag else 1), b * heads)
    return (out, lse), (Launch(_forward, grid, args, constants, warps, narrow=32),)


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
) -> Prepared:
    grad, q, k, v = dense(grad), dense(q), dense(k), dense(v)
    (b, heads, rows, d), length, e = q.shape, k.shape[2], v.shape[3]
    delta = (grad.float() * out.float()).sum(-1)
    lse = lse.float().contiguous()
    # as `ops.attention` leaves them in memory
    new = tuple(x.new_empty([x.shape[n] for n in (0, 2, 1, 3)]).transpose(1, 2) for x in (q, k, v))
    half, first, second = halves(rows, length, start, zigzag)
    by_keys, by_rows = (_constants(b, q, v, keys, (window, causal, softcap)) for b in (_KEYS, _QUERIES))
    said, key_b = _keys(keys, q)
    parts, blocks = 2 if zigzag else 1, ceil_div(half, by_rows[0]["M"])
    strides = (n for x in (grad, q, k, v) for n in x.stride()[:3])
    shapes = (heads, rows, length, d, e, *strides, key_b)
    rest = (half, first, second, window, scale, softcap or 1.0)
    given = (grad, q, k, v, lse, delta, said)
    of_keys = (*given, new[1], new[2], *shapes, parts, *rest)
    of_queries = (*given, new[0], *shapes, blocks, *rest)
    grid = (ceil_div(length, by_keys[0]["N"]), b * heads)
    return new, (
        Launch(_keys_backward, grid, of_keys, *by_keys, narrow=32),
        Launch(_queries_backward, (blocks * parts, b * heads), of_queries, *by_rows, narrow=32),
    )
