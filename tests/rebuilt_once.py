"""Rebuilt runs whose models are captured once for all tests of a file, not once for every row."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest

from autoshard.validate.captured import Captures

_captures = functools.cache(Captures)


@pytest.fixture(autouse=True, scope="module")
def captured_once() -> Iterator[None]:
    """To be imported by the file of the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("autoshard.validate.rebuild.Captures", _captures)
        yield
