"""Other ways to run the step of a plan, tried once it stands: activations in host memory, experts' tokens in
chunks, forwards beside backwards of other microbatches, sequences in slices."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product

from autoshard.cluster import Mesh
from autoshard.cluster.host import Host
from autoshard.options import PlanOptions
from autoshard.planner.planned import WORTH, Planned
from autoshard.planner.source import Source
from autoshard.schedules.registry import lookup, sliced
from autoshard.search.problem.problem import experts_of, tokens_of
from autoshard.search.solve.configuration import Staged, data_ways, inside, staged_as
from autoshard.search.solve.formulate import layer_calls

#: tokens of a tile on a rank, where a plan needs tiles: products of so many rows reach their full rate
TILE_ROWS = 2048
#: share of the layers that are recomputed in full for tiles to be tried, and of a step that they must spare
_MOST_LAYERS, _TILED = 0.5, 0.03
#: chunks in which the tokens of experts are exchanged, each tried where the one before was so much faster
_EXPERT_CHUNKS = (1, 2, 4)
#: slices of a sequence, likewise: fewer gain no more than several stages per rank do
_SLICES = (4, 8)
#: layers times slices of a program that takes seconds to make
_MOST_CALLS = 512
#: runners-up whose programs are compared, and as how many times as long their steps may be priced
_MOST_RUNNERS_UP, _NEAR = 3, 1.15
#: as how many times as long a step in one piece may take, for chunks to be tried
_CLOSE = 1.05
#: share of a step that activations in host memory may spare at least, for them to be tried, and that they
#: spare where other ways are tried with them rather than without
_SPARED, _MUCH = 0.03, 0.03
#: and that more memory would spare of the search's step, where that decides how layers are divided
_ROOM = 0.08


@dataclass(frozen=True)
class Alternative:
    """options: with its schedule. meshes: where, () for all that options allow. source: the model, with its
    tiles and chunks of experts. text: what it is, in words. beat: what cannot be faster is pruned. below: as
    how many times the fastest step so far its step has to take less."""

    options: PlanOptions
    meshes: Sequence[Staged]
    source: Source
    text: str
    beat: Planned | None = None
    below: float = 1 - WORTH


#: a plan of the same batch that runs in another way, None if none fits
Replan = Callable[[Planned, Alternative], Planned | None]
#: the same, of one that is kept if it is the fastest so far
_Try = Callable[[Alternative], Planned | None]
#: the meshes that options allow
Candidates = Callable[[PlanOptions], list[Staged]]


@dataclass(frozen=True)
class Alternatives:
    """planned: what they are compared with, by their programs. searched: whether its mesh was searched.
    with_room: seconds of the best step if there were more memory."""

    planned: Planned
    options: PlanOptions
    searched: bool
    candidates: Candidates
    replan: Replan
    with_room: Callable[[], float]

    def faster(self) -> list[tuple[Alternative, Planned]]:
        """Each faster than the next, and the last faster than the plan."""
        if not self.planned.simulated:
            return []
        best: list[tuple[Alternative, Planned]] = []

        def better(tried: Alternative) -> Planned | None:
            result = self.replan(of.planned, tried)
            if result is not None and result.step < tried.below * fastest().step:
                best.insert(0, (tried, result))
            return result

        def fastest() -> Planned:
            return best[0][1] if best else self.planned

        of = self
        if self._hosts:
            # on one mesh, as with experts, most need no tiles; over all meshes, the plan with tiles rules
            # out much of the search without
            ways = [self._try_tiles, self._try_host]
            for way in reversed(ways) if experts_of(self.planned.analysis.model) else ways:
                way(better, fastest)
        if best and fastest().step < (1 - _MUCH) * self.planned.step:
            of = replace(self, planned=fastest(), options=best[0][0].options)
        of._try_expert_chunks(better, fastest)
        of._try_pairs(better)
        of._try_slices(better, fastest, self.options.offload)
        return best

    @property
    def _hosts(self) -> bool:
        """Whether activations may wait in host memory, and do not yet; that of a CPU is its own memory."""
        device, plan = self.planned.cluster.device, self.planned.plan
        may = device.kernels.multiprocessors and device.host is not None
        return bool(may) and not self.options.offload and not plan.offload

    def _try_tiles(self, better: _Try, fastest: Callable[[], Planned]) -> None:
        """Activations that wait in host memory, and what is wide in tiles, where memory still asks for most
        layers to be recomputed in full: what does not wait for backward cannot be in host memory."""
        before = fastest()
        assert before.solution is not None
        folded, config = before.analysis.folded, before.solution.configuration
        full = sum(r.calls for r in before.plan.recompute.values() if r.policy == "full")
        few = tokens_of(folded) < config.mesh.world_size * config.pipe.ranks * TILE_ROWS
        if self.options.tile_rows is not None or self.source.tile_rows or few:
            return
        if full > _MOST_LAYERS * sum(layer_calls(folded).values()):
            source = replace(self.source, tile_rows=TILE_ROWS)
            text = f"tiles of {TILE_ROWS:,} tokens in MLPs, head and loss, and "
            below = min(1.0, (1 - _TILED) * self.planned.step / before.step)
            better(replace(self._hosted(source, text, before), below=below))

    def _try_host(self, better: _Try, fastest: Callable[[], Planned]) -> None:
        """Activations that wait in host memory, where that may spare recomputing, or tiles."""
        host, plan = self.planned.cluster.device.host, self.planned.plan
        assert host is not None
        tiled = len(self._less_tiled) > 1
        experts = experts_of(self.planned.analysis.model)
        recomputing = plan.recompute and self._spared(host) > _SPARED * self.planned.step
        if tiled or recomputing or (not experts and self._is_divided_for_room()):
            before = fastest()
            _first_that_fits(better, (self._hosted(s, "", before) for s in self._less_tiled))

    def _hosted(self, source: Source, text: str, before: Planned) -> Alternative:
        """On any mesh, or with experts, which make every mesh a problem of its own, on the same."""
        options = replace(self.options, offload="activations")
        experts = experts_of(self.planned.analysis.model)
        meshes = same_as(self.candidates(options), self.planned) if experts else ()
        return Alternative(options, meshes, source, f"{text}activations in host memory", before)

    def _is_divided_for_room(self) -> bool:
        """Whether with more memory a dense model's layers would be divided less, and steps be shorter."""
        solution, plan = self.planned.solution, self.planned.plan
        assert solution is not None
        if not self.searched or (plan.pipeline is None and not inside(solution.configuration.mesh)):
            return False
        return self.with_room() < (1 - _ROOM) * solution.placements.seconds

    def _spared(self, host: Host) -> float:
        """Seconds of recomputing for what may be copied to the host while forward computes."""
        assert self.planned.solution is not None
        placements = self.planned.solution.placements
        setting, usage = placements.setting, placements.usage
        forward = setting.sums(usage).work_forward
        copying = host.seconds(sum(n for key, n in usage.bytes.items() if key.kind in ("kept", "held")))
        return setting.recompute_seconds(usage) * (min(1.0, forward / copying) if copying else 1.0)

    def _try_expert_chunks(self, better: _Try, fastest: Callable[[], Planned]) -> None:
        """On the same mesh and on runners-up that divide experts among another number of ranks; the options
        may say in how many chunks."""
        if self.options.expert_chunks or self.source.expert_chunks > 1 or self.source.allow:
            return
        same = same_as(self.candidates(self.options), self.planned) if self.planned.exchanges else []
        others = islice(self._runners_up(), _MOST_RUNNERS_UP)
        trials = [(same, _EXPERT_CHUNKS[1:])] if same else []
        for meshes, several in (*trials, *((other, _EXPERT_CHUNKS) for other in others)):
            for chunks in several:
                text = f"the tokens of experts in {chunks} chunks on {meshes[0].mesh}"
                before = fastest()
                source = replace(self.source, expert_chunks=chunks)
                result = better(Alternative(self.options, meshes, source, text))
                if result is None:
                    break
                if fastest() is before and (chunks > 1 or result.step > _CLOSE * before.step):
                    break

    def _try_pairs(self, better: _Try) -> None:
        """A pipeline that exchanges tokens, with forwards that run as one with backwards."""
        pipeline = self.planned.plan.pipeline
        if pipeline is None or self.options.schedule or not self.planned.exchanges:
            return
        if overlapped := lookup(pipeline.schedule).overlapped:
            options = replace(self.options, schedule=overlapped, chunks=pipeline.chunks)
            better(self._on_the_same(options, self.source, "forwards beside backwards"))

    def _try_slices(self, better: _Try, fastest: Callable[[], Planned], offload: str) -> None:
        """A pipeline whose microbatches cannot be smaller, with their sequences in slices, where that is
        shorter if it costs nothing (`schedules.seq1f1b`). Slices hold less: they may need no tiles, and no
        more in host memory than was asked for, ``offload``."""
        staging, plan, asked = self.planned.staging, self.planned.plan, self.options.schedule
        names = [n for n in sliced() if not asked or (n == asked and self.options.slices is None)]
        if staging is None or not names or plan.batch != self._data_ranks:
            return
        ranks, microbatches = staging.pipeline.ranks, plan.microbatches
        busy = sum(staging.timeline.busy) / ranks
        layers = sum(layer_calls(self.planned.analysis.folded).values())
        for name, slices in product(names, _SLICES):
            before = fastest()
            shortest = busy * (1 + (ranks - 1) / (microbatches * slices))
            if shortest > (1 - WORTH) * before.step or layers * slices > _MOST_CALLS:
                continue
            chunks = self.options.chunks if asked else None
            options = replace(self.options, schedule=name, chunks=chunks, slices=slices)
            less = product(dict.fromkeys((offload, options.offload)), self._less_tiled)
            text = f"{slices} slices of each sequence"
            tries = (self._on_the_same(replace(options, offload=kinds), s, text) for kinds, s in less)
            _first_that_fits(better, tries)
            if fastest() is before:
                break

    @property
    def source(self) -> Source:
        """The model as the plan has it."""
        assert self.planned.source is not None
        return self.planned.source

    @property
    def _less_tiled(self) -> list[Source]:
        """The model without tiles that only the planner wanted, then as the plan has it."""
        rows = dict.fromkeys((self.options.tile_rows or 0, self.source.tile_rows))
        return [replace(self.source, tile_rows=n) for n in rows]

    @property
    def _data_ranks(self) -> int:
        assert self.planned.solution is not None
        return data_ways(self.planned.solution.configuration.mesh)

    def _on_the_same(self, options: PlanOptions, source: Source, text: str) -> Alternative:
        """On the mesh of the plan."""
        (staged,) = same_as(self.candidates(options), self.planned)
        return Alternative(options, (staged,), source, f"{text} on pp={staged.ranks},{staged.mesh}")

    def _runners_up(self) -> Iterator[list[Staged]]:
        """The best other meshes without a pipeline that divide experts, each among another number of ranks,
        whose step was thought to take little longer."""
        solution = self.planned.solution
        if not self.searched or solution is None:
            return
        candidates = {str(s.mesh): s for s in self.candidates(self.options) if s.ranks == 1}
        config = solution.configuration
        known = {1} if config.pipe.ranks > 1 else {1, _expert_ranks(config.mesh)}
        for rejected in sorted(solution.rejected, key=lambda r: r.seconds):
            other = candidates.get(rejected.name.split()[0])
            if other is None or rejected.seconds > _NEAR * solution.placements.seconds:
                continue
            ranks = _expert_ranks(other.mesh)
            if ranks not in known:
                known.add(ranks)
                yield [other]


def same_as(meshes: Sequence[Staged], planned: Planned) -> list[Staged]:
    """The mesh and the microbatch of a plan, and the pipelines it may have."""
    assert planned.solution is not None
    return [staged_as(meshes, planned.solution.configuration)]


def _first_that_fits(better: _Try, tries: Iterable[Alternative]) -> None:
    """Try them one after the other, up to one that has a plan."""
    for each in tries:
        if better(each) is not None:
            return


def _expert_ranks(mesh: Mesh) -> int:
    """Among how many ranks an axis for them divides experts."""
    return math.prod(axis.size for axis in mesh.axes if axis.meaning.divides_experts)
