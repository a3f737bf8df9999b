"""transformers' Trainer for models that `autoshard.parallelize` gave.

Its Accelerator is a `ReplicatedAccelerator`; losses are not scaled by the number of processes. Tried with
transformers 5.24.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME

from autoshard.errors import UsageError
from autoshard.interop.accelerator import ReplicatedAccelerator
from autoshard.runtime.module import ParallelModule
from autoshard.runtime.optim.full_states import full_optimizer_state, load_full_optimizer_state
from autoshard.runtime.saving import full_state

#: a file of a checkpoint: the random number generators of one process
_NUMBERS = "rng_state.pth"


class _Outputs:
    """A call that gives what a step of a pipeline returns. left: names of outputs that it leaves out."""

    def __init__(self, model: Any, left: Collection[str]) -> None:
        self._model, self._left = model, left

    def __call__(self, **batch: Any) -> Any:
        return self._model.eval_outputs(batch, self._left)


#: stands for the class that comes after it
_Trainer: Any = object


class ParallelTrainer(_Trainer):
    """What makes a Trainer one of parallel models, under torchrun: put it before any subclass of
    `transformers.Trainer`, as ``class Finetuning(ParallelTrainer, trl.SFTTrainer)``.

    Args are those of the other class. ``per_device_train_batch_size`` is the sequences of a step over all
    ranks. With a ``pp`` axis, a batch is a step of the pipeline. Checkpoints are those of one process: any
    number of ranks, or plain transformers, reads them.

    Raises UsageError for a model that is not parallel.
    """

    def __init__(self, model: Any = None, args: Any = None, **kwargs: Any) -> None:
        if not isinstance(model, ParallelModule):
            raise UsageError(
                f"the model is a {type(model).__name__}, which is not parallel",
                hint="model = autoshard.parallelize(model, mesh, example_inputs=batch) before the Trainer",
            )
        super().__init__(model=model, args=args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator.__class__ = ReplicatedAccelerator
        self.gather_function = self.accelerator.gather_for_metrics

    def get_tp_size(self) -> int:
        """Ranks that have the same batch: all."""
        return int(self.args.world_size)

    def _has_mixed_mesh_grads(self, model: nn.Module) -> bool:
        return False  # our norm takes gradients on any meshes, and those of all stages

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        counted = super()._get_num_items_in_batch(batch_samples, device)
        # it divides what it takes for a sum over the ranks that have the same batch
        return None if counted is None else counted * self.get_tp_size()

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> torch.Tensor:
        if not getattr(model, "is_pipeline", False):
            loss = super().training_step(model, inputs, num_items_in_batch)
            return loss + torch.zeros((), device=loss.device)  # of a plain tensor
        if num_items_in_batch is None and self.args.gradient_accumulation_steps > 1:
            raise UsageError(
                "gradients of several steps of a pipeline cannot be averaged",
                why="the model does not take num_items_in_batch, by which its loss would be divided",
                hint="gradient_accumulation_steps=1 and a larger batch: a step has microbatches of its own",
            )
        model.train()
        taken = dict(self._prepare_inputs(inputs))
        if num_items_in_batch is not None and self.model_accepts_loss_kwargs:
            taken["num_items_in_batch"] = num_items_in_batch
        step: torch.Tensor = model.train_step(taken)  # type: ignore[operator]
        return step.detach()

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Any, Any, Any]:
        call: Any = model
        if getattr(model, "is_pipeline", False):
            if prediction_loss_only:
                return call.eval_step(dict(self._prepare_inputs(inputs))).detach(), None, None
            config = getattr(model, "config", None)
            left = ignore_keys or getattr(config, "keys_to_ignore_at_inference", ())
            call = _Outputs(model, left)
        result: tuple[Any, Any, Any] = super().prediction_step(
            call, inputs, prediction_loss_only, ignore_keys
        )
        return result

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the full weights, by the first rank. Collective."""
        state = full_state(self.model)
        if self.args.should_save:
            self._save(output_dir or self.args.output_dir, state_dict=state)
        dist.barrier()

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        state = full_optimizer_state(self.model, self._plain_optimizer)
        if self.args.should_save:
            torch.save(state, os.path.join(output_dir, OPTIMIZER_NAME))
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER_NAME))
        dist.barrier()

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        path = None if checkpoint is None else os.path.join(checkpoint, OPTIMIZER_NAME)
        if checkpoint is None or path is None or not os.path.isfile(path):
            return
        # optimizers that count their steps replace it by their count
        self.model.dropout_step = self.state.global_step
        state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        load_full_optimizer_state(self.model, self._plain_optimizer, state)
        scheduler = torch.load(os.path.join(checkpoint, SCHEDULER_NAME), weights_only=True)
        self.lr_scheduler.load_state_dict(scheduler)

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        first = Path(output_dir, "rng_state_0.pth")
        if self.args.should_save and first.is_file():  # for one process
            shutil.copyfile(first, Path(output_dir, _NUMBERS))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        own = f"rng_state_{self.args.process_index}.pth"
        if checkpoint is None or Path(checkpoint, own).is_file() or not Path(checkpoint, _NUMBERS).is_file():
            super()._load_rng_state(checkpoint)
            return
        with TemporaryDirectory() as folder:  # of one process, or of fewer ranks: all have the same numbers
            Path(folder, own).symlink_to(Path(checkpoint, _NUMBERS).resolve())
            super()._load_rng_state(folder)

    @property
    def _plain_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer, without what Accelerate wraps it in."""
        result = getattr(self.optimizer, "optimizer", self.optimizer)
        assert isinstance(result, torch.optim.Optimizer)
        return result


class Trainer(ParallelTrainer, transformers.Trainer):
    """`transformers.Trainer` for a parallel model: see `ParallelTrainer`."""
