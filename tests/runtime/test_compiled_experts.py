"""Code is compiled for the sizes of its first call, and so takes no rows of experts: each call has others."""

from __future__ import annotations

import torch
from planned import program

from autoshard.ir import Node
from autoshard.ir.collectives import is_collective
from autoshard.runtime.compiled_segment import CompiledSegment
from autoshard.runtime.compiled_subgraphs import Subgraph
from autoshard.runtime.prepared_steps import PreparedSegment
from autoshard.runtime.resolve import RankView


def _nothing(node: Node, view: RankView) -> object:
    assert is_collective(node)
    return lambda *args, **kwargs: None


def test_no_subgraph_has_rows_of_experts() -> None:
    made, view = program("mixtral", "fsdp=2,tp=2"), RankView(("fsdp", "tp"), (2, 2), (0, 0))
    rows = compiled = 0
    for segment in made.lowered.segments.values():
        prepared = PreparedSegment(segment.graph, view, _nothing, torch.device("cpu"), compiles=True)
        code = prepared._run
        assert isinstance(code, CompiledSegment)
        for part in code.parts:
            if isinstance(part, Subgraph):
                compiled += 1
                assert prepared.ragged.isdisjoint({*part.takes, *part.gives})
        rows += len(prepared.ragged)
    assert rows and compiled
