"""What the planner shares between its stages, leaves out or prices in another way changes no answer."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from families import BATCH
from planned import analysed

from autoshard.cluster import Mesh, load_cluster, mesh_candidates
from autoshard.cost.on_mesh import CostModels, cost_model
from autoshard.cost.recipe import ADAMW
from autoshard.cost.step_time import Exposure, between
from autoshard.ir.placement import R, Shard
from autoshard.search.plan.plan import Plan
from autoshard.search.problem.build import build_problem
from autoshard.search.problem.decisions import ParamVar
from autoshard.search.problem.feasible_states import possible
from autoshard.search.problem.padded_params import padded_model
from autoshard.search.problem.problem import Problem
from autoshard.search.problem.problem_prices import Prices
from autoshard.search.problem.rescale_batch import with_batch
from autoshard.search.problem.search_axes import plain_axes
from autoshard.search.reasons.explain import explain
from autoshard.search.select.choose import Rejected, Searches, choose
from autoshard.search.select.request import CandidateSolution, Incumbent, SearchRequest
from autoshard.search.solve.configuration import data_ways
from autoshard.search.solve.formulate import formulate, layer_calls
from autoshard.search.solve.param_costs import whole_state
from autoshard.search.solve.problem_cache import ProblemCache
from autoshard.search.solve.recompute_bound import dual_bound, extremes
from autoshard.search.solve.solve_placements import place
from autoshard.search.solve.step_config import StepConfig
from autoshard.search.solve.tune import QUICK
from autoshard.solver.min_marginals import min_marginals
from autoshard.solver.network import CostNetwork, InfeasibleNetwork
from autoshard.solver.solve import solve

HIDDEN = Exposure(0.0, 0.0, 0.0, 0.0)


def _setting(name: str) -> StepConfig:
    return StepConfig(1, layer_calls(analysed(name).folded), overlap=0.5)


def _built(name: str, mesh: str) -> Problem:
    shape = Mesh.parse(mesh)
    costs = cost_model(load_cluster("h100-dgx"), shape)
    return build_problem(analysed(name).model, plain_axes(shape), Prices(costs, costs, ADAMW))


@pytest.mark.parametrize(
    ("name", "mesh"), [("llama", "fsdp=2,tp=2"), ("gpt2", "tp=4"), ("mixtral", "fsdp=4")]
)
def test_only_impossible_states_are_left_out(name: str, mesh: str) -> None:
    whole = _built(name, mesh)
    few, _ = possible(whole)
    assert few.choices == whole.choices == sum(whole.terms.states) > sum(few.terms.states)
    networks = [_setting(name).network(p.terms, HIDDEN) for p in (whole, few)]
    costs, left = (min_marginals(n) for n in networks)
    assert costs.exact and left.exact
    for before, after, all_costs, some in zip(
        whole.variables, few.variables, costs.costs, left.costs, strict=True
    ):
        kept = [k for k, state in enumerate(before.states) if state in after.states]
        assert [before.states[k] for k in kept] == list(after.states)
        assert all_costs[kept].tolist() == pytest.approx(some.tolist(), rel=1e-9)
        assert not np.isfinite(np.delete(all_costs, kept)).any()


def test_what_pins_leave_fits_what_is_left() -> None:
    whole = _built("llama", "fsdp=2,tp=2")
    masks = [np.where(np.arange(n) % 2 == 0, 0.0, np.inf) for n in whole.terms.states]
    few, left = possible(whole, masks)
    for before, after, mask, kept in zip(whole.variables, few.variables, masks, left, strict=True):
        assert kept is not None
        wanted = [state for state, ok in zip(before.states, np.isfinite(mask), strict=True) if ok]
        found = [state for state, ok in zip(after.states, np.isfinite(kept), strict=True) if ok]
        assert found == [state for state in wanted if state in after.states]


def _network(name: str, mesh: str) -> CostNetwork:
    formulated = formulate(analysed(name).model, Mesh.parse(mesh), load_cluster("h100-dgx"), _setting(name))
    return _setting(name).network(formulated.problem.terms, HIDDEN)


def _least_bytes(network: CostNetwork) -> float:
    """Of any assignment that is possible."""
    edges = {pair: np.where(np.isfinite(table), 0.0, np.inf) for pair, table in network.edges.items()}
    return solve(CostNetwork(network.memory, network.memory, edges)).seconds


@pytest.mark.parametrize(("name", "mesh"), [("llama", "tp=4"), ("gpt2", "fsdp=2,tp=2")])
def test_a_tight_budget_is_met_as_well_in_one_go(name: str, mesh: str) -> None:
    """And one that is not tight after all, too."""
    network = _network(name, mesh)
    low, high = _least_bytes(network), solve(network).bytes
    assert low < high
    for share in (0.3, 0.7, 1.0, 1.5):
        budget = low + share * (high - low)
        once, twice = solve(network, budget, tight=True), solve(network, budget)
        assert once.seconds == pytest.approx(twice.seconds, rel=1e-9)
        assert once.lower_bound == pytest.approx(twice.lower_bound, rel=1e-9)
        assert once.bytes <= budget and (once.multiplier > 0) == (share < 1)


def test_a_solution_is_found_again_only_for_the_same_question() -> None:
    name = "gpt2"
    setting = _setting(name)
    problem = formulate(
        analysed(name).model, Mesh.parse("fsdp=2,tp=2"), load_cluster("h100-dgx"), setting
    ).problem
    free = place(problem, setting, None)
    assert place(problem, setting, None).states == free.states
    # the state that was taken, forbidden
    number = next(k for k, v in enumerate(problem.variables) if isinstance(v, ParamVar) and len(v.states) > 1)
    mask = np.zeros(len(problem.variables[number].states))
    mask[free.states[number]] = np.inf
    allowed = [mask if k == number else None for k in range(len(problem.variables))]
    other = place(problem, setting, None, allowed=allowed)
    assert other.states[number] != free.states[number] and other.seconds >= free.seconds * (1 - 1e-9)
    assert place(problem, setting, None).states == free.states
    # other weights of bytes: the same states hold something else
    less = place(problem, setting.recomputing("full"), None)
    assert less.bytes == pytest.approx(less.network.bytes_of(less.states))
    # and a budget is another question
    budget = (free.bytes + _least_bytes(free.network)) / 2
    tight = place(problem, setting, budget)
    assert tight.bytes <= budget < free.bytes == place(problem, setting, None).bytes


def test_what_cannot_beat_the_bound_is_not_finished() -> None:
    """The bound is the same as that of all policies at all prices tried."""
    name = "llama"
    setting = _setting(name)
    problem = formulate(analysed(name).model, Mesh.parse("fsdp=4"), load_cluster("h100-dgx"), setting).problem
    free = place(problem, setting, None)
    budget, price = 0.8 * free.bytes, free.seconds / free.bytes

    def at(price: float, exposure: Exposure) -> float:
        networks = (p.network(problem.terms, exposure).at_price(price) for p in extremes(setting))
        return min(solve(n, limits=QUICK).lower_bound for n in networks) - price * budget

    shown = setting.exposure(free.usage)
    best = max((shown, between(shown, HIDDEN)), key=lambda e: at(price, e))
    tried = [at(price, shown), at(price, best)]
    for factor in (2.0, 0.5):
        for _ in range(4):
            tried.append(at(price * factor, best))
            if tried[-1] <= at(price, best):
                break
            price *= factor
    tried += [at(price * factor, best) for factor in (2**0.5, 0.5**0.5)]
    found = dual_bound(
        problem, setting, budget, free.seconds / free.bytes, setting.exposure(free.usage), limits=QUICK
    )
    assert found == pytest.approx(max(tried), rel=1e-9)


def test_prices_of_equal_axes_are_shared() -> None:
    machine = load_cluster("h100-dgx").used_by(8)
    models = CostModels(machine)
    one, other = models.of(Mesh.parse("fsdp=8")), models.of(Mesh.parse("dp=8"))
    assert one.reshard is other.reshard and one is models.of(Mesh.parse("fsdp=8"))
    assert models.of(Mesh.parse("fsdp=4,tp=2")).reshard is not one.reshard
    assert one == cost_model(machine, Mesh.parse("fsdp=8"))


def test_a_problem_is_posed_once() -> None:
    model = analysed("llama").model
    machine = load_cluster("h100-dgx").used_by(4)
    poses = ProblemCache(model, machine, _setting("llama"), ADAMW, lambda _: None)
    mesh = Mesh.parse("fsdp=4")
    assert poses.of(mesh, BATCH) is poses.of(mesh, BATCH)
    assert poses.of(mesh, BATCH) is not poses.of(mesh, BATCH // 2)


def test_searches_that_differ_in_memory_share_problems() -> None:
    model, machine, searches = analysed("llama").model, load_cluster("h100-dgx"), Searches()
    meshes = [Mesh.parse(m) for m in ("fsdp=4", "fsdp=2,tp=2")]

    def searched(searches: Searches, budget: int | None) -> tuple[CandidateSolution, list[str]]:
        said: list[str] = []
        request = SearchRequest(batch=BATCH, budget=budget)
        return choose(model, meshes, machine, request, said.append, None, searches), said

    first, said = searched(searches, None)
    again, less = searched(searches, 400_000)
    alone, _ = searched(Searches(), 400_000)
    assert any(text.startswith("searching") for text in said)
    assert not any(text.startswith("searching") for text in less)
    assert first.placements.bytes > 400_000 >= again.placements.bytes
    assert again.configuration == alone.configuration
    assert again.placements.seconds == pytest.approx(alone.placements.seconds, rel=1e-9)
    _, other = searched(searches, 400_000)
    assert other == less
    batched = choose(model, meshes, machine, SearchRequest(batch=2 * BATCH), said.append, None, searches)
    assert batched.configuration.batch * batched.configuration.microbatches == 2 * BATCH


def test_a_known_solution_stands_unless_another_is_faster() -> None:
    model, machine = analysed("llama").model, load_cluster("h100-dgx")
    meshes = [Mesh.parse(m) for m in ("fsdp=4", "fsdp=2,tp=2")]

    def searched(known: Incumbent | None) -> CandidateSolution:
        return choose(model, meshes, machine, SearchRequest(batch=BATCH), known=known)

    first = searched(None)
    seconds = first.placements.seconds
    assert searched(Incumbent(first, seconds)) is first
    other = searched(Incumbent(first, 2 * seconds))
    assert other is not first and other.placements.seconds == pytest.approx(seconds, rel=1e-9)


def test_free_axes_go_beside_tensor_ranks_as_long_as_that_helps() -> None:
    """On 24 ranks 8 sequences leave 3 for a free axis, whatever tensor ranks there are."""
    model, machine = analysed("bert").model, load_cluster("h100-dgx").used_by(24)
    meshes = mesh_candidates(machine, 24)
    said: list[str] = []
    found = choose(model, meshes, machine, SearchRequest(batch=8), said.append)
    free = [text.split()[1] for text in said if text.startswith("searching") and "seq=" in text]
    assert free[0] == "fsdp=8,seq=3"
    ways = [Mesh.parse(mesh).sizes[-1] if "tp" in mesh else 1 for mesh in free]
    assert ways == sorted(ways) and len(ways) < 4
    for mesh in ("fsdp=8,seq=3", "fsdp=4,seq=3,tp=2", "fsdp=2,seq=3,tp=4"):
        alone = choose(model, [Mesh.parse(mesh)], machine, SearchRequest(batch=8))
        assert found.placements.seconds <= alone.placements.seconds * (1 + 1e-9)


def test_layers_with_experts_are_split_as_long_as_that_helps() -> None:
    model, machine = analysed("mixtral").model, load_cluster("mi250x-frontier").used_by(8)
    meshes, said = mesh_candidates(machine, 8), list[str]()
    found = choose(model, meshes, machine, SearchRequest(batch=64), said.append)
    tried = [text.split()[1] for text in said if text.startswith("searching")]
    assert tried == ["dp=2,fsdp=4", "fsdp=4,tp=2", "fsdp=2,tp=4"]  # and not tp=8
    for mesh in (*tried, "tp=8"):
        alone = choose(model, [Mesh.parse(mesh)], machine, SearchRequest(batch=64))
        assert found.placements.seconds <= alone.placements.seconds * (1 + 1e-9)


# -- what FSDP2 stores -------------------------------------------------------------------------------------


def test_parameters_are_padded_where_they_are_stored() -> None:
    """88 rows over 64 ranks: 2 for each of the first 44, none for the others; 32 rows: half of the ranks."""
    model = analysed("llama").model
    assert padded_model(model, 4) is model
    stored = padded_model(model, 64)
    for key, group in model.flow.classes.items():
        rows = group.first.type.shape[0] if group.first.type.shape else 0
        wanted = -(-rows // 64) * 64 if group.grads else rows
        assert (stored.flow.classes[key].first.type.shape or (0,))[0] == wanted
    formulated = formulate(
        with_batch(stored, 64), Mesh.parse("fsdp=64"), load_cluster("h100-dgx"), _setting("llama"), merge=True
    )
    strategies = {v.place: v.states for v in formulated.problem.variables if isinstance(v, ParamVar)}
    for key, group in stored.flow.classes.items():
        if group.grads:
            assert any(strategy.stored == (Shard(0),) for strategy in strategies[key]), group.first.target
            assert all(strategy.stored != (R,) for strategy in strategies[key])


def test_baselines_whose_parameters_alone_are_too_much_are_not_solved() -> None:
    model, machine, said = analysed("llama").model, load_cluster("h100-dgx").used_by(8), list[str]()
    budget = int(0.9 * whole_state(model, ADAMW))
    request = SearchRequest(batch=8, budget=budget, baselines=True)
    meshes = [Mesh.parse("fsdp=8"), Mesh.parse("fsdp=4,tp=2")]
    found = choose(model, meshes, machine, request, said.append)
    why = {baseline.name: baseline.why for baseline in found.baselines}
    assert why["data parallel"] == "does not fit the memory" and not why["FSDP2"]
    assert not any(text.startswith("searching dp=8 ") for text in said)


def test_fsdp2_fits_although_its_rows_do_not_divide() -> None:
    """Our programs store whole what would leave a rank without rows; FSDP2 pads it."""
    model, machine, budget = analysed("llama").model, load_cluster("h100-dgx"), 500_000
    mesh, setting = Mesh.parse("fsdp=64"), replace(_setting("llama"), overlap=machine.device.overlap)
    ours = formulate(with_batch(model, 64), mesh, machine, setting)
    with pytest.raises(InfeasibleNetwork):
        place(ours.problem, setting.recomputing("full"), budget)
    meshes = [mesh, Mesh.parse("fsdp=32,tp=2")]
    found = choose(model, meshes, machine, SearchRequest(batch=64, baselines=True, budget=budget))
    assert str(found.configuration.mesh) == "fsdp=32,tp=2"
    (baseline,) = [r for r in found.baselines if r.name == "FSDP2"]
    assert baseline.mesh == "fsdp=64" and not baseline.why
    # padded rows travel layer by layer, of which not all is hidden; whole ones in one message a step
    assert 1 <= baseline.seconds / ours.free.lower_bound < 1.2


# -- what is said of what was not taken --------------------------------------------------------------------


def _searched(stop_at: int = 0) -> CandidateSolution:
    """A search over several meshes; stop_at: the configuration at which it is interrupted."""
    solving = 0

    def say(text: str) -> None:
        nonlocal solving
        solving += text.startswith("solving")
        if stop_at and solving == stop_at:
            raise KeyboardInterrupt

    # of two meshes that are far apart only one is solved
    machine = replace(load_cluster("h100-dgx"), collectives="mpi")
    meshes = [Mesh.parse(m) for m in ("dp=2,tp=2", "fsdp=4")]
    return choose(analysed("llama").model, meshes, machine, SearchRequest(batch=BATCH), say)


def _explained(settled: CandidateSolution) -> Plan:
    return explain(settled, load_cluster("h100-dgx"), "fingerprint")


def test_the_next_best_configuration_is_one_that_was_solved() -> None:
    found = _searched()
    assert [r.solved for r in found.rejected] == sorted((r.solved for r in found.rejected), reverse=True)
    first = found.rejected[0]
    assert first.solved
    why = _explained(found).why["mesh"]
    assert why.alternative == first.name and "estimated" not in str(why)
    assert why.margin == pytest.approx(first.seconds - found.placements.seconds)


def test_an_estimate_is_called_one() -> None:
    """After an interruption nothing but the plan itself was solved."""
    found = _searched(stop_at=2)
    assert found.interrupted and not any(r.solved for r in found.rejected)
    why = _explained(found).why["mesh"]
    assert why.alternative.startswith(found.rejected[0].name) and "not solved" in why.alternative
    slower = Rejected("dp=4", 2 * found.placements.seconds, solved=False)
    faster = Rejected("dp=4", 0.5 * found.placements.seconds, solved=False)
    said = [_explained(replace(found, rejected=(r,))).why["mesh"] for r in (slower, faster)]
    assert said[0].alternative == "dp=4 (estimated, not solved)"
    assert said[0].margin == pytest.approx(found.placements.seconds)
    assert said[1].alternative == "dp=4 (estimated no slower, but not solved)" and said[1].margin == 0.0


def test_the_chosen_configuration_has_a_bound_of_its_own() -> None:
    found = _searched()
    assert found.bound <= found.configuration_bound <= found.placements.seconds
    proof = _explained(found).optimality
    assert (
        proof.configuration_bound == found.configuration_bound and 0.0 <= proof.configuration_gap <= proof.gap
    )
    assert msgspec.structs.replace(
        proof, configuration_bound=0.75 * proof.seconds
    ).configuration_gap == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("llama", "fsdp=2,tp=2"),
        ("gpt2", "dp=2,tp=4"),
        ("mixtral", "fsdp=4"),
        ("bert", "fsdp=2"),
        ("vit", "dp=2"),
    ],
)
def test_a_problem_grown_to_a_batch_is_that_of_the_batch(name: str, mesh: str) -> None:
    """Same states, same prices, with waves and without; only layouts of values that hold the batch say
    otherwise."""
    cluster, shape = load_cluster("h100-dgx"), Mesh.parse(mesh)
    poses = ProblemCache(analysed(name).model, cluster, _setting(name), ADAMW, lambda _: None)
    few, many = 2 * data_ways(shape), 12 * data_ways(shape)
    for exact in (False, True):
        grown = poses.priced(shape, many, (), few, bounds=exact)
        built = poses.of(shape, many, roughly=not exact)
        assert grown is not built and grown.problem.choices == built.problem.choices
        ours, theirs = grown.problem.terms, built.problem.terms
        assert ours.states == theirs.states and ours.hard.keys() == theirs.hard.keys()
        tables = (ours.alone, theirs.alone), (ours.pairs, theirs.pairs), (ours.bytes, theirs.bytes)
        for mine, other in tables:
            assert mine.keys() == other.keys()
            for key, table in mine.items():
                assert table.keys() == other[key].keys()
                for at, costs in table.items():
                    assert costs == pytest.approx(other[key][at], rel=1e-9, abs=1e-15)


def test_a_single_sequence_per_rank_is_a_problem_of_its_own() -> None:
    """What is inside it may be split as if it were the batch."""
    shape = Mesh.parse("fsdp=2,tp=2")
    model, cluster = analysed("gpt2").model, load_cluster("h100-dgx")
    poses = ProblemCache(model, cluster, _setting("gpt2"), ADAMW, lambda _: None)
    ways = data_ways(shape)
    assert poses.priced(shape, 4 * ways, (), ways) is poses.of(shape, 4 * ways, roughly=True)
    free = Mesh.parse("fsdp=2,seq=2")
    assert poses.priced(free, 4 * ways, (), 2 * ways) is poses.of(free, 4 * ways, roughly=True)
