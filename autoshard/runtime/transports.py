"""Which transport the messages of a process group take."""

from __future__ import annotations

import os

import torch

from autoshard.errors import UsageError
from autoshard.runtime.meeting import meet
from autoshard.runtime.network import Network
from autoshard.runtime.shared_memory import SharedMemory
from autoshard.runtime.transport import Transport
from autoshard.torch_adapters.groups import group_named

#: ``0``: never through shared memory
VARIABLE = "AUTOSHARD_SHARED_MEMORY"


def transport_of(name: str, device: torch.device) -> Transport:
    """For the group of a name: shared memory if its ranks are CPU processes that can read each other's, the
    network otherwise. Collective: all ranks of the group, in the same order of groups."""
    network = Network(name)
    if device.type != "cpu" or network.ways == 1:
        return network
    near = meet(group_named(name), willing=_willing())
    return network if near is None else SharedMemory(near, name)


def _willing() -> bool:
    text = os.environ.get(VARIABLE, "1").strip()
    if text not in ("0", "1"):
        raise UsageError(f"{VARIABLE} is {text!r}", hint="0 for messages over the network alone, 1 otherwise")
    return text == "1"
