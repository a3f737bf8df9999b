"""All kernels in the interpreter of Triton against fp64; a process of its own, as it is chosen at import.

Prints a JSON document per kernel and element type: how many samples, the largest error as a part of the
allowed one, and what failed. Arguments: kernels, as in ``layer_norm:bf16`` or by name; none for all.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial

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


def clone(arg: object) -> object:
    if isinstance(arg, torch.Tensor):
        return arg.clone()
    return [clone(a) for a in arg] if isinstance(arg, list) else arg


def results(spec: KernelSpec, run: Callable[..., object], args: Sequence[object]) -> list[torch.Tensor]:
    """What an op gives, or the arguments that it changes."""
    args = [clone(a) for a in args]
    out = run(*args)
    return tensors(list(args[: spec.mutated])) if spec.mutated else tensors(out)


def error(out: torch.Tensor, true: torch.Tensor, spec: KernelSpec) -> float:
    """Of one output: its largest error over what is allowed."""
    assert out.shape == true.shape, (out.shape, true.shape)
    assert torch.equal(out.isnan(), true.isnan()), "NaN in other places"
    fine = torch.isfinite(true)
    rest = ~fine & ~true.isnan()
    assert torch.equal(out[rest].double(), true[rest]), "other infinities"
    if not bool(fine.any()):
        return 0.0
    scale = float(true[fine].abs().max()) or 1.0
    return float((out[fine].double() - true[fine]).abs().max()) / scale / spec.tolerance[out.dtype]


def check_wire(out: torch.Tensor, same: torch.Tensor, allowed: int) -> None:
    """Codes may differ by so much, in few places; bytes of scales in their last bits."""
    apart = (out.view(torch.int8).int() - same.view(torch.int8).int()).abs()
    assert int(apart.max()) <= max(allowed, 2), int(apart.max())
    assert float((apart > 0).float().mean()) < 0.02, "too many codes differ"


def check(spec: KernelSpec, dtype: torch.dtype) -> tuple[int, float]:
    """(samples, worst error as a part of what is allowed) of a kernel."""
    g = torch.Generator().manual_seed(5)
    worst, count = 0.0, 0
    for args in spec.samples(g, dtype, torch.device("cpu")):
        count += 1
        outs = results(spec, partial(run_kernel, spec.prepare()), args)
        plain = results(spec, spec.reference, args)
        true = results(spec, spec.reference, wide(args))
        for out, same, exact in zip(outs, plain, true, strict=True):
            assert (out.dtype, out.shape) == (same.dtype, same.shape)
            if spec.exact:
                assert torch.allclose(out, same, rtol=0, atol=0, equal_nan=True), "not the reference's values"
            if out.is_floating_point():
                worst = max(worst, error(out, exact, spec))
            elif not spec.exact:
                check_wire(out, same, spec.codes)
    return count, worst


def main() -> None:
    wanted = set(sys.argv[1:])
    for spec in specs().values():
        for name, dtype in DTYPES.items():
            if wanted and not wanted & {spec.name, f"{spec.name}:{name}"}:
                continue
            found: dict[str, object] = {"kernel": spec.name, "dtype": name, "samples": 0, "worst": 0.0}
            try:
                found["samples"], found["worst"] = check(spec, dtype)
            except Exception:
                found["failure"] = traceback.format_exc()
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
