"""Lightning's Trainer for LightningModules that hold models which `autoshard.parallelize` gave.

All ranks are one program: each reads the same batches, and the model computes its part of them. To Lightning
that is training on one device, so nothing is wrapped, divided or reduced. Tried with lightning 2.6.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.utils.data import DataLoader, DistributedSampler
from torchmetrics import Metric

from autoshard.errors import UsageError
from autoshard.runtime.module import ParallelModule
from autoshard.runtime.optim.clip import clip_grad_norm_
from autoshard.runtime.optim.optimizer_hooks import local, parameters_in
from autoshard.runtime.saving import full_state

#: not strict: a parameter that had no gradient yet has no state
_FULL = StateDictOptions(full_state_dict=True, cpu_offload=True, strict=False)


class _Precision(Precision):
    """The one of models as they are; gradients are clipped by their norm over the full model."""

    def clip_grad_by_norm(self, optimizer: torch.optim.Optimizer, clip_val: float) -> None:
        clip_grad_norm_(self.main_params(optimizer), clip_val)

    def clip_grad_by_value(self, optimizer: torch.optim.Optimizer, clip_val: float) -> None:
        for grad in (p.grad for p in self.main_params(optimizer) if p.grad is not None):
            local(grad).clamp_(-clip_val, clip_val)


class ParallelStrategy(SingleDeviceStrategy):
    """``Trainer(strategy=ParallelStrategy())`` trains a LightningModule whose inner model is parallel, on the
    ranks of the process group.

    The LightningModule holds what `autoshard.parallelize` returned, from its ``__init__`` or from
    ``configure_model``. Loaders give the full batch on every rank. Checkpoints are those of one process: the
    first rank writes them, and any number of ranks, or Lightning without this strategy, resumes them. Ranks
    begin with the state of torch's random numbers that the first one has.

    Raises UsageError without a process group; later, for a LightningModule with no parallel model or with a
    pipeline, ``precision=`` other than 32, and loaders that give each rank rows of its own.
    """

    def __init__(self) -> None:
        if not dist.is_initialized():
            raise UsageError("there is no process group", hint="dist.init_process_group() before the Trainer")
        super().__init__()
        self.global_rank = rank_zero_only.rank = dist.get_rank()  # as each of Lightning's strategies says it
        self.local_rank = dist.get_node_local_rank(0)

    @property
    def root_device(self) -> torch.device:
        on_cpu = isinstance(self.accelerator, CPUAccelerator)
        return torch.device("cpu") if on_cpu else torch.device("cuda", self.local_rank)

    @property
    def is_global_zero(self) -> bool:
        return dist.get_rank() == 0

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        dist.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        taken = [obj]
        dist.broadcast_object_list(taken, src)
        return taken[0]

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        result = torch.tensor(int(decision), device=self.root_device)
        dist.all_reduce(result, dist.ReduceOp.MIN if all else dist.ReduceOp.MAX)
        return bool(result)

    def setup_environment(self) -> None:
        super().setup_environment()
        # loaders that shuffle draw from it
        torch.set_rng_state(self.broadcast(torch.get_rng_state()))

    def setup(self, trainer: Any) -> None:
        modules = list(self.lightning_module.modules())
        parallel = [m for m in modules[1:] if isinstance(m, ParallelModule)]
        if not parallel:
            raise UsageError(
                f"no model in the {type(self.lightning_module).__name__} is parallel",
                hint="self.net = autoshard.parallelize(net, mesh, example_inputs=batch) in its __init__",
            )
        if any(m.is_pipeline for m in parallel):
            raise UsageError(
                "Lightning trains no pipelines",
                why="it runs backward by itself, and a step of a pipeline is both, through all stages",
                hint="a mesh without pp, or autoshard.interop.trainer",
            )
        for metric in (m for m in modules if isinstance(m, Metric)):
            metric.distributed_available_fn = bool  # False: all ranks count the same rows
        if not isinstance(trainer.precision_plugin, _Precision):
            if type(trainer.precision_plugin) is not Precision:
                raise UsageError(
                    f"the Trainer's precision is {trainer.precision_plugin.precision}",
                    why="the program of a parallel model has the precision that it was planned with",
                    hint='autoshard.parallelize(model, mesh, ..., precision="bf16"), and precision=32 here',
                )
            trainer.strategy.precision_plugin = _Precision()
        super().setup(trainer)

    def process_dataloader(self, dataloader: object) -> object:
        if isinstance(dataloader, DataLoader):
            if isinstance(dataloader.sampler, DistributedSampler):
                raise UsageError(
                    "a loader has a DistributedSampler",
                    why="all ranks read the same batches; the model computes its part of them",
                    hint="a loader as on one process",
                )
            if dataloader.worker_init_fn is None and os.environ.get("PL_SEED_WORKERS", "0") != "0":
                # Lightning would give augmentations of each rank another seed
                dataloader.worker_init_fn = partial(pl_worker_init_function, rank=0)
        return dataloader

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Full weights on the first rank, nothing on the others. Collective."""
        state: dict[str, Any] = self.lightning_module.state_dict()
        for prefix, module in self.lightning_module.named_modules():
            if isinstance(module, ParallelModule):
                full = {f"{prefix}.{name}": x for name, x in full_state(module).items()}
                state.update({name: full[name] for name in state.keys() & full.keys()})
        return state if self.is_global_zero else {}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """That of one process on the first rank. Collective."""
        optimizer = getattr(optimizer, "optimizer", optimizer)  # of Lightning's wrapper
        state: dict[str, Any] = optimizer.state_dict()
        if state["state"]:
            full: Any = get_optimizer_state_dict(self.lightning_module, optimizer, options=_FULL)
            result = full.get("state", {})  # of the first rank
            names = self._names(optimizer)
            state["state"] = {k: result[name] for k, name in enumerate(names) if name in result}
        return state if self.is_global_zero else {}

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            if not state["state"]:
                optimizer.load_state_dict(state)
                continue
            names = self._names(optimizer)
            taken = {names[k]: x for k, x in state["state"].items()}
            groups = [{**g, "params": [names[k] for k in g["params"]]} for g in state["param_groups"]]
            set_optimizer_state_dict(
                self.lightning_module, optimizer, {"state": taken, "param_groups": groups}, options=_FULL
            )
            for name, parameter in zip(names, parameters_in(optimizer), strict=True):
                if name not in taken:  # torch made one
                    optimizer.state.pop(parameter, None)

    def _names(self, optimizer: torch.optim.Optimizer) -> list[str]:
        """Of an optimizer's parameters, in the order of the numbers that its state has."""
        names = {p: name for name, p in self.lightning_module.named_parameters()}
        return [names[p] for p in parameters_in(optimizer)]

    def teardown(self) -> None:
        """The model stays where its ranks have it."""
        self.accelerator.teardown()
        self.checkpoint_io.teardown()
