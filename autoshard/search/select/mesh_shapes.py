"""Shapes of the mesh, each solved at its smallest and its largest microbatch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import gcd

from autoshard.cluster.mesh import Mesh
from autoshard.errors import UsageError
from autoshard.search.bound.anchor import AnchorProblem
from autoshard.search.bound.estimate import Estimated
from autoshard.search.bound.mesh_families import MeshFamily
from autoshard.search.bound.ranking import rank
from autoshard.search.problem.problem import experts_of
from autoshard.search.select.request import SearchRequest
from autoshard.search.solve.axis_traffic import between_layers, tied_bytes
from autoshard.search.solve.configuration import Staged, data_ways, microbatch_sizes
from autoshard.search.solve.param_costs import whole_state
from autoshard.search.solve.problem_cache import ProblemCache
from autoshard.search.solve.step_config import StepConfig

#: a shape is also solved at about so many times its smallest microbatch, where most plans are, if there are
#: microbatches far beyond that
_MIDDLE = 8
#: but problems of more states than this take too long for a third time
_LARGE = 8_000
#: microbatches that are solved for their bounds alone, by all shapes together, of problems that are not large
_FURTHER = 12


class MeshShapes:
    """Solves and ranks shapes. total: sequences per step. A search under another budget finds what was solved
    before (`within`)."""

    def __init__(
        self,
        problems: ProblemCache,
        request: SearchRequest,
        setting: StepConfig,
        total: int,
        progress: Callable[[str], None],
    ) -> None:
        self.problems, self.request, self.setting = problems, request, setting
        self.total, self.progress = total, progress
        #: how many microbatches were solved for their bounds alone
        self.further = 0
        self._solved: dict[tuple[Staged, ...], MeshFamily] = {}

    def within(self, request: SearchRequest) -> MeshShapes:
        """The same shapes for another `SearchRequest.within` some memory."""
        shapes = MeshShapes(self.problems, request, self.setting, self.total, self.progress)
        shapes._solved = self._solved
        return shapes

    def reachable(self, meshes: Sequence[Staged]) -> list[Staged]:
        """Meshes whose data ranks divide the batch, or the microbatch that is asked for; of the others, with
        the rest as an axis for the sequence: ``cp`` if attention is causal, else a free one.

        More ranks than sequences only help if something other than the batch is divided, too.
        """
        if len(meshes) == 1:
            return list(meshes)
        rows = {s: s.batches[0] if len(s.batches) == 1 else self.total for s in meshes}
        usable = [s for s in meshes if rows[s] % data_ways(s.mesh) == 0]
        if any(s.ranks == 1 for s in usable) and len(usable) == len([s for s in meshes if s.ranks == 1]):
            return usable
        for staged in meshes:
            mesh = staged.mesh
            data = [a for a in mesh.axes if a.meaning.splits_batch]
            ways = gcd(rows[staged], data_ways(mesh))
            if staged.ranks == 1 and len(data) == 1 and ways < data[0].size:
                name = "cp" if self.problems.model.digits.zigzag else "seq"
                usable.append(replace(staged, mesh=mesh.with_sequence_axis(name, data[0].size // ways)))
        # without a data axis it does not matter which one there was
        return list(dict.fromkeys(usable)) or list(meshes)

    def solved(self, group: tuple[Staged, ...]) -> MeshFamily:
        """The shape at a few microbatches; raises UsageError if the batch divides over none of its meshes."""
        if group not in self._solved:
            self._solved[group] = self._solve(group)
        return self._solved[group]

    def _solve(self, group: tuple[Staged, ...]) -> MeshFamily:
        failure: UsageError | None = None
        for staged in group:
            mesh, ways = staged.mesh, data_ways(staged.mesh)
            sizes = sorted({b // data_ways(s.mesh) for s in group for b in self.sizes(s)} - {0})
            if sizes[:-1] and sizes[0] * ways == 1 and not self.problems.scales_to(1):
                del sizes[0]
            if not sizes:
                raise UsageError(
                    f"a batch of {self.total} does not divide over {ways} batch shards",
                    where=f"mesh {mesh}",
                    why="every data-parallel rank of a program computes as many sequences as the others",
                    hint=f"choose a global batch that is a multiple of {ways} (the axes that divide it), or "
                    "fewer of them: the others can be tp, cp or pp",
                )
            # problems with experts are large, and there are more of them: their ends have to do
            few = experts_of(self.problems.model) > 0 or sizes[-1] <= _MIDDLE**2 * sizes[0]
            middle = [] if few else [b for b in sizes if b <= _MIDDLE * sizes[0]]
            self.progress(f"searching {mesh} at {sizes[0]} to {sizes[-1]} sequences per data rank")
            try:
                if middle and self._choices(mesh, sizes[0]) > _LARGE:
                    middle = []
                chosen = dict.fromkeys((sizes[0], *middle[-1:], sizes[-1]))
                # larger ones have no placements that this has not
                least = min((b for b in sizes if b > 1), default=1)
                ends = tuple(self._end(mesh, b, least) for b in chosen)
                for end in ends:
                    _ = end.free, end.seconds  # what is wrong with a mesh shows here
            except UsageError as error:
                failure = error
                continue
            choices = self._choices(mesh, sizes[0])
            state = whole_state(self.problems.model, self.request.recipe)
            model = self.problems.model
            between, common = between_layers(model), tied_bytes(model)
            calls, further = self.setting.calls, self._further(least, choices)
            return MeshFamily(group, ends, calls, between, choices, state, common, further)
        assert failure is not None
        raise failure

    def _choices(self, mesh: Mesh, each: int) -> int:
        """States of all variables. each: sequences per data rank."""
        return self.problems.of(mesh, each * data_ways(mesh), self.request.pins, roughly=True).problem.choices

    def ranked(self, shape: MeshFamily) -> list[Estimated]:
        """Configurations of a shape (see `rank`)."""
        request = self.request
        return rank(shape, self.total, self.problems.prices, self.setting, request.budget, request.recipe)

    def sizes(self, staged: Staged) -> Sequence[int]:
        """Possible microbatches, in sequences over the mesh."""
        if staged.batches:
            return staged.batches
        if self.request.batch is None and staged.ranks == 1:
            return [self.problems.captured]
        return microbatch_sizes(staged.mesh, self.total)

    def _end(self, mesh: Mesh, each: int, least: int, *, bounds: bool = False) -> AnchorProblem:
        """each: sequences per data rank; least: of the smallest microbatch with more than one. bounds: what
        takes no more will do."""
        ways, pins = data_ways(mesh), self.request.pins
        formulated = self.problems.priced(mesh, each * ways, pins, least * ways, bounds=bounds)
        smallest = partial(self.problems.of, mesh, least * ways, pins)
        return AnchorProblem(each, formulated, self.setting, self.request.recompute, smallest)

    def _further(self, least: int, choices: int) -> Callable[[Mesh, int], AnchorProblem | None]:
        """Solves other microbatches than those that were chosen; least: see `_end`. choices: states of all
        variables."""
        anchors: dict[tuple[Mesh, int], AnchorProblem | None] = {}

        def further(mesh: Mesh, each: int) -> AnchorProblem | None:
            key = (mesh, each)
            if key not in anchors:
                if self.further >= _FURTHER or choices > _LARGE:
                    return None
                self.further += 1
                try:
                    anchors[key] = self._end(mesh, each, min(each, least), bounds=True)
                except UsageError:
                    anchors[key] = None
            return anchors[key]

        return further
