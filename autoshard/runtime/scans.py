"""Runs a body step after step (`ir.scans`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from autoshard.ir.scans import Scan, StepSlice, StepValue

#: types whose sums over steps are kept in single precision
_HALF = (torch.bfloat16, torch.float16)


def run_steps(
    scan: Scan, body: Callable[[list[Any], int], Sequence[torch.Tensor]]
) -> Callable[..., Sequence[torch.Tensor]]:
    """What runs a ``scan`` node, given its inputs. body: runs one step."""

    def run(inputs: Sequence[torch.Tensor], *_: Any) -> Sequence[torch.Tensor]:
        now = list(inputs)
        carried = [k for k, how in enumerate(scan.given) if how == "carry"]
        result: list[torch.Tensor] = []
        dtypes: list[torch.dtype] = []
        for step in range(scan.steps):
            given = [
                x.select(how.dim, how.at(step)) if isinstance(how, StepSlice) else x
                for x, how in zip(now, scan.given, strict=True)
            ]
            new = body(given, 0)
            if not result:
                dtypes = [x.dtype for x in new]
                result = [_begun(x, how) for x, how in zip(new, scan.results, strict=True)]
            last = []
            for out, x, how in zip(result, new, scan.results, strict=True):
                if isinstance(how, StepSlice):
                    out.select(how.dim, how.at(step)).copy_(x)
                elif how == "sum":
                    out.add_(x)
                else:
                    last.append(x)
            for at, x in zip(carried, last, strict=True):
                now[at] = x
            del new
        ends = iter([now[k] for k in carried])
        pairs = zip(result, dtypes, scan.results, strict=True)
        return [next(ends) if how == "carry" else x.to(dtype) for x, dtype, how in pairs]

    return run


def _begun(x: torch.Tensor, how: StepValue) -> torch.Tensor:
    """A result before the first step. x: what that gives."""
    if isinstance(how, StepSlice):
        return x.new_empty((*x.shape[: how.dim], how.size, *x.shape[how.dim :]))
    if how == "sum":
        return torch.zeros_like(x, dtype=torch.float32 if x.dtype in _HALF else x.dtype)
    return x
