"""What users do to a model around its calls, on four processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import HERE, run_ranks
from torch import nn

from autoshard.errors import UsageError
from autoshard.runtime.module import ParallelModule


def test_hooks_losses_attributes_optimizers_and_batches(tmp_path: Path) -> None:
    assert "all is as it is" in run_ranks([str(HERE / "user_state_worker.py"), str(tmp_path / "program")])


def test_plain_accelerate_is_told_where_and_what_to_use_instead() -> None:
    asks = ParallelModule.__dict__["_is_accelerate_prepared"]
    with pytest.raises(UsageError, match="import ReplicatedAccelerator") as told:
        asks.__get__(nn.Linear(1, 1), nn.Linear)
    assert "test_user_state.py:" in str(told.value)
