"""Every family on every mesh: all ranks in lockstep equal the eager model."""

from __future__ import annotations

import pytest
from families import FAMILIES, MESHES, family
from lockstep_check import RTOL, compare_step
from planned import program

MORE = ("tp=2", "tp=3", "dp=2,fsdp=2", "fsdp=2,tp=2", "x=4", "dp=1")


@pytest.mark.parametrize("cluster", ["cpu-gloo", "h100-dgx"])
@pytest.mark.parametrize("mesh", [*MESHES, *MORE])
@pytest.mark.parametrize("name", [f.name for f in FAMILIES])
def test_equal_to_eager(name: str, mesh: str, cluster: str) -> None:
    model, inputs = family(name).make()
    errors = compare_step(program(name, mesh, cluster), model, inputs)
    assert "loss" in errors
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert trained <= set(errors)
    worst = max(errors, key=lambda k: errors[k])
    assert errors[worst] < RTOL, f"{worst} is off by {errors[worst]:.2e}"


def test_uneven_batch_equals_eager() -> None:
    """Eight sequences over three ranks: 3, 3 and 2."""
    model, inputs = family("llama").make()
    errors = compare_step(program("llama", "dp=3"), model, inputs)
    assert max(errors.values()) < RTOL


def test_tensor_parallel_divides_the_parameters() -> None:
    """On a fast cluster the search finds the layout people write by hand: no weight is whole anywhere."""
    made = program("llama", "tp=2", "h100-dgx")
    for port in made.signature.ports:
        if port.kind == "param" and "proj" in port.target:
            assert str(made.lowered.values[port.name].layout[0]).startswith("S"), port.target


def test_depth_is_folded() -> None:
    """A second layer is a second call, not a second copy of the text."""
    made = program("llama", "dp=2,tp=2")
    calls = [item.segment for item in made.lowered.main if hasattr(item, "segment")]
    assert calls.count("layers_fwd") == 2
    assert calls.count("layers_bwd") == 2
