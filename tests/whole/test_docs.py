"""The documentation: links lead somewhere, files that it names exist, the README stays short."""

from __future__ import annotations

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
THEIRS = ("my", "scale_rows", "example.py", "file.py", "parallel.py", "original.py")

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
