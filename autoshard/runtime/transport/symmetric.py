"""Products beside messages by torch's symmetric memory, where the user has switched that on for a group.

``torch.ops.symm_mem.fused_all_gather_matmul`` and ``fused_matmul_reduce_scatter``, as torch 2.11 to 2.13
define them: on CUDA devices of one node, whose memory all ranks of the group map
(``torch.distributed._symmetric_memory.enable_symm_mem_for_group``). Everything else goes by messages
(`runtime.rings`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def usable(xs: Sequence[torch.Tensor], dim: int, outer: int, group: str) -> bool:
    """Whether torch's ops can take these factors: on CUDA, a dim in one piece, the group's memory mapped."""
    if outer != 1 or not all(x.is_cuda for x in xs):
        return False
    from torch.distributed import _symmetric_memory

    return bool(_symmetric_memory.is_symm_mem_enabled_for_group(group))  # type: ignore[arg-type]


def all_gather_mm(xs: Sequence[torch.Tensor], dim: int, group: str) -> list[torch.Tensor]:
    """x gathered along a dim, and its rows times every w. xs: (x, w, ...)."""
    x, *weights = xs
    full, products = torch.ops.symm_mem.fused_all_gather_matmul(x, weights, dim, group, return_A=True)
    return [full.contiguous(), *(y.flatten(0, -2) for y in products)]


def mm_reduce_scatter(
    xs: Sequence[torch.Tensor], dim: int, shape: Sequence[int], ways: int, group: str
) -> torch.Tensor:
    """This rank's part, of a shape, of the sum of ``a @ w`` over the ranks. xs: (a, w)."""
    left, right = xs
    lead = [n * ways if d == dim else n for d, n in enumerate(shape[:-1])]
    rows = left.reshape(*lead, left.shape[1])
    result: torch.Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(rows, right, "sum", dim, group)
    return result.contiguous()
