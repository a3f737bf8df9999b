"""What is left of wide networks, and neighbourhoods of assignments, against every assignment there is."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_solve import SHAPES, few, layered, network_of

from autoshard.solver.diving import widen
from autoshard.solver.eliminate import Elimination
from autoshard.solver.elimination_core import Core
from autoshard.solver.elimination_order import Familiar, find_order, order_beside
from autoshard.solver.improvement_moves import measure
from autoshard.solver.network import Limits
from autoshard.solver.prune import Residual
from autoshard.solver.solve import solve


@given(st.integers(0, 2**32), st.sampled_from(SHAPES), st.integers(1, 6), st.sampled_from([0.0, 0.3]))
@settings(few, max_examples=60)
def test_a_state_of_the_core_stands_for_the_best_around_it(
    seed: int, shape: str, count: int, forbidden: float
) -> None:
    net = Residual.of(network_of(seed, shape, count, forbidden=forbidden, most=3))
    core = Core.of(net)
    before, rows = list(net.unary), [dict(row) for row in net.rows]
    every = [list(s) for s in product(*(range(k) for k in net.sizes))]
    seconds = [measure(net, s)[0] for s in every]
    for chosen in product(*(range(k) for k in core.net.sizes)):
        here = [x for s, x in zip(every, seconds, strict=True) if [s[v] for v in core.numbers] == [*chosen]]
        found = core.seconds + measure(core.net, chosen)[0]
        whole = core.whole(chosen)
        assert [whole[v] for v in core.numbers] == [*chosen]
        assert found == pytest.approx(min(here), rel=1e-12)
        assert measure(net, whole)[0] == pytest.approx(min(here), rel=1e-12)
    # the network itself stays as it was
    assert all(a is b for a, b in zip(before, net.unary, strict=True))
    assert [list(row) for row in rows] == [list(row) for row in net.rows]
    assert all(row[j] is net.rows[i][j] for i, row in enumerate(rows) for j in row)


def test_a_chain_has_no_core_and_dense_networks_are_theirs() -> None:
    chain = Core.of(Residual.of(network_of(1, "cycle", 7)))
    assert chain.numbers == ()
    assert len(chain.gone) == 7
    dense = Core.of(Residual.of(network_of(1, "dense", 6)))
    assert dense.numbers == tuple(range(6))
    assert dense.seconds == 0.0


def test_variables_of_many_states_stay() -> None:
    """Three of 60 states in a ring have a table of 216,000 entries."""
    network = network_of(0, "cycle", 3, most=60)
    large = [np.resize(u, 60) for u in network.unary]
    tables = {pair: np.resize(t, (60, 60)) for pair, t in network.edges.items()}
    net = Residual.of(type(network)(tuple(large), tuple(np.zeros(60) for _ in large), tables))
    assert Core.of(net).numbers == (0, 1, 2)


@given(st.integers(0, 2**32), st.integers(4, 40), st.integers(50, 400))
@settings(few, max_examples=60)
def test_neighbourhoods_hold_what_makes_tables_large(seed: int, largest: int, total: int) -> None:
    """No table is larger than allowed, and an assignment never gets worse, whatever is held."""
    network = network_of(seed, "sparse", 12, most=4)
    net = Residual.of(network)
    order = find_order(net.sizes, net.rows)
    eagerness = np.random.default_rng(seed).uniform(0.2, 1.0, 12).tolist()
    small, held = order_beside(order, net.sizes, net.rows, eagerness, largest, total)
    assert sorted(small.variables) == list(range(12))
    assert small.variables[: len(held)] == held
    assert small.largest <= max(largest, max(net.sizes))
    assert small.total <= total + sum(net.sizes)
    for v in small.variables:
        assert not set(held) & set(small.later[v])
    assert order.largest > largest or order.total > total // 8 or not held


@given(st.integers(0, 2**32), st.lists(st.integers(0, 2**32), min_size=1, max_size=4))
@settings(few, max_examples=60)
def test_a_familiar_order_eliminates_networks_like_it(seed: int, others: list[int]) -> None:
    """Of the same variables, of which some are decided in each: exactly, with tables that are no larger."""
    whole, familiar = Residual.of(network_of(seed, "sparse", 12, most=4)), Familiar()
    most = 0
    for other in (seed, *others):
        rng = np.random.default_rng(other)
        numbers = sorted(rng.choice(12, int(rng.integers(3, 13)), replace=False).tolist())
        apart = whole.copy()
        for v in set(range(12)) - set(numbers):
            for w in tuple(apart.rows[v]):
                apart.drop_edge(v, w)
        net = apart.only(numbers)
        order = familiar.order(numbers, net.sizes, net.rows)
        assert sorted(order.variables) == list(range(len(numbers)))
        place = {v: position for position, v in enumerate(order.variables)}
        assert all(place[v] < place[w] for v, near in enumerate(order.later) for w in near)
        value, states = Elimination(net, order).solve()
        assert measure(net, states)[0] == pytest.approx(value, rel=1e-12)
        assert value == pytest.approx(Elimination(net, find_order(net.sizes, net.rows)).solve()[0], rel=1e-12)
        fresh = find_order(net.sizes, net.rows).total
        most = max(most, fresh)
        assert order.total <= max(1.1 * most, 5_000 * len(numbers))


def test_what_fits_is_not_held() -> None:
    net = Residual.of(network_of(3, "cycle", 8))
    order = find_order(net.sizes, net.rows)
    small, held = order_beside(order, net.sizes, net.rows, [1.0] * 8, 10**6, 10**8)
    assert held == ()
    assert small == order


def test_neighbourhoods_reach_the_best_of_a_network_with_skips() -> None:
    """From the first states, with tables that hold a part of the network alone."""
    network = layered(200, seed=4, states=(4, 6))
    net = Residual.of(network)
    order = find_order(net.sizes, net.rows)
    best = solve(network).seconds
    start = [0] * len(net.unary)
    found = measure(net, widen(net, order, start, Limits(table=order.largest // 4)))[0]
    assert best - 1e-12 <= found <= 1.02 * best
    assert measure(net, start)[0] > 1.05 * best
