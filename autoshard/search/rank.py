"""Which configurations are worth solving exactly: an estimate for each, and a bound that no plan beats.

A few exact solutions per shape of the mesh, from the smallest to the largest microbatch, give everything else
by interpolation. What is least over all placements is concave in the batch (a least of sums of concave
costs), so the chord between two of them is a lower bound for every microbatch between.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from typing import TypeVar

from autoshard.cluster.cluster import Cluster
from autoshard.cluster.mesh import Mesh
from autoshard.cost.collective import AxisLink, seconds
from autoshard.cost.on_mesh import cost_model
from autoshard.cost.recipe import Recipe
from autoshard.cost.step_time import Sums, bubble_seconds, busy_seconds, mixed
from autoshard.search.again import Filling
from autoshard.search.parameters import Parameters, Zero, parameters_of
from autoshard.search.pipe import Pipe
from autoshard.search.problems import Posed
from autoshard.search.setting import OF_STATE, Setting
from autoshard.search.settle import Placed
from autoshard.search.terms import Profile
from autoshard.search.uneven import busiest

K = TypeVar("K")
V = TypeVar("V")
#: what sharing scalars among data ranks takes is less than the rest of this share of a microbatch
_ALONE = 0.98
#: how much slower than the best known a configuration may be, without a memory limit, to be looked at closely
_FAR = 1.2
#: sums of the same seconds in another order differ by less than this share
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Configuration:
    """A mesh and a number of microbatches. batch: sequences of one microbatch over the whole mesh.

    pipe: the pipeline, each of whose ranks is such a mesh.
    """

    mesh: Mesh
    batch: int
    microbatches: int
    pipe: Pipe = field(default_factory=Pipe)

    @property
    def name(self) -> str:
        """``pp=4,dp=8,tp=8``"""
        return str(self.mesh) if self.pipe.ranks == 1 else f"pp={self.pipe.ranks},{self.mesh}"


@dataclass(frozen=True)
class Staged:
    """A mesh for every one of ``ranks`` pipeline ranks, with the pipelines to try.

    batches: sequences of a microbatch over the mesh that are allowed, () for all that divide. link: between
    pipeline ranks, None where there is one.
    """

    mesh: Mesh
    pipes: tuple[Pipe, ...] = (Pipe(),)
    batches: tuple[int, ...] = ()
    link: AxisLink | None = None

    def hop_seconds(self, nbytes: float) -> float:
        """Seconds to send so many bytes per data rank to the next stage; each tensor rank sends its part."""
        if self.link is None:
            return 0.0
        inner = self.mesh.world_size // data_ways(self.mesh)
        return seconds("send", nbytes / inner, self.link)

    @property
    def ranks(self) -> int:
        return self.pipes[0].ranks

    @property
    def world_size(self) -> int:
        return self.ranks * self.mesh.world_size


@dataclass(frozen=True)
class Estimated:
    """A configuration with an estimated setting and seconds, and a lower bound in seconds.

    bound: ranks of a pipeline wait as the formula of the shortest schedule says; nothing else is in the way.
    hopeless: whether what parameters take leaves no room for anything else in any placements that were looked
    at. choices: states of all variables of a problem of its shape, which say how long a solution takes.
    """

    configuration: Configuration
    setting: Setting
    seconds: float
    bound: float
    hopeless: bool = False
    choices: int = 0


@dataclass(frozen=True)
class Way:
    """Placements of everything: what they take, and how they use the parameters."""

    taken: Profile
    parameters: Parameters


@dataclass(frozen=True)
class End:
    """One microbatch solved exactly.

    batch: sequences per data rank. free: the fastest placements. seconds: that computing and talking take at
    least. find_lean: makes placements that hold less, gradients on their way counted or not. find_bytes: says
    what is held at least, with everything computed again. Both are asked only where memory is short.
    find_chain: seconds of the ops of forward, in order; only asked where there are pipelines.
    """

    batch: int
    free: Way
    seconds: float
    find_lean: Callable[[bool], Way]
    find_bytes: Callable[[], float]
    find_chain: Callable[[], tuple[float, ...]]

    @cached_property
    def lean(self) -> Way:
        """For steps without a pipeline."""
        return self.find_lean(True)

    @cached_property
    def staged(self) -> Way:
        """For the stages of a pipeline, which have nothing on its way to a reduction."""
        return self.find_lean(False)

    def holding(self, staged: bool) -> Way:
        """Placements that hold less. staged: for a stage of a pipeline."""
        return self.staged if staged else self.lean

    @cached_property
    def bytes(self) -> float:
        return self.find_bytes()

    @cached_property
    def chain(self) -> tuple[float, ...]:
        return self.find_chain()


@dataclass(frozen=True)
class Shape:
    """Meshes that differ only in their data axes (and pipelines), solved at a few microbatches.

    What computes and talks in one microbatch depends on the sequences of one data rank, not on how many data
    ranks there are, but for scalars that all of them share: the mesh with the fewest, at least two, was
    solved. ends: by sequences, ascending. between: bytes that one sequence hands from layer to layer.
    choices: states of all variables of one problem.
    """

    meshes: tuple[Staged, ...]
    ends: tuple[End, ...]
    between: float = 0.0
    choices: int = 0

    def free(self, batch: int) -> Profile:
        """The fastest placements, interpolated between two ends, without what belongs to parameters."""
        low, high, t = self.place(batch)
        return _between(low.free, high.free, t)

    def lean(self, batch: int, staged: bool) -> Profile:
        """The same for those that hold less. staged: as a stage of a pipeline."""
        low, high, t = self.place(batch)
        return _between(low.holding(staged), high.holding(staged), t)

    def seconds(self, batch: int) -> float:
        """Seconds that one microbatch takes at least."""
        low, high, t = self.place(batch)
        return low.seconds + t * (high.seconds - low.seconds)

    def bytes(self, batch: int) -> float:
        """Bytes that are held at least."""
        low, high, t = self.place(batch)
        return low.bytes + t * (high.bytes - low.bytes)

    def covers(self, batch: int) -> bool:
        return self.ends[0].batch <= batch <= self.ends[-1].batch

    def place(self, batch: int) -> tuple[End, End, float]:
        """The ends around a number of sequences per data rank, and how far it is from one to the other."""
        above = next(k for k, end in enumerate(self.ends) if end.batch >= batch)
        low, high = self.ends[max(0, above - 1)], self.ends[above]
        width = high.batch - low.batch
        return low, high, (batch - low.batch) / width if width else 0.0


def _between(low: Way, high: Way, t: float) -> Profile:
    times = _mixed(low.taken.seconds, high.taken.seconds, t)
    held = _mixed(low.taken.bytes, high.taken.bytes, t)
    return Profile(
        {k: v for k, v in times.items() if k.kind in ("work", "talk")},
        {k: v for k, v in held.items() if k.kind not in OF_STATE},
    )


def way_of(posed: Posed, placed: Placed) -> Way:
    """What is worth knowing of placements."""
    return Way(placed.taken, parameters_of(posed, placed))


def rank(
    shape: Shape,
    total: int,
    cluster: Cluster,
    setting: Setting,
    budget: float | None,
    recipe: Recipe,
    known: float = inf,
) -> list[Estimated]:
    """All configurations of a shape that may fit, for a global batch of ``total`` sequences.

    Where the fastest placements do not fit as they are, those that hold less are looked at, too. One that
    seems not to fit, without that being proven, has infinite estimated seconds. known: seconds of a step that
    another shape is thought to reach: what is far slower even without a memory limit stays at that estimate,
    and what is so by its bound at that.
    """
    found: list[Estimated] = []
    near: list[_Candidate] = []
    for one in _candidates(shape, total, cluster, setting, budget, recipe):
        if one.bound <= known * _FAR:
            near.append(one)
        else:
            where = Configuration(one.mesh, one.batch, one.ways.count, one.ways[0].pipe)
            found.append(Estimated(where, one.ways[0], one.bound, one.bound, choices=shape.choices))
    # the fastest first, so that little is looked at closely
    for one in sorted(near, key=lambda c: c.floor):
        best, how = one.best(known * _FAR)
        where = Configuration(one.mesh, one.batch, one.ways.count, how.pipe)
        if best is not None:
            bound = min(one.bound, best)
            found.append(Estimated(where, how, best, bound, choices=shape.choices))
            known = min(known, best)
        elif budget is not None and one.least_bytes() <= budget:
            found.append(Estimated(where, how, inf, one.bound, not one.leaves_room(), shape.choices))
    return found


def _candidates(
    shape: Shape, total: int, cluster: Cluster, setting: Setting, budget: float | None, recipe: Recipe
) -> Iterator[_Candidate]:
    """Every mesh of a shape with every microbatch that divides the global one."""
    lives: dict[tuple[Mesh, bool], _Lives] = {}
    bare: dict[tuple[int, bool], _Bare] = {}
    uneven: dict[tuple[Pipe, ...], tuple[float, ...]] = {}
    zeros = _Zeros(cluster, recipe)
    for staged in shape.meshes:
        mesh, ways = staged.mesh, data_ways(staged.mesh)
        cut = staged.ranks > 1
        if (mesh, cut) not in lives:
            lives[mesh, cut] = _Lives(shape, cut, mesh, zeros, setting)
        of_mesh = lives[mesh, cut]
        if staged.pipes not in uneven:
            # alike for any microbatch
            uneven[staged.pipes] = tuple(
                busiest(shape.ends[0].chain, p) if cut else 1.0 for p in staged.pipes
            )
        for batch in staged.batches or microbatch_sizes(mesh, total):
            each = batch // ways
            if not shape.covers(each):
                continue
            count = max(1, total // batch)
            if (each, cut) not in bare:
                bare[each, cut] = _Bare(shape, cut, each, setting)
            ways_to_run = _Ways(setting, count, staged.pipes, staged.hop_seconds(shape.between * each))
            # alone, a data rank has not even scalars to share
            slack = 1.0 if ways > 1 else _ALONE
            runs = count + min(p.filling for p in staged.pipes)
            bound = slack * runs * shape.seconds(each) / staged.ranks
            yield _Candidate(
                mesh, batch, bare[each, cut], of_mesh, ways_to_run, uneven[staged.pipes], bound, budget
            )


class _Bare:
    """A microbatch of ``each`` sequences per data rank, on any mesh of a shape.

    free_sums, lean_sums: seconds that it takes, with nothing computed again.
    """

    def __init__(self, shape: Shape, staged: bool, each: int, setting: Setting) -> None:
        self._shape, self._staged, self.each, self._setting = shape, staged, each, setting

    @cached_property
    def free(self) -> Filling:
        return Filling(self._shape.free(self.each), self._setting.calls)

    @cached_property
    def lean(self) -> Filling:
        return Filling(self._shape.lean(self.each, self._staged), self._setting.calls)

    @property
    def least_bytes(self) -> float:
        """Bytes that the whole model holds at least."""
        return self._shape.bytes(self.each)

    @cached_property
    def free_sums(self) -> Sums:
        return self._setting.sums(self.free.taken)

    @cached_property
    def lean_sums(self) -> Sums:
        return self._setting.sums(self.lean.taken)


class _Ways:
    """The pipelines that a microbatch may run through, ``count`` times a step; hop: see `Pipe`."""

    def __init__(self, setting: Setting, count: int, pipes: Sequence[Pipe], hop: float) -> None:
        self._setting, self.count, self._pipes, self._hop = setting, count, pipes, hop
        self._made: dict[int, Setting] = {}

    def __getitem__(self, k: int) -> Setting:
        if k not in self._made:
            pipe = replace(self._pipes[k], hop=self._hop)
            self._made[k] = replace(self._setting, microbatches=self.count, pipe=pipe)
        return self._made[k]

    @property
    def ranks(self) -> int:
        """Of each of the pipelines."""
        return self._pipes[0].ranks

    def totals(self, plain: Sequence[Sums]) -> list[list[float]]:
        """Seconds of steps by each pipeline that take these sums, nothing computed again; [pipes, sums].

        All that a schedule says of them is how long ranks wait.
        """
        how = self[0].how
        busy = [(sums, busy_seconds(sums, how)) for sums in plain]
        waits = [(p.filling, p.legs * self._hop) for p in self._pipes]
        return [[b + bubble_seconds(s, how.stages, *wait) for s, b in busy] for wait in waits]


@dataclass(frozen=True)
class _Candidate:
    """A microbatch on one mesh. batch: its sequences. uneven: seconds of a step over those with equal stages,
    by pipeline. bound: in seconds, of any placements."""

    mesh: Mesh
    batch: int
    bare: _Bare
    lives: _Lives
    ways: _Ways
    uneven: tuple[float, ...]
    bound: float
    budget: float | None

    @cached_property
    def _steps(self) -> list[list[float]]:
        """Seconds that the fastest placements take if nothing is computed again; [pipes, lives]."""
        sums = self.lives.sums(self.bare.each, lean=False)
        return self.ways.totals([self.bare.free_sums + extra for extra in sums])

    @cached_property
    def _floors(self) -> list[tuple[float, int]]:
        """(the least of these, number of the pipeline), the fastest first."""
        return sorted((self.uneven[k] * min(row, default=inf), k) for k, row in enumerate(self._steps))

    @property
    def floor(self) -> float:
        """Seconds of the fastest pipeline without a memory limit."""
        return self._floors[0][0]

    def least_bytes(self) -> float:
        """Bytes that are held at least."""
        return self.bare.least_bytes / self.ways.ranks

    def best(self, far: float) -> tuple[float | None, Setting]:
        """(seconds, setting) of the fastest that fits; None in place of seconds if none seems to fit."""
        ways, of_lean, each = self.ways, None, self.bare.each
        steps, floors = self._steps, self._floors
        best: tuple[float, Setting] | None = None
        for floor, k in floors:
            if floor > far and best is None:
                return floor, ways[k]
            if best is not None and floor >= best[0]:
                break
            filled = _best(self.bare.free, self.lives.at(each, lean=False), steps[k], ways[k], self.budget)
            if self.budget is not None and (filled is None or filled[0].recompute):
                if of_lean is None:
                    leaner = self.lives.sums(each, lean=True)
                    of_lean = ways.totals([self.bare.lean_sums + extra for extra in leaner])
                lives = self.lives.at(each, lean=True)
                other = _best(self.bare.lean, lives, of_lean[k], ways[k], self.budget)
                filled = min((b for b in (filled, other) if b is not None), key=lambda b: b[1], default=None)
            if filled is not None and (best is None or self.uneven[k] * filled[1] < best[0]):
                best = (self.uneven[k] * filled[1], filled[0])
        return (None, ways[floors[0][1]]) if best is None else best

    def leaves_room(self) -> bool:
        """Whether parameters alone fit, in any of the placements."""
        how, each = self.ways[0], self.bare.each
        ways = ((self.bare.free, False), (self.bare.lean, True))
        return self.budget is None or any(
            filling.state_bytes(how, extra) <= self.budget
            for filling, lean in ways
            for extra in self.lives.at(each, lean=lean)
        )


class _Lives:
    """What the parameters of a shape may take on one mesh, by the sequences of a data rank.

    Placements of different microbatches may use parameters differently (experts are gathered for many
    sequences, and exchange rows for few), so what they take is interpolated as everything else is.
    """

    def __init__(self, shape: Shape, staged: bool, mesh: Mesh, zeros: _Zeros, setting: Setting) -> None:
        self._shape, self._staged, self._mesh, self._zeros = shape, staged, mesh, zeros
        self._setting = setting
        self._links = cost_model(zeros.cluster, mesh).reshard.links
        self._used: dict[str, tuple[list[Profile], list[Sums]]] = {}
        self._at: dict[tuple[int, bool], list[Profile]] = {}

    def at(self, each: int, *, lean: bool) -> list[Profile]:
        """By stages of ZeRO. lean: of placements that hold less."""
        if (each, lean) not in self._at:
            low, high, t = self._shape.place(each)
            low_stages, high_stages = _paired(self._of(low, lean)[0], self._of(high, lean)[0], t)
            self._at[each, lean] = [
                a if a is b else Profile(_mixed(a.seconds, b.seconds, t), _mixed(a.bytes, b.bytes, t))
                for a, b in zip(low_stages, high_stages, strict=True)
            ]
        return self._at[each, lean]

    def sums(self, each: int, *, lean: bool) -> list[Sums]:
        """The seconds among it."""
        low, high, t = self._shape.place(each)
        low_stages, high_stages = _paired(self._of(low, lean)[1], self._of(high, lean)[1], t)
        return [a if a is b else mixed(a, b, t) for a, b in zip(low_stages, high_stages, strict=True)]

    def _of(self, end: End, lean: bool) -> tuple[list[Profile], list[Sums]]:
        used = (end.holding(self._staged) if lean else end.free).parameters
        if used.likeness not in self._used:
            found = self._zeros.of(used).stages(self._mesh, self._links)
            self._used[used.likeness] = found, [self._setting.sums(extra) for extra in found]
        return self._used[used.likeness]


class _Zeros:
    """What parameters take, each use of them worked out once for all meshes."""

    def __init__(self, cluster: Cluster, recipe: Recipe) -> None:
        self.cluster, self.recipe = cluster, recipe
        self._made: dict[str, Zero] = {}

    def of(self, used: Parameters) -> Zero:
        if used.likeness not in self._made:
            self._made[used.likeness] = Zero(used, self.cluster, self.recipe)
        return self._made[used.likeness]


def _paired(low: list[V], high: list[V], t: float) -> tuple[list[V], list[V]]:
    """What is interpolated between two ends, stage by stage; that of one where the other has none."""
    if t == 0.0 or not high or low is high:
        return low, low
    if t == 1.0 or not low:
        return high, high
    most = max(len(low), len(high))
    # where nothing is gathered all stages are the same
    return (low * most if len(low) == 1 else low), (high * most if len(high) == 1 else high)


def _best(
    bare: Filling, lives: Sequence[Profile], floors: Sequence[float], how: Setting, budget: float | None
) -> tuple[Setting, float] | None:
    """(setting, seconds of a step) of the fastest way that fits, or None.

    floors: for each of the lives, seconds of a step that nothing has to be computed again for.
    """
    best: tuple[Setting, float] | None = None
    for extra, floor in zip(lives, floors, strict=True):
        # computing again only adds, but for rounding
        if best is not None and floor > (1 + _ROUNDING) * best[1]:
            continue
        found = (how, floor) if budget is None else bare.best(how, budget, extra, floor)
        if found is not None and (best is None or found[1] < best[1]):
            best = found
    return best


def microbatch_sizes(mesh: Mesh, total: int) -> list[int]:
    """Sequences per microbatch over the whole mesh that divide the global batch evenly."""
    ways = data_ways(mesh)
    if total % ways:
        return []
    each = total // ways
    return [ways * b for b in range(1, each + 1) if each % b == 0]


def alike(where: Configuration) -> Hashable:
    """What configurations share that only divide the data ranks otherwise."""
    return inside(where.mesh), where.batch // data_ways(where.mesh), where.pipe.ranks


def inside(mesh: Mesh) -> tuple[tuple[str, int], ...]:
    """Names and sizes of the axes that do more than split the batch and store parameters."""
    return tuple(
        (a.name, a.size) for a in mesh.axes if not a.meaning.splits_batch or a.meaning.divides_experts
    )


def data_ways(mesh: Mesh) -> int:
    """How many ranks split the batch."""
    ways = 1
    for axis in mesh.axes:
        ways *= axis.size if axis.meaning.splits_batch else 1
    return ways


def _mixed(a: Mapping[K, float], b: Mapping[K, float], t: float) -> dict[K, float]:
    return {k: (1 - t) * a.get(k, 0.0) + t * b.get(k, 0.0) for k in dict.fromkeys((*a, *b))}


def shapes_of(meshes: Sequence[Staged], owners: int = 0) -> list[tuple[Staged, ...]]:
    """Meshes that differ only in their data axes and pipelines, together; fewest data ranks and then most
    sharded ones first.

    owners: how many experts there are that an axis of stored parameters may divide, 0 for none. Then data
    axes of different sizes stay apart, and only the mesh that divides experts furthest is kept, beside the
    one that stores everything whole, since gathering experts costs far more.
    """
    groups: dict[object, list[Staged]] = {}
    for staged in meshes:
        ways = data_ways(staged.mesh)
        groups.setdefault((ways if owners else 0, inside(staged.mesh)), []).append(staged)
    found: list[tuple[Staged, ...]] = []
    for group in groups.values():
        # a single data rank has no batch axis to place, so it comes last
        ordered = sorted(
            group, key=lambda s: (data_ways(s.mesh) == 1, data_ways(s.mesh), -_sharded(s.mesh), s.ranks)
        )
        if not owners:
            found.append(tuple(ordered))
            continue
        alone = next((s.mesh for s in ordered if owners % _sharded(s.mesh) == 0), None)
        kept = [s for s in ordered if s.mesh == alone or _sharded(s.mesh) == 1] if alone else ordered
        found.append(tuple(sorted(kept, key=lambda s: s.mesh != alone)))
    return found


def _sharded(mesh: Mesh) -> int:
    ways = 1
    for axis in mesh.axes:
        ways *= axis.size if axis.meaning.stores_sharded else 1
    return ways
