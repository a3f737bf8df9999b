"""Collectives of even, uneven and empty tensors, with what they give by their definition."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch

from autoshard.ir import Node, TensorType
from autoshard.runtime.collectives import GroupCollectives
from autoshard.runtime.lockstep.in_process import Together
from autoshard.runtime.resolve import RankView
from autoshard.runtime.shard_utils import join_parts, take_part

WAYS = 4


@dataclass(frozen=True)
class Case:
    """kind: of the collective. shape: of the whole tensors. args: after the axis."""

    kind: str
    shape: tuple[int, ...]
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()
    dtype: torch.dtype = torch.float32

    def whole(self, rank: int) -> torch.Tensor:
        """A tensor of the shape, another on every rank."""
        numbers = torch.arange(prod(self.shape)).reshape(self.shape)
        return (3 * numbers + 100 * rank).to(self.dtype)

    def cut(self, x: torch.Tensor, k: int, dim: int, outer: int = 1) -> torch.Tensor:
        return take_part(x, dim, WAYS, k, outer)

    def given(self, rank: int) -> torch.Tensor:
        """What a rank gives."""
        if self.kind == "all_gather":
            return self.cut(self.whole(0), rank, self.args[0], dict(self.kwargs).get("outer", 1))
        return self.whole(rank)

    def wanted(self, rank: int) -> torch.Tensor:
        """What it must get."""
        named = dict(self.kwargs)
        if self.kind == "all_gather":
            return self.whole(0)
        wholes = [self.whole(k) for k in range(WAYS)]
        if self.kind == "all_to_all":
            split, joined = self.args
            parts = [self.cut(x, rank, split, named.get("split_outer", 1)) for x in wholes]
            return join_parts(parts, joined, named.get("concat_outer", 1))
        total = torch.stack(wholes)
        if named.get("op") == "max":
            return total.max(0).values
        summed = total.sum(0, dtype=self.dtype) if self.dtype != torch.bool else total.any(0)
        if self.kind == "all_reduce":
            return summed
        return self.cut(summed, rank, self.args[0], named.get("outer", 1))

    def node(self) -> Node:
        op = f"comm.{self.kind}.default"
        return Node(op, ((), "tp"), (), ("out",), (TensorType(self.shape, "f32"),))


def _cases() -> list[Case]:
    found = [
        Case("all_reduce", shape, (), (("op", op),), dtype)
        for shape in ((), (5,), (0,), (2, 0, 3), (300, 301))
        for op in ("sum", "max")
        for dtype in (torch.float32, torch.int32, torch.bool)
    ]
    shapes = [
        ((8, 6), 0),
        ((6, 8), 1),
        ((0, 8), 1),
        ((8, 0), 0),
        ((2, 8, 0), 1),
        ((2, 0), 1),
        ((900, 400), 0),
        # one piece of memory for each rank, as with one sequence in front of its tokens
        ((1, 8, 3), 1),
        ((1, 1, 12), 2),
        ((1, 300, 301, 4), 1),
    ]
    found += [Case("all_gather", s, (d,)) for s, d in shapes]
    found += [Case("reduce_scatter", s, (d,)) for s, d in shapes]
    found += [Case("reduce_scatter", s, (d,), (), torch.int64) for s, d in shapes]
    # in blocks, and unevenly
    for shape in ((3, 8, 5), (3, 8, 0), (0, 8, 5)):
        for outer in (2, -2):
            found += [Case(k, shape, (1,), (("outer", outer),)) for k in ("all_gather", "reduce_scatter")]
    for shape in ((3, 10, 5), (3, 10, 0)):
        found += [Case(k, shape, (1,), (("size", 10),)) for k in ("all_gather", "reduce_scatter")]
    for shape in ((4, 8), (4, 8, 0), (0, 4, 8)):
        first = 1 if shape[0] == 0 else 0
        found.append(Case("all_to_all", shape, (first, first + 1)))
        found.append(Case("all_to_all", shape, (first + 1, first), (("split_outer", 2),)))
        found.append(Case("all_to_all", shape, (first, first + 1), (("concat_outer", 2),)))
    for split, joined in ((1, 2), (2, 1)):
        found.append(Case("all_to_all", (1, 8, 16), (split, joined)))
    found.append(Case("all_to_all", (1, 1, 8, 4), (2, 3)))
    for name in ("split_outer", "concat_outer"):
        found.append(Case("all_to_all", (8, 16), (1, 0), ((name, -2),)))
    return found


CASES = _cases()


def call_of(case: Case, over: GroupCollectives, rank: int) -> Callable[[], Any]:
    """The call of a case on a rank."""
    view = RankView(("tp",), (WAYS,), (rank,))
    kwargs = dict(case.kwargs)
    return partial(over.of("", case.node(), view), case.given(rank), "tp", *case.args, **kwargs)


def in_one_process(case: Case) -> Sequence[torch.Tensor]:
    """What lockstep gives on every rank."""
    together = Together([RankView(("tp",), (WAYS,), (k,)) for k in range(WAYS)])
    return together.run(case.node(), [call_of(case, over, k) for k, over in enumerate(together.ranks)])
