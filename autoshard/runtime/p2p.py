"""Values on their way between the ranks of a pipeline.

Every pair of ranks has a channel in each direction, in which messages arrive in the order in which they
are sent: a receiver asks for them in that order, ahead of its need.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from autoshard.program.messages import Message, Move

#: shape and type of a value on this rank
Describe = Callable[[str], "tuple[tuple[int, ...], torch.dtype]"]


class Channels:
    """The channels of one rank.

    peers: the world's rank of every pipeline rank. up, down: groups for messages to later and to earlier
    pipeline ranks, so that the two never wait for each other.
    """

    def __init__(
        self,
        moves: Sequence[Move],
        peers: Sequence[int],
        describe: Describe,
        device: torch.device,
        up: dist.ProcessGroup | None,
        down: dist.ProcessGroup | None,
    ) -> None:
        self.peers, self.describe, self.device, self.up, self.down = peers, describe, device, up, down
        incoming = [m for move in moves for m in move.receives]
        self.order: dict[int, list[Message]] = {}
        for message in sorted(incoming, key=lambda m: (m.sender, m.number)):
            self.order.setdefault(message.sender, []).append(message)
        self.sent: list[tuple[dist.Work, torch.Tensor]] = []
        self.asked: dict[int, int] = {}
        self.arriving: dict[Message, tuple[dist.Work, torch.Tensor]] = {}

    def begin(self) -> None:
        """A new step: every channel starts anew."""
        self.asked = dict.fromkeys(self.order, 0)

    def ask(self, messages: Sequence[Message]) -> None:
        """Post the receives of these messages, and of those that come before them."""
        until: dict[int, int] = {}
        for message in messages:
            until[message.sender] = max(until.get(message.sender, -1), message.number)
        wanted: list[Message] = []
        for sender, number in until.items():
            line = self.order[sender]
            while self.asked[sender] < len(line) and line[self.asked[sender]].number <= number:
                wanted.append(line[self.asked[sender]])
                self.asked[sender] += 1
        operations = []
        buffers = []
        for message in wanted:
            shape, dtype = self.describe(message.value)
            buffer = torch.empty(shape, dtype=dtype, device=self.device)
            buffers.append(buffer)
            operations.append(self._operation(dist.irecv, buffer, message, message.sender))
        for message, buffer, work in zip(wanted, buffers, _started(operations), strict=True):
            self.arriving[message] = (work, buffer)

    def take(self, message: Message) -> torch.Tensor:
        """The value of a message that was asked for."""
        work, buffer = self.arriving.pop(message)
        work.wait()
        return buffer

    def send(self, messages: Sequence[tuple[Message, torch.Tensor]]) -> None:
        """Start sending values; they must not change until `end`."""
        values = [x.contiguous() for _, x in messages]
        operations = [
            self._operation(dist.isend, x, message, message.receiver)
            for (message, _), x in zip(messages, values, strict=True)
        ]
        self.sent = [(work, x) for work, x in self.sent if not work.is_completed()]
        self.sent += zip(_started(operations), values, strict=True)

    def end(self) -> None:
        """Wait until everything is sent."""
        for work, _ in self.sent:
            work.wait()
        self.sent.clear()

    def _operation(
        self, kind: Callable[..., object], x: torch.Tensor, message: Message, peer: int
    ) -> dist.P2POp:
        group = self.up if message.receiver > message.sender else self.down
        return dist.P2POp(kind, x, self.peers[peer], group, tag=message.number)


def _started(operations: Sequence[dist.P2POp]) -> list[dist.Work]:
    """Start them, those of one group in one batch, which may give one work for all of it."""
    found: dict[int, dist.Work] = {}
    for group in dict.fromkeys(op.group for op in operations):
        places = [k for k, op in enumerate(operations) if op.group is group]
        works = list(dist.batch_isend_irecv([operations[k] for k in places]))
        if len(works) < len(places):
            works = [works[-1]] * len(places)
        found.update(zip(places, works, strict=True))
    return [found[k] for k in range(len(operations))]
