"""Which transport the messages of a process group take."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from autoshard.errors import UsageError
from autoshard.runtime.transport.network import Network
from autoshard.runtime.transport.shared_memory.collectives import SharedMemory
from autoshard.runtime.transport.shared_memory.handshake import meet
from autoshard.runtime.transport.shared_memory.peers import Neighbours
from autoshard.runtime.transport.transport import Transport
from autoshard.torch_adapters.groups import cpu_backend, group_named

#: ``0``: never through shared memory
VARIABLE = "AUTOSHARD_SHARED_MEMORY"


def transport_of(name: str, device: torch.device) -> Transport:
    """For the group of a name: shared memory where that can be, the network otherwise. Collective: all ranks
    of the group, in the same order of groups."""
    near = neighbours_of(group_named(name), device)
    return Network(name) if near is None else SharedMemory(near, name)


def neighbours_of(group: dist.ProcessGroup, device: torch.device) -> Neighbours | None:
    """The ranks of a group if they are several CPU processes, with gloo, that can read each other's memory.
    Collective.

    Raises UsageError if the variable is neither 0 nor 1.
    """
    # other backends need not have processes: torch's fake one stands for ranks that do not exist
    if device.type != "cpu" or dist.get_world_size(group) == 1 or cpu_backend(group) != "gloo":
        return None
    text = os.environ.get(VARIABLE, "1").strip()
    if text not in ("0", "1"):
        raise UsageError(f"{VARIABLE} is {text!r}", hint="0 for messages over the network alone, 1 otherwise")
    return meet(group, willing=text == "1")
