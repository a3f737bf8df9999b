"""Loops over a sequence as one op, forward and backward."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import looping
import pytest
import torch
from looping import loop_inputs
from slow_links import ring_cluster
from torch import nn

from autoshard.api import compile_analysed
from autoshard.capture.capture import capture
from autoshard.cluster import Mesh
from autoshard.errors import VerificationError
from autoshard.ir.placement import Shard
from autoshard.ir.scans import SCAN, StepSlice, scan_of
from autoshard.passes.simplify.roll_loops import LEAST
from autoshard.planner.analysis import Analysis, analyse
from autoshard.planner.planning import plan_analysed
from autoshard.program.known_ops import known_ops
from autoshard.program.parse import parse_program
from autoshard.program.program import Program
from autoshard.program.store import load_program, save_program
from autoshard.program.text import program_text
from autoshard.search.problem.rescale_batch import with_batch
from autoshard.verify.lockstep import verify
from autoshard.verify.static import verify_static

#: loops in forward and backward
LOOPS = {
    looping.LinearAttention: 2,
    looping.Blocks: 2,
    looping.Backwards: 2,
    looping.EverySecond: 2,
    looping.Sums: 4,
    looping.Overwritten: 3,
    looping.Cell: 2,
}


def _analysed(
    model: type[nn.Module], length: int = 80
) -> tuple[nn.Module, Mapping[str, torch.Tensor], Analysis]:
    inputs = loop_inputs(length)
    module = model().double()
    return module, inputs, analyse(capture(module, (), inputs))


def _loops(analysis: Analysis) -> int:
    return sum(node.op == SCAN for graph in analysis.folded.segments.values() for node in graph.nodes)


def _program(analysis: Analysis, mesh: str) -> Program:
    return compile_analysed(plan_analysed(analysis, [Mesh.parse(mesh)], ring_cluster()))


@pytest.mark.parametrize("model", LOOPS, ids=lambda m: m.__name__)
def test_equal_to_eager(model: type[nn.Module]) -> None:
    """Divided by batch and by heads or features, where these are the same in every step."""
    module, inputs, analysis = _analysed(model)
    assert _loops(analysis) == LOOPS[model]
    for mesh in ("dp=2", "fsdp=2,tp=2"):
        program = _program(analysis, mesh)
        assert verify(program, module, (), inputs, steps=1).ok
        report = verify_static(program)
        assert report.ok and not report.uncovered


@pytest.mark.parametrize(
    ("model", "length", "loops"),
    [(looping.Growing, 80, 2), (looping.Broadening, 40, 2), (looping.TwoBeginnings, 40, 2)],
)
def test_steps_of_other_types(model: type[nn.Module], length: int, loops: int) -> None:
    """Nodes that read slices equally far apart may make other things; so may the first step."""
    module, inputs, analysis = _analysed(model, length)
    assert _loops(analysis) == loops
    assert verify(_program(analysis, "tp=2"), module, (), inputs, steps=1).ok


def test_heads_are_divided() -> None:
    *_, analysis = _analysed(looping.LinearAttention)
    program = _program(analysis, "tp=4")
    for segment in program.lowered.segments.values():
        for node in segment.graph.nodes:
            if node.op == SCAN:
                layouts = [segment.layouts[ref.name][0] for ref in node.args[0]]
                assert all(isinstance(layout, Shard) for layout in layouts)


@pytest.mark.parametrize(
    ("model", "length"), [(looping.Dropped, 80), (looping.Unordered, 79), (looping.Cell, LEAST - 1)]
)
def test_what_is_no_loop(model: type[nn.Module], length: int) -> None:
    """Random numbers, other slices in every step, and few steps stay as they are written."""
    *_, analysis = _analysed(model, length)
    assert not _loops(analysis)


def test_longer_sequences_have_no_more_ops() -> None:
    short, long = (_analysed(looping.Blocks, length)[2].folded.segments for length in (128, 256))
    assert [len(g.nodes) for g in short.values()] == [len(g.nodes) for g in long.values()]


def test_another_batch() -> None:
    """A model with more sequences has the loops of one that was captured with as many."""
    few, many = (analyse(capture(looping.Blocks().double(), (), loop_inputs(80, n))) for n in (3, 12))
    scaled = with_batch(few.model, 12).folded
    for name, graph in many.folded.segments.items():
        for one, other in zip(scaled.segments[name].nodes, graph.nodes, strict=True):
            assert one.types == other.types
            assert one.op != SCAN or scan_of(one) == scan_of(other)


def test_written_and_read(tmp_path: Path) -> None:
    """The text of a program holds the body; one that reads past the end of a tensor is refused."""
    *_, analysis = _analysed(looping.Blocks)
    program = _program(analysis, "fsdp=2,tp=2")
    text = program_text(program)
    save_program(program, tmp_path / "program")
    assert program_text(load_program(tmp_path / "program")) == text
    scans = [scan_of(n) for s in program.lowered.segments.values() for n in s.graph.nodes if n.op == SCAN]
    where = next(how for how in scans[0].given if isinstance(how, StepSlice))
    said = f"({where.dim}, {where.size}, {where.first}, {where.stride})"
    assert said in text
    with pytest.raises(VerificationError, match="body of scan"):
        beyond = f"({where.dim}, {where.size}, {where.first + where.size}, {where.stride})"
        parse_program(text.replace(said, beyond), ("fsdp", "tp"), known_ops())
