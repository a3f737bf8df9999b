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
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch

from autoshard._version import __version__
from autoshard.cluster.mesh import Mesh
from autoshard.errors import UsageError, VerificationError
from autoshard.ir import Call, Port, Result
from autoshard.ir.boundaries import returns_of
from autoshard.ir.decode import decoded
from autoshard.ir.lowered import Lowered, StagePart
from autoshard.ir.offload import Offload
from autoshard.program.known_ops import known_ops
from autoshard.program.manifest import (
    MAX_RANKS,
    RECOMPILE,
    Manifest,
    StoredSignature,
    check_mesh,
    fail,
    manifest_of,
)
from autoshard.program.original import original_text, parse_original
from autoshard.program.parse import parse_program
from autoshard.program.program import FORMAT, NodeNote, PipelineStages, Program, Signature, StoredState
from autoshard.program.schedule_json import schedule_from_json, schedule_to_json
from autoshard.program.signature_check import check_signature
from autoshard.program.text import axis_names, program_text
from autoshard.rules.user import Rules, user_rules
from autoshard.torch_adapters.dtypes import torch_dtype

T = TypeVar("T")
#: bytes of one file; the texts of real programs are far smaller
_LARGEST = 1 << 30
#: what programs and signatures have in common with the manifest
_SAID = ("mesh", "target", "options", "user_ops", "microbatches", "sums", "alone", "codegen", "cuda_graphs")
_STORED = tuple(name for name in StoredSignature.__struct_fields__ if name != "results")
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


def save_program(
    program: Program,
    folder: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    also: Sequence[Program] = (),
) -> Path:
    """Write the folder. It appears complete or, on any error, not at all.

    also: of the same model for other numbers of ranks, in folders of their own inside (`folder_for`).
    Raises UsageError if the folder exists and is not a program folder, or ``overwrite`` is false.
    """
    target = Path(folder)
    check_target(target, overwrite=overwrite)
    with replaced_full(target) as staging:
        _write(program, staging)
        for other in also:
            inner = staging / _ranks_folder(Mesh.parse(other.full_mesh).world_size)
            inner.mkdir()
            _write(other, inner)
    return target


def folder_for(folder: str | os.PathLike[str], ranks: int) -> Path:
    """Where the program for so many ranks is: the folder itself, or one inside."""
    inner = Path(folder) / _ranks_folder(ranks)
    return inner if (inner / "manifest.json").is_file() else Path(folder)


def _ranks_folder(ranks: int) -> str:
    return f"ranks-{ranks}"


@contextmanager
def replaced_full(target: Path) -> Iterator[Path]:
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


def packed(program: Program) -> bytes:
    """All files of a program folder, for another process."""
    return zlib.compress(json.dumps(_files(program)).encode(), 1)


def unpacked(data: bytes, rules: Rules = None) -> Program:
    """The program that `packed` made, checked as one that is read from a folder.

    rules: of the ops of the user's own that it calls. Raises VerificationError.
    """
    files = json.loads(zlib.decompress(data))
    return _load(files.__getitem__, json.loads(files["manifest.json"]), _ops_of(rules))


def _write(program: Program, folder: Path) -> None:
    files = _files(program)
    (folder / "dumps").mkdir()
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")


def _files(program: Program) -> dict[str, str]:
    """Name -> text; the manifest is the last."""
    files = {
        "program.py": program_text(program),
        "plan.json": program.plan,
        "constants.json": _json({k: _constant_out(v) for k, v in program.constants.items()}),
        "state.json": _json(program.state, 1),
    }
    if program.stages is not None:
        files["schedule.json"] = schedule_to_json(program.stages)
    if program.original is not None:
        files["original.py"] = original_text(program.original, program.signature, program.original_notes)
    files |= {f"dumps/{name}.py": text for name, text in program.dumps.items()}
    manifest = Manifest(
        format=FORMAT,
        autoshard=__version__,
        torch=str(torch.__version__),
        offload=str(program.offload),
        signature=_signature_out(program.signature),
        original_results=program.original.results if program.original is not None else (),
        files={name: _digest(text) for name, text in files.items()},
        **{name: getattr(program, name) for name in _SAID},
    )
    notes = _json(_notes(program, _bound(manifest)))
    files["notes.json"], manifest.files["notes.json"] = notes, _digest(notes)
    return {**files, "manifest.json": _json(manifest, 1)}


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _json(value: object, indent: int | None = None) -> str:
    separators = (",", ":") if indent is None else None
    return json.dumps(msgspec.to_builtins(value), indent=indent, separators=separators) + "\n"


