"""The planner against the truth: its parts by definition, its answer against every configuration there is."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
import torch
from families import BATCH, family
from hypothesis import given
from hypothesis import strategies as st
from planned import analysed
from torch import nn
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

import autoshard
from autoshard.capture.capture import capture
from autoshard.cluster import Mesh, load_cluster, mesh_candidates
from autoshard.cost.step_time import (
    Exposure,
    Overlap,
    StepSums,
    busy_seconds,
    dot,
    exposure_of,
    slot_seconds,
    step_time,
    weights,
)
from autoshard.errors import BatchError, InfeasibleError
from autoshard.ir import Folded, TensorType, refs_of
from autoshard.ir.local_bytes import held_numel
from autoshard.ir.row_tiles import TILES, tiles_of
from autoshard.planner.analysis import analyse
from autoshard.planner.fingerprint import fingerprint
from autoshard.search.plan.plan import Recompute
from autoshard.search.problem.cost_terms import AssignmentCosts, Time, compose, profile
from autoshard.search.problem.decisions import NodeVar, ParamState, ParamVar
from autoshard.search.problem.problem import Model, batch_of, model_flop
from autoshard.search.problem.rescale_batch import NotRescalable, with_batch
from autoshard.search.select.choose import choose
from autoshard.search.select.request import CandidateSolution, SearchRequest
from autoshard.search.solve.configuration import data_ways, microbatch_sizes
from autoshard.search.solve.formulate import ShardingProblem, formulate, layer_calls
from autoshard.search.solve.pipeline_model import Pipe
from autoshard.search.solve.refit_params import refit
from autoshard.search.solve.solve_placements import PlacementSolution, place
from autoshard.search.solve.step_config import StepConfig
from autoshard.search.solve.tune import QUICK, tune
from autoshard.solver.network import InfeasibleNetwork
from autoshard.verify.lockstep import verify

# -- another batch -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gpt2-odd", "mixtral", "bert"])
def test_a_scaled_model_is_the_captured_one(name: str) -> None:
    """Scaled from 4 to 8 sequences, it is what a capture of 8 gives."""
    model, inputs = family(name).make()
    small = analyse(capture(model, (), {k: x[: BATCH // 2] for k, x in inputs.items()}))
    found, wanted = with_batch(small.model, BATCH), analysed(name)
    assert small.model.folded.segments != found.folded.segments
    for segment, graph in found.folded.segments.items():
        assert graph.types() == wanted.folded.segments[segment].types()
    for key, rule in found.rules.items():
        assert rule.sizes == wanted.rules[key].sizes, key
        assert rule.flops == pytest.approx(wanted.rules[key].flops, rel=1e-12), key
    assert found.digits == wanted.digits
    for place_, group in found.flow.classes.items():
        assert group.ports == wanted.flow.classes[place_].ports
    assert found.folded.joint.ports == wanted.folded.joint.ports
    again = fingerprint(found.folded, found.flow, found.rules, found.digits)
    assert small.fingerprint == again == wanted.fingerprint


def _gemma3(vocabulary: int = 96) -> tuple[nn.Module, dict[str, Any]]:
    """Norms around attention and MLP, of which what is wide keeps its sequences in a dim of their own."""
    sizes = {"hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 3, "head_dim": 8}
    heads = {
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "vocab_size": vocabulary,
        "sliding_window": 4,
    }
    ids = torch.randint(3, 96, (BATCH, 12))
    model = Gemma3ForCausalLM(Gemma3TextConfig(**sizes, **heads)).bfloat16()
    return model, {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize("name", ["llama", "gpt2-odd", "t5", "gemma3"])
@pytest.mark.parametrize("batch", [BATCH // 2, 2])
def test_bodies_of_tiles_are_scaled_with_the_model(name: str, batch: int) -> None:
    model, inputs = _gemma3() if name == "gemma3" else family(name).make()
    whole, part = (
        analyse(capture(model, (), {k: x[:size] for k, x in inputs.items()}), tile_rows=3)
        for size in (BATCH, batch)
    )
    scaled = with_batch(whole.model, batch)
    bodies = [_bodies(each) for each in (whole.folded, scaled.folded, part.folded)]
    assert bodies[0] and bodies[0] != bodies[1] == bodies[2]
    assert model_flop(scaled)[0] == pytest.approx(model_flop(part.model)[0])


def test_tiles_of_uneven_weights_hold_their_sums_in_full() -> None:
    """Sums in bf16 are kept in fp32, of whatever part of the weights a rank has."""
    model, inputs = _gemma3(4001)
    uneven = {k: x[:2, :11] for k, x in inputs.items()}
    planned = autoshard.plan(
        model,
        "tp=3",
        example_inputs=uneven,
        cluster="cpu-gloo",
        tile_rows=3,
        baselines=False,
        pins=("model.embed_tokens.weight=tp:S(0)",),
    )
    assert planned.peak is not None and planned.peak.bytes > planned.peak.held.total


def _bodies(folded: Folded) -> list[Sequence[TensorType]]:
    """Types of all values in tiles."""
    nodes = [node for graph in folded.segments.values() for node in graph.nodes if node.op == TILES]
    return [tuple(tiles_of(node).body.types().values()) for node in nodes]


@pytest.mark.parametrize("name", ["llama", "gpt2-odd", "mixtral", "bert"])
def test_a_model_scaled_to_one_sequence_is_like_the_captured_one(name: str) -> None:
    """One sequence is no factor of anything; what is computed is what a capture of it computes."""
    model, inputs = family(name).make()
    wanted = analyse(capture(model, (), {k: x[:1] for k, x in inputs.items()}))
    found = with_batch(analysed(name).model, 1)
    assert not found.digits.batch and not wanted.digits.batch
    for (segment, number), rule in found.rules.items():
        graph = found.folded.segments[segment]
        node, types = graph.nodes[number], graph.types()
        rule.check([types[r] for r in refs_of(node)], node.types)
        assert min(rule.sizes, default=2) > 1, node
    assert _products(found) == _products(wanted.model)
    with pytest.raises(NotRescalable, match="one sequence"):
        with_batch(wanted.model, 2)
    with pytest.raises(NotRescalable, match="no batch"):
        with_batch(found, 0)


def _products(model: Model) -> Counter[object]:
    """How often a step computes what is worth counting, by op and sizes of its factors."""
    counts = model.folded.counts()
    found: Counter[object] = Counter()
    for (segment, number), rule in model.rules.items():
        if rule.flops:
            op = model.folded.segments[segment].nodes[number].op
            found[op, tuple(sorted(rule.sizes)), rule.flops] += counts[segment]
    return found


@pytest.mark.parametrize("mesh", ["tp=4", "pp=2,tp=2"])
def test_microbatches_of_one_sequence_equal_eager(mesh: str) -> None:
    """Found from a capture of the whole batch, placed on one of a single sequence."""
    model, inputs = family("llama").make()
    inputs["labels"] = inputs["labels"].clamp(min=3)  # as many labels in every microbatch
    made = autoshard.plan(model, mesh, example_inputs=inputs, global_batch=BATCH, microbatches=BATCH)
    assert made.plan.batch == 1 and made.plan.microbatches == BATCH
    assert (
        batch_of(made.analysis.folded) == 1
        and made.plan.optimality.dual_bound <= made.solution.configuration_bound
    )
    # other meshes are searched with the whole batch: a graph of one sequence does not tell which dim is its
    assert batch_of(made.searched.folded) == BATCH
    request, wide = SearchRequest(batch=BATCH), [Mesh.parse("fsdp=2,tp=2"), Mesh.parse("fsdp=4")]
    with pytest.raises(BatchError):  # not as if they were slower
        choose(made.analysis.model, wide, made.cluster, request, known=made.incumbent)
    program = autoshard.compile(model, made).program
    assert verify(program, model, (), inputs, steps=1).ok


def test_one_sequence_is_planned_wherever_a_mesh_serves() -> None:
    """12 devices have no tp that divides nodes of 8, and one sequence has no data axis."""
    model, inputs = family("llama").make()
    made = autoshard.plan(model, "h100-dgx", example_inputs=inputs, devices=12, global_batch=1)
    mesh = Mesh.parse(made.plan.mesh)
    assert mesh.world_size == 12 and data_ways(mesh) == 1 and made.plan.batch == 1


def test_a_plan_with_microbatches_equals_eager() -> None:
    """Planned from a capture of the whole batch, compiled from one of a microbatch."""
    model, inputs = family("llama").make()
    inputs["labels"] = inputs["labels"].clamp(min=3)  # as many labels in every microbatch
    options = {"example_inputs": inputs, "global_batch": BATCH, "recompute": False}
    free = autoshard.plan(model, "dp=2,tp=2", **options)
    assert free.solution is not None and free.plan.microbatches == 1
    limit = int(0.65 * free.solution.placements.bytes)
    made = autoshard.plan(model, "dp=2,tp=2", memory=limit, **options)
    assert made.solution is not None and made.solution.placements.bytes <= limit
    assert made.plan.microbatches > 1 and made.plan.microbatches * made.plan.batch == BATCH
    program = autoshard.compile(model, made).program
    assert program.microbatches == made.plan.microbatches
    assert verify(program, model, (), inputs, steps=1).ok


# -- the time of a step ------------------------------------------------------------------------------------

seconds = st.floats(0.0, 10.0)
shares = st.floats(0.0, 1.0)
all_sums = st.builds(StepSums, **{f.name: seconds for f in fields(StepSums)})
overlaps = st.builds(
    Overlap, microbatches=st.integers(1, 9), share=shares, edge=st.floats(0.0, 0.9), beside=shares
)
exposures = st.builds(Exposure, shares, shares, shares, shares, shares)
EACH = ("talk", "talk_backward", "gather_forward", "gather_backward", "reduce")
COMMUNICATION = (*EACH, "first", "last", "once")


@given(all_sums, overlaps, exposures)
def test_weights_bound_the_step_from_below(sums: StepSums, how: Overlap, exposure: Exposure) -> None:
    total = step_time(sums, how).total
    assert dot(weights(how, exposure), sums) <= total * (1 + 1e-12) + 1e-12
    assert dot(weights(how, exposure_of(sums, how)), sums) == pytest.approx(total, rel=1e-12, abs=1e-12)


@given(all_sums, overlaps, st.sampled_from(COMMUNICATION), seconds)
def test_more_communication_is_never_faster(sums: StepSums, how: Overlap, name: str, more: float) -> None:
    longer = replace(sums, **{name: getattr(sums, name) + more})
    before, after = step_time(sums, how), step_time(longer, how)
    assert after.total >= before.total - 1e-9
    assert after.exposed >= before.exposed - 1e-9
    assert after.compute == before.compute


@given(all_sums, overlaps)
def test_without_overlap_everything_is_exposed(sums: StepSums, how: Overlap) -> None:
    step, m = step_time(sums, replace(how, share=0.0)), how.microbatches
    each = sum(getattr(sums, n) for n in EACH)
    once = sums.first + sums.last + sums.once
    assert step.exposed == pytest.approx(m * each + once, rel=1e-9, abs=1e-9)
    assert step.hidden == pytest.approx(0.0, abs=1e-9)
    assert step.total == pytest.approx(step.compute + step.exposed + sums.update, rel=1e-12)


def test_a_window_hides_its_share() -> None:
    """Two microbatches by hand: 3 s to gather in each beside 2 s of computing, of which half hides."""
    sums = StepSums(work_forward=2.0, gather_forward=3.0, first=1.0, update=0.5)
    step = step_time(sums, Overlap(2, share=0.5))
    # the first microbatch gathers 4 s, the second 3 s, and 1 s of each hides
    assert (step.compute, step.exposed, step.hidden, step.total) == (4.0, 3.0 + 2.0, 2.0, 9.5)
    assert step_time(StepSums(), Overlap(1)).total == 0.0


def test_what_is_done_once_beside_several_microbatches_is_bare() -> None:
    """Gathers for a whole step, and reductions once a step, are parts of their own then."""
    taken = AssignmentCosts(
        {Time("work"): 8.0, Time("work", True): 8.0, Time("first"): 1.0, Time("last", True): 2.0}, {}
    )
    one, several = (StepConfig(m, {"f": 3}, overlap=1.0) for m in (1, 4))
    assert one.step(taken).hidden > 0 and one.sums(taken).once == 0.0
    assert several.step(taken).exposed == 3.0 and several.step(taken).hidden == 0.0
    # the weights say the same
    found = several.time_weight(several.exposure(taken))
    assert sum(found(k) * s for k, s in taken.seconds.items()) == pytest.approx(several.step(taken).total)
    # a pipeline gathers before its first microbatch and reduces behind its last, were it the only one
    piped = replace(one, pipe=Pipe(2, "1f1b"))
    assert piped.sums(taken).once == 3.0


# -- networks from terms -----------------------------------------------------------------------------------


@functools.cache
def _calls(name: str) -> Mapping[str, int]:
    return layer_calls(analysed(name).folded)


def _setting(name: str, microbatches: int, cluster: str) -> StepConfig:
    return StepConfig(microbatches, _calls(name), overlap=load_cluster(cluster).device.overlap)


@functools.cache
def _posed(name: str, mesh: str, batch: int, cluster: str) -> ShardingProblem:
    shape, model = Mesh.parse(mesh), analysed(name).model
    setting, machine = _setting(name, 1, cluster), load_cluster(cluster)
    return formulate(with_batch(model, batch), shape, machine, setting, merge=len(shape.axes) > 1)


def _policies(name: str) -> Iterator[dict[str, Recompute]]:
    """Every policy for every number of calls of every kind of layer."""
    options: list[list[Recompute | None]] = [
        [None, *(Recompute(p, n) for p in ("selective", "full") for n in range(1, calls + 1))]  # type: ignore[arg-type]
        for calls in _calls(name).values()
    ]
    for combo in product(*options):
        yield {s: r for s, r in zip(_calls(name), combo, strict=True) if r is not None}


@given(
    st.lists(st.floats(0, 10), min_size=10, max_size=10),
    st.integers(1, 64),
    st.floats(0, 30),
    st.floats(0, 5),
)
def test_a_schedule_only_says_how_long_ranks_wait(
    seconds: list[float], stages: int, filling: float, hops: float
) -> None:
    sums, how = StepSums(*seconds), Overlap(8, 0.6, 0.1, 0.5, stages, 3.0, 0.25)
    busy = busy_seconds(sums, how)
    total = step_time(sums, replace(how, filling=filling, hops=hops)).total
    assert total == busy + (filling * slot_seconds(sums, how) / stages + hops)
    parts = [StepSums(**{f.name: getattr(sums, f.name)}) for f in fields(StepSums)]
    assert sum(parts, StepSums()) == sums


@pytest.mark.parametrize(("talk", "beside", "exposed"), [(2.0, 0.5, 0.4), (8.0, 0.5, 4.0), (2.0, 0.0, 2.0)])
def test_gradients_of_parameters_hide_messages_of_backward(
    talk: float, beside: float, exposed: float
) -> None:
    """At most as long as they are computed; nothing is hidden where they are computed apart."""
    sums, how = (
        StepSums(work_forward=5.0, work_backward=10.0, talk_backward=talk),
        Overlap(3, 0.8, 0.1, beside),
    )
    step = step_time(sums, how)
    assert (step.compute, step.exposed, step.exposed + step.hidden) == pytest.approx(
        (45, 3 * exposed, 3 * talk)
    )


@pytest.mark.parametrize(("name", "mesh"), [("llama", "fsdp=2,tp=2"), ("mixtral", "fsdp=4")])
def test_composed_networks_add_up(name: str, mesh: str) -> None:
    """Seconds and bytes of a network are the weighted sums of what an assignment takes."""
    problem = _posed(name, mesh, BATCH, "cpu-gloo").problem
    free = replace(problem.terms, hard={})  # else next to no random assignment is allowed
    rng = np.random.default_rng(0)
    for number, policy in enumerate(_policies(name)):
        setting = StepConfig(1 + number % 3, _calls(name), policy, overlap=0.5)
        states = tuple(int(rng.integers(0, n)) for n in free.states)
        bound = Exposure(*rng.random(4))
        taken = profile(free, states)
        network = setting.network(free, bound)
        weigh = setting.time_weight(bound)
        wanted = sum(weigh(key) * value for key, value in taken.seconds.items())
        held = sum(setting.bytes_weight(key) * value for key, value in taken.bytes.items())
        assert wanted > 0 and held > 0
        assert network.seconds_of(states) == pytest.approx(wanted, rel=1e-9)
        assert network.bytes_of(states) == pytest.approx(held, rel=1e-9)
        assert setting.held(taken).total == pytest.approx(held, rel=1e-9)
        # the sums that the step is made of lose nothing
        assert dot(weights(setting.overlap_model, bound), setting.sums(taken)) == pytest.approx(
            wanted, rel=1e-9
        )
        assert wanted <= setting.step(taken).total * (1 + 1e-9)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_refitting_changes_parameters_alone_and_fits(share: float) -> None:
    """It is at least as fast as the leanest life of every parameter."""
    problem = _posed("llama", "fsdp=2,tp=2", BATCH, "cpu-gloo").problem
    setting = _setting("llama", 2, "cpu-gloo")
    free = place(problem, setting, None)
    network, params = free.network, [isinstance(v, ParamVar) for v in problem.variables]
    found = refit(problem, network, free.states, float("inf"))
    assert found is not None and network.seconds_of(found) <= network.seconds_of(free.states)
    lean = refit(problem, network, free.states, free.bytes)
    held = [
        min(float(m[s]) for s in range(len(m))) if param else float(m[state])
        for m, state, param in zip(network.memory, free.states, params, strict=True)
    ]
    budget = sum(held) + share * (free.bytes - sum(held))
    assert sum(held) < free.bytes and lean is not None
    fitted = refit(problem, network, free.states, budget)
    assert fitted is not None and network.bytes_of(fitted) <= budget
    assert network.seconds_of(fitted) >= network.seconds_of(lean)
    assert all(a == b for a, b, param in zip(fitted, free.states, params, strict=True) if not param)
    assert refit(problem, network, free.states, 0.99 * sum(held)) is None


def test_forbidden_pairs_stay_forbidden_whatever_the_weights() -> None:
    terms = _posed("llama", "fsdp=2,tp=2", BATCH, "cpu-gloo").problem.terms
    (u, v), wall = next((pair, w) for pair, w in terms.hard.items() if np.isinf(w).any())
    network = compose(terms, lambda key: 0.0, lambda key: 0.0)
    assert (np.isinf(network.edges[u, v]) == np.isinf(wall)).all()
    mask = np.full(terms.states[u], np.inf)
    mask[0] = 0.0
    pinned = compose(
        terms, lambda key: 0.0, lambda key: 0.0, [mask if k == u else None for k in range(u + 1)]
    )
    assert pinned.unary[u].tolist() == mask.tolist()


# -- the best of everything --------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Candidate:
    """A configuration. least: seconds that it does not go below, in any memory and with any recomputation."""

    formulated: ShardingProblem
    setting: StepConfig
    least: float


@functools.cache
def _candidates(name: str, cluster: str, ranks: int) -> tuple[_Candidate, ...]:
    """Every mesh, microbatch and recomputation, those first that are fast if memory is no limit."""
    found = []
    for mesh in mesh_candidates(load_cluster(cluster), ranks):
        for batch in (b for b in microbatch_sizes(mesh, BATCH) if b >= 2):
            formulated = _posed(name, str(mesh), batch, cluster)
            bare = _setting(name, BATCH // batch, cluster)
            # what runs again only adds work, and a step never gets shorter by more work
            least = place(formulated.problem, bare, None).lower_bound
            found += [_Candidate(formulated, replace(bare, recompute=p), least) for p in _policies(name)]
    return tuple(sorted(found, key=lambda c: c.least))


def _exhaustive(name: str, cluster: str, ranks: int, budget: int) -> PlacementSolution:
    """The best of all within the budget: those that little work does not rule out get full limits."""
    best: PlacementSolution | None = None
    open_: list[tuple[float, _Candidate]] = []
    for candidate in _candidates(name, cluster, ranks):
        if best is not None and candidate.least >= best.seconds:
            break
        try:
            placed = place(candidate.formulated.problem, candidate.setting, budget, limits=QUICK, rounds=2)
        except InfeasibleNetwork:
            continue
        open_.append((placed.lower_bound, candidate))
        if best is None or placed.seconds < best.seconds:
            best = placed
    assert best is not None
    for least, candidate in sorted(open_, key=lambda pair: pair[0]):
        if least < best.seconds:
            placed = place(candidate.formulated.problem, candidate.setting, budget)
            best = placed if placed.seconds < best.seconds else best
    return best


@functools.cache
def _chosen(name: str, cluster: str, ranks: int, budget: int | None) -> CandidateSolution:
    machine = load_cluster(cluster)
    ask = SearchRequest(batch=BATCH, budget=budget)
    return choose(analysed(name).model, mesh_candidates(machine, ranks), machine, ask)


@pytest.mark.parametrize(
    ("name", "cluster", "ranks", "share"),
    [
        ("llama", "h100-dgx", 4, 1.0),
        ("llama", "h100-dgx", 4, 0.7),
        ("llama", "h100-dgx", 4, 0.45),
        ("gpt2", "h100-dgx", 4, 1.0),
        ("gpt2", "h100-dgx", 4, 0.7),
        ("gpt2", "h100-dgx", 4, 0.45),
        ("gpt2", "h100-dgx", 8, 0.7),
        pytest.param("llama", "cpu-gloo", 4, 0.7),
    ],
)
def test_nothing_is_faster(name: str, cluster: str, ranks: int, share: float) -> None:
    """The plan is the best of every mesh, microbatch and recomputation, each placed with full limits."""
    budget = int(share * _chosen(name, cluster, ranks, None).placements.bytes)
    best, found = _exhaustive(name, cluster, ranks, budget), _chosen(name, cluster, ranks, budget)
    assert found.placements.bytes <= budget
    assert found.bound <= best.seconds * (1 + 1e-9)
    assert found.placements.seconds == pytest.approx(best.seconds, rel=1e-9)


def test_gradients_that_wait_are_as_small_as_the_parameter_in_use() -> None:
    """No more is counted for them; what backward makes in full for every rank of tp is reduced at once."""
    formulated = _posed("llama", "fsdp=2,tp=2", 4, "h100-dgx")
    problem, sizes = formulated.problem, formulated.mesh.sizes
    seen = 0
    for key, group in formulated.model.flow.classes.items():
        target = problem.index[key]
        for segment, value in group.grads:
            nodes = formulated.model.folded.segments[segment].nodes
            at = [(k, n.outs.index(value)) for k, n in enumerate(nodes) if value in n.outs]
            if not at or ("node", segment, at[0][0]) not in problem.index:
                continue
            maker, position = problem.index["node", segment, at[0][0]], at[0][1]
            wall = problem.terms.hard.get((min(maker, target), max(maker, target)))
            made, strategy = problem.variables[maker], problem.variables[target]
            assert isinstance(made, NodeVar)
            assert isinstance(strategy, ParamVar)
            for (m, how), (p, state) in product(enumerate(made.states), enumerate(strategy.states)):
                layout = how.outputs[position]
                if not state.late or layout is None:
                    continue
                if wall is not None and np.isinf(wall[m, p] if maker < target else wall[p, m]):
                    continue
                seen += 1
                given, used = (held_numel(group.first.type.shape, x, sizes) for x in (layout, state.use))
                assert given <= used
    assert seen > 100


# -- ZeRO --------------------------------------------------------------------------------------------------


def _deep_llama() -> nn.Module:
    """Six layers: gathering two at a time holds less than keeping them all."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 88, "vocab_size": 96, "max_position_embeddings": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=6, **sizes, **heads))


