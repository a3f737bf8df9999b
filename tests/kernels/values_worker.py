"""All kernels in the interpreter of Triton against fp64; a process of its own, as it is chosen at import.

Prints one line per kernel and element type: name, type, samples, largest error as a part of the allowed one.
"""

from __future__ import annotations

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import torch

import autoshard.ops  # noqa: F401 (defines the ops)
from autoshard.kernels.launch import run_kernel
from autoshard.kernels.registry import KernelSpec, specs

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


def wide(args: tuple[object, ...]) -> list[object]:
    """Arguments with all floats, also types that are asked for, in fp64."""

    def one(a: object) -> object:
        if isinstance(a, torch.Tensor):
            return a.double() if a.is_floating_point() else a.clone()
        if isinstance(a, torch.dtype) and a.is_floating_point:
            return torch.float64
        return type(a)(map(one, a)) if isinstance(a, list | tuple) else a

    return [one(a) for a in args]


def tensors(out: object) -> list[torch.Tensor]:
    if isinstance(out, torch.Tensor):
        return [out]
    return [t for t in out if t is not None]  # type: ignore[attr-defined]


def error(out: torch.Tensor, true: torch.Tensor, dtype: torch.dtype, spec: KernelSpec) -> float:
    """Of one output: its largest error over what is allowed."""
    assert out.shape == true.shape, (out.shape, true.shape)
    if not out.is_floating_point():
        assert torch.equal(out, true.to(out.dtype))
        return 0.0
    assert torch.equal(out.isnan(), true.isnan()), "NaN in other places"
    fine = torch.isfinite(true)
    rest = ~fine & ~true.isnan()
    assert torch.equal(out[rest].double(), true[rest]), "other infinities"
    if not bool(fine.any()):
        return 0.0
    scale = float(true[fine].abs().max()) or 1.0
    return float((out[fine].double() - true[fine]).abs().max()) / scale / spec.tolerance[out.dtype]


def check(spec: KernelSpec, dtype: torch.dtype) -> tuple[int, float]:
    """(samples, worst error as a part of what is allowed) of a kernel."""
    g = torch.Generator().manual_seed(5)
    worst, count = 0.0, 0
    for args in spec.samples(g, dtype, torch.device("cpu")):
        before = wide(args)
        if spec.exact:
            plain = tensors(spec.reference(*args))
            outs = tensors(run_kernel(spec.prepare(), *args))
            for out, same in zip(outs, plain, strict=True):
                assert out.dtype == same.dtype
                assert torch.allclose(out, same, rtol=0, atol=0, equal_nan=True), "not the reference's values"
        else:
            outs = tensors(run_kernel(spec.prepare(), *args))
            types = [t.dtype for t in tensors(spec.reference(*args))]
            assert [o.dtype for o in outs] == types, (outs, types)
        if all(o.is_floating_point() for o in outs):
            true = tensors(spec.reference(*before))
            pairs = zip(outs, true, strict=True)
            worst = max([worst, *(error(o, t, dtype, spec) for o, t in pairs)])
        count += 1
    return count, worst


def main() -> None:
    wanted = sys.argv[1:]
    for spec in specs().values():
        if wanted and spec.name not in wanted:
            continue
        for name, dtype in DTYPES.items():
            try:
                count, worst = check(spec, dtype)
            except Exception as failure:
                raise AssertionError(f"{spec.name} {name}") from failure
            print(spec.name, name, count, f"{worst:.3f}", flush=True)


if __name__ == "__main__":
    main()