def _bound(manifest: Manifest) -> dict[str, str]:
    """Digests of all parts of a program: its files but the notes, and the manifest without digests."""
    said = msgspec.to_builtins(manifest)
    for name in ("files", "autoshard", "torch"):
        del said[name]
    files = {k: v for k, v in manifest.files.items() if k != "notes.json"}
    return {**files, "manifest.json": _digest(json.dumps(said, sort_keys=True))}


def _check_together(notes: _Notes, manifest: Manifest) -> None:
    """VerificationError, naming the part, if the notes were written beside other parts than these.

    Digests in the manifest are those of the texts by now.
    """
    now = _bound(manifest)
    odd = sorted(name for name in {**notes.parts, **now} if notes.parts.get(name) != now.get(name))
    if odd:
        raise VerificationError(
            f"{', '.join(odd)[:200]} and notes.json are not of one program",
            why="notes.json names the parts that it was written with, and these are others",
            hint=RECOMPILE,
        )


class _Notes(msgspec.Struct, forbid_unknown_fields=True):
    """``notes.json``. segments, original: their notes by segment. parts: digests of what it is with."""

    segments: dict[str, list[tuple[str, str, str]]]
    labels: list[str]
    original: dict[str, list[tuple[str, str]]]
    original_labels: list[str]
    classes: dict[str, str]
    parts: dict[str, str]


def _notes(program: Program, parts: dict[str, str]) -> _Notes:
    return _Notes(
        {k: [(n.fqn, n.source, n.why) for n in notes] for k, notes in program.notes.items()},
        _labels(program.lowered),
        {k: [(n.fqn, n.source) for n in notes] for k, notes in program.original_notes.items()},
        [] if program.original is None else _labels(program.original),
        program.classes,
        parts,
    )


def _labels(lowered: Lowered) -> list[str]:
    return [item.label for item in lowered.main if isinstance(item, Call)]


def _constant_out(value: object) -> dict[str, Any]:
    assert isinstance(value, torch.Tensor)
    return {
        "dtype": str(value.dtype).removeprefix("torch."),
        "shape": list(value.shape),
        "values": value.reshape(-1).tolist(),
    }


def _signature_out(signature: Signature) -> StoredSignature:
    results = tuple((r.value, r.kind, r.target) for r in signature.results)
    return StoredSignature(results, *(getattr(signature, name) for name in _STORED))


def load_program(folder: str | os.PathLike[str], *, rules: Rules = None, only_read: bool = False) -> Program:
    """Read a program folder. Raises VerificationError if anything in it is not as it was written.

    rules: of the ops of the user's own that the program calls; VerificationError if one is missing, unless
    ``only_read``: the program is not going to run.
    """
    root = Path(folder)
    try:
        raw = json.loads(_text(root / "manifest.json"))
    except (FileNotFoundError, NotADirectoryError):
        raise _no_program(root) from None
    except (OSError, ValueError, RecursionError) as error:
        raise VerificationError(
            f"{root}/manifest.json cannot be read", why=str(error), hint=RECOMPILE
        ) from None
    try:
        return _load(partial(_text_in, root), raw, None if only_read else _ops_of(rules))
    except VerificationError as error:
        raise _of_version(error, raw) from None
    except _DAMAGE as error:
        new = VerificationError(
            f"{root} is not a whole program folder", why=f"{type(error).__name__}: {error}", hint=RECOMPILE
        )
        raise _of_version(new, raw) from None


