"""The house rules that a reader relies on: one name for one class, files in rooms, lines within budgets."""

from __future__ import annotations

import ast
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def sources() -> Iterator[Path]:
    """Files of the package; passes/ and kernels/ where they are, not through their links."""
    for folder in ("autoshard", "passes", "kernels"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if not any(part.is_symlink() for part in path.parents):
                yield path


def room_of(path: Path) -> str:
    parts = path.relative_to(ROOT).parts
    return parts[0] if parts[0] != "autoshard" else parts[1] if len(parts) > 2 else "root"


def test_no_public_class_name_stands_twice() -> None:
    homes: dict[str, list[str]] = defaultdict(list)
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert {name: found for name, found in homes.items() if len(found) > 1} == {}


def test_lines_are_within_their_budgets() -> None:
    """To raise one, say in the commit what it buys."""
    budgets = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["autoshard"]["lines"]
    lines: dict[str, int] = defaultdict(int)
    for path in sources():
        lines[room_of(path)] += len(path.read_text().splitlines())
    assert lines.keys() == budgets.keys()
    assert {room: n for room, n in lines.items() if n > budgets[room]} == {}


def test_the_root_holds_what_the_public_api_is() -> None:
    loose = {p.name for p in (ROOT / "autoshard").glob("*.py")}
    assert loose == {"__init__.py", "__main__.py", "_version.py", "api.py", "errors.py", "options.py"}


def test_fast_tests_are_there() -> None:
    """Else a test that was renamed is gone from ``make quick``."""
    lines = (ROOT / "tests/fast.txt").read_text().splitlines()
    rows = [line.partition(": ") for line in lines if not line.startswith("#")]
    gone = [
        f"{file}: {name}"
        for file, _, names in rows
        for name in names.split()
        if f"def {name}(" not in (ROOT / file).read_text()
    ]
    assert rows and not gone
