"""Ways to make a model parallel that are wrong, each in its own way: the fuzzer must find every one."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from autoshard.errors import UsageError


def drops_a_gradient(model: nn.Module, mesh: str, example_inputs: Any) -> nn.Module:
    """Of one parameter."""

    def drop(p: torch.Tensor) -> None:
        p.grad = None

    next(model.parameters()).register_post_accumulate_grad_hook(drop)
    return model


def scales_an_output(model: nn.Module, mesh: str, example_inputs: Any) -> nn.Module:
    """A little."""
    model.register_forward_hook(lambda mod, args, out: {k: v * (1 + 1e-5) for k, v in out.items()})
    return model


def fails_on_one_rank(model: nn.Module, mesh: str, example_inputs: Any) -> nn.Module:
    """The others go on."""
    if dist.get_rank() == 1:
        raise UsageError("not on this rank")
    return model


def hangs_on_one_rank(model: nn.Module, mesh: str, example_inputs: Any) -> nn.Module:
    """The others wait for it."""
    if dist.get_rank() == 1:
        time.sleep(600)
    dist.barrier()
    return model


def raises_another_error(model: nn.Module, mesh: str, example_inputs: Any) -> nn.Module:
    """None of autoshard's."""
    raise ZeroDivisionError


def leaves_a_fake_tensor(model: nn.Module, mesh: str, example_inputs: Any) -> nn.Module:
    """On the model."""
    model.left = FakeTensorMode().from_tensor(torch.ones(2))
    return model


def leaves_an_attribute(model: nn.Module, mesh: str, example_inputs: Any) -> nn.Module:
    """On the model."""
    model.left = 1  # type: ignore[assignment]
    return model


def changes_what_it_refuses(model: nn.Module, mesh: str, example_inputs: Any) -> nn.Module:
    """A refusal must leave the model as it was."""
    with torch.no_grad():
        next(model.parameters()).mul_(2)
    raise UsageError("no")


FAULTS = {
    drops_a_gradient: "numbers",
    scales_an_output: "numbers",
    raises_another_error: "ZeroDivisionError",
    leaves_a_fake_tensor: "fake tensor",
    leaves_an_attribute: "state",
    changes_what_it_refuses: "changed by a refusal",
    fails_on_one_rank: "ranks differ",
    hangs_on_one_rank: "hang",
}
