"""What the code that runs a step does beside what its program says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from autoshard.cost.recipe import ADAMW, Recipe


@dataclass(frozen=True)
class Behaviour:
    """Habits of a runtime; the defaults are our own.

    attention: ``flash`` is one kernel, ``unfused`` writes its scores to memory. attention_again: these scores
    are computed again in backward (Korthikanti et al., 2022, section 5). fused: chains of elementwise ops are
    one kernel. recipe: of the optimizer. gradients_overlap: gradients are reduced while more are computed.
    gathers_overlap: parameters are gathered before they are needed. tensor_overlap: collectives of
    activations run beside ops that do not need them. blocking_sends: a rank sends between stages instead of
    computing. whole_recompute: a layer that is computed again is so to its end. dropout: of attention.
    """

    attention: Literal["flash", "unfused"] = "flash"
    attention_again: bool = False
    fused: bool = False
    recipe: Recipe = ADAMW
    gradients_overlap: bool = False
    gathers_overlap: bool = False
    tensor_overlap: bool = False
    blocking_sends: bool = False
    whole_recompute: bool = False
    dropout: float = 0.0
