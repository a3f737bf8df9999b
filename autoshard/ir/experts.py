"""Slots of experts, as `TensorType.filled` counts them, and the messages that bring tokens to them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autoshard.ir.types import TensorType


def destinations(slots: TensorType, ways: int) -> float:
    """To how many of ``ways`` ranks with equal parts of the experts a token goes on average.

    slots: type of a value of slots. All experts are as likely, and a token's are drawn one by one.
    """
    assert slots.filled is not None
    return ways * (1.0 - (1.0 - 1.0 / ways) ** slots.filled[0])


def exchanged_bytes(nbytes: float, slots: TensorType, ways: Sequence[int]) -> Iterator[float]:
    """Bytes that a rank sends over each of some axes, outermost first, on which tokens go to their experts.

    nbytes: of its tokens, a row of each. A token goes once to each part of the outermost axis that has an
    expert of its choice, and from there once to each part of the next. All ranks have as many tokens.
    """
    parts = 1
    for size in ways:
        parts *= size
        yield nbytes * destinations(slots, parts)
