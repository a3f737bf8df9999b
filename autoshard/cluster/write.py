"""Writes cluster files: what `autoshard.cluster.load` reads."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from autoshard.cluster.cluster import Cluster
from autoshard.cluster.links import Matrix
from autoshard.errors import UsageError


def cluster_text(
    cluster: Cluster,
    description: str,
    device_source: Mapping[str, str],
    level_sources: Sequence[Mapping[str, str]],
    links: Mapping[str, str] | None = None,
) -> str:
    """A homogeneous cluster as TOML, figures to four digits.

    sources: figure -> where it comes from, of the device and of every level. links: keys of the ``[links]``
    table, file names and ``source``.
    """
    if cluster.groups:
        raise UsageError("a cluster of groups cannot be written", where=f"cluster {cluster.name!r}")
    table = {
        "name": cluster.name,
        "description": description,
        "devices": cluster.devices,
        "collectives": cluster.collectives,
        "device": _figures(cluster.device, device_source),
        "level": [_figures(*both) for both in zip(cluster.levels, level_sources, strict=True)],
        "links": dict(links or {}),
    }
    return "\n".join(_lines(table)) + "\n"


def matrix_text(matrix: Matrix, comment: str) -> str:
    """A matrix as CSV, four digits, below a line of comment."""
    rows = (",".join(f"{entry:.4g}" for entry in row) for row in matrix)
    return "\n".join([f"# {comment}", *rows]) + "\n"


def write_all(texts: Mapping[Path, str]) -> None:
    """Write files, each whole or not at all, in order; UsageError, and no file changed, if one cannot be."""
    staged: dict[Path, Path] = {}
    try:
        for path, text in texts.items():
            staged[path] = path.with_name(f".{path.name}.{os.getpid()}.part")
            staged[path].write_text(text, encoding="utf-8")
        for path, part in staged.items():
            part.replace(path)
    except OSError as error:
        raise UsageError(f"cannot write {path}", why=error.strerror or str(error)) from error
    finally:
        for part in staged.values():
            with suppress(FileNotFoundError):  # moved to its place
                part.unlink()


def _figures(value: Any, sources: Mapping[str, str] = MappingProxyType({})) -> dict[str, Any]:
    """The fields of a dataclass, but for those that are left at what they are by default without a source."""
    figures: dict[str, Any] = {}
    for each in fields(value):
        given = getattr(value, each.name)
        plain = each.default if each.default_factory is MISSING else each.default_factory()
        if each.name in sources or given != plain:
            figures[each.name] = (
                _figures(given) if is_dataclass(given) else msgspec.to_builtins(given, enc_hook=float)
            )
    return {**figures, "source": dict(sources)}


def _lines(table: Mapping[str, Any], head: str = "") -> Iterator[str]:
    """TOML, tables below the keys that are none; what is None or empty is left out."""
    inner = {key: value for key, value in table.items() if isinstance(value, Mapping) or _are_tables(value)}
    for key, value in table.items():
        if key not in inner and value is not None:
            yield f"{key} = {_value(value)}"
    for key, value in inner.items():
        for each in [value] if isinstance(value, Mapping) else value:
            if each:
                name = f"{head}{key}"
                yield f"\n[{name}]" if each is value else f"\n[[{name}]]"
                yield from _lines(each, f"{name}.")


def _are_tables(value: object) -> bool:
    return isinstance(value, Sequence) and any(isinstance(each, Mapping) for each in value)


def _value(value: object) -> str:
    """Figures have four digits."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"[{', '.join(map(_value, value))}]"
    # a TOML basic string; its escapes are those of JSON, but for DEL
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
