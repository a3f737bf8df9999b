"""An attribute that is another value for the time of a capture."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_UNSET = object()


@contextmanager
def replaced(owner: Any, name: str, value: object) -> Iterator[None]:
    """``owner.name`` is ``value`` inside, and what it was afterwards, whether its own or inherited."""
    before = vars(owner).get(name, _UNSET)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is _UNSET:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
