"""A torch optimizer whose state is in host memory, for parameters and gradients on the device.

Ren et al., ZeRO-Offload (ATC 2021), section 4: gradients are copied down, the step runs on the processor, and
parameters are copied up; each rank does so for its own shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from autoshard.errors import UsageError
from autoshard.runtime.host import in_host_memory, pinned_like
from autoshard.runtime.optim.dropout_clock import share_clock
from autoshard.runtime.optim.optimizer_hooks import local, loss_of
from autoshard.torch_adapters.dtensor import dtensor_like

#: bytes of parameters that are copied and updated together
BUCKET = 64 * 2**20
_HALF = (torch.bfloat16, torch.float16)


@dataclass
class _Pair:
    """A parameter, its copy in host memory, and where its gradient comes to. version: of the parameter when
    both were equal last."""

    own: torch.Tensor
    host: torch.Tensor
    grad: torch.Tensor
    version: int


class HostOptimizer(torch.optim.Optimizer):
    """Steps a torch optimizer on copies of the parameters in host memory.

    parameters: as for a torch optimizer, or groups of them. make: the optimizer, given what it is to update,
    as ``lambda params: torch.optim.AdamW(params, lr=1e-3)``. It must treat every parameter by itself, as
    Adam, SGD and their kind do: a step calls it once per bucket, with the gradients of that bucket alone.
    master: whether copies of parameters of half precision are kept, and updated, in float32.
    bucket: bytes; gradients of the next bucket come down, and parameters of the last one go up, while one is
    updated. Parameters that live in host memory already are updated where they are.

    Param groups and state are those of the optimizer made, so that schedulers work on this one.
    """

    def __init__(
        self,
        parameters: Iterable[Any],
        make: Callable[[list[Any]], torch.optim.Optimizer],
        *,
        master: bool = False,
        bucket: int = BUCKET,
    ) -> None:
        given = list(parameters)
        groups = given if given and isinstance(given[0], Mapping) else [{"params": given}]
        pairs: list[_Pair] = []
        new = []
        with torch.no_grad():
            for group in groups:
                own = [_pair(p, master) for p in group["params"]]
                pairs += own
                new.append({**group, "params": [pair.host for pair in own]})
        if not pairs:
            raise UsageError("there are no parameters to optimize", hint="give model.parameters()")
        super().__init__([pair.own for pair in pairs], {})
        self.inner = make(new)
        self.param_groups, self.defaults = self.inner.param_groups, self.inner.defaults
        self.state = self.inner.state
        self.pairs = tuple(pairs)
        self._buckets = _buckets(pairs, bucket)
        device = local(pairs[0].own).device
        self._copies: _Copies = _CudaCopies(device) if device.type == "cuda" else _Copies()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of the optimizer; returns what the closure does. Parameters without a gradient stay."""
        loss = loss_of(closure)
        self._copies.settle()
        self._refresh()
        buckets = [[p for p in bucket if p.own.grad is not None] for bucket in self._buckets]
        buckets = [bucket for bucket in buckets if bucket]
        home = [pair for bucket in buckets for pair in bucket if _is_home(pair)]
        for pair in home:  # until its bucket has its turn
            assert pair.own.grad is not None
            pair.grad, pair.own.grad = pair.own.grad, None
        arriving = self._copies.down(buckets[0]) if buckets else None
        for k, bucket in enumerate(buckets):
            following = self._copies.down(buckets[k + 1]) if k + 1 < len(buckets) else None
            self._copies.wait(arriving)
            for pair in bucket:
                pair.host.grad = pair.grad
            self.inner.step()
            for pair in bucket:
                pair.host.grad = None
            self._copies.up(bucket)
            for pair in bucket:
                pair.version = local(pair.own)._version
            arriving = following
        for pair in home:
            pair.own.grad, pair.grad = pair.grad, pair.own
        self._copies.end()
        return loss

    def _refresh(self) -> None:
        """Take over parameters that were changed by others since the last step, as by loading weights."""
        for pair in self.pairs:
            own = local(pair.own)
            if own._version != pair.version:
                local(pair.host).copy_(own)
                pair.version = own._version

    def zero_grad(self, set_to_none: bool = True) -> None:
        for pair in self.pairs:
            if set_to_none:
                pair.own.grad = None
            elif pair.own.grad is not None:
                pair.own.grad.detach().zero_()

    def state_dict(self) -> dict[str, Any]:
        """That of the optimizer made, with the float32 copies of parameters of half precision."""
        result: dict[str, Any] = self.inner.state_dict()
        masters = {k: p.host.detach() for k, p in enumerate(self.pairs) if p.host.dtype != p.own.dtype}
        return {**result, "masters": masters} if masters else result

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """After the parameters of the model were loaded."""
        given = dict(state_dict)
        masters = given.pop("masters", {})
        self.inner.load_state_dict(given)
        # loading puts new objects in their place
        self.param_groups, self.state = self.inner.param_groups, self.inner.state
        self._refresh()
        for k, x in masters.items():
            local(self.pairs[k].host).copy_(local(x))


