"""Reductions of a single microbatch go out while backward computes: where they stand, and equal numbers."""

from __future__ import annotations

import pytest
from families import family
from lockstep_check import compare_step
from planned import planned

from autoshard.api import compile_analysed
from autoshard.cluster import load_cluster
from autoshard.ir import Call, refs_of
from autoshard.ir.collectives import is_message
from autoshard.ir.lowered import Instruction
from autoshard.passes import pipeline
from autoshard.program.program import Program
from autoshard.simulate.step import estimate_step
from autoshard.verify.static import verify_static


def _part(made: Program, phase: str) -> tuple[Instruction, ...]:
    (part,) = [p for p in made.lowered.parts if p.phase == phase]
    return made.lowered.of(part)


def _kinds(made: Program) -> str:
    """The backward part: c for a call, m for a message."""
    return "".join("c" if isinstance(i, Call) else "m" * is_message(i) for i in _part(made, "backward"))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets that the gradients of a layer fill."""
    monkeypatch.setattr(pipeline, "BUCKET_BYTES", 2**14)


@pytest.mark.parametrize(("name", "mesh"), [("llama", "dp=2"), ("gpt2", "dp=2,tp=2"), ("bert", "dp=4")])
@pytest.mark.usefixtures("small")
def test_messages_stand_behind_the_call_that_fills_them(name: str, mesh: str) -> None:
    plan = planned(name, mesh, "h100-dgx")
    made = compile_analysed(plan, ring=False)
    assert "mc" in _kinds(made)
    assert verify_static(made).ok
    model, inputs = family(name).make()
    assert max(compare_step(made, model, inputs).values()) < 1e-4
    late = compile_analysed(plan, ring=False, overlap=False)
    assert "mc" not in _kinds(late) and len(_part(made, "reduce")) < len(_part(late, "reduce"))


@pytest.mark.usefixtures("small")
def test_a_step_is_shorter() -> None:
    plan, cluster = planned("llama", "dp=4", "h100-dgx"), load_cluster("h100-dgx")
    early, late = (compile_analysed(plan, ring=False, overlap=o) for o in (True, False))
    assert estimate_step(early, cluster).seconds < estimate_step(late, cluster).seconds


@pytest.mark.usefixtures("small")
def test_what_a_call_scatters_is_reduced_behind_the_next_one() -> None:
    """Over the next axis; at once it would wait for the message of the call, and computing with it."""
    plan = planned("llama", "dp=2,fsdp=2", "h100-dgx")
    made = compile_analysed(plan, ring=False)
    assert verify_static(made).ok
    items = [i for i in _part(made, "backward") if isinstance(i, Call) or is_message(i)]
    maker = {value: k for k, item in enumerate(items) if isinstance(item, Call) for value in item.outs}
    scattered = 0
    for k, item in enumerate(items):
        for source in () if isinstance(item, Call) else refs_of(item):
            call = items[maker[source]]
            assert isinstance(call, Call)
            graph = made.lowered.segments[call.segment].graph
            inner = graph.outputs[call.outs.index(source)]
            (node,) = [n for n in graph.nodes if inner in n.outs]
            if is_message(node):
                scattered += 1
                assert any(isinstance(i, Call) for i in items[maker[source] + 1 : k])
    assert scattered
    model, inputs = family("llama").make()
    assert max(compare_step(made, model, inputs).values()) < 1e-4
