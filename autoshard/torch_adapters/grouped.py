"""torch's product of groups of rows in 8 bits, which its stubs lack."""

from __future__ import annotations

from torch.nn import functional

#: from torch 2.10 on: on Hopper and Blackwell, e4m3 by e4m3 into bf16
scaled_grouped_mm = functional.scaled_grouped_mm  # type: ignore[attr-defined]
