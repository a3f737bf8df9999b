"""Machine code of every kernel for sm_80 and sm_90: no register spills, and wide accesses in what loops."""

from __future__ import annotations

from typing import Any

import pytest
from sampling import all_cases

import autoshard.ops  # noqa: F401 (defines the ops)
from autoshard.kernels.registry import specs

NAMES = [spec.name for spec in specs().values()]
#: reads four numbers a row, of few rows
ALL_NARROW = {"xent_merge"}


@pytest.fixture(scope="module")
def codes(worker: Any) -> list[dict[str, Any]]:
    return list(worker("aot_worker.py"))


@pytest.mark.parametrize("name", NAMES)
def test_machine_code(codes: list[dict[str, Any]], name: str) -> None:
    own = [c for c in codes if c["kernel"] == name]
    assert {c["arch"] for c in own} == {80, 90} or (own and not all_cases())
    for code in own:
        assert code["spills"] == 0, code
        assert code["registers"] <= 65536 // (32 * code["warps"]), code
        assert code["narrow"] <= code["allowed"], code
        assert code["wide"] > 0 or name in ALL_NARROW, code
