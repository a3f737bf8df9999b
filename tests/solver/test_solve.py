"""The search against the truth: every assignment of small networks, HiGHS on larger ones."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autoshard.solver.brute_force import brute_force
from autoshard.solver.budgeted import Priced
from autoshard.solver.diving import dive, widen
from autoshard.solver.elimination_order import Familiar, find_order
from autoshard.solver.improvement_moves import descend, measure
from autoshard.solver.milp import solve_milp
from autoshard.solver.min_marginals import min_marginals
from autoshard.solver.minimise import MinimisedResidual, minimise_pruned
from autoshard.solver.network import CostNetwork, InfeasibleNetwork, Limits, NoFiniteAssignment, Solution
from autoshard.solver.prune import Contradiction, Residual, make_consistent, prune, survivors
from autoshard.solver.reduced_network import Reduction
from autoshard.solver.single_elimination import Orders, least
from autoshard.solver.solve import least_cost, proven_seconds, solve

#: tables of a few entries, so that every fallback has to work
TINY = Limits(table=30, total=60, down=60, pareto=200, labels=3, mini=20, nodes=25, milp=0)
TINY_MILP = Limits(table=30, total=60, down=60, pareto=200, labels=3, mini=20, nodes=25)
FEW_LABELS = Limits(labels=3)
SHAPES = ("tree", "cycle", "dense", "sparse")
few = settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def ends(shape: str, count: int, rng: np.random.Generator) -> list[tuple[int, int]]:
    if shape == "tree":
        return [(int(rng.integers(0, v)), v) for v in range(1, count)]
    if shape == "cycle":
        return [(v, v + 1) for v in range(count - 1)] + ([(0, count - 1)] if count > 2 else [])
    share = 1.0 if shape == "dense" else 0.4
    return [(u, v) for u in range(count) for v in range(u + 1, count) if rng.random() < share]


def costs(rng: np.random.Generator, shape: tuple[int, ...], *, ties: bool, forbidden: float) -> np.ndarray:
    found = rng.integers(0, 4, shape).astype(float) if ties else rng.random(shape)
    return np.where(rng.random(shape) < forbidden, np.inf, found)


def network_of(
    seed: int,
    shape: str = "sparse",
    count: int = 6,
    ties: bool = False,
    forbidden: float = 0.0,
    most: int = 4,
) -> CostNetwork:
    rng = np.random.default_rng(seed)
    sizes = [int(k) for k in rng.integers(1, most + 1, count)]
    unary = tuple(costs(rng, (k,), ties=ties, forbidden=forbidden / 2) for k in sizes)
    memory = tuple(rng.integers(0, 8, k).astype(float) * 2.0**20 for k in sizes)
    edges = {
        (u, v): costs(rng, (sizes[u], sizes[v]), ties=ties, forbidden=forbidden)
        for u, v in ends(shape, count, rng)
    }
    return CostNetwork(unary, memory, edges)


networks = st.builds(
    network_of,
    seed=st.integers(0, 2**32),
    shape=st.sampled_from(SHAPES),
    count=st.integers(1, 7),
    ties=st.booleans(),
    forbidden=st.sampled_from([0.0, 0.2, 0.5]),
)


def check(network: CostNetwork, found: Solution, truth: Solution, budget: float | None = None) -> None:
    assert found.seconds == network.seconds_of(found.states)
    assert found.bytes == network.bytes_of(found.states)
    assert budget is None or found.bytes <= budget
    slack = 1e-9 * abs(truth.seconds)
    assert found.lower_bound - slack <= truth.seconds <= found.seconds + slack
    assert found.gap >= 0.0
    if found.gap == 0.0:
        assert found.lower_bound == found.seconds
        assert found.seconds == pytest.approx(truth.seconds, rel=1e-9)


def compare(
    network: CostNetwork, budget: float | None = None, limits: Limits | None = None
) -> Solution | None:
    """Solve both ways; the solution, or None when both say that there is none."""
    try:
        truth = brute_force(network, budget)
    except NoFiniteAssignment:
        with pytest.raises(NoFiniteAssignment):
            solve(network, budget, limits)
        return None
    except InfeasibleNetwork as expected:
        with pytest.raises(InfeasibleNetwork) as caught:
            solve(network, budget, limits)
        assert caught.value.smallest_bytes == expected.smallest_bytes
        assert network.bytes_of(caught.value.states) == expected.smallest_bytes
        assert np.isfinite(network.seconds_of(caught.value.states))
        return None
    found = solve(network, budget, limits)
    check(network, found, truth, budget)
    return found


def some_budget(network: CostNetwork, share: float) -> float:
    """Between the smallest and the largest sum of bytes."""
    low, high = sum(m.min() for m in network.memory), sum(m.max() for m in network.memory)
    return float(low + share * (high - low))


@given(networks)
@few
def test_elimination_is_exact(network: CostNetwork) -> None:
    found = compare(network)
    assert found is None or (found.gap == 0.0 and found.method == "eliminated")


@given(networks)
@few
def test_pruning_first_finds_what_elimination_alone_does(network: CostNetwork) -> None:
    direct = least(network, Limits(), Orders())
    assert direct is not None
    net = Residual.of(network)
    try:
        make_consistent(net)
    except Contradiction:
        assert direct.cost == np.inf
        return
    pruned = minimise_pruned(net, Limits())
    assert pruned.lower_bound == pytest.approx(direct.cost, rel=1e-12)
    if np.isfinite(direct.cost):
        assert network.seconds_of(direct.states) == pytest.approx(direct.cost, rel=1e-12)


@given(st.integers(0, 2**32), st.sampled_from(SHAPES), st.sampled_from([0.0, 0.3]))
@few
def test_networks_share_an_order_and_nothing_else(seed: int, shape: str, forbidden: float) -> None:
    """Costs that differ, of states and edges that do not."""
    first = network_of(seed, shape, forbidden=forbidden)
    unary = tuple(u[::-1].copy() for u in first.unary)
    second = CostNetwork(unary, first.memory, {pair: 3.0 * table for pair, table in first.edges.items()})
    orders = Orders()
    for network in (first, second, first):
        try:
            alone = solve(network)
        except NoFiniteAssignment:
            with pytest.raises(NoFiniteAssignment):
                solve(network, orders=orders)
        else:
            assert solve(network, orders=orders) == alone
    assert orders.of(first) is orders.of(second)


@given(networks, st.sampled_from([0.05, 0.2, 0.35, 0.5, 0.7]))
@few
def test_budget_is_met_exactly(network: CostNetwork, share: float) -> None:
    found = compare(network, some_budget(network, share))
    assert found is None or found.gap == 0.0


@given(networks, st.sampled_from([None, 0.1, 0.3, 0.5]), st.sampled_from([TINY, TINY_MILP, FEW_LABELS]))
@few
def test_bounds_are_honest_when_limits_bite(
    network: CostNetwork, share: float | None, limits: Limits
) -> None:
    compare(network, None if share is None else some_budget(network, share), limits)


@given(networks)
@few
def test_pruning_keeps_the_optimum_of_every_budget(network: CostNetwork) -> None:
    net = Residual.of(network)
    try:
        make_consistent(net)
    except Contradiction:
        with pytest.raises(NoFiniteAssignment):
            brute_force(network)
        return
    prune(net)
    edges = {(i, j): t for i, row in enumerate(net.rows) for j, t in row.items() if i < j}
    small = CostNetwork(tuple(net.unary), tuple(net.memory), edges)
    for share in (0.0, 0.2, 0.5, 1.0):
        budget = some_budget(network, share)
        try:
            truth = brute_force(network, budget)
        except (NoFiniteAssignment, InfeasibleNetwork) as error:
            with pytest.raises(type(error)):
                brute_force(small, budget)
            continue
        found = brute_force(small, budget)
        assert found.seconds == pytest.approx(truth.seconds, rel=1e-9)
        assert network.seconds_of(net.original(found.states)) == pytest.approx(truth.seconds, rel=1e-9)


@pytest.mark.parametrize("bytes_too", [False, True])
def test_the_best_states_first_leave_what_all_pairs_leave(
    bytes_too: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With states that are as good, and some that are forbidden."""
    rng = np.random.default_rng(0)
    tables = {(0, j): rng.integers(0, 4, (400, 3)).astype(float) for j in (1, 2)}
    for table in tables.values():
        table[rng.random(table.shape) < 0.1] = np.inf
    unary = (rng.integers(0, 6, 400).astype(float), np.zeros(3), np.zeros(3))
    held = (rng.integers(0, 3, 400).astype(float) * bytes_too, np.zeros(3), np.zeros(3))

    def left() -> list[int]:
        net = Residual.of(CostNetwork(unary, held, tables))
        make_consistent(net)
        prune(net)
        return net.kept[0].tolist()

    first = left()
    monkeypatch.setattr("autoshard.solver.prune._MANY", 400)
    assert first == left() and 1 < len(first) < 200


