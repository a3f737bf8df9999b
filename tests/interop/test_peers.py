"""Everyday scripts under autoshard and FSDP2: see `benchmarks.peers`."""

from __future__ import annotations

from pathlib import Path

import pytest

for package in ("accelerate", "peft"):
    pytest.importorskip(package, reason="scripts of the benchmark need it")

SCRIPTS = ["Llama, AdamW", "uneven last batch", "EMA by AveragedModel"]


def test_the_command_writes_what_came_of_each_script(tmp_path: Path) -> None:
    from benchmarks.peers import MARKS, main

    page = tmp_path / "page.md"
    page.write_text(f"before\n{MARKS[0]}old\n{MARKS[1]}after\n")
    chosen = [word for script in SCRIPTS for word in ("--script", script)]
    tools = ["--tool", "autoshard dp=2,tp=2", "--tool", "FSDP2"]
    said: list[str] = []
    main([*tools, *chosen, "--page", str(page)], said.append)
    rows = [line.split(" | ") for line in page.read_text().splitlines() if line.startswith("| ")]
    cells = {row[0].removeprefix("| "): (row[1], row[2].removesuffix(" |")) for row in rows}
    assert cells["Llama, AdamW"] == ("works", "works"), said
    assert cells["uneven last batch"][0] == "works", said
    assert cells["uneven last batch"][1].startswith("documented difference ("), said
    assert cells["EMA by AveragedModel"] == ("works", "clear error [1]"), said
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert "FSDP does not support deepcopy" in text
