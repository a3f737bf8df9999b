"""Context parallelism: the sequence divided over ``cp``, causal attention in a zigzag, equal to eager."""

from __future__ import annotations

from dataclasses import replace

import pytest
from families import family
from lockstep_check import RTOL, compare_step
from pipelines import cuts_of
from planned import planned, program

from autoshard.api import compile_analysed
from autoshard.errors import UsageError
from autoshard.ir.placement import Shard
from autoshard.program.program import Program
from autoshard.search.plan.plan import Pipeline
from autoshard.verify.static import verify_static

CAUSAL = [
    ("llama-long", "cp=4"),
    ("llama-long", "cp=2,tp=2"),
    ("llama-long", "fsdp=2,cp=2"),
    ("llama-long-padded", "cp=4"),
    ("mixtral-long", "cp=4"),
    ("gpt2-long", "cp=2,tp=2"),
    ("mistral-window", "cp=4"),
    ("gemma3-windows-padded", "cp=2,tp=2"),
]
#: not causal, and one for which heads are cheaper to divide
OTHERS = [("bert-long", "cp=2,tp=2"), ("gpt2-wide", "cp=4")]


def ops_of(found: Program) -> list[str]:
    return [node.op for segment in found.lowered.segments.values() for node in segment.graph.nodes]


@pytest.mark.parametrize(("name", "mesh"), [*CAUSAL, *OTHERS])
def test_equal_to_eager(name: str, mesh: str) -> None:
    found = program(name, mesh, "h100-dgx")
    rows = {op for op in ops_of(found) if op.startswith("autoshard.sdpa_rows")}
    assert len(rows) == (2 if (name, mesh) in CAUSAL else 0)
    errors = compare_step(found, *family(name).make())
    assert max(errors.values()) < RTOL
    report = verify_static(found)
    assert report.ok and not report.uncovered


@pytest.mark.parametrize(("mesh", "cluster"), [("cp=4", "h100-dgx"), ("cp=2,tp=2", "cpu-gloo")])
def test_parts_of_few_queries_are_merged(mesh: str, cluster: str) -> None:
    """Ranks have parts of a long padded text, and a short one attends to all of it."""
    found = program("bart-long", mesh, cluster)
    nodes = [node for segment in found.lowered.segments.values() for node in segment.graph.nodes]
    assert any(node.kwarg("op", "") == "attention" for node in nodes)
    errors = compare_step(found, *family("bart-long").make())
    assert max(errors.values()) < RTOL
    report = verify_static(found)
    assert report.ok and not report.uncovered


def test_chunks_of_a_scan_are_divided() -> None:
    """Ranks work on chunks of their own; states of chunks pass on, and to convolutions the ends of chunks."""
    found = program("mamba2-long", "cp=4", "h100-dgx")
    products = [
        isinstance(segment.layouts[node.name][0], Shard)
        for segment in found.lowered.segments.values()
        for node in segment.graph.nodes
        if node.op == "aten.bmm.default"
    ]
    assert sum(products) > len(products) / 2  # others are small
    layouts = [
        segment.layouts[node.args[0].name][0]
        for segment in found.lowered.segments.values()
        for node in segment.graph.nodes
        if node.op.startswith("autoshard.causal_conv")
    ]
    assert Shard(2) in layouts
    errors = compare_step(found, *family("mamba2-long").make())
    assert max(errors.values()) < RTOL
    report = verify_static(found)
    assert report.ok and not report.uncovered


@pytest.mark.parametrize("name", ["llama-long", "mistral-window"])
def test_slices_of_divided_attention_are_refused(name: str) -> None:
    """In a zigzag, and in the order of positions."""
    found = planned(name, "cp=2", "h100-dgx")
    cuts = cuts_of(found.analysis.folded, 2)
    plan = replace(found.plan, pipeline=Pipeline(2, 0, "seq1f1b", 1, cuts, 2))
    with pytest.raises(UsageError, match="zigzag, or within attention, has no slices"):
        compile_analysed(replace(found, plan=plan))
