"""At which step the dropout masks of a model are, whatever its optimizers do."""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import nn

from autoshard.runtime.fingerprint import fingerprint
from autoshard.runtime.optim.clip import clip_grad_norm_
from autoshard.runtime.optim.dropout_clock import DropoutClock


def _model() -> tuple[nn.Sequential, DropoutClock]:
    model, clock = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), DropoutClock()
    clock.follow(model.parameters())
    return model, clock


def _step(model: nn.Module, clock: DropoutClock, *optimizers: torch.optim.Optimizer) -> int:
    clock.calls += 1
    model(torch.ones(1, 2)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return clock.steps


def test_steps_of_layers_that_were_frozen() -> None:
    model, clock = _model()
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters())
    steps = [_step(model, clock, optimizer) for _ in range(3)]
    model[0].requires_grad_(True)
    assert [*steps, *(_step(model, clock, optimizer) for _ in range(3))] == [1, 2, 3, 4, 5, 6]


def test_optimizers_that_step_in_turn() -> None:
    model, clock = _model()
    turns = [torch.optim.AdamW(layer.parameters()) for layer in model]
    assert [_step(model, clock, turns[k % 2]) for k in range(6)] == [1, 2, 3, 4, 5, 6]
    plain, counted = _model(), [torch.optim.SGD(model[0].parameters(), lr=0.1)]
    assert _step(model, clock, *counted) == 7 and plain[1].steps == 0


def test_states_that_are_loaded() -> None:
    """The only optimizer's steps are the model's, in a new process and when it goes back."""
    model, clock = _model()
    optimizer = torch.optim.AdamW(model.parameters())
    _step(model, clock, optimizer)
    saved = deepcopy(optimizer.state_dict())
    assert [_step(model, clock, optimizer) for _ in range(2)] == [2, 3]
    optimizer.load_state_dict(deepcopy(saved))
    assert clock.steps == 1 and _step(model, clock, optimizer) == 2
    other, fresh = _model()
    resumed = torch.optim.AdamW(other.parameters())
    resumed.load_state_dict(saved)
    assert _step(other, fresh, resumed) == 2


def test_fingerprints_see_every_element() -> None:
    for dtype in (
        torch.float64,
        torch.float32,
        torch.bfloat16,
        torch.complex64,
        torch.bool,
        torch.float8_e4m3fn,
    ):
        x = torch.arange(24).reshape(4, 6).t().to(dtype)
        assert fingerprint(x) == fingerprint(x.clone())
        y = x.clone().contiguous()
        y.view(torch.uint8)[3, 1] ^= 1
        assert fingerprint(x) != fingerprint(y)
    ones = torch.tensor([1.0, 2.0])
    assert fingerprint(ones) != fingerprint(ones.flip(0)) and fingerprint(ones[:0]) == fingerprint(ones[:0])


def test_norms_of_float64_gradients() -> None:
    p = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    p.grad = torch.tensor([1.0, 1e-9, 2.0], dtype=torch.float64) / 3
    wanted = p.grad.norm()
    norm = clip_grad_norm_([p], 0.1)
    assert norm.dtype == torch.float64 and abs(norm / wanted - 1) < 1e-15
    assert abs(p.grad.norm() / (0.1 * wanted / (wanted + 1e-6)) - 1) < 1e-14
