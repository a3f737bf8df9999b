"""Element types by the names that programs give them."""

from __future__ import annotations

import torch

from autoshard.ir import DTYPES


def torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, DTYPES[name][0])
    assert isinstance(dtype, torch.dtype)
    return dtype
