"""Which step a model is at: its dropout masks follow from that.

The masks of a call follow from the seed, from how many steps the optimizer has made, and from which call
since the last of them it is. A checkpoint of a model has no place for the number: one more key would keep it
from being loaded into the plain model, and plain checkpoints from being loaded into the parallel one. But
optimizers that adapt count their steps in their state, which a run that goes on loads: the number is theirs.
Where one has none (SGD, Muon), the user keeps it (`ParallelModule.dropout_step`).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakIdKeyDictionary

#: calls of one step that have masks of their own
_CALLS = 1 << 16
_SEEDS = 1 << 62


class DropoutClock:
    """Counts steps of optimizers, and calls since the last one."""

    def __init__(self) -> None:
        self.steps = self.calls = 0

    def seed(self, seed: int, call: int) -> int:
        """What the masks of a call follow from; call: how many calls of the same step come before it."""
        return ((seed * 1_000_003 + self.steps) * _CALLS + self.calls + call) % _SEEDS

    def stepped(self, count: int | None) -> None:
        """After a step of an optimizer; count: how many it has made, None if it does not know."""
        if count is not None:
            self.steps = count
        elif self.calls:
            self.steps += 1
        self.calls = 0


#: parameter -> the clock of its model
_clocks: WeakIdKeyDictionary = WeakIdKeyDictionary()
#: optimizer -> the steps that it has made, None if it does not count them
_counts: WeakKeyDictionary[torch.optim.Optimizer, int | None] = WeakKeyDictionary()


def keep_time(parameters: Iterable[torch.Tensor], clock: DropoutClock) -> None:
    """Let a clock follow the optimizers of a model's parameters."""
    _watch_steps()
    for parameter in parameters:
        _clocks[parameter] = clock


@cache
def _watch_steps() -> None:
    register_optimizer_step_post_hook(_after_step)


def share_time(parameter: torch.Tensor, copy: torch.Tensor) -> None:
    """Let the clock follow the optimizer of a copy, too."""
    if parameter in _clocks:
        _clocks[copy] = _clocks[parameter]


@torch.compiler.disable
def _after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    clocks = _clocks_of(optimizer)
    if not clocks:
        return
    known = _counts.get(optimizer)
    if optimizer not in _counts:
        optimizer.register_load_state_dict_post_hook(_after_load)
    count = _counts[optimizer] = _count(optimizer, None if known is None else known + 1)
    for clock in clocks:
        clock.stepped(count)


def _after_load(optimizer: torch.optim.Optimizer) -> None:
    count = _counts[optimizer] = _count(optimizer)
    if count is not None:
        for clock in _clocks_of(optimizer):
            clock.stepped(count)


def _clocks_of(optimizer: torch.optim.Optimizer) -> list[DropoutClock]:
    found = (_clocks.get(p) for group in optimizer.param_groups for p in group["params"])
    return list({id(clock): clock for clock in found if clock is not None}.values())


def _count(optimizer: torch.optim.Optimizer, expected: int | None = None) -> int | None:
    """How many steps an optimizer has made, by the state of its first parameter that has any.

    expected: taken instead of waiting for a device, if it is known.
    """
    states = (optimizer.state.get(p, {}) for group in optimizer.param_groups for p in group["params"])
    step = next((state["step"] for state in states if "step" in state), None)
    if step is None:
        return None
    on_device = isinstance(step, torch.Tensor) and step.device.type != "cpu"
    return expected if on_device and expected is not None else int(step)
