"""Published recipes of other tools beside the best that `autoshard plan --for` gives for the same work."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from autoshard.advise.judge import Judge
from autoshard.advise.search import Advice, advise
from autoshard.advise.tool_config import ToolConfig
from autoshard.advise.tools import Tool, tools
from autoshard.advise.work import Work, work_on
from autoshard.errors import AutoshardError
from autoshard.ir import DTYPES
from autoshard.validate.architecture import architecture_of
from autoshard.validate.captured import Captures
from autoshard.validate.frameworks import framework_of
from autoshard.validate.machine import machine_of
from autoshard.validate.models import on_meta
from autoshard.validate.ranking import alternatives_of
from autoshard.validate.rebuild import padded_vocab
from autoshard.validate.rows import Run

#: words of a framework -> whose space its rows are searched in
_TOOLS = {"megatron": "megatron", "nemo": "megatron", "torchtitan": "torchtitan", "deepspeed": "deepspeed"}
#: faster by so much is a gain
GAIN = 0.05


@dataclass(frozen=True)
class PublishedRow:
    """The fastest published recipe for some work, by our prices, beside the best of its tool's space."""

    run: Run
    tool: str
    published_s: float
    advice: Advice

    @property
    def gain(self) -> float:
        """Of speed."""
        return self.published_s / self.advice.best.seconds - 1

    def __str__(self) -> str:
        best = self.advice.best
        return (
            f"{self.run.id} ({self.tool}, {self.run.gpus} {self.run.gpu}): "
            f"published {self.published_s:.4g} s, "
            f"best {best.seconds:.4g} s ({self.gain:+.1%}): {best.choice}"
        )


def published_against_best(runs: Iterable[Run], every: int = 1) -> Iterator[PublishedRow | str]:
    """One row for every K-th work; the reason where there is none."""
    groups: dict[object, list[Run]] = {}
    for run in runs:
        groups.setdefault(alternatives_of(run), []).append(run)
    for group in list(groups.values())[::every]:
        try:
            yield _row(group)
        except AutoshardError as error:
            yield f"{group[0].id}: {error.what}"


def closing_line(rows: Sequence[PublishedRow]) -> str:
    """How many are faster than what was published."""
    slower = sum(row.gain < -1e-9 for row in rows)
    faster = sum(row.gain >= GAIN for row in rows)
    return (
        f"{len(rows)} works: {faster} at least {GAIN:.0%} faster than the published recipe, {slower} slower"
    )


def _row(group: list[Run]) -> PublishedRow | str:
    run = group[0]
    framework = framework_of(run)
    name = next((tool for word, tool in _TOOLS.items() if word in run.framework.lower()), None)
    if name is None:
        return f"{run.id}: {run.framework} is no tool that is advised on"
    tool = replace(tools()[name], framework=framework.name, behaviour={}, switches={})
    tool = _with_words(tool, group)
    work = _work(run)
    choices = [_choice(r) for r in group]
    judge = Judge(tool, work)
    seconds = [j.seconds for c in choices if not isinstance(j := judge.of(c), str)]
    if not seconds:
        return f"{run.id}: {judge.of(choices[0])}"
    return PublishedRow(run, name, min(seconds), advise(tool, work, known=choices))


def _with_words(tool: Tool, group: list[Run]) -> Tool:
    """With the stages of ZeRO that the code of the rows had, and what they recompute."""
    zero = {r.zero for r in group}
    recompute = {r.recompute for r in group} | set(tool.recompute)
    return replace(tool, zero=tuple(sorted(zero)), recompute=tuple(sorted(recompute)))


def _choice(run: Run) -> ToolConfig:
    shards = run.sharded if run.zero else 1
    interleaved = run.pipeline > 1 and run.chunks > 1
    return ToolConfig(
        run.tensor,
        run.pipeline,
        run.chunks,
        "interleaved" if interleaved else run.schedule if run.schedule != "none" else "1f1b",
        shards,
        run.data // shards,
        run.zero,
        run.micro,
        run.recompute,
    )


def _work(run: Run) -> Work:
    machine = machine_of(run)
    # one vocabulary for all tensor ranks that are tried: that of a node
    known = architecture_of(run, padded_vocab(run.vocab, 8, framework_of(run).vocab_multiple))
    dtype = getattr(torch, DTYPES[run.dtype][0])
    build = partial(on_meta, known.shape, seq=run.seq, dtype=dtype)
    return work_on(run.model, build, Captures(build), machine.cluster, run.gpus, run.batch, run.seq, None)
