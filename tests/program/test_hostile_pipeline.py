"""Folders of pipelines that someone has changed, checksums and all, are refused with a VerificationError."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pipelines import pipeline

from autoshard.errors import VerificationError
from autoshard.program.store import load_program, save_program

PROGRAMS = {"1f1b": (4, "dp=1", 1), "zb-v": (2, "dp=2", 2)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("programs")
    return {
        name: save_program(pipeline("gpt2-deep", ranks, mesh, name, 4, chunks), root / name)
        for name, (ranks, mesh, chunks) in PROGRAMS.items()
    }


def _load_changed(folder: Path, tmp_path: Path, file: str, change: Callable[[str], str]) -> None:
    """Load a copy in which a file is changed, and its checksum with it."""
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    before = (copy / file).read_text()
    text = change(before)
    assert text != before, "nothing was changed"
    (copy / file).write_text(text)
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["files"][file] = hashlib.sha256(text.encode()).hexdigest()
    (copy / "manifest.json").write_text(json.dumps(manifest))
    load_program(copy)


# -- the schedule --------------------------------------------------------------------------------------


def _with(change: Callable[[dict[str, Any]], object]) -> Callable[[str], str]:
    def changed(text: str) -> str:
        raw = json.loads(text)
        change(raw)
        return json.dumps(raw)

    return changed


def _actions(change: Callable[[list[str]], list[str]], rank: int = 0) -> Callable[[str], str]:
    def run(raw: dict[str, Any]) -> None:
        raw["actions"][rank] = " ".join(change(raw["actions"][rank].split()))

    return _with(run)


def _swapped(words: list[str], first: str, second: str) -> list[str]:
    found = list(words)
    a, b = words.index(first), words.index(second)
    found[a], found[b] = found[b], found[a]
    return found


def _too_early(words: list[str]) -> list[str]:
    """The first backward of stage 0 right behind its first forward: the others then never get the second."""
    back = next(w for w in words if w in ("B0.0", "I0.0"))
    rest = [w for w in words if w != back]
    return [rest[0], back, *rest[1:]]


SCHEDULE: dict[str, Callable[[str], str]] = {
    "an action is missing": _actions(lambda w: w[:-1]),
    "an action is there twice": _actions(lambda w: [*w, w[0]]),
    "an action is of another kind": _actions(lambda w: [w[0].replace("F", "W"), *w[1:]]),
    "an action is none": _actions(lambda w: ["X0.0", *w[1:]]),
    "backward comes first": _actions(lambda w: w[::-1]),
    "ranks wait for each other": _actions(_too_early),
    "microbatches change places": _actions(lambda w: _swapped(w, "F0.0", "F0.1")),
    "an unknown stage": _actions(lambda w: [*w, "F99.0"]),
    "a huge stage": _actions(lambda w: [*w, "F999999999999999999999.0"]),
    "a huge microbatch": _actions(lambda w: [*w, "F0.999999"]),
    "a negative stage": _actions(lambda w: [*w, "F-1.0"]),
    "a rank has nothing to do": _actions(lambda w: []),
    "the owner is wrong": _with(lambda r: r["owner"].__setitem__(0, 1)),
    "the owner is none": _with(lambda r: r["owner"].__setitem__(0, 99)),
    "the owner is negative": _with(lambda r: r["owner"].__setitem__(0, -1)),
    "the owner is a truth": _with(lambda r: r["owner"].__setitem__(1, True)),
    "the owner is a fraction": _with(lambda r: r["owner"].__setitem__(0, 0.5)),
    "an owner is missing": _with(lambda r: r["owner"].pop()),
    "a rank too many": _with(lambda r: r["actions"].append("")),
    "a rank is missing": _with(lambda r: r["actions"].pop()),
    "other microbatches": _with(lambda r: r.update(microbatches=3)),
    "huge microbatches": _with(lambda r: r.update(microbatches=10**30)),
    "no microbatches": _with(lambda r: r.update(microbatches=0)),
    "microbatches in words": _with(lambda r: r.update(microbatches="four")),
    "microbatches as text": _with(lambda r: r.update(microbatches="4")),
    "microbatches without end": _with(lambda r: r.update(microbatches=float("inf"))),
    "a negative position": _with(lambda r: r.update(position=-1)),
    "a position that is a fraction": _with(lambda r: r.update(position=0.5)),
    "no name": _with(lambda r: r.pop("name")),
    "a list": lambda text: "[]",
    "nothing": lambda text: "",
    "nested too deep": lambda text: "[" * 100_000,
}


@pytest.mark.parametrize("program", sorted(PROGRAMS))
@pytest.mark.parametrize("kind", SCHEDULE)
def test_changed_schedules(kind: str, program: str, folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(VerificationError):
        _load_changed(folders[program], tmp_path, "schedule.json", SCHEDULE[kind])


def test_no_schedule(folders: dict[str, Path], tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folders["1f1b"], copy)
    manifest = json.loads((copy / "manifest.json").read_text())
    del manifest["files"]["schedule.json"]
    (copy / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(VerificationError, match="no schedule"):
        load_program(copy)


# -- the text ------------------------------------------------------------------------------------------


def _function(text: str, name: str) -> str:
    """The text of a function, with its header."""
    match = re.search(rf"^def {name}\(.*?(?=^def |^\S|\Z)", text, re.M | re.S)
    assert match is not None, name
    return match.group(0)


def _without(name: str) -> Callable[[str], str]:
    return lambda text: text.replace(_function(text, name), "")


def _renamed(old: str, new: str) -> Callable[[str], str]:
    return lambda text: text.replace(f"def {old}(", f"def {new}(")


def _exchanged(first: str, second: str) -> Callable[[str], str]:
    """Two functions under each other's names."""

    def changed(text: str) -> str:
        text = text.replace(f"def {first}(", "def between(").replace(f"def {second}(", f"def {first}(")
        return text.replace("def between(", f"def {second}(")

    return changed


