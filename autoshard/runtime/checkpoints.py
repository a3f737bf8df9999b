"""Checkpoints of a training run, of which one that was interrupted never counts.

`torch.distributed.checkpoint` writes them: any mesh, and a plain model, reads what another one wrote. It
writes ``.metadata`` last, so a folder without that is no checkpoint.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import async_save

from autoshard.errors import UsageError
from autoshard.runtime.groups import device_here, world_device_type
from autoshard.runtime.training_state import load_training_state, save_training_state, training_state

_COMPLETE = ".metadata"
_REST = "rest.pt"


class Checkpoints:
    """The checkpoints of a run in a folder that all ranks see; all methods are collective.

    Args:
        folder: has a folder ``step-N`` for each.
        model: a parallel model, or any other.
        optimizer: of its parameters.
        others: objects with ``state_dict`` and ``load_state_dict`` (a scheduler, a sampler), by name; the
            same on all ranks.
        keep: how many complete ones to keep.

    From now on SIGTERM does not end the process: `should_stop` says so, for the script to save and end.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        others: Mapping[str, Any] | None = None,
        keep: int = 2,
    ) -> None:
        if keep < 1:
            raise UsageError(f"keep={keep}", hint="keep at least one checkpoint")
        self.folder, self.model, self.optimizer = Path(folder), model, optimizer
        self.others, self.keep = dict(others or {}), keep
        self._group: dist.ProcessGroup | None = None
        self._writing: Future[Any] | None = None
        self._copies: DefaultStager | None = None
        self._stop = False
        signal.signal(signal.SIGTERM, self._asked_to_stop)

    def _asked_to_stop(self, number: int, frame: FrameType | None) -> None:
        self._stop = True

    def should_stop(self) -> bool:
        """Whether a rank was asked to end, by SIGTERM."""
        flag = torch.tensor(int(self._stop), device=device_here(world_device_type()))
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag)

    def save(self, step: int, *, wait: bool = True) -> None:
        """Write a checkpoint. step: how many steps were made. wait: False to go on as soon as the values are
        copied to host memory, which is kept for the next; the next `save`, `wait` or `load` ends it.

        Raises what writing raises, on all ranks.
        """
        self.wait()
        path = self.folder / f"step-{step}"
        rest = self._rest()
        if dist.get_rank() == 0:
            # what a killed run left of it, or another run
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir(parents=True)
            torch.save(rest, path / _REST)
        dist.barrier()
        if wait:
            save_training_state(path, self.model, self.optimizer)
            self._remove_old()
            return
        if self._group is None:  # of its own: its messages go beside those of the training
            self._group = dist.new_group(backend="gloo")
            self._copies = _kept_copies()
        state, writer = training_state(self.model, self.optimizer), FileSystemWriter(path)
        writing = async_save(
            state, storage_writer=writer, process_group=self._group, async_stager=self._copies
        )
        assert isinstance(writing, Future)
        self._writing = writing

    def wait(self) -> None:
        """Until what `save` began is written. Raises what that raises."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()
            dist.barrier()
            self._remove_old()

    def load(self) -> int:
        """Load the newest complete checkpoint; of how many steps it is, 0 if there is none.

        The number of ranks and the mesh may differ from those that saved. Random numbers go on where they
        were; with another number of ranks, all take those of the first.
        """
        self.wait()
        newest: list[Any] = [max(self.steps(), default=0)]
        dist.broadcast_object_list(newest, 0)
        step: int = newest[0]
        if not step:
            return 0
        path = self.folder / f"step-{step}"
        load_training_state(path, self.model, self.optimizer)
        self._set_rest(torch.load(path / _REST, weights_only=False))
        return step

    def steps(self) -> list[int]:
        """Of the complete checkpoints, in order."""
        named = [(re.fullmatch(r"step-(\d+)", p.name), p) for p in self.folder.glob("step-*")]
        return sorted(int(m[1]) for m, path in named if m and (path / _COMPLETE).is_file())

    def _remove_old(self) -> None:
        if dist.get_rank() == 0:
            for step in self.steps()[: -self.keep]:
                path = self.folder / f"step-{step}"
                (path / _COMPLETE).unlink()  # first, should the rest be interrupted
                shutil.rmtree(path)

    def _rest(self) -> dict[str, Any]:
        """What is no tensor of model and optimizer; on all ranks, of which the first writes it."""
        device = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
        numbers: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(numbers, (torch.get_rng_state(), device, random.getstate()))
        return {
            "numbers": numbers,
            "dropout_step": getattr(self.model, "dropout_step", None),
            "others": {name: each.state_dict() for name, each in self.others.items()},
        }

    def _set_rest(self, rest: dict[str, Any]) -> None:
        for name, each in self.others.items():
            if name not in rest["others"]:
                raise UsageError(
                    f"the checkpoint has no {name}",
                    why=f"it has {', '.join(rest['others']) or 'no others'}",
                    hint="give the others that it was saved with",
                )
            each.load_state_dict(rest["others"][name])
        numbers = rest["numbers"]
        host, device, python = numbers[dist.get_rank() if len(numbers) == dist.get_world_size() else 0]
        torch.set_rng_state(host)
        random.setstate(python)
        if device is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(device)
        if rest["dropout_step"] is not None and hasattr(self.model, "dropout_step"):
            self.model.dropout_step = rest["dropout_step"]


def _kept_copies() -> DefaultStager:
    """Host memory that is allocated once: touched pages take copies faster, pinned ones those of a device."""
    pinned = torch.cuda.is_available()
    return DefaultStager(
        StagingOptions(
            use_pinned_memory=pinned,
            use_shared_memory=False,
            use_async_staging=False,
            use_non_blocking_copy=pinned,
        )
    )
