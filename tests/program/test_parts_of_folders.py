"""Program folders whose parts come from several programs, and manifests with what nothing can have."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autoshard
from autoshard.errors import AutoshardError, VerificationError
from autoshard.planner.fingerprint import fingerprint_of
from autoshard.program.store import load_program
from autoshard.rules.registry import RULES
from autoshard.verify.static import verify_static

PARTS = ("program.py", "original.py", "notes.json", "plan.json", "manifest.json")


class Net(nn.Module):
    """Two functions of the same parameters and inputs."""

    def __init__(self, twice: bool) -> None:
        super().__init__()
        self.twice, self.layer = twice, nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.layer(x))
        return (y * y if self.twice else y + y).square().mean()


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("programs")
    for name, twice in (("one", False), ("two", True)):
        model = Net(twice)
        planned = autoshard.plan(model, "dp=2,tp=2", example_inputs=(torch.randn(4, 8),), target=f"{name}.py")
        autoshard.compile(model, planned).save(root / name)
    return root / "one", root / "two"


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def sealed(folder: Path, *, parts: bool = False) -> None:
    """Write the checksums of a folder as they should be. parts: also those in the notes."""
    manifest = json.loads((folder / "manifest.json").read_text())
    files = manifest["files"] = {n: digest((folder / n).read_text()) for n in manifest["files"]}
    if parts:
        notes = json.loads((folder / "notes.json").read_text())
        said = {k: v for k, v in manifest.items() if k not in ("files", "autoshard", "torch")}
        notes["parts"] = {k: v for k, v in files.items() if k != "notes.json"}
        notes["parts"]["manifest.json"] = digest(json.dumps(said, sort_keys=True))
        (folder / "notes.json").write_text(json.dumps(notes))
        files["notes.json"] = digest(json.dumps(notes))
    (folder / "manifest.json").write_text(json.dumps(manifest))


def test_a_stored_model_has_the_fingerprint_of_its_plan(programs: tuple[Path, Path]) -> None:
    for folder in programs:
        program = load_program(folder)
        assert fingerprint_of(program, RULES) == json.loads(program.plan)["fingerprint"]
        assert verify_static(program).ok


@pytest.mark.parametrize("forged", [False, True])
@pytest.mark.parametrize("chosen", [c for n in range(1, len(PARTS)) for c in combinations(PARTS, n)], ids=str)
def test_parts_of_two_programs_are_refused(
    chosen: tuple[str, ...], forged: bool, programs: tuple[Path, Path], tmp_path: Path
) -> None:
    """forged: whether all checksums are written anew."""
    folder = shutil.copytree(programs[0], tmp_path / "mixed")
    for name in chosen:
        shutil.copyfile(programs[1] / name, folder / name)
    sealed(folder, parts=forged)
    if forged and set(chosen) | {"notes.json"} in (set(PARTS), {"notes.json"}):
        return  # of one program but for its comments
    try:
        report = verify_static(load_program(folder))
    except VerificationError:
        return
    assert forged and not report.ok


HOSTILE: tuple[Any, ...] = (
    *(0, -1, 1.5, 10**12, 10**400, float("inf"), float("nan"), "", None, True, [], {}, ["a"], [[1, 2]]),
    *("x" * 200_000, "dp=999999999,tp=99999999", json.loads("[" * 900 + "]" * 900)),
)


def places(raw: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every entry of a document; of lists the first."""
    if at:
        yield at
    entries = raw.items() if isinstance(raw, dict) else enumerate(raw[:1]) if isinstance(raw, list) else ()
    for key, value in entries:
        yield from places(value, (*at, key))


def test_hostile_manifests_are_refused_soon(programs: tuple[Path, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(programs[0], tmp_path / "hostile")
    path = folder / "manifest.json"
    text = path.read_text()
    tried = refused = 0
    for at in places(json.loads(text)):
        for value in HOSTILE:
            raw = json.loads(text)
            inner = raw
            for key in at[:-1]:
                inner = inner[key]
            same, inner[at[-1]] = inner[at[-1]] == value, value
            path.write_text(json.dumps(raw))
            started = time.perf_counter()
            try:
                load_program(folder)
            except AutoshardError:
                refused += 1
            tried += 1
            assert time.perf_counter() - started < 2, (at, str(value)[:40])
            free = at[0] in ("autoshard", "torch") and isinstance(value, str)
            refused += same or free
    assert tried > 200 and refused >= tried, f"{refused} of {tried}"


@pytest.mark.parametrize(
    ("entry", "value"),
    [("mesh", "dp=999999999,tp=99999999"), ("microbatches", 10**12), ("options", [["a"]]), ("mesh", "x")],
)
def test_an_error_names_the_entry(
    entry: str, value: object, programs: tuple[Path, Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(programs[0], tmp_path / "hostile")
    raw = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**raw, entry: value}))
    with pytest.raises(VerificationError, match=rf"manifest\.json, {entry}"):
        load_program(folder)
