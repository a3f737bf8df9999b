"""Activations in host memory where a dense model's layers are divided for want of memory."""

from __future__ import annotations

import pytest

import autoshard
from autoshard.validate.models import Architecture, on_meta

pytest.importorskip("transformers")


def test_layers_that_are_divided_for_want_of_memory() -> None:
    """The plan recomputes little: host memory spares no recomputing, but lets data ranks hold more."""
    model, inputs = on_meta(Architecture("llama", 4, 8192, 64, 8, 28672, 32000, 8192), 16, 8192)
    options = {"example_inputs": inputs, "devices": 16, "global_batch": 16, "memory": 11 << 30}
    alone = autoshard.plan(model, "h100-dgx", offload="none", **options)
    assert "tp=" in alone.plan.mesh
    best = autoshard.plan(model, "h100-dgx", **options)
    assert best.plan.offload == "activations" and best.step < 0.98 * alone.step
