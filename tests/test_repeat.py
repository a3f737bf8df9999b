"""Chains of equal networks against the same networks written out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.search.networks.chain import Chain, Pair, reduced
from autoshard.search.networks.min_plus import Squares, min_plus
from autoshard.search.networks.network import Array, CostNetwork, NoFiniteAssignment
from autoshard.search.networks.repeat import Repeated, Room, least
from autoshard.search.networks.solve import solve

#: so little that something always has to be relaxed
TIGHT = Room(interface=1, product=1, table=1)


def network(unary: list[Array], edges: dict[Pair, Array]) -> CostNetwork:
    return CostNetwork(tuple(unary), tuple(np.zeros(len(u)) for u in unary), edges)


def unrolled(chain: Chain, kinds: tuple[int, ...]) -> CostNetwork:
    """Every copy written out, those outside first."""
    unary = list(chain.outer.unary)
    edges = dict(chain.outer.edges)
    inside = len(chain.sizes)
    starts = [len(unary) + i * inside for i in range(chain.copies)]

    def join(a: int, b: int, table: Array) -> None:
        if a > b:
            a, b, table = b, a, table.T
        edges[a, b] = edges.get((a, b), 0.0) + table

    for at, kind in zip(starts, kinds, strict=True):
        unary += chain.kinds[kind].unary
        for (u, v), table in chain.kinds[kind].edges.items():
            join(at + u, at + v, table)
        for (g, v), table in chain.every.items():
            join(g, at + v, table)
    for at in starts[:-1]:
        for (u, v), table in chain.onward.items():
            join(at + u, at + inside + v, table)
    for tables, at in ((chain.first, starts[0]), (chain.last, starts[-1])):
        for (g, v), table in tables.items():
            join(g, at + v, table)
    return network(unary, edges)


def truth(chain: Chain) -> float:
    """The least of all kinds of all copies, each eliminated as a whole."""
    best = np.inf
    for kinds in product(range(len(chain.kinds)), repeat=chain.copies):
        try:
            solution = solve(unrolled(chain, kinds))
        except NoFiniteAssignment:
            continue
        assert solution.gap == 0
        best = min(best, solution.seconds)
    return float(best)


def by_hand(chain: Chain) -> float:
    """The least over every assignment there is."""
    best = np.inf
    copy = [range(k) for k in chain.sizes]
    one = [(kind, states) for kind in range(len(chain.kinds)) for states in product(*copy)]
    for outer in product(*(range(len(u)) for u in chain.outer.unary)):
        for copies in product(one, repeat=chain.copies):
            best = min(best, chain.seconds_of(outer, copies))
    return float(best)


class Make:
    """Random chains; costs are whole numbers, so ties and exact sums are common."""

    def __init__(self, seed: int, walls: float) -> None:
        self.rng, self.walls = np.random.default_rng(seed), walls

    def costs(self, *shape: int) -> Array:
        made = self.rng.integers(-3, 12, shape).astype(float)
        return np.where(self.rng.random(shape) < self.walls, np.inf, made)

    def some(self, left: list[int], right: list[int], share: float) -> dict[Pair, Array]:
        pairs = product(range(len(left)), range(len(right)))
        return {(a, b): self.costs(left[a], right[b]) for a, b in pairs if self.rng.random() < share}

    def net(self, sizes: list[int], share: float) -> CostNetwork:
        edges = {(a, b): t for (a, b), t in self.some(sizes, sizes, share).items() if a < b}
        return network([self.costs(k) for k in sizes], edges)

    def chain(self, copies: int, inner: int, outer: int, kinds: int, most: int = 4) -> Chain:
        sizes = self.rng.integers(1, most, inner).tolist()
        around = self.rng.integers(1, most, outer).tolist()
        first = self.net(sizes, 0.6)
        alike = [first]
        for _ in range(kinds - 1):
            other = self.net(sizes, 0.6)
            shared = dict(list(first.edges.items())[:1])
            alike.append(replace(other, edges={**other.edges, **shared}))
        return Chain(
            copies,
            tuple(alike),
            self.net(around, 0.5),
            self.some(sizes, sizes, 0.25),
            self.some(around, sizes, 0.2),
            self.some(around, sizes, 0.3),
            self.some(around, sizes, 0.3),
        )


@st.composite
def chains(draw: st.DrawFn, kinds: int = 2, copies: int = 7) -> Chain:
    make = Make(draw(st.integers(0, 2**32)), draw(st.sampled_from([0.0, 0.0, 0.1, 0.3])))
    number = draw(st.integers(1, kinds))
    most = copies if number == 1 else min(copies, 5)
    return make.chain(draw(st.integers(1, most)), draw(st.integers(1, 4)), draw(st.integers(0, 3)), number)


def agrees(chain: Chain, found: Repeated, wanted: float) -> None:
    assert found.exact
    assert found.lower_bound == pytest.approx(wanted, abs=1e-9)
    if np.isfinite(wanted):
        assert len(found.copies) == chain.copies
        assert found.seconds == chain.seconds_of(found.outer, found.copies)
        assert found.seconds == pytest.approx(wanted, abs=1e-9)
    else:
        assert not found.copies


@given(chains())
@settings(max_examples=150, deadline=None, derandomize=True)
def test_equals_the_network_written_out(chain: Chain) -> None:
    agrees(chain, least(chain), truth(chain))


@given(st.integers(0, 2**32), st.integers(1, 3), st.integers(1, 2))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_equals_every_assignment(seed: int, copies: int, kinds: int) -> None:
    chain = Make(seed, 0.1).chain(copies, 2, 2, kinds, 3)
    agrees(chain, least(chain), by_hand(chain))


@given(chains())
@settings(max_examples=80, deadline=None, derandomize=True)
def test_fewer_states_have_the_same_optimum(chain: Chain) -> None:
    small, inside, around = reduced(chain)
    assert [len(k) for k in inside] == small.sizes
    assert [len(k) for k in around] == [len(u) for u in small.outer.unary]
    if all(small.sizes) and all(map(len, around)):
        assert truth(small) == pytest.approx(truth(chain), abs=1e-9)
    else:
        assert truth(chain) == np.inf


@given(chains(), st.integers(1, 40), st.integers(1, 2000))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_a_relaxed_chain_bounds_from_below(chain: Chain, interface: int, entries: int) -> None:
    wanted = truth(chain)
    for room in (TIGHT, Room(interface=interface, product=entries, table=entries)):
        found = least(chain, room)
        assert found.lower_bound <= wanted + 1e-9
        assert found.seconds >= wanted - 1e-9
        if found.exact:
            assert found.lower_bound == pytest.approx(wanted, abs=1e-9)
        if not found.freed and not found.parted:
            assert found.exact


def test_what_is_relaxed_is_said() -> None:
    """A variable outside on which the copies would like to disagree, and links that want equal neighbours."""
    chain = Chain(
        4,
        (network([np.array([0.0, 1.0])], {}), network([np.array([1.0, 0.0])], {})),
        network([np.array([0.0, 0.5])], {}),
        {(0, 0): np.array([[1.0, 3.0], [3.0, 1.0]])},
        {(0, 0): np.array([[0.0, 5.0], [5.0, 0.0]])},
        {(0, 0): np.array([[0.0, 9.0], [0.0, 9.0]])},
    )
    exact = least(chain)
    assert (exact.exact, exact.freed, exact.parted, exact.lower_bound) == (True, (), (), 3.0)
    found = least(chain, TIGHT)
    assert (found.exact, found.freed, found.parted) == (False, (0,), ((0, 0),))
    assert found.lower_bound == 3.0
    # the first copy wants another state than the last one; both see the same variable outside, freed or not
    torn = replace(chain, last={(0, 0): np.array([[9.0, 0.0], [9.0, 0.0]])}, onward={})
    assert least(torn).lower_bound == truth(torn) == 5.0
    assert least(torn, TIGHT).lower_bound == 5.0


def test_a_freed_variable_is_worth_something() -> None:
    """Copies that want another state of the variable than the ends do."""
    middle = np.array([[3.0, 0.0], [0.0, 3.0]])
    chain = Chain(
        6,
        (network([np.array([0.0, 0.0])], {}),),
        network([np.array([0.0, 0.0])], {}),
        {(0, 0): np.array([[5.0, 0.0], [0.0, 5.0]])},
        {(0, 0): middle},
    )
    exact, freed = least(chain), least(chain, Room(product=8))
    assert exact.exact
    assert exact.lower_bound == truth(chain) == 9.0
    assert not freed.exact
    assert freed.freed == (0,)
    assert not freed.parted
    assert freed.lower_bound < 9.0 <= freed.seconds


def test_ten_thousand_copies_take_a_logarithm_of_products() -> None:
    """And the states found for every one of them cost what the power says."""
    for copies in (10, 100, 1_000, 10_000):
        chain = Make(5, 0.05).chain(copies, 4, 2, 2)
        assert chain.onward
        found = least(chain)
        assert found.exact
        assert found.products <= 2 * int(np.log2(copies)) + 1
        assert found.interface > 1
        assert len(found.copies) == copies
        assert found.seconds == pytest.approx(found.lower_bound, rel=1e-12)
    assert found.products >= 13


@given(st.integers(0, 2**32), st.integers(1, 3), st.integers(1, 5), st.integers(1, 40))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_powers(seed: int, ways: int, states: int, exponent: int) -> None:
    matrix = Make(seed, 0.3).costs(ways, states, states)
    squares = Squares(matrix, exponent)
    wanted = matrix
    for _ in range(exponent - 1):
        wanted = min_plus(wanted, matrix)
    assert np.array_equal(squares.power, wanted)
    assert squares.products <= 2 * exponent.bit_length() - 2
    for way, a, b in _finite(squares.power):
        path = [a, *squares.between(way, a, b), b]
        assert len(path) == exponent + 1
        taken = sum(matrix[way, one, other] for one, other in pairwise(path))
        assert taken == squares.power[way, a, b]


def _finite(table: Array) -> Iterator[tuple[int, int, int]]:
    yield from np.argwhere(np.isfinite(table)).tolist()


def test_products_by_definition() -> None:
    make = Make(1, 0.2)
    a, b = make.costs(2, 3, 5), make.costs(2, 5, 4)
    assert np.array_equal(min_plus(a, b), (a[..., None] + b[:, None]).min(axis=2))


def test_tables_must_fit() -> None:
    copy = network([np.zeros(2)], {})
    empty = network([], {})
    with pytest.raises(ValueError, match="0 copies"):
        Chain(0, (copy,), empty)
    with pytest.raises(ValueError, match="differ"):
        Chain(2, (copy, network([np.zeros(3)], {})), empty)
    with pytest.raises(ValueError, match=r"onward \(0, 0\)"):
        Chain(2, (copy,), empty, {(0, 0): np.zeros((2, 3))})
    with pytest.raises(ValueError, match=r"every \(0, 0\)"):
        Chain(2, (copy,), empty, {}, {(0, 0): np.zeros((2, 2))})
