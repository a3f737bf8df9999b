"""A small twin of a big program: the same architecture, axes, schedule and recomputation, in sizes that run.

Every axis of the mesh has two ranks (a pipeline as many as it has, if that is less), every kind of layer is
there, and the program goes through the same passes. What the search decides for the small sizes may differ
from what it decided for the big ones: the twin exercises passes, runtime and rules in numbers; that the big
program is right in every placement is what `verify_static` proves.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from autoshard.api import compile_analysed
from autoshard.api import plan as make_plan
from autoshard.cluster.mesh import Mesh
from autoshard.errors import AutoshardError, UsageError
from autoshard.interop.huggingface import load_hf_config
from autoshard.interop.targets import is_config
from autoshard.ir import Call
from autoshard.planner.planned import Planned
from autoshard.program.program import Program
from autoshard.search.plan.plan import Plan, Recompute
from autoshard.search.plan.plan_json import plan_from_json
from autoshard.verify.lockstep import Verification, needs_one_rank, verify
from autoshard.verify.result import StaticReport
from autoshard.verify.scale_down import shrunk
from autoshard.verify.single_rank import single_rank_program
from autoshard.verify.static import verify_static

#: positions of a sequence of the twin
SEQ = 32
#: ranks of every axis of the twin
WAYS = 2


@dataclass(frozen=True)
class Twin:
    """What came of a twin. config: entries that were changed. kept: what is as in the big plan."""

    mesh: str
    config: dict[str, object]
    kept: tuple[str, ...]
    static: StaticReport
    outcome: Verification

    @property
    def ok(self) -> bool:
        return self.static.ok and self.outcome.ok


def verify_twin(
    program: Program,
    target: str,
    *,
    steps: int = 3,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> Twin:
    """Compile and verify a small twin of a program, in numbers, against the small model itself.

    Raises UsageError if the target is no config, or the small model cannot be built or planned.
    """
    say = progress or (lambda _: None)
    if not is_config(target):
        raise UsageError(
            f"{target} has no small twin",
            why="only a config says which sizes can be smaller",
            hint="compile a small variant of the model on a small mesh, and verify that",
        )
    path = Path(target[3:]).expanduser()
    big = plan_from_json(program.plan)
    mesh = small_mesh(program)
    entries = json.loads((path / "config.json" if path.is_dir() else path).read_text(encoding="utf-8"))
    chunks = big.pipeline.chunks if big.pipeline is not None else 1
    overrides = shrunk(entries, layers=2 * max(2, chunks * WAYS))
    microbatches = 2 * WAYS if big.pipeline is not None else min(2, big.microbatches)
    batch = _batch(mesh, microbatches)
    say(f"a twin on {mesh}: {', '.join(f'{k}={v}' for k, v in overrides.items())}")
    try:
        model, new = load_hf_config(
            path, batch, SEQ, device="cpu", seed=seed, dtype=torch.float32, overrides=overrides
        )
        inputs = new.inputs
        planned = _planned(model, mesh, inputs, big, microbatches, say)
    except AutoshardError:
        raise
    except Exception as error:
        raise UsageError(
            f"{target} has no small twin",
            why=f"{type(error).__name__}: {error}",
            hint="compile a small config of the same architecture on a small mesh, and verify that",
        ) from error
    small, kept = _carried(planned, big, program)
    one_rank = single_rank_program(small, model, inputs) if needs_one_rank(small) else None
    proved = verify_static(small)
    outcome = verify(small, model, (), inputs, steps=steps, one_rank=one_rank, seed=seed, progress=say)
    return Twin(small.full_mesh, dict(overrides), kept, proved, outcome)


def small_mesh(program: Program) -> str:
    """The mesh of the twin: the same axes, of two ranks where there are more."""
    full = Mesh.parse(program.full_mesh)
    return ",".join(f"{n}={min(WAYS, s)}" for n, s in zip(full.names, full.sizes, strict=True))


def _batch(mesh: str, microbatches: int) -> int:
    """Sequences of a step: two for every rank that has some of its own, in every microbatch."""
    ranks = 1
    for axis in Mesh.parse(mesh).axes:
        ranks *= axis.size if axis.meaning.splits_batch else 1
    return 2 * ranks * microbatches


def _planned(
    model: torch.nn.Module,
    mesh: str,
    inputs: dict[str, torch.Tensor],
    big: Plan,
    microbatches: int,
    say: Callable[[str], None],
) -> Planned:
    pipeline = big.pipeline
    if pipeline is None:
        batch = len(next(iter(inputs.values()))) if microbatches > 1 else None
        return make_plan(
            model,
            mesh,
            example_inputs=inputs,
            cluster=big.cluster,
            global_batch=batch,
            products=big.products,
            expert_chunks=big.expert_chunks,
            replicate_experts="0" if big.replicate_experts else "",
            allow=big.allow,
            progress=say,
        )
    return make_plan(
        model,
        mesh,
        example_inputs=inputs,
        cluster=big.cluster,
        schedule=pipeline.schedule,
        chunks=pipeline.chunks,
        slices=pipeline.slices if pipeline.slices > 1 else None,
        microbatches=microbatches,
        products=big.products,
        expert_chunks=big.expert_chunks,
        replicate_experts="0" if big.replicate_experts else "",
        allow=big.allow,
        progress=say,
    )


def _carried(planned: Planned, big: Plan, program: Program) -> tuple[Program, tuple[str, ...]]:
    """The program of the twin with what the big plan decides independently of sizes, and what that is."""
    plan, kept = planned.plan, [f"axes {', '.join(Mesh.parse(program.full_mesh).names)}"]
    if big.pipeline is not None:
        kept.append(f"schedule {big.pipeline.schedule}")
    if big.products:
        kept.append(f"products in {big.products}")
    if big.replicate_experts:
        kept.append("an expert of each layer on every rank")
    if big.allow:
        kept.append(f"rows of experts grouped by {big.allow}")
    if big.expert_chunks > 1:
        kept.append(f"tokens of experts in {big.expert_chunks} chunks")
    plain = compile_analysed(replace(planned, plan=replace(plan, recompute={})))
    repeated: dict[str, Recompute] = {}
    original = plain.original
    calls = [i for i in original.main if isinstance(i, Call)] if original is not None else []
    for name, choice in big.recompute.items():
        count = sum(c.segment == name and not c.backward for c in calls)
        if count and choice.calls:
            repeated[name] = Recompute(choice.policy, count)
            kept.append(f"{choice.policy} recomputation of {name}")
    params = dict(plan.params)
    for place, state in plan.params.items():
        other = big.params.get(place)
        if other is not None and state.stored != state.use and len(big.params) == len(plan.params):
            params[place] = replace(state, keep=other.keep, late=other.late)
    if len(big.params) == len(plan.params):
        kept.append("which parameters stay gathered")
    changed = replace(plan, recompute=repeated, params=params)
    return compile_analysed(replace(planned, plan=changed)), tuple(kept)
