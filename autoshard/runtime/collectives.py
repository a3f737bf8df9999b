"""Collectives of a program on torch.distributed, through the functional ops.

Every result passes ``wait_tensor``. Uneven parts travel padded to the largest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, TypeAlias

import torch

from autoshard.ir import Node
from autoshard.kernels.vocab_ce import merge_stats
from autoshard.placement import chunk
from autoshard.program.collectives import is_collective
from autoshard.runtime import exchange
from autoshard.runtime.guard import collective, failure, is_failure
from autoshard.runtime.parts import join_parts, take_part
from autoshard.runtime.resolve import RankView
from autoshard.runtime.watch import Watch

#: (dim, outer, inner, size before the split or None if it divides evenly)
Where: TypeAlias = tuple[int, int, int, "int | None"]

_FUNCTIONAL = torch.ops._c10d_functional


class GroupCollectives:
    """The collectives of one rank.

    groups: axis name -> name of its process group. names: (segment, value) -> how errors call what makes it.
    watch: told of every collective, None in a plain run.
    """

    def __init__(
        self,
        groups: Mapping[str, str],
        names: Mapping[tuple[str, str], object] | None = None,
        watch: Watch | None = None,
    ) -> None:
        self.groups, self.names, self.watch = dict(groups), dict(names or {}), watch

    def of(self, segment: str, node: Node, view: RankView) -> Callable[..., Any]:
        """The function that runs a ``comm`` node of a segment, "" for one of a part."""
        kind = node.op.split(".")[1]
        fn: Callable[..., Any] = getattr(self, kind)
        if not is_collective(node):
            return lambda *args, **kwargs: fn(view, *args, **kwargs)
        name, watch = self.names.get((segment, node.name), f"{kind} that makes {node.name}"), self.watch
        if watch is not None:

            def watched(*args: Any, **kwargs: Any) -> Any:
                with collective(str(name), watch):
                    return fn(view, *args, **kwargs)

            return watched

        def plain(*args: Any, **kwargs: Any) -> Any:
            try:  # costs nothing while nothing fails
                return fn(view, *args, **kwargs)
            except RuntimeError as error:
                if not is_failure(error):
                    raise
                raise failure(str(name), error, None) from error

        return plain

    def _gather(self, x: torch.Tensor, ways: int, axis: str) -> torch.Tensor:
        out = _FUNCTIONAL.all_gather_into_tensor(x.contiguous(), ways, self.groups[axis])
        return _wait(out)

    def _scatter(self, x: torch.Tensor, ways: int, axis: str) -> torch.Tensor:
        return reduce_scatter(x.contiguous(), ways, self.groups[axis])

    def all_reduce(self, view: RankView, x: torch.Tensor, axis: str, op: str = "sum") -> torch.Tensor:
        if op == "lse":
            ways = view.size_of(axis)
            return merge_stats(self._gather(x, ways, axis).chunk(ways))
        return _wait(_FUNCTIONAL.all_reduce(x.contiguous(), op, self.groups[axis]))

    def all_gather(
        self,
        view: RankView,
        x: torch.Tensor,
        axis: str,
        dim: int,
        outer: int = 1,
        inner: int = 1,
        size: int | None = None,
    ) -> torch.Tensor:
        ways = view.size_of(axis)
        if size is not None:
            shapes = _part_shapes(x.shape, dim, size, ways, outer, inner)
            flat = self._gather(_padded(x, shapes), ways, axis).view(ways, -1)
            parts = [row[: prod(s)].view(s) for row, s in zip(flat, shapes, strict=True)]
            return join_parts(parts, dim, outer)
        if x.dim() == 0:
            x = x.view(1)
        whole = self._gather(x, ways, axis)
        return whole if dim == 0 and outer == 1 else join_parts(whole.chunk(ways), dim, outer)

    def reduce_scatter(
        self,
        view: RankView,
        x: torch.Tensor,
        axis: str,
        dim: int,
        outer: int = 1,
        inner: int = 1,
        size: int | None = None,
    ) -> torch.Tensor:
        ways = view.size_of(axis)
        if size is None and dim == 0 and outer == 1:
            return self._scatter(x, ways, axis)
        parts = [take_part(x, dim, ways, k, outer, inner) for k in range(ways)]
        if size is None:
            return self._scatter(torch.cat([p.reshape(-1) for p in parts]), ways, axis).view(parts[0].shape)
        shapes = [p.shape for p in parts]
        own = self._scatter(torch.cat([_padded(p, shapes) for p in parts]), ways, axis)
        shape = shapes[view.coord_of(axis)]
        return own[: prod(shape)].view(shape)

    def all_to_all(
        self,
        view: RankView,
        x: torch.Tensor,
        axis: str,
        split_dim: int,
        concat_dim: int,
        split_outer: int = 1,
        concat_outer: int = 1,
    ) -> torch.Tensor:
        ways = view.size_of(axis)
        parts = [take_part(x, split_dim, ways, k, split_outer) for k in range(ways)]
        flat = torch.cat([p.reshape(-1) for p in parts])
        counts = [parts[0].numel()] * ways
        got = _wait(_FUNCTIONAL.all_to_all_single(flat, counts, counts, self.groups[axis]))
        return join_parts([g.view(parts[0].shape) for g in got.chunk(ways)], concat_dim, concat_outer)

    def _transport(self, axis: str) -> exchange.Transport:
        def send(x: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
            name = self.groups[axis]
            return _wait(_FUNCTIONAL.all_to_all_single(x.contiguous(), list(received), list(sent), name))

        return send

    def expert_mm(
        self, view: RankView, xs: Sequence[torch.Tensor], axis: str, transposed: bool, num_experts: int
    ) -> torch.Tensor:
        """Rows times the matrices of their experts, which the ranks of an axis hold in parts."""
        ways, rank = view.size_of(axis), view.coord_of(axis)
        return exchange.expert_mm(xs, transposed, num_experts, ways, rank, self._transport(axis))

    def expert_outer(
        self, view: RankView, xs: Sequence[torch.Tensor], axis: str, transposed: bool, num_experts: int
    ) -> torch.Tensor:
        """The gradient of the matrices that this rank holds, from the rows of all ranks of an axis."""
        ways, rank = view.size_of(axis), view.coord_of(axis)
        return exchange.expert_outer(xs, transposed, num_experts, ways, rank, self._transport(axis))

    def all_gather_bucket(
        self, view: RankView, xs: Sequence[torch.Tensor], axis: str, wheres: Sequence[Where]
    ) -> list[torch.Tensor]:
        """Several gathers over one axis as one message."""
        ways = view.size_of(axis)
        shapes = [_where_shapes(x.shape, where, ways) for x, where in zip(xs, wheres, strict=True)]
        flat = torch.cat([_padded(x, s) for x, s in zip(xs, shapes, strict=True)])
        rows = self._gather(flat, ways, axis).view(ways, -1)
        outs: list[torch.Tensor] = []
        start = 0
        for parts, (dim, outer, _, _) in zip(shapes, wheres, strict=True):
            pieces = [rows[k, start : start + prod(s)].view(s) for k, s in enumerate(parts)]
            outs.append(join_parts(pieces, dim, outer))
            start += max(prod(s) for s in parts)
        return outs

    def reduce_scatter_bucket(
        self, view: RankView, xs: Sequence[torch.Tensor], axis: str, wheres: Sequence[Where]
    ) -> list[torch.Tensor]:
        """Several reduce-scatters over one axis as one message."""
        ways = view.size_of(axis)
        parts = [
            [take_part(x, dim, ways, k, outer, inner) for k in range(ways)]
            for x, (dim, outer, inner, _) in zip(xs, wheres, strict=True)
        ]
        shapes = [[p.shape for p in row] for row in parts]
        flat = torch.cat(
            [_padded(row[k], s) for k in range(ways) for row, s in zip(parts, shapes, strict=True)]
        )
        own = self._scatter(flat, ways, axis)
        outs: list[torch.Tensor] = []
        start = 0
        for row in shapes:
            shape = row[view.coord_of(axis)]
            outs.append(own[start : start + prod(shape)].view(shape))
            start += max(prod(s) for s in row)
        return outs

    def all_reduce_bucket(
        self, view: RankView, xs: Sequence[torch.Tensor], axis: str, op: str = "sum"
    ) -> list[torch.Tensor]:
        """Several all-reduces over one axis as one message."""
        packed = torch.cat([x.reshape(-1) for x in xs])
        # in place: the buffer is our own, and a copy of all gradients costs as much as a layer
        flat = _wait(_FUNCTIONAL.all_reduce_(packed, op, self.groups[axis]))
        pieces = flat.split([x.numel() for x in xs])
        return [p.view(x.shape) for p, x in zip(pieces, xs, strict=True)]

    def slice(
        self,
        view: RankView,
        x: torch.Tensor,
        axis: str,
        dim: int,
        outer: int = 1,
        inner: int = 1,
        size: int | None = None,
    ) -> torch.Tensor:
        # contiguous: kernels such as layer norm's backward misread strided statistics without a word
        return take_part(x, dim, view.size_of(axis), view.coord_of(axis), outer, inner).contiguous()


def reduce_scatter(x: torch.Tensor, ways: int, group: str) -> torch.Tensor:
    """This rank's part, along dim 0, of the sum of the tensors of all ranks of a group. x: contiguous.

    On the CPU the parts are exchanged and added up here, in the order of the ranks: gloo's own reduce-scatter
    takes as long as its all-reduce, twice as long as this.
    """
    if x.device.type != "cpu":
        return _wait(_FUNCTIONAL.reduce_scatter_tensor(x, "sum", ways, group))
    counts = [x.numel() // ways] * ways
    got = _wait(_FUNCTIONAL.all_to_all_single(x.view(-1), counts, counts, group))
    return got.view(ways, -1).sum(0).view(x.shape[0] // ways, *x.shape[1:])


def _wait(x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = _FUNCTIONAL.wait_tensor(x)
    return result


def _where_shapes(shape: Sequence[int], where: Where, ways: int) -> list[tuple[int, ...]]:
    dim, outer, inner, size = where
    return _part_shapes(shape, dim, shape[dim] * ways if size is None else size, ways, outer, inner)


def _part_shapes(
    shape: Sequence[int], dim: int, size: int, ways: int, outer: int, inner: int
) -> list[tuple[int, ...]]:
    middle = size // (outer * inner)
    lengths = [outer * chunk(middle, ways, k)[1] * inner for k in range(ways)]
    return [(*shape[:dim], n, *shape[dim + 1 :]) for n in lengths]


def _padded(x: torch.Tensor, shapes: Sequence[Sequence[int]]) -> torch.Tensor:
    """The elements of a part, padded to the number of elements of the largest part."""
    flat = x.reshape(-1)
    most = max(prod(s) for s in shapes)
    return flat if flat.numel() == most else torch.nn.functional.pad(flat, (0, most - flat.numel()))
