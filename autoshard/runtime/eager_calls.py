"""Calls that no program answers: of submodules, of ``generate``, with arguments such as caches of keys.

They run the user's own code on every rank alike, on the parameters of the modules that run, gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _NormBase
from torch.utils import _pytree as pytree

from autoshard.capture.precision import MixedPrecision
from autoshard.capture.python_state.code_reads import PLAIN
from autoshard.errors import UsageError
from autoshard.runtime.checks.assigned_data import check_data
from autoshard.runtime.fingerprint import fingerprint
from autoshard.runtime.groups import reduced
from autoshard.runtime.optim.optimizer_hooks import local
from autoshard.runtime.outputs import Rows, mean_over
from autoshard.runtime.said import say_once

#: arguments that programs take
_SIMPLE = (*PLAIN, torch.Tensor)
#: where a parameter stands: a module's table of parameters and its key there
_Slot = tuple[dict[str, Any], str, DTensor]


class EagerCalls:
    """Gathers the parameters of a submodule while it is called from outside of a program.

    refused: why the parameters cannot be gathered, "" where they can. seed: of random numbers in a call that
    is trained, the same on every rank. precision: of the programs. batch_axes: of the mesh, along which ranks
    call with other rows.
    """

    def __init__(self, refused: str, seed: Callable[[], int], precision: MixedPrecision) -> None:
        self.refused, self.seed, self.precision = refused, seed, precision
        self.batch_axes: tuple[int, ...] = ()
        self._depth = 0
        self._said: set[str] = set()
        self._slots: list[_Slot] = []
        self._random: Any = None
        #: without gradients: parameter -> fingerprint of what this rank has of it, the gathered tensor
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def running(self) -> bool:
        """Whether code of the model runs on gathered parameters."""
        return self._depth > 0

    def has_to(self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], asks: bool) -> bool:
        """Whether a call of the full model has no program; says why, once for each reason.

        asks: whether the model's code asks if gradients are recorded, as they are in captures.
        """
        kinds = {type(x).__name__ for x in pytree.tree_leaves((args, kwargs)) if not isinstance(x, _SIMPLE)}
        if kinds:
            why = f"its arguments hold {' and '.join(sorted(kinds))}"
        elif torch.is_grad_enabled():
            return False
        elif asks:
            why = "its code asks for gradients"
        elif _averages_batches(root):
            why = "it has batch norms with momentum=None, whose code asks how many batches there were"
        else:
            return False
        if why not in self._said:
            self._said.add(why)
            say_once(f"a call runs on gathered parameters, on every rank alike: {why}")
        return True

    def watch(self, root: nn.Module) -> None:
        """Gather whenever a submodule is called from outside."""
        for module in root.modules():
            if module is not root and next(module.parameters(), None) is not None:
                module.register_forward_pre_hook(EagerHook(self.enter), prepend=True)
                module.register_forward_hook(EagerHook(self.leave), always_call=True)

    @contextmanager
    def gathered(self, module: nn.Module) -> Iterator[None]:
        """Inside, the parameters of a module are global tensors."""
        self.enter(module)
        try:
            yield
        finally:
            self.leave()

    def enter(self, module: nn.Module, *_: Any) -> None:
        """A module is called; modules inside it need nothing more."""
        if self._depth == 0:
            self._gather(module)
        self._depth += 1

    def leave(self, *_: Any) -> None:
        """A call has ended, or failed."""
        self._depth -= 1
        if self._depth == 0:
            for table, key, parameter in self._slots:
                table[key] = parameter
            self._slots.clear()
            if self._random is not None:
                torch.set_rng_state(self._random)
                self._random = None

    def enters_program(self, rows: Rows | None) -> None:
        """A program runs: free what is kept of calls without gradients. rows: of this rank."""
        self._kept.clear()
        self.batch_axes = () if rows is None else rows.axes

    def __deepcopy__(self, memo: dict[int, Any]) -> EagerCalls:
        new = EagerCalls(self.refused, self.seed, self.precision)
        new.batch_axes = self.batch_axes
        memo[id(self)] = new
        return new

    def _gather(self, module: nn.Module) -> None:
        if self.refused:
            raise UsageError(
                f"a {type(module).__name__} of a parallel model is called by itself",
                why=self.refused,
                hint="call the model",
            )
        known: dict[int, torch.Tensor] = {}
        self._forget_changed(module)
        for each in module.modules():
            for key, parameter in each._parameters.items():
                if isinstance(parameter, DTensor):
                    if id(parameter) not in known:
                        check_data(f"{type(each).__name__}.{key}", parameter)
                        known[id(parameter)] = self.precision.of_parameter(self._global(parameter), each)
                    self._slots.append((each._parameters, key, parameter))
        for table, key, shard in self._slots:
            table[key] = known[id(shard)]
        averages = _averages_batches(module)
        if averages and self.batch_axes:
            raise UsageError(
                "batch norms with momentum=None are called with other rows on each rank",
                why="their statistics would be those of each rank's rows, and they have no program",
                hint="give all ranks the same global batches (autoshard.parallelize without local_batch)",
            )
        if module.training and known and (torch.is_grad_enabled() or averages):
            # ranks that drew other numbers would have other gradients of what they hold alike
            self._random = torch.get_rng_state()
            torch.manual_seed(self.seed())

    def _global(self, parameter: DTensor) -> torch.Tensor:
        if torch.is_grad_enabled() and parameter.requires_grad:
            return _Gathered.apply(parameter, self.batch_axes)
        if id(parameter) not in self._kept:
            self._kept[id(parameter)] = fingerprint(local(parameter)), _full(parameter)
        return self._kept[id(parameter)][1]

    def _forget_changed(self, module: nn.Module) -> None:
        """Let go of what is kept of a module if a rank has other values of its parameters; collective."""
        given = [p for p in module.parameters() if isinstance(p, DTensor) and id(p) in self._kept]
        if not given:
            return
        changed = [self._kept[id(p)][0] != fingerprint(local(p)) for p in given]
        mesh = given[0].device_mesh
        flag = torch.stack(changed).any().to(mesh.device_type, torch.int64)
        if reduced([mesh.get_group(axis) for axis in range(mesh.ndim)], flag, "max"):
            for p in given:
                del self._kept[id(p)]


def _full(parameter: DTensor) -> torch.Tensor:
    detached = parameter.detach()
    assert isinstance(detached, DTensor)
    return detached.full_tensor()


def _averages_batches(module: nn.Module) -> bool:
    """Whether it updates running statistics that are means of all batches: `torch.optim.swa_utils.update_bn`
    sets that."""
    return module.training and any(
        m.training and m.momentum is None and m.track_running_stats
        for m in module.modules()
        if isinstance(m, _NormBase)
    )


class EagerHook:
    """A hook of `EagerCalls`, to be told from those of the user's."""

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, module: nn.Module, *args: Any) -> None:
        self._call(module)


class _Gathered(torch.autograd.Function):
    """A global parameter; where ranks call with other rows, its gradient is the mean over them."""

    @staticmethod
    def forward(ctx: Any, parameter: DTensor, batch_axes: tuple[int, ...]) -> torch.Tensor:
        ctx.mesh, ctx.placements, ctx.axes = parameter.device_mesh, parameter.placements, batch_axes
        return _full(parameter).clone()

    @staticmethod
    @torch.compiler.disable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return mean_over(grad, ctx.mesh, ctx.axes, ctx.placements), None
