"""Bytes that ranks send to and from the owners of matrices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from autoshard.runtime.optim import owners


def count_sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by the bytes that a rank sends to others in each exchange."""
    sent: list[int] = []
    exchange = owners._all_to_all

    def counted(group: Any, parts: list[list[torch.Tensor]], *rest: Any) -> Any:
        others = (part for k, each in enumerate(parts) if k != dist.get_rank(group) for part in each)
        sent.append(sum(part.nbytes for part in others))
        return exchange(group, parts, *rest)

    monkeypatch.setattr(owners, "_all_to_all", counted)
    return sent
