"""Program folders: text and JSON, written whole or not at all, read without trusting them.

``program.py`` is parsed by ``ast`` and never run; nothing is pickled. Every file's checksum stands in
``manifest.json``.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from autoshard._version import __version__
from autoshard.errors import UsageError, VerificationError
from autoshard.ir import Call, Port, Result
from autoshard.ir.boundaries import returns_of
from autoshard.ir.lowered import Lowered, StagePart
from autoshard.ir.offload import Offload
from autoshard.program.known_ops import known_ops
from autoshard.program.manifest import MAX_RANKS, check_manifest, check_mesh, fail
from autoshard.program.original import original_text, parse_original
from autoshard.program.parse import parse_program
from autoshard.program.program import FORMAT, NodeNote, PipelineStages, Program, Signature, StoredState
from autoshard.program.schedule_json import schedule_from_json, schedule_to_json
from autoshard.program.signature_check import check_signature
from autoshard.program.text import axis_names, program_text
from autoshard.rules.user import Rules, user_rules
from autoshard.torch_adapters.dtypes import torch_dtype

_RECOMPILE = "compile the program again"
#: bytes of one file; the texts of real programs are far smaller
_LARGEST = 1 << 30
#: what reading a folder may raise that was changed by hand, or is not whole
_DAMAGE = (
    OSError,
    KeyError,
    ValueError,
    TypeError,
    AttributeError,
    IndexError,
    OverflowError,
    RecursionError,
    RuntimeError,  # torch's, of a constant whose numbers do not fit its shape or type
)


def save_program(program: Program, folder: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
    """Write the folder. It appears complete or, on any error, not at all.

    Raises UsageError if the folder exists and is not a program folder, or ``overwrite`` is false.
    """
    target = Path(folder)
    check_target(target, overwrite=overwrite)
    with replaced_whole(target) as staging:
        _write(program, staging)
    return target


@contextmanager
def replaced_whole(target: Path) -> Iterator[Path]:
    """A folder to write into, which takes the place of ``target`` at the end or, on any error, vanishes."""
    staging = staging_folder(target)
    try:
        yield staging
        os.chmod(staging, 0o755)
        if target.exists():
            shutil.rmtree(target)
        os.replace(staging, target)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def staging_folder(target: Path) -> Path:
    """A fresh folder beside ``target``, to be renamed to it. Raises UsageError if none can be made."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise UsageError(
            f"{target} cannot be written",
            why=f"{error.strerror or error}: {error.filename}",
            hint="choose a folder in a place that can be written to",
        ) from None


def check_target(target: Path, *, overwrite: bool = False) -> None:
    """UsageError if a program may not be written there: something else would be lost."""
    if target.exists() and not _may_replace(target, overwrite):
        raise UsageError(
            f"{target} exists" + ("" if overwrite else " already"),
            why="only an older program folder is ever overwritten",
            hint="choose another folder, or pass overwrite=True (--overwrite) for a program folder",
        )


def _may_replace(target: Path, overwrite: bool) -> bool:
    if not target.is_dir():
        return False
    return not any(target.iterdir()) or (overwrite and (target / "manifest.json").is_file())


def _write(program: Program, folder: Path) -> None:
    files = {
        "program.py": program_text(program),
        "plan.json": program.plan,
        "constants.json": json.dumps(
            {k: _constant_out(v) for k, v in program.constants.items()}, separators=(",", ":")
        )
        + "\n",
    }
    files["state.json"] = json.dumps(asdict(program.state), indent=1) + "\n"
    if program.stages is not None:
        files["schedule.json"] = schedule_to_json(program.stages)
    if program.original is not None:
        files["original.py"] = original_text(program.original, program.signature, program.original_notes)
    files |= {f"dumps/{name}.py": text for name, text in program.dumps.items()}
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "autoshard": __version__,
        "torch": torch.__version__,
        "mesh": program.mesh,
        "target": program.target,
        "options": [list(o) for o in program.options],
        "user_ops": list(program.user_ops),
        "microbatches": program.microbatches,
        "sums": list(program.sums),
        "alone": list(program.alone),
        **({"offload": str(program.offload)} if program.offload else {}),
        "signature": _signature_out(program.signature),
        "original_results": list(program.original.results) if program.original is not None else [],
        "files": {name: _digest(text) for name, text in files.items()},
    }
    notes = json.dumps({**_notes(program), "parts": _bound(manifest)}, separators=(",", ":")) + "\n"
    files["notes.json"], manifest["files"]["notes.json"] = notes, _digest(notes)
    (folder / "dumps").mkdir()
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _bound(manifest: Mapping[str, Any]) -> dict[str, str]:
    """Digests of all parts of a program: its files but the notes, and the manifest without digests."""
    said = {k: v for k, v in manifest.items() if k not in ("files", "autoshard", "torch")}
    files = {k: v for k, v in manifest["files"].items() if k != "notes.json"}
    return {**files, "manifest.json": _digest(json.dumps(said, sort_keys=True))}


