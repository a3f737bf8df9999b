"""Every kernel computes what its reference computes in fp64, in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
from sampling import running

import autoshard.ops  # noqa: F401 (defines the ops)
from autoshard.kernels.registry import specs

NAMES = [spec.name for spec in specs().values()]


@pytest.fixture(scope="module")
def values(worker: Any, request: pytest.FixtureRequest) -> dict[tuple[str, str], dict[str, Any]]:
    """What one start of the worker finds in the cases that run."""
    cases = [f"{case['name']}:{case['dtype']}" for case in running(request, "test_values")]
    return {(found["kernel"], found["dtype"]): found for found in worker("values_worker.py", *cases)}


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("name", NAMES)
def test_values(values: dict[tuple[str, str], dict[str, Any]], name: str, dtype: str) -> None:
    found = values[name, dtype]
    assert "failure" not in found, found["failure"]
    assert found["samples"] >= 2
    assert found["worst"] <= 1, f"{found['worst']:.3g} times the tolerance"
