"""Reads cluster files: TOML, checked key by key; the catalog is a folder of such files."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from importlib.resources import files
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from autoshard.cluster.cluster import Cluster, Device, Level
from autoshard.errors import UsageError
from autoshard.ir.types import DTYPES

#: key -> (accepted types, required)
Schema = Mapping[str, tuple[tuple[type, ...], bool]]

_NUMBER = (int, float)
#: ``source`` says where figures come from: one text for the table, or figure -> text
_SOURCE = ((str, dict), False)
_CLUSTER: Schema = {
    "name": ((str,), True),
    "description": ((str,), False),
    "devices": ((int,), False),
    "device": ((dict,), True),
    "level": ((list,), True),
    "source": _SOURCE,
}
_DEVICE: Schema = {
    "name": ((str,), True),
    "memory_bytes": ((int,), True),
    "peak_flops": ((dict,), True),
    "memory_bandwidth": (_NUMBER, True),
    "matmul_efficiency": (_NUMBER, True),
    "launch_overhead": (_NUMBER, True),
    "source": _SOURCE,
}
_LEVEL: Schema = {
    "name": ((str,), True),
    "size": ((int,), False),
    "latency": (_NUMBER, True),
    "bandwidth": (_NUMBER, True),
    "shared_by": ((int,), False),
    "source": _SOURCE,
}
_PEAK_FLOPS: Schema = {name: (_NUMBER, False) for name in DTYPES}


def catalog_names() -> list[str]:
    """Names of the clusters that come with autoshard, sorted."""
    names = (entry.name for entry in files("autoshard.cluster").joinpath("catalog").iterdir())
    return sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml"))


def load_cluster(name_or_path: str | PathLike[str]) -> Cluster:
    """The cluster of that name in the catalog, or of that ``.toml`` file."""
    if not isinstance(name_or_path, str | PathLike):
        raise UsageError(f"{type(name_or_path).__name__} is not a cluster", hint=_catalog_hint(""))
    text = fspath(name_or_path)
    if not text.endswith(".toml"):
        return parse_cluster(_catalog_text(text), where=f"catalog entry {text!r}")
    try:
        content = Path(text).read_text(encoding="utf-8")
    except OSError as error:
        why, hint = error.strerror or str(error), _catalog_hint(text)
        raise UsageError("cannot read the cluster file", where=text, why=why, hint=hint) from error
    except UnicodeDecodeError as error:
        raise UsageError("the cluster file is not text", where=text, why=str(error)) from error
    return parse_cluster(content, where=text)


def parse_cluster(text: str, *, where: str) -> Cluster:
    """The cluster that this TOML text describes; ``where`` names it in errors."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError("the cluster file is not valid TOML", where=where, why=str(error)) from error
    _check(table, _CLUSTER, where)
    levels = (_level(level, f"{where}, level {number}") for number, level in enumerate(table["level"], 1))
    return Cluster(table["name"], table.get("devices"), _device(table["device"], where), tuple(levels))


def nearest(word: str, options: Iterable[str]) -> str:
    """A hint: the option that looks most like ``word``, if any does, and all options."""
    names = list(options)
    close = get_close_matches(word, names, n=1)
    return (f"did you mean {close[0]!r}? " if close else "") + f"known: {', '.join(names)}"


def _catalog_text(name: str) -> str:
    if name not in catalog_names():
        raise UsageError(f"no cluster is called {name!r}", hint=_catalog_hint(name))
    return files("autoshard.cluster").joinpath("catalog", f"{name}.toml").read_text(encoding="utf-8")


def _catalog_hint(text: str) -> str:
    return f"a .toml file, or a name of the catalog: {nearest(Path(text).stem, catalog_names())}"


def _device(table: Mapping[str, Any], where: str) -> Device:
    where = f"{where}, device"
    _check(table, _DEVICE, where)
    _check(table["peak_flops"], _PEAK_FLOPS, f"{where}.peak_flops")
    return Device(
        name=table["name"],
        memory_bytes=table["memory_bytes"],
        peak_flops={dtype: float(rate) for dtype, rate in table["peak_flops"].items()},
        memory_bandwidth=float(table["memory_bandwidth"]),
        matmul_efficiency=float(table["matmul_efficiency"]),
        launch_overhead=float(table["launch_overhead"]),
    )


def _level(table: object, where: str) -> Level:
    if not isinstance(table, dict):
        raise UsageError("a level is not a table", where=where, hint="write each level under [[level]]")
    _check(table, _LEVEL, where)
    return Level(
        name=table["name"],
        size=table.get("size"),
        latency=float(table["latency"]),
        bandwidth=float(table["bandwidth"]),
        shared_by=table.get("shared_by", 1),
    )


def _check(table: Mapping[str, Any], schema: Schema, where: str) -> None:
    for key, value in table.items():
        if key not in schema:
            raise UsageError(f"unknown key {key!r}", where=where, hint=nearest(key, schema))
        types, _ = schema[key]
        if not isinstance(value, types) or isinstance(value, bool):
            wanted = " or ".join(kind.__name__ for kind in types)
            raise UsageError(f"{key} is {value!r}", where=where, why=f"it must be of type {wanted}")
    missing = [key for key, (_, required) in schema.items() if required and key not in table]
    if missing:
        raise UsageError(f"missing: {', '.join(missing)}", where=where)
