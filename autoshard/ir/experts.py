"""Slots of experts, as `TensorType.filled` counts them."""

from __future__ import annotations

from autoshard.ir.types import TensorType


def destinations(slots: TensorType, ways: int) -> float:
    """To how many of ``ways`` ranks with equal parts of the experts a token goes on average.

    slots: type of a value of slots. All experts are as likely, and a token's are drawn one by one.
    """
    assert slots.filled is not None
    return ways * (1.0 - (1.0 - 1.0 / ways) ** slots.filled[0])
