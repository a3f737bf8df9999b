"""Collectives of a program between the ranks of its axes.

Most are only issued, and waited for by whoever needs the result (`runtime.pending`). Uneven parts travel
padded to the largest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any, Literal
from weakref import WeakValueDictionary

import torch

from autoshard.ir import Node
from autoshard.ir.collectives import COLLECTIVES, EXPERT_RELAY, axes_of, goes_in_turn, is_message
from autoshard.ir.placement import in_one_piece
from autoshard.ir.quantized import WIRE_BITS
from autoshard.kernels.vocab_ce import merge_stats
from autoshard.ops.attention_parts import normalised, weighted
from autoshard.runtime import rings
from autoshard.runtime.checks.check_mode import collective
from autoshard.runtime.checks.collective_watchdog import Watch
from autoshard.runtime.exchange import ExpertExchange, Hop, Send
from autoshard.runtime.pending import Issue, Pending, PendingCollective, as_it_is
from autoshard.runtime.resolve import RankView
from autoshard.runtime.ring_attention import RingAttention
from autoshard.runtime.shard_utils import join_parts, part_in_blocks, part_shapes, take_part, with_size
from autoshard.runtime.transport import symmetric
from autoshard.runtime.transport.buckets import Where, emptied, filled, in_one_kernel
from autoshard.runtime.transport.quantized_buffers import Packing, joined, pack, sums, unpack
from autoshard.runtime.transport.transport import Transport
from autoshard.runtime.window_ring import WindowRing


def _with_experts(run: Callable[..., Any]) -> Callable[..., Any]:
    """The method that runs an exchange of tokens over an axis, or over several, outermost first. inside: of
    one axis, ranks that follow each other in a node, if tokens go by node. relayed: whether the second hop is
    an op of the program (`expert_relay`), which the program alone needs to know."""

    def method(
        self: GroupCollectives,
        view: RankView,
        xs: Sequence[torch.Tensor],
        axes: str | Sequence[str],
        num_experts: int,
        inside: int | None = None,
        relayed: bool = False,
        **told: Any,
    ) -> Any:
        exchange = self._experts((axes,) if isinstance(axes, str) else tuple(axes), inside)
        return run(exchange, num_experts, *xs, **told)

    return method


def _with_ring(name: Literal["forward", "backward"], tensors: int) -> Callable[..., Any]:
    """The method that runs attention of this rank's rows over the keys of all ranks of an axis. tensors: how
    many it takes, behind which may come the mask of all keys. window, zigzag, hops: of `WindowRing`, 0 where
    all keys go round. inside: ranks of the axis that are in a node, None for all."""

    def method(
        self: GroupCollectives,
        view: RankView,
        xs: Sequence[torch.Tensor],
        axis: str,
        causal: bool,
        scale: float,
        softcap: float = 0.0,
        window: int = 0,
        zigzag: bool = False,
        hops: int = 0,
        inside: int | None = None,
    ) -> Any:
        ways, rank, pass_on = view.size_of(axis), view.coord_of(axis), self.over[axis].pass_on
        mask = xs[tensors] if len(xs) > tensors else None
        given = *xs[:tensors], mask, causal, scale, softcap
        if window:
            return getattr(WindowRing(ways, rank, zigzag, hops, pass_on), name)(*given, window)
        return getattr(RingAttention(ways, rank, inside or ways, pass_on), name)(*given)

    return method


def _to_next(over: Transport) -> rings.Pass:
    """To the next rank, from the one before."""
    return lambda x, out: over.pass_on(x, out, (over.rank + 1) % over.ways, (over.rank - 1) % over.ways)


def _sender(over: Transport) -> Send:
    return lambda rows, sent, given: over.exchange(rows.contiguous(), sent, given)


def _by_node(over: Transport, inside: int) -> list[Hop]:
    """Among the ranks in this one's place of all nodes, then among those of its node."""
    node, place = divmod(over.rank, inside)
    across = range(place, over.ways, inside)
    return [
        Hop(len(across), node, _sender_among(over, across)),
        Hop(inside, place, _sender_among(over, range(node * inside, (node + 1) * inside))),
    ]


