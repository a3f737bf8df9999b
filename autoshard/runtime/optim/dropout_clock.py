"""Which step a model is at: its dropout masks follow from that.

The masks of a call follow from the seed, from how many steps the optimizer has made, and from which call
since the last of them it is. A checkpoint of a model has no place for the number: one more key would keep it
from being loaded into the plain model, and plain checkpoints from being loaded into the parallel one. But
optimizers that adapt count their steps in their state, which a run that goes on loads: the number is theirs.
Where one has none (SGD, Muon), or not on every rank (LayerWiseOptimizer), the user keeps it
(`ParallelModule.dropout_step`).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch.optim.optimizer import Optimizer

from autoshard.runtime.optim.layer_wise import LayerWiseOptimizer
from autoshard.runtime.optim.optimizer_hooks import parameters_in
from autoshard.torch_adapters.step_hooks import after_steps

#: calls of one step that have masks of their own
_CALLS = 1 << 16
_SEEDS = 1 << 62


#: attribute of a parameter: the clock of its model
_MARK = "_autoshard_clock"


def is_followed(parameter: torch.Tensor) -> bool:
    """Whether it is a parameter of a parallel model."""
    return hasattr(parameter, _MARK)


class DropoutClock:
    """Counts steps of the optimizers of a model, and calls since the last one."""

    def __init__(self, steps: int = 0, calls: int = 0) -> None:
        self.steps, self.calls = steps, calls
        #: optimizers that have stepped -> their steps by then or when they were loaded, None if not counted
        self._counts: WeakKeyDictionary[Optimizer, int | None] = WeakKeyDictionary()

    def seed(self, seed: int, call: int) -> int:
        """What the masks of a call follow from; call: how many calls of the same step come before it."""
        return ((seed * 1_000_003 + self.steps) * _CALLS + self.calls + call) % _SEEDS

    def stepped(self, count: int | None = None) -> None:
        """After a step of an optimizer; count: how many one has made that is seen for the first time, None if
        it does not know, or is known. Parameters that were frozen, and other optimizers, have made fewer."""
        if count is not None or self.calls:
            self.steps = max(self.steps + 1, count or 0)
        self.calls = 0

    def follow(self, parameters: Iterable[torch.Tensor]) -> None:
        """Count the steps of whatever optimizer has these parameters, as long as this lives."""
        for parameter in parameters:
            setattr(parameter, _MARK, self)
        after_steps(self, partial(_after_step, ref(self)))

    def after_step(self, optimizer: Optimizer) -> None:
        known = self._counts.get(optimizer)
        if optimizer in self._counts:
            self._counts[optimizer] = None if known is None else known + 1
            self.stepped(known)
            return
        optimizer.register_load_state_dict_post_hook(partial(_after_load, ref(self)))
        self._counts[optimizer] = _count(optimizer)
        self.stepped(self._counts[optimizer])

    def after_load(self, optimizer: Optimizer) -> None:
        """Go back, or on, by as many steps as the optimizer does."""
        known, count = self._counts.get(optimizer), _count(optimizer)
        self._counts[optimizer] = count
        if count is not None:
            more = None if known is None or len(self._counts) == 1 else count - known
            self.steps, self.calls = count if more is None else max(0, self.steps + more), 0

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy is at the same step, of other optimizers."""
        return DropoutClock, (self.steps, self.calls)


def _after_step(known: ref[DropoutClock], optimizer: Optimizer, *_: Any) -> None:
    clock = known()
    if clock is not None and any(getattr(p, _MARK, None) is clock for p in parameters_in(optimizer)):
        clock.after_step(optimizer)


def _after_load(known: ref[DropoutClock], optimizer: Optimizer) -> None:
    clock = known()
    if clock is not None:
        clock.after_load(optimizer)


def _count(optimizer: Optimizer) -> int | None:
    """How many steps an optimizer has made, by the states of its parameters."""
    if isinstance(optimizer, LayerWiseOptimizer):
        return None  # ranks must agree, and each has the states of some parameters
    states = (optimizer.state.get(p, {}) for p in parameters_in(optimizer))
    return max((int(state["step"]) for state in states if "step" in state), default=None)
