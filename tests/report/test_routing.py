"""Steps with experts that are chosen unlike each other, and experts placed by load."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from interop.test_experts import _expert_parallel
from typer.testing import CliRunner

from autoshard.cli.main import app
from autoshard.cluster import load_cluster
from autoshard.errors import UsageError
from autoshard.ir import TensorType
from autoshard.ir.experts import destinations
from autoshard.ir.routing import EVEN, Routing, fullest, placed_by_load, zipf
from autoshard.program.store import save_program
from autoshard.report.routing import routed_steps
from autoshard.simulate.step import estimate_step

COUNTS = (8.0, 6.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0)


def test_the_load_of_the_fullest_rank() -> None:
    assert EVEN.load(2, 8, 4) == 1.0
    assert Routing((COUNTS,)).load(2, 8, 4) == pytest.approx(14 / 6)
    assert Routing((COUNTS, (1.0,) * 8)).load(2, 8, 4) == pytest.approx((14 / 6 + 1) / 2)
    # both choices of every token are on one rank of two experts; of one expert, only one of them
    assert Routing(worst=True).load(2, 8, 4) == 4.0
    assert Routing(worst=True).load(2, 8, 8) == 4.0
    assert Routing((COUNTS,)).load(2, 8, 1) == 1.0


def test_among_how_many_ranks_a_token_has_experts() -> None:
    # drawn one by one, or in turn, so that they are neighbours
    assert Routing().owners(2, 8, 4) == pytest.approx(4 * (1 - (3 / 4) ** 2))
    in_turn = Routing(round_robin=True)
    assert [in_turn.owners(2, 8, ways) for ways in (1, 2, 4, 8)] == [1, 1, 1, 2]
    assert in_turn.owners(8, 256, 64) == 2 and in_turn.owners(8, 256, 8) == 1
    # three of eight, from every place on: (0 1 2) (3 4 5) (6 7 0) ... among two parts of four
    assert in_turn.owners(3, 8, 2) == (1 + 2 + 2 + 1 + 1 + 2 + 2 + 1) / 8
    spread = Routing((zipf(1.0, 8),), ordered=False).load(2, 8, 4)
    assert fullest(zipf(1.0, 8), 4) > spread > 1.0
    with pytest.raises(UsageError, match="8 experts, and the model 16"):
        Routing((COUNTS,)).load(2, 16, 4)


def test_a_full_rank_gets_more_tokens() -> None:
    slots = TensorType((64,), "i64", (2, 8))
    even, skewed, worst = (destinations(slots, 4, r) for r in (EVEN, Routing((COUNTS,)), Routing(worst=True)))
    assert even < skewed < worst == 4.0


def test_experts_are_placed_by_load() -> None:
    placed = placed_by_load(COUNTS, 4)
    assert sorted(placed) == list(range(8))
    assert fullest([COUNTS[e] for e in placed], 4) == pytest.approx(9 / 6)
    few = placed_by_load(COUNTS, 4, moves=2)
    assert sum(place // 2 != expert // 2 for place, expert in enumerate(few)) == 2
    assert fullest(COUNTS, 4) > fullest([COUNTS[e] for e in few], 4)
    assert placed_by_load(COUNTS, 4, moves=0) == tuple(range(8))


def test_steps_and_memory_grow_with_the_load(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    program, _, _ = _expert_parallel("ep=4")
    cluster = load_cluster("cpu-gloo")
    counts = [[60, *range(16, 1, -1)], [1] * 16]
    (tmp_path / "load.json").write_text(json.dumps(counts))
    file = str(tmp_path / "load.json")
    even, skewed, placed, worst = routed_steps(
        program, cluster, estimate_step(program, cluster), [file, "worst"]
    )
    assert even.seconds < placed.seconds < skewed.seconds < worst.seconds
    assert even.peak <= placed.peak <= skewed.peak < worst.peak
    assert len(placed.order) == 2 and placed.order[1] == tuple(range(16)) and placed.moved > 0
    save_program(program, tmp_path / "program")
    args = ["simulate", str(tmp_path / "program"), "--cluster", "cpu-gloo", "--routing", file]
    told = CliRunner().invoke(app, [*args, "--move-experts", "2"])
    assert told.exit_code == 0 and "experts placed by load (2 moved)" in told.stdout
    document = json.loads(CliRunner().invoke(app, [*args, "--json"]).stdout)
    assert [step["load"] for step in document["routing"]] == [even.load, skewed.load, placed.load]


@pytest.mark.parametrize(
    ("text", "reason"),
    [("{", "cannot read the routing"), ("[1, -2]", "no list of tokens"), ("[0, 0]", "no list of tokens")],
)
def test_files_that_are_no_routing(tmp_path: Path, text: str, reason: str) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "load.json").write_text(text)
    program, cluster = _expert_parallel("ep=4")[0], load_cluster("h100-dgx")
    even = estimate_step(program, cluster)
    with pytest.raises(UsageError, match=reason):
        routed_steps(program, cluster, even, [str(tmp_path / "load.json")])
