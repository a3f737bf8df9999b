"""Products in chunks that go round the ranks beside their gather or reduce-scatter."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import pytest
import torch
from families import family
from faults.edits import pairs_of, with_nodes
from lockstep_check import RTOL, compare_step
from pipelines import pipeline
from planned import planned as plainly_planned
from ranks import HERE, run_ranks
from ringed import even_cluster, free_rings, planned, ringed, rings_in
from sliced import program_of
from typer.testing import CliRunner

from autoshard.api import compile_analysed
from autoshard.cli.main import app
from autoshard.cluster import Mesh, load_cluster
from autoshard.cost.collective import AxisLink, seconds
from autoshard.errors import UsageError
from autoshard.ir import Call, Node, Ref, TensorType
from autoshard.ir.collectives import ALL_GATHER_MM, MM_REDUCE_SCATTER, is_message, is_ring, kind_of
from autoshard.ir.lowered import Lowered, PlacedValue
from autoshard.ir.placement import P, R, Shard
from autoshard.ir.rings import ring_flop, ring_of
from autoshard.passes.partition.ring_products import Rings, ring_products
from autoshard.passes.pipeline import NUMBERED
from autoshard.passes.simplify.segment_cache import SegmentCache
from autoshard.program.program import Program
from autoshard.program.store import load_program, save_program
from autoshard.program.text import program_text
from autoshard.rules.local import MeshShape
from autoshard.runtime import rings
from autoshard.runtime.shard_utils import take_part
from autoshard.search.plan.plan import Recompute
from autoshard.simulate.behaviour import Behaviour
from autoshard.simulate.op_work import Ops
from autoshard.simulate.rings import alone, beats, room
from autoshard.simulate.step import estimate_step
from autoshard.simulate.streams import Habits, Player, SegmentCall, pricer
from autoshard.simulate.work import Beat, CollectiveWork, MatmulWork, MemoryWork, OpTask, Sheet, Work
from autoshard.verify.static import verify_static

GATHER, SCATTER = "all_gather_mm", "mm_reduce_scatter"
#: model, mesh -> its rings by segment: one of a layer stands for all layers
FOUND: dict[tuple[str, str], dict[tuple[str, str], int]] = {
    ("llama", "tp=2"): {
        ("layers_fwd", GATHER): 1,
        ("layers_fwd", SCATTER): 1,
        ("layers_bwd", GATHER): 2,
        ("layers_bwd", SCATTER): 2,
    },
    ("llama", "tp=4"): {
        ("layers_fwd", GATHER): 1,
        ("layers_fwd", SCATTER): 1,
        ("layers_bwd", GATHER): 2,
        ("layers_bwd", SCATTER): 2,
    },
    ("llama", "dp=2,tp=2"): {
        ("layers_fwd", GATHER): 1,
        ("layers_fwd", SCATTER): 2,
        ("layers_bwd", GATHER): 2,
        ("layers_bwd", SCATTER): 2,
    },
    ("gpt2", "tp=2"): {("h_fwd", SCATTER): 1, ("h_bwd", GATHER): 1, ("h_bwd", SCATTER): 1},
    ("gpt2", "dp=2,tp=2"): {("h_fwd", SCATTER): 1, ("h_bwd", GATHER): 1, ("h_bwd", SCATTER): 1},
}


def ring_sites(program: Program) -> Iterator[tuple[str, int, Node]]:
    """(segment, number, node) of every ring."""
    for name, segment in program.lowered.segments.items():
        for number, node in enumerate(segment.graph.nodes):
            if is_ring(node):
                yield name, number, node


# -- the pass -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "mesh"), FOUND)
def test_rings_are_found_proved_and_equal_eager(name: str, mesh: str) -> None:
    program = ringed(name, mesh)
    assert rings_in(program) == FOUND[name, mesh]
    report = verify_static(program)
    assert report.ok, report.findings[0]
    assert not report.uncovered
    errors = compare_step(program, *family(name).make())
    assert "loss" in errors and len(errors) > 10
    assert {k: e for k, e in errors.items() if e > RTOL} == {}


def test_rings_carry_activations_alone() -> None:
    """Parameters and their gradients have collectives of their own, which other passes know."""
    program = ringed("t5", "dp=2,tp=2")
    assert sum(rings_in(program).values()) > 10
    results = {r.value for r in program.signature.results if r.kind == "grad"}
    ports = {p.name for p in program.signature.ports}
    for item in program.lowered.main:
        if not isinstance(item, Call):
            assert not is_ring(item)
            continue
        graph = program.lowered.segments[item.segment].graph
        outs = {o for o, out in zip(graph.outputs, item.outs, strict=True) if out in results}
        given = {n for (n, _), arg in zip(graph.inputs, item.args, strict=True) if arg in ports}
        for node in filter(is_ring, graph.nodes):
            assert node.args[1] == "tp"
            assert outs.isdisjoint(node.outs)
            assert node.op != ALL_GATHER_MM.op or node.args[0][0].name not in given
    assert verify_static(program).ok
    errors = compare_step(program, *family("t5").make())
    assert {k: e for k, e in errors.items() if e > RTOL} == {}


@pytest.mark.parametrize("policy", ["full", "selective"])
def test_rings_are_computed_again(policy: Literal["full", "selective"]) -> None:
    found = planned("llama", "dp=2,tp=2")
    plan = replace(found.plan, recompute={"layers_fwd": Recompute(policy, 2)}, microbatches=2)
    with free_rings():
        program = compile_analysed(replace(found, plan=plan), ring=True)
    assert rings_in(program)
    report = verify_static(program)
    assert report.ok, report.findings[0]
    with free_rings():
        whole = compile_analysed(replace(found, plan=replace(plan, microbatches=1)), ring=True)
    errors = compare_step(whole, *family("llama").make())
    assert {k: e for k, e in errors.items() if e > RTOL} == {}


def test_a_ring_takes_several_products() -> None:
    """Those of one gather, and the terms of a sum, with the views between them."""
    found = [ring_of(node) for _, _, node in ring_sites(ringed("llama", "tp=2"))]
    gathers = sorted(len(r.products) for r in found if r is not None and r.gathers)
    scatters = sorted(len(r.products) for r in found if r is not None and not r.gathers)
    assert gathers == [1, 1, 2] and scatters == [1, 2, 3]


def test_every_ring_says_what_it_saves() -> None:
    program = ringed("gpt2", "tp=2")
    notes = [program.notes[name][number].why for name, number, _ in ring_sites(program)]
    assert notes and all("chunks go round tp beside" in n and " us, now " in n for n in notes)
    assert NUMBERED["ring_products"] in program.dumps
    assert "chunks go round tp" in program.dumps[NUMBERED["ring_products"]]


def test_rings_can_be_switched_off() -> None:
    found = planned("llama", "tp=2")
    off = compile_analysed(found, ring=False)
    assert NUMBERED["ring_products"] not in off.dumps and not rings_in(off)
    assert compile_analysed(found).lowered == compile_analysed(found, ring=True).lowered


def test_no_ring_where_nothing_runs_beside_messages() -> None:
    """gloo copies on the cores that compute: chunks would only cost more messages."""
    found = plainly_planned("llama", "tp=4")
    assert found.cluster.device.overlap == 0
    made, off = compile_analysed(found), compile_analysed(found, ring=False)
    assert made.lowered == off.lowered and made.dumps == off.dumps


def test_rings_are_made_where_their_price_is_lower() -> None:
    """Some gain, some lose in the launches of small chunks what they hide, and are left apart."""
    found = planned("llama", "tp=2")
    base = even_cluster()
    kernels = replace(base.device.kernels, depth=0.0)
    slow = replace(
        base,
        device=replace(base.device, kernels=kernels, launch_overhead=4e-5),
        levels=tuple(replace(level, bandwidth=2e7) for level in base.levels),
    )
    apart, made = (compile_analysed(replace(found, cluster=slow), ring=on) for on in (False, True))
    taken = {("layers_fwd", GATHER): 1, ("layers_fwd", SCATTER): 1}
    assert rings_in(made) == taken
    one, two = (estimate_step(p, slow).seconds for p in (apart, made))
    assert two < one


def test_unknown_passes_are_refused() -> None:
    with pytest.raises(UsageError, match="rings"):
        compile_analysed(planned("llama", "tp=2"), rings=True)


def test_pipelines_and_slices_with_rings() -> None:
    with free_rings(), pytest.MonkeyPatch.context() as patch:
        whole = compile_analysed
        patch.setattr("pipelines.compile_analysed", lambda made: whole(made, ring=True))
        patch.setattr("sliced.compile_analysed", lambda made: whole(made, ring=True))
        made = [
            pipeline.__wrapped__("gpt2", 2, "tp=2", "zb-h1", 4),
            program_of("llama", 2, "tp=2", 2, 2),
        ]
    for program in made:
        report = verify_static(program)
        assert report.ok, report.findings[0]


def test_axes_that_are_taken_apart_have_no_rings() -> None:
    """Collectives over them become several, level by level, which a ring would not."""
    plain = compile_analysed(planned("llama", "tp=2"), bucket=False, overlap=False, ring=False)
    ports = [p.name for p in plain.signature.ports if p.kind == "param"]
    grads = [r.value for r in plain.signature.results if r.kind == "grad"]

    def made(*without: str) -> Lowered:
        how = Rings(MeshShape(("tp",), (2,)), lambda n, *_: float(not is_ring(n)), frozenset(without))
        return ring_products(plain.lowered, ports, grads, how, SegmentCache())

    assert made("tp") == plain.lowered
    assert made("dp") != plain.lowered


# -- text and proof -----------------------------------------------------------------------------------------


def test_a_program_with_rings_is_read_back(tmp_path: Path) -> None:
    program = ringed("llama", "dp=2,tp=2")
    save_program(program, tmp_path / "p")
    read = load_program(tmp_path / "p")
    assert program_text(read) == program_text(program)
    assert read.lowered.segments.keys() == program.lowered.segments.keys()
    assert rings_in(read) == rings_in(program)


def _changed(program: Program, name: str, number: int, node: Node) -> Program:
    pairs = pairs_of(program, name)
    pairs[number] = (node, pairs[number][1])
    return with_nodes(program, name, pairs)


def _faults(program: Program) -> Iterator[tuple[str, str, Program]]:
    """(what is wrong, first value of the ring, program)."""
    for name, number, node in ring_sites(program):
        factors, axis, dim, *rest = node.args
        types = program.lowered.segments[name].graph.types()
        edits: list[tuple[str, Node]] = [
            ("axis", replace(node, args=(factors, "dp" if axis == "tp" else "tp", dim, *rest))),
            ("no axis", replace(node, args=(factors, "cp", dim, *rest))),
            ("dim", replace(node, args=(factors, axis, dim + 1, *rest))),
            ("dim before", replace(node, args=(factors, axis, dim - 1, *rest))),
            ("outer", replace(node, kwargs=(("outer", 2 + node.kwarg("outer", 1)),))),
            ("no such keyword", replace(node, kwargs=(("inner", 2),))),
            ("first factor", replace(node, args=((factors[1], *factors[1:]), axis, dim, *rest))),
            ("no factors", replace(node, args=((), axis, dim, *rest))),
        ]
        if node.op == MM_REDUCE_SCATTER.op:
            edits.append(("shape", replace(node, args=(factors, axis, dim, (*rest[0][:-1], 1)))))
            edits.append(("lost term", replace(node, args=(factors[2:], axis, dim, *rest))))
            if len(factors) > 2:
                turned = (*factors[2:4], *factors[:2], *factors[4:])
                edits.append(("order of the sum", replace(node, args=(turned, axis, dim, *rest))))
        alike = [
            k
            for k in range(2, len(factors))
            if node.op == ALL_GATHER_MM.op and types[factors[k].name] == types[factors[1].name]
        ]
        for k in alike[:1]:
            outs = list(node.outs)
            outs[1], outs[k] = outs[k], outs[1]
            edits.append(("swapped products", replace(node, outs=tuple(outs))))
        for what, wrong in edits:
            yield what, node.outs[0], _changed(program, name, number, wrong)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_faults_in_rings_are_caught(name: str) -> None:
    seen = set()
    for mesh in ("dp=2,tp=2", "tp=2"):
        for what, value, wrong in _faults(ringed(name, mesh)):
            report = verify_static(wrong)
            assert not report.ok, (what, value)
            assert "." not in report.findings[0].finding.at.value
            seen.add(what)
    wanted = {"axis", "no axis", "dim", "dim before", "outer", "first factor", "shape", "lost term"}
    assert seen >= wanted | ({"order of the sum", "swapped products"} if name == "llama" else set())


def test_a_dropped_product_is_caught() -> None:
    """Something else is used in place of what a ring gives."""
    program = ringed("llama", "tp=2")
    name, number, node = next(s for s in ring_sites(program) if len(s[2].outs) == 3)
    short = replace(
        node, args=(node.args[0][:-1], *node.args[1:]), outs=node.outs[:-1], types=node.types[:-1]
    )
    pairs = pairs_of(program, name)
    pairs[number] = (short, pairs[number][1])
    for k in range(number + 1, len(pairs)):
        own = pairs[k][0]
        args = tuple(Ref(node.outs[1]) if a == Ref(node.outs[2]) else a for a in own.args)
        pairs[k] = (replace(own, args=args), pairs[k][1])
    outputs = program.lowered.segments[name].graph.outputs
    kept = tuple(node.outs[1] if o == node.outs[2] else o for o in outputs)
    assert not verify_static(with_nodes(program, name, pairs, outputs=kept)).ok


def test_a_ring_that_was_not_to_be_a_sum_is_caught() -> None:
    """A reduce-scatter of products whose factors are whole on every rank adds up the same thing twice."""
    program = ringed("gpt2", "tp=2")
    name, _, node = next(s for s in ring_sites(program) if s[2].op == MM_REDUCE_SCATTER.op)
    segment = program.lowered.segments[name]
    left = node.args[0][0].name
    layouts = {**segment.layouts, left: (R,)}
    wrong = replace(segment, layouts=layouts)
    lowered = replace(program.lowered, segments={**program.lowered.segments, name: wrong})
    report = verify_static(replace(program, lowered=lowered))
    assert not report.ok


# -- running ------------------------------------------------------------------------------------------------


def _ranks(run: Callable[[int, rings.Pass], Any], ways: int) -> list[Any]:
    """What every rank gives, each in a thread of its own, messages by queues."""
    from concurrent.futures import ThreadPoolExecutor
    from queue import Queue

    channels: list[Queue[torch.Tensor]] = [Queue() for _ in range(ways)]

    def rank(k: int) -> Any:
        def pass_on(sent: torch.Tensor, received: torch.Tensor) -> Callable[[], None]:
            channels[(k + 1) % ways].put(sent.clone())

            def finish() -> None:
                received.copy_(channels[k].get(timeout=60))

            return finish

        return run(k, pass_on)

    with ThreadPoolExecutor(ways) as pool:
        return list(pool.map(rank, range(ways)))


@pytest.mark.parametrize("ways", [2, 3, 4])
@pytest.mark.parametrize(
    ("lead", "dim", "outer"),
    [((12,), 0, 1), ((24,), 0, 2), ((1, 12), 1, 1), ((2, 12), 1, 1), ((2, 24, 3), 1, 2)],
)
def test_chunks_that_go_round_give_the_whole(ways: int, lead: tuple[int, ...], dim: int, outer: int) -> None:
    torch.manual_seed(0)
    whole = torch.randn(*lead, 5, dtype=torch.float64)
    weights = [torch.randn(ways, 5, n, dtype=torch.float64) for n in (3, 4)]
    parts = [take_part(whole, dim, ways, k, outer) for k in range(ways)]

    def gather(k: int, pass_on: rings.Pass) -> list[torch.Tensor]:
        return rings.all_gather_mm([parts[k], *(w[k] for w in weights)], dim, outer, ways, k, pass_on)

    for k, (got, *products) in enumerate(_ranks(gather, ways)):
        assert torch.equal(got, whole)
        for product, weight in zip(products, weights, strict=True):
            torch.testing.assert_close(product, whole.flatten(0, -2) @ weight[k])

    rows = whole.flatten(0, -2).shape[0]
    factors = [
        [torch.randn(rows, 6, dtype=torch.float64), torch.randn(6, 5, dtype=torch.float64)] * 2
        for _ in range(ways)
    ]
    total = sum(f[0] @ f[1] + f[2] @ f[3] for f in factors)
    assert isinstance(total, torch.Tensor)

    def scatter(k: int, pass_on: rings.Pass) -> torch.Tensor:
        return rings.mm_reduce_scatter(factors[k], dim, parts[k].shape, outer, ways, k, pass_on)

    for k, part in enumerate(_ranks(scatter, ways)):
        torch.testing.assert_close(part, take_part(total.view(*lead, 5), dim, ways, k, outer))


def test_training_on_four_processes_equals_eager(tmp_path: Path) -> None:
    cases = []
    for name, mesh in (("llama", "tp=4"), ("gpt2", "tp=4"), ("llama", "dp=2,tp=2"), ("t5", "dp=2,tp=2")):
        program = ringed(name, mesh)
        assert rings_in(program)
        folder = tmp_path / f"{name}-{mesh}"
        save_program(program, folder)
        cases.append({"family": name, "mesh": mesh, "program": str(folder), "steps_of": "call"})
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    worker = HERE / "gloo_worker.py"
    run_ranks([str(worker), str(tmp_path / "cases.json"), str(tmp_path / "results.json")])
    rows = json.loads((tmp_path / "results.json").read_text())
    assert len(rows) == len(cases)
    for row in rows:
        assert row["error"] < 1e-4, f"{row['program']}: {row['worst']} is off by {row['error']:.2e}"


# -- prices and memory ---------------------------------------------------------------------------------------


def _price(work: Work) -> float:
    return {CollectiveWork: 2.0, MatmulWork: 3.0, MemoryWork: 0.0}[type(work)]


Made: TypeAlias = "tuple[Node, dict[str, PlacedValue]]"


def _gather(lead: tuple[int, ...] = (1, 64), weights: Sequence[int] = (16,)) -> Made:
    """A gather of ``lead`` rows of 8 over tp, times weights that are divided by columns."""
    x, rows = TensorType((*lead, 8), "f32"), lead[0] * lead[1]
    made = [TensorType((rows, n), "f32") for n in weights]
    names = [f"y{k}" for k in range(len(weights))]
    values = {"x": PlacedValue(x, (Shard(1),)), "g": PlacedValue(x, (R,))}
    for k, (n, type_) in enumerate(zip(weights, made, strict=True)):
        values[f"w{k}"] = PlacedValue(TensorType((8, n), "f32"), (Shard(1),))
        values[f"y{k}"] = PlacedValue(type_, (Shard(1),))
    factors = (Ref("x"), *(Ref(f"w{k}") for k in range(len(weights))))
    return Node(ALL_GATHER_MM.op, (factors, "tp", 1), (), ("g", *names), (x, *made)), values


def _scatter() -> Made:
    type_ = TensorType((64, 8), "f32")
    values = {
        "a": PlacedValue(TensorType((64, 16), "f32"), (Shard(1),)),
        "w": PlacedValue(TensorType((16, 8), "f32"), (Shard(0),)),
        "y": PlacedValue(type_, (Shard(0),)),
    }
    return Node(MM_REDUCE_SCATTER.op, ((Ref("a"), Ref("w")), "tp", 0, (16, 8)), (), ("y",), (type_,)), values


OPS = Ops(Mesh.parse("tp=4"), (0,), Behaviour())


@pytest.mark.parametrize("made", [_gather(), _scatter()])
def test_all_but_the_first_product_are_beside_a_message(made: Made) -> None:
    found = beats(*made, OPS)
    assert sum(isinstance(b.work, CollectiveWork) for b in found) == 3
    assert sum(isinstance(b.work, MatmulWork) for b in found) == 4
    # 4 products of 3 s, messages of 2 s behind three of them
    assert alone(found, _price, 1.0) == 12.0
    assert alone(found, _price, 0.5) == 15.0
    slow = alone(found, lambda w: 5.0 if isinstance(w, CollectiveWork) else _price(w), 1.0)
    assert slow == 3 * 5 + 3


def test_chunks_are_priced_as_the_small_products_they_are() -> None:
    node, values = _gather((1, 64), (16, 32))
    products = [b.work for b in beats(node, values, OPS) if isinstance(b.work, MatmulWork)]
    assert {(p.rows, p.columns, p.depth) for p in products} == {(16, 4, 8), (16, 8, 8)}
    assert sum(p.flop for p in products) * 4 == ring_flop(node, {n: v.type for n, v in values.items()})


def test_copies_are_counted_where_chunks_are_not_in_place() -> None:
    def copied(lead: tuple[int, ...]) -> float:
        works = [b.work for b in beats(*_gather(lead), OPS)]
        return sum(w.nbytes for w in works if isinstance(w, MemoryWork))

    own, made = 64 * 8 * 4 / 4, 64 * 4 * 4
    assert copied((1, 64)) == 2 * own
    # few rows in a piece: pieces are multiplied as one, and what comes of it is put where it belongs
    assert copied((2, 32)) == 4 * 2 * own + 2 * made
    assert room(*_gather((1, 64)), OPS) == 0
    assert room(*_gather((2, 32)), OPS) == 2 * own
    assert room(*_scatter(), OPS) == 2 * 16 * 8 * 4
    for rows, shape in ((32, (1, 16)), (2048, (2, 512))):
        products = [b.work for b in beats(*_gather((2, rows)), OPS) if isinstance(b.work, MatmulWork)]
        assert {(p.batch, p.rows) for p in products} == {shape}


def test_a_hop_is_a_step_of_the_ring() -> None:
    link = AxisLink(1e-6, 1e9, 4)
    assert seconds("hop", 1e6, link) == pytest.approx(1e-6 + 1e-3)
    assert 3 * seconds("hop", 1e6, link) >= seconds("all_gather", 4e6, link)
    assert seconds("hop", 1e6, AxisLink(0.0, 1e9, 1)) == 0.0
    # eight cards of a node carry eight rings of a gather, and one of ours
    assert seconds("hop", 1e6, AxisLink(0.0, 8e9, 16, 1e9, 8)) == pytest.approx(1e-3)


def test_the_simulated_step_follows_the_chunks() -> None:
    """Messages and products of a ring overlap in the timeline, and count as what they are."""
    program = ringed("llama", "tp=2")
    cluster = even_cluster()
    estimate = estimate_step(program, cluster)
    plain = estimate_step(compile_analysed(planned("llama", "tp=2"), ring=False), cluster)
    assert estimate.model_flop == plain.model_flop
    assert sum(estimate.spent.axes.values()) < sum(plain.spent.axes.values())
    node, values = _gather()
    price = pricer(cluster.device, [AxisLink(0.0, 1e8, 4)])
    assert alone(beats(node, values, OPS), price, 1.0) < sum(map(price, OPS.work(node, values)))


@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("overlap", [1.0, 0.25])
@pytest.mark.parametrize("made", [_gather((1, 64), (16, 32)), _scatter()])
def test_a_ring_alone_takes_as_long_as_in_the_timeline(made: Made, overlap: float, late: bool) -> None:
    found = beats(*made, OPS)
    price = pricer(even_cluster().device, [AxisLink(1e-6, 1e8, 4)])
    tasks = tuple(OpTask("y", made[0].op.rpartition(".")[0], b.work, b.after, ()) for b in found)
    player = Player(price, (4,), Habits(overlap=overlap, late=late))
    played = player.play([SegmentCall(Sheet(tasks, (len(tasks) - 1,)), (), ("y",))], (), ())
    assert played.seconds == pytest.approx(alone(found, price, overlap))
    assert played.hidden > 0


def test_beats_wait_for_those_before_them() -> None:
    chain = [Beat(CollectiveWork("hop", 0, 1.0)), Beat(MatmulWork(1, 1, 1, 1, "f32", 1.0), (0,))]
    assert alone(chain, _price, 1.0) == 5.0


# -- words --------------------------------------------------------------------------------------------------


def test_a_ring_is_a_message_of_its_kind() -> None:
    node, _ = _gather()
    assert is_message(node) and is_ring(node) and kind_of(node) == GATHER
    assert ring_of(replace(node, args=node.args[:2])) is None
    assert ring_of(replace(node, kwargs=(("size", 3),))) is None
    assert P != R


def test_the_command_line_switches_rings_off(tmp_path: Path) -> None:
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 2}
    config |= {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    call = ["compile", f"hf:{tmp_path / 'config.json'}", "--mesh", "tp=2", "--seq", "16"]
    call += ["--cluster", "h100-dgx"]
    for more, made in (([], True), (["--no-ring"], False), (["--without", "ring"], False)):
        folder = tmp_path / "-".join(["p", *more])
        result = CliRunner().invoke(app, [*call, *more, "-o", str(folder)], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        assert (NUMBERED["ring_products"] in load_program(folder).dumps) == made


def test_reports_read_rings(tmp_path: Path) -> None:
    folder = tmp_path / "p"
    save_program(ringed("llama", "tp=2"), folder)
    where = ("--cluster", "h100-dgx")
    calls = (
        ("explain", str(folder), "model.layers.0.mlp.down_proj", *where),
        ("explain", str(folder), "model.layers.0.mlp.gate_proj", *where),
        ("explain", str(folder), "model.layers.0.mlp.gate_proj.weight", *where),
        ("inspect", str(folder), "--html", str(tmp_path / "page.html"), *where),
        ("inspect", str(folder), "--rank", "1", *where),
        ("inspect", str(folder), "--timeline", *where),
        ("simulate", str(folder), *where),
    )
    texts = {}
    for call in calls:
        result = CliRunner().invoke(app, call, catch_exceptions=False)
        assert result.exit_code == 0, result.output
        texts[call[0], call[2]] = result.output
    assert "mm_reduce_scatter" in texts["explain", "model.layers.0.mlp.down_proj"]
    assert GATHER in (tmp_path / "page.html").read_text()
    assert load_cluster("h100-dgx").device.overlap > 0
