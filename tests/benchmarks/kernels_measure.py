"""Times of a GPU, by events, with its second-level cache emptied before each run."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

#: bytes written between two runs: more than any second-level cache holds, and for longer than it takes to
#: issue what is measured
_FLUSH = 4 << 30
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

        The call is issued while the device still empties its cache, a millisecond or more, so that the time
        of issuing it does not count; `issue_seconds` gives that.
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

    def issue_seconds(self, call: Callable[[], object]) -> float:
        """Median of the time that the host takes for a call while the device is busy with others."""
        times = []
        for _ in range(self.runs):
            self.flush.zero_()
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
            torch.cuda.synchronize(self.device)
        return median(times)

    def copy_bandwidth(self) -> float:
        """Bytes/s, read and written, of a large device-to-device copy."""
        source = torch.empty(_COPY, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return 2 * _COPY / self.seconds(lambda: target.copy_(source))
