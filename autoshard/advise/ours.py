"""Our own plan of the same work: what is left to win."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from autoshard import api
from autoshard.advise.tool_config import ToolConfig
from autoshard.advise.tools import Tool
from autoshard.advise.work import Work
from autoshard.cluster.cluster import USABLE_FRACTION
from autoshard.errors import InfeasibleError
from autoshard.program.program import Program
from autoshard.simulate.behaviour import behaviour_on
from autoshard.simulate.step import estimate_step

#: what of a behaviour kernels and their launches decide, rather than placements, schedule and collectives
_KERNELS = (
    *("attention", "attention_native", "attention_reach", "keeps", "fused", "fused_bytes", "norm_reads"),
    *("loss_kept", "loss_peak", "eager"),
)


@dataclass(frozen=True)
class OwnPlan:
    """seconds: of a simulated step of the program; same_kernels: with the kernels of the other tool."""

    mesh: str
    seconds: float
    same_kernels: float


def own_program(work: Work, say: Callable[[str], None]) -> Program | None:
    """The program of our plan, None where none fits."""
    model, inputs = work.build(1)
    say("planning the same work with autoshard")
    try:
        planned = api.plan(
            model,
            work.cluster,
            example_inputs=inputs,
            devices=work.gpus,
            global_batch=work.batch,
            memory=int(USABLE_FRACTION * work.memory),
            optimizer="adamw-fp32",
            progress=lambda _: None,
        )
    except InfeasibleError:
        return None
    return api.compile_analysed(planned)


def own_plan(program: Program, work: Work, tool: Tool) -> OwnPlan:
    """Our program, simulated with our kernels and with those of a tool; state as the tool keeps it."""
    theirs = tool.framework_of(ToolConfig()).behaviour
    ours = behaviour_on(work.cluster.device, recipe=theirs.recipe)
    same = replace(ours, **{name: getattr(theirs, name) for name in _KERNELS})
    plain, with_theirs = (
        estimate_step(program, work.cluster, behaviour=behaviour).seconds for behaviour in (ours, same)
    )
    return OwnPlan(program.full_mesh, plain, with_theirs)
