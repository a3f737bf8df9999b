"""The cases of long tests that run at every commit; `make test-all` runs all of them."""

from __future__ import annotations

import os
import re
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import pytest

T = TypeVar("T")
#: set by `make test-all`
VARIABLE = "AUTOSHARD_ALL_CASES"


def all_cases() -> bool:
    return bool(os.environ.get(VARIABLE))


def sampled(
    cases: Sequence[T], share: int, name: Callable[[T], str] = repr, most: int | None = None
) -> list[T]:
    """One in ``share`` of the cases, and more until every word that several names have is among them, but not
    more than ``most``; none if ``share`` is 0.

    Which ones does not depend on the run.
    """
    if all_cases():
        return list(cases)
    if share == 0:
        return []
    names = [name(case) for case in cases]
    order = sorted(range(len(cases)), key=lambda k: (zlib.crc32(names[k].encode()), k))
    words = [set(re.findall(r"[^-'\", ()\[\]]+", text)) for text in names]
    often = Counter(word for own in words for word in own)
    words = [{word for word in own if often[word] > 1} for own in words]
    chosen: dict[int, None] = {}
    seen: set[str] = set()
    for k in order:
        if not words[k] <= seen:
            chosen[k] = None
            seen |= words[k]
    for k in order:
        if len(chosen) * share >= len(cases):
            break
        chosen[k] = None
    return [cases[k] for k in sorted(list(chosen)[:most])]


def running(request: pytest.FixtureRequest, test: str) -> list[dict[str, Any]]:
    """Parameters of the cases of a test, in a fixture's file, that this run has: what a fixture prepares."""
    items: Any = request.session.items
    return [i.callspec.params for i in items if i.path == request.path and i.originalname == test]


def examples(count: int, share: int) -> int:
    """Of a Hypothesis test."""
    return count if all_cases() else max(1, count // share)