def _check_together(notes: object, manifest: Mapping[str, Any]) -> None:
    """VerificationError, naming the part, if the notes were written beside other parts than these.

    Digests in the manifest are those of the texts by now.
    """
    written = notes.get("parts") if isinstance(notes, dict) else None
    if not isinstance(written, dict):
        raise VerificationError("notes.json does not say which program it is of", hint=_RECOMPILE)
    now = _bound(manifest)
    odd = sorted(name for name in {**written, **now} if written.get(name) != now.get(name))
    if odd:
        raise VerificationError(
            f"{', '.join(odd)[:200]} and notes.json are not of one program",
            why="notes.json names the parts that it was written with, and these are others",
            hint=_RECOMPILE,
        )


def _notes(program: Program) -> dict[str, Any]:
    rows = {k: [[n.fqn, n.source, n.why] for n in notes] for k, notes in program.notes.items()}
    original = {k: [[n.fqn, n.source] for n in notes] for k, notes in program.original_notes.items()}
    return {
        "segments": rows,
        "labels": _labels(program.lowered),
        "original": original,
        "original_labels": [] if program.original is None else _labels(program.original),
        "classes": program.classes,
    }


def _labels(lowered: Lowered) -> list[str]:
    return [item.label for item in lowered.main if isinstance(item, Call)]


def _constant_out(value: object) -> dict[str, Any]:
    assert isinstance(value, torch.Tensor)
    return {
        "dtype": str(value.dtype).removeprefix("torch."),
        "shape": list(value.shape),
        "values": value.reshape(-1).tolist(),
    }


def _signature_out(signature: Signature) -> dict[str, Any]:
    raw = asdict(signature)
    raw["results"] = [[r.value, r.kind, r.target] for r in signature.results]
    del raw["ports"]
    return raw


def load_program(folder: str | os.PathLike[str], *, rules: Rules = None, only_read: bool = False) -> Program:
    """Read a program folder. Raises VerificationError if anything in it is not as it was written.

    rules: of the ops of the user's own that the program calls; VerificationError if one is missing, unless
    ``only_read``: the program is not going to run.
    """
    own = frozenset(r.op for r in user_rules(rules))
    root = Path(folder)
    try:
        manifest = json.loads(_text(root / "manifest.json"))
    except (FileNotFoundError, NotADirectoryError):
        raise UsageError(f"{root} is not a program folder", why="it has no manifest.json") from None
    except (OSError, ValueError, RecursionError) as error:
        raise VerificationError(
            f"{root}/manifest.json cannot be read", why=str(error), hint=_RECOMPILE
        ) from None
    try:
        return _load(root, manifest, None if only_read else own)
    except VerificationError as error:
        raise _of_version(error, manifest) from None
    except _DAMAGE as error:
        made = VerificationError(
            f"{root} is not a whole program folder", why=f"{type(error).__name__}: {error}", hint=_RECOMPILE
        )
        raise _of_version(made, manifest) from None


def _of_version(error: VerificationError, manifest: object) -> VerificationError:
    """The error, with the version that compiled the program if that is another one."""
    found = manifest.get("autoshard") if isinstance(manifest, dict) else None
    if not isinstance(found, str) or found == __version__ or found in error.why:
        return error
    why = f"{error.why}; " if error.why else ""
    why += f"the program was compiled by autoshard {found[:40]}, this is {__version__}"
    return VerificationError(error.what, where=error.where, why=why, hint=error.hint)


