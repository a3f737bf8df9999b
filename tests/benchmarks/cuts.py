"""What it gains to plan where a pipeline is cut, and to interleave its stages: simulated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from autoshard.capture.capture import capture
from autoshard.cluster import Mesh, load_cluster, usable_memory
from autoshard.cost.on_mesh import cost_model
from autoshard.cost.recipe import MIXED
from autoshard.options import PlanOptions
from autoshard.passes.pipeline import LoweringOptions
from autoshard.planner.analysis import Analysis, analyse
from autoshard.planner.candidates import given_mesh
from autoshard.planner.planned import Planned
from autoshard.planner.planning import plan_analysed
from autoshard.planner.stage_partition import Staging, partition_stages
from autoshard.rules.local import MeshShape
from autoshard.search.plan.plan import Pipeline
from autoshard.search.problem.problem import batch_of
from autoshard.search.reasons.explain import explain
from autoshard.search.select.request import SearchRequest
from autoshard.search.solve.formulate import layer_calls
from autoshard.search.solve.pipeline_model import Pipe
from autoshard.validate.models import Architecture, on_meta
from benchmarks.cases import LLAMA3_8B
from benchmarks.published import settle
from benchmarks.published_rows import Published

#: name of a schedule, stages per rank
SCHEDULES = (("1f1b", 1), ("interleaved", 2))
RANKS, MICROBATCHES, PIECE, SEQ = 8, 32, 2, 4096


@dataclass(frozen=True)
class CutRow:
    """A schedule with planned cuts and with equal layers.

    chunks: stages per rank. planned_s, equal_s: seconds of a simulated step; equal_s is None where there are
    fewer layers than stages. cuts: the layers behind, or in, which stages end.
    """

    schedule: str
    chunks: int
    planned_s: float
    equal_s: float | None
    cuts: tuple[str, ...]

    @property
    def gain(self) -> float | None:
        """Share of the throughput with equal layers that planning adds."""
        return None if self.equal_s is None else self.equal_s / self.planned_s - 1


@dataclass(frozen=True)
class Interleaving:
    """A run of Narayanan et al. with both schedules.

    pipe: ranks and stages per rank. plain_s, interleaved_s: of a simulated step with equally many layers in
    all stages, as in Megatron-LM. planned_plain_s, planned_interleaved_s: with planned cuts.
    """

    name: str
    pipe: Pipe
    microbatches: int
    plain_s: float
    interleaved_s: float
    planned_plain_s: float
    planned_interleaved_s: float

    @property
    def gain(self) -> float:
        """Share of the throughput of 1F1B that interleaving adds."""
        return self.plain_s / self.interleaved_s - 1

    @property
    def planned_gain(self) -> float:
        return self.planned_plain_s / self.planned_interleaved_s - 1

    @property
    def formula(self) -> float:
        """The gain if stages are alike and sends take no time.

        (m + p - 1) / (m + (p - 1) / v) - 1: Narayanan et al., SC'21, sections 2.2.1 and 2.2.2.
        """
        m, waits = self.microbatches, self.pipe.ranks - 1
        return (m + waits) / (m + waits / self.pipe.chunks) - 1


def _gpt(
    name: str, sizes: tuple[int, int, int], ways: tuple[int, int, int, int], micro: int, batch: int
) -> Published:
    """sizes: layers, hidden, heads. ways: tensor, pipeline, data, stages per rank. micro: of a data rank."""
    layers, hidden, heads = sizes
    tensor, ranks, data, chunks = ways
    mesh = f"dp={data},tp={tensor}" if data > 1 else f"tp={tensor}"
    model = Architecture("gpt2", layers, hidden, heads, heads, 4 * hidden, 51200, 2048)
    devices, pipe = tensor * ranks * data, Pipe(ranks, "interleaved", chunks)
    return Published(
        name, "sc21", model, 2048, "a100-selene", 0, devices, mesh, batch, micro * data, "full", 0.0, pipe
    )


#: Narayanan et al., SC'21: table 1, with the stages per rank of the scripts beside Megatron-LM (2 where these
#: do not interleave); and figure 12, where each stage has two layers
SC21 = (
    _gpt("39B, table 1", (48, 8192, 64), (8, 2, 32, 2), 4, 1536),
    _gpt("76B, table 1", (60, 10240, 80), (8, 4, 32, 3), 2, 1792),
    _gpt("145B, table 1", (80, 12288, 96), (8, 8, 24, 2), 2, 2304),
    _gpt("310B, table 1", (96, 16384, 128), (8, 16, 15, 2), 1, 2160),
    _gpt("530B, table 1", (105, 20480, 128), (8, 35, 9, 3), 1, 2520),
    _gpt("1T, table 1", (128, 25600, 160), (8, 64, 6, 2), 1, 3072),
    *(_gpt("175B, figure 12", (96, 12288, 96), (8, 12, 1, 4), 1, batch) for batch in (12, 24, 36, 48, 60)),
)


def heads(model: Architecture = LLAMA3_8B, ranks: int = RANKS, seq: int = SEQ) -> list[CutRow]:
    """A model whose head weighs as much as some layers, on so many H100s with nothing but a pipeline.

    ``MICROBATCHES`` of ``PIECE`` sequences. Raises InfeasibleError if no stages fit.
    """
    inner, inputs = on_meta(model, PIECE, seq)
    analysis = analyse(capture(inner, (), inputs))
    return [row_of(planned(analysis, "h100-dgx", ranks, MICROBATCHES, *kind)) for kind in SCHEDULES]


def planned(
    analysis: Analysis, cluster: str, ranks: int, microbatches: int, schedule: str, chunks: int
) -> Planned:
    """The model on so many pipeline ranks alone, microbatches as large as they were captured."""
    machine = load_cluster(cluster)
    layers = sum(layer_calls(analysis.folded).values())
    total = microbatches * batch_of(analysis.folded)
    where = given_mesh(
        Mesh.parse(f"pp={ranks}"),
        machine,
        layers,
        total,
        PlanOptions(schedule=schedule, chunks=chunks, microbatches=microbatches),
    )
    ask = SearchRequest(batch=total, recipe=MIXED)
    return plan_analysed(
        analysis, [where], machine, memory=usable_memory(machine.device), request=ask, fixed=True
    )


def row_of(found: Planned) -> CutRow:
    """The simulated steps of a plan with a pipeline."""
    staging = found.staging
    assert staging is not None
    pipeline = staging.pipeline
    cuts = tuple(
        (cut.label or f"call {cut.call}") + (" inside" if cut.value else "") for cut in pipeline.cuts
    )
    return CutRow(pipeline.schedule, pipeline.chunks, staging.seconds, staging.equal, cuts)


def interleaved_rows(runs: Sequence[Published] = SC21) -> Iterator[Interleaving]:
    """Both schedules on the same placements. Runs of one model stand together, for it is captured once."""
    for (model, micro), alike in groupby(runs, key=lambda r: (r.model, r.micro)):
        same = list(alike)
        meta, inputs = on_meta(model, micro, same[0].seq)
        analysis = analyse(capture(meta, (), inputs))
        for run in same:
            yield _interleaving(analysis, run)


def _interleaving(analysis: Analysis, run: Published) -> Interleaving:
    cluster = load_cluster(run.cluster).used_by(run.devices)
    settled, _ = settle(analysis.model, run, cluster, None)
    plan = explain(settled, cluster, analysis.fingerprint)
    mesh, model = settled.configuration.mesh, settled.formulated.model
    reshard = cost_model(cluster, mesh).reshard

    def cut(schedule: str, chunks: int) -> Staging:
        pipeline = Pipeline(run.pipe.ranks, 0, schedule, chunks, ())
        how = LoweringOptions(
            model.flow,
            replace(plan, pipeline=pipeline),
            MeshShape(mesh.names, mesh.sizes),
            reshard,
            analysis.table,
        )
        return partition_stages(model.folded, how, cluster, MIXED, None, fixed=True)

    plain, several = cut("1f1b", 1), cut("interleaved", run.pipe.chunks)
    assert plain.equal is not None and several.equal is not None  # every run has as many layers as stages
    return Interleaving(
        run.id,
        run.pipe,
        settled.configuration.microbatches,
        plain.equal,
        several.equal,
        plain.seconds,
        several.seconds,
    )