@functools.cache
def _sharded() -> ShardingProblem:
    """Parameters sharded over four ranks, on links that are too slow to hide a gather."""
    _, inputs = family("llama").make()
    found = analyse(capture(_deep_llama(), (), inputs))
    setting = StepConfig(1, layer_calls(found.folded), overlap=0.0)
    mesh, cluster = Mesh.parse("dp=1,fsdp=4"), load_cluster("cpu-gloo")
    return formulate(found.model, mesh, cluster, setting, merge=True)


def _strategies(formulated: ShardingProblem, states: Sequence[int]) -> list[tuple[ParamState, bool, float]]:
    """Of trained parameters: (life, whether anything is gathered, bytes)."""
    found = []
    for variable, state in zip(formulated.problem.variables, states, strict=True):
        if isinstance(variable, ParamVar) and formulated.model.flow.classes[variable.place].grads:
            group, strategy = formulated.model.flow.classes[variable.place], variable.states[state]
            gathered = strategy.stored != formulated.problem.axes.to_mesh(strategy.use)
            found.append((strategy, gathered, float(len(group.ports) * group.first.type.nbytes)))
    return found


def _stages(formulated: ShardingProblem, states: Sequence[int]) -> dict[int, float]:
    """ZeRO stage -> bytes of the parameters in it."""
    found = dict.fromkeys((1, 2, 3), 0.0)
    for strategy, gathered, size in _strategies(formulated, states):
        if gathered:
            found[(1 if strategy.late else 2) if strategy.keep else 3] += size
    return found