def true_marginals(network: CostNetwork, lam: float) -> list[np.ndarray]:
    """By fixing every state in turn."""
    unary = tuple(u + lam * m for u, m in zip(network.unary, network.memory, strict=True))
    found = []
    for i, u in enumerate(unary):
        row = np.full(len(u), np.inf)
        for s in range(len(u)):
            alone = np.where(np.arange(len(u)) == s, u, np.inf)
            try:
                fixed = CostNetwork((*unary[:i], alone, *unary[i + 1 :]), network.memory, network.edges)
                row[s] = brute_force(fixed).seconds
            except NoFiniteAssignment:
                pass
        found.append(row)
    return found


@given(networks, st.sampled_from([0.0, 1e-7]))
@few
def test_min_marginals_are_exact(network: CostNetwork, lam: float) -> None:
    found = min_marginals(network, lam)
    assert found.exact
    for mine, truth in zip(found.costs, true_marginals(network, lam), strict=True):
        np.testing.assert_allclose(mine, truth, rtol=1e-9, atol=1e-12)


def test_min_marginals_are_upper_bounds_when_the_network_is_wide() -> None:
    network = network_of(3, "dense", 7)
    found = min_marginals(network, limits=Limits(down=60))
    assert not found.exact
    best = brute_force(network).seconds
    for mine, truth in zip(found.costs, true_marginals(network, 0.0), strict=True):
        assert (mine >= truth - 1e-12).all()
        assert mine.min() == pytest.approx(best)


