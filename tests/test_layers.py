"""Folders of the search use those above them alone, in the order of the README's table."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import autoshard.search

ORDER = ("networks", "problem", "plans", "solving", "bounds", "choosing", "reasons")
HOME = Path(autoshard.search.__file__).parent


def _imported(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom):
            yield node.module or ""
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_every_folder_has_its_place() -> None:
    assert {p.name for p in HOME.iterdir() if p.is_dir() and p.name != "__pycache__"} == set(ORDER)


@pytest.mark.parametrize("folder", ORDER)
def test_a_folder_uses_those_above_it(folder: str) -> None:
    above = ORDER[: ORDER.index(folder) + 1]
    for file in (HOME / folder).glob("*.py"):
        for module in _imported(file):
            if module.startswith("autoshard.search."):
                assert module.split(".")[2] in above, f"{file.name} imports {module}"
            assert module.split(".")[0] != "torch", f"{file.name} imports torch"
