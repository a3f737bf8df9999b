"""The Python blocks of guides, run one after the other."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def run_blocks(guide: str, names: dict[str, Any]) -> None:
    """Those of ``docs/guides/GUIDE.md``, in ``names``; the process group is there already.

    Blocks that import packages which are not installed are left out: the worker says which it asks for.
    """
    for block in blocks(guide):
        if all(find_spec(name) for name in re.findall(r"^(?:from|import) (\w+)", block, re.MULTILINE)):
            exec(compile(block, f"{guide}.md", "exec"), names)


def blocks(guide: str) -> list[str]:
    """Its Python code, of which one process group is enough for all guides."""
    text = (ROOT / "docs" / "guides" / f"{guide}.md").read_text()
    found = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    return [re.sub(r"\w+\.init_process_group\(\)\n", "", block) for block in found]
