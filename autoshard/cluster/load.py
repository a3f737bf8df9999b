"""Reads cluster files: TOML, checked key by key; the catalog is a folder of such files.

A file holds either ``[device]`` and ``[[level]]`` tables, or ``[[group]]`` tables that each hold these and
``[[level]]`` tables that join the groups. ``[links]`` adds what was measured between single devices.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from importlib.resources import files
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from autoshard.cluster.cluster import OVERLAP, Cluster, Device, Level
from autoshard.cluster.host import Host
from autoshard.cluster.kernels import Kernels
from autoshard.cluster.links import Links, Matrix, matrix_of, read_matrix
from autoshard.cluster.measured import KINDS, CollectiveTimings
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
    "device": ((dict,), False),
    "level": ((list,), False),
    "group": ((list,), False),
    "links": ((dict,), False),
    "source": _SOURCE,
}
_GROUP: Schema = {
    "name": ((str,), True),
    "devices": ((int,), False),
    "nodes": ((int,), False),
    "device": ((dict,), True),
    "level": ((list,), False),
    "source": _SOURCE,
}
_LINKS: Schema = {"matrix": ((str, list), True), "latency": ((str, list), False), "source": _SOURCE}
_DEVICE: Schema = {
    "name": ((str,), True),
    "memory_bytes": ((int,), True),
    "peak_flops": ((dict,), True),
    "memory_bandwidth": (_NUMBER, True),
    "matmul_efficiency": (_NUMBER, True),
    "launch_overhead": (_NUMBER, True),
    "overlap": (_NUMBER, False),
    "alone": (_NUMBER, False),
    "kernels": ((dict,), False),
    "host": ((dict,), False),
    "source": _SOURCE,
}
_HOST: Schema = {
    "bandwidth": (_NUMBER, True),
    "latency": (_NUMBER, True),
    "memory_bytes": ((int,), True),
    "memory_bandwidth": (_NUMBER, True),
    "devices": ((int,), False),
    "source": _SOURCE,
}
_KERNELS: Schema = {
    "multiprocessors": ((int,), False),
    "tile": ((list,), False),
    "depth": (_NUMBER, False),
    "attention": (_NUMBER, False),
    "attention_backward": (_NUMBER, False),
    "attention_earlier": (_NUMBER, False),
    "traffic": (_NUMBER, False),
    "small": (_NUMBER, False),
    "narrow": (_NUMBER, False),
    "dispatch": (_NUMBER, False),
    "eager": (_NUMBER, False),
    "clock": (_NUMBER, False),
    "best": (_NUMBER, False),
    "watts": (_NUMBER, False),
    "attention_start": (_NUMBER, False),
    "view": (_NUMBER, False),
    "hand": (_NUMBER, False),
    "cache": (_NUMBER, False),
    "cached": (_NUMBER, False),
    "source": _SOURCE,
}
_MEASURED: Schema = {
    "kind": ((str,), True),
    "ranks": ((int,), True),
    "bytes": ((list,), True),
    "seconds": ((list,), True),
    "source": _SOURCE,
}
_MEASURED_HINT = "write [[level.measured]] with kind, ranks, bytes = [...] and seconds = [...]"
_LEVEL: Schema = {
    "name": ((str,), True),
    "size": ((int,), False),
    "latency": (_NUMBER, True),
    "bandwidth": (_NUMBER, True),
    "shared_by": ((int,), False),
    "efficiency": (_NUMBER, False),
    "measured": ((list,), False),
    "source": _SOURCE,
}
_GROUP_HINT = "each [[group]] has its own device; its figures stand under [group.device]"
#: f8: of products whose factors are cast to 8-bit floats, which no tensor here is stored in
_PEAK_FLOPS: Schema = {name: (_NUMBER, False) for name in (*DTYPES, "f8")}


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
    return parse_cluster(content, where=text, folder=Path(text).parent)


def parse_cluster(text: str, *, where: str, folder: Path | None = None) -> Cluster:
    """The cluster that this TOML text describes; ``where`` names it in errors.

    folder: what the paths of measured links are relative to; without it, links must be written out.
    """
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also integers of thousands of digits
        raise UsageError("the cluster file is not valid TOML", where=where, why=str(error)) from error
    _check(table, _CLUSTER, where)
    levels = _levels(table, where)
    links = _links(table["links"], f"{where}, links", folder) if "links" in table else None
    if "group" not in table:
        if "device" not in table:
            hint = "write a [device] table, or [[group]] tables with one each"
            raise UsageError("missing: device", where=where, hint=hint)
        device = _device(table["device"], where)
        return Cluster(table["name"], table.get("devices"), device, levels, links=links)
    if "device" in table:
        raise UsageError("a cluster of groups has no device of its own", where=where, hint=_GROUP_HINT)
    groups = [_group(group, f"{where}, group {n}") for n, group in enumerate(table["group"], 1)]
    cluster = Cluster.joined(table["name"], groups, levels, links)
    if table.get("devices", cluster.devices) != cluster.devices:
        what = f"devices is {table['devices']}, the groups hold {cluster.devices}"
        raise UsageError(what, where=where, hint="leave it out: it is the sum over the groups")
    return cluster


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


def _group(table: object, where: str) -> Cluster:
    if not isinstance(table, dict):
        raise UsageError("a group is not a table", where=where, hint="write each group under [[group]]")
    _check(table, _GROUP, where)
    levels = _levels(table, where)
    if ("devices" in table) == ("nodes" in table):
        why = "a group says once how large it is"
        hint = "give devices = N, or nodes = N of as many devices as its innermost level holds"
        raise UsageError("either devices or nodes must be given", where=where, why=why, hint=hint)
    devices = table.get("devices")
    if devices is None:
        inner = levels[0].size if levels else None
        if inner is None:
            hint = "give devices = N, or the innermost level its size"
            raise UsageError("nodes have no size", where=where, hint=hint)
        devices = table["nodes"] * inner
    return Cluster(table["name"], devices, _device(table["device"], where), levels)


def _links(table: Mapping[str, Any], where: str, folder: Path | None) -> Links:
    _check(table, _LINKS, where)
    latency = _matrix(table["latency"], f"{where}.latency", folder) if "latency" in table else None
    return Links(_matrix(table["matrix"], f"{where}.matrix", folder), latency)


def _matrix(given: str | list[Any], where: str, folder: Path | None) -> Matrix:
    if isinstance(given, str):
        if folder is None and not Path(given).is_absolute():
            hint = "write the rows out, or give an absolute path"
            raise UsageError(f"{given!r} is relative to no file", where=where, hint=hint)
        return read_matrix((folder or Path()) / given, where=where)
    for row in given:
        if not isinstance(row, list) or not all(_is_number(entry) for entry in row):
            raise UsageError(
                f"{row!r} is not a row of numbers", where=where, hint="write [[0, 1e9], [1e9, 0]]"
            )
    return matrix_of(given, where=where)


def _levels(table: Mapping[str, Any], where: str) -> tuple[Level, ...]:
    return tuple(
        _level(level, f"{where}, level {number}") for number, level in enumerate(table.get("level", ()), 1)
    )


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
        overlap=float(table.get("overlap", OVERLAP)),
        kernels=_kernels(table.get("kernels", {}), f"{where}.kernels"),
        host=_host(table["host"], f"{where}.host") if "host" in table else None,
        alone=float(table.get("alone", 1.0)),
    )


def _host(table: Mapping[str, Any], where: str) -> Host:
    _check(table, _HOST, where)
    return Host(
        bandwidth=float(table["bandwidth"]),
        latency=float(table["latency"]),
        memory_bytes=table["memory_bytes"],
        memory_bandwidth=float(table["memory_bandwidth"]),
        devices=table.get("devices", 1),
    )


def _kernels(table: Mapping[str, Any], where: str) -> Kernels:
    _check(table, _KERNELS, where)
    given = {key: value for key, value in table.items() if key != "source"}
    if "tile" in given:
        if not all(isinstance(n, int) and not isinstance(n, bool) for n in given["tile"]):
            raise UsageError(f"tile is {given['tile']!r}", where=where, why="it is two whole numbers")
        given["tile"] = tuple(given["tile"])
    return Kernels(**given)


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
        efficiency=float(table.get("efficiency", 1.0)),
        measured=tuple(
            _measured(each, f"{where}, measured {number}")
            for number, each in enumerate(table.get("measured", ()), 1)
        ),
    )


def _measured(table: object, where: str) -> CollectiveTimings:
    if not isinstance(table, dict):
        raise UsageError("a measured collective is not a table", where=where, hint=_MEASURED_HINT)
    _check(table, _MEASURED, where)
    if not all(map(_is_number, (*table["bytes"], *table["seconds"]))):
        raise UsageError("bytes and seconds are lists of numbers", where=where, hint=_MEASURED_HINT)
    if table["kind"] not in KINDS:
        raise UsageError(
            f"there is no collective {table['kind']!r}", where=where, hint=nearest(table["kind"], KINDS)
        )
    return CollectiveTimings(
        table["kind"], table["ranks"], tuple(map(int, table["bytes"])), tuple(map(float, table["seconds"]))
    )


def _check(table: Mapping[str, Any], schema: Schema, where: str) -> None:
    for key, value in table.items():
        if key not in schema:
            raise UsageError(f"unknown key {key!r}", where=where, hint=nearest(key, schema))
        types, _ = schema[key]
        if not isinstance(value, types) or isinstance(value, bool):
            wanted = " or ".join(kind.__name__ for kind in types)
            raise UsageError(f"{key} is {value!r}", where=where, why=f"it must be of type {wanted}")
        if isinstance(value, int) and not _is_number(value):
            raise UsageError(f"{key} has {len(str(value))} digits", where=where, why="no machine has as many")
    missing = [key for key, (_, required) in schema.items() if required and key not in table]
    if missing:
        raise UsageError(f"missing: {', '.join(missing)}", where=where)
    _check_source(table.get("source", ""), table, where)


def _check_source(source: str | Mapping[str, Any], table: Mapping[str, Any], where: str) -> None:
    if isinstance(source, str):
        return
    figures = [key for key in table if key != "source"]
    for figure, text in source.items():
        if figure not in figures:
            raise UsageError(
                f"source of {figure!r}, which is not here", where=where, hint=nearest(figure, figures)
            )
        if not isinstance(text, str):
            raise UsageError(f"the source of {figure} is {text!r}", where=where, why="it must be a text")


def _is_number(value: object) -> bool:
    """Whether it is a number that a float can hold; TOML integers may have any number of digits."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return isinstance(value, float) or abs(value) < 2**1000