def _load(root: Path, manifest: dict[str, Any], own: frozenset[str] | None) -> Program:
    """own: the ops that the user gave rules for; None: whatever the manifest names."""
    if not isinstance(manifest, dict) or "format" not in manifest:
        fail("", "no format")
    if manifest["format"] != FORMAT:
        raise VerificationError(
            f"the program has format {repr(manifest['format'])[:40]}, this version reads {FORMAT}",
            why=f"it was compiled by autoshard {repr(manifest.get('autoshard'))[:40]}",
            hint=_RECOMPILE,
        )
    check_manifest(manifest)
    user_ops = tuple(map(str, manifest.get("user_ops", ())))
    if own is not None:
        _check_rules_given(user_ops, own)
    texts = {name: _checked(root, name, digest) for name, digest in manifest["files"].items()}
    mesh = manifest["mesh"]
    lowered, ports, returns = parse_program(texts["program.py"], axis_names(mesh), known_ops(user_ops))
    notes = json.loads(texts["notes.json"])
    signature = _signature_in(manifest["signature"], ports)
    _check_returns(signature, lowered, returns)
    constants: dict[str, object] = {
        k: _constant_in(v) for k, v in json.loads(texts["constants.json"]).items()
    }
    check_signature(signature, constants)
    lowered = replace(_labelled(lowered, notes["labels"]), results=tuple(r.value for r in signature.results))
    original = None
    if "original.py" in texts:
        ends = tuple(map(str, manifest["original_results"]))
        original = parse_original(texts["original.py"], ends, signature, known_ops(user_ops))
        original = _labelled(original, notes["original_labels"])
    loaded = Program(
        mesh,
        lowered,
        signature,
        _notes_in(notes["segments"], lowered, "program.py"),
        texts["plan.json"],
        {k[6:-3]: text for k, text in texts.items() if k.startswith("dumps/")},
        constants,
        manifest["target"],
        tuple((str(a), str(b)) for a, b in manifest["options"]),
        user_ops,
        manifest["microbatches"],
        _stages_in(texts.get("schedule.json"), lowered, manifest["microbatches"], mesh),
        original,
        {} if original is None else _notes_in(notes["original"], original, "original.py"),
        {str(k): str(v) for k, v in notes["classes"].items()},
        _offload_in(manifest.get("offload", "")),
        tuple(map(str, manifest["sums"])),
        tuple(map(str, manifest["alone"])),
        _state_in(json.loads(texts["state.json"])),
    )
    _check_together(notes, manifest)
    return loaded


def _state_in(raw: Mapping[str, Any]) -> StoredState:
    return StoredState(str(raw["graph"]), {str(k): str(v) for k, v in raw["attributes"].items()})


def _offload_in(text: str) -> Offload:
    try:
        return Offload.parse(text)
    except UsageError as error:
        raise VerificationError(error.what, where="manifest.json, offload", hint=_RECOMPILE) from None


def _stages_in(text: str | None, lowered: Lowered, microbatches: int, mesh: str) -> PipelineStages | None:
    """The schedule of a pipeline, which must fit the text of the program."""
    axes = len(mesh.split(","))
    count = 1 + max(p.stage for p in lowered.parts)
    if text is None:
        if count > 1:
            raise VerificationError(f"the program has {count} stages and no schedule", hint=_RECOMPILE)
        return None
    stages = schedule_from_json(text)
    if stages.position > axes:
        raise VerificationError(
            f"pp cannot be axis {stages.position} of a mesh of {axes} others", hint=_RECOMPILE
        )
    if stages.schedule.ranks * check_mesh(mesh, "mesh").world_size > MAX_RANKS:
        fail("mesh", f"with its {stages.schedule.ranks} stages more than {MAX_RANKS} ranks")
    slices = 1 + max(p.slice for p in lowered.parts)
    made = (stages.schedule.stages, stages.schedule.microbatches, stages.schedule.slices)
    if made != (count, microbatches, slices):
        raise VerificationError("the schedule is for other stages than the program's", hint=_RECOMPILE)
    split = any(p.phase == "weight" for p in lowered.parts)
    if stages.schedule.splits_backward != split:
        raise VerificationError("the schedule and the program split backward differently", hint=_RECOMPILE)
    return stages


