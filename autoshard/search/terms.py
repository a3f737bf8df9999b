"""What the costs of a problem are made of, so that one problem serves many questions.

Time and bytes are stored by what they are (computing of a segment, a gather, ...); a question (so many
microbatches, this recomputation, that overlap) is a weight for each, and the weighted sum is an ordinary
cost network.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from autoshard.search.network import Array, CostNetwork, Indices

TimeKind: TypeAlias = Literal["work", "talk", "gather", "inline", "reduce", "first", "once", "last", "update"]
ByteKind: TypeAlias = Literal["state", "sums", "sent", "held", "kept", "extra", "input", "waiting", "window"]


class Time(NamedTuple):
    """A kind of seconds.

    kind: as in `cost.step_time.Sums`. inline, once: what parameters take that nothing hides, in every
    microbatch or once a step (`search.inline`). backward: the phase. segment: of work and talk
    that full recomputation would run again, else "". cheap: whether selective recomputation would, too.
    """

    kind: TimeKind
    backward: bool = False
    segment: str = ""
    cheap: bool = False


class Bytes(NamedTuple):
    """A kind of bytes.

    state: of parameters, gradients, optimizer. window: of parameters gathered while layers compute. sums:
    what gradients hold beyond that while they are summed over several microbatches: in fp32 if of half
    precision, and whole where they are reduced late. sent: gradients of one layer that wait for their
    reduction. held: activations that backward reads and that cross between segments. kept: other activations
    of a segment, which could be computed again; cheap: by selective recomputation, too. extra: what selective
    recomputation would keep in their place. input: what a call takes and would have to be kept for full
    recomputation; cheap: for selective, too. waiting: gradients of activations that gradients of parameters
    are made of. late: whether those of parameters are made of what is held or kept, where that decides how
    much is held if they wait (`search.waiting`); else None.
    """

    kind: ByteKind
    segment: str = ""
    cheap: bool = False
    late: bool | None = None


@dataclass
class Terms:
    """Sums under construction. states: of every variable."""

    states: list[int] = field(default_factory=list)
    alone: dict[Time, dict[int, Array]] = field(default_factory=dict)
    pairs: dict[Time, dict[tuple[int, int], Array]] = field(default_factory=dict)
    bytes: dict[Bytes, dict[int, Array]] = field(default_factory=dict)
    #: pairs of states that cannot be: 0 or inf
    hard: dict[tuple[int, int], Array] = field(default_factory=dict)

    def add(self, key: Time, variable: int, seconds: Array) -> None:
        table = self.alone.setdefault(key, {})
        table[variable] = table[variable] + seconds if variable in table else seconds

    def hold(self, key: Bytes, variable: int, held: Array) -> None:
        table = self.bytes.setdefault(key, {})
        table[variable] = table[variable] + held if variable in table else held

    def join(self, key: Time, source: int, target: int, matrix: Array) -> None:
        """Seconds [source states, target states]; inf where the two cannot go together."""
        pair = (source, target)
        if source > target:
            pair, matrix = (target, source), matrix.T
        infinite = np.isinf(matrix)
        if infinite.any():
            wall = np.where(infinite, np.inf, 0.0)
            self.hard[pair] = self.hard[pair] + wall if pair in self.hard else wall
            matrix = np.where(infinite, 0.0, matrix)
        table = self.pairs.setdefault(key, {})
        table[pair] = table[pair] + matrix if pair in table else matrix

    def only(self, kept: Mapping[int, Indices]) -> Terms:
        """The terms of these states; variables that are not named keep all."""
        if not kept:
            return self
        states = [len(kept[v]) if v in kept else n for v, n in enumerate(self.states)]
        return Terms(
            states,
            {key: _vectors(table, kept) for key, table in self.alone.items()},
            {key: _matrices(table, kept) for key, table in self.pairs.items()},
            {key: _vectors(table, kept) for key, table in self.bytes.items()},
            {pair: m for pair, m in _matrices(self.hard, kept).items() if m.any()},
        )


def _vectors(table: Mapping[int, Array], kept: Mapping[int, Indices]) -> dict[int, Array]:
    return {v: costs[kept[v]] if v in kept else costs for v, costs in table.items()}


def _matrices(
    table: Mapping[tuple[int, int], Array], kept: Mapping[int, Indices]
) -> dict[tuple[int, int], Array]:
    found = {}
    for (u, v), matrix in table.items():
        rows = matrix[kept[u]] if u in kept else matrix
        found[u, v] = np.ascontiguousarray(rows[:, kept[v]] if v in kept else rows)
    return found


TimeWeight: TypeAlias = Callable[[Time], float]
ByteWeight: TypeAlias = Callable[[Bytes], float]


def compose(
    terms: Terms, seconds: TimeWeight, held: ByteWeight, allowed: Sequence[Array | None] = ()
) -> CostNetwork:
    """The network of a weighted sum. allowed: per variable 0 or inf for each state, None for all."""
    nothing = {n: np.zeros(n) for n in set(terms.states)}  # nobody writes to the arrays of a network
    unary = [nothing[n] for n in terms.states]
    memory = list(unary)
    edges = dict(terms.hard)
    for key, table in terms.alone.items():
        weight = seconds(key)
        if weight:
            for variable, costs in table.items():
                part, so_far = weight * costs, unary[variable]
                unary[variable] = part if so_far is nothing[len(part)] else so_far + part
    for key, matrices in terms.pairs.items():
        weight = seconds(key)
        if not weight:
            continue
        for pair, matrix in matrices.items():
            part = weight * matrix
            edges[pair] = edges[pair] + part if pair in edges else part
    for kind, sizes in terms.bytes.items():
        weight = held(kind)
        if weight:
            for variable, size in sizes.items():
                part, so_far = weight * size, memory[variable]
                memory[variable] = part if so_far is nothing[len(part)] else so_far + part
    for variable, mask in enumerate(allowed):
        if mask is not None:
            unary[variable] = unary[variable] + mask
    return CostNetwork(tuple(unary), tuple(memory), edges, fits=True)


@dataclass(frozen=True)
class Profile:
    """What one assignment takes: seconds and bytes by kind."""

    seconds: Mapping[Time, float]
    bytes: Mapping[Bytes, float]


def profile(terms: Terms, states: Sequence[int]) -> Profile:
    """Sums over an assignment of all variables."""
    seconds = {}
    for key in dict.fromkeys((*terms.alone, *terms.pairs)):
        total = sum([costs.item(states[v]) for v, costs in terms.alone.get(key, {}).items()])
        total += sum([m.item(states[u], states[v]) for (u, v), m in terms.pairs.get(key, {}).items()])
        seconds[key] = total
    held = {
        key: sum([size.item(states[v]) for v, size in table.items()]) for key, table in terms.bytes.items()
    }
    return Profile(seconds, held)
