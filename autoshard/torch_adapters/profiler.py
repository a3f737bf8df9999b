"""Whether a profiler of torch listens, and what it is told.

Leans on ``torch.autograd.profiler._is_profiler_enabled``, which torch keeps for such checks. Run with torch
2.13.
"""

from __future__ import annotations

import torch
from torch.autograd import profiler

record_range = torch.profiler.record_function


def is_profiling() -> bool:
    """Whether torch.profiler, torch.autograd.profiler or emit_nvtx is active in this process."""
    return profiler._is_profiler_enabled