def test_less_memory_means_a_later_stage() -> None:
    """From ZeRO-1, which reduces and gathers once a step, to ZeRO-3, which holds least."""
    formulated = _sharded()
    setting = StepConfig(4, layer_calls(formulated.model.folded), overlap=0.0)
    free = tune(formulated.problem, setting, None)
    with pytest.raises(InfeasibleNetwork) as none:
        tune(formulated.problem, setting, 1.0, recompute=False)
    least, most = none.value.smallest_bytes, free.bytes
    found = [free]
    for share in (0.75, 0.5, 0.25, 0.0):
        budget = least + share * (most - least)
        placed = tune(formulated.problem, setting, budget, recompute=False)
        assert placed.bytes <= budget and not placed.setting.recompute
        assert setting.held(placed.usage).total == pytest.approx(placed.bytes, rel=1e-12)
        found.append(placed)
    stages = [_stages(formulated, p.states) for p in found]
    assert all(a.seconds <= b.seconds for a, b in pairwise(found))
    assert stages[0][1] > 0 and stages[0][2] == stages[0][3] == 0
    assert stages[2][2] > 0 and stages[2][3] == 0
    assert stages[-1][1] == 0 and stages[-1][3] > stages[-1][2]
    # what ZeRO-3 frees may let another parameter stay at ZeRO-1: stages rise all together
    sums = [sum(stage * size for stage, size in of.items()) for of in stages]
    assert all(a <= b for a, b in pairwise(sums))
    for placed in found:
        # a gradient waits for the last microbatch only beside its whole parameter
        assert all(
            strategy.keep or not gathered
            for strategy, gathered, _ in _strategies(formulated, placed.states)
            if strategy.late
        )


def test_too_little_memory_says_how_much_is_needed() -> None:
    model, machine, mesh = analysed("llama").model, load_cluster("cpu-gloo"), Mesh.parse("dp=1,fsdp=4")
    with pytest.raises(InfeasibleError, match="the smallest feasible is") as none:
        choose(model, [mesh], machine, SearchRequest(budget=1000, recompute=False))
    assert none.value.smallest_bytes is not None
    least = int(none.value.smallest_bytes) + 1
    assert (
        choose(model, [mesh], machine, SearchRequest(budget=least, recompute=False)).placements.bytes <= least
    )
