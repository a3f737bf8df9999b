"""Expert parallelism on one rank: rows go to the rank that holds their expert, results come back.

How many rows go where depends on the data, so counts are exchanged first. Rows of experts that exist
nowhere stay, and count for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from autoshard.ir.placement import chunk

#: (rows [sum of sent, ...] in the order of the ranks they go to, rows sent to each rank, rows that come
#: from each) -> rows [sum of received, ...] in the order of the ranks they come from
Send: TypeAlias = Callable[[torch.Tensor, Sequence[int], Sequence[int]], torch.Tensor]


@dataclass(frozen=True)
class Exchange:
    """Which rows of a rank go where, and which it is given.

    rows: numbers of the rows that go, by rank and expert. sent, received: rows per rank. expert: of every
    row that comes, counted from the first expert of this rank [received].
    """

    rows: torch.Tensor
    sent: tuple[int, ...]
    received: tuple[int, ...]
    expert: torch.Tensor
    send: Send

    def there(self, x: torch.Tensor) -> torch.Tensor:
        """Own rows [r, k] -> the rows that are worked on here [received, k]."""
        return self.send(x[self.rows], self.sent, self.received)

    def back(self, made: torch.Tensor, count: int) -> torch.Tensor:
        """What was made of them here [received, n] -> what was made of the own rows [count, n]."""
        out = made.new_zeros((count, made.shape[1]))
        out[self.rows] = self.send(made, self.received, self.sent)
        return out


def exchange_of(expert: torch.Tensor, num_experts: int, ways: int, rank: int, send: Send) -> Exchange:
    """Agree with the other ranks of a group on who sends what.

    expert: of the own rows [r], counted over all experts. ways, rank: ranks of the group, and which one
    this is; its k-th rank holds the k-th part of the experts, as `chunk` cuts them.
    """
    inside = (expert >= 0) & (expert < num_experts)
    keys = torch.where(inside, expert, num_experts)
    counts = torch.bincount(keys, minlength=num_experts + 1)[:num_experts]
    held = [chunk(num_experts, ways, k) for k in range(ways)]
    own = held[rank][1]
    given = send(counts, [n for _, n in held], [own] * ways).view(ways, own)
    # one look at the device for all four lists
    numbers = torch.cat([counts.view(-1), given.sum(1)]).tolist()
    sent = tuple(sum(numbers[start : start + n]) for start, n in held)
    received = tuple(numbers[num_experts:])
    rows = torch.argsort(keys, stable=True)[: sum(sent)]
    names = torch.arange(own, device=expert.device).repeat(ways)
    return Exchange(rows, sent, received, names.repeat_interleave(given.reshape(-1)), send)


def expert_mm(
    parts: Sequence[torch.Tensor],
    transposed: bool,
    num_experts: int,
    ways: int,
    rank: int,
    send: Send,
) -> torch.Tensor:
    """``autoshard::expert_mm`` of the own rows with the experts of all ranks.

    parts: x [r, k], expert [r], weight [own experts, k, n] (or [own experts, n, k]) -> [r, n].
    """
    x, expert, weight = parts
    plan = exchange_of(expert, num_experts, ways, rank, send)
    made = torch.ops.autoshard.expert_mm(plan.there(x), plan.expert, weight, transposed)
    return plan.back(made, x.shape[0])


def expert_outer(
    parts: Sequence[torch.Tensor],
    transposed: bool,
    num_experts: int,
    ways: int,
    rank: int,
    send: Send,
) -> torch.Tensor:
    """``autoshard::expert_outer`` of the rows of all ranks for the own experts.

    parts: x [r, k], grad [r, n], expert [r] -> [own experts, k, n] (or [own experts, n, k]).
    """
    x, grad, expert = parts
    plan = exchange_of(expert, num_experts, ways, rank, send)
    own = chunk(num_experts, ways, rank)[1]
    rows = plan.there(x), plan.there(grad), plan.expert
    made: torch.Tensor = torch.ops.autoshard.expert_outer(*rows, own, transposed)
    return made
