"""Accelerate for models that `autoshard.parallelize` gave.

All ranks are one program: each reads the same batches, and the model computes its part of them. To Accelerate
that is what tensor-parallel ranks do, so batches are not divided, and the model is wrapped in nothing. Tried
with accelerate 1.15.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from torch import nn
from torch.utils.data import DataLoader

from autoshard.errors import UsageError
from autoshard.runtime.module import ParallelModule
from autoshard.runtime.optim.clip import clip_grad_norm_
from autoshard.runtime.optim.optimizer_hooks import parameters_in
from autoshard.runtime.saving import full_state
from autoshard.runtime.training_state import load_training_state, save_training_state


def _types_of(model: ParallelModule) -> set[str]:
    """Types that a model computes in already, in Accelerate's words."""
    held = {str(p.dtype) for p in model.parameters() if p.is_floating_point()}
    names = {"bf16": {"torch.bfloat16"}, "fp16": {"torch.float16"}}
    return {model._autoshard.program.precision.name} | {
        name for name, dtype in names.items() if held == dtype
    }


class ReplicatedAccelerator(Accelerator):
    """An Accelerator whose processes all have the same batches."""

    def prepare_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """The model as it is, if it is parallel.

        Raises UsageError where Accelerate would compute in another type than the model does.
        """
        if not isinstance(model, ParallelModule):
            prepared: nn.Module = super().prepare_model(model, *args, **kwargs)
            return prepared
        if self.mixed_precision not in ("no", *_types_of(model)):
            raise UsageError(
                f"mixed precision {self.mixed_precision} is asked of Accelerate or of Trainer",
                why="a parallel model computes in the types that it was planned with",
                hint=f'parallelize(..., precision="{self.mixed_precision}")',
            )
        if model not in self._models:
            self._models.append(model)
        return model

    def prepare_data_loader(
        self,
        data_loader: DataLoader[Any],
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Any = None,
    ) -> DataLoader[Any]:
        """A loader of all rows on every rank, in one order."""
        place = self.device_placement if device_placement is None else device_placement
        prepared: DataLoader[Any] = prepare_data_loader(
            data_loader,
            self.device,
            num_processes=1,
            process_index=0,
            put_on_device=place,
            rng_types=self.rng_types.copy(),
            use_seedable_sampler=self.use_seedable_sampler,
            data_seed=self.dataloader_config.data_seed,
            non_blocking=self.non_blocking,
        )
        self._dataloaders.append(prepared)
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """One that makes a step for each step of the optimizer, whatever the number of ranks."""
        prepared = super().prepare_scheduler(scheduler)
        prepared.split_batches = True
        return prepared

    def gather(self, tensor: Any) -> Any:
        """What this rank has, which all have."""
        return tensor

    def pad_across_processes(
        self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False
    ) -> Any:
        """What this rank has, which all have."""
        return tensor

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Of a parallel model, the full weights on the first rank. Collective."""
        if isinstance(model, ParallelModule):
            return full_state(model)
        state: dict[str, Any] = super().get_state_dict(model, unwrap=unwrap)
        return state

    def save_state(self, output_dir: str | None = None, **kwargs: Any) -> str:
        """As Accelerate's; of a parallel model and its optimizers, a folder that any mesh loads."""
        with self._without_parallel() as pairs:
            path: str = super().save_state(output_dir, **kwargs)
        for number, (model, optimizers) in enumerate(pairs):
            save_training_state(Path(path) / f"parallel_{number}", model, optimizers)
        return path

    def load_state(self, input_dir: str | None = None, **kwargs: Any) -> None:
        """What `save_state` wrote."""
        with self._without_parallel() as pairs:
            super().load_state(input_dir, **kwargs)
        for number, (model, optimizers) in enumerate(pairs):
            path = Path(input_dir or self.project_dir) / f"parallel_{number}"
            load_training_state(path, model, optimizers)

    @contextmanager
    def _without_parallel(self) -> Iterator[list[tuple[ParallelModule, list[torch.optim.Optimizer]]]]:
        """Inside, Accelerate does not know of parallel models and their optimizers, which are given."""
        lists: Any = self
        models, optimizers = lists._models, lists._optimizers
        pairs = []
        for model in (m for m in models if isinstance(m, ParallelModule)):
            known = set(model.parameters())
            pairs.append(
                (model, [o.optimizer for o in optimizers if known & set(parameters_in(o.optimizer))])
            )
        taken = {id(o) for _, each in pairs for o in each}
        lists._models = [m for m in models if not isinstance(m, ParallelModule)]
        lists._optimizers = [o for o in optimizers if id(o.optimizer) not in taken]
        try:
            yield pairs
        finally:
            lists._models, lists._optimizers = models, optimizers

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Gradients are added up as they come."""
        return nullcontext()

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: int = 2) -> torch.Tensor:
        """The norm of all gradients, before they are clipped."""
        self.unscale_gradients()
        return clip_grad_norm_(parameters, max_norm, norm_type)
