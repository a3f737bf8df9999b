"""The ranks of a job, and the mesh that they are for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

import autoshard
from autoshard.errors import UsageError


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("mesh", ["pp=3", "dp=2,tp=1"])
def test_a_world_of_another_size_is_refused_before_planning(mesh: str) -> None:
    stages: list[str] = []
    given = torch.zeros(6, 4)
    with pytest.raises(UsageError, match=f"the world has 1 ranks, the mesh {mesh} has [23]"):
        autoshard.parallelize(nn.Linear(4, 4), mesh, example_inputs=(given,), progress=stages.append)
    assert stages == []
