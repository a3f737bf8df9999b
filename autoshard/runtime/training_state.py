"""States of a model and its optimizers, in a folder that `torch.distributed.checkpoint` reads on any mesh."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from autoshard.runtime.optim.layer_wise import LayerWiseOptimizer

Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer]


def training_state(model: nn.Module, optimizers: Optimizers) -> dict[str, Any]:
    """What is saved of them."""
    options = _options(model, optimizers)
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizers, options=options), strict=True))


def _options(model: nn.Module, optimizers: Optimizers) -> StateDictOptions:
    """Flat for pipelines, whose ranks have the states of other parameters; not for optimizers of the user's,
    which may have lists in their states: torch flattens none."""
    given = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else optimizers
    any_state = any(isinstance(optimizer, LayerWiseOptimizer) for optimizer in given)
    flat = getattr(model, "is_pipeline", False) or not any_state
    return StateDictOptions(flatten_optimizer_state_dict=flat)


def save_training_state(path: Path, model: nn.Module, optimizers: Optimizers) -> None:
    """Write a folder; collective."""
    save(training_state(model, optimizers), storage_writer=FileSystemWriter(path))


def load_training_state(path: Path, model: nn.Module, optimizers: Optimizers) -> None:
    """Read what was written, from any number of ranks; collective."""
    state = training_state(model, optimizers)
    load(state, storage_reader=FileSystemReader(path))
    options = _options(model, optimizers)
    weights, moments = state["model"], state["optimizer"]
    set_state_dict(model, optimizers, model_state_dict=weights, optim_state_dict=moments, options=options)
