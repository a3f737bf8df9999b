"""Program folders: the text reads back to itself, and nothing in a folder is trusted."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from families import FAMILIES
from planned import planned, program

from autoshard.errors import AutoshardError, UsageError, VerificationError
from autoshard.program.store import load_program, save_program
from autoshard.program.text import program_text
from autoshard.search.plan.plan_json import plan_from_json, plan_to_json


@pytest.mark.parametrize("mesh", ["dp=2,tp=2", "fsdp=4", "tp=4"])
@pytest.mark.parametrize("name", [f.name for f in FAMILIES])
def test_print_parse_print_is_the_identity(name: str, mesh: str, tmp_path: Path) -> None:
    made = program(name, mesh)
    save_program(made, tmp_path / "p")
    read = load_program(tmp_path / "p")
    assert program_text(read) == program_text(made)
    save_program(read, tmp_path / "q")
    for file in sorted(p.relative_to(tmp_path / "p") for p in (tmp_path / "p").rglob("*") if p.is_file()):
        assert (tmp_path / "p" / file).read_bytes() == (tmp_path / "q" / file).read_bytes(), file


def test_plans_read_back_and_are_deterministic() -> None:
    plan = planned("llama", "dp=2,tp=2", reasons=True).plan
    assert plan_from_json(plan_to_json(plan)) == plan
    planned.cache_clear()
    assert plan_to_json(planned("llama", "dp=2,tp=2", reasons=True).plan) == plan_to_json(plan)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_program(program("llama", "dp=2,tp=2"), tmp_path / "p")


def _rewrite(folder: Path, change: Callable[[str], str]) -> None:
    """Change the program's text and make its checksum right again, as an attacker would."""
    import hashlib

    text = change((folder / "program.py").read_text())
    (folder / "program.py").write_text(text)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"]["program.py"] = hashlib.sha256(text.encode()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest))


HOSTILE = {
    "import": lambda t: "import os\n" + t,
    "call at top": lambda t: t + "\nprint(1)\n",
    "unknown op": lambda t: t.replace("= reshape(", "= from_file(", 1),
    "builtin": lambda t: t.replace("= reshape(", "= eval(", 1),
    "dunder": lambda t: t.replace("= reshape(", "= autoshard.__class__.x(", 1),
    "lambda": lambda t: t.replace("= reshape(", "= (lambda: 0)(", 1),
    "decorator": lambda t: t.replace("def forward", "@exit\ndef forward", 1),
    "default": lambda t: t.replace("def forward():", "def forward(x=1):", 1),
    "comprehension": lambda t: t.replace("def forward():\n", "def forward():\n    a = [x for x in y]\n", 1),
    "wrong axis": lambda t: t.replace("dp:R", "xx:R", 1),
    "huge number": lambda t: t.replace("dp:R", "dp:S(99999999999999999999)", 1),
    "no return": lambda t: t[: t.rindex("    return")],
    "twice": lambda t: t + "\ndef forward():\n    return ()\n",
    "deep nesting": lambda t: t + "x: '" + "a" * 10 + "' = " + "(" * 2000 + ")" * 2000 + "\n",
}


@pytest.mark.parametrize("kind", sorted(HOSTILE))
def test_hostile_text_is_refused(kind: str, folder: Path) -> None:
    _rewrite(folder, HOSTILE[kind])
    with pytest.raises(VerificationError):
        load_program(folder)


def test_damage_is_noticed(folder: Path) -> None:
    """Bit flips anywhere in any file give one clear error or change nothing."""
    before = program_text(load_program(folder))
    rng = random.Random(0)
    files = [p for p in folder.rglob("*") if p.is_file() and p.name != "manifest.json"]
    for _ in range(20):
        file = rng.choice(files)
        raw = bytearray(file.read_bytes())
        raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(7)
        good = file.read_bytes()
        file.write_bytes(raw)
        with pytest.raises(AutoshardError):
            load_program(folder)
        file.write_bytes(good)
    assert program_text(load_program(folder)) == before


def test_truncated_and_foreign_folders(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not a program folder"):
        load_program(tmp_path)
    manifest = folder / "manifest.json"
    raw = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**raw, "format": 99}))
    with pytest.raises(VerificationError, match="format"):
        load_program(folder)
    manifest.write_text(json.dumps({**raw, "files": {"../../etc/passwd": "0", **raw["files"]}}))
    with pytest.raises(VerificationError, match="outside"):
        load_program(folder)
    manifest.write_text(json.dumps(raw)[:-40])
    with pytest.raises(VerificationError):
        load_program(folder)
    manifest.write_text(json.dumps(raw))
    (folder / "notes.json").unlink()
    with pytest.raises(VerificationError):
        load_program(folder)


def test_existing_folders_are_left_alone(folder: Path, tmp_path: Path) -> None:
    made = program("llama", "dp=2,tp=2")
    with pytest.raises(UsageError, match="exists"):
        save_program(made, folder)
    save_program(made, folder, overwrite=True)
    other = tmp_path / "mine"
    other.mkdir()
    (other / "thesis.txt").write_text("precious")
    with pytest.raises(UsageError, match="exists"):
        save_program(made, other, overwrite=True)
    assert (other / "thesis.txt").read_text() == "precious"
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]
