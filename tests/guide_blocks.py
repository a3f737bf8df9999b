"""The Python blocks of guides, run one after the other."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def run_blocks(guide: str, names: dict[str, Any]) -> None:
    """Those of ``docs/guides/GUIDE.md``, in ``names``; the process group is there already."""
    for block in blocks(guide):
        exec(compile(block, f"{guide}.md", "exec"), names)


def blocks(guide: str) -> list[str]:
    """Its Python code, of which one process group is enough for all guides."""
    text = (ROOT / "docs" / "guides" / f"{guide}.md").read_text()
    found = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    return [re.sub(r"\w+\.init_process_group\(\)\n", "", block) for block in found]
