"""Each kernel checked on fresh random inputs, then timed on large ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

import autoshard.ops  # noqa: F401 (defines the ops)
from autoshard.kernels.registry import Cost, KernelSpec, operand, specs
from benchmarks.kernels_measure import Stopwatch
from benchmarks.kernels_peers import liger

#: part of the bandwidth of a copy that a kernel should reach
GOALS: Mapping[str, float] = MappingProxyType(
    {
        "add_rms_norm": 0.92,
        "layer_norm": 0.92,
        "add_layer_norm": 0.92,
        "rms_norm": 0.92,
        "rms_norm_backward": 0.80,
        "layer_norm_backward": 0.80,
        "rms_norm_quantise": 0.85,
        "add_rms_norm_quantise": 0.85,
        "layer_norm_quantise": 0.85,
        "add_layer_norm_quantise": 0.85,
        "quantise_rows": 0.88,
        "dequantise_rows": 0.88,
        "dequantise_copy_out": 0.88,
        "dequantise_reduce": 0.85,
        "xent_stats": 0.90,
        "xent_part_backward": 0.90,
        "bucket_pack": 0.88,
        "bucket_unpack": 0.88,
        "adamw_shard": 0.88,
    }
)
_CHECKED = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Row:
    """One kernel at one size.

    seconds: on the device, None where not measured; issue: of the host, per call. others: seconds by name, or
    why not.
    """

    name: str
    sizes: str
    cost: Cost
    seconds: float | None = None
    issue: float | None = None
    others: tuple[tuple[str, float | str], ...] = ()
    failure: str = ""


def check(spec: KernelSpec, seed: int, device: torch.device) -> float:
    """Worst error of the launch against the reference in fp64, over what is allowed, for all element types.

    Raises AssertionError where results differ in type or shape, or a NaN stands in another place.
    """
    g = torch.Generator(device).manual_seed(seed)
    worst = 0.0
    for dtype in _CHECKED:
        for args in spec.samples(g, dtype, device):
            found = _results(spec, _op(spec), args)
            same = _results(spec, spec.reference, args)
            true = _results(spec, spec.reference, _wide(args))
            for out, plain, exact in zip(found, same, true, strict=True):
                assert (out.shape, out.dtype) == (plain.shape, plain.dtype), "another shape or type"
                worst = max(worst, _error(spec, out, plain, exact))
    return worst


def rows(watch: Stopwatch | None, names: Sequence[str], *, compiled: bool) -> Iterator[Row]:
    """All kernels, or those named, in bf16 at their large sizes; without a stopwatch nothing is measured."""
    device = watch.device if watch is not None else torch.device("meta")
    g = torch.Generator(device).manual_seed(11) if watch is not None else None
    for spec in specs().values():
        if names and spec.name not in names:
            continue
        for args in spec.large(g, torch.bfloat16, device):
            yield _row(spec, args, watch, compiled)


def cells_of(row: Row, bandwidth: float | None, peers: Sequence[str]) -> list[str]:
    """Kernel, largest tensor, MB, us, us of the host, part of a copy, goal, and times of peers over ours.

    bandwidth: of a copy, bytes/s.
    """
    missing, others = "not measured", dict(row.others)
    return [
        row.name,
        row.sizes,
        f"{row.cost.moved / 1e6:.0f}",
        row.failure or (f"{row.seconds * 1e6:.0f}" if row.seconds else missing),
        f"{row.issue * 1e6:.0f}" if row.issue else missing,
        f"{row.cost.moved / row.seconds / bandwidth:.0%}" if row.seconds and bandwidth else missing,
        f"{GOALS[row.name]:.0%}" if row.name in GOALS else "-",
        *(_ratio(others.get(name), row.seconds) for name in peers),
    ]


def _ratio(other: float | str | None, ours: float | None) -> str:
    if other is None:
        return "not measured"
    return f"{other / ours:.2f} x" if isinstance(other, float) and ours else str(other)


def _row(spec: KernelSpec, args: tuple[Any, ...], watch: Stopwatch | None, compiled: bool) -> Row:
    ins = [operand(t) for t in _tensors(args)]
    op = _op(spec)
    outs = [operand(t) for t in _tensors([op(*args)])]
    row = Row(spec.name, _sizes(args), spec.cost(ins, outs))
    if watch is None:
        return row
    try:
        found = watch.seconds(lambda: op(*args))
        issue = watch.issue_seconds(lambda: op(*args))
    except RuntimeError as error:
        return Row(row.name, row.sizes, row.cost, failure=_first_line(error))
    peers: list[tuple[str, Callable[[], Callable[[], object] | None]]] = [
        ("eager", lambda: partial(spec.reference, *args)),
        (
            "compile",
            lambda: partial(torch.compile(spec.reference, dynamic=False), *args) if compiled else None,
        ),
        ("liger", lambda: liger(spec.name, args)),
    ]
    others = [(name, _timed(watch, make)) for name, make in peers]
    return Row(row.name, row.sizes, row.cost, found, issue, tuple(others))


def _timed(watch: Stopwatch, make: Callable[[], Callable[[], object] | None]) -> float | str:
    """Seconds, or what went wrong: a peer that cannot do it must not end the run."""
    try:
        call = make()
        return "-" if call is None else watch.seconds(call)
    except Exception as error:
        return f"failed: {_first_line(error)}"


def _op(spec: KernelSpec) -> Callable[..., Any]:
    found: Callable[..., Any] = getattr(torch.ops.autoshard, spec.name).default
    return found


def _clone(arg: Any) -> Any:
    if isinstance(arg, torch.Tensor):
        return arg.clone()
    return [_clone(a) for a in arg] if isinstance(arg, list) else arg


def _results(spec: KernelSpec, call: Callable[..., Any], args: Sequence[Any]) -> list[torch.Tensor]:
    """What an op gives, or the arguments that it changes."""
    args = [_clone(a) for a in args]
    out = call(*args)
    return _tensors(args[: spec.mutated]) if spec.mutated else _tensors([out])


def _tensors(args: Sequence[Any]) -> list[torch.Tensor]:
    found = []
    for arg in args:
        if isinstance(arg, torch.Tensor):
            found.append(arg)
        elif isinstance(arg, list | tuple):
            found += _tensors(arg)
    return found


def _wide(arg: Any) -> Any:
    """Arguments with all floats, also types that are asked for, in fp64."""
    if isinstance(arg, torch.Tensor):
        return arg.double() if arg.is_floating_point() else arg
    if isinstance(arg, torch.dtype):
        return torch.float64 if arg.is_floating_point else arg
    return type(arg)(_wide(a) for a in arg) if isinstance(arg, list | tuple) else arg


def _error(spec: KernelSpec, out: torch.Tensor, plain: torch.Tensor, exact: torch.Tensor) -> float:
    """Of one output; codes of a wire against those of the reference in the same type."""
    if not out.is_floating_point():
        apart = (out.view(torch.int8).int() - plain.view(torch.int8).int()).abs()
        # a product is contracted on a GPU: a value half way between two codes may fall to either side
        assert float((apart > 1).float().mean()) < 0.02, "codes differ"
        return 0.0
    assert torch.equal(out.isnan(), exact.isnan()), "NaN in other places"
    fine = torch.isfinite(exact)
    if not bool(fine.any()):
        return 0.0
    scale = float(exact[fine].abs().max()) or 1.0
    return float((out[fine].double() - exact[fine]).abs().max()) / scale / spec.tolerance[out.dtype]


def _sizes(args: Sequence[Any]) -> str:
    """The largest tensor, and numbers that say what is done with it."""
    largest = max(_tensors(args), key=lambda t: t.numel())
    numbers = [str(a) for a in args if isinstance(a, int) and not isinstance(a, bool) and 1 < a < 10_000]
    return " x ".join(map(str, largest.shape)) + (f" ({', '.join(numbers[:2])})" if numbers else "")


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)[:60]
