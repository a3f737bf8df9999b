"""Plans that people published against ours, both priced by the same model of cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from autoshard.capture.capture import capture
from autoshard.cluster import Cluster, Mesh, load_cluster, usable_memory
from autoshard.cost.recipe import MIXED
from autoshard.errors import AutoshardError, UsageError
from autoshard.options import PlanOptions
from autoshard.planner.analysis import Analysis, analyse
from autoshard.planner.candidates import candidate_meshes
from autoshard.planner.source import Source
from autoshard.planner.stage_link import pipe_link
from autoshard.search.bound.stage_imbalance import imbalance_seconds
from autoshard.search.plan.plan import Recompute
from autoshard.search.problem.problem import Model
from autoshard.search.problem.rescale_batch import NotRescalable, with_batch
from autoshard.search.select.choose import choose
from autoshard.search.select.request import CandidateSolution, SearchRequest
from autoshard.search.solve.configuration import Configuration, Staged, data_ways
from autoshard.search.solve.formulate import formulate, layer_calls
from autoshard.search.solve.pipeline_model import Pipe
from autoshard.search.solve.solve_placements import place
from autoshard.search.solve.step_config import StepConfig
from autoshard.solver.network import InfeasibleNetwork
from autoshard.validate.machine import SAME_MEMORY
from autoshard.validate.models import on_meta
from benchmarks.published_rows import Policy, Published, Skipped

#: sequences of the capture that stands for every batch but 1
_CAPTURED = 16
#: bytes of one activation in the models of `on_meta`
_WIDTH = 2
#: our plan counts as slower beyond rounding
SLOWER = 1 + 1e-9


@dataclass(frozen=True)
class Comparison:
    """A published plan and ours, both by the formula of `cost.step_time`, and as uneven as stages have to be.

    published_s: a step of the published mesh, microbatch and recomputation at its best placements, which
    gives it whatever its authors' code does and more. fits: whether it does in our count of memory; if not,
    it is priced without a limit, which ours has. ours_s, mesh (with its pipeline), microbatches: of our plan,
    None, "" and 0 if nothing is found, and then why says why.
    """

    row: Published
    published_s: float
    fits: bool
    ours_s: float | None
    mesh: str = ""
    microbatches: int = 0
    why: str = ""

    @property
    def ratio(self) -> float | None:
        """Our step over the published one: at most 1 if our plan is as good."""
        return None if self.ours_s is None else self.ours_s / self.published_s

    @property
    def slower(self) -> bool:
        """Whether our search missed a plan it should know: the published one fits and beats ours."""
        return self.fits and (self.ratio is None or self.ratio > SLOWER)


def compare(
    rows: Sequence[Published], progress: Callable[[str], None] = lambda _: None
) -> Iterator[Comparison | Skipped]:
    """One comparison per row, or why the row cannot be priced.

    Models are captured once per shape, and searched once per batch and machine.

    Raises what capturing raises.
    """
    for asked in questions(rows, progress):
        yield from _compare(asked, progress)


@dataclass(frozen=True)
class Asked:
    """Rows of one model, batch and machine. source: the model as it was captured for all batches, analysed as
    many; one: for microbatches of one sequence."""

    rows: tuple[Published, ...]
    source: Source
    many: Analysis
    one: Analysis

    def analysis(self, row: Published) -> Analysis:
        """The one that a row's microbatches are priced with."""
        return self.one if row.micro == 1 else self.many

    @property
    def first(self) -> Published:
        """A row; all have the machine, the number of devices and the batch of this one."""
        return self.rows[0]


def questions(rows: Sequence[Published], progress: Callable[[str], None]) -> Iterator[Asked]:
    """The rows by what our plan depends on; every model is captured when its first rows are asked for."""
    ordered = sorted(rows, key=lambda r: (repr(r.model), r.seq, _question(r), r.id))
    for (model, seq), alike in groupby(ordered, key=lambda r: (r.model, r.seq)):
        same = list(alike)
        progress(f"capturing {model.kind} of {model.layers} layers, hidden {model.hidden}")
        whole, inputs = on_meta(model, _CAPTURED, seq)
        source = Source(whole, (), inputs)
        many = analyse(capture(whole, (), inputs))
        one = many
        if any(r.micro == 1 for r in same):
            alone, inputs = on_meta(model, 1, seq)
            one = analyse(capture(alone, (), inputs))
        for _, asked in groupby(same, key=_question):
            yield Asked(tuple(asked), source, many, one)


