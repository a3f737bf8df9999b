"""Attention of some ranks whose keys go round, beside attention of all rows and keys."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch

import autoshard.ops  # noqa: F401  (registers the ops)
from autoshard.runtime.lockstep.in_process import InProcess, Table
from autoshard.runtime.ring_attention import RingAttention
from autoshard.runtime.shard_utils import take_part

B, H, GROUPS, T, D = 2, 4, 2, 48, 8


def _each(x: torch.Tensor, ways: int, causal: bool) -> list[torch.Tensor]:
    """What each rank has of the positions: in a zigzag if it is causal."""
    dim = x.dim() - 2 if x.dim() > 3 else 2
    return [take_part(x, dim, ways, k, -2 if causal else 1, 1).contiguous() for k in range(ways)]


def _run(ways: int, inside: int, call: Any) -> list[Any]:
    table = Table(ways)
    rings = [RingAttention(ways, k, inside, InProcess(table, k).pass_on) for k in range(ways)]
    with ThreadPoolExecutor(ways) as ranks:
        return list(ranks.map(partial(_plain, call), range(ways), rings))


def _plain(call: Any, rank: int, ring: RingAttention) -> Any:
    with torch.no_grad():
        return call(rank, ring)


def mask_of(masked: str) -> torch.Tensor | None:
    """Of the keys of two sequences."""
    if not masked:
        return None
    if masked in ("documents", "shuffled"):
        begins = torch.zeros(B, 1, 1, T, dtype=torch.int64)
        begins[0, ..., [3, 7, 30]] = begins[1, ..., [24, 25]] = 1
        numbers = begins.cumsum(-1)
        return numbers[..., torch.randperm(T)] if masked == "shuffled" else numbers
    lengths = torch.tensor([[T], [0 if masked == "hidden" else 17]])
    return (torch.arange(T) < lengths)[:, None, None]


@pytest.mark.parametrize(("ways", "inside"), [(2, 2), (4, 4), (4, 2), (4, 1), (8, 2), (8, 4), (6, 3), (1, 1)])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("masked", ["", "padded", "hidden", "documents", "shuffled"])
@pytest.mark.parametrize("softcap", [0.0, 0.7])
def test_equal_to_all_keys(
    ways: int, inside: int, causal: bool, masked: str, softcap: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward and gradients; some sequences are padded, of one every key is hidden; documents lie behind each
    other, or their positions anywhere."""
    monkeypatch.setattr("autoshard.runtime.key_masks._ROWS", 5)
    torch.manual_seed(0)
    q = torch.randn(B, H, T, D, dtype=torch.float64)
    k, v = (torch.randn(B, GROUPS, 1, T, D, dtype=torch.float64) for _ in range(2))
    mask = mask_of(masked)
    told = (causal, 0.5, softcap)
    out, lse = torch.ops.autoshard.sdpa(q, k, v, mask, causal, 0.5, 0, softcap)
    grad = torch.randn_like(out)
    grads = torch.ops.autoshard.sdpa_backward(grad, q, k, v, out, lse, mask, causal, 0.5, 0, softcap)
    qs, ks, vs, gs = (_each(x, ways, causal) for x in (q, k, v, grad))

    def step(rank: int, ring: RingAttention) -> Any:
        own, sums = ring.forward(qs[rank], ks[rank], vs[rank], mask, *told)
        given = gs[rank], qs[rank], ks[rank], vs[rank], own, sums
        return own, sums, *ring.backward(*given, mask, *told)

    wanted = [_each(x, ways, causal) for x in (out, lse, *grads)]
    for rank, got in enumerate(_run(ways, inside, step)):
        for number, (x, parts) in enumerate(zip(got, wanted, strict=True)):
            if masked == "hidden" and number < 2:
                x, part = x[:1], parts[rank][:1]  # what attends to nothing has any result
            else:
                part = parts[rank]
            torch.testing.assert_close(x, part, rtol=1e-9, atol=1e-9)


def test_parts_of_half_precision_are_joined_in_fp32() -> None:
    """As near to exact attention as one kernel over all keys."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 512, 16) for _ in range(3))
    exact, _ = torch.ops.autoshard.sdpa(q, k, v, None, True, 0.25)
    half = [x.bfloat16() for x in (q, k, v)]
    once, _ = torch.ops.autoshard.sdpa(*half, None, True, 0.25)
    parts = [_each(x, 8, True) for x in half]
    got = _run(8, 8, lambda rank, ring: ring.forward(*(p[rank] for p in parts), None, True, 0.25, 0.0)[0])
    joined = torch.stack([(x - y).abs().max() for x, y in zip(got, _each(exact, 8, True), strict=True)]).max()
    assert got[0].dtype == torch.bfloat16
    assert joined <= 1.5 * (once - exact).abs().max()
