"""Pipelines: every schedule, any cut, with every other axis; in lockstep and on gloo equal to eager."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pipelines import model_and_batch, pipeline
from ranks import HERE, run_ranks
from sampling import all_cases

from autoshard.ir import Node, refs_of
from autoshard.ir.boundaries import ends_of
from autoshard.ir.lowered import Lowered, StagePart
from autoshard.program.store import load_program, save_program
from autoshard.program.text import program_text
from autoshard.verify.lockstep import verify

#: name, chunks
SCHEDULES = (
    ("gpipe", 1),
    ("1f1b", 1),
    ("interleaved", 2),
    ("breadth-first", 2),
    ("zb-h1", 1),
    ("zb-v", 2),
    ("searched", 1),
)
DEEP = ("gpt2-deep", "llama-deep", "t5-deep", "vit-deep")
#: pipeline ranks, mesh of a stage
MESHES = ((4, "dp=1"), (2, "dp=2"), (2, "tp=2"), (2, "fsdp=2"), (2, "dp=2,tp=2"))


@pytest.mark.parametrize("microbatches", [4, 7])
@pytest.mark.parametrize(("ranks", "mesh"), MESHES)
@pytest.mark.parametrize("name", DEEP)
def test_lockstep_equals_eager(name: str, ranks: int, mesh: str, microbatches: int) -> None:
    model, batch = model_and_batch(name, microbatches)
    # in turns, so that every family meets every schedule with either count
    turn = DEEP.index(name) + MESHES.index((ranks, mesh)) + microbatches
    for schedule, chunks in SCHEDULES[turn % 4 :: 4]:
        program = pipeline(name, ranks, mesh, schedule, microbatches, chunks)
        found = verify(program, model, (), batch, steps=2)
        assert found.ok, f"{schedule}: {found.worst()}"


@pytest.mark.parametrize(
    ("name", "ranks", "mesh", "schedule", "chunks", "microbatches"),
    [
        ("llama-deep", 2, "fsdp=2,tp=2", "breadth-first", 2, 3),
        ("gpt2-deep", 2, "fsdp=2", "zb-v", 2, 3),
        ("t5-deep", 2, "fsdp=2", "1f1b", 1, 3),
        ("llama-deep", 2, "fsdp=2", "1f1b", 1, 1),
    ],
)
def test_kept_parameters_are_gathered_once_a_step(
    name: str, ranks: int, mesh: str, schedule: str, chunks: int, microbatches: int
) -> None:
    """All stages at once, in front of their first microbatch, also where there is no other."""
    program = pipeline(name, ranks, mesh, schedule, microbatches, chunks, keep=True)
    lowered = program.lowered
    gathers = [p for p in lowered.parts if p.phase == "gather"]
    assert len(gathers) == ranks * chunks and any(p.stop > p.start for p in gathers)
    # nor is anything scattered before all of it is made
    assert any(p.phase == "reduce" and "reduce_scatter" in _messages(lowered, p) for p in lowered.parts)
    model, batch = model_and_batch(name, microbatches)
    found = verify(program, model, (), batch, steps=2)
    assert found.ok, found.worst()
    # no parameter of those is gathered again in a microbatch
    ports = {p.name for p in program.signature.ports if p.kind == "param"}
    stored = {p for part in gathers for p in ends_of(lowered, part).uses}
    for part in lowered.parts:
        if part.phase == "forward":
            again = stored & set(ends_of(lowered, part).uses) & ports
            for item in lowered.of(part):
                ops = [item] if isinstance(item, Node) else lowered.segments[item.segment].graph.nodes
                sources = {r for op in ops if op.op.startswith("comm.all_gather") for r in refs_of(op)}
                assert not again & sources


def _messages(lowered: Lowered, part: StagePart) -> set[str]:
    return {
        item.op.split(".")[1].removesuffix("_bucket") for item in lowered.of(part) if isinstance(item, Node)
    }


def _cases(folder: Path) -> list[dict[str, str]]:
    cases = []
    for k, (schedule, chunks) in enumerate(SCHEDULES):
        # every schedule with two families (at every commit with one), each of those in turns on all meshes;
        # that every family meets every schedule is seen in lockstep
        families = DEEP[k % 2 :: 2]
        for number, name in enumerate(families if all_cases() else families[k // 2 % 2 :][:1]):
            ranks, mesh = MESHES[(2 * k + number + k // 2) % 4]
            # half of the counts do not divide
            microbatches = 4 + k // 2 % 2
            # every other one keeps what it gathers for the whole step
            program = pipeline(name, ranks, mesh, schedule, microbatches, chunks, keep=k % 2 == 0)
            path = folder / f"{name}-pp{ranks}-{mesh}-{schedule}"
            save_program(program, path)
            cases.append({"family": name, "program": str(path), "microbatches": str(microbatches)})
    return cases


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, object]]:
    """One start of four processes trains all of them."""
    folder = tmp_path_factory.mktemp("pipelines")
    (folder / "cases.json").write_text(json.dumps(_cases(folder)))
    run_ranks([str(HERE / "pipeline_worker.py"), str(folder / "cases.json"), str(folder / "results.json")])
    rows: list[dict[str, object]] = json.loads((folder / "results.json").read_text())
    return rows


def test_training_on_gloo_equals_eager(trained: list[dict[str, object]]) -> None:
    wrong = [row for row in trained if not float(str(row["error"])) < 1e-4]
    assert not wrong, wrong


def test_every_parameter_is_held_by_some_stage(trained: list[dict[str, object]]) -> None:
    for row in trained:
        model, _ = model_and_batch(str(row["family"]), 1)
        assert {n for n, _ in model.named_parameters()} <= set(row["held"])  # type: ignore[call-overload]


def test_training_on_eight_processes_equals_eager(tmp_path: Path) -> None:
    """All three axes at once, every family with another schedule."""
    cases = []
    for name, (schedule, chunks) in zip(DEEP, (SCHEDULES[k] for k in (1, 2, 3, 5)), strict=True):
        program = pipeline(name, 2, "dp=2,tp=2", schedule, 5, chunks)
        save_program(program, tmp_path / name)
        cases.append({"family": name, "program": str(tmp_path / name), "microbatches": "5"})
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    arguments = [
        str(HERE / "pipeline_worker.py"),
        str(tmp_path / "cases.json"),
        str(tmp_path / "results.json"),
    ]
    run_ranks(arguments, ranks=8)
    rows = json.loads((tmp_path / "results.json").read_text())
    wrong = [row for row in rows if not row["error"] < 1e-4]
    assert len(rows) == len(DEEP) and not wrong, wrong


def test_the_text_of_a_pipeline_is_read_back(tmp_path: Path) -> None:
    program = pipeline("t5-deep", 2, "tp=2", "zb-v", 4, 2)
    save_program(program, tmp_path / "program")
    again = load_program(tmp_path / "program")
    assert program_text(again) == program_text(program)
    assert again.stages == program.stages
    assert again.full_mesh == "pp=2,tp=2"
