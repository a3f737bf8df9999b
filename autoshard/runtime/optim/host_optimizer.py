"""A torch optimizer whose state is in host memory, for parameters and gradients on the device.

Ren et al., ZeRO-Offload (ATC 2021), section 4: gradients are copied down, the step runs on the processor, and
parameters are copied up; each rank does so for its own shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from autoshard.errors import UsageError
from autoshard.runtime.fingerprint import fingerprint
from autoshard.runtime.host import in_host_memory, pinned_like
from autoshard.runtime.optim.optimizer_hooks import local, loss_of, options_in
from autoshard.torch_adapters.dtensor import dtensor_like

#: bytes of parameters that are copied and updated together
BUCKET = 64 * 2**20
_HALF = (torch.bfloat16, torch.float16)


@dataclass
class _Pair:
    """A parameter, its copy in host memory, and where its gradient comes to."""

    own: torch.Tensor
    host: torch.Tensor
    grad: torch.Tensor


class HostOptimizer(torch.optim.Optimizer):
    """Steps a torch optimizer on copies of the parameters in host memory.

    parameters: as for a torch optimizer, or groups of them. make: the optimizer, given what it is to update,
    as ``lambda params: torch.optim.AdamW(params, lr=1e-3)``. It must treat every parameter by itself, as
    Adam, SGD and their kind do: a step calls it once per bucket, with the gradients of that bucket alone.
    master: whether copies of parameters of half precision are kept, and updated, in float32.
    bucket: bytes; gradients of the next bucket come down, and parameters of the last one go up, while one is
    updated. Parameters that live in host memory already are updated where they are.

    Its groups have the parameters themselves, with the numbers that the optimizer made has, so that
    schedulers and clipping work on this one. Its state is that optimizer's, with float32 copies as
    ``master``.
    """

    inner: torch.optim.Optimizer | None = None
    pairs: tuple[_Pair, ...] = ()

    def __init__(
        self,
        parameters: Iterable[Any],
        make: Callable[[list[Any]], torch.optim.Optimizer],
        *,
        master: bool = False,
        bucket: int = BUCKET,
    ) -> None:
        given = list(parameters)
        if not given:
            raise UsageError("there are no parameters to optimize", hint="give model.parameters()")
        self._master, self._limit = master, bucket
        super().__init__(given, {})
        self.inner = make([self._hosted(group) for group in self.param_groups])
        self.defaults = self.inner.defaults
        self._take_numbers()
        self._buckets = _buckets(self.pairs, bucket)
        device = local(self.pairs[0].own).device
        self._copies: _Copies = _CudaCopies(device) if device.type == "cuda" else _Copies()
        #: fingerprints of the parameters when they were equal to their copies last
        self._marks = self._fingerprints()

    def _hosted(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """A group of the copies of its parameters, which are made."""
        with torch.no_grad():
            pairs = [_pair(p, self._master) for p in group["params"]]
        self.pairs += tuple(pairs)
        return {**group, "params": [pair.host for pair in pairs]}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        if self.inner is not None:
            self.inner.add_param_group(self._hosted(self.param_groups[-1]))
            self._take_numbers()
            self._buckets, self._marks = _buckets(self.pairs, self._limit), self._fingerprints()

    @property
    def state(self) -> Any:
        """That of the optimizer made, by the parameters themselves."""
        known = {} if self.inner is None else self.inner.state
        return {pair.own: known[pair.host] for pair in self.pairs if known.get(pair.host)}

    @state.setter
    def state(self, value: Any) -> None:
        """torch's constructor gives an optimizer a state, which this one has none of."""

    def _take_numbers(self) -> None:
        """Rates and the like, from the optimizer made."""
        for own, inner in self._groups():
            own.update(options_in(inner))

    def _groups(self) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        assert self.inner is not None
        return zip(self.param_groups, self.inner.param_groups, strict=True)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of the optimizer; returns what the closure does. Parameters without a gradient stay."""
        loss = loss_of(closure)
        assert self.inner is not None
        for own, inner in self._groups():
            inner.update(options_in(own))
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
            arriving = following
        for pair in home:
            pair.own.grad, pair.grad = pair.grad, pair.own
        self._copies.end()
        for pair in (p for bucket in buckets for p in bucket if p.host.dtype != p.own.dtype):
            self.inner.state[pair.host]["master"] = pair.host.detach()
        self._marks = self._fingerprints()
        return loss

    def _fingerprints(self) -> torch.Tensor:
        """Of the parameters that have a copy. [pairs]"""
        device = local(self.pairs[0].own).device
        zero = torch.zeros((), dtype=torch.int64, device=device)
        each = (zero if _is_home(p) else fingerprint(local(p.own)).to(device) for p in self.pairs)
        return torch.stack(list(each))

    def _refresh(self) -> None:
        """Take over elements of parameters that others have changed since the last step, as by loading."""
        marks = self._fingerprints()
        for pair, changed in zip(self.pairs, (marks != self._marks).tolist(), strict=True):
            if changed:
                host = local(pair.host)
                own = local(pair.own).to(host.device)
                host.copy_(torch.where(host.to(own.dtype) == own, host, own.to(host.dtype)))
        self._marks = marks

    def zero_grad(self, set_to_none: bool = True) -> None:
        for pair in self.pairs:
            if set_to_none:
                pair.own.grad = None
            elif pair.own.grad is not None:
                pair.own.grad.detach().zero_()

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Before or after the parameters of the model are loaded."""
        assert self.inner is not None
        self.inner.load_state_dict(state_dict)
        self._take_numbers()
        for pair in self.pairs:
            if (given := self.inner.state.get(pair.host, {}).get("master")) is not None:
                local(pair.host).copy_(local(given))
                self.inner.state[pair.host]["master"] = pair.host.detach()
        self._marks.fill_(-1)  # elements of parameters that are not those of the copies count


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
        return _Pair(parameter, parameter, parameter)
    # a plain copy where the device has no host memory apart
    host = in_host_memory(own.float() if wide else own, own.device)
    grad = pinned_like(host) if own.device.type == "cuda" else torch.empty_like(host)
    if isinstance(parameter, DTensor):
        host, grad = dtensor_like(parameter, host), dtensor_like(parameter, grad)
    return _Pair(parameter, host.requires_grad_(parameter.requires_grad), grad)


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
