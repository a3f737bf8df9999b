"""Which device each rank runs on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autoshard.errors import UsageError


@dataclass(frozen=True)
class RankOrder:
    """Rank r runs on device ``devices[r]``; devices that are not named stay idle."""

    devices: tuple[int, ...]

    def __post_init__(self) -> None:
        wrong = [d for d in self.devices if isinstance(d, bool) or not isinstance(d, int) or d < 0]
        if wrong:
            raise UsageError(f"{wrong[0]!r} is not the number of a device", where="rank order")
        if not self.devices or len(set(self.devices)) < len(self.devices):
            why = "every rank has one device, and no two ranks share one"
            raise UsageError(f"{self} is no order of ranks", where="rank order", why=why)

    @classmethod
    def identity(cls, ranks: int) -> RankOrder:
        """Rank r on device r."""
        return cls(tuple(range(ranks)))

    def check(self, ranks: int, devices: int | None) -> None:
        """UsageError unless it orders that many ranks, on devices that exist."""
        if len(self.devices) != ranks:
            hint = "assign the ranks of this mesh"
            raise UsageError(f"the order is one of {len(self.devices)} ranks, not {ranks}", hint=hint)
        if devices is not None and max(self.devices) >= devices:
            why = f"devices are 0 to {devices - 1}"
            raise UsageError(f"there is no device {max(self.devices)}", where="rank order", why=why)

    def __str__(self) -> str:
        """Devices by rank, runs of neighbours as ranges: ``0-3,8-11``."""
        runs = (str(first) if first == last else f"{first}-{last}" for first, last in self._runs())
        return ",".join(runs)

    def _runs(self) -> Iterator[tuple[int, int]]:
        start = 0
        for at in range(1, len(self.devices) + 1):
            if at == len(self.devices) or self.devices[at] != self.devices[at - 1] + 1:
                yield self.devices[start], self.devices[at - 1]
                start = at