def test_marginals_of_a_wide_network_change_one_choice_of_what_was_chosen() -> None:
    network = network_of(3, "dense", 7)
    chosen = [len(u) - 1 for u in network.unary]
    found = min_marginals(network, limits=Limits(down=60), chosen=chosen)
    assert not found.exact and np.isfinite(network.seconds_of(chosen))
    for v, costs in enumerate(found.costs):
        for k, cost in enumerate(costs):
            assert cost == pytest.approx(network.seconds_of([*chosen[:v], k, *chosen[v + 1 :]]))


def test_equal_states_go_to_the_lower_index() -> None:
    unary = tuple(np.zeros(3) for _ in range(4))
    edges = {(v, v + 1): np.ones((3, 3)) for v in range(3)}
    assert solve(CostNetwork(unary, unary, edges)).states == (0, 0, 0, 0)


def test_the_same_network_gives_the_same_answer() -> None:
    network = layered(60, seed=5)
    budget = middle_budget(network)
    first, second = solve(network, budget), solve(network, budget)
    assert first == second
    assert repr(first.states) == repr(second.states)
    mine, again = min_marginals(network), min_marginals(network)
    assert all(a.tobytes() == b.tobytes() for a, b in zip(mine.costs, again.costs, strict=True))


def test_a_network_without_variables_costs_nothing() -> None:
    found = solve(CostNetwork((), (), {}), 0.0)
    assert (found.states, found.seconds, found.bytes, found.gap) == ((), 0.0, 0.0, 0.0)


