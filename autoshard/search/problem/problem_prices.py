"""The prices of one problem."""

from __future__ import annotations

from dataclasses import dataclass

from autoshard.cost.model import CostModel
from autoshard.cost.recipe import ADAMW, Recipe


@dataclass(frozen=True)
class Prices:
    """ops: on the axes of the search. params: on the axes of the mesh. recipe: what training keeps."""

    ops: CostModel
    params: CostModel
    recipe: Recipe = ADAMW
