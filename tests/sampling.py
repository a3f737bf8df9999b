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


def sampled(cases: Sequence[T], share: int, name: Callable[[T], str] = repr) -> list[T]:
    """One in ``share`` of the cases, and more until every word that several names have is among them; none if
    that is 0.

    Which ones does not depend on the run.
    """
    if all_cases():
        return list(cases)
    if share == 0:
        return []
    order, words = _mixed([name(case) for case in cases])
    chosen: set[int] = set()
    seen: set[str] = set()
    for k in order:
        if not words[k] <= seen:
            chosen.add(k)
            seen |= words[k]
    for k in order:
        if len(chosen) * share >= len(cases):
            break
        chosen.add(k)
    return [cases[k] for k in sorted(chosen)]


def unlike(cases: Sequence[T], count: int, name: Callable[[T], str] = repr) -> list[T]:
    """So many cases: each has as many words as can be that those before it do not have."""
    if all_cases():
        return list(cases)
    order, words = _mixed([name(case) for case in cases])
    chosen: list[int] = []
    seen: set[str] = set()
    while len(chosen) < min(count, len(cases)):
        k = max((k for k in order if k not in chosen), key=lambda k: len(words[k] - seen))
        chosen.append(k)
        seen |= words[k]
    return [cases[k] for k in sorted(chosen)]


def _mixed(names: list[str]) -> tuple[list[int], list[set[str]]]:
    """Numbers of names in an order that says nothing; the words of each that others have, too."""
    order = sorted(range(len(names)), key=lambda k: (zlib.crc32(names[k].encode()), k))
    words = [set(re.findall(r"[^-'\", ()\[\]]+", text)) for text in names]
    often = Counter(word for own in words for word in own)
    return order, [{word for word in own if often[word] > 1} for own in words]


def running(request: pytest.FixtureRequest, test: str) -> list[dict[str, Any]]:
    """Parameters of the cases of a test, in a fixture's file, that this run has: what a fixture prepares."""
    items: Any = request.session.items
    return [i.callspec.params for i in items if i.path == request.path and i.originalname == test]


def examples(count: int, share: int) -> int:
    """Of a Hypothesis test."""
    return count if all_cases() else max(1, count // share)
