"""The Python blocks of guides, run one after the other."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def run_blocks(guide: str, names: dict[str, Any]) -> None:
    """Those of ``docs/guides/GUIDE.md``, in ``names``; the process group is there already."""
    text = (ROOT / "docs" / "guides" / f"{guide}.md").read_text()
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        # one process group for all guides
        block = re.sub(r"\w+\.init_process_group\(\)\n", "", block)
        exec(compile(block, f"{guide}.md", "exec"), names)
