"""Messages to ranks that do not exist: copies of the same bytes on this device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from autoshard.runtime.pending import Finish, as_it_is
from autoshard.runtime.transport.network import Network
from autoshard.runtime.transport.transport import Arrival


class LocalCopies(Network):
    """As if every other rank had this rank's tensors. Values are those of real numbers, so that products take
    as long as they do in training: of zeros they are faster.

    apart: runs a copy, and does not count it with the computing around it.
    """

    def __init__(
        self, axis: str, apart: Callable[[Callable[[], torch.Tensor]], torch.Tensor] = lambda copy: copy()
    ) -> None:
        super().__init__(axis)
        self._apart = apart

    def gather(self, x: torch.Tensor) -> Arrival:
        out = self._apart(lambda: x.repeat(self.ways, *[1] * (x.dim() - 1)))
        return lambda: out

    def scatter(self, x: torch.Tensor) -> tuple[Arrival, Finish]:
        out = self._apart(lambda: x.chunk(self.ways)[self.rank].clone())
        return (lambda: out), as_it_is

    def all_reduce(self, x: torch.Tensor, op: str, own: bool = False) -> tuple[Arrival, Finish]:
        out = x if own else self._apart(x.clone)
        return (lambda: out), as_it_is

    def exchange(self, x: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> Arrival:
        count = sum(received)

        def rows() -> torch.Tensor:
            return x[torch.arange(count, device=x.device) % max(1, x.shape[0])]

        out = self._apart(x.clone if count == x.shape[0] else rows)
        return lambda: out

    def pass_on(self, x: torch.Tensor, out: torch.Tensor, after: int, before: int) -> Callable[[], None]:
        self._apart(lambda: out.copy_(x))
        return lambda: None
