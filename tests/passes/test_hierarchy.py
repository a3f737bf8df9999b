"""Collectives level by level, second copies of parameters: what is made, and that numbers stay the same."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path

import pytest
from families import family
from lockstep_check import compare_step, lockstep_step
from ranks import HERE, run_ranks
from slow_links import slow_cluster

from autoshard import UsageError
from autoshard.api import compile_analysed, plan
from autoshard.cluster import Cluster, Mesh, load_cluster
from autoshard.cluster.cluster import Level
from autoshard.cluster.levels import levels_of
from autoshard.ir import Call, Graph, Node, Ref, TensorType, refs_of
from autoshard.ir.collectives import axes_of as ir_axes_of
from autoshard.ir.lowered import Lowered, LoweredSegment, PlacedValue
from autoshard.ir.placement import Layout, Partial, R, Shard
from autoshard.passes.partition.allreduce_to_reduce_scatter import keep_part
from autoshard.passes.partition.hierarchy import AxisLevels, check_levels
from autoshard.passes.partition.hpz_secondary_shards import NO_SECONDARY, Secondary
from autoshard.passes.pipeline import NUMBERED
from autoshard.planner.hierarchy_choice import HierarchyOption, hierarchy_options
from autoshard.planner.lowering import lay_out
from autoshard.planner.planned import Planned
from autoshard.program.program import Program
from autoshard.program.store import load_program, save_program
from autoshard.rules.local import MeshShape
from autoshard.search.plan.plan import Recompute
from autoshard.simulate.step import estimate_step
from autoshard.verify.lockstep import verify
from autoshard.verify.static import verify_static
from benchmarks.frontier import crossing, parameter_bytes

# -- which levels an axis crosses ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "mesh", "axis", "expected"),
    [
        (
            "mi250x-frontier",
            "fsdp=384",
            "fsdp",
            (("fsdp_slingshot", 48), ("fsdp_node", 4), ("fsdp_package", 2)),
        ),
        ("mi250x-frontier", "fsdp=48,tp=2", "fsdp", (("fsdp_slingshot", 12), ("fsdp_node", 4))),
        ("mi250x-frontier", "dp=4,fsdp=8", "fsdp", (("fsdp_node", 4), ("fsdp_package", 2))),
        ("mi250x-frontier", "dp=4,fsdp=8", "dp", ()),
        ("mi250x-frontier", "fsdp=2", "fsdp", ()),
        ("mi250x-frontier", "fsdp=12", "fsdp", ()),  # the last node is half full
        ("h100-dgx", "fsdp=64", "fsdp", (("fsdp_infiniband", 8), ("fsdp_nvlink", 8))),
        ("h100-dgx", "fsdp=16,tp=3", "fsdp", ()),
        ("holmes-ib-roce", "fsdp=64", "fsdp", ()),  # unlike parts
    ],
)
def test_levels(name: str, mesh: str, axis: str, expected: tuple[tuple[str, int], ...]) -> None:
    assert levels_of(load_cluster(name), Mesh.parse(mesh), axis) == expected


def test_levels_are_the_wiring_between_the_ranks_of_each_part() -> None:
    """Ranks that differ along the part of a level lie in one group of it, and in different ones below."""
    cluster, mesh = load_cluster("mi250x-frontier"), Mesh.parse("fsdp=32")
    parts = levels_of(cluster, mesh, "fsdp")
    refined = Mesh.parse(str(AxisLevels("fsdp", parts).refined(MeshShape(mesh.names, mesh.sizes))))
    inside = {"fsdp_package": (1, 2), "fsdp_node": (2, 8), "fsdp_slingshot": (8, 32)}
    for axis, (below, within) in inside.items():
        for group in refined.groups(axis):
            assert len({rank // within for rank in group}) == 1
            assert len({rank // below for rank in group}) == len(group)


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ((("a", 2), ("b", 3)), "no refinement"),
        ((("a", 8),), "no refinement"),
        ((("tp", 2), ("b", 4)), "same name"),
    ],
)
def test_refinements_that_do_not_fit(parts: tuple[tuple[str, int], ...], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        check_levels(AxisLevels("fsdp", parts), MeshShape(("fsdp", "tp"), (8, 2)))


# -- wishes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("copy=socket", "no inner level"),
        ("copy=slingshot", "no inner level"),
        ("once", "how copies are made"),
        ("sideways", "is no hierarchy"),
    ],
)
def test_wishes_that_do_not_fit(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        hierarchy_options(text, load_cluster("mi250x-frontier"), Mesh.parse("fsdp=16"), Mesh.parse("fsdp=16"))


def test_one_level_has_no_hierarchy() -> None:
    mesh = Mesh.parse("fsdp=8")
    with pytest.raises(UsageError, match="more than one level"):
        hierarchy_options("levels", load_cluster("h100-dgx"), mesh, mesh)
    assert [w.name for w in hierarchy_options("auto", load_cluster("h100-dgx"), mesh, mesh)] == ["off"]


# -- programs ------------------------------------------------------------------------------------------


def three_levels() -> Cluster:
    nodes = slow_cluster(nodes_of=4)
    return replace(nodes, name="three", levels=(Level("pair", 2, 1e-6, 1e9), *nodes.levels))


def zero3(wish: Planned) -> Planned:
    """The plan with every parameter gathered anew for every use."""
    params = {place: replace(s, keep=False, late=s.stored == s.use) for place, s in wish.plan.params.items()}
    return replace(wish, plan=replace(wish.plan, params=params))


@functools.cache
def planned(mesh: str, name: str = "llama") -> Planned:
    model, inputs = family(name).make()
    return plan(model, mesh, example_inputs=inputs, cluster=three_levels())


@functools.cache
def program(hierarchy: str, mesh: str = "fsdp=8", name: str = "llama", stage: int = 3) -> Program:
    """stage: of ZeRO, 3 or what the plan has."""
    wish = planned(mesh, name)
    return compile_analysed(zero3(wish) if stage == 3 else wish, hierarchy=hierarchy)


def nodes_of(made: Program, phases: tuple[str, ...] = ()) -> list[Node]:
    """Of all calls of these phases, or of all of them."""
    found: list[Node] = []
    for part in made.lowered.parts:
        if phases and part.phase not in phases:
            continue
        for item in made.lowered.of(part):
            if isinstance(item, Call):
                found += made.lowered.segments[item.segment].graph.nodes
            else:
                found.append(item)
    return found


def axes_of(made: Program, kind: str, *phases: str) -> list[str]:
    """Axes of gathers or reductions, in order, each once."""
    found = (str(n.args[1]) for n in nodes_of(made, phases) if n.op.startswith(f"comm.{kind}"))
    return list(dict.fromkeys(found))


NETWORK, NODE, PAIR = "fsdp_network", "fsdp_node", "fsdp_pair"


def test_the_network_goes_first_in_gathers_and_last_in_reductions() -> None:
    made = program("levels")
    assert made.mesh == f"{NETWORK}=2,{NODE}=2,{PAIR}=2"
    assert axes_of(made, "all_gather", "forward") == [NETWORK, NODE, PAIR]
    assert axes_of(made, "reduce_scatter", "backward") == [PAIR, NODE, NETWORK]
    assert "by level: " in made.dumps[NUMBERED["hierarchy"]]


def test_parameters_lie_where_they_lay() -> None:
    flat, made = program("off"), program("levels")
    for port in made.signature.ports:
        (old,), own = flat.lowered.values[port.name].layout, made.lowered.values[port.name].layout
        assert own == (old,) * 3


def test_a_copy_is_kept_from_forward_to_backward() -> None:
    made = program("copy=node")
    assert axes_of(made, "all_gather", "forward") == [NETWORK, NODE, PAIR]
    assert axes_of(made, "all_gather", "backward") == [NODE, PAIR]
    plain, kept = (estimate_step(p, three_levels()) for p in (program("levels"), made))
    assert kept.seconds < plain.seconds
    assert kept.fullest.held.activations > plain.fullest.held.activations


def test_three_levels_of_parameters_gradients_and_optimizer_state() -> None:
    """Parameters in a pair, gradients in a node, what the optimizer keeps over all ranks."""
    made = program("copy=pair,once,gradients=node")
    assert axes_of(made, "all_gather", "gather") == [NETWORK, NODE]
    assert axes_of(made, "all_gather", "forward", "backward") == [PAIR]
    assert axes_of(made, "reduce_scatter", "backward", "reduce") == [PAIR, NODE, NETWORK]
    values = made.lowered.values
    stored = {p.name: values[p.name] for p in made.signature.ports if p.kind == "param"}
    assert all(all(isinstance(p, Shard) for p in v.layout) for v in stored.values())
    last = [n for n in nodes_of(made, ("backward", "reduce")) if n.op.startswith("comm.reduce_scatter")]
    summed = {r for n in last if NETWORK in ir_axes_of(n) for r in refs_of(n)}
    assert summed and all(_split_over(values[v]) == [NODE, PAIR] for v in summed)
    copies = [v for n, v in values.items() if n.endswith("_copy")]
    assert copies and all(_split_over(v) == [PAIR] for v in copies)


def _split_over(value: PlacedValue) -> list[str]:
    axes = (NETWORK, NODE, PAIR)
    return [name for name, p in zip(axes, value.layout, strict=True) if isinstance(p, Shard)]


HIERARCHIES = ("levels", "copy=node", "copy=pair,once,gradients=node", "copy=node,once", "gradients=pair")
#: mesh -> ways that it has
MESHES = {
    "fsdp=8": HIERARCHIES,
    "dp=8": ("levels",),
    "fsdp=4,tp=2": ("levels", "copy=node"),
    "dp=2,fsdp=4": ("levels", "copy=pair,once,gradients=pair"),
}
CASES = [(mesh, way) for mesh, found in MESHES.items() for way in found]


@pytest.mark.parametrize(
    ("mesh", "way", "stage"),
    [*((m, w, 3) for m, w in CASES), *((m, w, 2) for m, w in CASES if "copy" not in w)],
)
def test_numbers_are_those_of_eager(mesh: str, way: str, stage: int) -> None:
    model, inputs = family("llama").make()
    errors = compare_step(program(way, mesh, stage=stage), model, inputs)
    worst = max(errors, key=lambda k: errors[k])
    assert errors[worst] < 1e-5, f"{worst}: {errors[worst]:.2e}"


@pytest.mark.parametrize("way", ["copy=node", "copy=node,once,gradients=node"])
@pytest.mark.parametrize("again", ["", "full", "selective"])
def test_several_microbatches(way: str, again: str) -> None:
    model, inputs = family("llama").make()
    inputs["labels"] = inputs["labels"].clamp(min=3)
    piece = {name: x[:4] for name, x in inputs.items()}
    wish = zero3(plan(model, "fsdp=4", example_inputs=piece, cluster=slow_cluster(nodes_of=2)))
    recompute = {"layers_fwd": Recompute(again, 1)} if again else {}  # type: ignore[arg-type]
    wish = replace(wish, plan=replace(wish.plan, microbatches=2, recompute=recompute))
    made = compile_analysed(wish, hierarchy=way)
    outcome = verify(made, model, (), inputs, steps=1)
    assert outcome.ok and outcome.worst().error < 1e-5


@pytest.mark.parametrize("way", ["levels", "copy=node", "copy=node,once,gradients=node"])
def test_pipelines(way: str) -> None:
    model, inputs = family("llama").make()
    wish = plan(
        model,
        "pp=2,fsdp=4",
        example_inputs=inputs,
        cluster=slow_cluster(nodes_of=2),
        schedule="zb-h1",
        microbatches=2,
    )
    made = compile_analysed(zero3(wish), hierarchy=way)
    assert made.full_mesh == f"pp=2,{NETWORK}=2,{NODE}=2"
    outcome = verify(made, model, (), inputs, steps=1)
    assert outcome.ok and outcome.worst().error < 1e-5


def test_with_fewer_bits_on_every_level() -> None:
    model, inputs = family("llama").make()
    made = compile_analysed(
        zero3(planned("fsdp=8")),
        hierarchy="copy=pair,once,gradients=node",
        allow="int8-weights,int8-gradients",
    )
    assert any("_q_" in n.op for n in nodes_of(made, ("gather",)))
    assert any("_q_" in n.op for n in nodes_of(made, ("backward", "reduce")))
    errors = compare_step(made, model, inputs)
    assert 1e-5 < max(errors.values()) < 0.03


def test_gathers_over_several_levels_are_rounded_once() -> None:
    """What travels inside the node is the buffer that came over the network."""
    model, inputs = family("llama").make()
    wish = zero3(planned("fsdp=8"))
    made = compile_analysed(wish, hierarchy="levels", allow="int8-weights")
    over = {n.args[1] for n in nodes_of(made) if n.op.startswith("comm.all_gather_q")}
    assert over == {(NETWORK, NODE, PAIR)}
    apart, _ = lockstep_step(made, model, inputs)
    whole, _ = lockstep_step(compile_analysed(wish, allow="int8-weights"), model, inputs)
    # the same shards in the same groups: the same numbers
    assert [r.error for r in apart.rounding] == pytest.approx([r.error for r in whole.rounding], rel=1e-9)
    copied = compile_analysed(wish, hierarchy="copy=node", allow="int8-weights")
    over = {n.args[1] for n in nodes_of(copied) if n.op.startswith("comm.all_gather_q")}
    # what forward alone gathers (the embedding) needs no copy
    assert over == {NETWORK, (NODE, PAIR), (NETWORK, NODE, PAIR)}


def test_a_part_of_a_sum_is_scattered_at_once() -> None:
    """What is reduced everywhere and then cut becomes a reduce-scatter; what is used whole stays."""
    layout: Layout = (Partial(),)
    kinds = {"x": layout, "whole": (R,), "part": (Shard(1),), "other": (R,), "cut": (Shard(1),), "seen": (R,)}
    type_ = TensorType((4, 8), "f32")

    def node(op: str, args: tuple[object, ...], out: str, **kwargs: object) -> Node:
        return Node(op, args, tuple(kwargs.items()), (out,), (type_,))

    nodes = (
        node("comm.all_reduce.default", (Ref("x"), "fsdp"), "whole"),
        node("comm.slice.default", (Ref("whole"), "fsdp", 1), "part", outer=2),
        node("comm.all_reduce.default", (Ref("x"), "fsdp"), "other"),
        node("comm.slice.default", (Ref("other"), "fsdp", 1), "cut"),
        node("aten.neg.default", (Ref("other"),), "seen"),
    )
    graph = Graph("bwd", (("x", type_),), nodes, ("part", "cut", "seen"))
    before = Lowered({"bwd": LoweredSegment(graph, dict(kinds), {})}, (), {}, ())
    after = keep_part(before).segments["bwd"]
    scattered = node("comm.reduce_scatter.default", (Ref("x"), "fsdp", 1), "part", outer=2)
    assert after.graph.nodes == (scattered, *nodes[2:])
    assert "whole" not in after.layouts and "other" in after.layouts


def test_copies_of_what_stays_gathered_are_refused() -> None:
    with pytest.raises(UsageError, match="cannot be laid out") as caught:
        program("copy=node", stage=2)
    assert "keeps parameters gathered" in str(caught.value)


def test_uneven_sizes_are_refused_by_name() -> None:
    with pytest.raises(UsageError, match="cannot be laid out") as caught:
        program("levels", "fsdp=8", "gpt2")  # a vocabulary of 97
    assert "split unevenly" in str(caught.value)


# -- proved without running ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mesh", "way", "allow"),
    [
        ("fsdp=8", "levels", ""),
        ("fsdp=8", "copy=node", "int8-weights"),
        ("fsdp=8", "copy=pair,once,gradients=node", "int8-weights,int4-gradients"),
        ("dp=8", "levels", ""),
        ("fsdp=4,tp=2", "copy=node", ""),
    ],
)
def test_programs_are_proved(mesh: str, way: str, allow: str) -> None:
    made = compile_analysed(zero3(planned(mesh)), hierarchy=way, allow=allow)
    report = verify_static(made, cluster=three_levels())
    assert not report.findings
    assert all(c.covered for c in report.checked)


def _broken(node: Node, fault: str) -> Node | None:
    """A collective with something wrong in it; None if it cannot have that fault."""
    gathers, rounds = "all_gather" in node.op, "_q_" in node.op
    args = node.args
    if fault == "other axis" and args[1] == NETWORK and gathers and not rounds:
        return replace(node, args=(args[0], NODE, *args[2:]))
    if fault == "other blocks" and args[1] == NODE and not gathers and "reduce_scatter" in node.op:
        wheres = tuple((d, o // 2, i, s) for d, o, i, s in args[2])
        return replace(node, args=(*args[:2], wheres, *args[3:]))
    if fault == "axes in another order" and isinstance(args[1], tuple):
        return replace(node, args=(args[0], args[1][::-1], *args[2:]))
    if fault == "an axis left out" and isinstance(args[1], tuple):
        return replace(node, args=(args[0], args[1][1:], *args[2:]))
    if fault == "bits that do not exist" and rounds:
        return replace(node, args=(*args[:3], tuple(b and 5 for b in args[3]), args[4]))
    if fault == "groups that do not exist" and rounds:
        return replace(node, args=(*args[:4], 100))
    return None


@pytest.mark.parametrize(
    ("fault", "allow"),
    [
        ("other axis", ""),
        ("other blocks", ""),
        ("axes in another order", "int8-weights"),
        ("an axis left out", "int8-weights"),
        ("bits that do not exist", "int8-gradients"),
        ("groups that do not exist", "int8-weights"),
    ],
)
def test_faults_are_found(fault: str, allow: str) -> None:
    made = compile_analysed(zero3(planned("fsdp=8")), hierarchy="levels", allow=allow)
    for name, segment in made.lowered.segments.items():
        for k, node in enumerate(segment.graph.nodes):
            wrong = _broken(node, fault) if node.op.startswith("comm.") else None
            if wrong is None:
                continue
            nodes = (*segment.graph.nodes[:k], wrong, *segment.graph.nodes[k + 1 :])
            broken = replace(segment, graph=replace(segment.graph, nodes=nodes))
            segments = {**made.lowered.segments, name: broken}
            report = verify_static(replace(made, lowered=replace(made.lowered, segments=segments)))
            assert "collective" in {f.finding.rule for f in report.findings}
            return
    raise AssertionError(f"no collective can have {fault}")


# -- the choice ----------------------------------------------------------------------------------------


def test_the_shortest_step_wins() -> None:
    made = program("auto")
    steps = {way: estimate_step(program(way), three_levels()).seconds for way in ("off", *HIERARCHIES)}
    assert estimate_step(made, three_levels()).seconds <= min(steps.values())
    assert made.mesh != "fsdp=8"
    head = made.dumps[NUMBERED["hierarchy"]].splitlines()
    assert head[0].startswith("# off") and "step " in head[0]


def test_uniform_wiring_is_left_alone() -> None:
    model, inputs = family("llama").make()
    wish = plan(model, "fsdp=4", example_inputs=inputs, cluster=slow_cluster())
    assert compile_analysed(wish, hierarchy="auto").mesh == "fsdp=4"


def test_too_little_memory_rules_the_fastest_out() -> None:
    """With room for no more than the way that holds least, that one is taken, though it is slower."""
    wish = zero3(planned("fsdp=8"))
    steps = [estimate_step(program(way), three_levels()) for way in ("off", *HIERARCHIES)]
    least = min(step.fullest.peak for step in steps)
    free = estimate_step(program("auto"), three_levels())
    assert free.fullest.peak > least
    tight = replace(wish, plan=replace(wish.plan, budget=int(least)))
    made = estimate_step(compile_analysed(tight, hierarchy="auto"), three_levels())
    assert made.fullest.peak <= least and made.seconds > free.seconds


def test_a_stored_program_reads_back(tmp_path: Path) -> None:
    made = program("copy=pair,once,gradients=node")
    save_program(made, tmp_path / "p")
    again = load_program(tmp_path / "p")
    assert again.mesh == made.mesh
    assert [(n.op, n.args) for n in nodes_of(again)] == [(n.op, n.args) for n in nodes_of(made)]


@pytest.mark.parametrize(
    ("levels", "secondary", "microbatches", "expected"),
    [
        (False, NO_SECONDARY, 1, 3 * 7 / 8),  # two gathers and a reduction, in rings of eight
        (True, NO_SECONDARY, 1, 3 / 2),  # of which half of the ranks are in the other node
        (True, Secondary((NETWORK,)), 1, 2 / 2),
        (True, NO_SECONDARY, 4, 4 * 3 / 2),
        (True, Secondary((NETWORK, NODE), True, (NETWORK,)), 4, 2 / 2),
    ],
)
def test_what_comes_into_a_node(
    levels: bool, secondary: Secondary, microbatches: int, expected: float
) -> None:
    wish = zero3(planned("fsdp=8"))
    wish = replace(wish, plan=replace(wish.plan, microbatches=microbatches))
    apart = (AxisLevels("fsdp", levels_of(three_levels(), Mesh.parse("fsdp=8"), "fsdp")),) if levels else ()
    made = lay_out(wish.plan, wish.analysis, wish.cluster, HierarchyOption("", apart, secondary))
    # the head's weight and the embedding are used once each way; activations are never sent
    assert crossing(made, three_levels()) / parameter_bytes(made) == pytest.approx(expected, rel=0.07)


# -- four processes ------------------------------------------------------------------------------------

#: way, allowed precision, bounds of the relative error of losses and parameters after three AdamW steps
RUNS = [
    ("levels", "", 0.0, 1e-4),
    ("copy=node", "", 0.0, 1e-4),
    ("copy=node,once,gradients=node", "", 0.0, 1e-4),
    ("off", "int8-weights,int8-gradients", 1e-6, 0.1),
    ("levels", "int8-weights", 1e-6, 0.1),
    ("copy=node,once,gradients=node", "int8-weights,int4-gradients", 1e-6, 0.4),
]


def test_training_on_four_processes(tmp_path: Path) -> None:
    """One start of four gloo processes trains all of them, with clipped gradients, beside eager."""
    model, inputs = family("llama").make()
    wish = zero3(plan(model, "fsdp=4", example_inputs=inputs, cluster=slow_cluster(nodes_of=2)))
    cases = []
    for number, (way, allow, _, _) in enumerate(RUNS):
        folder = tmp_path / str(number)
        save_program(compile_analysed(wish, hierarchy=way, allow=allow), folder)
        case = {"family": "llama", "mesh": "fsdp=4", "program": str(folder), "steps_of": "call"}
        cases.append(case)
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    run_ranks([str(HERE / "gloo_worker.py"), str(tmp_path / "cases.json"), str(tmp_path / "results.json")])
    rows = json.loads((tmp_path / "results.json").read_text())
    for (way, allow, least, most), row in zip(RUNS, rows, strict=True):
        assert least <= row["error"] < most, f"{way} {allow}: {row['worst']} is off by {row['error']:.2e}"
        assert row["loss"] < max(1e-5, most / 10), f"{way} {allow}: loss is off by {row['loss']:.2e}"
