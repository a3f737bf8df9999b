"""What a configuration could be changed to with one setting."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from autoshard.advise.space import choices
from autoshard.advise.tool_config import ToolConfig
from autoshard.advise.tools import Tool
from autoshard.advise.work import Work


def neighbours(choice: ToolConfig, tool: Tool, work: Work) -> Iterator[ToolConfig]:
    """Configurations of the tool that differ in one setting: a switch, a degree (half or double), the
    schedule, what data ranks divide, the microbatch (half or double), or what is recomputed."""
    for name, switch in tool.switches.items():
        if not switch.matters(choice):
            continue
        off = set(choice.off) ^ {name}
        yield replace(choice, off=tuple(n for n in tool.switches if n in off))
    for other in choices(tool, work):
        if _changed(choice, other) == 1:
            yield tool.plain(replace(other, off=choice.off))


def _changed(one: ToolConfig, other: ToolConfig) -> int:
    """How many settings differ, more than one for a degree that is not half or double."""
    steps = ((one.tensor, other.tensor), (one.pipeline, other.pipeline), (one.micro, other.micro))
    changed = sum(0 if a == b else 1 if max(a, b) == 2 * min(a, b) else 2 for a, b in steps)
    if one.pipeline == other.pipeline:
        changed += (one.schedule, one.chunks) != (other.schedule, other.chunks)
    changed += _sharding(one) != _sharding(other)
    return changed + (one.recompute != other.recompute)


def _sharding(choice: ToolConfig) -> tuple[int, int]:
    """Alike for configurations whose groups follow from their degrees alone."""
    return (choice.zero, choice.replicas if choice.zero else 0)
