"""A chain of equal networks within another, and fewer states with the same optimum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, TypeAlias

import numpy as np

from autoshard.search.networks.network import Array, CostNetwork, Indices

Pair: TypeAlias = tuple[int, int]
Tables: TypeAlias = Mapping[Pair, Array]

_ROUNDS = 8


@dataclass(frozen=True, eq=False)
class Chain:
    """n copies of a network in a row, and a network around them. All costs are seconds; bytes play no part.

    kinds: what a copy may be. All have the same variables with the same states; each copy takes the kind
    that suits it. onward: (u, v) -> [k_u, k_v] between u of a copy and v of the next. outer: everything
    that exists once. every, first, last: (g, v) -> [k_g, k_v] between g outside and v of every copy, of the
    first one, of the last one.

    Raises ValueError where a table does not fit its variables.
    """

    copies: int
    kinds: tuple[CostNetwork, ...]
    outer: CostNetwork
    onward: Tables = field(default_factory=dict)
    every: Tables = field(default_factory=dict)
    first: Tables = field(default_factory=dict)
    last: Tables = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.copies < 1 or not self.kinds:
            raise ValueError(f"a chain of {self.copies} copies of {len(self.kinds)} kinds")
        inner = self.sizes
        if any([len(u) for u in kind.unary] != inner for kind in self.kinds):
            raise ValueError("the kinds of a copy differ in their variables or states")
        outer = [len(u) for u in self.outer.unary]
        for name, left in (("onward", inner), ("every", outer), ("first", outer), ("last", outer)):
            for (a, b), table in getattr(self, name).items():
                if not (0 <= a < len(left) and 0 <= b < len(inner)) or table.shape != (left[a], inner[b]):
                    raise ValueError(f"{name} ({a}, {b}): {table.shape} does not fit its variables")

    @property
    def sizes(self) -> list[int]:
        """States of every variable of a copy."""
        return [len(u) for u in self.kinds[0].unary]

    def seconds_of(self, outer: Sequence[int], copies: Sequence[tuple[int, Sequence[int]]]) -> float:
        """Total seconds of the states around and of (kind, states) of every copy."""
        total = self.outer.seconds_of(outer)
        alone: dict[tuple[int, tuple[int, ...]], float] = {}
        links: dict[tuple[tuple[int, ...], tuple[int, ...]], float] = {}
        for kind, states in copies:
            key = (kind, tuple(states))
            if key not in alone:
                alone[key] = self.kinds[kind].seconds_of(states) + _sum(self.every, outer, states)
            total += alone[key]
        for (_, one), (_, other) in pairwise(copies):
            pair = (tuple(one), tuple(other))
            if pair not in links:
                links[pair] = _sum(self.onward, one, other)
            total += links[pair]
        return total + _sum(self.first, outer, copies[0][1]) + _sum(self.last, outer, copies[-1][1])


def _sum(tables: Tables, left: Sequence[int], right: Sequence[int]) -> float:
    return sum(float(table[left[a], right[b]]) for (a, b), table in tables.items())


_Role: TypeAlias = Literal["kind", "same", "onward", "every", "first", "last", "outer"]


@dataclass
class _Link:
    role: _Role
    kind: int
    ends: Pair
    table: Array


def reduced(chain: Chain) -> tuple[Chain, list[Indices], list[Indices]]:
    """The chain with fewer states and the same optimum; the original states of what is left.

    Dominance as in `prune`, for all copies at once: state t of a variable makes s superfluous if it is no
    dearer in any copy, whatever the neighbours do. Not all copies have all links (the first has none before
    it), so a link that only some have may count against t, never for it. A variable outside has a link
    ``every`` n times. In each copy by itself s can then be replaced by t, so in all of them.
    """
    reduction = _Reduction(chain)
    reduction.run()
    return reduction.chain(), reduction.kept[: reduction.inside], reduction.kept[reduction.inside :]


class _Reduction:
    """Variables of a copy come first, then those outside."""

    def __init__(self, chain: Chain) -> None:
        self.given, self.inside = chain, len(chain.sizes)
        self.unary = [
            *([kind.unary[v] for kind in chain.kinds] for v in range(self.inside)),
            *([u] for u in chain.outer.unary),
        ]
        self.kept = [np.arange(len(us[0])) for us in self.unary]
        self.links: list[_Link] = []
        for pair in dict.fromkeys(p for kind in chain.kinds for p in kind.edges):
            tables = [kind.edges.get(pair) for kind in chain.kinds]
            one = tables[0]
            if one is not None and all(_equal(one, other) for other in tables):
                self.links.append(_Link("same", 0, pair, one))
            else:
                self.links += [_Link("kind", k, pair, t) for k, t in enumerate(tables) if t is not None]
        out = self.inside
        self.links += [_Link("onward", 0, pair, t) for pair, t in chain.onward.items()]
        roles: tuple[_Role, ...] = ("every", "first", "last")
        for role in roles:
            tables_of: Tables = getattr(chain, role)
            self.links += [_Link(role, 0, (out + g, v), t) for (g, v), t in tables_of.items()]
        self.links += [_Link("outer", 0, (out + g, out + h), t) for (g, h), t in chain.outer.edges.items()]
        #: per variable: (link, whether it is the second end)
        self.at: list[list[tuple[_Link, bool]]] = [[] for _ in self.unary]
        for link in self.links:
            self.at[link.ends[0]].append((link, False))
            self.at[link.ends[1]].append((link, True))

    def run(self) -> None:
        self._consistent()
        if not all(len(kept) for kept in self.kept):
            return
        dirty = set(range(len(self.unary)))
        for _ in range(_ROUNDS):
            todo, dirty = sorted(dirty), set()
            for v in todo:
                if len(self.kept[v]) > 1 and self._prune(v):
                    dirty.update(w for link, _ in self.at[v] for w in link.ends)
            if not dirty:
                return

    def chain(self) -> Chain:
        given, inside = self.given, self.inside
        edges: list[dict[Pair, Array]] = [{} for _ in given.kinds]
        names = ("onward", "every", "first", "last", "outer")
        parts: dict[str, dict[Pair, Array]] = {name: {} for name in names}
        for link in self.links:
            a, b = link.ends
            if link.role in ("kind", "same"):
                for k in [link.kind] if link.role == "kind" else range(len(edges)):
                    edges[k][a, b] = link.table
            elif link.role == "onward":
                parts["onward"][a, b] = link.table
            elif link.role == "outer":
                parts["outer"][a - inside, b - inside] = link.table
            else:
                parts[link.role][a - inside, b] = link.table
        kinds = tuple(
            _network([us[k] for us in self.unary[:inside]], edges[k]) for k in range(len(given.kinds))
        )
        outer = _network([us[0] for us in self.unary[inside:]], parts["outer"])
        return Chain(
            given.copies, kinds, outer, parts["onward"], parts["every"], parts["first"], parts["last"]
        )

    def _consistent(self) -> None:
        """Remove states that are forbidden in every kind, alone or by links that every copy has."""
        queue = list(range(len(self.unary)))
        while queue:
            v = queue.pop()
            alive = np.logical_or.reduce([np.isfinite(u) for u in self.unary[v]])
            for link, second in self.at[v]:
                always = link.role in ("same", "every") or v >= self.inside
                if always and not np.isfinite(link.table).all():
                    alive &= np.isfinite(link.table).any(axis=0 if second else 1)
            if not alive.all():
                self._shrink(v, np.flatnonzero(alive))
                queue += [w for link, _ in self.at[v] for w in link.ends if w != v and len(self.kept[w])]

    def _prune(self, v: int) -> bool:
        """Remove dominated states; of equal states the first stays."""
        with np.errstate(invalid="ignore"):
            worst = [u[:, None] - u for u in self.unary[v]]
            for link, second in self.at[v]:
                table = link.table.T if second else link.table
                difference = np.fmax.reduce(table[:, None, :] - table[None, :, :], axis=2)
                if link.role == "kind":
                    worst[link.kind] = worst[link.kind] + difference
                    continue
                if v < self.inside and link.role in ("onward", "first", "last"):
                    difference = np.maximum(difference, 0.0)
                elif v >= self.inside and link.role == "every":
                    difference = self.given.copies * difference
                worst = [w + difference for w in worst]
            dominates = np.logical_and.reduce([w <= 0.0 for w in worst])
        np.fill_diagonal(dominates, False)
        if not dominates.any():
            return False
        alive = np.ones(len(dominates), dtype=np.bool_)
        for s in range(len(dominates) - 1, -1, -1):
            alive[s] = not (dominates[:, s] & alive).any()
        self._shrink(v, np.flatnonzero(alive))
        return True

    def _shrink(self, v: int, keep: Indices) -> None:
        self.unary[v] = [u[keep] for u in self.unary[v]]
        self.kept[v] = self.kept[v][keep]
        for link, second in self.at[v]:
            link.table = link.table[:, keep] if second else link.table[keep]


def _network(unary: Sequence[Array], edges: dict[Pair, Array]) -> CostNetwork:
    return CostNetwork(tuple(unary), tuple(np.zeros(len(u)) for u in unary), edges)


def _equal(one: Array, other: Array | None) -> bool:
    return other is one or (other is not None and np.array_equal(one, other))
