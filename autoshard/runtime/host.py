"""Values in host memory: the adapter between programs and what torch offers for it.

On CUDA, host memory is pinned, so that copies run on streams of their own beside computing: one stream
down, one up, ordered by events. torch's allocator of pinned memory rounds every tensor up to a power of two,
so that a process takes up to twice the bytes of its values. Elsewhere host memory is a second copy in the
memory there is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from autoshard.errors import UsageError
from autoshard.ir import Node
from autoshard.ir.offload import LOAD, STORE
from autoshard.runtime.pending import Issue, PendingCollective


class HostValue:
    """A value in host memory; nothing computes with it before it is loaded.

    bytes: that it takes there.
    """

    __slots__ = ("_arrived", "_tensor")

    def __init__(self, tensor: torch.Tensor, arrived: torch.cuda.Event | None = None) -> None:
        self._tensor, self._arrived = tensor, arrived

    @property
    def bytes(self) -> int:
        return self._tensor.nbytes

    def issued(self, stream: torch.cuda.Stream) -> torch.Tensor:
        """Its memory, for what is put on a stream from now on."""
        if self._arrived is not None:
            stream.wait_event(self._arrived)
        return self._tensor

    def landed(self) -> torch.Tensor:
        """Its memory once everything is there."""
        if self._arrived is not None:
            self._arrived.synchronize()
            self._arrived = None
        return self._tensor


def landed(value: Any) -> Any:
    """What is in host memory as a tensor there, everything else as it is."""
    return value.landed() if type(value) is HostValue else value


class PlainHost:
    """Host memory of a device that has none apart: copies, made at once."""

    def of(self, node: Node) -> Callable[..., Any]:
        """What runs a ``host.store`` or ``host.load``."""
        return {STORE: self.store, LOAD: self.load}[node.op]

    def store(self, xs: Sequence[torch.Tensor]) -> list[HostValue]:
        return [HostValue(x.clone()) for x in xs]

    def load(self, xs: Sequence[Any]) -> list[torch.Tensor]:
        """Of stored values, or of tensors that lie in host memory from the start."""
        return [landed(x).clone() for x in xs]

    def settle(self) -> None:
        """At the end of a part: nothing is on its way."""


class CudaHost:
    """Pinned host memory of a CUDA device. Makes its two streams; use it on one thread."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.down, self.up = torch.cuda.Stream(device), torch.cuda.Stream(device)
        #: the last stores, with what they read, which must not be used again before they are done
        self._leaving: list[tuple[torch.cuda.Event, Sequence[torch.Tensor]]] = []
        self._reading: torch.cuda.Event | None = None

    def of(self, node: Node) -> Callable[..., Any]:
        """What runs a ``host.store`` or ``host.load``; loads are waited for where they are needed."""
        if node.op == STORE:
            return self.store
        return Issue(self.load, len(node.outs), f"host.load that makes {node.name}")

    def store(self, xs: Sequence[torch.Tensor]) -> list[HostValue]:
        """One store is on its way at a time: the next one, and what is computed behind it, waits for it."""
        now = torch.cuda.current_stream(self.device)
        self._release()
        self.down.wait_stream(now)
        arrived = torch.cuda.Event()
        with torch.cuda.stream(self.down):
            new = [pinned_like(x).copy_(x, non_blocking=True) for x in xs]
            arrived.record(self.down)
        self._leaving.append((arrived, xs))
        return [HostValue(x, arrived) for x in new]

    def load(self, xs: Sequence[Any]) -> PendingCollective:
        """Copies on their way to the device."""
        now = torch.cuda.current_stream(self.device)
        sources = [x.issued(self.up) if type(x) is HostValue else x for x in xs]
        new = [torch.empty_like(x, device=self.device, pin_memory=False) for x in sources]
        self.up.wait_stream(now)  # the memory may still be read by what is computed before
        arrived = torch.cuda.Event()
        with torch.cuda.stream(self.up):
            for to, source in zip(new, sources, strict=True):
                to.copy_(source, non_blocking=True)
            arrived.record(self.up)
        if any(type(x) is not HostValue for x in xs):
            self._reading = arrived

        def landing() -> torch.Tensor:
            # the stream that needs them waits, not the host
            torch.cuda.current_stream(self.device).wait_event(arrived)
            return new[0]

        # what is read stays in pinned memory, whose allocator waits for the copy by itself
        return PendingCollective(landing, lambda _: new, sources)

    def _release(self) -> None:
        """Let go of what was stored: what is computed from now on, and may get its memory, waits."""
        for before, _ in self._leaving:
            torch.cuda.current_stream(self.device).wait_event(before)
        self._leaving.clear()

    def settle(self) -> None:
        """At the end of a part: nothing that is not needed is kept, and memory that was there from the start
        is not read any more, so that it may be changed."""
        self._release()
        if self._reading is not None:
            self._reading.synchronize()
            self._reading = None


def host_for(device: torch.device) -> PlainHost | CudaHost:
    """The host memory of a device."""
    return CudaHost(device) if device.type == "cuda" else PlainHost()


def pinned_like(x: torch.Tensor) -> torch.Tensor:
    """Uninitialised pinned memory for a tensor. Raises UsageError where the system refuses it."""
    try:
        return torch.empty_like(x, device="cpu", pin_memory=True)
    except RuntimeError as error:
        raise UsageError(
            f"{x.nbytes} bytes of pinned host memory are refused",
            why=str(error).splitlines()[0],
            hint="raise the limit of locked memory (ulimit -l), or offload less",
        ) from error


def in_host_memory(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy of a tensor in the host memory of a device."""
    if device.type != "cuda":
        return x.detach().cpu().clone()
    return pinned_like(x).copy_(x.detach())
