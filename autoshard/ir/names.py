"""Names of new values."""

from __future__ import annotations

from collections.abc import Container
from itertools import chain, count


def free_name(base: str, taken: Container[str]) -> str:
    """``base``, or ``base_2``, ``base_3``, ...: the first that is not taken."""
    return next(n for n in chain([base], (f"{base}_{k}" for k in count(2))) if n not in taken)


def fresh_name(base: str, taken: set[str]) -> str:
    """As `free_name`, and taken from now on."""
    name = free_name(base, taken)
    taken.add(name)
    return name
