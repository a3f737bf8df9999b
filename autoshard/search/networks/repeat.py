"""The least cost of a chain of equal networks, by min-plus powers.

A layer that is called n times, every time free to decide otherwise, is a chain of n copies of one network.
Everything inside a copy is eliminated down to what it shares with its neighbours, which leaves a matrix
over the states on its two sides; in the (min, +) semiring the matrix of m copies in a row is the m-th power
(Bellman's principle), found by repeated squaring in O(log m) products. The first and the last copy stay
with the network around the chain, so what is particular about them needs no matrix of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise, product
from math import prod

import numpy as np

from autoshard.search.networks.chain import Chain, Pair, Tables, reduced
from autoshard.search.networks.direct import Orders
from autoshard.search.networks.eliminate import Elimination
from autoshard.search.networks.min_plus import Squares
from autoshard.search.networks.network import Array, CostNetwork, Limits, NoFiniteAssignment
from autoshard.search.networks.order import Order, find_order_before
from autoshard.search.networks.prune import Contradiction, Residual, fold_decided, make_consistent, prune
from autoshard.search.networks.solve import solve
from autoshard.search.networks.together import least_over

#: links between copies up to which every choice of their ends is compared
_FEW_LINKS = 12
#: entries of an elimination table from which on pruning first is worth it
_LARGE = 500_000
_WHOLE = Limits(table=20_000_000, total=100_000_000, nodes=500, milp=0)


@dataclass(frozen=True)
class Room:
    """How much work there may be before a bound has to do. Counts, so answers never depend on speed.

    interface: joint states between two copies. product: sums in one product of matrices, over all states of
    the variables outside that touch every copy. table: entries of the largest elimination table. all: of all
    tables of all kinds of a piece together. whole: of searches through what is left where nothing connects
    the copies any more.
    """

    interface: int = 512
    product: int = 150_000_000
    table: int = 20_000_000
    all: int = 250_000_000
    whole: Limits = _WHOLE


@dataclass(frozen=True)
class Repeated:
    """The answer about a chain.

    lower_bound: seconds that no assignment goes below; the optimum itself where ``exact``. outer: states
    around; copies: (kind, states) of each copy; both empty if they were not asked for or nothing is finite.
    seconds: what these states take (inf without states). freed: variables outside that every copy was
    allowed to see in a state of its own. parted: links between copies that were counted at their least.
    products: how many products of matrices it took. interface: joint states between two copies.
    """

    lower_bound: float
    exact: bool
    seconds: float
    outer: tuple[int, ...]
    copies: tuple[tuple[int, tuple[int, ...]], ...]
    freed: tuple[int, ...]
    parted: tuple[Pair, ...]
    products: int
    interface: int


def least(chain: Chain, room: Room | None = None, *, recover: bool = True) -> Repeated:
    """The optimum of a chain, or a lower bound where its tables would outgrow ``room``.

    recover: whether to find the states, too. The bound is reached by relaxing one thing after the other:

    - a variable outside that touches every copy is *freed*: each copy sees a state of its own, only the first
      and the last see the real one, whose own cost counts once. Every assignment of the chain is one of the
      freed problem, at the same cost (let all copies see the same state), so its least cost is no higher.
    - a link between copies is *parted*: it costs its least entry, whatever its ends do, which is no more
      than what it costs in any assignment.
    """
    small, inside, around = reduced(chain)
    freed: list[int] = []
    parted: list[Pair] = []
    if not all(small.sizes) or not all(len(u) for u in small.outer.unary):
        return Repeated(np.inf, True, np.inf, (), (), (), (), 0, 0)
    while True:
        try:
            found = _Powers(small, freed, parted, room or Room()).run(recover)
            break
        except _TooLarge:
            _relax(small, freed, parted)
    if not found.copies:
        return found
    outer = tuple(int(around[g][s]) for g, s in enumerate(found.outer))
    back: dict[tuple[int, ...], tuple[int, ...]] = {}
    copies = []
    for kind, states in found.copies:
        if states not in back:
            back[states] = tuple(int(inside[v][s]) for v, s in enumerate(states))
        copies.append((kind, back[states]))
    return replace(found, outer=outer, copies=tuple(copies), seconds=chain.seconds_of(outer, copies))


class _TooLarge(Exception):
    """Tables would be larger than allowed."""


def _relax(chain: Chain, freed: list[int], parted: list[Pair]) -> None:
    """Free the variable outside with most states; after all of them, part the link that matters least."""
    sizes = {g: len(chain.outer.unary[g]) for g, _ in chain.every if g not in freed}
    if sizes:
        freed.append(max(sizes, key=lambda g: (sizes[g], g)))
        return
    links = [pair for pair in chain.onward if pair not in parted]
    parted.append(min(links, key=lambda pair: (_spread(chain.onward[pair]), pair)))


def _spread(table: Array) -> float:
    """How much a link can matter."""
    return float(np.ptp(table)) if np.isfinite(table).all() else np.inf


# -- one copy after the other ------------------------------------------------------------------------------


class _Assembly:
    """A network under construction from pieces that may share edges."""

    def __init__(self) -> None:
        self.unary: list[Array] = []
        self.edges: dict[Pair, Array] = {}

    def add(self, unary: Sequence[Array]) -> list[int]:
        at = len(self.unary)
        self.unary += unary
        return list(range(at, len(self.unary)))

    def join(self, a: int, b: int, table: Array) -> None:
        if a > b:
            a, b, table = b, a, table.T
        self.edges[a, b] = self.edges[a, b] + table if (a, b) in self.edges else table

    def put(self, network: CostNetwork) -> list[int]:
        """A whole network; the numbers of its variables."""
        at = self.add(network.unary)
        for (a, b), table in network.edges.items():
            self.join(at[a], at[b], table)
        return at

    def link(self, tables: Tables, left: Sequence[int], right: Sequence[int]) -> None:
        for (a, b), table in tables.items():
            self.join(left[a], right[b], table)

    def done(self) -> CostNetwork:
        return CostNetwork(tuple(self.unary), tuple(np.zeros(len(u)) for u in self.unary), self.edges)


@dataclass(frozen=True, eq=False)
class _Draft:
    """A network that is to be minimised over all variables but those in ``scope``.

    copies: of the chain that are in it, as (kind, numbers of their variables). outer: numbers of the
    variables outside.
    """

    network: CostNetwork
    scope: tuple[int, ...]
    copies: tuple[tuple[int, list[int]], ...]
    outer: list[int]


@dataclass(frozen=True, eq=False)
class _Piece:
    """costs: the least total for each joint state of the scope. order: in which it is last. pruned: what is
    left of the network, if not all. best: all states if there is no scope."""

    draft: _Draft
    costs: Array
    order: Order | None = None
    pruned: Residual | None = None
    best: tuple[int, ...] = ()

    def states(self, given: Sequence[int]) -> tuple[int, ...]:
        """The best states of all variables when those of the scope are given."""
        return self.best if self.order is None else _given(self._net, self.order, self.draft.scope, given)

    @cached_property
    def _net(self) -> Residual:
        if self.pruned is not None:
            return self.pruned
        net = Residual.of(self.draft.network)
        fold_decided(net)
        return net


class _Powers:
    """One attempt with what has been relaxed so far."""

    def __init__(self, chain: Chain, freed: Collection[int], parted: Sequence[Pair], room: Room) -> None:
        self.chain, self.room = chain, room
        self.freed, self.parted = tuple(freed), tuple(parted)
        self.onward = {pair: table for pair, table in chain.onward.items() if pair not in parted}
        self.shared = sorted({g for g, _ in chain.every} - set(freed))
        self.before, self.after = _cover(self.onward, chain.sizes)
        sizes = chain.sizes
        self.width = prod(sizes[v] for v in (*self.before, *self.after))
        self.ways = prod(len(chain.outer.unary[g]) for g in self.shared)
        self.products = 0
        #: whether every piece was minimised exactly
        self.exact = True
        self.orders = Orders()

    def run(self, recover: bool) -> Repeated:
        chain = self.chain
        large = self.width > self.room.interface or self.ways * self.width**3 > self.room.product
        if chain.copies > 2 and large:
            raise _TooLarge
        least_links = sum(float(chain.onward[pair].min()) for pair in self.parted)
        base = (chain.copies - 1) * least_links if self.parted else 0.0
        ends = self._ends()
        inner: list[_Piece] = []
        squares: Squares | None = None
        costs = [end.costs for end in ends]
        if chain.copies > 2:
            inner = self._blocks()
            squares = Squares(np.minimum.reduce([p.costs for p in inner]), chain.copies - 2)
            self.products = squares.products
            costs = [c + squares.power for c in costs]
        values = [float(c.min()) for c in costs]
        which = int(np.argmin(values))
        relaxed = bool(self.parted and chain.copies > 1) or bool(self.freed and chain.copies > 2)
        found = Repeated(
            values[which] + base,
            self.exact and not relaxed,
            np.inf,
            (),
            (),
            self.freed,
            self.parted,
            self.products,
            self.width,
        )
        if not recover or not np.isfinite(values[which]):
            return found
        return self._recovered(found, ends[which], costs[which], inner, squares)

    # -- pieces --------------------------------------------------------------------------------------------

    def _ends(self) -> list[_Piece]:
        """The first and the last copy with everything around, for all kinds the two may be.

        Scope: shared, then the interfaces after the first and before the last copy.
        """
        chain, kinds = self.chain, range(len(self.chain.kinds))
        drafts = []
        for combo in product(kinds, repeat=min(chain.copies, 2)):
            net = _Assembly()
            outer = net.put(chain.outer)
            copies = [(kind, net.put(chain.kinds[kind])) for kind in combo]
            for _, at in copies:
                net.link(chain.every, outer, at)
            net.link(chain.first, outer, copies[0][1])
            net.link(chain.last, outer, copies[-1][1])
            scope: list[int] = []
            if chain.copies == 2:
                net.link(self.onward, copies[0][1], copies[1][1])
            elif chain.copies > 2:
                scope = [outer[g] for g in self.shared]
                scope += self._leave(net, copies[0][1]) + self._enter(net, copies[1][1])
            drafts.append(_Draft(net.done(), tuple(scope), tuple(copies), outer))
        return self._pieces(drafts)

    def _blocks(self) -> list[_Piece]:
        """A copy between two others, of every kind. Scope: shared, the interface before and that after.

        Variables outside cost nothing here: what they cost counts at the ends.
        """
        chain, drafts = self.chain, []
        for kind in range(len(chain.kinds)):
            net = _Assembly()
            outer = net.add([np.zeros(len(u)) for u in chain.outer.unary])
            own = net.put(chain.kinds[kind])
            net.link(chain.every, outer, own)
            scope = [outer[g] for g in self.shared] + self._enter(net, own) + self._leave(net, own)
            drafts.append(_Draft(net.done(), tuple(scope), ((kind, own),), outer))
        return self._pieces(drafts)

    def _enter(self, net: _Assembly, own: Sequence[int]) -> list[int]:
        """Add the links of a copy with the one before; the numbers of the interface's variables."""
        left = net.add([np.zeros(self.chain.sizes[v]) for v in self.before])
        at = dict(zip(self.before, left, strict=True))
        for (u, v), table in self.onward.items():
            if u in at:
                net.join(at[u], own[v], table)
        return [*left, *(own[v] for v in self.after)]

    def _leave(self, net: _Assembly, own: Sequence[int]) -> list[int]:
        """The same for the one after; links whose first end is in the interface belong to that one."""
        right = net.add([np.zeros(self.chain.sizes[v]) for v in self.after])
        at = dict(zip(self.after, right, strict=True))
        for (u, v), table in self.onward.items():
            if u not in self.before:
                net.join(own[u], at[v], table)
        return [*(own[v] for v in self.before), *right]

    def _pieces(self, drafts: Sequence[_Draft]) -> list[_Piece]:
        """Networks over the same variables, each minimised over all but its scope, which they share."""
        scope = drafts[0].scope
        if not scope:
            return [self._whole(draft) for draft in drafts]
        order = _order_of([draft.network for draft in drafts], scope)
        if order.largest <= _LARGE:
            costs = _over([draft.network for draft in drafts], order, scope)
            return [_Piece(draft, self._folded(costs[..., k]), order) for k, draft in enumerate(drafts)]
        return [self._large(draft, len(drafts)) for draft in drafts]

    def _large(self, draft: _Draft, kinds: int) -> _Piece:
        """A piece that is pruned first, one of so many kinds."""
        net = _pruned(draft)
        network = CostNetwork(
            tuple(net.unary),
            tuple(np.zeros(len(u)) for u in net.unary),
            {(a, b): table for a, row in enumerate(net.rows) for b, table in row.items() if a < b},
        )
        order = _order_of([network], draft.scope)
        if order.largest > self.room.table or order.total * kinds > self.room.all:
            raise _TooLarge
        costs = np.full([len(draft.network.unary[v]) for v in draft.scope], np.inf)
        costs[np.ix_(*(net.kept[v] for v in draft.scope))] = _over([network], order, draft.scope)[..., 0]
        return _Piece(draft, self._folded(costs), order, net)

    def _whole(self, draft: _Draft) -> _Piece:
        """A piece without a scope, minimised over everything by whatever method there is."""
        try:
            solution = solve(draft.network, limits=self.room.whole, orders=self.orders)
        except NoFiniteAssignment:
            return _Piece(draft, self._folded(np.asarray(np.inf)))
        self.exact &= solution.gap == 0
        return _Piece(draft, self._folded(np.asarray(solution.lower_bound)), best=solution.states)

    def _folded(self, table: Array) -> Array:
        """[joint states of shared, of the interface before, of that after] (without copies between: [1])."""
        if self.chain.copies <= 2:
            return table.reshape(1)
        return table.reshape(self.ways, self.width, self.width)

    # -- states --------------------------------------------------------------------------------------------

    def _recovered(
        self, found: Repeated, ends: _Piece, costs: Array, inner: Sequence[_Piece], squares: Squares | None
    ) -> Repeated:
        at = tuple(int(x) for x in np.unravel_index(int(costs.argmin()), costs.shape))
        if squares is None:
            states = ends.states(())
            path: list[int] = []
        else:
            shared, a, b = at
            states = ends.states([*self._shared(shared), *self._interface(a), *self._interface(b)])
            path = [a, *squares.between(shared, a, b), b]
        outer = tuple(states[g] for g in ends.draft.outer)
        copies = [(kind, tuple(states[v] for v in own)) for kind, own in ends.draft.copies]
        known: dict[Pair, tuple[int, tuple[int, ...]]] = {}
        between = []
        for pair in pairwise(path):
            if pair not in known:
                known[pair] = self._middle(inner, at[0], *pair)
            between.append(known[pair])
        return replace(found, outer=outer, copies=(copies[0], *between, *copies[1:]))

    def _middle(self, inner: Sequence[_Piece], shared: int, a: int, b: int) -> tuple[int, tuple[int, ...]]:
        """The kind and states of a copy between two interfaces."""
        piece = min(inner, key=lambda p: float(p.costs[shared, a, b]))
        states = piece.states([*self._shared(shared), *self._interface(a), *self._interface(b)])
        kind, own = piece.draft.copies[0]
        return kind, tuple(states[v] for v in own)

    def _shared(self, joint: int) -> list[int]:
        return _unravel(joint, [len(self.chain.outer.unary[g]) for g in self.shared])

    def _interface(self, joint: int) -> list[int]:
        return _unravel(joint, [self.chain.sizes[v] for v in (*self.before, *self.after)])


