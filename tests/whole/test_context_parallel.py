"""Context parallelism: the sequence divided over ``cp``, causal attention in a zigzag, equal to eager."""

from __future__ import annotations

import pytest
from families import family
from lockstep_check import RTOL, compare_step
from planned import program

from autoshard.program.program import Program
from autoshard.verify.static import verify_static

CAUSAL = [
    ("llama-long", "cp=4"),
    ("llama-long", "cp=2,tp=2"),
    ("llama-long", "fsdp=2,cp=2"),
    ("mixtral-long", "cp=4"),
]
#: whose masks are tensors, and one for which heads are cheaper to divide
OTHERS = [("llama-long-padded", "cp=4"), ("bert-long", "cp=2,tp=2"), ("gpt2-long", "cp=2,tp=2")]


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
