"""A forward and a backward of two microbatches run as one, each while the other exchanges tokens."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from pipelines import model_and_batch, paired, sending_cluster
from ranks import HERE, run_ranks

from autoshard.errors import VerificationError
from autoshard.ir import refs_of
from autoshard.program.program import Program
from autoshard.program.store import load_program, save_program
from autoshard.rules.stops import PRODUCTS, stops_of
from autoshard.simulate.stage_costs import StagePrices
from autoshard.simulate.step import estimate_step
from autoshard.verify.lockstep import verify
from autoshard.verify.static import verify_static


@pytest.mark.parametrize(
    ("mesh", "microbatches", "chunks", "schedule"),
    [
        ("ep=2", 5, 1, "interleaved-overlap"),
        ("fsdp=2,ep=2", 4, 2, "interleaved-overlap"),
        ("ep=2", 5, 2, "dualpipe-v"),
    ],
)
def test_lockstep_equals_eager(mesh: str, microbatches: int, chunks: int, schedule: str) -> None:
    program = paired(mesh, microbatches, chunks, schedule)
    assert {"comm.expert_dispatch.default", "comm.expert_combine.default"} <= _ops(program)
    assert verify_static(program).ok
    model, batch = model_and_batch("mixtral-deep", microbatches)
    report = verify(program, model, (), batch, steps=2)
    assert report.ok, report.worst()


def test_on_gloo_equals_eager(tmp_path: Path) -> None:
    cases = []
    ways = (("ep=2", 5, 1), ("ep=2", 4, 2), ("fsdp=2", 3, 1), ("ep=2", 5, 2, "dualpipe-v"))
    for k, way in enumerate(ways):
        folder = tmp_path / str(k)
        save_program(paired(*way), folder)  # type: ignore[arg-type]
        cases.append({"family": "mixtral-deep", "program": str(folder), "microbatches": str(way[1])})
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    files = [str(tmp_path / name) for name in ("cases.json", "results.json")]
    run_ranks([str(HERE / "pipeline_worker.py"), *files])
    rows = json.loads((tmp_path / "results.json").read_text())
    wrong = [row for row in rows if not row["error"] < 1e-4]
    assert len(rows) == len(cases) and not wrong, wrong


def _ops(program: Program) -> set[str]:
    return {node.op for segment in program.lowered.segments.values() for node in segment.graph.nodes}


def _prices(program: Program) -> StagePrices:
    return StagePrices(program, sending_cluster())


def test_the_turns_are_the_programs(tmp_path: Path) -> None:
    """They are stored, simulated as stored, and refused where they are for other stops."""
    program = paired()
    assert program.stages is not None
    turns = program.stages.turns
    assert set(turns) == {(0, 0), (1, 1)} and all(set(taken) == {0, 1} for taken in turns.values())
    # neither runs to its end before the other begins
    assert all(taken != tuple(sorted(taken)) for taken in turns.values())
    save_program(program, tmp_path / "program")
    loaded = load_program(tmp_path / "program")
    assert loaded.stages == program.stages
    prices = _prices(loaded)
    for (forward, backward), taken in turns.items():
        assert prices.parts_of(forward).turns(forward, backward) == taken
    fewer = {pair: taken[:-1] for pair, taken in turns.items()}
    wrong = replace(program, stages=replace(program.stages, turns=fewer))
    with pytest.raises(VerificationError, match="not those of its stops"):
        _ = _prices(wrong).costs


def test_stops_are_where_tokens_are_needed_and_before_products() -> None:
    for segment in paired().lowered.segments.values():
        nodes = segment.graph.nodes
        coming: set[str] = set()
        for k, node in enumerate(nodes):
            needs = not coming.isdisjoint(refs_of(node))
            assert (k in stops_of(nodes)) == (needs or node.op in PRODUCTS)
            coming.difference_update(refs_of(node))
            if node.op.startswith("comm.expert_"):
                coming.update(node.outs)


def test_pairs_hide_exchanges_behind_computing() -> None:
    """Where messages run beside computing, both take less than one after the other."""
    program = paired()
    prices = _prices(program)
    assert prices.costs.paired
    for (forward, backward), seconds in prices.costs.paired.items():
        parts = prices.parts_of(forward)
        f, b, both = (
            parts.of(forward, "forward"),
            parts.of(backward, "backward"),
            parts.paired(forward, backward),
        )
        assert both.seconds == seconds < f.seconds + b.seconds
        assert both.compute == pytest.approx(f.compute + b.compute)
        assert both.hidden > 1.5 * (f.hidden + b.hidden)
    step = estimate_step(program, sending_cluster())
    assert step.spent.total == pytest.approx(step.seconds)
    assert step.seconds < estimate_step(apart(program), sending_cluster()).seconds


def apart(program: Program) -> Program:
    """Nothing runs as one."""
    assert program.stages is not None
    schedule = replace(program.stages.schedule, paired=frozenset())
    return replace(program, stages=replace(program.stages, schedule=schedule, turns={}))
