"""What a parameter knows of the pipeline it belongs to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from autoshard.runtime.optim.pipeline_scales import Scales

#: name of the attribute by which a parameter knows the pipeline it belongs to
_MARK = "_autoshard_pipeline"


@dataclass(frozen=True)
class Membership:
    """What clipping must know of a parameter of a pipeline.

    group: the ranks that differ only along pp. counts: False where another rank counts the same parameter.
    scales: who looks how its gradient is scaled, None for nobody.
    """

    group: dist.ProcessGroup
    counts: bool
    scales: Scales | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Membership:
        """A copy of a parameter belongs to the same ranks; a group cannot be copied."""
        return self


def membership_of(parameter: torch.Tensor) -> Membership | None:
    """None for a parameter of no pipeline."""
    result = getattr(parameter, _MARK, None)
    return result if isinstance(result, Membership) else None


def join(parameter: torch.Tensor, membership: Membership) -> None:
    """Make a parameter a member."""
    setattr(parameter, _MARK, membership)
