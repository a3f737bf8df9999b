"""Pipelines with the same number of layers in every stage, as Megatron-LM and DeepSpeed cut them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from autoshard.errors import UsageError
from autoshard.ir import Folded
from autoshard.schedules.registry import SCHEDULES, lookup, make, of_published
from autoshard.schedules.schedule import Schedule
from autoshard.schedules.zb_h2 import zb_h2
from autoshard.search.plan.plan import Cut, Pipeline
from autoshard.validate.rows import Run

#: schedules with up to twice the memory of 1F1B -> forwards that they start with beside those of ZB-H2: an
#: input gradient takes longer than a forward, so that one more fits before the first (Qi et al., Zero Bubble
#: Pipeline Parallelism, section 3.1: as many as the limit of 2 p microbatches allows)
_TWICE = {"zb-h2": 0, "zb-2p": 1}


@dataclass(frozen=True)
class RebuiltStages:
    """notes: what is not as the row has it."""

    pipeline: Pipeline
    schedule: Schedule
    notes: tuple[str, ...] = ()


def stages_of(run: Run, folded: Folded) -> RebuiltStages | None:
    """The stages of a run, None for one. Raises UsageError for a schedule that is not known."""
    if run.pipeline == 1:
        return None
    name, notes = _schedule(run)
    own = 1 if name in _TWICE else lookup(name).chunks or 1
    chunks = run.chunks if run.chunks > 1 else own
    if name not in _TWICE and lookup(name).default_chunks > 1 and chunks == 1:
        raise UsageError(
            f"its schedule is {run.schedule}, and v says one stage per rank",
            where=run.id,
            hint="give v, the stages of every pipeline rank",
        )
    if run.pipeline * chunks > run.layers + 2:
        raise UsageError(f"{run.pipeline * chunks} pipeline stages for {run.layers} layers", where=run.id)
    if name in _TWICE:
        # its stages and their parts are those of ZB-H1, which can be planned
        name, schedule = "zb-h1", zb_h2(run.pipeline, run.microbatches, _TWICE[name])
    else:
        schedule = make(name, run.pipeline, run.microbatches, chunks)
    forward = [c for c in folded.calls if not c.backward]
    layers = [k for k, call in enumerate(forward) if call.label]
    sizes = stage_sizes(len(layers), run.pipeline * chunks)
    if max(sizes) > min(sizes):
        notes = (*notes, f"{len(layers)} layers in stages of {min(sizes)} to {max(sizes)}")
    cuts: list[Cut] = []
    done = 0
    for size in sizes[:-1]:
        done += size
        last = layers[done] - 1 if done < len(layers) else layers[-1]
        cuts.append(Cut(last, "", forward[last].label))
    return RebuiltStages(Pipeline(run.pipeline, 0, name, chunks, tuple(cuts)), schedule, notes)


def stage_sizes(layers: int, stages: int) -> list[int]:
    """Layers of every stage: equal; else as if embedding and head were a layer each; else longer ones first.

    Embedding and head as layers: DeepSpeed's ``type:transformer|embedding`` (BLOOM), and Qi et al., Zero
    Bubble Pipeline Parallelism, section 5, whose first and last stages have a layer less.
    """
    if layers % stages == 0:
        return [layers // stages] * stages
    if (layers + 2) % stages == 0:
        full = (layers + 2) // stages
        return [full - 1, *[full] * (stages - 2), full - 1]
    return [layers // stages + (k < layers % stages) for k in range(stages)]


def _schedule(run: Run) -> tuple[str, tuple[str, ...]]:
    """A schedule's name here, and what it stands for. Raises UsageError for one that is not known."""
    told = re.sub(r"[\s_]+", "-", run.schedule.lower())
    if "interleav" in told:
        told = "interleaved"
    name = told if told in _TWICE else of_published(told)
    if name is None:
        raise UsageError(
            f"there is no pipeline schedule {run.schedule!r}",
            where=run.id,
            hint=f"write one of {', '.join(sorted((*SCHEDULES, *_TWICE)))}",
        )
    if name in _TWICE:
        # its gain is that steps overlap: the optimizer of one rank runs while another still computes
        return name, (
            f"{run.schedule} is the schedule of the paper, section 2.2, not one found for its times",
        )
    return ("interleaved" if name == "1f1b" and run.chunks > 1 else name), ()
