"""A segment as prepared steps over numbered slots, called at once or one by one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from autoshard.ir import Call, Graph, Node, refs_of
from autoshard.ir.collectives import is_collective
from autoshard.ir.lowered import Instruction
from autoshard.ir.offload import HOST_OPS
from autoshard.ir.row_tiles import TILES, tiles_of
from autoshard.ir.scans import SCAN, scan_of
from autoshard.rules.stops import stops_of
from autoshard.runtime.compiled_segment import CompiledSegment
from autoshard.runtime.pending import Issue
from autoshard.runtime.prepared_call import Env, PreparedCall
from autoshard.runtime.resolve import RankView, find_op, makes_on_device
from autoshard.runtime.row_tiles import run_in_tiles
from autoshard.runtime.scans import run_steps
from autoshard.runtime.straight_line import FunctionText, SegmentCode, Stopping, to_its_end


class PreparedSegment:
    """A segment ready to run on one rank.

    collective: makes the function of a ``comm`` or ``host`` node for this rank. compiles: whether Inductor
    compiles what stands between messages, or every op is called. kept: a folder of what it compiles. stops:
    whether it may run beside a segment of another microbatch.
    """

    def __init__(
        self,
        graph: Graph,
        view: RankView,
        collective: Callable[[Node, RankView], Callable[..., Any]],
        device: torch.device,
        compiles: bool = False,
        kept: Path | None = None,
        stops: bool = False,
    ) -> None:
        self.compiles, self.kept = compiles, kept
        names = [n for n, _ in graph.inputs] + [o for node in graph.nodes for o in node.outs]
        slots = {name: k for k, name in enumerate(names)}
        self.size = len(slots)
        self.inputs = len(graph.inputs)
        self.outputs = tuple(slots[o] for o in graph.outputs)
        self.steps = [
            PreparedCall(n, view, slots, function_of(n, view, collective, device, compiles, kept))
            for n in graph.nodes
        ]
        for k in stops_of(graph.nodes) if stops else ():
            self.steps[k].stops = True
        self.stops = any(step.stops for step in self.steps)
        #: slots that messages fill
        self.late = frozenset(o for s in self.steps if isinstance(s.fn, Issue) for o in s.outs)
        #: slots of values with as many rows as the data say: those of experts, and of groups of them
        self.ragged = frozenset(slots[n] for n, type_ in graph.types().items() if type_.ragged)
        _plan_frees(graph, self.steps, slots)

    def start(self, args: Sequence[Any]) -> Env:
        return [*args, *([None] * (self.size - len(args)))]

    def finish(self, env: Env) -> tuple[Any, ...]:
        return tuple(env[slot] for slot in self.outputs)

    def __call__(self, args: list[Any], site: int) -> tuple[Any, ...]:
        """Run it; the list of arguments is empty afterwards."""
        results: Any = self._run(args, site)
        return tuple(to_its_end(results)) if self.stops else results

    def stopping(self, args: list[Any], site: int) -> Stopping:
        """Run it from stop to stop."""
        results: Any = self._run(args, site)
        return (yield from results) if self.stops else results

    @cached_property
    def _run(self) -> SegmentCode:
        """All steps as one function, written at the first call."""
        if self.compiles:
            told = self.steps, self.inputs, self.size, self.outputs, self.late, self.kept
            return CompiledSegment(*told, self.ragged, self.stops)
        source = FunctionText(self.inputs)
        for step in self.steps:
            source.add(step)
        return source.function(self.outputs)


class PreparedItem:
    """An instruction of main. moved: arguments that nothing behind it uses. counted: those of which the
    part's use is over with it. dead: results that nothing uses."""

    __slots__ = ("args", "body", "counted", "dead", "instruction", "label", "moved", "outs", "site")

    def __init__(
        self,
        instruction: Instruction,
        args: tuple[str, ...],
        body: PreparedSegment | PreparedCall,
        dead: Sequence[str],
        counted: Sequence[str],
    ) -> None:
        self.instruction, self.args, self.outs, self.body = instruction, args, instruction.outs, body
        self.label, self.site = "", 0
        if isinstance(instruction, Call):
            self.label, self.site = instruction.label, instruction.site
        self.moved = tuple(name for name in dead if name in args)
        self.dead, self.counted = tuple(name for name in dead if name not in args), tuple(counted)

    def run(self, args: list[Any]) -> Stopping:
        """Its results, from stop to stop. A segment empties the list, and holds each argument until its last
        use there."""
        if isinstance(self.body, PreparedSegment):
            return (yield from self.body.stopping(args, self.site))
        (step,), slots, ends = self.opened(args)
        step.run(slots, 0)
        return [slots[slot] for slot in ends]

    def opened(self, args: Sequence[Any]) -> tuple[Sequence[PreparedCall], Env, Sequence[int]]:
        """(its steps, the slots that they begin with, those of its results)."""
        if isinstance(self.body, PreparedSegment):
            return self.body.steps, self.body.start(args), self.body.outputs
        return [self.body], [*args, *([None] * len(self.outs))], self.body.outs


def function_of(
    node: Node,
    view: RankView,
    collective: Callable[[Node, RankView], Callable[..., Any]],
    device: torch.device,
    compiles: bool = False,
    kept: Path | None = None,
) -> Callable[..., Any]:
    """What runs a node on a rank. collective: makes that of a ``comm`` or ``host`` node. compiles, kept: of
    what a node runs in tiles, see `PreparedSegment`."""
    if is_collective(node) or node.op in HOST_OPS:
        return collective(node, view)
    if node.op == TILES:
        tiles = tiles_of(node)
        return run_in_tiles(tiles, PreparedSegment(tiles.body, view, collective, device, compiles, kept))
    if node.op == SCAN:
        scan = scan_of(node)
        return run_steps(scan, PreparedSegment(scan.body, view, collective, device, compiles, kept))
    op = find_op(node.op)
    if makes_on_device(op):
        return lambda *args, **kwargs: op(*args, **kwargs, device=device)
    return op


def _plan_frees(graph: Graph, steps: Sequence[PreparedCall], slots: Mapping[str, int]) -> None:
    """Free each slot after its last use; outputs belong to the caller."""
    keep = {slots[o] for o in graph.outputs}
    seen: set[int] = set(keep)
    for node, step in zip(reversed(graph.nodes), reversed(list(steps)), strict=True):
        used = {slots[r] for r in refs_of(node)} | set(step.outs)
        step.frees = tuple(sorted(used - seen))
        seen |= used
