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


def single_rank_program(
    program: Program,
    model: nn.Module,
    inputs: Any,
    rules: Rules = None,
    say: Callable[[str], None] = lambda _: None,
) -> Program:
    """The same model with as many microbatches: it drops the same elements, and adds up the same terms."""
    piece = calls_of(program, pytree.tree_leaves(split_inputs(inputs)))[0]
    planned = api.plan(model, "dp=1", example_inputs=piece, replicate_unknown=True, rules=rules, progress=say)
    planned = replace(planned, plan=replace(planned.plan, microbatches=program.microbatches))
    with warnings.catch_warnings():
        # what is computed for every microbatch by itself was told when the program was compiled
        warnings.simplefilter("ignore", UserWarning)
        return api.compile_analysed(planned)
