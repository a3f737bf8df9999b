"""One case: a random model on a random mesh under a random plan, in lockstep beside eager PyTorch."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from lockstep_check import relative_error

from autoshard.api import compile_analysed
from autoshard.capture.capture import capture
from autoshard.cluster import Mesh, load_cluster
from autoshard.errors import UsageError
from autoshard.planner.analysis import Analysis, analyse
from autoshard.planner.planning import plan_analysed
from autoshard.program.known_ops import known_ops
from autoshard.program.parse import parse_program
from autoshard.program.program import Program
from autoshard.program.text import axis_names, program_text
from autoshard.runtime.lockstep.op_lockstep import Lockstep
from autoshard.solver.network import NoFiniteAssignment
from autoshard.verify.lockstep import Batch, Check, needs_one_rank, verify
from fuzz.draw import recipe
from fuzz.plans import random_plan
from fuzz.recipe import Recipe

#: plans of one model, which is captured once
PLANS = 5
#: relative; everything is in float64, where rounding is far below it and a mistake far above
TOLERANCE = 1e-7
MESHES = (
    *("dp=2", "fsdp=2", "tp=2", "x=2", "tp=3", "x=3", "fsdp=3", "x=4", "tp=4", "fsdp=4"),
    *("dp=2,tp=2", "fsdp=2,tp=2", "dp=2,fsdp=2", "x=2,y=2", "dp=2,x=2", "fsdp=2,x=2", "tp=2,x=2", "x=2,tp=2"),
    *(
        "x=2,y=2",
        "fsdp=2,tp=2",
        "dp=2,tp=2",
        "x=4",
        "pp=2,dp=1",
        "pp=2,dp=2",
        "pp=2,x=2",
        "pp=2,fsdp=2",
        "pp=2,tp=2",
    ),
)


@dataclass(frozen=True)
class Outcome:
    """What became of a case. kind: ``equal``, ``unfit`` (the mesh does not suit the model), or ``failed``.

    failure: kind of the failure, by which a smaller case is recognised as the same. detail: for people.
    error: the largest relative error.
    """

    kind: str
    failure: str = ""
    detail: str = ""
    error: float = 0.0


@dataclass(frozen=True)
class Case:
    """A model, a mesh, and the seed of a plan."""

    recipe: Recipe
    mesh: str
    plan_seed: int

    @classmethod
    def of(cls, number: int) -> Case:
        """The case of a number."""
        mesh = random.Random(f"mesh/{number}").choice(MESHES)
        return cls(_recipe(number // PLANS), mesh, number)

    def run(self, analysis: Analysis | None = None) -> Outcome:
        """Plan, compile and verify. analysis: of the recipe, if it is known."""
        try:
            return self._run(analysis or analysed(self.recipe))
        except UsageError as error:
            return Outcome("unfit", detail=str(error))
        except NoFiniteAssignment as error:
            return Outcome("failed", "no plan", f"no plan for {self.mesh}: {error}")
        except Exception as error:  # any other error is what is looked for
            return Outcome("failed", type(error).__name__, f"{type(error).__name__}: {error}")

    def _run(self, analysis: Analysis) -> Outcome:
        program = self.program(analysis)
        check_text(program)
        steps = 1 if any(r.kind == "buffer" for r in program.signature.results) else 0
        batch = self.recipe.batch(program.microbatches)
        one = one_rank_of(analysis, program)
        found = verify(program, self.recipe.module(), (), batch, steps=steps, one_rank=one)
        checks = [*found.checks, *self._input_gradients(program, batch)]
        worst = max(c.error for c in checks)
        wrong = [c for c in checks if not c.error <= TOLERANCE]
        if wrong:
            detail = "\n".join(f"{c.kind} {c.name}: relative error {c.error:.2g}" for c in wrong)
            return Outcome("failed", "numbers", detail, worst)
        return Outcome("equal", error=worst)

    def _input_gradients(self, program: Program, batch: dict[str, torch.Tensor]) -> list[Check]:
        """Gradients of inputs, which `verify` does not compare; of programs that are called as a whole."""
        wanted = [r for r in program.signature.results if r.kind == "input_grad"]
        if not wanted or program.microbatches > 1:
            return []
        model = self.recipe.module()
        inputs = {k: x.detach().requires_grad_(x.requires_grad) for k, x in batch.items()}
        ends = Batch(program, (), inputs)
        shards, values = Lockstep(program), dict(model.named_parameters(remove_duplicate=False))
        values |= dict(model.named_buffers(remove_duplicate=False))
        leaves = list(inputs.values())
        env: dict[str, list[torch.Tensor]] = {}
        for port in program.signature.ports:
            known: dict[str, Any] = {
                "const": program.constants,
                "tangent": ends.tangents,
                "input": {str(k): x for k, x in enumerate(leaves)},
            }
            env[port.name] = shards.shards(known.get(port.kind, values)[port.target].detach(), port.name)
        with torch.no_grad():
            shards.run(env, False)
            shards.run(env, True)
        outputs = dict(zip(ends.positions, model(**inputs).values(), strict=True))
        pairs = [(outputs[k], t) for k, t in ends.tangents.items()]
        torch.autograd.backward([x for x, _ in pairs], [t for _, t in pairs])
        found = []
        for result in wanted:
            grad = leaves[int(result.target)].grad
            grad = torch.zeros_like(leaves[int(result.target)]) if grad is None else grad
            error = relative_error(shards.whole(env[result.value], result.value), grad)
            found.append(Check("input gradient", result.target, error, error <= TOLERANCE))
        return found

    def program(self, analysis: Analysis) -> Program:
        """The program of the case's plan."""
        return randomly_planned(analysis, self.mesh, f"plan/{self.plan_seed}")


@lru_cache(maxsize=2)
def _recipe(seed: int) -> Recipe:
    return recipe(seed)


def randomly_planned(analysis: Analysis, mesh: str, seed: int | str) -> Program:
    """The program of a random plan for CPUs."""
    cluster = load_cluster("cpu-gloo")
    return compile_analysed(random_plan(analysis, Mesh.parse(mesh), cluster, random.Random(seed)))


def one_rank_of(analysis: Analysis, program: Program) -> Program | None:
    """What a program is compared with where the model itself would give something else.

    That is so with dropout, and with several microbatches of a model that is only known with one.
    """
    if program.microbatches == 1 and not needs_one_rank(program):
        return None
    alone = plan_analysed(analysis, [Mesh.parse("dp=1")], load_cluster("cpu-gloo"), reasons=False)
    return compile_analysed(replace(alone, plan=replace(alone.plan, microbatches=program.microbatches)))


def analysed(made: Recipe) -> Analysis:
    """A recipe captured for training with a batch of one microbatch."""
    return analyse(capture(made.module(), (), made.batch()))


def check_text(program: Program) -> None:
    """The text of a program reads back to what it was written from. Raises AssertionError if not."""
    text = program_text(program)
    lowered, ports, _ = parse_program(text, axis_names(program.mesh), known_ops(()))
    assert ports == program.signature.ports, "ports differ once the text is read back"
    assert lowered.main == tuple(_bare(i) for i in program.lowered.main), "main differs once read back"


def _bare(item: object) -> object:
    from dataclasses import replace

    from autoshard.ir import Call, Origin

    return replace(item, label="") if isinstance(item, Call) else replace(item, origin=Origin())  # type: ignore[type-var]