def _question(row: Published) -> tuple[str, int, int, int]:
    """What our plan depends on beside the model."""
    return (row.cluster, row.memory, row.devices, row.batch)


def _compare(asked: Asked, progress: Callable[[str], None]) -> Iterator[Comparison | Skipped]:
    first = asked.first
    cluster = machine(first)
    budget = usable_memory(cluster.device)
    progress(f"searching {first.devices} x {cluster.name}, batch {first.batch}")
    ours: CandidateSolution | None = None
    why = ""
    try:
        meshes = candidate_meshes(cluster, first.devices, first.model.layers, first.batch, PlanOptions())
        ours = choose(
            asked.many.model, meshes, cluster, SearchRequest(budget=budget, batch=first.batch, recipe=MIXED)
        )
    except AutoshardError as error:
        why = error.what
    for row in asked.rows:
        try:
            theirs, fits = settle(with_batch(asked.analysis(row).model, row.micro), row, cluster, budget)
        except (NotRescalable, UsageError) as error:
            yield Skipped(row.id, row.study, f"its plan cannot be priced: {error}")
            continue
        if ours is None:
            yield Comparison(row, _seconds(theirs), fits, None, why=why)
        else:
            found = ours.configuration
            yield Comparison(row, _seconds(theirs), fits, _seconds(ours), name_of(found), found.microbatches)


def _seconds(found: CandidateSolution) -> float:
    """Of a step; a pipeline is not cut, but its stages are no more alike than they can be."""
    return imbalance_seconds(found.formulated, found.placements, found.configuration.pipe)


def name_of(found: Configuration) -> str:
    """The whole mesh with its pipeline."""
    return str(found.mesh) if found.pipe.ranks == 1 else f"{found.pipe},{found.mesh}"


def machine(row: Published) -> Cluster:
    """The catalog's entry for a row, with the memory of the row's devices where that is another size."""
    cluster = load_cluster(row.cluster)
    nominal = cluster.device.memory_bytes
    if not row.memory or abs(row.memory - nominal) <= SAME_MEMORY * nominal:
        return cluster
    return replace(cluster, device=replace(cluster.device, memory_bytes=row.memory))


def settle(
    model: Model, row: Published, cluster: Cluster, budget: float | None
) -> tuple[CandidateSolution, bool]:
    """(the published plan, whether it fits the budget); without a limit if it does not.

    model: with the row's microbatch. Raises UsageError if the mesh cannot be used for the model.
    """
    mesh = Mesh.parse(row.mesh)
    bare = published_setting(
        layer_calls(model.folded), row.batch // row.micro, row.recompute, cluster.device.overlap
    )
    setting = replace(bare, pipe=published_pipe(row, mesh, cluster))
    formulated = formulate(model, mesh, cluster, setting, recipe=MIXED)
    fits = True
    try:
        placed = place(formulated.problem, setting, budget)
    except InfeasibleNetwork:
        placed, fits = place(formulated.problem, setting, None), False
    where = Configuration(mesh, row.micro, setting.microbatches, setting.pipe)
    return CandidateSolution(formulated, placed, where, cluster, placed.lower_bound), fits


def published_setting(
    calls: Mapping[str, int], microbatches: int, policy: Policy, overlap: float
) -> StepConfig:
    """A policy for all layers. calls: of every forward segment of a layer. overlap: see `StepConfig`."""
    bare = StepConfig(microbatches, calls, overlap=overlap)
    if policy == "none":
        return bare
    return replace(bare, recompute={name: Recompute(policy, n) for name, n in calls.items()})


def published_pipe(row: Published, mesh: Mesh, cluster: Cluster) -> Pipe:
    """The pipeline with the seconds of its sends, which the search counts alike.

    What a stage hands on is one hidden state per token (Narayanan et al., SC'21, section 4.1).
    """
    if row.pipe.ranks == 1:
        return row.pipe
    staged = Staged(mesh, (row.pipe,), link=pipe_link(cluster, mesh, row.pipe.ranks))
    each = row.micro // data_ways(mesh)
    return replace(row.pipe, hop=staged.hop_seconds(each * row.seq * row.model.hidden * _WIDTH))
