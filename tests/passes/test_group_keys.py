"""Keys and values of groups of heads go to attention as they are; the proof knows what that stands for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from planned import program

from autoshard.ir import Node
from autoshard.ops.attention import repeat_heads, sdpa_math, sdpa_math_backward
from autoshard.program.program import Program
from autoshard.rules.attention import KEYS
from autoshard.verify.static import verify_static

pytest.importorskip("transformers")


def _attention(found: Program) -> list[tuple[Node, tuple[int, ...]]]:
    """Attention of a program, with the shapes of its keys."""
    pairs = []
    for segment in found.lowered.segments.values():
        types = segment.graph.types()
        pairs += [
            (n, types[n.args[KEYS[n.op]].name].shape)  # type: ignore[union-attr]
            for n in segment.graph.nodes
            if n.op in KEYS
        ]
    return pairs


@pytest.mark.parametrize("mesh", ["dp=4", "tp=2", "dp=2,tp=2", "cp=2,tp=2"])
def test_keys_are_not_repeated(mesh: str) -> None:
    found = program("llama", mesh)
    pairs = _attention(found)
    assert pairs and all(len(shape) == 5 and shape[1:3] == (2, 1) for _, shape in pairs)
    assert not any(
        n.op == "aten.expand.default"
        and "self_attn" in n.origin.fqn
        and n.types[0] is not None
        and len(n.types[0].shape) == 5
        for s in found.lowered.segments.values()
        for n in s.graph.nodes
    )
    assert verify_static(found).ok


def test_more_ranks_than_heads_of_keys_repeat_them() -> None:
    found = program("llama", "tp=4")
    assert all(len(shape) == 4 for _, shape in _attention(found))
    assert verify_static(found).ok


@pytest.mark.parametrize(
    "told", [(None, True, 0, 0.0), (None, False, 0, 0.0), (None, True, 5, 0.0), (None, True, 0, 3.0)]
)
@pytest.mark.parametrize("five", [False, True])
def test_attention_of_groups_is_that_of_repeated_heads(
    told: tuple[None, bool, int, float], five: bool
) -> None:
    mask, causal, window, cap = told
    draw = torch.Generator().manual_seed(0)
    q, grad = (torch.randn(2, 6, 16, 8, generator=draw, dtype=torch.float64) for _ in range(2))
    k, v = (torch.randn(2, 2, 16, 8, generator=draw, dtype=torch.float64) for _ in range(2))
    wide = repeat_heads(k, 6), repeat_heads(v, 6)
    given = (k.unsqueeze(2), v.unsqueeze(2)) if five else (k, v)
    ops, rest = torch.ops.autoshard, (mask, causal, 0.3, window, cap)
    out, lse = ops.sdpa(q, *given, *rest)
    wanted, sums = ops.sdpa(q, *wide, *rest)
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(lse, sums)
    made = ops.sdpa_backward(grad, q, *given, out, lse, *rest)
    expected = ops.sdpa_backward(grad, q, *wide, out, lse, *rest)
    torch.testing.assert_close(made[0], expected[0])
    for ours, theirs, x in zip(made[1:], expected[1:], given, strict=True):
        assert ours.shape == x.shape
        torch.testing.assert_close(ours.reshape(k.shape), theirs.unflatten(1, (2, 3)).sum(2))


def test_rows_of_groups_and_what_is_written_out() -> None:
    draw = torch.Generator().manual_seed(1)
    q, grad = (torch.randn(1, 4, 8, 8, generator=draw, dtype=torch.float64) for _ in range(2))
    k, v = (torch.randn(1, 2, 1, 16, 8, generator=draw, dtype=torch.float64) for _ in range(2))
    wide = [repeat_heads(x.squeeze(2), 4) for x in (k, v)]
    ops = torch.ops.autoshard
    out, lse = ops.sdpa_rows(q, k, v, 0.3, 4, True)
    wanted = ops.sdpa_rows(q, *wide, 0.3, 4, True)
    torch.testing.assert_close((out, lse), tuple(wanted))
    made = ops.sdpa_rows_backward(grad, q, k, v, out, lse, 0.3, 4, True)
    expected = ops.sdpa_rows_backward(grad, q, *wide, out, lse, 0.3, 4, True)
    torch.testing.assert_close(made[1], expected[1].unflatten(1, (2, 2)).sum(2, keepdim=True))
    few = k.squeeze(2), v.squeeze(2)
    out, lse = sdpa_math(q, *few, None, False, 0.3)
    grads = sdpa_math_backward(grad, q, *few, out, lse, None, False, 0.3)
    wide_grads = sdpa_math_backward(grad, q, *wide, out, lse, None, False, 0.3)
    torch.testing.assert_close(grads[2], wide_grads[2].unflatten(1, (2, 2)).sum(2))


def test_the_proof_refuses_other_groups() -> None:
    """Heads of keys are those of query heads that follow each other: values of other keys are not theirs."""
    found = program("llama", "tp=2")
    segments = dict(found.lowered.segments)
    name, segment = next((n, s) for n, s in segments.items() if any(x.op in KEYS for x in s.graph.nodes))
    nodes = [
        replace(n, args=(n.args[0], n.args[2], n.args[1], *n.args[3:])) if n.op in KEYS else n
        for n in segment.graph.nodes
    ]
    segments[name] = replace(segment, graph=replace(segment.graph, nodes=tuple(nodes)))
    broken = replace(found, lowered=replace(found.lowered, segments=segments))
    assert not verify_static(broken).ok
