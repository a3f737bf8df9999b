"""Times of a GPU, by events, with its second-level cache emptied before each run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

#: bytes written between two runs: more than any second-level cache holds
_FLUSH = 256 << 20
#: bytes of the copy that bandwidth is measured with
_COPY = 2 << 30


@dataclass(frozen=True)
class Stopwatch:
    """Measures calls on one device. flush: buffer that is overwritten before each run."""

    device: torch.device
    flush: torch.Tensor
    warm: int = 3
    runs: int = 15

    @staticmethod
    def on(device: torch.device) -> Stopwatch:
        return Stopwatch(device, torch.empty(_FLUSH, dtype=torch.uint8, device=device))

    def seconds(self, call: Callable[[], object]) -> float:
        """Median over the runs of the time between an event before and one after the call.

        The call is issued while the device still empties its cache, so the time of issuing it does not
        count as long as it is shorter than that.
        """
        for _ in range(self.warm):
            call()
        pairs = []
        for _ in range(self.runs):
            self.flush.zero_()
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            call()
            after.record()
            pairs.append((before, after))
        torch.cuda.synchronize(self.device)
        return median(a.elapsed_time(b) for a, b in pairs) * 1e-3

    def copy_bandwidth(self) -> float:
        """Bytes/s, read and written, of a large device-to-device copy."""
        source = torch.empty(_COPY, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return 2 * _COPY / self.seconds(lambda: target.copy_(source))
