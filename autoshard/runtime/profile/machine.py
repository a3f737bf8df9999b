"""Measures the machine that it runs on, and gives a cluster that says so."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from autoshard.cluster.cluster import Cluster, Device, bounding
from autoshard.cluster.links import Links
from autoshard.cluster.load import parse_cluster
from autoshard.cluster.write import cluster_text, matrix_text
from autoshard.errors import UsageError
from autoshard.runtime.profile.core_sharing import share_of_core
from autoshard.runtime.profile.device import MeasuredDevice, measure_device
from autoshard.runtime.profile.links import (
    MeasuredLevel,
    mean_of,
    measure_levels,
    measure_pairs,
    node_size,
    sizes_to,
    slowest,
)

T = TypeVar("T")


@dataclass(frozen=True)
class Effort:
    """How hard to measure: repeats of each timing, bytes of the largest message (None: 16 MiB on the
    CPU, 256 MiB on GPUs), and whether to measure every pair of ranks too."""

    repeats: int = 5
    largest: int | None = None
    pairs: bool = False


@dataclass(frozen=True)
class MachineProfile:
    """What was measured. links: bandwidth and latency of every pair, if they were."""

    cluster: Cluster
    description: str
    device_sources: dict[str, str]
    levels: tuple[MeasuredLevel, ...]
    links: Links | None = None
    links_source: str = ""

    def texts(self, path: Path) -> dict[Path, str]:
        """The files of this profile by path: the cluster file last, matrices of links beside it.

        Raises UsageError if what was measured is no cluster.
        """
        files: dict[Path, str] = {}
        links: dict[str, str] = {}
        if self.links is not None:
            assert self.links.latency is not None
            files[path.with_suffix(".csv")] = matrix_text(
                self.links.bandwidth, "bytes/s; row: from, column: to"
            )
            files[path.with_suffix(".latency.csv")] = matrix_text(self.links.latency, "seconds; row: from")
            bandwidth, latency = (file.name for file in files)
            links = {"matrix": bandwidth, "latency": latency, "source": self.links_source}
        sources = [level.sources for level in self.levels]
        plain = cluster_text(self.cluster, self.description, self.device_sources, sources)
        parse_cluster(plain, where="the profile")  # what is written can be read
        files[path] = cluster_text(self.cluster, self.description, self.device_sources, sources, links)
        return files


def measure(name: str, effort: Effort, say: Callable[[str], None]) -> MachineProfile:
    """Measure all ranks of the process group, or this process alone if there is none.

    Collective; every rank returns a profile, that of rank 0 is complete. Devices are taken to be as the
    slowest of them; processes that share cores to be as the mean of them, as what one takes longer, the
    others do not have. Raises UsageError if nodes differ in size or times make no sense.
    """
    alone = not dist.is_initialized()
    device = own_device()
    world = 1 if alone else dist.get_world_size()
    hosts = [socket.gethostname()]
    if not alone:
        hosts = _gathered(hosts[0])
    per_node = node_size(hosts)
    say(f"measuring {world} {'device' if world == 1 else 'devices at once'}, {per_node} on each node")
    kind: Literal["nccl", "mpi"] = "nccl" if device.type == "cuda" else "mpi"
    sizes = sizes_to(effort.largest or (256 if device.type == "cuda" else 16) * 2**20)
    share = share_of_core(device, per_node)
    agree = list if alone else partial(mean_of if share > 1.0 else slowest, device)
    mine = measure_device(device, per_node, effort.repeats, say, agree, share)
    every: list[MeasuredDevice] = [mine] if alone else _gathered(mine)
    bound = bounding([each.device for each in every])
    _check_kinds([each.device for each in every])
    sources = dict(mine.sources)
    if world > 1:
        of = "the mean of {} processes that share cores" if share > 1.0 else "the worst of {} devices"
        sources = {key: f"{text}; {of.format(world)}, at work at once" for key, text in sources.items()}
    where = f"devices: {world}, nodes: {world // per_node}, torch {torch.__version__}, {platform.platform()}"
    description = f"measured by autoshard profile: {where}"
    if world == 1:
        cluster = Cluster(name, 1, bound, (), collectives=kind)
        return MachineProfile(
            cluster, f"{description}; one device, so that no links were measured", sources, ()
        )
    levels = measure_levels(device, per_node, sizes, effort.repeats, say, share)
    cluster = Cluster(name, world, bound, tuple(each.level for each in levels), collectives=kind)
    profile = MachineProfile(cluster, description, sources, tuple(levels))
    if not effort.pairs:
        return profile
    bandwidth, latency = measure_pairs(device, sizes[-1], effort.repeats, say)
    links = Links(np.array(bandwidth), np.array(latency))
    source = (
        f"measured: a byte and {sizes[-1]} bytes one way, {dist.get_backend()}, least of {effort.repeats}"
    )
    return replace(profile, links=links, links_source=f"{source}, one pair at a time")


def own_device() -> torch.device:
    """The device of this process: a GPU of its node if there are any, else the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    local = int(os.environ.get("LOCAL_RANK", 0))
    if local >= torch.cuda.device_count():
        hint = f"torchrun --nproc-per-node {torch.cuda.device_count()} ..."
        raise UsageError(f"there is no GPU {local}", where=socket.gethostname(), hint=hint)
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


def _gathered(mine: T) -> list[T]:
    """What every rank has, by rank."""
    every: list[T | None] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return [each for each in every if each is not None]


def _check_kinds(devices: list[Device]) -> None:
    """A measured cluster is of one kind of device: which groups there are is for the user to say."""
    names = list(dict.fromkeys(device.name for device in devices))
    if len(names) > 1:
        raise UsageError(
            f"the devices are of {len(names)} kinds",
            why=", ".join(names),
            hint="profile each kind on its own, and join the files by [[group]] tables",
        )
