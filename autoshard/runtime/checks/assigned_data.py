"""Refuses ``parameter.data = x``, which changes nothing where parameters are sharded."""

from __future__ import annotations

import torch

from autoshard.errors import UsageError
from autoshard.torch_adapters.assigned_data import data_was_assigned


def check_data(name: str, parameter: torch.Tensor) -> None:
    """UsageError if that was run for a parameter."""
    if data_was_assigned(parameter):
        raise UsageError(
            f"{name}.data was assigned",
            why="torch goes on with the old values of a sharded parameter, without an error",
            hint="copy the values: parameter.data.copy_(x), or model.load_state_dict",
        )
