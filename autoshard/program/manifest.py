"""What a manifest may hold: every number and every list of it is bounded before it is used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NoReturn

from autoshard.cluster.mesh import Mesh
from autoshard.errors import UsageError, VerificationError

#: of all programs there may be; the largest machines have a tenth of it
MAX_RANKS, MAX_AXES = 1 << 20, 16
MAX_MICROBATCHES = 1 << 16
#: entries of a list, and characters of a text in it
MAX_ENTRIES, MAX_TEXT = 1 << 20, 100_000

_RECOMPILE = "compile the program again"
_Check = Callable[[object, str], None]


def check_manifest(raw: object) -> None:
    """VerificationError, naming the entry, unless a manifest of this format has the form that it should."""
    _table(_MANIFEST)(raw, "")
    assert isinstance(raw, dict)
    check_mesh(raw["mesh"], "mesh")


def check_mesh(text: str, where: str) -> Mesh:
    """The mesh of a text. VerificationError if it is none, or one of more ranks than there can be."""
    try:
        mesh = Mesh.parse(text)
    except UsageError as error:
        fail(where, error.what)
    if len(mesh.axes) > MAX_AXES:
        fail(where, f"a mesh of {len(mesh.axes)} axes")
    if mesh.world_size > MAX_RANKS:
        fail(where, f"a mesh of more than {MAX_RANKS} ranks")
    return mesh


def fail(where: str, what: str) -> NoReturn:
    """VerificationError about an entry of the manifest."""
    raise VerificationError(
        f"the manifest has {what}", where=f"manifest.json, {where or 'all of it'}", hint=_RECOMPILE
    )


def _text(raw: object, where: str) -> None:
    if not isinstance(raw, str):
        fail(where, f"{_shown(raw)} where a text is expected")
    if len(raw) > MAX_TEXT:
        fail(where, f"a text of {len(raw)} characters")


def _truth(raw: object, where: str) -> None:
    if not isinstance(raw, bool):
        fail(where, f"{_shown(raw)} where true or false is expected")


def _number(least: int, most: int) -> _Check:
    def check(raw: object, where: str) -> None:
        if not isinstance(raw, int) or isinstance(raw, bool) or not least <= raw <= most:
            fail(where, f"{_shown(raw)} where a number from {least} to {most} is expected")

    return check


def _list(of: _Check, count: int | None = None) -> _Check:
    """count: of its entries, None for any."""

    def check(raw: object, where: str) -> None:
        if not isinstance(raw, list) or len(raw) > MAX_ENTRIES or count not in (None, len(raw)):
            fail(where, f"{_shown(raw)} where a list{f' of {count}' if count else ''} is expected")
        for number, entry in enumerate(raw):
            of(entry, f"{where}[{number}]")

    return check


def _texts_by_name(raw: object, where: str) -> None:
    if not isinstance(raw, dict) or len(raw) > MAX_ENTRIES:
        fail(where, f"{_shown(raw)} where texts by name are expected")
    for name, text in raw.items():
        _text(name, where)
        _text(text, f"{where}[{name[:40]!r}]")


def _table(entries: Mapping[str, _Check]) -> _Check:
    def check(raw: object, where: str) -> None:
        if not isinstance(raw, dict):
            fail(where, f"{_shown(raw)} where named entries are expected")
        for name, of in entries.items():
            if name not in raw and name not in _OPTIONAL:
                fail(where, f"no {name}")
            if name in raw:
                of(raw[name], f"{where}.{name}" if where else name)

    return check


def _shown(raw: object) -> str:
    """A value as errors call it: by its kind where it is long."""
    if isinstance(raw, list | dict):
        return f"{'a list' if isinstance(raw, list) else 'a table'} of {len(raw)}"
    text = repr(raw) if not isinstance(raw, int) or abs(raw) < 1 << 64 else "a very large number"
    return text if len(text) <= 40 else f"{text[:40]}..."


_PAIRS = _list(_list(_text, 2))
_SIGNATURE: dict[str, _Check] = {
    "results": _list(_list(_text, 3)),
    "in_tree": _text,
    "in_leaves": _PAIRS,
    "out_tree": _text,
    "out_leaves": _PAIRS,
    "input_names": _list(_text),
    "tied": _PAIRS,
    "frozen": _list(_text),
    "training": _truth,
    "batch_inputs": _list(_text),
}
_OPTIONAL = frozenset(("offload",))
_MANIFEST: dict[str, _Check] = {
    "autoshard": _text,
    "torch": _text,
    "mesh": _text,
    "target": _text,
    "options": _PAIRS,
    "user_ops": _list(_text),
    "microbatches": _number(1, MAX_MICROBATCHES),
    "sums": _list(_text),
    "alone": _list(_text),
    "offload": _text,
    "signature": _table(_SIGNATURE),
    "original_results": _list(_text),
    "files": _texts_by_name,
}
