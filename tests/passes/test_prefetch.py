"""Gathers are issued calls ahead, what others wait for further; reductions of an axis leave together."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import replace
from unittest.mock import patch

import pytest
import sequence_llama
from families import family
from lockstep_check import RTOL, compare_step
from planned import analysed
from ringed import even_cluster

from autoshard.api import compile_analysed
from autoshard.capture.capture import capture
from autoshard.cluster import Cluster, Mesh, load_cluster
from autoshard.ir import Node, Origin, Ref, TensorType
from autoshard.ir.collectives import REDUCE_SCATTER, exact_transfer, goes_in_turn, is_message, transfer_of
from autoshard.ir.graph import refs_of
from autoshard.ir.statements import Statements, statements_of
from autoshard.passes import pipeline
from autoshard.passes.overlap import bucket
from autoshard.passes.overlap.bucket import bucket_collectives
from autoshard.passes.overlap.prefetch import _place, prefetch
from autoshard.planner.analysis import Analysis, analyse
from autoshard.planner.planned import Planned
from autoshard.planner.planning import plan_analysed
from autoshard.program.program import Program
from autoshard.search.select.request import SearchRequest
from autoshard.simulate.step import estimate_step
from autoshard.verify.static import verify_static

#: model, cluster, mesh, share of the memory that the fastest plan takes: parameters lie split over both axes
CASES = (
    ("gpt2", "even", "fsdp=2,tp=2", 0.8),
    ("gpt2", "h100-dgx", "fsdp=2,tp=2", 0.7),
    ("llama", "h100-dgx", "fsdp=4,tp=2", 0.7),
)
DEEP = (("deep", "slow", "fsdp=2,tp=2", 0.65), ("deep", "slow", "fsdp=4,tp=2", 0.6))
#: products take as many times longer on the slow cluster, so that messages of small models have company
_SLOWER = 100


def _cluster(name: str) -> Cluster:
    if name != "slow":
        return even_cluster() if name == "even" else load_cluster(name)
    cluster = load_cluster("h100-dgx")
    device = cluster.device
    rates = {kind: rate / _SLOWER for kind, rate in device.peak_flops.items()}
    return replace(cluster, device=replace(device, peak_flops=rates), collectives="mpi")


@functools.cache
def _analysed(name: str) -> Analysis:
    if name != "deep":
        return analysed(name)
    model, inputs = sequence_llama.make(64, 5)
    return analyse(capture(model, (), inputs))


@functools.cache
def _planned(name: str, cluster: str, mesh: str, room: float) -> Planned:
    meshes, machine = [Mesh.parse(mesh)], _cluster(cluster)
    free = plan_analysed(_analysed(name), meshes, machine, request=SearchRequest(), reasons=False)
    memory = int(room * free.solution.placements.bytes)
    return plan_analysed(
        _analysed(name), meshes, machine, memory=memory, request=SearchRequest(), reasons=False
    )


@functools.cache
def _program(name: str, cluster: str, mesh: str, room: float) -> Program:
    return compile_analysed(_planned(name, cluster, mesh, room), ring=False)


@functools.cache
def _apart(name: str, cluster: str, mesh: str, room: float) -> Program:
    """However small what is waited for is, it has a message of its own."""
    with patch.object(bucket, "_MUCH", 0):
        return compile_analysed(_planned(name, cluster, mesh, room), ring=False)


def _plainly(name: str, cluster: str, mesh: str, room: float) -> Program:
    """Gathers one call ahead, and all of an axis in one message."""
    with (
        patch.object(pipeline, "prefetch", lambda lowered, params, seconds: prefetch(lowered, params)),
        patch.object(
            pipeline, "bucket_collectives", lambda lowered, params, apart: bucket_collectives(lowered, params)
        ),
    ):
        return compile_analysed(_planned(name, cluster, mesh, room), ring=False)


def _pairs(whole: Statements) -> list[tuple[int, int]]:
    """Of gathers of gathered parameters: the items of main of both."""
    gathered: dict[str, int] = {}
    found: list[tuple[int, int]] = []
    for statement in whole.all:
        if transfer_of(statement.node) == "all_gather":
            found += [(gathered[value], statement.item) for value in statement.uses if value in gathered]
            gathered.update(dict.fromkeys(statement.makes, statement.item))
    return found


def _gaps(program: Program) -> list[int]:
    """How many calls that compute stand between the two gathers of each pair."""
    whole = statements_of(program.lowered)
    computes = {s.item for s in whole.all if not is_message(s.node) and s.node.op.startswith("aten.")}
    parts = {k: part for part in program.lowered.parts for k in range(part.start, part.stop)}
    # what is gathered for the first calls of a part can only stand at its beginning
    pairs = [(first, second) for first, second in _pairs(whole) if first > parts[first].start + 2]
    return [sum(first <= item < second for item in computes) for first, second in pairs]


@pytest.mark.parametrize("case", CASES)
def test_programs_with_gathers_of_gathers_equal_eager(case: tuple[str, str, str, float]) -> None:
    program = _apart(*case)
    assert _pairs(statements_of(program.lowered))
    report = verify_static(program)
    assert report.ok, report.findings[0]
    errors = compare_step(program, *family(case[0]).make())
    assert "loss" in errors and {k: e for k, e in errors.items() if e > RTOL} == {}


@pytest.mark.parametrize("case", DEEP)
def test_something_is_computed_while_a_gather_waits_for_another(case: tuple[str, str, str, float]) -> None:
    made, plainly = _program(*case), _plainly(*case)
    ahead, close = _gaps(made), _gaps(plainly)
    assert len(ahead) > 10 and ahead.count(0) <= 1  # of the first calls of a part
    assert close and not any(close)
    machine = _cluster(case[1])
    assert estimate_step(made, machine).seconds < estimate_step(plainly, machine).seconds


@pytest.mark.parametrize("case", DEEP)
def test_what_is_waited_for_travels_alone_where_that_is_much(case: tuple[str, str, str, float]) -> None:
    def messages(program: Program) -> int:
        return sum(transfer_of(s.node) == "all_gather" for s in statements_of(program.lowered).all)

    assert messages(_apart(*case)) > messages(_program(*case))
    assert verify_static(_apart(*case)).ok


def test_a_call_that_is_over_too_soon_is_passed_over() -> None:
    """Seconds of calls: layers of 8 s, each behind 1 s that is computed again."""
    spans = [8.0, 1.0, 8.0, 1.0, 8.0]
    assert _place(4, 3.0, spans) == 2  # in front of the long one before
    assert _place(4, 0.5, spans) == 3  # the short one is long enough
    assert _place(3, 3.0, spans) == 2
    assert _place(2, 9.0, [4.0, 4.0, 4.0]) == 1  # nothing hides it anyway: no more is held for that
    assert _place(1, 3.0, spans) == _place(0, 3.0, spans) == 0


@pytest.mark.parametrize("case", CASES)
def test_reductions_of_an_axis_leave_a_segment_together(case: tuple[str, str, str, float]) -> None:
    for segment in _program(*case).lowered.segments.values():
        reduced = [
            n
            for n in segment.graph.nodes
            if exact_transfer(n) == "reduce_scatter" and set(n.outs) <= set(segment.graph.outputs)
        ]
        again = {r for n in segment.graph.nodes for r in refs_of(n)}
        last = [n for n in reduced if again.isdisjoint(n.outs)]
        assert (
            max(Counter((n.args[1], n.types[0].dtype) for n in last if n.types[0]).values(), default=1) == 1
        )


@pytest.mark.parametrize(("rows", "turn"), [(8, False), (1 << 16, True)])
def test_only_what_holds_much_goes_in_turn(rows: int, turn: bool) -> None:
    node = Node(
        REDUCE_SCATTER.op, (Ref("g"), "dp", 0), (), ("r",), (TensorType((rows, 8), "bf16"),), Origin(), True
    )
    assert goes_in_turn(node) is turn
