"""Programs of one plan for other sizes of the arguments: compiled for the first two, then from a template.

A size is answered without planning where the model's code takes the same way (`SharedConditions`) and the
plan's placements leave every rank something. From the second new size on, probes of sizes that nobody asked
for make a `ProgramTemplate`: of sizes that divide evenly over the ranks, and of sizes that do not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autoshard.cluster.mesh import Mesh
from autoshard.ir import Port
from autoshard.ir.placement import layout_ok
from autoshard.program.program import Program
from autoshard.program.template import NotAlikeError, ProgramTemplate, template_of
from autoshard.runtime.checks.call_guard import Captured, Inputs
from autoshard.runtime.checks.kept_tables import check_tables
from autoshard.runtime.compile_once import SharedConditions

#: of each size, times the number of ranks, for the probes of a template: sizes are no multiples of each other
_PROBES = ((2, 3), (3, 5), (5, 2), (4, 7), (7, 4), (6, 11))
#: programs that a template is made of: formulas are decided by two, and checked by the others
_ENOUGH = 4
#: how many times the sequences of a microbatch a larger one may have
LARGER = 4
#: the plan of so many times fewer elements serves; for more, another may be better
_GROWS = 2


@dataclass
class _Alike:
    """Programs of sizes that divide alike. asked: how many were compiled for calls. apart: whether they are
    no formulas of sizes. unsuited: whether the plan does not suit them."""

    template: ProgramTemplate | None = None
    asked: int = 0
    apart: bool = False
    unsuited: bool = False


@dataclass
class SizedPrograms:
    """Of one program, for other sizes. captured: what its capture left; inputs: that it was planned for."""

    program: Program
    captured: Captured
    _conditions: SharedConditions | None = None
    _known: bool = False
    #: by which sizes divide evenly over all ranks
    _alike: dict[tuple[bool, ...], _Alike] = field(default_factory=dict)

    def of(self, module: nn.Module, inputs: Inputs) -> Program | None:
        """The program for arguments of other sizes; None where it has to be planned.

        module: as the user built it. inputs: a call's arguments, of global shape.
        """
        leaves, spec = pytree.tree_flatten(inputs)
        shapes = {k: tuple(x.shape) for k, x in enumerate(leaves) if isinstance(x, torch.Tensor)}
        planned = sum(p.type.numel for p in self.program.signature.ports if p.kind == "input")
        if sum(map(prod, shapes.values())) > _GROWS * planned or not self._inputs_divide(shapes):
            return None
        conditions = self._conditions_of(module)
        if conditions is None or not conditions.hold(shapes):
            return None
        alike = self._alike.setdefault(self._even(conditions, shapes), _Alike())
        if alike.unsuited:
            return None
        varies = alike.asked > 0 or any(a.template is not None for a in self._alike.values())
        if alike.template is None and varies and not alike.apart:
            alike.template = self._template(module, conditions, shapes, leaves, spec)
            alike.apart = alike.template is None
        alike.asked += 1
        if alike.template is not None:
            sizes = alike.template.sizes_of(shapes)
            try:
                new = None if sizes is None else alike.template.at(sizes)
            except NotAlikeError:
                new = None
            if new is not None and _divides(new):
                return new
        compiled = self._compiled(module, inputs)
        alike.unsuited = compiled is None
        return compiled

    def of_step(self, module: nn.Module, inputs: Inputs) -> Program | None:
        """The program of a step of other microbatches: of as many sequences as now where they divide into
        such, otherwise of fewer, or of a few more.

        inputs: of all microbatches together, global.
        """
        leaves, spec = pytree.tree_flatten(inputs)
        batched = self.program.signature.batched
        rows = {leaves[k].shape[0] for k in batched}
        conditions = self._conditions_of(module)
        if len(rows) != 1 or conditions is None:
            return None
        total = rows.pop()
        planned = next(p.type.shape[0] for p in self._inputs if int(p.target) in batched)
        fewer, more = range(min(planned, total), 0, -1), range(planned + 1, LARGER * planned + 1)
        for batch in (b for b in (*fewer, *more) if total % b == 0):
            micro = [x[:batch] if k in batched else x for k, x in enumerate(leaves)]
            shapes = {k: tuple(x.shape) for k, x in enumerate(micro) if isinstance(x, torch.Tensor)}
            if not self._inputs_divide(shapes) or not conditions.hold(shapes):
                continue
            new = self._compiled(module, pytree.tree_unflatten(micro, spec), total // batch)
            if new is not None:
                return new
        return None

    def _conditions_of(self, module: nn.Module) -> SharedConditions | None:
        if not self._known:
            self._conditions, self._known = self.captured.conditions(module), True
        return self._conditions

    def _compiled(self, module: nn.Module, inputs: Inputs, microbatches: int = 1) -> Program | None:
        new = self.captured.resized(module, inputs, microbatches)
        if new is not None:
            check_tables([self.program], new)
        return new if new is not None and _divides(new) else None

    def _template(
        self,
        module: nn.Module,
        conditions: SharedConditions,
        shapes: Mapping[int, tuple[int, ...]],
        leaves: Sequence[Any],
        spec: Any,
    ) -> ProgramTemplate | None:
        """Of sizes that divide as some do."""
        even = self._even(conditions, shapes)
        programs = [self.program] if even == self._even(conditions, self._shapes) else []
        ranks = self._mesh.world_size
        for probe in _PROBES:
            sizes = {
                n: ranks * probe[n % len(probe)] * (1 + n // len(probe)) - (not even[n])
                for n in range(len(conditions.dims))
            }
            resized = list(leaves)
            for n, places in enumerate(conditions.dims):
                for position, dim in places:
                    x = resized[position]
                    shape = [*x.shape[:dim], sizes[n], *x.shape[dim + 1 :]]
                    resized[position] = torch.zeros(shape, dtype=x.dtype, device="meta")
            if not conditions.hold({k: tuple(resized[k].shape) for k in shapes}):
                continue
            new = self._compiled(module, pytree.tree_unflatten(resized, spec))
            if new is not None:
                programs.append(new)
            if len(programs) == _ENOUGH:
                break
        if len(programs) < _ENOUGH:
            return None
        try:
            return template_of(programs)
        except NotAlikeError:
            return None

    def _inputs_divide(self, shapes: Mapping[int, tuple[int, ...]]) -> bool:
        """Whether every rank gets some of every argument."""
        values = self.program.lowered.values
        return all(
            layout_ok(shapes[int(p.target)], values[p.name].layout, self._mesh.sizes) for p in self._inputs
        )

    def _even(self, conditions: SharedConditions, shapes: Mapping[int, tuple[int, ...]]) -> tuple[bool, ...]:
        """Per size that varies, whether it divides evenly over all ranks."""
        ranks = self._mesh.world_size
        places = (p[0] for p in conditions.dims)
        return tuple(shapes[position][dim] % ranks == 0 for position, dim in places)

    @property
    def _mesh(self) -> Mesh:
        return Mesh.parse(self.program.mesh)

    @property
    def _inputs(self) -> list[Port]:
        ports = self.program.signature.ports
        return [p for p in ports if p.kind == "input" and p.target.isdigit()]

    @property
    def _shapes(self) -> dict[int, tuple[int, ...]]:
        return {int(p.target): p.type.shape for p in self._inputs}


def _divides(program: Program) -> bool:
    """Whether every rank has some of every value."""
    sizes = Mesh.parse(program.mesh).sizes
    lowered = program.lowered
    tables = [lowered.values, *(s.placed() for s in lowered.segments.values())]
    return all(layout_ok(v.type.shape, v.layout, sizes) for table in tables for v in table.values())