def _check_rules_given(user_ops: tuple[str, ...], own: frozenset[str]) -> None:
    missing = [op for op in user_ops if op not in own]
    if missing:
        raise VerificationError(
            f"the program calls {', '.join(missing)}, which is not an op that autoshard knows",
            why="it was compiled with a rule of the user's own, and a stored text alone is not trusted to "
            "name what runs",
            hint="hand over the same rules: load(..., rules=[...]), or --rules FILE",
        )


def _checked(root: Path, name: str, digest: str) -> str:
    path = (root / name).resolve()
    if not path.is_relative_to(root.resolve()):
        raise VerificationError(f"{name!r} points outside the program folder", hint=_RECOMPILE)
    text = _text(path)
    if _digest(text) != digest:
        raise VerificationError(
            f"{name} is not what was written", why="its checksum differs", hint=_RECOMPILE
        )
    return text


def _text(path: Path) -> str:
    """The text of a file: no pipe or device, whose reading might never end, and no huge one.

    Raises FileNotFoundError, UnicodeDecodeError.
    """
    found = path.stat()
    if not stat.S_ISREG(found.st_mode) or found.st_size > _LARGEST:
        what = "is no plain file" if not stat.S_ISREG(found.st_mode) else f"has {found.st_size} bytes"
        raise VerificationError(f"{path} {what}", hint=_RECOMPILE)
    return path.read_text(encoding="utf-8")


def _signature_in(raw: dict[str, Any], ports: tuple[Port, ...]) -> Signature:
    return Signature(
        ports,
        tuple(Result(str(v), k, str(t)) for v, k, t in raw["results"]),
        raw["in_tree"],
        tuple((str(a), str(b)) for a, b in raw["in_leaves"]),
        raw["out_tree"],
        tuple((str(a), str(b)) for a, b in raw["out_leaves"]),
        tuple(map(str, raw["input_names"])),
        tuple((str(a), str(b)) for a, b in raw["tied"]),
        tuple(map(str, raw["frozen"])),
        bool(raw["training"]),
        tuple(map(str, raw["batch_inputs"])),
    )


def _check_returns(signature: Signature, lowered: Lowered, returns: dict[StagePart, tuple[str, ...]]) -> None:
    """The manifest and the text must agree on what the program's results are."""
    results = {r.value for r in signature.results}
    made = {p.name for p in signature.ports} | {o for i in lowered.main for o in i.outs}
    if not results <= made or returns_of(lowered, results) != returns:
        raise VerificationError("the manifest does not fit what the program returns", hint=_RECOMPILE)


def _notes_in(raw: Mapping[str, Any], lowered: Lowered, name: str) -> dict[str, tuple[NodeNote, ...]]:
    """The notes on every node of a text. Raises VerificationError if they are on other nodes."""
    # before anything is made for each of them
    if {k: len(v) for k, v in raw.items()} != {k: len(s.graph.nodes) for k, s in lowered.segments.items()}:
        raise VerificationError(f"notes.json is not about the statements of {name}", hint=_RECOMPILE)
    return {k: tuple(NodeNote(*map(str, row)) for row in rows) for k, rows in raw.items()}


def _labelled(lowered: Lowered, labels: list[str]) -> Lowered:
    if len(labels) != sum(isinstance(i, Call) for i in lowered.main):
        raise VerificationError("notes.json is not about the calls of the program", hint=_RECOMPILE)
    feed = iter(labels)
    main = tuple(replace(i, label=str(next(feed))) if isinstance(i, Call) else i for i in lowered.main)
    return replace(lowered, main=main)


def _constant_in(raw: dict[str, Any]) -> torch.Tensor:
    short = {v: k for k, v in _torch_names().items()}
    return torch.tensor(raw["values"], dtype=torch_dtype(short[raw["dtype"]])).reshape(raw["shape"])


def _torch_names() -> dict[str, str]:
    from autoshard.ir import DTYPES

    return {short: name for short, (name, _) in DTYPES.items()}
