"""What every pass makes of one small model, as text in ``tests/golden/``.

``pytest tests/passes/test_golden.py --update-golden`` writes the files anew, after a look at the
differences. The plans and the cluster stand there, too, so that other prices change nothing. A plan is made
anew only where its file is missing or cannot be read.
"""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from pathlib import Path

import pytest
from golden_models import made
from ir_spec import check

from autoshard.api import compile_analysed
from autoshard.capture.capture import capture
from autoshard.cluster import Mesh, load_cluster
from autoshard.errors import AutoshardError
from autoshard.passes.pipeline import NUMBERED, PASSES
from autoshard.planner.analysis import Analysis, analyse
from autoshard.planner.planned import Planned
from autoshard.planner.planning import plan_analysed
from autoshard.planner.source import Source
from autoshard.program.program import Program
from autoshard.program.text import program_text
from autoshard.search.plan.plan import Cut, Pipeline, Plan, Recompute
from autoshard.search.plan.plan_json import plan_from_json, plan_to_json
from autoshard.verify.lockstep import verify

FOLDER = Path(__file__).parents[1] / "golden"
#: program -> (mesh of a stage, passes that are shown of it)
PROGRAMS: dict[str, tuple[str, tuple[str, ...]]] = {
    "one-stage": (
        "fsdp=2,tp=2",
        (
            *("fold", "decompose", "normalize", "insert_collectives", "recompute"),
            *("localize", "join_recompute", "bucket", "defer_reductions"),
        ),
    ),
    "two-stages": (
        "fsdp=2,tp=2",
        (
            *("scale_terms", "cut_pipeline", "count_once", "scatter_sends"),
            *("gather_once", "split_backward"),
        ),
    ),
    "beside-messages": (
        "fsdp=2,tp=2",
        ("fuse_kernels", "prefetch", "coalesce_layers", "schedule_ops"),
    ),
    "slices": ("dp=2", ("slice_sequence", "localize_slices", "fuse_bias")),
}
#: passes that are switched on for a program
SWITCHED: dict[str, dict[str, bool]] = {"beside-messages": {"kernels": True}}
#: passes that only some clusters and wishes need, shown and tested with those
ELSEWHERE = {
    "band_masks": "passes/test_band_masks.py",
    "narrow_gathers": "passes/test_cast_products.py",
    "group_keys": "passes/test_group_keys.py",
    "attention_parts": "passes/test_attention_parts.py",
    "causal_convs": "passes/test_causal_convs.py",
    "axis_levels": "passes/test_axis_levels.py",
    "ring_products": "passes/test_ring_products.py",
    "allreduce_to_reduce_scatter": "passes/test_hierarchy.py",
    "hierarchy": "passes/test_hierarchy.py",
    "hpz_secondary_shards": "passes/test_hierarchy.py",
    "quantize_collectives": "passes/test_quantized_collectives.py",
    "quantize_norms": "passes/test_quantized_activations.py",
    "overlap_grad_reduce": "passes/test_overlap_grad_reduce.py",
    "offload": "passes/test_offload.py",
    "replicate_experts": "passes/test_replicate_experts.py",
    "chunk_experts": "passes/test_chunk_experts.py",
    "tile_rows": "passes/test_tile_rows.py",
}
OF = {each: name for name, (_, passes) in PROGRAMS.items() for each in passes}


@functools.cache
def analysed() -> Analysis:
    model, batch = made()
    return analyse(capture(model, (), batch))


def planned(name: str) -> Plan:
    """A plan in which every pass of the program has something to do."""
    analysis = analysed()
    mesh, _ = PROGRAMS[name]
    # messages that cost much to begin: few of them, and values are whole where stages end
    plan = plan_analysed(analysis, [Mesh.parse(mesh)], load_cluster("cpu-gloo")).plan
    if name == "beside-messages":
        return plan
    if name == "one-stage":
        again = {s: Recompute("selective", 1) for s in ("layers_fwd",)}
        # ZeRO-1 for every other parameter, ZeRO-3 for the rest
        kept = [k for k, p in plan.params.items() if p.stored != p.use][::2]
        params = {k: replace(p, keep=k in kept, late=p.late or k in kept) for k, p in plan.params.items()}
        return replace(plan, recompute=again, params=params, microbatches=2)
    params = {k: replace(p, keep=p.keep or p.stored != p.use) for k, p in plan.params.items()}
    calls = [c for c in analysis.folded.calls if not c.backward]
    cut = next(k for k, c in enumerate(calls) if c.label)
    schedule, slices = ("zb-h1", 1) if name == "two-stages" else ("seq1f1b", 2)
    pipeline = Pipeline(2, 0, schedule, 1, (Cut(cut, "", calls[cut].label),), slices)
    return replace(plan, params=params, pipeline=pipeline, microbatches=4)