def _no_program(root: Path) -> UsageError:
    """Why a path without a manifest is not a program: what else it is."""
    plan = root.parent if root.name == "plan.json" else root
    if (plan / "manifest.json").is_file():
        return UsageError(f"{root} is a file of a program folder", hint=f"give the folder, {plan}")
    if (plan / "plan.json").is_file():
        hint = f"autoshard compile --plan {plan} -o DIR"
        return UsageError(f"{root} is a plan, not a program", why="a plan is not compiled yet", hint=hint)
    why = "it has no manifest.json" if root.is_dir() else "there is no such folder"
    hint = "autoshard compile TARGET --mesh dp=2,tp=2 -o DIR writes one"
    return UsageError(f"{root} is not a program folder", why=why, hint=hint)


def _of_version(error: VerificationError, manifest: object) -> VerificationError:
    """The error, with the version that compiled the program if that is another one."""
    result = manifest.get("autoshard") if isinstance(manifest, dict) else None
    if not isinstance(result, str) or result == __version__ or result in error.why:
        return error
    why = f"{error.why}; " if error.why else ""
    why += f"the program was compiled by autoshard {result[:40]}, this is {__version__}"
    return VerificationError(error.what, where=error.where, why=why, hint=error.hint)


def _ops_of(rules: Rules) -> frozenset[str]:
    return frozenset(r.op for r in user_rules(rules))


def _load(text_of: Callable[[str], str], raw: object, own: frozenset[str] | None) -> Program:
    """text_of: of a file, by its name. own: the ops that the user gave rules for; None: whatever the manifest
    names."""
    if not isinstance(raw, dict) or "format" not in raw:
        fail("", "no format")
    if raw["format"] != FORMAT:
        raise VerificationError(
            f"the program has format {repr(raw['format'])[:40]}, this version reads {FORMAT}",
            why=f"it was compiled by autoshard {repr(raw.get('autoshard'))[:40]}",
            hint=RECOMPILE,
        )
    manifest = manifest_of(raw)
    user_ops, mesh = manifest.user_ops, manifest.mesh
    if own is not None:
        _check_rules_given(user_ops, own)
    texts = {name: _checked(text_of(name), name, digest) for name, digest in manifest.files.items()}
    lowered, ports, returns = parse_program(texts["program.py"], axis_names(mesh), known_ops(user_ops))
    notes = _read(texts, "notes.json", _Notes)
    signature = _signature_in(manifest.signature, ports)
    _check_returns(signature, lowered, returns)
    constants: dict[str, object] = {
        k: _constant_in(v) for k, v in json.loads(texts["constants.json"]).items()
    }
    check_signature(signature, constants)
    lowered = replace(_labelled(lowered, notes.labels), results=tuple(r.value for r in signature.results))
    original = None
    if "original.py" in texts:
        ends = manifest.original_results
        original = parse_original(texts["original.py"], ends, signature, known_ops(user_ops))
        original = _labelled(original, notes.original_labels)
    loaded = Program(
        lowered=lowered,
        signature=signature,
        notes=_notes_in(notes.segments, lowered, "program.py"),
        plan=texts["plan.json"],
        dumps={k[6:-3]: text for k, text in texts.items() if k.startswith("dumps/")},
        constants=constants,
        stages=_stages_in(texts.get("schedule.json"), lowered, manifest.microbatches, mesh),
        original=original,
        original_notes={} if original is None else _notes_in(notes.original, original, "original.py"),
        classes=notes.classes,
        offload=_offload_in(manifest.offload),
        state=_read(texts, "state.json", StoredState),
        **{name: getattr(manifest, name) for name in _SAID},
    )
    _check_together(notes, manifest)
    return loaded


def _read(texts: Mapping[str, str], name: str, kind: type[T]) -> T:
    return decoded(json.loads(texts[name]), kind, name, fail=VerificationError, hint=RECOMPILE)


def _offload_in(text: str) -> Offload:
    try:
        return Offload.parse(text)
    except UsageError as error:
        raise VerificationError(error.what, where="manifest.json, offload", hint=RECOMPILE) from None


