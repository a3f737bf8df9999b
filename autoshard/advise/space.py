"""The configurations that a tool has for some work."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from autoshard.advise.tool_config import ToolConfig
from autoshard.advise.tools import Tool
from autoshard.advise.work import Work


def choices(tool: Tool, work: Work) -> Iterator[ToolConfig]:
    """All with every switch on.

    Tensor ranks are within a node and divide heads and widths; pipeline stages have the same number of
    layers; microbatches are powers of two, and a pipeline has at least as many as stages.
    """
    for tensor, pipeline in product(_tensor(tool, work), _pipeline(tool, work)):
        if work.gpus % (tensor * pipeline):
            continue
        data = work.gpus // (tensor * pipeline)
        if work.batch % data:
            continue
        for (schedule, chunks), (shards, zero), micro, recompute in product(
            _schedules(tool, work, pipeline), _sharding(tool, work, data), _micro(work, data), tool.recompute
        ):
            choice = ToolConfig(
                tensor, pipeline, chunks, schedule, shards, data // shards, zero, micro, recompute
            )
            if _runs(choice, work):
                yield choice


def _runs(choice: ToolConfig, work: Work) -> bool:
    """Whether the schedule has the microbatches that it needs."""
    count = choice.microbatches(work.batch)
    if choice.pipeline == 1:
        return True
    return count >= choice.pipeline and (choice.schedule != "interleaved" or count % choice.pipeline == 0)


def _tensor(tool: Tool, work: Work) -> list[int]:
    most = work.node if tool.tensor else 1
    return [
        t for t in range(1, most + 1) if all(size % t == 0 for size in work.divided) and work.node % t == 0
    ]


def _pipeline(tool: Tool, work: Work) -> list[int]:
    if not tool.pipeline:
        return [1]
    return [p for p in range(1, work.layers + 1) if work.layers % p == 0 and work.gpus % p == 0]


def _schedules(tool: Tool, work: Work, pipeline: int) -> list[tuple[str, int]]:
    if pipeline == 1:
        return [("1f1b", 1)]
    return [
        (name, chunks)
        for name, counts in tool.schedules.items()
        for chunks in counts
        if work.layers % (pipeline * chunks) == 0
    ]


def _sharding(tool: Tool, work: Work, data: int) -> list[tuple[int, int]]:
    """(data ranks that divide a copy, stage of ZeRO); groups are what is left of full nodes."""
    if data == 1:
        return [(1, 0)]
    groups = [data]
    if tool.hybrid:
        groups += [n for n in range(2, data) if data % n == 0 and (n & (n - 1) == 0 or n % work.node == 0)]
    pairs = [(shards, zero) for shards in groups for zero in tool.zero if zero]
    return [*pairs, (1, 0)] if 0 in tool.zero else pairs


def _micro(work: Work, data: int) -> list[int]:
    per_rank = work.batch // data
    return [n for n in (1, 2, 4, 8, 16, 32) if n <= per_rank and per_rank % n == 0]
