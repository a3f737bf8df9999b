"""The formats by the tool that they are of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import yaml

from autoshard.advise.formats import accelerate, deepspeed, megatron, torchtitan, transformers
from autoshard.advise.formats.settings import Settings
from autoshard.advise.tool_config import ToolConfig
from autoshard.advise.tools import Tool
from autoshard.errors import UsageError


@dataclass(frozen=True)
class Format:
    """write: a choice for (batch, seq). read: what a text says. recognised: whether it is of this tool."""

    write: Callable[[ToolConfig, int, int], str]
    read: Callable[[str], Settings]
    recognised: Callable[[str], bool]


#: in the order in which a text is tried
FORMATS = {
    "megatron": Format(megatron.write, megatron.read, megatron.recognised),
    "torchtitan": Format(torchtitan.write, torchtitan.read, torchtitan.recognised),
    "deepspeed": Format(deepspeed.write, deepspeed.read, deepspeed.recognised),
    "accelerate": Format(accelerate.write, accelerate.read, accelerate.recognised),
    "transformers": Format(transformers.write, transformers.read, transformers.recognised),
}


def written(tool: Tool, choice: ToolConfig, batch: int, seq: int) -> str:
    """A configuration as the tool's file, for a step of ``batch`` sequences of ``seq`` tokens."""
    return FORMATS[tool.name].write(tool.effective(choice), batch, seq)


def read_config(path: Path, tool: str | None) -> tuple[str, Settings]:
    """(the tool of a file, what it says).

    tool: whose file it is, None to tell by its keys. Raises UsageError for what cannot be read or told.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"cannot read {path}", why=why, hint="the path of a tool's config") from error
    name = tool or next((n for n, form in FORMATS.items() if form.recognised(text)), None)
    if name is None:
        raise UsageError(
            f"{path} is the config of no tool that is known",
            why="no key of " + ", ".join(FORMATS) + " is in it",
            hint="--tool NAME",
        )
    try:
        return name, FORMATS[name].read(text)
    except yaml.YAMLError as error:
        raise UsageError(f"{path} is no YAML", why=str(error)) from None
