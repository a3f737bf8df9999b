"""Autograd inside the implementation of an op, where torch's dispatcher has switched it off.

Leans on the private ``torch._C._dispatch_tls_set_dispatch_key_excluded``. Run with torch 2.13.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_KEYS = tuple(
    getattr(torch._C.DispatchKey, name)
    for name in ("AutogradCPU", "AutogradCUDA", "AutogradOther", "AutogradFunctionality", "ADInplaceOrView")
)


@contextmanager
def autograd_inside() -> Iterator[None]:
    """Record what runs inside for gradients."""
    before = [torch._C._dispatch_tls_is_dispatch_key_excluded(key) for key in _KEYS]
    for key in _KEYS:
        torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)
    try:
        with torch.enable_grad():
            yield
    finally:
        for key, excluded in zip(_KEYS, before, strict=True):
            torch._C._dispatch_tls_set_dispatch_key_excluded(key, excluded)
