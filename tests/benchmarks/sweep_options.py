"""Options that users give beside a cluster and a batch, drawn at random, and clusters of unlike nodes."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from importlib.resources import files
from types import MappingProxyType

from autoshard.schedules.registry import names as schedules

Words = tuple[str, ...]

#: of a node of the clusters that are joined: devices
NODES = MappingProxyType({"h100-dgx": 8, "h200-dgx": 8, "a100-selene": 8, "v100-dgx2": 16})
#: what joins unlike nodes
_JOIN = """
[[level]]
name = "ethernet"
latency = 50e-6
bandwidth = 12.5e9
shared_by = 8
"""


def drawn_options(draw: random.Random, gpus: int, batch: int) -> Words:
    """Words of a command. None as often as one; a mesh takes the place of ``--gpus``."""
    kinds = draw.sample(list(_KINDS), draw.choice((0, 1, 1, 2, 3)))
    return tuple(word for kind in sorted(kinds) for word in _KINDS[kind](draw, gpus, batch))


def unlike_cluster(draw: random.Random, gpus: int) -> str:
    """Two kinds of nodes that hold about as many devices, as `unlike_text` reads them."""
    kinds, share = draw.sample(list(NODES), 2), draw.choice((0.25, 0.5, 0.75))
    nodes = [
        max(1, round(part * gpus / NODES[kind])) for kind, part in zip(kinds, (share, 1 - share), strict=True)
    ]
    return "+".join(f"{kind}:{count}" for kind, count in zip(kinds, nodes, strict=True))


def unlike_text(name: str) -> str:
    """The TOML of ``KIND:NODES+KIND:NODES``."""
    groups = []
    for kind, nodes in (part.split(":") for part in name.split("+")):
        text = files("autoshard.cluster").joinpath("catalog", f"{kind}.toml").read_text(encoding="utf-8")
        tables = re.sub(r"^(\[+)(device|level)", r"\1group.\2", text[text.index("[device]") :], flags=re.M)
        groups.append(f'[[group]]\nname = "{kind}"\nnodes = {nodes}\n\n{tables}')
    return "\n".join([f'name = "{name}"', *groups, _JOIN])


def _mesh(draw: random.Random, gpus: int, batch: int) -> Words:
    """A mesh of all ranks, or pipeline stages alone."""
    sizes = [n for n in (2, 3, 4, 8, 16) if gpus % n == 0] or [1]
    inner, stages = draw.choice(sizes), draw.choice(sizes)
    rest = gpus // inner
    staged = f"pp={stages},fsdp={gpus // stages}"
    if rest % stages == 0:
        staged = draw.choice((staged, f"pp={stages},dp={rest // stages},tp={inner}"))
    flat = (f"dp={gpus}", f"fsdp={gpus}", f"dp={rest},tp={inner}", f"fsdp={rest},ep={inner}", f"tp={gpus}")
    mesh = draw.choice((f"pp={stages}", staged, *flat, f"dp={inner},fsdp={rest}", f"sp={inner},fsdp={rest}"))
    return ("--mesh", mesh)


def _also(draw: random.Random, gpus: int, batch: int) -> Words:
    return ("--also", draw.choice((str(max(1, gpus // 2)), f"{max(1, gpus - 8)},{max(1, gpus // 2)}")))


def _offload(draw: random.Random, gpus: int, batch: int) -> Words:
    what = ("activations", "parameters", "optimizer")
    return ("--offload", ",".join(draw.sample(what, draw.choice((1, 1, 2, 3)))))


def _schedule(draw: random.Random, gpus: int, batch: int) -> Words:
    more = draw.choice(((), (), ("--chunks", draw.choice(("1", "2", "4")))))
    return ("--schedule", draw.choice(schedules()), *more)


def _microbatches(draw: random.Random, gpus: int, batch: int) -> Words:
    return ("--microbatches", str(draw.choice((1, 2, 4, 8, 32, max(1, batch // gpus), batch))))


def _one_of(flag: str, *values: str) -> Callable[[random.Random, int, int], Words]:
    return lambda draw, gpus, batch: (flag, draw.choice(values))


_KINDS: Mapping[str, Callable[[random.Random, int, int], Words]] = MappingProxyType(
    {
        "also": _also,
        "lengths": _one_of("--lengths", "512:0.7,2048:0.3", "128:0.5,1000:0.5"),
        "memory": _one_of("--memory", "1GiB", "8GiB", "16GiB", "40GiB", "200GiB"),
        "mesh": _mesh,
        "microbatches": _microbatches,
        "offload": _offload,
        "optimizer": _one_of("--optimizer", "adamw-fp32"),
        "precision": _one_of("--precision", "bf16", "bf16", "fp16"),
        "recompute": lambda draw, gpus, batch: ("--no-recompute",),
        "schedule": _schedule,
    }
)