def test_the_smallest_budget_is_named() -> None:
    network = network_of(11, "tree", 6)
    with pytest.raises(InfeasibleNetwork) as caught:
        solve(network, -1.0)
    smallest = caught.value.smallest_bytes
    assert solve(network, smallest).bytes == smallest
    with pytest.raises(InfeasibleNetwork):
        solve(network, smallest - 1.0)


def test_a_contradiction_is_named_by_its_variables() -> None:
    rng = np.random.default_rng(0)
    unary = [rng.random(2) for _ in range(40)]
    edges = {(v, v + 1): rng.random((2, 2)) for v in range(39)}
    # three variables that must all differ, with two states each: consistent edge by edge
    differ = np.array([[np.inf, 1.0], [1.0, np.inf]])
    edges |= {(5, 20): differ, (20, 33): differ, (5, 33): differ}
    with pytest.raises(NoFiniteAssignment) as caught:
        solve(CostNetwork(tuple(unary), tuple(np.zeros(2) for _ in unary), edges))
    assert caught.value.variables == (5, 20, 33)


def test_a_variable_without_a_choice_is_named() -> None:
    unary = (np.zeros(2), np.full(3, np.inf), np.zeros(0))
    with pytest.raises(NoFiniteAssignment) as caught:
        solve(CostNetwork(unary[:2], (unary[0], np.zeros(3)), {}))
    assert caught.value.variables == (1,)
    with pytest.raises(NoFiniteAssignment) as caught:
        solve(CostNetwork((unary[0], unary[2]), (unary[0], unary[2]), {}))
    assert caught.value.variables == (1,)


def test_mistakes_in_a_network_are_refused() -> None:
    pair = (np.zeros(2), np.zeros(3))
    with pytest.raises(ValueError, match="does not fit"):
        CostNetwork(pair, pair, {(0, 1): np.zeros((3, 2))})
    with pytest.raises(ValueError, match="u < v"):
        CostNetwork(pair, pair, {(1, 0): np.zeros((3, 2))})
    with pytest.raises(ValueError, match="nan"):
        solve(CostNetwork(pair, pair, {(0, 1): np.full((2, 3), np.nan)}))
    with pytest.raises(ValueError, match="-inf"):
        solve(CostNetwork((np.array([0.0, -np.inf]),), (np.zeros(2),), {}))


def layered(count: int, seed: int, states: tuple[int, int] = (10, 25)) -> CostNetwork:
    """Chains of ops with skip edges, in seconds and bytes as of a model.

    A state has a layout; a reshard between two layouts costs the value's size times a distance.
    """
    rng = np.random.default_rng(seed)
    layouts = rng.random((32, 2))
    distance = np.abs(layouts[:, None] - layouts[None]).sum(axis=2)
    distance = np.where(rng.random(distance.shape) < 0.05, np.inf, distance)
    np.fill_diagonal(distance, 0.0)
    # an op takes and gives a layout each
    shape = [(rng.integers(0, 32, k), rng.integers(0, 32, k)) for k in rng.integers(*states, count)]
    for taken, given_ in shape:
        taken[0] = given_[0] = 0
    unary = tuple(1e-4 * (0.2 + rng.random(len(t))) for t, _ in shape)
    memory = tuple(np.round(2.0**20 * rng.integers(1, 64) * rng.random(len(t))) for t, _ in shape)
    links = [(v, v + 1) for v in range(count - 1)]
    links += [(v, v + int(rng.integers(2, 6))) for v in range(0, count - 6, 4)]
    links += [(v, v + 40) for v in range(0, count - 40, 40)]
    edges = {(u, v): 2e-4 * rng.random() * distance[np.ix_(shape[u][1], shape[v][0])] for u, v in links}
    return CostNetwork(unary, memory, edges)


