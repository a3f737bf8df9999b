"""Programs drop copies that only make a tensor dense: every op must take strided tensors all the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from rule_samples import all_samples
from torch.utils import _pytree as pytree

from autoshard.ir.row_tiles import TILES
from autoshard.ir.scans import SCAN
from autoshard.runtime.resolve import find_op
from autoshard.verify.rule_check import comparable

#: these become reshape before anything runs
REWRITTEN = ("aten.view.default", "aten._unsafe_view.default")
#: takes a transposed matrix as it is, and says so where it cannot
OWN_LAYOUTS = ("aten._grouped_mm.default",)
#: memory that nothing has written
UNSET = ("aten.empty_like.default", "aten.empty.memory_format", "aten.new_empty.default")


def turned(x: torch.Tensor) -> torch.Tensor:
    """The same numbers, laid out with the dims in reverse."""
    order = tuple(reversed(range(x.dim())))
    return x.permute(order).contiguous().permute(order)


def spaced(x: torch.Tensor) -> torch.Tensor:
    """The same numbers with a gap behind each."""
    return torch.stack([x, torch.zeros_like(x)], -1)[..., 0] if x.dim() else x


@pytest.mark.parametrize("laid", [turned, spaced])
def test_ops_on_strided_tensors(laid: Callable[[torch.Tensor], torch.Tensor]) -> None:
    wrong: list[str] = []
    for sample in all_samples():
        if (
            sample.op in (*REWRITTEN, *OWN_LAYOUTS, *UNSET, TILES, SCAN)
            or sample.shapes_only
            or "transformers" in sample.op
        ):
            continue
        op = find_op(sample.op)
        wanted = op(*pytree.tree_map(_copy, list(sample.args)), **sample.kwargs)
        try:
            found = op(
                *pytree.tree_map(lambda x: laid(x) if isinstance(x, torch.Tensor) else x, list(sample.args)),
                **sample.kwargs,
            )
        except RuntimeError as error:
            wrong.append(f"{sample}: {error}")
            continue
        pairs = zip(pytree.tree_leaves(wanted), pytree.tree_leaves(found), strict=True)
        wrong += [f"{sample}: other numbers" for a, b in pairs if not _same(a, b)]
    assert not wrong, "\n".join(wrong)


def _copy(x: Any) -> Any:
    return x.clone() if isinstance(x, torch.Tensor) else x


def _same(a: Any, b: Any) -> bool:
    if b is None:
        return a is None
    return torch.allclose(comparable(a), comparable(b), rtol=1e-6, atol=1e-8, equal_nan=True)
