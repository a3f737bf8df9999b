"""The tools that can be advised on, read from ``tools.toml``."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from autoshard.advise.tool_config import ToolConfig
from autoshard.errors import UsageError, nearest
from autoshard.ir.decode import decoded
from autoshard.validate.frameworks import Framework, frameworks
from autoshard.validate.rows import Recomputed


@dataclass(frozen=True)
class Switch:
    """A flag. off: keys of the behaviour without it. needs: what there has to be for it to do anything;
    beside: another flag without which it does nothing."""

    off: Mapping[str, Any]
    needs: Literal["", "tensor", "data", "zero"] = ""
    beside: str = ""

    def matters(self, choice: ToolConfig) -> bool:
        return (
            self.beside not in choice.off
            and {
                "": True,
                "tensor": choice.tensor > 1,
                "data": choice.data > 1,
                "zero": choice.zero > 0,
            }[self.needs]
        )


@dataclass(frozen=True)
class Tool:
    """A space of configurations; see the comment of ``tools.toml``.

    schedules: stages per rank that are searched, by the name of a schedule. switches: flags by name. source:
    where each is documented.
    """

    name: str
    title: str
    framework: str
    tensor: bool
    pipeline: bool
    sequence: bool
    zero: tuple[int, ...]
    hybrid: bool
    recompute: tuple[Recomputed, ...]
    source: Mapping[str, str]
    behaviour: Mapping[str, Any] = field(default_factory=dict)
    schedules: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    switches: Mapping[str, Switch] = field(default_factory=dict)

    def framework_of(self, choice: ToolConfig) -> Framework:
        """How its code behaves with the switches of a choice; one without effect is as good as off."""
        base = next(f for f in frameworks() if f.name == self.framework)
        changed = dict(self.behaviour)
        for name in self.effective(choice).off:
            changed |= self.switches[name].off
        return replace(base, behaviour=replace(base.behaviour, **changed, name=self.title))

    def effective(self, choice: ToolConfig) -> ToolConfig:
        """A choice whose switches without effect are off."""
        off = (n for n, switch in self.switches.items() if n in choice.off or not switch.matters(choice))
        return replace(choice, off=tuple(off))

    def plain(self, choice: ToolConfig) -> ToolConfig:
        """A choice that names no switch without effect."""
        return replace(choice, off=tuple(n for n in choice.off if self.switches[n].matters(choice)))


@cache
def tools() -> Mapping[str, Tool]:
    """All tools by name."""
    text = files("autoshard.advise").joinpath("tools.toml").read_text(encoding="utf-8")
    read = [decoded(entry, Tool, f"tools.toml, {entry['name']}") for entry in tomllib.loads(text)["tool"]]
    return {tool.name: tool for tool in read}


def tool_named(name: str) -> Tool:
    """Raises UsageError for an unknown name."""
    known = tools()
    if name not in known:
        raise UsageError(f"there is no tool {name!r}", hint=nearest(name, known))
    return known[name]
