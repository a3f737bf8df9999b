"""Whether the search agrees with the simulator: free plans against what an expert would try by hand.

All in this process; a model is captured once for all plans of a case.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Any

from autoshard.cluster import load_cluster, parse_target
from autoshard.errors import AutoshardError
from autoshard.interop.targets import build
from autoshard.options import PlanOptions
from autoshard.planner.analysis import Analysis
from autoshard.planner.compiling import request_of
from autoshard.planner.planned import Planned
from autoshard.planner.source import Source
from autoshard.report.summary import PlanSummary, summarise
from autoshard.runtime.arguments import split_inputs
from benchmarks.sweep import SweepCase
from benchmarks.sweep_configs import published

#: published models that plan in a few seconds, of every kind
MODELS = (
    "Llama-2 7B", "Llama-2 13B", "Llama-2 70B", "Llama-3.1 8B", "Llama-3.1 70B", "Llama-3.2 1B", "Qwen2.5 7B",
    "Qwen3 0.6B", "Qwen3 32B", "Mistral 7B", "Gemma-2 2B", "GPT-2 XL", "GPT-3 6.7B", "GPT-3 175B", "OPT 13B",
    "BLOOM 7.1B", "Falcon 40B", "Pythia 1.4B", "BERT large", "ViT H/14", "T5 base", "Mixtral 8x7B",
)  # fmt: skip
CLUSTERS = (
    "a100-selene",
    "h100-dgx",
    "h200-dgx",
    "b200-nvl72",
    "v100-dgx2",
    "a100-h100-mixed",
    "holmes-ib-roce",
)
GPUS, BATCHES, LENGTHS = (
    (8, 16, 32, 64, 128, 256),
    (32, 64, 128, 256, 512, 1024),
    (1024, 2048, 4096, 8192, 32768),
)
#: how many alternatives a case has at most
ALTERNATIVES = 8
#: devices of a node that tensors are split over by hand
_NODE = 8
#: search and simulation differ by more than this share, an alternative is faster by more than that one
APART, FASTER = 0.1, 0.02


@dataclass(frozen=True)
class Alternative:
    """What is asked for by hand: a mesh with its pipeline axis, and options of `PlanOptions`."""

    mesh: str
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        return " ".join([self.mesh, *(f"--{name} {value}" for name, value in self.options)])


@dataclass(frozen=True)
class AgreeRow:
    """A case with its free plan.

    step, simulated: seconds, by the search and of the program. simulated_of: alternative -> its seconds, None
    where nothing fits. reason: of no plan.
    """

    case: SweepCase
    mesh: str = ""
    step: float = 0.0
    simulated: float = 0.0
    simulated_of: dict[Alternative, float | None] = field(default_factory=dict)
    reason: str = ""

    @property
    def ratio(self) -> float:
        return self.simulated / self.step

    @property
    def best(self) -> tuple[Alternative, float] | None:
        """The fastest alternative, and by which share it is faster than the plan, below 0 if it is slower."""
        timed = [(seconds, a) for a, seconds in self.simulated_of.items() if seconds is not None]
        if not timed:
            return None
        seconds, first = min(timed, key=lambda pair: pair[0])
        return first, 1 - seconds / self.simulated

    @property
    def apart(self) -> bool:
        return not self.reason and abs(self.ratio - 1) > APART

    @property
    def beaten(self) -> bool:
        return self.best is not None and self.best[1] > FASTER


def agree_case(seed: int, number: int) -> SweepCase:
    """The case of a number, whatever other cases there are; of some hundred tokens a device at least."""
    draw = random.Random(f"{seed}/{number}/agree")
    name = draw.choice(MODELS)
    config = dict(published())[name]
    cluster = draw.choice(CLUSTERS)
    most = load_cluster(cluster).devices or inf
    gpus = draw.choice([n for n in GPUS if n <= most])
    batch = draw.choice([n for n in BATCHES if n >= gpus // 2])
    positions = config.get("max_position_embeddings", config.get("n_positions", LENGTHS[-2]))
    length = draw.choice([n for n in LENGTHS if n <= positions] or [positions])
    return SweepCase(number, name, config, cluster, gpus, batch, length)


def rows_of(cases: Iterable[SweepCase]) -> Iterator[AgreeRow]:
    """Every case, planned freely and by hand."""
    for case in cases:
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(case.config), encoding="utf-8")
            try:
                built = build(f"hf:{folder}", batch=case.batch, seq=case.length)
                source = Source(built.model, *split_inputs(built.inputs))
                yield row_of(case, source, source.analysed(lambda _: None))
            except AutoshardError as error:
                yield AgreeRow(case, reason=str(error).splitlines()[0])


def row_of(case: SweepCase, source: Source, analysis: Analysis) -> AgreeRow:
    """One case. Raises what planning it freely raises."""
    free, planned = _planned(case, source, analysis)
    found: dict[Alternative, float | None] = {}
    for each in alternatives(case, free):
        try:
            other, _ = _planned(case, source, analysis, each)
        except AutoshardError:
            found[each] = None
        else:
            found[each] = _simulated(other)
    schedule = "" if free.pipeline is None else f" {free.pipeline.schedule}"
    mesh = f"{free.mesh}{schedule} x {planned.plan.microbatches}"
    assert free.step is not None
    return AgreeRow(case, mesh, free.step.seconds, _simulated(free), found)


def alternatives(case: SweepCase, plan: PlanSummary) -> list[Alternative]:
    """What an expert would try: other microbatches of the plan's mesh, other schedules, other meshes."""
    n, count = case.gpus, max(1, plan.microbatches)
    given = [("schedule", plan.pipeline.schedule)] if plan.pipeline is not None else []
    tried = [
        Alternative(plan.mesh, (*given, ("microbatches", other)))
        for other in (count // 2, 2 * count)
        if other and case.batch % other == 0
    ]
    staged = plan.mesh if plan.pipeline is not None else f"pp=2,fsdp={n // 2}"
    names = [s for s in ("1f1b", "interleaved", "zb-h1") if ("schedule", s) not in given]
    tried += [Alternative(staged, (("schedule", name),)) for name in names[: 2 if given else 1]]
    tried += [Alternative(mesh) for mesh in _meshes(n) if mesh != plan.mesh]
    return tried[:ALTERNATIVES]


def _meshes(n: int) -> list[str]:
    """Of so many devices, those that are most used first."""
    meshes = [f"fsdp={n}"]
    if n > _NODE:
        meshes += [f"fsdp={n // _NODE},tp={_NODE}", f"dp={n // _NODE},fsdp={_NODE}"]
    meshes += [f"pp={stages},fsdp={n // stages}" for stages in (4, 2, 8) if n > stages]
    if n > 2 * _NODE:
        meshes += [
            f"pp={stages},dp={n // stages // _NODE},tp={_NODE}"
            for stages in (2, 4)
            if n >= 2 * stages * _NODE
        ]
    return [*meshes, f"fsdp={n // 2},tp=2", f"dp={n}"]


def _planned(
    case: SweepCase, source: Source, analysis: Analysis, by_hand: Alternative | None = None
) -> tuple[PlanSummary, Planned]:
    options = PlanOptions(global_batch=case.batch)
    cluster = load_cluster(case.cluster)
    if by_hand is None:
        request = request_of(source.model, cluster, None, replace(options, devices=case.gpus))
    else:
        options = replace(options, **dict(by_hand.options))
        request = request_of(source.model, parse_target(by_hand.mesh), cluster, options)
    planned = request.planned_from(source, analysis)
    return summarise(planned.plan, planned.analysis, planned.solution, planned.staging, planned.peak), planned


def _simulated(plan: PlanSummary) -> float:
    return plan.seconds if plan.simulated_seconds is None else plan.simulated_seconds
