"""Amounts of memory as text."""

from __future__ import annotations

from math import ceil


def bytes_up(n: float) -> str:
    """Rounded up, so that a figure that is printed as enough is enough."""
    unit, name = (2**30, "GiB") if n >= 2**27 else (2**20, "MiB") if n >= 2**17 else (2**10, "KiB")
    return f"{ceil(n / unit * 100) / 100:.2f} {name}"
