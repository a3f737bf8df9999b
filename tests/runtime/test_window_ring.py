"""Attention with a window of some ranks whose keys go to rows in reach, beside attention of all at once."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from runtime.test_ring_attention import mask_of

import autoshard.ops  # noqa: F401  (registers the ops)
from autoshard.ir.window_hops import WindowHops
from autoshard.runtime.lockstep.in_process import InProcess, Table
from autoshard.runtime.shard_utils import take_part
from autoshard.runtime.window_ring import WindowRing

B, H, GROUPS, T, D = 2, 4, 2, 48, 8


class _Counted:
    """Passes tensors on, and counts the positions of each."""

    def __init__(self, over: InProcess) -> None:
        self.over, self.sent = over, list[int]()

    def __call__(self, x: torch.Tensor, *rest: Any) -> Any:
        self.sent.append(x.shape[-2])
        return self.over.pass_on(x, *rest)


def _each(x: torch.Tensor, ways: int, zigzag: bool) -> list[torch.Tensor]:
    dim = x.dim() - 2 if x.dim() > 3 else 2
    return [take_part(x, dim, ways, k, -2 if zigzag else 1, 1).contiguous() for k in range(ways)]


def _run(ways: int, zigzag: bool, hops: int, call: Any) -> tuple[list[Any], list[_Counted]]:
    table = Table(ways)
    over = [_Counted(InProcess(table, k)) for k in range(ways)]
    rings = [WindowRing(ways, k, zigzag, hops, over[k]) for k in range(ways)]
    with ThreadPoolExecutor(ways) as ranks:
        return list(ranks.map(partial(_plain, call), range(ways), rings)), over


def _plain(call: Any, rank: int, ring: WindowRing) -> Any:
    with torch.no_grad():
        return call(rank, ring)


ORDERS = [(True, True), (True, False), (False, False)]


@pytest.mark.parametrize("rows", [512, 5])
@pytest.mark.parametrize("ways", [2, 4, 6])
@pytest.mark.parametrize(("causal", "zigzag"), ORDERS)
@pytest.mark.parametrize("window", [1, 2, 4, 5, 9, 13, 25, 47])
@pytest.mark.parametrize("masked", ["", "padded", "hidden", "documents", "shuffled"])
def test_equal_to_all_keys(
    ways: int, causal: bool, zigzag: bool, window: int, masked: str, rows: int, monkeypatch: Any
) -> None:
    """Forward and gradients; some sequences are padded, of one every key is hidden; documents."""
    monkeypatch.setattr("autoshard.runtime.key_masks._ROWS", rows)
    torch.manual_seed(0)
    q = torch.randn(B, H, T, D, dtype=torch.float64)
    k, v = (torch.randn(B, GROUPS, 1, T, D, dtype=torch.float64) for _ in range(2))
    mask = mask_of(masked)
    softcap = 0.7 if rows == 5 else 0.0
    out, lse = torch.ops.autoshard.sdpa(q, k, v, mask, causal, 0.5, window, softcap)
    grad = torch.randn_like(out)
    grads = torch.ops.autoshard.sdpa_backward(grad, q, k, v, out, lse, mask, causal, 0.5, window, softcap)
    qs, ks, vs, gs = (_each(x, ways, zigzag) for x in (q, k, v, grad))
    told = mask, causal, 0.5, softcap, window

    def step(rank: int, ring: WindowRing) -> Any:
        own, sums = ring.forward(qs[rank], ks[rank], vs[rank], *told)
        given = gs[rank], qs[rank], ks[rank], vs[rank], own, sums
        return own, sums, *ring.backward(*given, *told)

    way = WindowHops.over(T, ways, window, causal=causal, zigzag=zigzag)
    results, over = _run(ways, zigzag, way.count, step)
    wanted = [_each(x, ways, zigzag) for x in (out, lse, *grads)]
    some = _each(_attending(mask, causal, window), ways, zigzag)
    for rank, got in enumerate(results):
        for number, (x, parts) in enumerate(zip(got, wanted, strict=True)):
            # what attends to nothing has any result
            of = (some[rank] if number else some[rank].unsqueeze(-1)) if number < 2 else 1.0
            torch.testing.assert_close(x * of, parts[rank] * of, rtol=1e-9, atol=1e-9)
    blocks = len(way.sides) * (1 + zigzag)
    keys = [way.moved(hop) for hop in range(1, way.count + 1) for _ in range(2 * blocks)]
    assert all(sorted(each.sent) == sorted(3 * keys) for each in over)  # gradients, too


def _attending(mask: torch.Tensor | None, causal: bool, window: int) -> torch.Tensor:
    """Rows that attend to some key, [b, h, s]."""
    apart = torch.arange(T) - torch.arange(T).unsqueeze(1)
    near = (apart.abs() < window) & ((apart <= 0) | (not causal))
    hides = mask is not None and mask.dtype == torch.bool  # of its document, a row attends to its own key
    seen = near & mask if mask is not None and hides else near
    return seen.any(-1).expand(B, H, T)


@pytest.mark.parametrize(
    ("zigzag", "window", "count"),
    [
        (False, 1, 0),
        (False, 2, 1),
        (False, 13, 1),
        (False, 14, 2),
        (False, 48, 3),
        (True, 7, 1),
        (True, 8, 2),
    ],
)
def test_no_more_hops_than_in_reach(zigzag: bool, window: int, count: int) -> None:
    """Four ranks of 48 positions: blocks of 12, or of 6 in a zigzag."""
    assert WindowHops.over(T, 4, window, causal=True, zigzag=zigzag).count == count


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [1, 3, 4, 5, 8, 14, 17])
def test_pairs_are_those_in_reach(causal: bool, window: int) -> None:
    """Of the rows of a block in the middle, counted one by one."""
    way = WindowHops(4, 9, window, causal)
    rows, keys = torch.arange(16, 20).unsqueeze(1), torch.arange(36)
    seen = ((rows - keys).abs() < window) & ((keys <= rows) | (not causal))
    hops = (keys // 4 - 4).abs()
    counted = [int((seen & (hops == hop)).sum()) for hop in range(way.count + 1)]
    assert counted == [way.pairs(hop) for hop in range(way.count + 1)]
    assert sum(counted) == int(seen.sum())


@pytest.mark.parametrize("documents", [False, True])
def test_parts_of_half_precision_are_joined_in_fp32(documents: bool) -> None:
    """As near to exact attention, and to its gradients, as one kernel over all keys."""
    torch.manual_seed(0)
    length, window, ways = 512, 200, 4
    q, k, v, grad = (torch.randn(1, 2, length, 16) for _ in range(4))
    mask = (torch.arange(length) // 150)[None, None, None] if documents else None
    told = mask, True, 0.25, window

    def whole(x: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        out, lse = torch.ops.autoshard.sdpa(*x[:3], *told)
        return [out, *torch.ops.autoshard.sdpa_backward(x[3], *x[:3], out, lse, *told)]

    exact, half = whole((q, k, v, grad)), [x.bfloat16() for x in (q, k, v, grad)]
    parts = [_each(x, ways, True) for x in half]

    def step(rank: int, ring: WindowRing) -> list[torch.Tensor]:
        own = [p[rank] for p in parts]
        out, lse = ring.forward(*own[:3], mask, True, 0.25, 0.0, window)
        return [out, *ring.backward(own[3], *own[:3], out, lse, mask, True, 0.25, 0.0, window)]

    hops = WindowHops.over(length, ways, window, causal=True, zigzag=True).count
    results, _ = _run(ways, True, hops, step)
    for number, (wanted, once) in enumerate(zip(exact, whole(half), strict=True)):
        pieces = _each(wanted, ways, True)
        joined = max(float((r[number] - x).abs().max()) for r, x in zip(results, pieces, strict=True))
        assert results[0][number].dtype == torch.bfloat16
        assert joined <= 1.5 * float((once - wanted).abs().max())