def _moved(source: str, target: str) -> Callable[[str], str]:
    """The first statement of a part in another one."""

    def changed(text: str) -> str:
        one, other = _function(text, source), _function(text, target)
        lines = one.splitlines(keepends=True)
        at = next(k for k, line in enumerate(lines) if " = " in line and not line.lstrip().startswith("#"))
        header, rest = other.split("\n", 1)
        text = text.replace(other, f"{header}\n{lines[at]}{rest}")
        return text.replace(one, "".join(lines[:at] + lines[at + 1 :]))

    return changed


def _behind(name: str) -> Callable[[str], str]:
    """A function at the end of the text."""
    return lambda text: text.replace(_function(text, name), "") + "\n" + _function(text, name)


TEXT: dict[str, Callable[[str], str]] = {
    "forward is missing": _without("forward_1"),
    "the first stage is missing": lambda t: _without("backward_0")(_without("forward_0")(t)),
    "the last stage is missing": lambda t: _without("backward_3")(_without("forward_3")(t)),
    "backward is missing": _without("backward_2"),
    "forward is there twice": lambda t: t + "\n" + _function(t, "forward_1"),
    "a stage too high": _renamed("forward_3", "forward_4"),
    "a huge stage": _renamed("forward_3", "forward_99999"),
    "stages change places": _exchanged("forward_1", "forward_2"),
    "backward stages change places": _exchanged("backward_1", "backward_2"),
    "forward is backward": _exchanged("forward_2", "backward_2"),
    "a statement moves up": _moved("forward_1", "forward_2"),
    "a statement moves down": _moved("forward_2", "forward_1"),
    "a gradient moves up": _moved("backward_1", "backward_2"),
    "a gradient moves down": _moved("backward_2", "backward_1"),
    "a gradient moves to forward": _moved("backward_2", "forward_2"),
    "a stage stands behind the others": _behind("forward_1"),
    "a backward stands behind the others": _behind("backward_2"),
}


@pytest.mark.parametrize("program", sorted(PROGRAMS))
@pytest.mark.parametrize("kind", TEXT)
def test_changed_texts(kind: str, program: str, folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(VerificationError):
        _load_changed(folders[program], tmp_path, "program.py", TEXT[kind])


@pytest.mark.parametrize(
    "change",
    [
        _without("reduce_1"),
        _moved("reduce_1", "reduce_2"),
        _renamed("reduce_1", "weight_1"),
        _without("weight_1"),
    ],
    ids=["reduce is missing", "a reduction moves", "reduce is weight", "weight is missing"],
)
def test_changed_reductions(change: Callable[[str], str], folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(VerificationError):
        _load_changed(folders["zb-v"], tmp_path, "program.py", change)
