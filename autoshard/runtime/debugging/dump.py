"""``AUTOSHARD_DUMP=FOLDER``: all programs that a parallel model runs, as folders that `compile` writes."""

from __future__ import annotations

import os
import re
from itertools import count
from pathlib import Path

from autoshard.errors import UsageError
from autoshard.program.program import Program
from autoshard.program.store import save_program
from autoshard.runtime.said import say_once

VARIABLE = "AUTOSHARD_DUMP"
#: of a folder's name
_LONGEST = 120


def dump_folder() -> Path | None:
    """The folder that is asked for."""
    root = os.environ.get(VARIABLE, "").strip()
    return Path(root) if root else None


def dump(program: Program, model: str) -> None:
    """Write a program into a sub-folder of its own, whole or not at all; for one rank to call.

    model: its class. Where it cannot be written a line says so, and training goes on.
    """
    root = dump_folder()
    if root is None:
        return
    name = _name(program, model)
    try:
        taken = [int(p.name[:3]) for p in root.glob("[0-9][0-9][0-9]-*")] if root.is_dir() else []
        for number in count(1 + max(taken, default=0)):
            folder = root / f"{number:03}-{name}"
            if not folder.exists():
                save_program(program, folder)
                return
    except (OSError, UsageError) as error:
        say_once(f"the program is not written to {root}: {error}")


def _name(program: Program, model: str) -> str:
    """``LlamaForCausalLM-dp=2,tp=2-train-input_ids-8x16-labels-8x16``"""
    signature = program.signature
    given = [
        f"{signature.input_names[int(p.target)]}-{'x'.join(map(str, p.type.shape)) or 'number'}"
        for p in signature.ports
        if p.kind == "input" and p.target.isdigit()
    ]
    step = [f"{program.microbatches}-microbatches"] if program.microbatches > 1 else []
    differentiated = sum(p.kind == "tangent" for p in signature.ports)
    outputs = [f"{differentiated}-outputs"] if differentiated > 1 else []
    mode = "train" if signature.training else "eval"
    parts = [model, program.full_mesh, mode, *step, *outputs, *given]
    return re.sub(r"[^\w=,.-]+", "_", "-".join(parts))[:_LONGEST]
