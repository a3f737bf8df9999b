"""From a module or a script that fails to a smaller one that fails in the same way."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Protocol, Self, TypeVar

from fuzz.case import Outcome


class Text(Protocol):
    """A case that is printed as source."""

    def source(self) -> str: ...

    def smaller(self) -> list[Self]: ...


T = TypeVar("T", bound=Text)


def shrunk_text(
    case: T, outcome: Outcome, run: Callable[[T], Outcome], seconds: float = 60.0
) -> tuple[T, Outcome]:
    """The smallest found in so many seconds; the case itself if nothing smaller fails alike."""
    deadline = perf_counter() + seconds
    seen = {case.source()}
    going = True
    while going and perf_counter() < deadline:
        going = False
        for candidate in case.smaller():
            if candidate.source() in seen or perf_counter() > deadline:
                continue
            seen.add(candidate.source())
            found = run(candidate)
            if found.kind == "failed" and found.failure == outcome.failure:
                case, outcome, going = candidate, found, True
                break
    return case, outcome
