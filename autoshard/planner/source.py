"""A model to be planned: with what it was captured, and how to capture it again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autoshard.capture.capture import capture
from autoshard.ir import Joint
from autoshard.options import Differentiate, PlanOptions, allowed
from autoshard.planner.analysis import Analysis, analyse
from autoshard.rules.user import Rules
from autoshard.search.plan.plan import Plan

Progress = Callable[[str], None]


def options_of(plan: Plan) -> PlanOptions:
    """What a plan says of how its model was captured."""
    return PlanOptions(
        replicate_unknown=bool(plan.replicated),
        differentiate="all" if plan.differentiate == "all" else "auto",
        precision=plan.precision,
        tile_rows=plan.tile_rows or None,
        products=plan.products,
        expert_chunks=plan.expert_chunks,
        replicate_experts=plan.replicate_experts,
        allow=plan.allow,
    )


@dataclass(frozen=True)
class Source:
    """A model with the arguments and rules it was captured with.

    differentiate: see `capture.capture`. stored: parameters that are sharded already, with their layouts:
    layers that differ in them are planned each for itself. precision: to compute in, "" for the model's.
    tile_rows: tokens of a tile on a rank, 0 for no tiles (`passes.memory.tile_rows`). products,
    expert_chunks, replicate_experts, allow (what a plan is made for): see `PlanOptions`.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    replicate_unknown: bool = False
    rules: Rules = None
    differentiate: Differentiate = "auto"
    stored: Mapping[str, str] = field(default_factory=dict)
    precision: str = ""
    tile_rows: int = 0
    products: str = ""
    expert_chunks: int = 1
    replicate_experts: str = ""
    allow: str = ""

    @staticmethod
    def of_options(
        model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], options: PlanOptions, rules: Rules
    ) -> Source:
        """A model as options say. rules: of the user's."""
        return Source(
            model,
            args,
            kwargs,
            options.replicate_unknown,
            rules,
            options.differentiate,
            precision=options.precision,
            tile_rows=options.tile_rows or 0,
            products=options.products,
            expert_chunks=options.expert_chunks or 1,
            replicate_experts=options.replicate_experts,
            allow=",".join(allowed(options.allow)[0]),
        )

    @staticmethod
    def of_plan(
        model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], plan: Plan, rules: Rules
    ) -> Source:
        """A model as it was captured for a plan. rules: of the user's, again."""
        return Source.of_options(model, args, kwargs, options_of(plan), rules)

    def analysed(self, say: Progress) -> Analysis:
        """Capture the model and find its rules."""
        say("capturing")
        joint = capture(
            self.model,
            self.args,
            self.kwargs,
            differentiate=self.differentiate,
            precision=self.precision,
        )
        analysis = self.analysed_from(joint, say)
        if all(len({self.stored.get(p.target) for p in c.ports}) < 2 for c in analysis.flow.classes.values()):
            return analysis
        joint = replace(joint, apart={p.name: self.stored.get(p.target, "") for p in joint.ports})
        return self.analysed_from(joint, say)

    def analysed_from(self, joint: Joint, say: Progress) -> Analysis:
        """The same of a model that was captured already."""
        return analyse(
            joint,
            replicate_unknown=self.replicate_unknown,
            rules=self.rules,
            progress=say,
            tile_rows=self.tile_rows,
            products=self.products,
            expert_chunks=self.expert_chunks,
            replicate_experts=self.replicate_experts,
            allow=self.allow,
        )

    def with_batch(self, analysis: Analysis, batch: int) -> Source:
        """The same with inputs of ``batch`` sequences; values do not matter to a capture."""
        leaves, spec = pytree.tree_flatten((self.args, self.kwargs))
        cut = {int(t) for t in analysis.folded.joint.batch_inputs}
        resized = [
            x.new_zeros((batch, *x.shape[1:])) if k in cut and isinstance(x, torch.Tensor) else x
            for k, x in enumerate(leaves)
        ]
        args, kwargs = pytree.tree_unflatten(resized, spec)
        return replace(self, args=args, kwargs=kwargs)
