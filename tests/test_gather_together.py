"""Where nothing hides messages, a step gathers once and reduces once, in as few of them as may be."""

from __future__ import annotations

from collections import Counter

import pytest
from families import family
from lockstep_check import compare_step
from planned import planned

from autoshard.api import compile_analysed, plan_analysed
from autoshard.cluster import load_cluster
from autoshard.cluster.mesh import Mesh
from autoshard.ir import Node
from autoshard.ir.comm import collective_kind, is_message
from autoshard.passes import gather_together
from autoshard.program.program import Program
from autoshard.search.ask import Ask
from autoshard.search.rank import Staged
from autoshard.simulate.step import estimate_step
from autoshard.verify.static import verify_static

MODELS = (("llama", "fsdp=4"), ("gpt2", "dp=2,fsdp=2"), ("t5", "fsdp=2,tp=2"))


def _messages(made: Program) -> Counter[tuple[str, str]]:
    """(phase, kind) -> messages of parameters and gradients across layers, or in the segments of layers."""
    found: Counter[tuple[str, str]] = Counter()
    for part in made.lowered.parts:
        for item in made.lowered.of(part):
            nodes = [item] if isinstance(item, Node) else made.lowered.segments[item.segment].graph.nodes
            found.update((part.phase, collective_kind(n)) for n in nodes if is_message(n))
    return found


@pytest.mark.parametrize(("name", "mesh"), MODELS)
def test_numbers_are_those_of_eager(name: str, mesh: str) -> None:
    made = compile_analysed(planned(name, mesh, "cpu-gloo"))
    found, apart = _messages(made), _messages(compile_analysed(planned(name, mesh, "cpu-gloo"), bucket=False))
    assert not found["gather", "all_gather"]  # they begin forward
    assert sum(found.values()) < sum(apart.values()) / 2
    assert verify_static(made).ok
    model, inputs = family(name).make()
    assert max(compare_step(made, model, inputs).values()) < 1e-4


def test_one_gather_and_one_reduction() -> None:
    plan = planned("llama", "fsdp=4", "cpu-gloo")
    found, cluster = _messages(compile_analysed(plan)), load_cluster("cpu-gloo")
    assert found["forward", "all_gather"] == 1
    assert sum(n for (_, kind), n in found.items() if kind == "reduce_scatter") == 1
    layers = compile_analysed(planned("llama", "fsdp=4", "h100-dgx"), ring=False)
    assert _messages(layers)["forward", "all_gather"] > 1
    assert estimate_step(compile_analysed(plan), cluster).seconds < estimate_step(layers, cluster).seconds


def test_messages_have_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather_together, "BUCKET_BYTES", 2**14)
    made = compile_analysed(planned("llama", "fsdp=4", "cpu-gloo"))
    assert _messages(made)["forward", "all_gather"] > 2
    model, inputs = family("llama").make()
    assert max(compare_step(made, model, inputs).values()) < 1e-4


def test_several_microbatches_gather_before_the_first() -> None:
    analysis = planned("llama", "fsdp=4", "cpu-gloo").analysis
    meshes = [Staged(Mesh.parse("fsdp=4"), batches=(8,))]
    found = plan_analysed(analysis, meshes, load_cluster("cpu-gloo"), ask=Ask(batch=16))
    made = compile_analysed(found)
    assert made.microbatches == 2 and _messages(made)["gather", "all_gather"] == 1
    assert verify_static(made).ok