def _unravel(joint: int, sizes: Sequence[int]) -> list[int]:
    return [int(x) for x in np.unravel_index(joint, tuple(sizes))] if sizes else []


def _order_of(networks: Sequence[CostNetwork], scope: Sequence[int]) -> Order:
    """One order for all, in which the scope, whose variables become neighbours, comes last."""
    sizes = [len(u) for u in networks[0].unary]
    rows: list[set[int]] = [set() for _ in sizes]
    for network in networks:
        for a, b in network.edges:
            if sizes[a] > 1 and sizes[b] > 1:
                rows[a].add(b)
                rows[b].add(a)
    for a in scope:
        rows[a].update(b for b in scope if b != a)
    return find_order_before(sizes, rows, scope)


def _over(networks: Sequence[CostNetwork], order: Order, scope: Sequence[int]) -> Array:
    """The least costs of networks with the same states over their scope, [*scope, networks]."""
    unary = [np.stack(costs, axis=-1) for costs in zip(*(n.unary for n in networks), strict=True)]
    edges: dict[Pair, Array] = {}
    for pair in dict.fromkeys(pair for network in networks for pair in network.edges):
        tables = [network.edges.get(pair) for network in networks]
        known = next(t for t in tables if t is not None)
        edges[pair] = np.stack([np.zeros(known.shape) if t is None else t for t in tables], axis=-1)
    return least_over(unary, edges, order, scope)


