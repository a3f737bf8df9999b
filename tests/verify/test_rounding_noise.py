"""Gradients and outputs in half precision that no limit suits: what rounding explains passes."""

from __future__ import annotations

import pytest
import torch
from pipelines import model_and_batch

import autoshard
from autoshard.verify.checks import HALF, Tensors, checks_of
from autoshard.verify.lockstep import verify
from autoshard.verify.rounding_noise import beside_rounding
from autoshard.verify.single_rank import single_rank_program


def test_gradients_through_relus_pass_as_far_as_rounding_moves_them() -> None:
    model, batch = model_and_batch("t5-deep", 2)
    model = model.to(torch.bfloat16)
    planned = autoshard.plan(model, "tp=4", example_inputs=batch, microbatches=2, recompute=False)
    with pytest.warns(UserWarning, match="microbatches are not quite"):
        program = autoshard.compile(model, planned).program
    one_rank = single_rank_program(program, model, batch)
    found = verify(program, model, (), batch, steps=1, one_rank=one_rank)
    loose = [c for c in found.checks if c.kind == "gradient" and c.error > HALF.error]
    assert found.ok and loose
    assert all(c.error <= 2 * c.noise for c in loose)


def _steep(at: Tensors) -> Tensors:
    """A gradient that is 1.4 instead of 1 where the parameter is a bit larger."""
    return {"w": torch.where(at["w"] > 1, 1.4, 1.0)}


def _smooth(at: Tensors) -> Tensors:
    return {"w": at["w"].float()}


@pytest.mark.parametrize(
    ("gradients", "found", "ok"), [(_steep, 1.3, True), (_steep, 1.7, False), (_smooth, 1.3, False)]
)
def test_only_what_the_model_does_itself_passes(gradients: object, found: float, ok: bool) -> None:
    assert callable(gradients)
    initial = {"w": torch.ones(64, dtype=torch.bfloat16)}
    for kind in ("gradient", "output"):
        checks = checks_of(kind, {"w": torch.full((64,), found)}, gradients(initial), HALF)
        assert not checks[0].ok

        def step(at: Tensors, kind: str = kind) -> dict[str, Tensors]:
            return {kind: gradients(at)}

        assert not beside_rounding(checks, initial, [], step, HALF)[0].ok  # buffers are not rounded
        assert beside_rounding(checks, initial, ["w"], step, HALF)[0].ok == ok
