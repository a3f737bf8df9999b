"""Is the plan that is stored with a program the one of the model that is stored with it?"""

from __future__ import annotations

from collections.abc import Iterator

from autoshard.cluster.mesh import Mesh
from autoshard.errors import AutoshardError
from autoshard.planner.fingerprint import fingerprint_of
from autoshard.program.program import Program
from autoshard.rules.registry import RULES
from autoshard.rules.user import Rules, rule_table
from autoshard.search.plan.plan_json import plan_from_json
from autoshard.verify.result import Finding, ProgramLocation


def broken_plan(program: Program, rules: Rules = None) -> Iterator[Finding]:
    """What of the plan does not fit the program and its model, whose fingerprint is made from its text."""
    try:
        plan = plan_from_json(program.plan)
        size = Mesh.parse(plan.mesh).world_size
    except AutoshardError as error:
        yield Finding("plan", "the plan cannot be read", ProgramLocation(), error.what)
        return
    pairs = (
        ("target", plan.target, program.target),
        ("number of microbatches", plan.microbatches, program.microbatches),
        ("number of ranks of a stage", size, Mesh.parse(program.mesh).world_size),
        (
            "fingerprint of the model",
            plan.step_fingerprint or plan.fingerprint,
            fingerprint_of(program, rule_table(RULES, rules)),
        ),
    )
    for what, planned, result in pairs:
        if planned != result:
            yield Finding(
                "plan",
                f"the {what} is {result!r}, the plan's {planned!r}",
                ProgramLocation(),
                "they are the same",
            )


def can_be_compared(program: Program, rules: Rules = None) -> bool:
    """Whether there is a model, a plan, and every rule that the plan was made with."""
    known = rule_table(RULES, rules)
    return bool(program.plan) and program.original is not None and all(op in known for op in program.user_ops)
