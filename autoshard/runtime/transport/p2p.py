"""Values on their way between the ranks of a pipeline.

Every pair of ranks has a channel in each direction, in which messages arrive in the order in which they
are sent: a receiver asks for them in that order, ahead of its need.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from autoshard.program.messages import RankAction, StageSend
from autoshard.runtime.checks.check_mode import collective
from autoshard.runtime.checks.collective_watchdog import Watch

#: shape and type of a value on this rank
Describe = Callable[[str], "tuple[tuple[int, ...], torch.dtype]"]
#: dist.isend or dist.irecv
_Kind = Callable[..., "dist.Work | None"]


class Channels:
    """The channels of one rank.

    peers: the world's rank of every pipeline rank. up, down: groups for messages to later and to earlier
    pipeline ranks, so that the two never wait for each other. watch: told of every wait, None in a plain run.
    """

    def __init__(
        self,
        moves: Sequence[RankAction],
        peers: Sequence[int],
        describe: Describe,
        device: torch.device,
        up: dist.ProcessGroup | None,
        down: dist.ProcessGroup | None,
        watch: Watch | None = None,
    ) -> None:
        self.watch = watch
        self.peers, self.describe, self.device, self.up, self.down = peers, describe, device, up, down
        incoming = [m for move in moves for m in move.receives]
        self.order: dict[int, list[StageSend]] = {}
        for message in sorted(incoming, key=lambda m: (m.sender, m.number)):
            self.order.setdefault(message.sender, []).append(message)
        self.known: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        self.sent: list[tuple[dist.Work, torch.Tensor]] = []
        self.asked: dict[int, int] = {}
        self.arriving: dict[StageSend, tuple[dist.Work, torch.Tensor]] = {}

    def begin(self) -> None:
        """A new step: every channel starts anew."""
        self.asked = dict.fromkeys(self.order, 0)

    def ask(self, messages: Sequence[StageSend]) -> None:
        """Post the receives of these messages, and of those that come before them."""
        until: dict[int, int] = {}
        for message in messages:
            until[message.sender] = max(until.get(message.sender, -1), message.number)
        wanted: list[StageSend] = []
        for sender, number in until.items():
            line = self.order[sender]
            while self.asked[sender] < len(line) and line[self.asked[sender]].number <= number:
                wanted.append(line[self.asked[sender]])
                self.asked[sender] += 1
        if wanted:
            buffers = [self._buffer(message.value) for message in wanted]
            works = self._started(dist.irecv, list(zip(wanted, buffers, strict=True)))
            self.arriving.update(zip(wanted, zip(works, buffers, strict=True), strict=True))

    def _buffer(self, value: str) -> torch.Tensor:
        if value not in self.known:
            self.known[value] = self.describe(value)
        shape, dtype = self.known[value]
        return torch.empty(shape, dtype=dtype, device=self.device)

    def take(self, message: StageSend) -> torch.Tensor:
        """The value of a message that was asked for."""
        work, buffer = self.arriving.pop(message)
        with collective(f"receiving {message.value} from rank {self.peers[message.sender]}", self.watch):
            work.wait()
        return buffer

    def send(self, messages: Sequence[tuple[StageSend, torch.Tensor]]) -> None:
        """Start sending values; they must not change until `end`."""
        dense = [(message, x.contiguous()) for message, x in messages]
        self.sent = [(work, x) for work, x in self.sent if not work.is_completed()]
        works = self._started(dist.isend, dense)
        self.sent += [(work, x) for work, (_, x) in zip(works, dense, strict=True)]

    def end(self) -> None:
        """Wait until everything is sent."""
        with collective("waiting until everything is sent to other stages", self.watch):
            for work, _ in self.sent:
                work.wait()
        self.sent.clear()

    def _started(self, kind: _Kind, messages: Sequence[tuple[StageSend, torch.Tensor]]) -> list[dist.Work]:
        """Start sending or receiving into tensors."""
        if self.device.type != "cpu":
            return _batched([dist.P2POp(kind, x, *self._way(kind, m), tag=m.number) for m, x in messages])
        result = []
        for message, x in messages:
            # gloo has no batches: making one would only take time
            work = kind(x, *self._way(kind, message), tag=message.number)
            assert work is not None
            result.append(work)
        return result

    def _way(self, kind: _Kind, message: StageSend) -> tuple[int, dist.ProcessGroup | None]:
        """The other rank, and the group to reach it in."""
        other = message.receiver if kind is dist.isend else message.sender
        return self.peers[other], self.up if message.receiver > message.sender else self.down


def _batched(operations: Sequence[dist.P2POp]) -> list[dist.Work]:
    """Start them, those of one group in one batch, which may give one work for all of it."""
    result: dict[int, dist.Work] = {}
    for group in dict.fromkeys(op.group for op in operations):
        places = [k for k, op in enumerate(operations) if op.group is group]
        works = list(dist.batch_isend_irecv([operations[k] for k in places]))
        if len(works) < len(places):
            works = [works[-1]] * len(places)
        result.update(zip(places, works, strict=True))
    return [result[k] for k in range(len(operations))]
