"""What the costs of a problem are made of, so that one problem serves many questions.

Time and bytes are stored by what they are (computing of a segment, a gather, ...); a question (so many
microbatches, this recomputation, that overlap) is a weight for each, and the weighted sum is an ordinary
cost network.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal, NamedTuple, TypeAlias, TypeVar

import numpy as np

from autoshard.solver.network import Array, CostNetwork, Indices

K = TypeVar("K")
TimeKind: TypeAlias = Literal[
    "work",
    "again",
    "talk",
    "exchange",
    "gather",
    "inline",
    "reduce",
    "sum",
    "first",
    "once",
    "last",
    "update",
]
ByteKind: TypeAlias = Literal["state", "sums", "sent", "held", "kept", "extra", "input", "waiting", "window"]


class Time(NamedTuple):
    """A kind of seconds.

    kind: as in `cost.step_time.StepSums`. again: what recomputing an op adds where that is not its work, as
    its values then stay inside fused kernels (`search.problem.recomputed_chains`). exchange: of tokens
    between experts, which waits in a queue with what parameters send over the same axis, so that nothing
    hides it. inline, once: what parameters take that nothing hides, in every microbatch or once a step
    (`search.problem.exposed_collectives`). sum: adding gradients to those of the microbatches before, if
    there are several. backward: the phase. segment: of what full recomputation would repeat, else "". cheap:
    whether selective recomputation would, too.
    """

    kind: TimeKind
    backward: bool = False
    segment: str = ""
    cheap: bool = False


#: kinds that do not belong to parameters
OF_ACTIVATIONS: tuple[TimeKind, ...] = ("work", "again", "talk", "exchange")


class Bytes(NamedTuple):
    """A kind of bytes.

    state: of parameters, gradients, optimizer. window: of parameters gathered while layers compute. sums:
    what gradients hold beyond that while they are summed over several microbatches: in fp32 if of half
    precision, and whole where they are reduced late. sent: gradients of one layer that wait for their
    reduction. held: activations that backward reads and that cross between segments. kept: other activations
    of a segment, which could be recomputed; cheap: by selective recomputation, too. extra: what selective
    recomputation would keep in their place. input: what a call takes and would have to be kept for full
    recomputation; cheap: for selective, too. waiting: gradients of activations that gradients of parameters
    are made of. late: whether those of parameters are made of what is held or kept, where that decides how
    much is held if they wait (`search.problem.deferred_wgrad`); else None.
    """

    kind: ByteKind
    segment: str = ""
    cheap: bool = False
    late: bool | None = None


@dataclass
class CostTerms:
    """Sums under construction. states: of every variable."""

    states: list[int] = field(default_factory=list)
    alone: dict[Time, dict[int, Array]] = field(default_factory=dict)
    pairs: dict[Time, dict[tuple[int, int], Array]] = field(default_factory=dict)
    bytes: dict[Bytes, dict[int, Array]] = field(default_factory=dict)
    #: pairs of states that cannot be: 0 or inf
    hard: dict[tuple[int, int], Array] = field(default_factory=dict)
    #: states that cannot be: 0 or inf
    walls: dict[int, Array] = field(default_factory=dict)
    _laid: _Laid | None = field(default=None, init=False, compare=False, repr=False)

    @property
    def laid(self) -> _Laid:
        """What is of single variables, in one row."""
        if self._laid is None:
            self._laid = _Laid.of(self)
        return self._laid

    def add(self, key: Time, variable: int, seconds: Array) -> None:
        self._laid = None
        table = self.alone.setdefault(key, {})
        table[variable] = table[variable] + seconds if variable in table else seconds

    def hold(self, key: Bytes, variable: int, held: Array) -> None:
        self._laid = None
        table = self.bytes.setdefault(key, {})
        table[variable] = table[variable] + held if variable in table else held

    def join(self, key: Time, source: int, target: int, matrix: Array) -> None:
        """Seconds [source states, target states]; inf where the two cannot go together.

        Source and target are one where a variable decides for two ops, of which one uses the other's value.
        """
        if source == target:
            self.add(key, source, _walled(self.walls, source, matrix.diagonal()))
            return
        pair = (source, target)
        if source > target:
            pair, matrix = (target, source), matrix.T
        matrix = _walled(self.hard, pair, matrix)
        table = self.pairs.setdefault(key, {})
        table[pair] = table[pair] + matrix if pair in table else matrix

    def walls_of(self) -> tuple[Array, ...]:
        """Per variable, 0 or inf of each of its states."""
        return tuple([self.walls[v] if v in self.walls else np.zeros(n) for v, n in enumerate(self.states)])

    def only(self, kept: Mapping[int, Indices]) -> CostTerms:
        """The terms of these states; variables that are not named keep all."""
        if not kept:
            return self
        states = [len(kept[v]) if v in kept else n for v, n in enumerate(self.states)]
        return CostTerms(
            states,
            {key: _vectors(table, kept) for key, table in self.alone.items()},
            {key: _matrices(table, kept) for key, table in self.pairs.items()},
            {key: _vectors(table, kept) for key, table in self.bytes.items()},
            {pair: m for pair, m in _matrices(self.hard, kept).items() if m.any()},
            {v: wall for v, wall in _vectors(self.walls, kept).items() if wall.any()},
        )


def _walled(walls: dict[K, Array], key: K, costs: Array) -> Array:
    """The finite costs; what is infinite is added to the walls."""
    infinite = np.isinf(costs)
    if not infinite.any():
        return costs
    wall = np.where(infinite, np.inf, 0.0)
    walls[key] = walls[key] + wall if key in walls else wall
    return np.where(infinite, 0.0, costs)


#: costs of states of some variables: at which places of all states, and how much
_Row: TypeAlias = tuple[Indices, Array]


@dataclass(frozen=True)
class _Laid:
    """States of all variables one after the other, so that a kind is weighed in one go.

    ends: where each variable's begin and end. alone, bytes: of every kind.
    """

    ends: tuple[tuple[int, int], ...]
    alone: dict[Time, _Row]
    bytes: dict[Bytes, _Row]

    @staticmethod
    def of(terms: CostTerms) -> _Laid:
        stops = [*accumulate(terms.states)]
        ends = tuple(zip([0, *stops[:-1]], stops, strict=True)) if stops else ()
        every = np.arange(stops[-1] if stops else 0)

        def row(table: Mapping[int, Array]) -> _Row:
            if not table:
                return every[:0], np.empty(0)
            return np.concatenate([every[slice(*ends[v])] for v in table]), np.concatenate([*table.values()])

        return _Laid(
            ends,
            {key: row(table) for key, table in terms.alone.items()},
            {kind: row(table) for kind, table in terms.bytes.items()},
        )

    def total(self, rows: Mapping[K, _Row], weight: Callable[[K], float]) -> list[Array]:
        """Per variable, the weighted sum of all kinds; those of the states of a variable, [states]."""
        totals = np.zeros(self.ends[-1][1] if self.ends else 0)
        for key, (at, costs) in rows.items():
            share = weight(key)
            if share:
                totals[at] += share * costs
        return [totals[a:b] for a, b in self.ends]


def _vectors(table: Mapping[int, Array], kept: Mapping[int, Indices]) -> dict[int, Array]:
    return {v: costs[kept[v]] if v in kept else costs for v, costs in table.items()}


def _matrices(
    table: Mapping[tuple[int, int], Array], kept: Mapping[int, Indices]
) -> dict[tuple[int, int], Array]:
    matrices = {}
    for (u, v), matrix in table.items():
        rows = matrix[kept[u]] if u in kept else matrix
        matrices[u, v] = np.ascontiguousarray(rows[:, kept[v]] if v in kept else rows)
    return matrices


TimeWeight: TypeAlias = Callable[[Time], float]
ByteWeight: TypeAlias = Callable[[Bytes], float]


def compose(
    terms: CostTerms, seconds: TimeWeight, held: ByteWeight, allowed: Sequence[Array | None] = ()
) -> CostNetwork:
    """The network of a weighted sum. allowed: per variable 0 or inf for each state, None for all."""
    laid = terms.laid
    unary, memory = laid.total(laid.alone, seconds), laid.total(laid.bytes, held)
    for variable, wall in terms.walls.items():
        unary[variable] = unary[variable] + wall
    edges = dict(terms.hard)
    for key, matrices in terms.pairs.items():
        weight = seconds(key)
        if not weight:
            continue
        for pair, matrix in matrices.items():
            part = matrix if weight == 1 else weight * matrix  # nobody writes to the arrays of a network
            edges[pair] = edges[pair] + part if pair in edges else part
    for variable, mask in enumerate(allowed):
        if mask is not None:
            unary[variable] = unary[variable] + mask
    return CostNetwork(tuple(unary), tuple(memory), edges, fits=True)


@dataclass(frozen=True)
class AssignmentCosts:
    """What one assignment takes: seconds and bytes by kind."""

    seconds: Mapping[Time, float]
    bytes: Mapping[Bytes, float]


def profile(terms: CostTerms, states: Sequence[int]) -> AssignmentCosts:
    """Sums over an assignment of all variables."""
    seconds = {}
    for key in dict.fromkeys((*terms.alone, *terms.pairs)):
        total = sum([costs.item(states[v]) for v, costs in terms.alone.get(key, {}).items()])
        total += sum([m.item(states[u], states[v]) for (u, v), m in terms.pairs.get(key, {}).items()])
        seconds[key] = total
    held = {
        key: sum([size.item(states[v]) for v, size in table.items()]) for key, table in terms.bytes.items()
    }
    return AssignmentCosts(seconds, held)
