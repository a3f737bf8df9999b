"""Hooks around optimizer steps that end with their owner."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from autoshard.torch_adapters.step_hooks import after_steps, before_steps


class Owner:
    """What hooks belong to."""


@pytest.mark.parametrize("register", (before_steps, after_steps))
def test_an_owner_that_is_freed_while_hooks_run(register: Callable[[object, Any], None]) -> None:
    """As the garbage collector may do at any moment: the step goes on, and later hooks are called."""
    owners = [Owner(), Owner(), Owner()]
    called: list[str] = []
    register(owners[0], lambda *_: called.append("first"))
    register(owners[1], lambda *_: owners.__setitem__(0, Owner()))
    register(owners[2], lambda *_: called.append("last"))
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    optimizer.step()
    optimizer.step()
    assert called == ["first", "last", "last"] and weight.tolist() == [-1.0, -1.0]


def test_hooks_leave_with_their_owners() -> None:
    count = len(_global_optimizer_pre_hooks) + len(_global_optimizer_post_hooks)
    for _ in range(5):
        owner = Owner()
        before_steps(owner, lambda *_: None)
        after_steps(owner, lambda *_: None)
        del owner
    assert len(_global_optimizer_pre_hooks) + len(_global_optimizer_post_hooks) <= count + 2
