"""Writes cluster files: what `autoshard.cluster.load` reads."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path

from autoshard.cluster.cluster import OVERLAP, Cluster
from autoshard.cluster.host import Host
from autoshard.cluster.kernels import Kernels
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
    return "\n".join(_lines(cluster, description, device_source, level_sources, links or {})) + "\n"


def matrix_text(matrix: Matrix, comment: str) -> str:
    """A matrix as CSV, four digits, below a line of comment."""
    rows = (",".join(_number(entry) for entry in row) for row in matrix)
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


def _lines(
    cluster: Cluster,
    description: str,
    device_source: Mapping[str, str],
    level_sources: Sequence[Mapping[str, str]],
    links: Mapping[str, str],
) -> Iterator[str]:
    device = cluster.device
    peaks = ", ".join(f"{dtype} = {_number(rate)}" for dtype, rate in device.peak_flops.items())
    yield f"name = {_text(cluster.name)}"
    yield f"description = {_text(description)}"
    if cluster.devices is not None:
        yield f"devices = {cluster.devices}"
    yield "\n[device]"
    yield f"name = {_text(device.name)}"
    yield f"memory_bytes = {device.memory_bytes}"
    yield f"peak_flops = {{ {peaks} }}"
    yield f"memory_bandwidth = {_number(device.memory_bandwidth)}"
    yield f"matmul_efficiency = {_number(device.matmul_efficiency)}"
    yield f"launch_overhead = {_number(device.launch_overhead)}"
    if device.overlap != OVERLAP or "overlap" in device_source:
        yield f"overlap = {_number(device.overlap)}"
    if device.alone != 1 or "alone" in device_source:
        yield f"alone = {_number(device.alone)}"
    yield from _table("\n[device.source]", device_source)
    yield from _kernels(device.kernels)
    if device.host is not None:
        yield from _host(device.host)
    for level, source in zip(cluster.levels, level_sources, strict=True):
        yield "\n[[level]]"
        yield f"name = {_text(level.name)}"
        if level.size is not None:
            yield f"size = {level.size}"
        yield f"latency = {_number(level.latency)}"
        yield f"bandwidth = {_number(level.bandwidth)}"
        yield f"shared_by = {level.shared_by}"
        if level.efficiency != 1 or "efficiency" in source:
            yield f"efficiency = {_number(level.efficiency)}"
        yield from _table("\n[level.source]", source)
        for table in level.measured:
            yield "\n[[level.measured]]"
            yield f"kind = {_text(table.kind)}"
            yield f"ranks = {table.ranks}"
            yield f"bytes = {list(table.nbytes)}"
            yield f"seconds = [{', '.join(map(_number, table.seconds))}]"
    if links:
        yield from _table("\n[links]", links)


def _kernels(kernels: Kernels) -> Iterator[str]:
    """The figures that are not those of a device that nothing is known of."""
    plain = Kernels()
    known = [f.name for f in fields(Kernels) if getattr(kernels, f.name) != getattr(plain, f.name)]
    if known:
        yield "\n[device.kernels]"
    for name in known:
        value = getattr(kernels, name)
        yield f"{name} = {list(value) if name == 'tile' else _number(value)}"


def _host(host: Host) -> Iterator[str]:
    yield "\n[device.host]"
    yield f"bandwidth = {_number(host.bandwidth)}"
    yield f"latency = {_number(host.latency)}"
    yield f"memory_bytes = {host.memory_bytes}"
    yield f"memory_bandwidth = {_number(host.memory_bandwidth)}"
    yield f"devices = {host.devices}"


def _table(head: str, texts: Mapping[str, str]) -> Iterator[str]:
    yield head
    yield from (f"{key} = {_text(text)}" for key, text in texts.items())


def _number(value: float) -> str:
    return f"{value:.4g}"


def _text(text: str) -> str:
    """A TOML basic string; its escapes are those of JSON, but for DEL."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
