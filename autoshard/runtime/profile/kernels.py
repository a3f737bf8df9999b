"""How close the kernels of a CPU come to its rates, measured: elementwise ones by size, and attention."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from autoshard.cluster.kernels import Kernels

if TYPE_CHECKING:
    from autoshard.runtime.profile.device import CallTimer

#: bytes of the tensors that elementwise kernels are timed on: activations in caches, and beyond any
_SIZES = MappingProxyType({"small": 2**18, "large": 2**24})
#: (sequences, heads, positions, channels) of the attention that is timed
_ATTENTION = (4, 8, 96, 32)
#: bytes of results that are kept, more than the allocator of a process holds back, and of half their inputs
_KEPT, _INPUTS = 2**26, 2**22
#: of attention that has next to nothing to do
_NOTHING = (1, 1, 8, 8)
#: seconds of a call
Seconds = Callable[[Callable[[], object]], float]


def measure_kernels(clock: CallTimer, peak: float, bandwidth: float, launch: float) -> tuple[Kernels, str]:
    """The kernels of a CPU in float32, and where their figures come from.

    launch: seconds of any op. peak: FLOP/s that stand for 1 in `Kernels.attention`; bandwidth: bytes/s that
    stand for 1 in `Kernels.traffic`. A CPU has no tiles that fill it in waves.
    """
    fast, slow = (_elementwise(clock.seconds, _SIZES[size]) for size in ("small", "large"))
    traffic = min(1.0, slow / bandwidth)
    start = sum(_attention(clock.after_work, _NOTHING)) / 2
    flop = _flop(_ATTENTION)
    idle = _attention(clock.seconds, _NOTHING)
    taken = _attention(clock.seconds, _ATTENTION)
    # what next to nothing takes is not for its FLOP
    forward, backward = (max(t - i, t / 2) for t, i in zip(taken, idle, strict=True))
    kernels = Kernels(
        tile=(1, 1),
        attention=min(1.0, flop / forward / peak),
        attention_backward=min(1.0, 2.5 * flop / backward / peak),
        attention_start=max(0.0, start - launch),
        traffic=traffic,
        cache=float(_border()),
        cached=max(1.0, fast / (bandwidth * traffic)),
    )
    sizes = " and ".join(f"{size >> 10} KiB" for size in _SIZES.values())
    shape = "x".join(map(str, _ATTENTION))
    return kernels, (
        f"measured: six elementwise ops and reductions on {sizes}, the border assumed between them; "
        f"causal attention of {shape}"
    )


def _border() -> int:
    """Bytes that an op moves, in the middle (by ratio) of the sizes that were timed."""
    small, large = _SIZES.values()
    return round(2 * (small * large) ** 0.5)


def _elementwise(seconds: Seconds, nbytes: int) -> float:
    """Bytes/s that a mixture of the kernels of models reads and writes.

    One result of six stays until the end, about as much of what forward and backward of a layer make as is
    kept from the one to the other: these lie in memory that the system gives anew.
    """
    pairs = max(1, _INPUTS // nbytes)
    inputs = [(torch.randn(nbytes // 1024, 256), torch.randn(nbytes // 1024, 256)) for _ in range(pairs)]
    weight = torch.ones(256)
    aten = torch.ops.aten
    times = max(1, _KEPT // nbytes)

    def run() -> None:
        kept: list[torch.Tensor] = []
        for k in range(times):
            x, y = inputs[k % pairs]
            kept.append(aten.mul.Tensor(x, y))
            aten.silu.default(x)
            aten.gelu_backward.default(y, x)
            aten.native_layer_norm.default(x, [256], weight, weight, 1e-5)
            aten._softmax.default(x, -1, False)
            x.view(-1, 8, 8, 32).transpose(1, 2).contiguous()

    moved = 3.0 + 2.0 + 3.0 + 2.0 + 2.0 + 2.0
    return moved * nbytes * times / seconds(run)


def _attention(seconds: Seconds, shape: tuple[int, int, int, int]) -> tuple[float, float]:
    """Seconds of causal attention and of its gradient."""
    from autoshard import ops  # noqa: F401

    q, k, v = (torch.randn(shape) for _ in range(3))
    scale = shape[3] ** -0.5
    forward = torch.ops.autoshard.sdpa.default
    backward = torch.ops.autoshard.sdpa_backward.default
    out, lse = forward(q, k, v, None, True, scale)
    once = seconds(lambda: forward(q, k, v, None, True, scale))
    return once, seconds(lambda: backward(out, q, k, v, out, lse, None, True, scale))


def _flop(shape: tuple[int, int, int, int]) -> float:
    """Of causal attention, half of the square counted; its gradient has 2.5 times as many."""
    sequences, heads, positions, channels = shape
    return 4.0 * sequences * heads * positions**2 * channels / 2
