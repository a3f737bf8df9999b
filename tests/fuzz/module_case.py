"""A random module, captured, planned at random, compiled and run in lockstep beside eager PyTorch."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import torch

from autoshard.capture.capture import capture
from autoshard.errors import AutoshardError
from autoshard.planner.analysis import analyse
from autoshard.solver.network import NoFiniteAssignment
from autoshard.verify.lockstep import verify
from fuzz.case import MESHES, Outcome, one_rank_of, randomly_planned
from fuzz.modules import FORMS, Model, drawn, smaller, systematic
from fuzz.world import Wrong, compare, state_of, world


def tolerance(model: Model) -> float:
    """Of relative errors: small in float64, where only mistakes are larger."""
    return 5e-2 if model.single else 1e-7


def eager(model: Model) -> bool:
    """Train the module with eager PyTorch; whether its Python remembers that it was called."""
    here = world(model.source())
    torch.manual_seed(0)
    made = here.make()
    before = state_of(here, made)
    out = made(**here.batch(0))
    eval(FORMS[model.form][1], {**vars(here), "out": out}).backward()
    after = state_of(here, made)
    kept = [k for k, v in before.items() if isinstance(v, torch.Tensor) and k in after]
    return {k: v for k, v in before.items() if k not in kept} != {
        k: v for k, v in after.items() if k not in kept
    }


@dataclass(frozen=True)
class ModuleCase:
    """A module, a mesh, and the seed of a plan."""

    model: Model
    mesh: str
    plan_seed: int

    @classmethod
    def of(cls, number: int) -> ModuleCase:
        """The case of a number."""
        rng = random.Random(f"module/{number}")
        return cls(systematic(number) or drawn(rng), rng.choice([m for m in MESHES if "3" not in m]), number)

    def source(self) -> str:
        """To print."""
        return f"# mesh {self.mesh}\n{self.model.source()}"

    def smaller(self) -> list[ModuleCase]:
        """With less in it."""
        meshes = [m for m in ("dp=2", "tp=2", "x=2") if len(m) < len(self.mesh)]
        return [replace(self, model=m) for m in smaller(self.model)] + [replace(self, mesh=m) for m in meshes]

    def run(self) -> Outcome:
        """Capture, plan, compile and verify; nothing of the model or its globals may change."""
        try:
            remembers = eager(self.model)
        except Exception as error:
            return Outcome("dropped", detail=f"{type(error).__name__}: {error}")
        # one call: what is remembered from call to call is for scripts
        case = replace(self, mesh="x=2,y=2") if remembers and "pp" in self.mesh else self
        try:
            return Outcome("equal", error=case._error(remembers))
        except AutoshardError as error:
            return Outcome("refused", type(error).__name__, str(error))
        except Wrong as error:
            return Outcome("failed", error.failure, error.detail)
        except NoFiniteAssignment as error:
            return Outcome("failed", "no plan", str(error))
        except Exception as error:
            return Outcome("failed", type(error).__name__, f"{type(error).__name__}: {error}")

    def _error(self, once: bool) -> float:
        here = world(self.model.source())
        model = here.make()
        before = state_of(here, model, hooks=True)
        try:
            joint = capture(model, (), here.batch(0))
        finally:
            compare(state_of(here, model, hooks=True), before, 0.0, "changed by capture")
        analysis = analyse(joint)
        program = randomly_planned(analysis, self.mesh, self.plan_seed)
        one = one_rank_of(analysis, program)
        fresh = world(self.model.source())
        made = fresh.make()
        for p in made.parameters():  # their hooks run outside of the program
            for hooks in (p._backward_hooks, p._post_accumulate_grad_hooks):
                (hooks or {}).clear()
        made.train = lambda mode=True: made  # parts keep their own mode
        batch = fresh.batch(0, rows=fresh.B * (1 if once else program.microbatches))
        found = verify(program, made, (), batch, steps=0, one_rank=one)
        wrong = [c for c in found.checks if not c.error <= tolerance(self.model)]
        if wrong:
            raise Wrong("numbers", "\n".join(f"{c.kind} {c.name} off by {c.error:.2g}" for c in wrong[:5]))
        return max((c.error for c in found.checks), default=0.0)
