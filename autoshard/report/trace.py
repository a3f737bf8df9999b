"""A predicted step for Perfetto: what every pipeline rank does, and the ops inside its first microbatch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from autoshard.ir import Call
from autoshard.ir.lowered import Phase
from autoshard.simulate.stage_costs import StagePrices
from autoshard.simulate.step import StepEstimate
from autoshard.simulate.work import CollectiveWork, HostWork, MemoryWork, Transfer, Work

_PHASES: dict[str, tuple[Phase, ...]] = {
    "F": ("forward",),
    "B": ("backward", "weight"),
    "I": ("backward",),
    "W": ("weight",),
}


def op_events(estimate: StepEstimate, prices: StagePrices) -> list[dict[str, Any]]:
    """Events in Chrome's trace format: a process per pipeline rank with a thread for computing and one per
    mesh axis, filled for the first microbatch of every stage. Microseconds."""
    events: list[dict[str, Any]] = []
    names = prices.parts.streams
    for rank, spans in enumerate(estimate.timeline.spans):
        pid = rank + 1
        events.append(
            {"name": "process_name", "ph": "M", "pid": pid, "args": {"name": f"ops of rank {rank}"}}
        )
        for tid, name in enumerate(names):
            events.append({"name": "thread_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}})
        shown: set[tuple[str, int]] = set()
        for span in spans:
            key = (span.action.kind, span.action.stage)
            if key not in shown:
                shown.add(key)
                events += _ops(prices, *key, pid, span.start)
    return events


def _ops(prices: StagePrices, kind: str, stage: int, pid: int, start: float) -> Iterator[dict[str, Any]]:
    lowered = prices.program.lowered
    at = start
    for phase in _PHASES[kind]:
        for part in lowered.parts:
            if part.stage != stage or part.phase != phase:
                continue
            items = lowered.of(part)
            played = prices.parts_of(stage).play(items, spans=True)
            for span in played.spans:
                item = items[span.step]
                task = prices.parts.sheet(item).tasks[span.task]
                location = item.label or item.segment if isinstance(item, Call) else "main"
                yield {
                    "name": task.op,
                    "cat": location,
                    "ph": "X",
                    "pid": pid,
                    "tid": span.stream,
                    "ts": round((at + span.start) * 1e6, 3),
                    "dur": round((span.end - span.start) * 1e6, 3),
                    "args": {"value": task.name, "in": location, **_amounts(task.work)},
                }
            at += played.seconds


def _named(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}


def _amounts(work: Work) -> dict[str, Any]:
    if isinstance(work, HostWork):
        return {}
    amounts: dict[str, Any] = {"bytes": round(work.nbytes)}
    if isinstance(work, CollectiveWork):
        amounts["collective"] = work.kind
    elif isinstance(work, Transfer):
        amounts["to"] = "host" if work.down else "device"
    elif not isinstance(work, MemoryWork):
        amounts["flop"] = round(work.flop)
    return amounts