def _stages_in(text: str | None, lowered: Lowered, microbatches: int, mesh: str) -> PipelineStages | None:
    """The schedule of a pipeline, which must fit the text of the program."""
    axes = len(mesh.split(","))
    count = 1 + max(p.stage for p in lowered.parts)
    if text is None:
        if count > 1:
            raise VerificationError(f"the program has {count} stages and no schedule", hint=RECOMPILE)
        return None
    stages = schedule_from_json(text)
    if stages.position > axes:
        raise VerificationError(
            f"pp cannot be axis {stages.position} of a mesh of {axes} others", hint=RECOMPILE
        )
    if stages.schedule.ranks * check_mesh(mesh, "mesh").world_size > MAX_RANKS:
        fail("mesh", f"with its {stages.schedule.ranks} stages more than {MAX_RANKS} ranks")
    slices = 1 + max(p.slice for p in lowered.parts)
    new = (stages.schedule.stages, stages.schedule.microbatches, stages.schedule.slices)
    if new != (count, microbatches, slices):
        raise VerificationError("the schedule is for other stages than the program's", hint=RECOMPILE)
    split = any(p.phase == "weight" for p in lowered.parts)
    if stages.schedule.splits_backward != split:
        raise VerificationError("the schedule and the program split backward differently", hint=RECOMPILE)
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


def _text_in(root: Path, name: str) -> str:
    path = (root / name).resolve()
    if not path.is_relative_to(root.resolve()):
        raise VerificationError(f"{name!r} points outside the program folder", hint=RECOMPILE)
    return _text(path)


def _checked(text: str, name: str, digest: str) -> str:
    if _digest(text) != digest:
        raise VerificationError(f"{name} is not what was written", why="its checksum differs", hint=RECOMPILE)
    return text


def _text(path: Path) -> str:
    """The text of a file: no pipe or device, whose reading might never end, and no huge one.

    Raises FileNotFoundError, UnicodeDecodeError.
    """
    result = path.stat()
    if not stat.S_ISREG(result.st_mode) or result.st_size > _LARGEST:
        what = "is no plain file" if not stat.S_ISREG(result.st_mode) else f"has {result.st_size} bytes"
        raise VerificationError(f"{path} {what}", hint=RECOMPILE)
    return path.read_text(encoding="utf-8")


def _signature_in(stored: StoredSignature, ports: tuple[Port, ...]) -> Signature:
    results = tuple(Result(value, kind, target) for value, kind, target in stored.results)
    return Signature(ports, results, *(getattr(stored, name) for name in _STORED))


def _check_returns(signature: Signature, lowered: Lowered, returns: dict[StagePart, tuple[str, ...]]) -> None:
    """The manifest and the text must agree on what the program's results are."""
    results = {r.value for r in signature.results}
    new = {p.name for p in signature.ports} | {o for i in lowered.main for o in i.outs}
    if not results <= new or returns_of(lowered, results) != returns:
        raise VerificationError("the manifest does not fit what the program returns", hint=RECOMPILE)


def _notes_in(
    raw: Mapping[str, Sequence[tuple[str, ...]]], lowered: Lowered, name: str
) -> dict[str, tuple[NodeNote, ...]]:
    """The notes on every node of a text. Raises VerificationError if they are on other nodes."""
    # before anything is made for each of them
    if {k: len(v) for k, v in raw.items()} != {k: len(s.graph.nodes) for k, s in lowered.segments.items()}:
        raise VerificationError(f"notes.json is not about the statements of {name}", hint=RECOMPILE)
    return {k: tuple(NodeNote(*row) for row in rows) for k, rows in raw.items()}


def _labelled(lowered: Lowered, labels: list[str]) -> Lowered:
    if len(labels) != sum(isinstance(i, Call) for i in lowered.main):
        raise VerificationError("notes.json is not about the calls of the program", hint=RECOMPILE)
    feed = iter(labels)
    main = tuple(replace(i, label=next(feed)) if isinstance(i, Call) else i for i in lowered.main)
    return replace(lowered, main=main)


def _constant_in(raw: dict[str, Any]) -> torch.Tensor:
    short = {v: k for k, v in _torch_names().items()}
    return torch.tensor(raw["values"], dtype=torch_dtype(short[raw["dtype"]])).reshape(raw["shape"])


def _torch_names() -> dict[str, str]:
    from autoshard.ir import DTYPES

    return {short: name for short, (name, _) in DTYPES.items()}
