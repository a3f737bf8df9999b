"""Values of a type from files: errors name the place, the value, the reason and the nearest key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from autoshard.errors import UsageError, VerificationError
from autoshard.ir.decode import Count, Positive, Share, check_fields, decoded


@dataclass(frozen=True)
class Part:
    share: Share
    size: Count | None = None
    rates: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(self, "part")


class File(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    parts: tuple[Part, ...] | None = None
    rows: list[tuple[int, Positive]] = msgspec.field(default_factory=list, name="lines")


def test_values_of_files() -> None:
    raw = {"name": "x", "parts": [{"share": 1, "size": 2, "rates": {"a": 1}}], "lines": [[1, 2.5]]}
    assert decoded(raw, File, "f") == File("x", (Part(1.0, 2, {"a": 1.0}),), [(1, 2.5)])


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({"nam": "x"}, ["unknown key 'nam'", "where: f", "did you mean 'name'"]),
        ({}, ["missing: name", "where: f"]),
        ([], ["all of it is a list of 0", "it must be a table"]),
        (
            {"name": "x", "parts": [{"share": 1}, {"shares": 1}]},
            ["where: f, parts 2", "did you mean 'share'"],
        ),
        ({"name": "x", "parts": [{}]}, ["missing: share", "where: f, parts 1"]),
        ({"name": "x", "parts": [{"share": 2}]}, ["share is 2", "f, parts 1, share", "`float` <= 1"]),
        ({"name": "x", "parts": [{"share": float("nan")}]}, ["share is nan", "`float` > 0"]),
        ({"name": "x", "parts": [{"share": 1, "size": 0}]}, ["size is 0", "`int` >= 1"]),
        ({"name": "x", "parts": [{"share": 1, "size": 10**400}]}, ["size is a number of 1329 bits"]),
        ({"name": "x", "parts": [{"share": 1, "rates": {"a": 1, "b": "c"}}]}, ["b is 'c'", "rates, b"]),
        ({"name": "x", "lines": [[1, 1], [1, float("inf")]]}, ["lines 2 2 is inf", "f, lines 2 2"]),
        ({"name": "y" * 99, "lines": 1}, ["lines is 1", "it must be a list, got `int`"]),
    ],
)
def test_errors_say_what_and_where(raw: Any, words: list[str]) -> None:
    with pytest.raises(VerificationError) as caught:
        decoded(raw, File, "f", fail=VerificationError, hint="again")
    for text in words:
        assert text in str(caught.value)


def test_fields_are_checked_wherever_a_value_comes_from() -> None:
    with pytest.raises(UsageError, match="size is -1"):
        Part(0.5, -1)
