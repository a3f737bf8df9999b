"""How close the kernels of a CPU come to its rates, measured: elementwise ones by size, and attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MappingProxyType

import torch

from autoshard.cluster.kernels import Kernels

#: bytes of the tensors that elementwise kernels are timed on: activations in caches, and beyond any
_SIZES = MappingProxyType({"small": 2**18, "large": 2**24})
#: (sequences, heads, positions, channels) of the attention that is timed
_ATTENTION = (4, 8, 96, 32)
#: seconds of a call
Seconds = Callable[[Callable[[], object]], float]


def measure_kernels(seconds: Seconds, peak: float, bandwidth: float) -> tuple[Kernels, str]:
    """The kernels of a CPU in float32, and where their figures come from.

    seconds: times a call. peak: FLOP/s that stand for 1 in `Kernels.attention`; bandwidth: bytes/s that stand
    for 1 in `Kernels.traffic`. A CPU has no tiles that fill it in waves.
    """
    fast, slow = (_elementwise(seconds, _SIZES[size]) for size in ("small", "large"))
    traffic = min(1.0, slow / bandwidth)
    forward, backward = _attention(seconds)
    kernels = Kernels(
        tile=(1, 1),
        attention=min(1.0, forward / peak),
        attention_backward=min(1.0, backward / peak),
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
    """Bytes/s that a mixture of the kernels of models reads and writes, results in new memory."""
    x, y = torch.randn(nbytes // 1024, 256), torch.randn(nbytes // 1024, 256)
    weight = torch.ones(256)
    aten = torch.ops.aten
    calls: Sequence[tuple[float, Callable[[], object]]] = (
        (3.0, lambda: aten.mul.Tensor(x, y)),
        (2.0, lambda: aten.silu.default(x)),
        (3.0, lambda: aten.gelu_backward.default(y, x)),
        (2.0, lambda: aten.native_layer_norm.default(x, [256], weight, weight, 1e-5)),
        (2.0, lambda: aten._softmax.default(x, -1, False)),
        (2.0, lambda: x.view(-1, 8, 8, 32).transpose(1, 2).contiguous()),
    )
    return sum(moved for moved, _ in calls) * nbytes / sum(seconds(call) for _, call in calls)


def _attention(seconds: Seconds) -> tuple[float, float]:
    """FLOP/s of causal attention and of its gradient, half of the square counted."""
    from autoshard import ops  # noqa: F401

    q, k, v = (torch.randn(_ATTENTION) for _ in range(3))
    scale = _ATTENTION[3] ** -0.5
    forward = torch.ops.autoshard.sdpa.default
    backward = torch.ops.autoshard.sdpa_backward.default
    out, lse = forward(q, k, v, None, True, scale)
    sequences, heads, positions, channels = _ATTENTION
    flop = 4.0 * sequences * heads * positions**2 * channels / 2
    once = seconds(lambda: forward(q, k, v, None, True, scale))
    back = seconds(lambda: backward(out, q, k, v, out, lse, None, True, scale))
    return flop / once, 2.5 * flop / back
