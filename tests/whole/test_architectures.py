"""Many architectures on a 2 x 2 mesh: all ranks in lockstep equal the eager model."""

from __future__ import annotations

import pytest
import torch
from architectures import ARCHITECTURES, RARELY, Architecture, errors_of
from lockstep_check import RTOL
from torch import nn

from autoshard.capture.capture import capture

#: every second one; ``python tests/architectures.py`` compares them all
SPREAD = [a for a in ARCHITECTURES if not a.rarely][::8]
#: a loop over experts, known masks with windows made by strides, detection
TELLING = ("DbrxForCausalLM", "LongformerForSequenceClassification", "DetrForObjectDetection")


@pytest.mark.parametrize(
    "architecture", [*SPREAD, *(a for a in ARCHITECTURES if a.name in TELLING)], ids=lambda a: a.name
)
def test_equal_to_eager(architecture: Architecture) -> None:
    if architecture.family != "plain torch.nn":
        pytest.importorskip("transformers")
    model, inputs = architecture.make()
    errors = errors_of(model, inputs)
    assert "loss" in errors
    trained = {n for n, p in model.named_parameters() if p.grad is not None}
    assert trained <= set(errors)
    worst = max(errors, key=lambda name: errors[name])
    assert errors[worst] < RTOL, f"{worst} is off by {errors[worst]:.2e}"


def test_capture_takes_back_the_hooks_that_a_model_sets_itself() -> None:
    """Some models set hooks at their first call, and remember that they did."""

    class Watching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.ready = nn.Linear(4, 4), False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not self.ready:
                self.inner.register_forward_hook(lambda module, args, out: None)
                self.ready = True
            return self.inner(x).sum()

    model = Watching()
    capture(model, (torch.randn(2, 4),))
    assert not model.ready and not model.inner._forward_hooks
    model(torch.randn(2, 4))
    assert model.ready and len(model.inner._forward_hooks) == 1


def test_there_are_many() -> None:
    names = {a.name for a in ARCHITECTURES}
    assert len(names) == len(ARCHITECTURES) >= 370
    assert names >= RARELY
