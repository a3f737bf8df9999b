"""The cases of long tests that run at every commit; `make test-all` runs all of them."""

from __future__ import annotations

import os
import re
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar

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
    names = [name(case) for case in cases]
    order = sorted(range(len(cases)), key=lambda k: (zlib.crc32(names[k].encode()), k))
    words = [set(re.findall(r"[^-'\", ()\[\]]+", text)) for text in names]
    often = Counter(word for own in words for word in own)
    words = [{word for word in own if often[word] > 1} for own in words]
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


def examples(count: int, share: int) -> int:
    """Of a Hypothesis test."""
    return count if all_cases() else max(1, count // share)
