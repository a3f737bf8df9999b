"""A function of torch on a sample of torch's own tests, captured, planned at random, and run in lockstep.

Leans on the private ``torch.testing._internal``, which wants the package expecttest. Run with torch 2.13.
"""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autoshard.capture.capture import capture
from autoshard.errors import AutoshardError
from autoshard.planner.analysis import analyse
from autoshard.verify.lockstep import verify
from fuzz.case import TOLERANCE, Outcome, one_rank_of, randomly_planned

MESHES = ("x=2", "x=3", "x=2,y=2")
#: samples of a function that are taken
_SAMPLES = 6


@functools.cache
def operators() -> tuple[Any, ...]:
    """The functions, but for those that promise no values or are other forms of the same.

    Raises RuntimeError without expecttest.
    """
    try:
        from torch.testing._internal.common_methods_invocations import op_db
    except ModuleNotFoundError as error:
        raise RuntimeError(
            "torch's samples of its functions need a package: pip install expecttest"
        ) from error
    left_out = ("_refs", "sparse", "masked.", "empty", "new_empty", "jiterator")
    found = [op for op in op_db if not op.name.startswith(left_out)]
    return tuple(op for op in found if op.supports_dtype(torch.float64, "cpu"))


class Applied(nn.Module):
    """A function of its first argument times a parameter like it, and one number of all that it gives."""

    def __init__(self, function: Any, arguments: Any, shape: torch.Size) -> None:
        super().__init__()
        self.function = function
        self.leaves, self.spec = pytree.tree_flatten(arguments)
        # unlike, as many functions do not change with the scale of all
        scale = torch.linspace(0.8, 1.3, shape.numel(), dtype=torch.float64)
        self.scale = nn.Parameter(scale.reshape(shape))

    def forward(self, x: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        given = iter(tensors)
        leaves = [next(given) if isinstance(leaf, torch.Tensor) else leaf for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        out = self.function(x * self.scale, *args, **kwargs)
        loss = 0.0 * self.scale.sum()
        for each in pytree.tree_leaves(out):
            if isinstance(each, torch.Tensor):
                real = torch.view_as_real(each.resolve_conj()) if each.is_complex() else each
                numbers = real if real.is_floating_point() else real.double()
                weights = torch.linspace(0.5, 1.5, numbers.numel(), dtype=numbers.dtype).view(numbers.shape)
                loss = loss + (numbers * numbers * weights).sum() + numbers.sum()
        return loss


@dataclass(frozen=True)
class OperatorCase:
    """operator, sample: numbers of the function and of its sample. mesh, and the seed of a plan."""

    operator: int
    sample: int
    mesh: str
    plan_seed: int

    @classmethod
    def of(cls, number: int) -> OperatorCase:
        """The case of a number."""
        sample, operator = divmod(number, len(operators()))
        return cls(operator, sample, random.Random(f"operator/{number}").choice(MESHES), number)

    @property
    def name(self) -> str:
        op = operators()[self.operator]
        return f"{op.name} {op.variant_test_name}".strip()

    def source(self) -> str:
        """To print."""
        x, rest = self._sample() or ("no such sample", ())
        return f"# mesh {self.mesh}\n{self.name} of {x}, {rest}"

    def _sample(self) -> tuple[torch.Tensor, tuple[Any, Any]] | None:
        """(the first argument, the others)."""
        op = operators()[self.operator]
        torch.manual_seed(0)
        every = [s for s in op.sample_inputs("cpu", torch.float64) if isinstance(s.input, torch.Tensor)]
        fit = [s for s in every if s.input.dim() and s.input.numel() and s.input.is_floating_point()]
        some = fit[:: max(1, len(fit) // _SAMPLES)]
        if self.sample >= len(some):
            return None
        sample = some[self.sample]
        return sample.input.detach(), (sample.args, sample.kwargs)

    def run(self) -> Outcome:
        """Capture, plan, compile and verify."""
        try:
            sample = self._sample()
            if sample is None:
                return Outcome("dropped", detail="no such sample")
            x, rest = sample
            given = (x, *(t.detach() for t in pytree.tree_leaves(rest) if isinstance(t, torch.Tensor)))
            make = functools.partial(Applied, operators()[self.operator].op, rest, x.shape)
            make()(*(t.clone() for t in given)).backward()
        except Exception as error:  # nothing that eager PyTorch computes
            return Outcome("dropped", detail=f"{type(error).__name__}: {error}")
        try:
            analysis = analyse(capture(make(), given, {}))
            program = randomly_planned(analysis, self.mesh, self.plan_seed)
            found = verify(program, make(), given, {}, steps=0, one_rank=one_rank_of(analysis, program))
        except AutoshardError as error:
            return Outcome("refused", type(error).__name__, f"{self.name}: {error}")
        except Exception as error:
            return Outcome("failed", type(error).__name__, f"{self.name}: {type(error).__name__}: {error}")
        wrong = [f"{c.kind} {c.name} off by {c.error:.2g}" for c in found.checks if not c.error <= TOLERANCE]
        if wrong:
            return Outcome("failed", "numbers", f"{self.name}: {'; '.join(wrong[:3])}")
        return Outcome("equal", error=max((c.error for c in found.checks), default=0.0))
