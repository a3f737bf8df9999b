"""Ops as smaller ops, as torch has them for compilers. Tried on torch 2.13."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._decomp import decomposition_table


def decomposition_of(packet: Any, overload: Any) -> Callable[..., Any] | None:
    """What computes an op from smaller ones; None if torch has nothing.

    packet: all overloads of the op, of which that of the same name, or the default one, is taken.
    """
    for name in (overload._overloadname, "default"):
        result = getattr(packet, name, None)
        if result in decomposition_table:
            return decomposition_table[result]
        if result is not None and result._can_decompose():
            return result.decompose
    return None
