"""How close the kernels of a device come to its rates, measured: elementwise ones, attention, short sums."""

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
#: (tokens, channels) of an activation in 16 bits on a GPU
_ACTIVATION = (8192, 8192)
#: (sequences, heads, positions, channels) of the attention that is timed
_ATTENTION, _GPU_ATTENTION = (4, 8, 96, 32), (1, 32, 4096, 128)
#: bytes of results that are kept, more than the allocator of a process holds back, and of half their inputs
_KEPT, _INPUTS = 2**26, 2**22
#: of attention that has next to nothing to do
_NOTHING = (1, 1, 8, 8)
#: rows and columns of two products whose sums differ in length, and these lengths
_SIDE, _DEPTHS = 8192, (1024, 8192)
#: seconds of a call
Seconds = Callable[[Callable[[], object]], float]


def measure_kernels(clock: CallTimer, peak: float, bandwidth: float, launch: float) -> tuple[Kernels, str]:
    """The kernels of a CPU in float32, and where their figures come from.

    launch: seconds of any op. peak: FLOP/s that stand for 1 in `Kernels.attention`; bandwidth: bytes/s that
    stand for 1 in `Kernels.traffic`. A CPU has no tiles that fill it in waves.
    """
    fast, slow = (_elementwise(clock.seconds, _SIZES[size]) for size in ("small", "large"))
    traffic = min(1.0, slow / bandwidth)
    cpu, f32 = clock.device, torch.float32
    start = sum(_attention(clock.after_work, _NOTHING, cpu, f32)) / 2
    flop = _flop(_ATTENTION)
    idle = _attention(clock.seconds, _NOTHING, cpu, f32)
    taken = _attention(clock.seconds, _ATTENTION, cpu, f32)
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


def measure_gpu_kernels(
    clock: CallTimer, dtype: torch.dtype, peak: float, bandwidth: float, launch: float, dispatch: float
) -> tuple[Kernels, str]:
    """The kernels of a GPU, and where their figures come from.

    dtype: of products and attention, of which ``peak`` FLOP/s stand for 1 in `Kernels.attention`. bandwidth:
    bytes/s that stand for 1 in `Kernels.traffic`. launch: seconds of any op on the device; dispatch: of the
    host. Caches are not told apart: an activation of a model is larger.
    """
    flop = _flop(_GPU_ATTENTION)
    forward, backward = (t - launch for t in _attention(clock.queued, _GPU_ATTENTION, clock.device, dtype))

    def product(depth: int) -> float:
        left, right = (
            torch.randn(shape, device=clock.device).to(dtype) for shape in ((_SIDE, depth), (depth, _SIDE))
        )
        return clock.queued(lambda: torch.mm(left, right)) - launch

    short, long = map(product, _DEPTHS)
    each = (long - short) / (_DEPTHS[1] - _DEPTHS[0])
    slow = _activations(lambda call: clock.queued(call) - 7 * launch, clock.device)
    kernels = Kernels(
        multiprocessors=torch.cuda.get_device_properties(clock.device).multi_processor_count,
        depth=max(0.0, short / each - _DEPTHS[0]) if each > 0 else 0.0,
        attention=min(1.0, flop / forward / peak),
        attention_backward=min(1.0, 2.5 * flop / backward / peak),
        traffic=min(1.0, slow / bandwidth),
        dispatch=dispatch,
    )
    lengths, shape = " and ".join(map(str, _DEPTHS)), "x".join(map(str, _GPU_ATTENTION))
    return kernels, (
        f"measured: seven elementwise ops and reductions on {_ACTIVATION[0]} x {_ACTIVATION[1]}; causal "
        f"attention of {shape}; products of {_SIDE} x {_SIDE} with sums of {lengths}; issue of an op by the "
        "host; multiprocessors as reported by the driver"
    )


def _border() -> int:
    """Bytes that an op moves, in the middle (by ratio) of the sizes that were timed."""
    small, large = _SIZES.values()
    return round(2 * (small * large) ** 0.5)


def _elementwise(seconds: Seconds, nbytes: int) -> float:
    """Bytes/s that a mixture of the kernels of models reads and writes on a CPU.

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


def _activations(seconds: Seconds, device: torch.device) -> float:
    """Bytes/s that a mixture of the kernels around norms and activations reads and writes on a GPU."""
    x, y = (torch.randn(_ACTIVATION, device=device).to(torch.bfloat16) for _ in range(2))
    wide = x.float()
    aten = torch.ops.aten

    def run() -> None:
        aten.mul.Tensor(x, y)
        aten.add.Tensor(x, y)
        aten.silu_backward.default(x, y)
        aten._to_copy.default(x, dtype=torch.float32)
        aten._to_copy.default(wide, dtype=torch.bfloat16)
        aten.sum.dim_IntList(wide, [1], True)
        x.view(-1, 64, 8, 1024).transpose(1, 2).contiguous()

    moved = 3.0 + 3.0 + 3.0 + 3.0 + 3.0 + 2.0 + 2.0
    return moved * x.nbytes / seconds(run)


def _attention(
    seconds: Seconds, shape: tuple[int, int, int, int], device: torch.device, dtype: torch.dtype
) -> tuple[float, float]:
    """Seconds of causal attention and of its gradient."""
    from autoshard import ops  # noqa: F401

    q, k, v = (torch.randn(shape, device=device).to(dtype) for _ in range(3))
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
