"""The model of a program folder, with real weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from autoshard.errors import UsageError

if TYPE_CHECKING:
    from autoshard.interop.targets import BuiltModel
    from autoshard.program.program import Program


def model_of(program: Program, folder: Path, other: str | None, seed: int) -> BuiltModel:
    """Build the target of a program on the CPU. Raises UsageError if the program does not know its target."""
    from autoshard.interop.targets import build

    target = other or program.target
    if not target:
        raise UsageError(
            f"{folder} does not say which model it is for",
            why="it was compiled from Python, not by `autoshard compile`",
            hint="pass --target module:callable",
        )
    options = {k: int(v) for k, v in program.options}
    try:
        return build(target, batch=options.get("batch"), seq=options.get("seq"), device="cpu", seed=seed)
    except UsageError as error:
        if other is not None:
            raise
        why = f"{error.why}; " if error.why else ""
        raise UsageError(
            error.what,
            where=error.where,
            why=f"{why}the program was compiled from it",
            hint="paths count from the current folder; --target says where the model is now",
        ) from None