@pytest.fixture(scope="module")
def update(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--update-golden"))


def stored_plan(name: str, anew: bool) -> Plan:
    """What the file says; with ``anew``, a plan that is made and written if it says nothing."""
    file = FOLDER / f"{name}.plan.json"
    try:
        return plan_from_json(file.read_text())
    except (OSError, AutoshardError):
        if not anew:
            raise
        # the reasons of a plan are many, and are not what is shown here
        file.write_text(plan_to_json(replace(planned(name), why={})))
        return plan_from_json(file.read_text())


@functools.cache
def program(name: str, anew: bool) -> Program:
    plan = stored_plan(name, anew)
    passes = SWITCHED.get(name, {"overlap": False})
    model, batch = made()
    found = Planned(plan, analysed(), load_cluster(FOLDER / "cluster.toml"), source=Source(model, (), batch))
    return compile_analysed(found, **passes)


def _normal(text: str) -> str:
    """Without the folder that the tests are run from, and the number of the pass."""
    return re.sub(r"\b\d\d_(?=[a-z])", "", re.sub(r"\S*golden_models\.py", "golden_models.py", text))


def _compare(file: Path, text: str, update: bool) -> None:
    if update:
        file.write_text(text)
    assert file.is_file(), f"{file.name} is missing: pytest tests/passes/test_golden.py --update-golden"
    assert text == file.read_text(), (
        "see what differs, then: pytest tests/passes/test_golden.py --update-golden"
    )


@pytest.mark.parametrize("name", OF)
def test_dumps(name: str, update: bool) -> None:
    made = program(OF[name], update)
    _compare(FOLDER / f"{name}.txt", _normal(made.dumps[NUMBERED[name]]), update)


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name: str, update: bool) -> None:
    """The program itself, and that it computes what the model computes."""
    made_of = program(name, update)
    _compare(FOLDER / f"{name}.program.txt", _normal(program_text(made_of)), update)
    model, batch = made()
    assert verify(made_of, model, (), batch, steps=1).ok


@pytest.mark.parametrize("name", OF)
def test_every_pass_does_something(name: str) -> None:
    """Else its dump shows nothing."""
    made_of = program(OF[name], False)
    known, numbered = [n for n in NUMBERED.values() if n in made_of.dumps], NUMBERED[name]
    before = known[known.index(numbered) - 1] if known.index(numbered) else None
    head, text = made_of.dumps[numbered].split("\n", 1)
    assert numbered in head
    if before is not None:
        assert text != made_of.dumps[before].split("\n", 1)[1]


def test_nothing_else_lies_there() -> None:
    assert {*OF, *ELSEWHERE} == set(NUMBERED)
    assert all((FOLDER.parent / file).is_file() for file in ELSEWHERE.values())
    known = {f"{name}.txt" for name in OF} | {f"{p}.plan.json" for p in PROGRAMS}
    known |= {"cluster.toml", *(f"{p}.program.txt" for p in PROGRAMS)}
    assert {p.name for p in FOLDER.iterdir()} == known


def test_every_pass_gets_what_it_needs_from_those_before() -> None:
    """With every optional pass left out, too."""
    given: set[str] = set()
    for each in PASSES:
        assert each.needs <= given, each.name
        given |= each.gives
    assert len(NUMBERED) == len(PASSES)


@pytest.mark.parametrize("name", PROGRAMS)
def test_graphs_are_well_formed_after_every_pass(name: str) -> None:
    made_of = program(name, False)
    shots = made_of.dumps.shots  # type: ignore[attr-defined]  # texts that are written when they are read
    assert shots
    for after, shot in shots.items():
        try:
            check(shot.graph)
        except AssertionError as error:
            raise AssertionError(f"after {after}: {error}") from None