def middle_budget(network: CostNetwork) -> float:
    free = solve(network)
    with pytest.raises(InfeasibleNetwork) as caught:
        solve(network, -1.0)
    return 0.5 * (free.bytes + caught.value.smallest_bytes)


def test_a_model_sized_network_is_solved_exactly() -> None:
    network = layered(800, seed=1)
    found = solve(network)
    assert (found.gap, found.method) == (0.0, "eliminated")
    assert found.stats.states_after < found.stats.states_before
    marginals = min_marginals(network)
    if marginals.exact:
        assert all(c.min() == pytest.approx(found.seconds, rel=1e-9) for c in marginals.costs)
    budget = middle_budget(network)
    held = solve(network, budget)
    assert held.bytes <= budget
    assert found.seconds <= held.lower_bound <= held.seconds
    assert held.gap < 1e-3


def test_elimination_agrees_with_highs() -> None:
    pytest.importorskip("scipy.optimize", reason="scipy is not installed: no HiGHS to compare with")
    network = layered(40, seed=2, states=(5, 9))
    budget = middle_budget(network)
    net = Residual.of(network)
    make_consistent(net)
    for limit in (None, budget):
        outcome = solve_milp(net, limit, 1e-2)
        assert outcome is not None and outcome.complete and outcome.states is not None
        found = solve(network, limit)
        assert found.gap == 0.0
        assert found.seconds == pytest.approx(network.seconds_of(net.original(outcome.states)), rel=1e-6)


def test_a_wide_network_gets_an_honest_gap() -> None:
    network = network_of(4, "dense", 16, most=8)
    exact = solve(network)
    rough = solve(network, limits=Limits(table=2_000, total=20_000, mini=500, nodes=300, milp=0))
    assert rough.lower_bound <= exact.seconds * (1 + 1e-9) <= rough.seconds * (1 + 2e-9)
    assert rough.gap == pytest.approx((rough.seconds - rough.lower_bound) / rough.seconds)
    budget = 0.8 * exact.bytes
    held = solve(network, budget, Limits(table=2_000, total=20_000, mini=500, nodes=300, milp=0))
    assert held.bytes <= budget and held.lower_bound <= held.seconds


def test_a_wide_network_of_more_variables_than_nodes_is_solved_well() -> None:
    """One way down its mini-buckets reaches the last variable whatever the limit says."""
    network = layered(300, seed=5)
    best = solve(network).seconds
    rough = solve(network, limits=Limits(table=10_000, mini=10_000, nodes=0, milp=0))
    assert rough.method != "eliminated"
    assert best * (1 - 1e-9) <= rough.seconds <= 1.005 * best


@given(networks, st.sampled_from([None, TINY, TINY_MILP]))
@few
def test_a_bound_is_no_more_than_the_optimum(network: CostNetwork, limits: Limits | None) -> None:
    """Within limits that allow elimination it is the optimum."""
    try:
        truth = brute_force(network)
    except NoFiniteAssignment:
        if limits is None:
            with pytest.raises(NoFiniteAssignment):
                least_cost(network, Limits(), Orders())
        return
    bound = least_cost(network, limits or Limits(), Orders())
    assert bound <= truth.seconds + 1e-9 * abs(truth.seconds)
    if limits is None:
        assert bound == pytest.approx(truth.seconds, rel=1e-9, abs=1e-12)


