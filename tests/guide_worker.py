"""Started by `ranks`: runs the Python blocks of a guide, one after the other, in an empty folder.

Arguments: the guide, a folder in which ``path/to/model`` is a small Llama. A guide finds ``batch``; the
function of its name checks what its blocks leave.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from calls_worker import batch, full
from leaving import leave
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).resolve().parents[1]


def weights(names: dict[str, Any]) -> None:
    plain = AutoModelForCausalLM.from_pretrained("path/to/model")
    torch.testing.assert_close(full(names["loss"]), plain(**names["batch"]).loss, rtol=1e-5, atol=1e-6)


def main() -> None:
    guide, folder = sys.argv[1:]
    os.chdir(folder)
    names: dict[str, Any] = {"batch": batch(8, 16)}
    text = (ROOT / "docs" / "guides" / f"{guide}.md").read_text()
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(compile(block, f"{guide}.md", "exec"), names)
    globals()[guide](names)
    if dist.get_rank() == 0:
        print("ok", guide)
    leave()


if __name__ == "__main__":
    main()
