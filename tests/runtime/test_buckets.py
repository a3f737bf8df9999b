"""Messages of several tensors that kernels fill and empty lie as those that are pieced together."""

from __future__ import annotations

import pytest
import torch

from autoshard.runtime.shard_utils import join_parts, take_part
from autoshard.runtime.transport.buckets import emptied, filled, in_one_kernel

SHAPES = ((8, 3), (4,), (12, 2, 5))


@pytest.mark.parametrize("ways", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_lie_as_they_are_sent(ways: int, dtype: torch.dtype) -> None:
    xs = [torch.randn(shape).to(dtype) for shape in SHAPES]
    parts = [[take_part(x, 0, ways, k, 1, 1) for k in range(ways)] for x in xs]
    sent = torch.cat([row[k].reshape(-1) for k in range(ways) for row in parts])
    assert torch.equal(filled(xs, ways), sent)
    for x, row, found in zip(xs, parts, emptied(sent, [row[0].shape for row in parts], ways), strict=True):
        assert found.shape == x.shape and found.dtype == dtype
        assert torch.equal(found, join_parts(row, 0)) and torch.equal(found, x)


def test_only_what_a_kernel_takes_is_given_to_it() -> None:
    rows = (0, 1, 1, None)
    device = torch.empty(4, 2, device="meta")
    assert not in_one_kernel([torch.ones(4, 2)], [rows])  # the CPU has no kernel
    assert not in_one_kernel([device], [rows])


@pytest.mark.gpu
def test_kernels_fill_and_empty_on_a_device() -> None:
    xs = [torch.randn(shape, device="cuda") for shape in SHAPES]
    rows = [(0, 1, 1, None)] * len(xs)
    assert in_one_kernel(xs, rows)
    assert not in_one_kernel(xs, [(1, 1, 1, None)] * len(xs)) and not in_one_kernel(xs, [(0, 1, 1, 7)] * 3)
    assert not in_one_kernel([*xs, xs[0].half()], [])
    sent = filled(xs, 4)
    assert torch.equal(sent.cpu(), filled([x.cpu() for x in xs], 4))
    for x, found in zip(xs, emptied(sent, [(s[0] // 4, *s[1:]) for s in SHAPES], 4), strict=True):
        assert torch.equal(found, x)