@given(networks, st.sampled_from([None, TINY, TINY_MILP]))
@few
def test_what_is_proven_without_states_is_what_a_solution_proves(
    network: CostNetwork, limits: Limits | None
) -> None:
    try:
        solution = solve(network, limits=limits)
    except NoFiniteAssignment:
        with pytest.raises(NoFiniteAssignment):
            proven_seconds(network, limits, Orders())
        return
    assert proven_seconds(network, limits, Orders()) == pytest.approx(solution.lower_bound, rel=1e-9)


@given(networks, st.integers(0, 2**32), st.floats(0.0, 1.0))
@few
def test_where_moves_end_no_single_one_is_left(network: CostNetwork, seed: int, share: float) -> None:
    net = Residual.of(network)
    rng = np.random.default_rng(seed)
    start = [int(rng.integers(0, len(u))) for u in net.unary]
    seconds, held = measure(net, start)
    room = held + share * sum(float(m.max()) for m in net.memory)
    found = descend(net, start, room)
    best = measure(net, found)
    assert best[1] <= room
    assert best[0] <= seconds * (1 + 1e-12)
    if not np.isfinite(best[0]):
        return  # what is forbidden may be so by two variables together
    for i, count in enumerate(net.sizes):
        for state in range(count):
            moved = measure(net, [state if j == i else s for j, s in enumerate(found)])
            assert moved[1] > room or moved[0] >= best[0] * (1 - 1e-12)


@given(networks)
@few
def test_every_state_that_is_left_has_a_partner_on_every_edge(network: CostNetwork) -> None:
    net = Residual.of(network)
    left: list[np.ndarray] = [np.asarray(np.isfinite(u)) for u in network.unary]
    for _ in range(sum(net.sizes)):
        for (a, b), table in network.edges.items():
            both = np.isfinite(table) & left[a][:, None] & left[b]
            left[a], left[b] = np.asarray(both.any(axis=1)), np.asarray(both.any(axis=0))
    if not all(mask.any() for mask in left):
        with pytest.raises(Contradiction):
            make_consistent(net)
        return
    make_consistent(net)
    assert [kept.tolist() for kept in net.kept] == [np.flatnonzero(mask).tolist() for mask in left]


@given(st.integers(2, 12), st.integers(0, 2**32), st.floats(0.0, 0.6), st.floats(0.0, 1.0))
@few
def test_of_dominated_states_one_that_dominates_them_stays(
    count: int, seed: int, share: float, ties: float
) -> None:
    """Few states are looked at one by one, many all at once, and rounding may close a circle of them."""
    rng = np.random.default_rng(seed)
    dominates = rng.random((count, count)) < share
    dominates |= dominates.T & (rng.random((count, count)) < ties)
    np.fill_diagonal(dominates, False)
    dominates[0, 1] |= not dominates.any()
    left = survivors(dominates)
    assert len(left)
    # beside states that are equal to none, what is left does not change the answer
    more = np.zeros((count + 12, count + 12), dtype=np.bool_)
    more[:count, :count] = dominates
    assert survivors(more).tolist() == [*left.tolist(), *range(count, count + 12)]


@given(networks)
@few
def test_dive_finds_an_assignment_if_there_is_one(network: CostNetwork) -> None:
    """Propagation with backtracking is complete on small networks; neighbourhoods never make it worse."""
    net = Residual.of(network)
    states = dive(net, list(range(len(network.unary))))
    try:
        truth = brute_force(network)
    except NoFiniteAssignment:
        assert states is None
        return
    assert states is not None
    first = measure(net, states)[0]
    better = measure(net, widen(net, find_order(net.sizes, net.rows), states, Limits()))[0]
    assert np.isfinite(first)
    assert truth.seconds - 1e-9 <= better <= first + 1e-9


def test_neighbourhoods_solve_what_fits_at_once() -> None:
    """Where the whole network is narrow, one neighbourhood is nearly all of it."""
    network = layered(60, seed=3, states=(4, 8))
    net = Residual.of(network)
    states = dive(net, list(range(60)))
    assert states is not None
    best = solve(network).seconds
    assert (
        measure(net, widen(net, find_order(net.sizes, net.rows), states, Limits()))[0] <= best * 1.02 + 1e-12
    )


