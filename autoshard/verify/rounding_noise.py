"""How far rounding alone moves the gradients and outputs of a model in half precision.

Whether a ReLU passes a gradient on is up to the last bit of its input where that is near 0, and so is which
experts a token chooses where two have nearly the same score. A program that adds up in another order than
eager PyTorch then differs from it by more than any fixed limit allows. How far the model itself moves when
its parameters do by their last bit measures that: its conditioning (Higham, "Accuracy and Stability of
Numerical Algorithms", section 1.6).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from math import isfinite

import torch

from autoshard.verify.checks import Check, Tensors, Tolerance, checks_of

#: perturbed copies of the parameters, at most
_DRAWS = 8
#: by how many times what the model moves a program may differ, which rounds at every op
ALLOWED = 2.0
#: nothing passes that differs by more of its largest element, however the model moves
MOST = 0.5


def beside_rounding(
    checks: Sequence[Check],
    initial: Tensors,
    parameters: Collection[str],
    step: Callable[[Tensors], Mapping[str, Tensors]],
    tolerance: Tolerance,
) -> tuple[Check, ...]:
    """The checks; one that failed passes if the model itself moves by half as much.

    initial: parameters and buffers. parameters: names of those that are moved. step: of the reference, at
    some of both: kind of checks -> tensors.
    """
    failed = [c for c in checks if not c.ok]
    wanted = {k: {n: x.clone() for n, x in v.items()} for k, v in step(initial).items()} if failed else {}
    failed = [c for c in failed if c.kind in wanted]
    weights = {n: x for n, x in initial.items() if n in parameters}
    noise: dict[tuple[str, str], float] = {}
    for draw in range(_DRAWS):
        if all(_with_noise(c, noise).ok for c in failed):
            break
        for kind, tensors in step(initial | _perturbed(weights, draw)).items():
            for c in checks_of(kind, tensors, wanted[kind], tolerance):
                # a model that overflows says nothing of its rounding
                moved = c.error if isfinite(c.error) else 0.0
                noise[kind, c.name] = max(moved, noise.get((kind, c.name), 0.0))
    return tuple(_with_noise(c, noise) if c in failed else c for c in checks)


def _with_noise(check: Check, noise: Mapping[tuple[str, str], float]) -> Check:
    moved = noise.get((check.kind, check.name), 0.0)
    return replace(check, noise=moved, ok=check.error <= min(ALLOWED * moved, MOST))


def _perturbed(values: Tensors, seed: int) -> Tensors:
    """Every element up or down by its last bit in half precision, also of parameters that are cast to it."""
    generator = torch.Generator().manual_seed(seed)

    def moved(x: torch.Tensor) -> torch.Tensor:
        signs = torch.randint(0, 2, x.shape, generator=generator) * 2 - 1
        eps = torch.finfo(x.dtype if x.dtype.itemsize == 2 else torch.bfloat16).eps
        return (x.detach().double() * (1 + eps * signs)).to(x.dtype)

    return {n: moved(x) if x.is_floating_point() else x for n, x in values.items()}
