"""Program folders with damage of every kind, checksums made right again: the loader must refuse or read them.

Whatever a folder holds, loading it either gives a program or raises one of autoshard's own errors, soon,
and nothing outside the folder is read.
"""

from __future__ import annotations

import hashlib
import json
import random
import tempfile
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from autoshard.errors import AutoshardError, UsageError
from autoshard.program.program import Program
from autoshard.program.store import load_program, save_program
from autoshard.search.plan.plan_json import plan_from_json
from fuzz.case import Case, analysed
from fuzz.draw import recipe
from fuzz.recipe import Body, Recipe, Spec, Statement

Change = Callable[[str, random.Random], str]
#: a folder of a few kilobytes that takes longer than this is an attack that works
SECONDS = 10.0
_HUGE = ("9" * 30, "-1", "0", "1e999", "99999999999", "1" + "0" * 5000, "true", "null", '""', "[]", "{}")
_CONSTANTS = Recipe(
    0,
    (Spec("x0", (4, 6), batch=True),),
    Body(
        (Spec("p0", (6, 6)),),
        (
            Statement(("v0",), "x0 @ self.p0 * torch.tensor([0.5, 1.0, 2.0, 0.5, 1.0, 2.0], dtype=x0.dtype)"),
            Statement(("v1",), "v0[:, torch.tensor([0, 2, 5])]"),
            Statement(("v2",), "v1.pow(2).mean()"),
        ),
    ),
    Body((), ()),
    0,
    "v2",
    (),
)


@lru_cache(maxsize=1)
def _folders() -> dict[str, dict[str, str]]:
    """File -> text of some programs: plain, with layers and constants, with a pipeline."""
    found: dict[str, dict[str, str]] = {}
    made = {mesh: _program(mesh, first) for mesh, first in (("dp=2", 3), ("tp=2", 8), ("pp=2,dp=1", 11))}
    made["x=2"] = _compiled(Case(_CONSTANTS, "x=2", 0))
    with tempfile.TemporaryDirectory() as root:
        for mesh, program in made.items():
            folder = save_program(program, Path(root) / mesh)
            files = [p for p in folder.rglob("*") if p.is_file() and "dumps" not in p.parts]
            found[mesh] = {str(p.relative_to(folder)): p.read_text() for p in files}
            manifest = json.loads(found[mesh]["manifest.json"])
            manifest["files"] = {n: d for n, d in manifest["files"].items() if not n.startswith("dumps/")}
            found[mesh]["manifest.json"] = json.dumps(manifest)
    return found


def _program(mesh: str, first: int) -> Program:
    """Of the first recipe that suits a mesh."""
    for seed in range(first, first + 50):
        try:
            return _compiled(Case(recipe(seed), mesh, 0))
        except UsageError:
            continue
    raise RuntimeError(f"no recipe suits {mesh}")


def _compiled(case: Case) -> Program:
    return case.program(analysed(case.recipe))


def bits(text: str, rng: random.Random) -> str:
    """A bit of one byte turned over."""
    raw = bytearray(text.encode())
    raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(7)
    return raw.decode(errors="replace")


def truncated(text: str, rng: random.Random) -> str:
    return text[: rng.randrange(len(text))]


def repeated(text: str, rng: random.Random) -> str:
    lines = text.splitlines(keepends=True)
    at = rng.randrange(len(lines))
    return "".join([*lines[: at + 1], *lines[at : at + rng.choice((1, 3, 9))], *lines[at + 1 :]])


def dropped(text: str, rng: random.Random) -> str:
    lines = text.splitlines(keepends=True)
    del lines[rng.randrange(len(lines))]
    return "".join(lines)


def swapped(text: str, rng: random.Random) -> str:
    """Two lines in each other's place."""
    lines = text.splitlines(keepends=True)
    a, b = rng.randrange(len(lines)), rng.randrange(len(lines))
    lines[a], lines[b] = lines[b], lines[a]
    return "".join(lines)


def numbered(text: str, rng: random.Random) -> str:
    """A number in place of another, or something that is none."""
    places = [k for k, c in enumerate(text) if c.isdigit() and not text[k - 1].isdigit()]
    if not places:
        return text
    at = rng.choice(places)
    end = at
    while end < len(text) and text[end].isdigit():
        end += 1
    return text[:at] + rng.choice((*_HUGE, str(rng.randrange(20)))) + text[end:]