@settings(few, max_examples=40)
@given(st.integers(0, 10_000), st.sampled_from(SHAPES), st.booleans())
def test_a_network_that_was_pruned_before_gives_the_same_solutions(seed: int, shape: str, ties: bool) -> None:
    network = network_of(seed, shape, 7, ties)
    held = [sum(float(m.min()) for m in network.memory), sum(float(m.max()) for m in network.memory)]
    reduction = Reduction()
    for share in (0.6, 0.2, 0.0, 0.4):
        budget = held[0] + share * (held[1] - held[0])
        for limits in (Limits(pareto=0, labels=0, nodes=0, milp=0), Limits(), TINY):
            alone = solve(network, budget, limits, tight=True)
            assert solve(network, budget, limits, tight=True, reduction=reduction) == alone
    assert reduction.made is not None
    for less in (1, 3, 2):  # the least memory is known from the first of them on
        with pytest.raises(InfeasibleNetwork) as first:
            solve(network, held[0] - less, tight=True)
        with pytest.raises(InfeasibleNetwork) as second:
            solve(network, held[0] - less, tight=True, reduction=reduction)
        assert vars(first.value) == vars(second.value)
    half = (held[0] + held[1]) / 2
    assert solve(network, half, tight=True, reduction=reduction) == solve(network, half, tight=True)


def test_what_was_found_at_prices_is_not_sought_again_under_another_budget() -> None:
    asked: list[float] = []

    def least(price: float, familiar: Familiar) -> MinimisedResidual:
        asked.append(price)
        return MinimisedResidual([], price, "")

    priced = Priced()
    for prices in ((), (2.0,), (2.0, 1.0), (2.0, 3.0), (2.0,), (2.0, 1.0)):
        assert priced.at(TINY, prices, least).lower_bound == (prices[-1] if prices else 0.0)
    assert priced.at(Limits(), (2.0,), least).lower_bound == 2.0
    assert asked == [0.0, 2.0, 1.0, 3.0, 2.0]


@few
@given(st.integers(0, 10_000), st.integers(3, 16), st.sampled_from((0.15, 0.3, 0.6)))
def test_an_order_is_that_of_looking_at_every_variable_each_time(seed: int, count: int, share: float) -> None:
    rng = np.random.default_rng(seed)
    sizes = [int(k) for k in rng.integers(1, 4, count)]
    graph: list[set[int]] = [set() for _ in sizes]
    for u in range(count):
        for v in range(u + 1, count):
            if rng.random() < share:
                graph[u].add(v)
                graph[v].add(u)
    assert find_order(sizes, [set(n) for n in graph]).variables == slow_order(sizes, graph)


def slow_order(sizes: list[int], graph: list[set[int]]) -> tuple[int, ...]:
    """Who is alone, then who has one neighbour, then who adds fewest edges, by their states, with the least
    table."""
    left = set(range(len(sizes)))
    order = [v for v in sorted(left) if not graph[v]]
    left -= set(order)
    core = False
    weights = [round(1000 * math.log(size)) for size in sizes]

    def score(v: int) -> tuple[int, int, int]:
        near = graph[v]
        if not core:
            return (len(near), 0, v)
        if len(near) <= 1:
            return (len(near) - 2, 0, v)
        missing = sum(weights[a] * weights[b] for a in near for b in near if a != b and b not in graph[a])
        return (missing, sizes[v] * int(np.prod([sizes[w] for w in near])), v)

    while left:
        open_ = [v for v in left if core or len(graph[v]) <= 1]
        if not open_:
            core = True
            continue
        v = min(open_, key=score)
        for a in graph[v]:
            graph[a] |= graph[v] - {a}
            graph[a].discard(v)
        left.discard(v)
        order.append(v)
    return tuple(order)