def _pruned(draft: _Draft) -> Residual:
    """The network with fewer states of what is not in the scope.

    What is in the scope has to keep its states, though others may dominate them. A guard beside each such
    variable, which has to be in the same state, makes sure of that: no state stands in for another then.
    """
    network, sizes = draft.network, [len(draft.network.unary[v]) for v in draft.scope]
    guards = range(len(network.unary), len(network.unary) + len(sizes))
    walls = [np.where(np.eye(k, dtype=np.bool_), 0.0, np.inf) for k in sizes]
    none = tuple(np.zeros(k) for k in sizes)
    pairs = zip(draft.scope, guards, strict=True)
    edges = network.edges | {pair: wall for pair, wall in zip(pairs, walls, strict=True)}
    residual = Residual.of(CostNetwork((*network.unary, *none), (*network.memory, *none), edges))
    try:
        make_consistent(residual)
    except Contradiction:
        return Residual.of(network)  # nothing is possible, as will be found again
    prune(residual)
    for v, guard in zip(draft.scope, guards, strict=True):
        if guard in residual.rows[v]:
            residual.drop_edge(v, guard)
    return residual


def _given(net: Residual, order: Order, scope: Sequence[int], states: Sequence[int]) -> tuple[int, ...]:
    """The best states of all variables with these for the scope, in their first numbering."""
    sizes = net.sizes
    for v, later in enumerate(order.later):
        for w in later:
            if w not in net.rows[v]:
                net.rows[v][w], net.rows[w][v] = (
                    np.zeros((sizes[v], sizes[w])),
                    np.zeros((sizes[w], sizes[v])),
                )
    unary = list(net.unary)
    for v, s in zip(scope, states, strict=True):
        unary[v] = np.where(net.kept[v] == s, unary[v], np.inf)
    found = Elimination(net, order).solve(unary)[1]
    return tuple(int(kept[s]) for kept, s in zip(net.kept, found, strict=True))


def _cover(onward: Tables, sizes: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Variables that part a copy from the next: (of the one before, of the one after) a cut.

    Every link has one of its ends among them; of all choices the one with the fewest joint states. A
    variable is never in both, so that a copy's two interfaces have no variable in common.
    """
    links = sorted(onward)
    if len(links) > _FEW_LINKS:
        options = [tuple(u for u, _ in links), ()], [(), tuple(v for _, v in links)]
        chosen = [(set(a), set(b)) for a, b in options]
    else:
        chosen = []
        for sides in product((True, False), repeat=len(links)):
            a = {u for (u, _), left in zip(links, sides, strict=True) if left}
            b = {v for (_, v), left in zip(links, sides, strict=True) if not left}
            if not a & b:
                chosen.append((a, b))
    before, after = min(chosen, key=lambda c: prod(sizes[v] for v in (*c[0], *c[1])))
    return tuple(sorted(before)), tuple(sorted(after))
