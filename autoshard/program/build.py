"""From a plan to a program: run the passes, collect dumps and notes."""

from __future__ import annotations

from dataclasses import replace

from autoshard.capture.python_state.captured_state import texts_of
from autoshard.ir import Call, Folded, Joint, Node, Ref, substitute
from autoshard.ir.lowered import Instruction, Lowered
from autoshard.ir.offload import NO_OFFLOAD
from autoshard.passes.pipeline import REFINES, LoweringOptions, lower
from autoshard.program.dumps import Dumps, Shot
from autoshard.program.holders import check_holders
from autoshard.program.names import port_names
from autoshard.program.notes import notes_of_segment
from autoshard.program.original import notes_of_original, original_of
from autoshard.program.program import PipelineStages, Program, Signature, StoredState
from autoshard.schedules.schedule import Schedule
from autoshard.search.plan.plan import Plan
from autoshard.search.plan.plan_json import plan_to_json


def build_program(
    folded: Folded, how: LoweringOptions, plan: Plan, dumps: Dumps, schedule: Schedule | None = None
) -> Program:
    """The program of a folded model under a plan.

    dumps: of the passes before the search, to be stored with those after it. schedule: of the stages, if the
    plan has a pipeline.
    """
    shots = dict(dumps.shots)
    stages = None
    if plan.pipeline is not None and schedule is not None:
        position = plan.pipeline.position + _added_before(plan.pipeline.position, how)
        stages = PipelineStages(schedule, position, parts=plan.pipeline.parts)
        how = replace(how, split_backward=schedule.splits_backward)
    mesh = str(how.last_mesh)

    def watch(name: str, graph: Folded | Lowered) -> None:
        shots[name] = Shot(graph, mesh if name >= REFINES else plan.mesh)

    lowered = lower(folded, how, watch)
    names = port_names(folded.joint.ports)
    signature = Signature.of(folded.joint)
    ports = tuple(replace(p, name=names[p.name]) for p in signature.ports)
    results = tuple(
        replace(r, value=names.get(v, v)) for r, v in zip(signature.results, lowered.results, strict=True)
    )
    original = original_of(folded, names, how.terms)
    program = Program(
        mesh,
        _renamed(lowered, names),
        replace(signature, ports=ports, results=results),
        {name: notes_of_segment(lowered, name) for name in lowered.segments},
        plan_to_json(plan),
        Dumps(shots),
        dict(folded.joint.constants),
        plan.target,
        microbatches=plan.microbatches,
        stages=stages,
        original=original,
        original_notes=notes_of_original(original),
        classes={names[port]: key for port, (_, key) in how.flow.class_of.items()},
        offload=how.hosting.kinds if how.hosting is not None else NO_OFFLOAD,
        sums=how.terms.sums,
        alone=how.terms.notes,
        state=_state_of(folded.joint),
    )
    check_holders(program)
    return program


def _state_of(joint: Joint) -> StoredState:
    state = joint.captured_state
    if state is None:
        return StoredState()  # of a graph that was not captured from Python code
    local = bool(state.left or state.constants)
    return StoredState(
        state.digest,
        texts_of(state.reads),
        texts_of(state.variables),
        state.grad_mode,
        state.environment,
        local,
        state.tables,
    )


def _added_before(position: int, how: LoweringOptions) -> int:
    """By how many axes the mesh grows before a position."""
    inner = how.mesh.names[:position]
    return sum(len(h.levels.parts) - 1 for h in how.hierarchy if h.levels.axis in inner)


def _renamed(lowered: Lowered, names: dict[str, str]) -> Lowered:
    """Main with its inputs called by what they are in the model."""

    def instruction(item: Instruction) -> Instruction:
        if isinstance(item, Call):
            return replace(item, args=tuple(names.get(a, a) for a in item.args))
        return _node(item)

    def _node(node: Node) -> Node:
        return substitute(node, lambda name: Ref(names.get(name, name)))

    return replace(
        lowered,
        main=tuple(instruction(i) for i in lowered.main),
        values={names.get(n, n): placed for n, placed in lowered.values.items()},
        results=tuple(names.get(r, r) for r in lowered.results),
    )
