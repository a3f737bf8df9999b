"""Expert parallelism on one rank: a token goes once to every rank that holds an expert of its choice.

There it has slots as if it were the rank's own (`autoshard.ops.experts`); what the experts of a rank make of
it goes back as one sum. How many tokens go where depends on the data, so the ranks agree on that first, once
for all ops that are given the same ``chosen``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from autoshard.ir.placement import chunk
from autoshard.kernels.quant import dequantise_rows, quantise_rows
from autoshard.ops.experts import sum_rows
from autoshard.runtime.pending import PendingCollective, Relay, as_it_is
from autoshard.runtime.transport.transport import Arrival

#: (rows [sum of sent, ...] in the order of the ranks they go to, rows sent to each rank, rows that come
#: from each) -> what waits for rows [sum of received, ...] in the order of the ranks they come from
Send: TypeAlias = Callable[[torch.Tensor, Sequence[int], Sequence[int]], Arrival]

_ops = torch.ops.autoshard


@dataclass(frozen=True)
class Hop:
    """The ranks of one mesh axis, among which tokens travel. rank: of this one among its ``ways``."""

    ways: int
    rank: int
    send: Send


@dataclass(frozen=True)
class _Sent:
    """Which tokens of a rank go where over one axis, and how many it is given.

    tokens: numbers of those that go, by rank. sent, received: tokens per rank. count: tokens of this rank.
    """

    tokens: torch.Tensor
    sent: tuple[int, ...]
    received: tuple[int, ...]
    count: int
    send: Send

    def there(self, x: torch.Tensor) -> Arrival:
        """Rows of the tokens of this rank [count, ...] -> of those that come."""
        return self.send(x.index_select(0, self.tokens), self.sent, self.received)

    def back(self, x: torch.Tensor) -> Arrival:
        """What was made here of the tokens that came [sum of received, ...] -> its sum for the tokens of this
        rank [count, ...]."""
        came = self.send(x, self.received, self.sent)
        return lambda: sum_rows(came(), self.tokens, self.count)


@dataclass(frozen=True)
class TokenExchange:
    """Where the tokens of a rank go, axis by axis.

    here: the choices of those that end here [tokens, k], counted from the first expert of this rank's part
    of the last axis.
    """

    hops: tuple[_Sent, ...]
    here: torch.Tensor

    def there(self, x: torch.Tensor) -> Arrival:
        """Rows of the tokens of this rank [t, ...] -> of those that its experts work on."""
        arrival = self.hops[0].there(x)
        for hop in self.hops[1:]:
            arrival = Relay(arrival, hop.there)
        return arrival

    def back(self, x: torch.Tensor) -> Arrival:
        """What was made here of tokens [tokens here, ...] -> its sum for the tokens of this rank [t, ...]."""
        arrival = self.hops[-1].back(x)
        for hop in self.hops[-2::-1]:
            arrival = Relay(arrival, hop.back)
        return arrival


@dataclass
class ExpertExchange:
    """The exchanges of tokens of one rank over some axes, outermost first.

    Over several, a token goes once to each part of the outermost axis that has an expert of its choice, and
    from there on to the ranks that do. agreed: by the identity of ``chosen``, for as long as it exists.
    """

    hops: tuple[Hop, ...]
    agreed: dict[int, tuple[weakref.ref[torch.Tensor], TokenExchange]] = field(default_factory=dict)

    def _exchange(self, chosen: torch.Tensor, num_experts: int) -> TokenExchange:
        known = self.agreed.get(id(chosen))
        if known is None or known[0]() is not chosen:
            key, agreed = id(chosen), self.agreed
            new = self._agree(chosen, num_experts)
            agreed[key] = known = weakref.ref(chosen, lambda _: agreed.pop(key, None)), new
        return known[1]

    def _agree(self, chosen: torch.Tensor, num_experts: int) -> TokenExchange:
        """chosen: experts of the tokens of this rank [t, k], counted over all experts; the k-th rank holds
        the k-th part of these, as `chunk` cuts them."""
        sent: list[_Sent] = []
        for hop in self.hops:
            new, chosen = _agreed(hop, chosen, num_experts)
            sent.append(new)
            first, num_experts = chunk(num_experts, hop.ways, hop.rank)
            chosen = chosen - first
        return TokenExchange(tuple(sent), chosen)

    def route(self, num_experts: int, chosen: torch.Tensor) -> torch.Tensor:
        """The slots of this rank's experts, of tokens of all ranks."""
        count = num_experts
        for hop in self.hops:
            count = chunk(count, hop.ways, hop.rank)[1]
        slots: torch.Tensor = _ops.route_part(self._exchange(chosen, num_experts).here, count, 0)
        return slots

    def dispatch(
        self,
        num_experts: int,
        x: torch.Tensor,
        chosen: torch.Tensor,
        slots: torch.Tensor,
        bits: int = 0,
        group: int = 0,
    ) -> PendingCollective:
        """x [t, h] -> [s, h]. bits, group: with how few bits rows travel, 0 for all of them, and how many
        elements share a scale."""
        exchange = self._exchange(chosen, num_experts)
        if bits:
            told = x.shape[1], bits, group, x.dtype
            wires = exchange.there(quantise_rows(x.contiguous(), bits, group))
            return PendingCollective(
                wires, lambda rows: _ops.dispatch(dequantise_rows(rows, *told), exchange.here, slots)
            )
        return PendingCollective(exchange.there(x), lambda rows: _ops.dispatch(rows, exchange.here, slots))

    def combine(
        self, num_experts: int, x: torch.Tensor, chosen: torch.Tensor, slots: torch.Tensor
    ) -> PendingCollective:
        """x [s, h] -> [t, h]."""
        exchange = self._exchange(chosen, num_experts)
        return PendingCollective(exchange.back(_ops.combine(x, exchange.here, slots)), as_it_is)

    def dispatch_weights(
        self, num_experts: int, weights: torch.Tensor, chosen: torch.Tensor, slots: torch.Tensor
    ) -> PendingCollective:
        """weights [t, k] -> [s]."""
        exchange = self._exchange(chosen, num_experts)
        return PendingCollective(
            exchange.there(weights), lambda rows: _ops.dispatch_weights(rows, exchange.here, slots)
        )

    def combine_weights(
        self, num_experts: int, x: torch.Tensor, chosen: torch.Tensor, slots: torch.Tensor
    ) -> PendingCollective:
        """x [s] -> [t, k]."""
        exchange = self._exchange(chosen, num_experts)
        return PendingCollective(exchange.back(_ops.combine_weights(x, exchange.here, slots)), as_it_is)


def _agreed(hop: Hop, chosen: torch.Tensor, num_experts: int) -> tuple[_Sent, torch.Tensor]:
    """(where tokens go over one axis, choices of those that come)."""
    width = chunk(num_experts, hop.ways, 0)[1]
    inside = (chosen >= 0) & (chosen < num_experts)
    owner = torch.where(inside, chosen.div(width, rounding_mode="floor"), hop.ways)
    goes = chosen.new_zeros((hop.ways + 1, len(chosen)), dtype=torch.bool)
    goes.scatter_(0, owner.t(), True)
    counts = goes[: hop.ways].sum(dim=1)
    given = hop.send(counts, [1] * hop.ways, [1] * hop.ways)()
    # one look at the device for both lists
    numbers = torch.cat([counts, given]).tolist()
    sent, received = tuple(numbers[: hop.ways]), tuple(numbers[hop.ways :])
    tokens = goes[: hop.ways].nonzero()[:, 1]
    came = hop.send(chosen.index_select(0, tokens), sent, received)()
    return _Sent(tokens, sent, received, len(chosen), hop.send), came
