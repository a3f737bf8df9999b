"""The documentation: links lead somewhere, files that it names exist, the README stays short."""

from __future__ import annotations

import ast
import re
from dataclasses import fields
from pathlib import Path

import pytest

from autoshard.options import PassOptions, PlanOptions

ROOT = Path(__file__).resolve().parents[2]
TOP = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
PAGES = [*(ROOT / name for name in TOP), *sorted((ROOT / "docs").rglob("*.md"))]
#: where a path in backticks may start
STARTS = (ROOT, ROOT / "autoshard")
#: what readers are told to write, or what commands write
THEIRS = ("my", "multiply_rows", "example.py", "file.py", "parallel.py", "original.py")

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))


@every_page
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


@every_page
def test_named_files_exist(page: Path) -> None:
    named = set(re.findall(r"`((?:[\w-]+/)*[\w-]+\.(?:py|toml))(?::\w+)?`", page.read_text()))
    named = {name for name in named if not any(word in name for word in THEIRS)}
    missing = {name for name in named if not any((start / name).is_file() for start in STARTS)}
    # without a folder, the page has named it before
    assert {name for name in missing if "/" in name or not any(ROOT.glob(f"*/**/{name}"))} == set()


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 200


@pytest.mark.parametrize("options", [PlanOptions, PassOptions])
def test_every_option_is_documented(options: type[PlanOptions | PassOptions]) -> None:
    text = (ROOT / "docs" / "api.md").read_text()
    assert [f.name for f in fields(options) if f"| `{f.name}` |" not in text] == []


def test_docstrings_tell_arguments_that_there_are() -> None:
    """Else `make docs` fails, which needs packages that tests have not."""
    unknown = []
    for path in sorted((ROOT / "autoshard").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                text = re.search(r"^Args:\n((?:    .*\n?|\n)*)", ast.get_docstring(node) or "", re.MULTILINE)
                told = re.findall(r"^    \**(\S.*?)(?::|$)", text[1], re.MULTILINE) if text else []
                unknown += [(path.name, node.name, name) for name in told if name not in _arguments(node)]
    assert unknown == []


def _arguments(node: ast.FunctionDef | ast.ClassDef) -> set[str]:
    if isinstance(node, ast.FunctionDef):
        given = node.args
        return {a.arg for a in (*given.args, *given.kwonlyargs, given.vararg, given.kwarg) if a is not None}
    names = {ast.unparse(field.target) for field in node.body if isinstance(field, ast.AnnAssign)}
    made = (f for f in node.body if isinstance(f, ast.FunctionDef) and f.name == "__init__")
    return names.union(*map(_arguments, made))
