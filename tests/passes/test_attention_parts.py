"""Attention of few queries as parts of the keys that merge."""

from __future__ import annotations

import pytest
import torch
from planned import analysed

from autoshard.ops.attention_parts import merge_parts
from autoshard.passes.simplify.attention_parts import attention_parts

PARTS, ALL = "autoshard.sdpa_parts.default", "autoshard.sdpa.default"


def _masks() -> dict[str, torch.Tensor | None]:
    padding = torch.ones(2, 1, 1, 24, dtype=torch.bool)
    padding[0, ..., 5:] = False  # parts of other ranks hide all of their keys
    rows = torch.zeros(2, 1, 3, 24)
    rows[..., 0, 8:] = rows[..., 1, :20] = float("-inf")
    return {"none": None, "padding": padding, "rows": rows, "bias": torch.randn(1, 1, 3, 24)}


@pytest.mark.parametrize("sizes", [(12, 12), (1, 20, 3), (8, 8, 8)])
@pytest.mark.parametrize("name", list(_masks()))
def test_merged_parts_are_attention_to_all_keys(name: str, sizes: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    mask = _masks()[name]
    q, k, v = (torch.randn(2, 4, n, 8, dtype=torch.float64) for n in (3, 24, 24))
    mask = mask.double() if mask is not None and mask.is_floating_point() else mask
    ends = torch.tensor(sizes).cumsum(0).tolist()
    parts = [
        torch.ops.autoshard.sdpa_parts(
            q, k[:, :, a:b], v[:, :, a:b], None if mask is None else mask[..., a:b], 0.3
        )
        for a, b in zip([0, *ends], ends, strict=False)
    ]
    out, lse = torch.ops.autoshard.sdpa_joined(merge_parts(parts), torch.float64)
    scores = 0.3 * q @ k.mT
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    torch.testing.assert_close(out, scores.softmax(-1) @ v)
    torch.testing.assert_close(lse, scores.logsumexp(-1))


def test_rows_without_a_key_give_nothing() -> None:
    q, k, v = (torch.randn(1, 2, n, 8) for n in (2, 8, 8))
    hidden = torch.zeros(1, 1, 1, 8, dtype=torch.bool)
    part = torch.ops.autoshard.sdpa_parts(q, k, v, hidden, 1.0)
    out, lse = torch.ops.autoshard.sdpa_joined(merge_parts([part, part]), torch.float32)
    assert not out.any() and not lse.any()


def test_only_few_queries_are_merged() -> None:
    """Attention of a text to itself is not, of a short text to a long one is, in every layer."""
    folded = analysed("bart-long").folded
    counts, nodes = folded.counts(), [(n, node) for n, g in folded.segments.items() for node in g.nodes]
    merged = [name for name, node in nodes if node.op == PARTS]
    assert sum(counts[name] for name in merged) == 2  # layers of the decoder
    shapes = {folded.segments[n].types()[node.args[0].name].shape[2] for n, node in nodes if node.op == PARTS}
    assert shapes == {8}
    assert any(node.op == ALL for _, node in nodes)
    assert attention_parts(folded) == folded
    causal = analysed("llama-long").folded
    assert not any(node.op == PARTS for graph in causal.segments.values() for node in graph.nodes)