def nested(text: str, rng: random.Random) -> str:
    """Brackets inside brackets, very deep."""
    at, depth = rng.randrange(len(text)), rng.choice((50, 500, 5_000, 50_000))
    kind = rng.choice(("()", "[]", "-", "not ", "{}"))
    inner = kind[0] * depth + kind[1:] * depth if len(kind) == 2 else kind * depth
    return text[:at] + inner + text[at:]


def renamed(text: str, rng: random.Random) -> str:
    """A word of the text in place of another."""
    words = text.replace("(", " ").replace(",", " ").replace(")", " ").replace('"', " ").split()
    a, b = rng.choice(words), rng.choice(words)
    at = text.find(a, rng.randrange(len(text)))
    return text if at < 0 else text[:at] + b + text[at + len(a) :]


def hostile(text: str, rng: random.Random) -> str:
    """Something that would run, if anything ran."""
    call = rng.choice(
        (
            "__import__('os').system('false')",
            "open('/etc/passwd').read()",
            "exit()",
            "().__class__.__bases__[0].__subclasses__()",
            "torch.load('x')",
            "(lambda: 0)()",
            "f'{1}'",
            "eval('1')",
            "[x for x in ()]",
            "10**10**10",
            "'a' * 10**9",
            "await_(1)",
        )
    )
    lines = text.splitlines(keepends=True)
    at = rng.randrange(len(lines))
    line = lines[at]
    if " = " in line and rng.random() < 0.7:
        lines[at] = line[: line.index(" = ") + 3] + call + "\n"
    else:
        lines.insert(at, " " * (len(line) - len(line.lstrip())) + call + "\n")
    return "".join(lines)


CHANGES: tuple[Change, ...] = (
    bits, truncated, repeated, dropped, swapped, numbered, numbered, nested, renamed, renamed, hostile,
)  # fmt: skip


def _manifest(manifest: dict[str, Any], rng: random.Random) -> None:
    """Change an entry of the manifest, at any depth."""
    at: Any = manifest
    while True:
        keys = list(at) if isinstance(at, dict) else list(range(len(at)))
        if not keys:
            return
        key = rng.choice(keys)
        if isinstance(at[key], dict | list) and at[key] and rng.random() < 0.75:
            at = at[key]
            continue
        break
    kind = rng.randrange(4)
    if kind == 0 and isinstance(at, dict):
        del at[key]
    elif kind == 1 and isinstance(at, dict):
        name = rng.choice(
            ("../../../etc/passwd", "/etc/passwd", "", "..", "a\0b", "x" * 5000, "dumps/../../x")
        )
        at[name] = at.pop(key)
    else:
        at[key] = rng.choice(
            (None, -1, 10**30, 1.5, True, "", "x" * 10_000, [], {}, [[]], "../../etc/passwd", key)
        )


def one(seed: int) -> str:
    """Damage a folder and load it; what is wrong, "" if it was refused properly or still is a program."""
    rng = random.Random(f"damage/{seed}")
    mesh, files = rng.choice(sorted(_folders().items()))
    texts = dict(files)
    name = rng.choice(("program.py", "program.py", "program.py", *sorted(texts)))
    what = name
    if name == "manifest.json" and rng.random() < 0.8:
        manifest = json.loads(texts[name])
        _manifest(manifest, rng)
        texts[name] = json.dumps(manifest)
    else:
        change = rng.choice(CHANGES)
        texts[name], what = change(texts[name], rng), f"{name}, {change.__name__}"
        manifest = json.loads(files["manifest.json"])
        if name in manifest["files"]:
            manifest["files"][name] = hashlib.sha256(texts[name].encode()).hexdigest()
            texts["manifest.json"] = json.dumps(manifest)
    with tempfile.TemporaryDirectory() as root:
        for file, text in texts.items():
            (Path(root) / file).write_bytes(text.encode(errors="replace"))
        began = time.process_time()
        try:
            if name == "plan.json":
                plan_from_json(texts[name])
            load_program(root)
        except AutoshardError as error:
            if not error.what:
                return f"folder {seed} ({mesh}; {what}): an error without a text"
        except Exception as error:  # whatever else comes out is what is looked for
            return f"folder {seed} ({mesh}; {what}): {type(error).__name__}: {str(error)[:200]}"
        taken = time.process_time() - began
    return f"folder {seed} ({mesh}; {what}): took {taken:.1f} s" if taken > SECONDS else ""


def many(count: int, first: int = 0) -> list[str]:
    """What is wrong with so many folders."""
    return [text for text in (one(first + k) for k in range(count)) if text]
