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
from autoshard.ops.experts import sum_rows
from autoshard.runtime.pending import PendingCollective
from autoshard.runtime.transport.transport import Arrival

#: (rows [sum of sent, ...] in the order of the ranks they go to, rows sent to each rank, rows that come
#: from each) -> what waits for rows [sum of received, ...] in the order of the ranks they come from
Send: TypeAlias = Callable[[torch.Tensor, Sequence[int], Sequence[int]], Arrival]

_ops = torch.ops.autoshard


@dataclass(frozen=True)
class TokenExchange:
    """Which tokens of a rank go where, and how many it is given.

    tokens: numbers of those that go, by rank. sent, received: tokens per rank. here: the choices of those
    that come [sum of received, k]; only its shape counts.
    """

    tokens: torch.Tensor
    sent: tuple[int, ...]
    received: tuple[int, ...]
    here: torch.Tensor
    send: Send

    def there(self, x: torch.Tensor) -> Arrival:
        """Rows of the tokens of this rank [t, ...] -> of those that its experts work on."""
        return self.send(x.index_select(0, self.tokens), self.sent, self.received)

    def back(self, x: torch.Tensor, count: int) -> PendingCollective:
        """What was made here of tokens [sum of received, ...] -> its sum for the tokens of this rank
        [count, ...]."""
        came = self.send(x, self.received, self.sent)
        return PendingCollective(came, lambda rows: sum_rows(rows, self.tokens, count))


@dataclass
class ExpertExchange:
    """The exchanges of tokens of one rank over one axis of ``ways`` ranks.

    agreed: by the identity of ``chosen``, for as long as it exists.
    """

    ways: int
    rank: int
    send: Send
    agreed: dict[int, tuple[weakref.ref[torch.Tensor], TokenExchange]] = field(default_factory=dict)

    def _exchange(self, chosen: torch.Tensor, num_experts: int) -> TokenExchange:
        known = self.agreed.get(id(chosen))
        if known is None or known[0]() is not chosen:
            key, agreed = id(chosen), self.agreed
            made = self._agree(chosen, num_experts)
            agreed[key] = known = weakref.ref(chosen, lambda _: agreed.pop(key, None)), made
        return known[1]

    def _agree(self, chosen: torch.Tensor, num_experts: int) -> TokenExchange:
        """chosen: experts of the tokens of this rank [t, k], counted over all experts; the k-th rank holds
        the k-th part of these, as `chunk` cuts them."""
        width = chunk(num_experts, self.ways, 0)[1]
        inside = (chosen >= 0) & (chosen < num_experts)
        owner = torch.where(inside, chosen // width, self.ways)
        goes = chosen.new_zeros((self.ways + 1, len(chosen)), dtype=torch.bool)
        goes.scatter_(0, owner.t(), True)
        counts = goes[: self.ways].sum(dim=1)
        given = self.send(counts, [1] * self.ways, [1] * self.ways)()
        # one look at the device for both lists
        numbers = torch.cat([counts, given]).tolist()
        sent, received = tuple(numbers[: self.ways]), tuple(numbers[self.ways :])
        tokens = goes[: self.ways].nonzero()[:, 1]
        here = self.send(chosen.index_select(0, tokens), sent, received)()
        return TokenExchange(tokens, sent, received, here, self.send)

    def route(self, num_experts: int, chosen: torch.Tensor) -> torch.Tensor:
        """The slots of this rank's experts, of tokens of all ranks."""
        first, held = chunk(num_experts, self.ways, self.rank)
        here = self._exchange(chosen, num_experts).here
        slots: torch.Tensor = _ops.route_part(here, held, first)
        return slots

    def dispatch(
        self, num_experts: int, x: torch.Tensor, chosen: torch.Tensor, slots: torch.Tensor
    ) -> PendingCollective:
        """x [t, h] -> [s, h]."""
        exchange = self._exchange(chosen, num_experts)
        return PendingCollective(exchange.there(x), lambda rows: _ops.dispatch(rows, exchange.here, slots))

    def combine(
        self, num_experts: int, x: torch.Tensor, chosen: torch.Tensor, slots: torch.Tensor
    ) -> PendingCollective:
        """x [s, h] -> [t, h]."""
        exchange = self._exchange(chosen, num_experts)
        return exchange.back(_ops.combine(x, exchange.here, slots), len(chosen))

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
        return exchange.back(_ops.combine_weights(x, exchange.here, slots), len(chosen))
