"""The program of a model on one rank, which others are compared with where the model itself is not equal."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn
from torch.utils import _pytree as pytree

from autoshard import api
from autoshard.program.program import Program
from autoshard.rules.user import Rules
from autoshard.runtime.arguments import split_inputs
from autoshard.runtime.microbatch import calls_of
from autoshard.search.plan.plan_json import plan_from_json


def single_rank_program(
    program: Program,
    model: nn.Module,
    inputs: Any,
    rules: Rules = None,
    say: Callable[[str], None] = lambda _: None,
) -> Program:
    """The same model with as many microbatches: it drops the same elements, adds up the same terms, and
    computes in the same types."""
    piece = calls_of(program, pytree.tree_leaves(split_inputs(inputs)))[0]
    planned = api.plan(
        model,
        "dp=1",
        example_inputs=piece,
        replicate_unknown=True,
        rules=rules,
        progress=say,
        precision=program.precision.name,
        products=program.products,
        tile_rows=plan_from_json(program.plan).tile_rows or None if program.plan else None,
    )
    planned = replace(planned, plan=replace(planned.plan, microbatches=program.microbatches))
    with warnings.catch_warnings():
        # what is computed for every microbatch by itself was told when the program was compiled
        warnings.simplefilter("ignore", UserWarning)
        return api.compile_analysed(planned)
