"""Reads cluster files, which are TOML; the catalog is a folder of such files.

A file holds either ``[device]`` and ``[[level]]`` tables, or ``[[group]]`` tables that each hold these and
``[[level]]`` tables that join the groups. ``[links]`` adds what was measured between single devices.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import replace
from importlib.resources import files
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Literal

import msgspec

from autoshard.cluster.cluster import Cluster, Device, Level
from autoshard.cluster.links import Links, Matrix, matrix_of, read_matrix
from autoshard.errors import UsageError, nearest
from autoshard.ir.decode import Number, decoded


class _Group(msgspec.Struct, forbid_unknown_fields=True):
    """A ``[[group]]``, as large as ``devices``, or as ``nodes`` of the innermost level."""

    name: str
    device: Device
    devices: Number | None = None
    nodes: Number | None = None
    level: tuple[Level, ...] = ()


class _Links(msgspec.Struct, forbid_unknown_fields=True):
    """``[links]``: rows, or the path of a file with them."""

    matrix: str | list[list[float]]
    latency: str | list[list[float]] | None = None


class _File(msgspec.Struct, forbid_unknown_fields=True):
    """A cluster file without its sources."""

    name: str
    description: str = ""
    devices: Number | None = None
    device: Device | None = None
    level: tuple[Level, ...] = ()
    group: tuple[_Group, ...] | None = None
    links: _Links | None = None
    collectives: Literal["nccl", "mpi"] = "nccl"


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
        table = _without_sources(tomllib.loads(text), where)
    except (ValueError, RecursionError) as error:  # also integers of thousands of digits
        raise UsageError("the cluster file is not valid TOML", where=where, why=str(error)) from error
    if "group" in table and "device" in table:
        hint = "each [[group]] has its own device; its figures stand under [group.device]"
        raise UsageError("a cluster of groups has no device of its own", where=where, hint=hint)
    file = decoded(table, _File, where)
    links = None if file.links is None else _links(file.links, f"{where}, links", folder)
    if file.group is None:
        if file.device is None:
            hint = "write a [device] table, or [[group]] tables with one each"
            raise UsageError("missing: device", where=where, hint=hint)
        return Cluster(
            file.name, file.devices, file.device, file.level, links=links, collectives=file.collectives
        )
    groups = [
        replace(_group(group, f"{where}, group {n}"), collectives=file.collectives)
        for n, group in enumerate(file.group, 1)
    ]
    cluster = Cluster.joined(file.name, groups, file.level, links)
    if file.devices not in (None, cluster.devices):
        what = f"devices is {file.devices}, the groups hold {cluster.devices}"
        raise UsageError(what, where=where, hint="leave it out: it is the sum over the groups")
    return cluster


def _catalog_text(name: str) -> str:
    if name not in catalog_names():
        raise UsageError(f"no cluster is called {name!r}", hint=_catalog_hint(name))
    return files("autoshard.cluster").joinpath("catalog", f"{name}.toml").read_text(encoding="utf-8")


def _catalog_hint(text: str) -> str:
    return f"a .toml file, or a name of the catalog: {nearest(Path(text).stem, catalog_names())}"


def _group(group: _Group, where: str) -> Cluster:
    if (group.devices is None) == (group.nodes is None):
        why = "a group says once how large it is"
        hint = "give devices = N, or nodes = N of as many devices as its innermost level holds"
        raise UsageError("either devices or nodes must be given", where=where, why=why, hint=hint)
    devices = group.devices
    if group.nodes is not None:
        inner = group.level[0].size if group.level else None
        if inner is None:
            hint = "give devices = N, or the innermost level its size"
            raise UsageError("nodes have no size", where=where, hint=hint)
        devices = group.nodes * inner
    return Cluster(group.name, devices, group.device, group.level)


def _links(links: _Links, where: str, folder: Path | None) -> Links:
    latency = None if links.latency is None else _matrix(links.latency, f"{where}, latency", folder)
    return Links(_matrix(links.matrix, f"{where}, matrix", folder), latency)


def _matrix(given: str | list[list[float]], where: str, folder: Path | None) -> Matrix:
    if not isinstance(given, str):
        return matrix_of(given, where=where)
    if folder is None and not Path(given).is_absolute():
        hint = "write the rows out, or give an absolute path"
        raise UsageError(f"{given!r} is relative to no file", where=where, hint=hint)
    return read_matrix((folder or Path()) / given, where=where)


def _without_sources(table: Mapping[str, Any], where: str, within: str = "") -> dict[str, Any]:
    """A table without what any may have beside its figures: where they come from, as one text or by figure.

    Raises UsageError for the source of something that is not there.
    """
    rest = {"size": None, **table} if within == "level" else dict(table)
    source = rest.pop("source", "")
    for figure, text in source.items() if isinstance(source, dict) else [("all", source)]:
        if isinstance(source, dict) and figure not in table:
            what = f"source of {figure!r}, which is not here"
            raise UsageError(what, where=where, hint=nearest(figure, rest))
        if not isinstance(text, str):
            raise UsageError(f"the source of {figure} is {text!r}", where=where, why="it must be a text")
    for key, value in rest.items():
        if isinstance(value, dict):
            rest[key] = _without_sources(value, f"{where}, {key}", key)
        elif isinstance(value, list):
            rest[key] = [
                _without_sources(v, f"{where}, {key} {n}", key) if isinstance(v, dict) else v
                for n, v in enumerate(value, 1)
            ]
    return rest