class _Copies:
    """Copies between two tensors in the same kind of memory: done when they are asked for."""

    def down(self, bucket: Sequence[_Pair]) -> Any:
        for pair in bucket:
            if not _is_home(pair):
                assert pair.own.grad is not None
                local(pair.grad).copy_(local(pair.own.grad))
        return None

    def up(self, bucket: Sequence[_Pair]) -> None:
        for pair in bucket:
            if not _is_home(pair):
                local(pair.own).copy_(local(pair.host))

    def wait(self, arriving: Any) -> None:
        """Until a bucket that was asked for is in host memory."""

    def settle(self) -> None:
        """Until host memory is not read any more by the copies of the step before."""

    def end(self) -> None:
        """What is computed from now on waits for the copies to the device."""


class _CudaCopies(_Copies):
    """On streams of their own, each direction in order."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.to_host, self.to_device = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._last: torch.cuda.Event | None = None

    def down(self, bucket: Sequence[_Pair]) -> torch.cuda.Event:
        self.to_host.wait_stream(torch.cuda.current_stream(self.device))
        arrived = torch.cuda.Event()
        with torch.cuda.stream(self.to_host):
            for pair in bucket:
                if not _is_home(pair):
                    assert pair.own.grad is not None
                    local(pair.grad).copy_(local(pair.own.grad), non_blocking=True)
            arrived.record(self.to_host)
        return arrived

    def up(self, bucket: Sequence[_Pair]) -> None:
        self.to_device.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.to_device):
            for pair in bucket:
                if not _is_home(pair):
                    local(pair.own).copy_(local(pair.host), non_blocking=True)
            self._last = torch.cuda.Event()
            self._last.record(self.to_device)

    def wait(self, arriving: Any) -> None:
        arriving.synchronize()

    def settle(self) -> None:
        if self._last is not None:
            self._last.synchronize()

    def end(self) -> None:
        torch.cuda.current_stream(self.device).wait_stream(self.to_device)


def _is_home(pair: _Pair) -> bool:
    """Whether a parameter is updated where it is."""
    return pair.host is pair.own


def _pair(parameter: torch.Tensor, master: bool) -> _Pair:
    own = local(parameter)
    wide = master and own.dtype in _HALF
    if isinstance(parameter, DTensor) and own.device.type != parameter.device_mesh.device_type and not wide:
        return _Pair(parameter, parameter, parameter, own._version)
    # a plain copy where the device has no host memory apart
    host = in_host_memory(own.float() if wide else own, own.device)
    grad = pinned_like(host) if own.device.type == "cuda" else torch.empty_like(host)
    if isinstance(parameter, DTensor):
        host, grad = dtensor_like(parameter, host), dtensor_like(parameter, grad)
    leaf = host.requires_grad_(parameter.requires_grad)
    share_clock(parameter, leaf)
    return _Pair(parameter, leaf, grad, own._version)


def _buckets(pairs: Sequence[_Pair], limit: int) -> list[list[_Pair]]:
    result: list[list[_Pair]] = [[]]
    held = 0
    for pair in pairs:
        nbytes = local(pair.own).nbytes
        if result[-1] and held + nbytes > limit:
            result.append([])
            held = 0
        result[-1].append(pair)
        held += nbytes
    return result
