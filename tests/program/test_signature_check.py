"""Signatures of stored programs: nothing in them imports, calls or surprises."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autoshard
from autoshard.errors import VerificationError
from autoshard.program.signature_check import literal
from autoshard.program.store import load_program


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        scale = torch.tensor([1.0, 2.0, 3.0, 4.0])
        return {"loss": (x @ self.weight * scale).pow(2).mean(), "best": float("inf"), "type": torch.float32}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    planned = autoshard.plan(Net(), "dp=2", example_inputs={"x": torch.randn(4, 4)})
    autoshard.compile(Net(), planned).save(tmp_path / "p")
    return tmp_path / "p"


def _node(kind: str, context: Any, children: int = 0) -> dict[str, Any]:
    leaf = {"type": None, "context": None, "children_spec": []}
    return {"type": kind, "context": context, "children_spec": [leaf] * children}


ENUM = json.dumps([{"__enum__": True, "fqn": "planted:X", "name": "y"}])
TREES = {
    "an enum of a module of the folder": json.dumps([1, _node("builtins.dict", ENUM, 1)]),
    "an enum that is none": json.dumps(
        [1, _node("builtins.dict", json.dumps([{"__enum__": True, "fqn": "os:environ", "name": "HOME"}]), 1)]
    ),
    "a factory": json.dumps(
        [
            1,
            _node(
                "collections.defaultdict",
                {"default_factory_module": "planted", "default_factory_name": "run", "dict_context": ["x"]},
                1,
            ),
        ]
    ),
    "a factory of Python": json.dumps(
        [
            1,
            _node(
                "collections.defaultdict",
                {
                    "default_factory_module": "builtins",
                    "default_factory_name": "breakpoint",
                    "dict_context": [],
                },
            ),
        ]
    ),
    "leaves that are not described": json.dumps([1, _node("builtins.list", "null", 7)]),
    "no tree": "[]",
    "very deep": "[" * 100_000,
    "a number": "3",
}


@pytest.mark.parametrize("place", ["in_tree", "out_tree"])
@pytest.mark.parametrize("kind", TREES)
def test_hostile_trees(
    kind: str, place: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module that would be imported lies where Python looks first."""
    (tmp_path / "planted.py").write_text("raise SystemExit('this module was imported')")
    monkeypatch.syspath_prepend(tmp_path)
    _changed(folder, lambda raw: raw["signature"].update({place: TREES[kind]}))
    with pytest.raises(VerificationError, match="signature"):
        load_program(folder)
    assert "planted" not in sys.modules


ENDS: dict[str, Callable[[dict[str, Any]], object]] = {
    "an output that is no literal": lambda s: s["out_leaves"].append(["static", "open('/etc/passwd')"]),
    "a leaf of another kind": lambda s: s["in_leaves"].__setitem__(0, ["code", "1"]),
    "a result of another kind": lambda s: s["results"][0].__setitem__(1, "file"),
    "a gradient of nothing": lambda s: s["results"][1].__setitem__(2, "other"),
    "an output out of range": lambda s: s["results"][0].__setitem__(2, "99"),
    "an output at no number": lambda s: s["results"][0].__setitem__(2, "½"),
    "names are missing": lambda s: s["input_names"].clear(),
}


@pytest.mark.parametrize("kind", ENDS)
def test_hostile_ends(kind: str, folder: Path) -> None:
    _changed(folder, lambda raw: ENDS[kind](raw["signature"]))
    with pytest.raises(VerificationError):
        load_program(folder)


@pytest.mark.parametrize(
    "change",
    [
        lambda raw: raw.clear(),
        lambda raw: next(iter(raw.values())).update(shape=[2, 2]),
        lambda raw: next(iter(raw.values())).update(shape=[4, 99999999999]),
        lambda raw: next(iter(raw.values())).update(values=[1e999, "x", 0, 0]),
        lambda raw: next(iter(raw.values())).update(dtype="int64"),
    ],
    ids=["missing", "another shape", "a huge shape", "no numbers", "another type"],
)
def test_constants_that_do_not_fit(change: Callable[[dict[str, Any]], object], folder: Path) -> None:
    import hashlib

    raw = json.loads((folder / "constants.json").read_text())
    change(raw)
    text = json.dumps(raw)
    (folder / "constants.json").write_text(text)
    digest = hashlib.sha256(text.encode()).hexdigest()
    _changed(folder, lambda manifest: manifest["files"].update({"constants.json": digest}))
    with pytest.raises(VerificationError):
        load_program(folder)


def test_files_that_never_end(folder: Path, tmp_path: Path) -> None:
    """Pipes, devices and huge files are not read."""
    notes, manifest = folder / "notes.json", folder / "manifest.json"
    before = notes.read_text(), manifest.read_text()
    for file, text in ((notes, before[0]), (manifest, before[1])):
        file.unlink()
        os.mkfifo(file)
        with pytest.raises(VerificationError, match="no plain file"):
            load_program(folder)
        file.unlink()
        file.symlink_to("/dev/zero")
        with pytest.raises(VerificationError, match=r"no plain file|outside"):
            load_program(folder)
        file.unlink()
        with file.open("wb") as sparse:
            sparse.truncate(1 << 31)
        with pytest.raises(VerificationError, match="bytes"):
            load_program(folder)
        file.unlink()
        file.write_text(text)
    load_program(folder)


def test_another_version_is_named(folder: Path) -> None:
    """Where a program of another version cannot be read, the error says so."""
    _changed(folder, lambda raw: raw.update(autoshard="9.9.9", format=99))
    with pytest.raises(VerificationError, match=r"9\.9\.9"):
        load_program(folder)
    _changed(folder, lambda raw: raw.update(format=autoshard_format()) or raw["files"].pop("notes.json"))
    with pytest.raises(VerificationError, match=r"compiled by autoshard 9\.9\.9, this is"):
        load_program(folder)


def autoshard_format() -> int:
    from autoshard.program.program import FORMAT

    return FORMAT


def test_static_outputs() -> None:
    assert literal("inf") == float("inf") and literal("None") is None and literal("(1+2j)") == 1 + 2j
    assert literal("torch.bfloat16") is torch.bfloat16
    assert literal("device(type='cuda', index=1)") == torch.device("cuda", 1)
    for text in ("torch.load", "device(type='x', index=print(1))", "f()", "torch.os"):
        with pytest.raises(ValueError):
            literal(text)


def _changed(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))
