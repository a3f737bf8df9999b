"""From a model and a target to a plan, and from a plan to a program."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import torch.distributed as dist
from torch import nn

from autoshard.cluster import Cluster, Mesh, load_cluster, parse_target, usable_memory
from autoshard.errors import UsageError, VerificationError
from autoshard.ir import Folded
from autoshard.options import PassOptions, PlanOptions, allowed, options_from
from autoshard.passes.simplify.batch_terms import NO_TERMS
from autoshard.planner.analysis import Analysis
from autoshard.planner.lowering import DEFAULT, lower_plan
from autoshard.planner.planned import Planned
from autoshard.planner.planning import PlanningRequest
from autoshard.planner.resized import NotResizableError, resized
from autoshard.planner.source import Progress
from autoshard.planner.step_terms import step_terms, warn_of
from autoshard.program.holders import holders_of
from autoshard.program.program import Program
from autoshard.rules.registry import RULES
from autoshard.runtime.groups import world_device_type
from autoshard.search.plan.plan import Plan
from autoshard.search.plan.plan_json import plan_from_json
from autoshard.search.problem.problem import batch_of


def request_of(
    model: nn.Module,
    mesh: Any,
    cluster: str | os.PathLike[str] | Cluster | None,
    options: PlanOptions,
    target: str = "",
    progress: Progress | None = None,
) -> PlanningRequest:
    """What is to be planned: see `autoshard.plan` for the arguments."""
    where = parse_target(mesh)
    machine = cluster_of(where, cluster, model)
    named = isinstance(where, Cluster) or cluster is not None
    ranks = ranks_of(where, options)
    limit = options.memory
    if limit is None and named:
        limit = usable_memory(machine.used_by(ranks).device)
    return PlanningRequest(where, machine, ranks, options, limit, target, progress or (lambda _: None))


def cluster_of(where: Mesh | Cluster, cluster: Any, model: nn.Module) -> Cluster:
    """Whose prices are used."""
    if isinstance(where, Cluster):
        return where
    if isinstance(cluster, Cluster):
        return cluster
    if cluster is not None:
        return load_cluster(cluster)
    kind = next((p.device.type for p in model.parameters()), "")
    if kind == "meta" and dist.is_initialized():
        kind = world_device_type()
    return load_cluster("cpu-gloo" if kind == "cpu" else "h100-dgx")


def ranks_of(where: Mesh | Cluster, options: PlanOptions) -> int:
    """In all. Raises UsageError for a cluster, if nothing says how many of its devices are used."""
    if isinstance(where, Mesh):
        return where.world_size
    devices = options.devices
    if devices is None:
        devices = int(os.environ.get("WORLD_SIZE", where.devices or 0))
    if not devices:
        raise UsageError(
            f"cluster {where.name} does not say how many devices to use",
            hint="--gpus N, or devices=N in Python",
        )
    return devices


def compile_analysed(
    planned: Planned,
    progress: Progress | None = None,
    passes: PassOptions = DEFAULT,
    **overrides: Any,
) -> Program:
    """The program of a plan, from the analysis it was made with.

    The program is one microbatch; a model that was captured with another batch is captured again. overrides:
    fields of ``passes`` by name.
    """
    passes = options_from(PassOptions, overrides, passes)
    say = progress or (lambda _: None)
    if any(word != planned.plan.allow for word in allowed(passes.allow)[0]):
        raise UsageError(
            f"the plan allows {planned.plan.allow or 'no lsh-moe'}, and not {passes.allow}",
            hint="plan again with what is to be allowed",
        )
    plan, analysis = planned.plan, planned.of_microbatch(say).analysis
    if analysis.fingerprint != plan.fingerprint:
        plan = _of_other_numbers(plan, planned.analysis, analysis)
    terms = NO_TERMS
    if plan.microbatches > 1:
        terms = step_terms(planned.source, planned.analysis, analysis, say)
        warn_of(terms)
    say("emitting programs")
    program = lower_plan(plan, analysis, planned.cluster, passes, say, terms)
    return replace(
        program,
        user_ops=_user_ops(analysis),
        codegen=passes.codegen,
        cuda_graphs=passes.cuda_graphs,
    )


def _of_other_numbers(plan: Plan, captured: Analysis, analysis: Analysis) -> Plan:
    """The plan for a microbatch, where numbers that follow the batch are others. captured: what it is of."""
    if analysis is captured or captured.fingerprint != plan.fingerprint:
        raise VerificationError(
            "the plan was made for another model or other inputs",
            why=f"the graph's fingerprint is {analysis.fingerprint}, the plan's {plan.fingerprint}",
            hint="plan again",
        )
    try:
        return resized(plan, captured, analysis)
    except NotResizableError:
        batch = batch_of(captured.folded)
        raise UsageError(
            f"the model has another graph for microbatches of {plan.batch} sequences than for {batch}",
            where=_first_difference(captured.folded, analysis.folded),
            why="the plan is of the graph that was captured",
            hint="one microbatch (microbatches=1, --microbatches 1), or example inputs of one; a loop over "
            "samples can be a function of all of them",
        ) from None


def _first_difference(one: Folded, other: Folded) -> str:
    """The user's line of the first op in which two graphs differ."""
    nodes = ([n for graph in folded.segments.values() for n in graph.nodes] for folded in (one, other))
    pairs = ((a, b) for a, b in zip_longest(*nodes) if a is None or b is None or a.op != b.op)
    first, second = next(pairs, (None, None))
    node = first or second
    return "" if node is None else node.origin.source or node.origin.fqn


def _user_ops(analysis: Analysis) -> tuple[str, ...]:
    """The ops of a model that have a rule of the user's."""
    used = {node.op for graph in analysis.folded.segments.values() for node in graph.nodes}
    return tuple(sorted(op for op in used & set(analysis.table) if op not in RULES))


def stored_parameters(programs: Iterable[Program]) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
    """(name, layout, pipeline stages) of the parameters of programs; no stages where there is no pipeline."""
    result: dict[str, tuple[str, tuple[int, ...]]] = {}
    for program in programs:
        stages = {} if program.stages is None else holders_of(program)
        for port in program.signature.ports:
            if port.kind == "param" and port.target not in result:
                layout = program.lowered.values[port.name].layout
                result[port.target] = " ".join(map(str, layout)), stages.get(port.name, ())
    return tuple((name, *where) for name, where in result.items())


def options_on(options: PlanOptions, programs: Sequence[Program]) -> PlanOptions:
    """How another program of a model is planned, with every parameter where programs have it."""
    plan = plan_from_json(programs[0].plan)
    options = replace(
        options,
        stored=stored_parameters(programs),
        tactics="",
        global_batch=None,
        microbatches=None,
        replicate_small_batch=True,
    )
    if plan.pipeline is None:
        return options
    size, kind = plan.batch or None, plan.pipeline
    return replace(options, schedule=kind.schedule, chunks=kind.chunks, microbatch_size=size)
