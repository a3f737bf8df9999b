"""Collectives of a program on torch.distributed, through the functional ops.

Most are only issued, and waited for by whoever needs the result (`runtime.pending`). Uneven parts travel
padded to the largest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist

from autoshard.ir import Node
from autoshard.ir.comm import axes_of, goes_in_turn, is_message
from autoshard.kernels.vocab_ce import merge_stats
from autoshard.placement import chunk
from autoshard.runtime import exchange, rings, symmetric, transport
from autoshard.runtime.buckets import Where, emptied, filled, in_one_kernel
from autoshard.runtime.guard import collective
from autoshard.runtime.parts import join_parts, take_part
from autoshard.runtime.pending import Finish, Issue, Message, as_it_is, wait
from autoshard.runtime.quantised import Packing, joined, pack, sums, unpack
from autoshard.runtime.resolve import RankView
from autoshard.runtime.transport import Arrival
from autoshard.runtime.watch import Watch
from autoshard.torch_adapters.groups import group_named

_FUNCTIONAL = torch.ops._c10d_functional
#: collectives whose results are pending
ISSUED = frozenset(
    (
        "all_reduce",
        "all_gather",
        "reduce_scatter",
        "all_to_all",
        "all_gather_bucket",
        "reduce_scatter_bucket",
        "all_reduce_bucket",
        "all_gather_q_bucket",
        "reduce_scatter_q_bucket",
    )
)


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
        #: axis -> the last message that was issued over it of those that go in turn
        self._last: WeakValueDictionary[str, Message] = WeakValueDictionary()

    def of(self, segment: str, node: Node, view: RankView) -> Callable[..., Any]:
        """The function that runs a ``comm`` node of a segment, "" for one of a part; an `Issue` for one whose
        results are pending."""
        kind = node.op.split(".")[1]
        fn: Callable[..., Any] = getattr(self, kind)
        bound = partial(fn, view)
        if not is_message(node):
            return bound
        name, watch = str(self.names.get((segment, node.name), f"{kind} that makes {node.name}")), self.watch
        if watch is not None:

            def watched(*args: Any, **kwargs: Any) -> Any:
                with collective(name, watch):  # one after the other, so that a report names the right one
                    made = bound(*args, **kwargs)
                    return made.arrive() if isinstance(made, Message) else made

            return watched
        if kind in ISSUED:
            start = self._in_turn(bound, "+".join(axes_of(node))) if goes_in_turn(node.op) else bound
            return Issue(start, len(node.outs) if kind.endswith("_bucket") else None, name)

        def plain(*args: Any, **kwargs: Any) -> Any:
            with collective(name, None):
                return bound(*args, **kwargs)

        return plain

    def _in_turn(self, start: Callable[..., Message], axis: str) -> Callable[..., Message]:
        """The same, once the message before it has arrived."""

        def after(*args: Any, **kwargs: Any) -> Message:
            before = self._last.pop(axis, None)
            if before is not None:
                before.results()
            message = self._last[axis] = start(*args, **kwargs)
            return message

        return after

    def _gather(self, x: torch.Tensor, ways: int, axis: str) -> Arrival:
        """The tensors of all ranks, not waited for."""
        return transport.gather(x, ways, self.groups[axis])

    def _scatter(self, x: torch.Tensor, ways: int, axis: str) -> tuple[Arrival, Finish]:
        """What arrives, not waited for, and how this rank's part of the sum is made of it."""
        return transport.scatter(x, ways, self.groups[axis])

    def all_reduce(self, view: RankView, x: torch.Tensor, axis: str, op: str = "sum") -> Message:
        own, ways = x.contiguous(), view.size_of(axis)
        if op == "lse":
            return Message(self._gather(own, ways, axis), lambda got: merge_stats(got.chunk(ways)), own)
        return Message(*transport.all_reduce(own, op, ways, self.groups[axis]), own)

    def all_gather(
        self,
        view: RankView,
        x: torch.Tensor,
        axis: str,
        dim: int,
        outer: int = 1,
        inner: int = 1,
        size: int | None = None,
    ) -> Message:
        ways = view.size_of(axis)
        if size is not None:
            shapes = _part_shapes(x.shape, dim, size, ways, outer, inner)
            sent = _padded(x, shapes)

            def join(got: torch.Tensor) -> torch.Tensor:
                rows = got.view(ways, -1)
                parts = [row[: prod(s)].view(s) for row, s in zip(rows, shapes, strict=True)]
                return join_parts(parts, dim, outer)

            return Message(self._gather(sent, ways, axis), join, sent)
        sent = x.view(1) if x.dim() == 0 else x.contiguous()
        whole = dim == 0 and outer == 1
        finish = as_it_is if whole else lambda got: join_parts(got.chunk(ways), dim, outer)
        return Message(self._gather(sent, ways, axis), finish, sent)

    def reduce_scatter(
        self,
        view: RankView,
        x: torch.Tensor,
        axis: str,
        dim: int,
        outer: int = 1,
        inner: int = 1,
        size: int | None = None,
    ) -> Message:
        ways = view.size_of(axis)
        if size is None and dim == 0 and outer == 1:
            sent = x.contiguous()
            arriving, own = self._scatter(sent, ways, axis)
            return Message(arriving, own, sent)
        parts = [take_part(x, dim, ways, k, outer, inner) for k in range(ways)]
        shapes = [p.shape for p in parts]
        shape = shapes[view.coord_of(axis)]
        sent = torch.cat([_padded(p, shapes) for p in parts])
        arriving, own = self._scatter(sent, ways, axis)
        return Message(arriving, lambda got: own(got)[: prod(shape)].view(shape), sent)

    def all_to_all(
        self,
        view: RankView,
        x: torch.Tensor,
        axis: str,
        split_dim: int,
        concat_dim: int,
        split_outer: int = 1,
        concat_outer: int = 1,
    ) -> Message:
        ways = view.size_of(axis)
        parts = [take_part(x, split_dim, ways, k, split_outer) for k in range(ways)]
        sent, shape = torch.cat([p.reshape(-1) for p in parts]), parts[0].shape

        def join(got: torch.Tensor) -> torch.Tensor:
            return join_parts([g.view(shape) for g in got.chunk(ways)], concat_dim, concat_outer)

        return Message(transport.all_to_all(sent, ways, self.groups[axis]), join, sent)

    def _transport(self, axis: str) -> exchange.Transport:
        def send(x: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
            name = self.groups[axis]
            return wait(_FUNCTIONAL.all_to_all_single(x.contiguous(), list(received), list(sent), name))

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

    def _pass(self, view: RankView, axis: str) -> rings.Pass:
        """To the next rank of an axis, from the one before."""
        group = group_named(self.groups[axis])
        ways, rank = view.size_of(axis), view.coord_of(axis)

        def start(sent: torch.Tensor, received: torch.Tensor) -> Callable[[], None]:
            works = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, sent, group=group, group_peer=(rank + 1) % ways),
                    dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - 1) % ways),
                ]
            )

            def finish() -> None:
                for work in works:
                    work.wait()

            return finish

        return start

    def all_gather_mm(
        self, view: RankView, xs: Sequence[torch.Tensor], axis: str, dim: int, outer: int = 1
    ) -> list[torch.Tensor]:
        """Rows of all ranks of an axis, and their products, each chunk multiplied as it comes by."""
        if symmetric.usable(xs, dim, outer, self.groups[axis]):
            return symmetric.all_gather_mm(xs, dim, self.groups[axis])
        ways, rank = view.size_of(axis), view.coord_of(axis)
        return rings.all_gather_mm(xs, dim, outer, ways, rank, self._pass(view, axis))

    def mm_reduce_scatter(
        self,
        view: RankView,
        xs: Sequence[torch.Tensor],
        axis: str,
        dim: int,
        shape: Sequence[int],
        outer: int = 1,
    ) -> torch.Tensor:
        """This rank's rows of a sum of products over an axis, each chunk added up as it comes by."""
        if len(xs) == 2 and symmetric.usable(xs, dim, outer, self.groups[axis]):
            return symmetric.mm_reduce_scatter(xs, dim, shape, view.size_of(axis), self.groups[axis])
        ways, rank = view.size_of(axis), view.coord_of(axis)
        return rings.mm_reduce_scatter(xs, dim, shape, outer, ways, rank, self._pass(view, axis))

    def all_gather_bucket(
        self, view: RankView, xs: Sequence[torch.Tensor], axis: str, wheres: Sequence[Where]
    ) -> Message:
        """Several gathers over one axis as one message."""
        ways = view.size_of(axis)
        shapes = [_where_shapes(x.shape, where, ways) for x, where in zip(xs, wheres, strict=True)]
        flat = torch.cat([_padded(x, s) for x, s in zip(xs, shapes, strict=True)])
        quick, own = in_one_kernel(xs, wheres), [x.shape for x in xs]

        def unpack(got: torch.Tensor) -> list[torch.Tensor]:
            if quick:
                return emptied(got, own, ways)
            rows = got.view(ways, -1)
            outs: list[torch.Tensor] = []
            start = 0
            for parts, (dim, outer, _, _) in zip(shapes, wheres, strict=True):
                pieces = [rows[k, start : start + prod(s)].view(s) for k, s in enumerate(parts)]
                outs.append(join_parts(pieces, dim, outer))
                start += max(prod(s) for s in parts)
            return outs

        return Message(self._gather(flat, ways, axis), unpack, flat)

    def reduce_scatter_bucket(
        self, view: RankView, xs: Sequence[torch.Tensor], axis: str, wheres: Sequence[Where]
    ) -> Message:
        """Several reduce-scatters over one axis as one message."""
        ways, rank = view.size_of(axis), view.coord_of(axis)
        parts = [
            [take_part(x, dim, ways, k, outer, inner) for k in range(ways)]
            for x, (dim, outer, inner, _) in zip(xs, wheres, strict=True)
        ]
        shapes = [[p.shape for p in row] for row in parts]
        if in_one_kernel(xs, wheres):
            flat = filled(xs, ways)
        else:
            flat = torch.cat(
                [_padded(row[k], s) for k in range(ways) for row, s in zip(parts, shapes, strict=True)]
            )
        arriving, sum_of = self._scatter(flat, ways, axis)

        def unpack(got: torch.Tensor) -> list[torch.Tensor]:
            own = sum_of(got)
            outs: list[torch.Tensor] = []
            start = 0
            for row in shapes:
                outs.append(own[start : start + prod(row[rank])].view(row[rank]))
                start += max(prod(s) for s in row)
            return outs

        return Message(arriving, unpack, flat)

    def all_reduce_bucket(
        self, view: RankView, xs: Sequence[torch.Tensor], axis: str, op: str = "sum"
    ) -> Message:
        """Several all-reduces over one axis as one message."""
        packed = filled(xs) if in_one_kernel(xs) else torch.cat([x.reshape(-1) for x in xs])
        shapes = [x.shape for x in xs]

        # in place: the buffer is our own, and a copy of all gradients costs as much as a layer
        ways, group = view.size_of(axis), self.groups[axis]
        arriving, reduced = transport.all_reduce(packed, op, ways, group, own=True)

        def unpack(got: torch.Tensor) -> list[torch.Tensor]:
            pieces = reduced(got).split([prod(s) for s in shapes])
            return [p.view(s) for p, s in zip(pieces, shapes, strict=True)]

        return Message(arriving, unpack, packed)

    def all_gather_q_bucket(
        self,
        view: RankView,
        xs: Sequence[torch.Tensor],
        axis: str | Sequence[str],
        wheres: Sequence[Where],
        bits: Sequence[int],
        group: int,
    ) -> Message:
        """Several gathers as one message in which those with bits are quantised; also the rank's own part
        comes out as the others see it. Over several axes (outermost first) the buffers of all ranks so far
        travel on as they are; only the last message is not waited for."""
        axes = (axis,) if isinstance(axis, str) else tuple(axis)
        sizes = [view.size_of(a) for a in axes]
        ways = prod(sizes)
        shapes = [_where_shapes(x.shape, where, ways) for x, where in zip(xs, wheres, strict=True)]
        how = Packing.of([max(map(prod, s)) for s in shapes], bits, group, xs[0].dtype)
        sent = pack([xs], how)
        for size, name in zip(sizes[:-1], axes[:-1], strict=True):
            sent = self._gather(sent, size, name)()

        def join(got: torch.Tensor) -> list[torch.Tensor]:
            # the last axis came last, and so stands first
            wires = got.view(*reversed(sizes), -1).permute(*reversed(range(len(sizes))), -1).reshape(ways, -1)
            return [
                joined(rows, parts, dim, outer)
                for rows, parts, (dim, outer, _, _) in zip(unpack(wires, how), shapes, wheres, strict=True)
            ]

        return Message(self._gather(sent, sizes[-1], axes[-1]), join, sent)

    def reduce_scatter_q_bucket(
        self,
        view: RankView,
        xs: Sequence[torch.Tensor],
        axis: str,
        wheres: Sequence[Where],
        bits: Sequence[int],
        group: int,
    ) -> Message:
        """Several reduce-scatters as one exchange in which those with bits are quantised; summed in fp32."""
        ways, own = view.size_of(axis), view.coord_of(axis)
        parts = [
            [take_part(x, dim, ways, k, outer, inner) for k in range(ways)]
            for x, (dim, outer, inner, _) in zip(xs, wheres, strict=True)
        ]
        how = Packing.of([max(p.numel() for p in row) for row in parts], bits, group, xs[0].dtype)
        shapes = [row[own].shape for row in parts]
        sent = pack([[row[k] for row in parts] for k in range(ways)], how).view(-1)

        def add(got: torch.Tensor) -> list[torch.Tensor]:
            flat = sums(got.view(ways, -1), how)
            return [x[: prod(shape)].view(shape) for x, shape in zip(flat, shapes, strict=True)]

        return Message(transport.all_to_all(sent, ways, self.groups[axis]), add, sent)

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