def _sender_among(over: Transport, peers: range) -> Send:
    """Rows to and from some ranks of a group."""

    def counts(of_peers: Sequence[int]) -> list[int]:
        result = [0] * over.ways
        for peer, count in zip(peers, of_peers, strict=True):
            result[peer] = count
        return result

    return lambda rows, sent, given: over.exchange(rows.contiguous(), counts(sent), counts(given))


class GroupCollectives:
    """The collectives of one rank.

    transports: of the axes. names: (segment, value) -> how errors call what makes it.
    watch: told of every collective, None in a plain run.
    """

    def __init__(
        self,
        transports: Mapping[str, Transport],
        names: Mapping[tuple[str, str], object] | None = None,
        watch: Watch | None = None,
    ) -> None:
        self.over, self.names, self.watch = dict(transports), dict(names or {}), watch
        #: axis -> the last message that was issued over it of those that go in turn
        self._last: WeakValueDictionary[str, PendingCollective] = WeakValueDictionary()
        self._exchanges: dict[tuple[tuple[str, ...], int | None], ExpertExchange] = {}

    def of(self, segment: str, node: Node, view: RankView) -> Callable[..., Any]:
        """The function that runs a ``comm`` node of a segment, "" for one of a part; an `Issue` for one whose
        results are pending."""
        spec = COLLECTIVES[node.op]
        fn: Callable[..., Any] = getattr(self, spec.name)
        bound = partial(fn, view)
        if not is_message(node):
            return bound
        name = str(self.names.get((segment, node.name), f"{spec.name} that makes {node.name}"))
        watch = self.watch
        if watch is not None:

            def watched(*args: Any, **kwargs: Any) -> Any:
                with collective(name, watch):  # one after the other, so that a report names the right one
                    new = bound(*args, **kwargs)
                    return new.arrive() if isinstance(new, PendingCollective) else new

            return watched
        if spec.pending:
            start = self._in_turn(bound, "+".join(axes_of(node))) if goes_in_turn(node) else bound
            return Issue(start, len(node.outs) if spec.bucket else None, name, spec is EXPERT_RELAY)

        def plain(*args: Any, **kwargs: Any) -> Any:
            with collective(name, None):
                return bound(*args, **kwargs)

        return plain

    def _in_turn(
        self, start: Callable[..., PendingCollective], axis: str
    ) -> Callable[..., PendingCollective]:
        """The same, once the message before it has arrived."""

        def after(*args: Any, **kwargs: Any) -> PendingCollective:
            before = self._last.pop(axis, None)
            if before is not None:
                before.results()
            message = self._last[axis] = start(*args, **kwargs)
            return message

        return after

    def all_reduce(self, view: RankView, x: torch.Tensor, axis: str, op: str = "sum") -> PendingCollective:
        own, over = x.contiguous(), self.over[axis]
        if op == "lse":
            return PendingCollective(
                over.gather(own), lambda got: merge_stats(got.view(over.ways, *own.shape).unbind())
            )
        if op == "attention":
            arriving, reduced = over.all_reduce(own[..., -1:].contiguous(), "max")
            most = reduced(arriving())
            arriving, reduced = over.all_reduce(weighted(own, most), "sum", own=True)
            return PendingCollective(arriving, lambda got: normalised(reduced(got), most))
        return PendingCollective(*over.all_reduce(own, op))

    def all_gather(
        self,
        view: RankView,
        x: torch.Tensor,
        axis: str,
        dim: int,
        outer: int = 1,
        inner: int = 1,
        size: int | None = None,
    ) -> PendingCollective:
        ways = view.size_of(axis)
        if size is not None:
            shapes = part_shapes(x.shape, dim, size, ways, outer, inner)
            sent = _padded(x, shapes).reshape(-1)

            def join(rows: Sequence[torch.Tensor]) -> torch.Tensor:
                parts = [row[: prod(s)].view(s) for row, s in zip(rows, shapes, strict=True)]
                return join_parts(parts, dim, outer)

            return PendingCollective(self.over[axis].gather_rows(sent, join), as_it_is)
        sent = x.view(1) if x.dim() == 0 else x.contiguous()
        shape = sent.shape
        if in_one_piece(shape, dim, outer):
            full = with_size(shape, dim, ways * shape[dim])
            return PendingCollective(self.over[axis].gather(sent.view(shape[dim:])), _viewed(full))

        def whole(rows: Sequence[torch.Tensor]) -> torch.Tensor:
            return join_parts([row.view(shape) for row in rows], dim, outer)

        return PendingCollective(self.over[axis].gather_rows(sent, whole), as_it_is)

    def reduce_scatter(
        self,
        view: RankView,
        x: torch.Tensor,
        axis: str,
        dim: int,
        outer: int = 1,
        inner: int = 1,
        size: int | None = None,
    ) -> PendingCollective:
        ways = view.size_of(axis)
        if size is None and in_one_piece(x.shape, dim, outer):
            arriving, own = self.over[axis].scatter(x.contiguous().view(x.shape[dim:]))
            part = with_size(x.shape, dim, x.shape[dim] // ways)
            return PendingCollective(arriving, lambda got: own(got).view(part))
        parts = [part_in_blocks(x, dim, ways, k, outer, inner) for k in range(ways)]
        shapes = part_shapes(x.shape, dim, x.shape[dim], ways, outer, inner)
        shape = shapes[view.coord_of(axis)]
        sent = _together(self.over[axis], [_padded(p, shapes) for p in parts])
        arriving, own = self.over[axis].scatter(sent)
        return PendingCollective(arriving, lambda got: own(got)[: prod(shape)].view(shape))

    def all_to_all(
        self,
        view: RankView,
        x: torch.Tensor,
        axis: str,
        split_dim: int,
        concat_dim: int,
        split_outer: int = 1,
        concat_outer: int = 1,
    ) -> PendingCollective:
        ways = view.size_of(axis)
        if in_one_piece(x.shape, split_dim, split_outer):
            sent = x.contiguous().view(-1)
        else:
            parts = [part_in_blocks(x, split_dim, ways, k, split_outer) for k in range(ways)]
            sent = _together(self.over[axis], parts)
        shape = part_shapes(x.shape, split_dim, x.shape[split_dim], ways, split_outer, 1)[0]

        if in_one_piece(shape, concat_dim, concat_outer):
            full = with_size(shape, concat_dim, ways * shape[concat_dim])
            return PendingCollective(self.over[axis].all_to_all(sent), _viewed(full))

        def join(got: torch.Tensor) -> torch.Tensor:
            return join_parts(got.view(ways, *shape).unbind(), concat_dim, concat_outer)

        return PendingCollective(self.over[axis].all_to_all(sent), join)

    def _experts(self, axes: tuple[str, ...], inside: int | None) -> ExpertExchange:
        result = self._exchanges.get((axes, inside))
        if result is None:
            if inside is None:
                hops = [Hop(o.ways, o.rank, _sender(o)) for o in map(self.over.__getitem__, axes)]
            else:
                hops = _by_node(self.over[axes[0]], inside)
            result = self._exchanges[axes, inside] = ExpertExchange(tuple(hops))
        return result

    expert_route = _with_experts(ExpertExchange.route)
    expert_dispatch = _with_experts(ExpertExchange.dispatch)
    expert_combine = _with_experts(ExpertExchange.combine)

    def expert_relay(
        self,
        view: RankView,
        xs: Sequence[Any],
        axis: str,
        num_experts: int,
        inside: int,
        bits: int = 0,
        group: int = 0,
    ) -> PendingCollective:
        """The second hop of an exchange by node, if it is still to come. xs: its result, on its way or there,
        and what it was given."""
        if isinstance(xs[0], Pending):
            return xs[0].forward()
        return PendingCollective(lambda: xs[0], as_it_is)

    expert_dispatch_weights = _with_experts(ExpertExchange.dispatch_weights)
    expert_combine_weights = _with_experts(ExpertExchange.combine_weights)

    def all_gather_mm(
        self, view: RankView, xs: Sequence[torch.Tensor], axis: str, dim: int, outer: int = 1
    ) -> list[torch.Tensor]:
        """Rows of all ranks of an axis, and their products, each chunk multiplied as it comes by."""
        if symmetric.usable(xs, dim, outer, self.over[axis].name):
            return symmetric.all_gather_mm(xs, dim, self.over[axis].name)
        ways, rank = view.size_of(axis), view.coord_of(axis)
        return rings.all_gather_mm(xs, dim, outer, ways, rank, _to_next(self.over[axis]))

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
        if len(xs) == 2 and symmetric.usable(xs, dim, outer, self.over[axis].name):
            return symmetric.mm_reduce_scatter(xs, dim, shape, view.size_of(axis), self.over[axis].name)
        ways, rank = view.size_of(axis), view.coord_of(axis)
        return rings.mm_reduce_scatter(xs, dim, shape, outer, ways, rank, _to_next(self.over[axis]))

    ring_attention = _with_ring("forward", 3)
    ring_attention_backward = _with_ring("backward", 6)

    def all_gather_bucket(
        self, view: RankView, xs: Sequence[torch.Tensor], axis: str, wheres: Sequence[Where]
    ) -> PendingCollective:
        """Several gathers over one axis as one message."""
        ways = view.size_of(axis)
        shapes = [_where_shapes(x.shape, where, ways) for x, where in zip(xs, wheres, strict=True)]
        flat = _together(self.over[axis], [_padded(x, s) for x, s in zip(xs, shapes, strict=True)])
        if in_one_kernel(xs, wheres):
            own = [x.shape for x in xs]
            return PendingCollective(self.over[axis].gather(flat), lambda got: emptied(got, own, ways))

        def unpack(rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            outs: list[torch.Tensor] = []
            start = 0
            for parts, (dim, outer, _, _) in zip(shapes, wheres, strict=True):
                pieces = [row[start : start + prod(s)].view(s) for row, s in zip(rows, parts, strict=True)]
                outs.append(join_parts(pieces, dim, outer))
                start += max(prod(s) for s in parts)
            return outs

        return PendingCollective(self.over[axis].gather_rows(flat, unpack), as_it_is)

    def reduce_scatter_bucket(
        self, view: RankView, xs: Sequence[torch.Tensor], axis: str, wheres: Sequence[Where]
    ) -> PendingCollective:
        """Several reduce-scatters over one axis as one message."""
        ways, rank = view.size_of(axis), view.coord_of(axis)
        shapes = [
            part_shapes(x.shape, dim, x.shape[dim], ways, outer, inner)
            for x, (dim, outer, inner, _) in zip(xs, wheres, strict=True)
        ]
        if in_one_kernel(xs, wheres):
            flat = filled(xs, ways)
        else:
            parts = [
                [part_in_blocks(x, dim, ways, k, outer, inner) for k in range(ways)]
                for x, (dim, outer, inner, _) in zip(xs, wheres, strict=True)
            ]
            rows = [_padded(row[k], s) for k in range(ways) for row, s in zip(parts, shapes, strict=True)]
            flat = _together(self.over[axis], rows)
        arriving, sum_of = self.over[axis].scatter(flat)

        def unpack(got: torch.Tensor) -> list[torch.Tensor]:
            own = sum_of(got)
            outs: list[torch.Tensor] = []
            start = 0
            for row in shapes:
                outs.append(own[start : start + prod(row[rank])].view(row[rank]))
                start += max(prod(s) for s in row)
            return outs

        return PendingCollective(arriving, unpack)

    def all_reduce_bucket(
        self, view: RankView, xs: Sequence[torch.Tensor], axis: str, op: str = "sum"
    ) -> PendingCollective:
        """Several all-reduces over one axis as one message."""
        over, shapes = self.over[axis], [x.shape for x in xs]
        packed = filled(xs) if in_one_kernel(xs) else _together(over, xs)
        # in place: the buffer is our own, and a copy of all gradients costs as much as a layer
        arriving, reduced = over.all_reduce(packed, op, own=True)

        def unpack(got: torch.Tensor) -> list[torch.Tensor]:
            pieces = reduced(got).split([prod(s) for s in shapes])
            return [p.view(s) for p, s in zip(pieces, shapes, strict=True)]

        return PendingCollective(arriving, unpack)

    def all_gather_q_bucket(
        self,
        view: RankView,
        xs: Sequence[torch.Tensor],
        axis: str | Sequence[str],
        wheres: Sequence[Where],
        bits: Sequence[int],
        group: int,
    ) -> PendingCollective:
        """Several gathers as one message in which those with bits are quantised; also the rank's own part
        comes out as the others see it. Over several axes (outermost first) the buffers of all ranks so far
        travel on as they are; only the last message is not waited for."""
        axes = (axis,) if isinstance(axis, str) else tuple(axis)
        sizes = [view.size_of(a) for a in axes]
        ways = prod(sizes)
        shapes = [_where_shapes(x.shape, where, ways) for x, where in zip(xs, wheres, strict=True)]
        how = Packing.of([max(map(prod, s)) for s in shapes], bits, group, xs[0].dtype)
        sent = pack([xs], how)
        for name in axes[:-1]:
            sent = self.over[name].gather(sent)()

        def join(got: torch.Tensor) -> list[torch.Tensor]:
            # the last axis came last, and so stands first
            wires = got.view(*reversed(sizes), how.nbytes).permute(*reversed(range(len(sizes))), -1)
            wires = wires.reshape(ways, how.nbytes)
            return [
                joined(rows, parts, dim, outer)
                for rows, parts, (dim, outer, _, _) in zip(unpack(wires, how), shapes, wheres, strict=True)
            ]

        return PendingCollective(self.over[axes[-1]].gather(sent), join)

    def all_gather_wire(
        self,
        view: RankView,
        wire: torch.Tensor,
        axis: str,
        where: Where,
        group: int,
        shape: Sequence[int],
        dtype: torch.dtype,
    ) -> PendingCollective:
        """A gather of one tensor whose rank's part, of this shape, is quantised already: see
        `autoshard.rules.quantized_gather`."""
        ways, (dim, outer, _, _) = view.size_of(axis), where
        how = Packing.of([prod(shape)], (WIRE_BITS,), group, dtype)

        def join(got: torch.Tensor) -> torch.Tensor:
            (rows,) = unpack(got.view(ways, how.nbytes), how)
            return joined(rows, [shape] * ways, dim, outer)

        return PendingCollective(self.over[axis].gather(wire), join)

    def reduce_scatter_q_bucket(
        self,
        view: RankView,
        xs: Sequence[torch.Tensor],
        axis: str,
        wheres: Sequence[Where],
        bits: Sequence[int],
        group: int,
    ) -> PendingCollective:
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
            flat = sums(got.view(ways, how.nbytes), how)
            return [x[: prod(shape)].view(shape) for x, shape in zip(flat, shapes, strict=True)]

        return PendingCollective(self.over[axis].all_to_all(sent), add)

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


def _viewed(shape: Sequence[int]) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda got: got.view(shape)


def _where_shapes(shape: Sequence[int], where: Where, ways: int) -> list[tuple[int, ...]]:
    dim, outer, inner, size = where
    return part_shapes(shape, dim, shape[dim] * ways if size is None else size, ways, outer, inner)


def _together(over: Transport, xs: Sequence[torch.Tensor]) -> torch.Tensor:
    """The elements of tensors of one type, one after the other, from where a message needs no copy."""
    room = over.room(sum(x.numel() for x in xs), xs[0])
    if room is None:
        return torch.cat([x.reshape(-1) for x in xs])
    if all(x.is_contiguous() for x in xs):
        return torch.cat([x.view(-1) for x in xs], out=room)
    for x, piece in zip(xs, room.split([x.numel() for x in xs]), strict=True):
        piece.view(x.shape).copy_(x)
    return room


def _padded(x: torch.Tensor, shapes: Sequence[Sequence[int]]) -> torch.Tensor:
    """A part as it is, or its elements padded to the number of elements of the largest part."""
    most = max(prod(s) for s in shapes)
    return x if x.numel() == most else torch.nn.functional.pad(x.reshape(-1), (0, most - x.numel()))
