"""Values on their way between the ranks of a pipeline that share memory."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from autoshard.program.messages import StageSend
from autoshard.runtime.checks.check_mode import collective
from autoshard.runtime.checks.collective_watchdog import Watch
from autoshard.runtime.transport.p2p import Describe
from autoshard.runtime.transport.shared_memory.peers import Neighbours

#: messages of one step between two ranks are fewer
_MOST = 1 << 32


class MemoryChannels:
    """Does what `runtime.transport.p2p.Channels` does. near: the pipeline's ranks, in its order."""

    def __init__(self, near: Neighbours, describe: Describe, watch: Watch | None = None) -> None:
        self.near, self.describe, self.watch = near, describe, watch
        self.steps = 0

    def begin(self) -> None:
        """A new step, in which messages are numbered anew."""
        self.steps += 1

    def ask(self, messages: Sequence[StageSend]) -> None:
        """Nothing needs to be prepared: messages lie with their senders until they are read."""

    def take(self, message: StageSend) -> torch.Tensor:
        """The value of a message, waited for."""
        shape, dtype = self.describe(message.value)
        with collective(f"receiving {message.value} from rank {self.near.names[message.sender]}", self.watch):
            seen = self.near.look(message.sender, self._number(message), prod(shape), dtype)
        value = seen.lies.clone().view(shape)
        self.near.done(seen)
        return value

    def send(self, messages: Sequence[tuple[StageSend, torch.Tensor]]) -> None:
        """Send values, which may change afterwards."""
        for message, x in messages:
            where = f"sending {message.value} to rank {self.near.names[message.receiver]}"
            with collective(where, self.watch):
                posted = self.near.post(x.contiguous(), 1)
                self.near.announce(message.receiver, self._number(message), posted, 0, x.numel())
                self.near.release(posted)

    def end(self) -> None:
        """Everything has been sent."""

    def _number(self, message: StageSend) -> int:
        return self.steps * _MOST + message.number
