"""A graph as prepared steps over numbered slots, and as one straight-line function: little Python per op."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

from autoshard.ir import Call, CallSite, Graph, Node, Ref, refs_of
from autoshard.ir.collectives import is_collective
from autoshard.ir.lowered import Instruction
from autoshard.ir.offload import HOST_OPS
from autoshard.ir.row_tiles import TILES, tiles_of
from autoshard.runtime.pending import Issue
from autoshard.runtime.resolve import RankView, find_op, makes_on_device
from autoshard.runtime.row_tiles import run_in_tiles

Env = list[Any]
#: the file name of a segment's function in tracebacks
SEGMENT = "<segment>"


class PreparedCall:
    """One call: gather arguments from slots, call, put results into slots, free what is dead."""

    __slots__ = ("fn", "frees", "kwargs", "kwrefs", "nested", "node", "outs", "refs", "sites", "template")

    def __init__(self, node: Node, view: RankView, slots: Mapping[str, int], fn: Callable[..., Any]) -> None:
        self.node, self.fn = node, fn
        self.template: list[Any] = []
        self.refs: list[tuple[int, int]] = []
        self.nested: list[tuple[int, Any]] = []
        self.sites: list[tuple[int, int]] = []
        for position, arg in enumerate(node.args):
            self._add(position, view.value(arg), slots)
        self.kwargs = {k: view.value(v) for k, v in node.kwargs}
        self.kwrefs = [(k, slots[v.name]) for k, v in self.kwargs.items() if isinstance(v, Ref)]
        self.outs = tuple(slots[o] for o in node.outs)
        self.frees: tuple[int, ...] = ()

    @property
    def uses(self) -> set[int]:
        """The slots of its arguments."""
        nested = {part for _, parts in self.nested for part in parts if not isinstance(part, _Literal)}
        return {slot for _, slot in (*self.refs, *self.kwrefs)} | nested

    def _add(self, position: int, value: Any, slots: Mapping[str, int]) -> None:
        self.template.append(None)
        if isinstance(value, Ref):
            self.refs.append((position, slots[value.name]))
        elif isinstance(value, CallSite):
            self.sites.append((position, value.offset))
        elif isinstance(value, tuple) and any(True for _ in refs_of(value)):
            self.nested.append(
                (position, [slots[v.name] if isinstance(v, Ref) else _Literal(v) for v in value])
            )
        else:
            self.template[position] = list(value) if isinstance(value, tuple) else value

    def arguments(self, env: Env, site: int) -> list[Any]:
        args = self.template.copy()
        for position, slot in self.refs:
            args[position] = env[slot]
        for position, parts in self.nested:
            args[position] = [p.value if isinstance(p, _Literal) else env[p] for p in parts]
        for position, offset in self.sites:
            args[position] = site + offset
        return args

    def store(self, env: Env, result: Any) -> None:
        if len(self.outs) == 1:
            env[self.outs[0]] = _only(result)
        else:
            for slot, value in zip(self.outs, result, strict=True):
                env[slot] = value
        for slot in self.frees:
            env[slot] = None

    def call(self, env: Env, site: int) -> Any:
        """What the op gives."""
        kwargs = self.kwargs
        if self.kwrefs:
            kwargs = {**kwargs, **{k: env[slot] for k, slot in self.kwrefs}}
        return self.fn(*self.arguments(env, site), **kwargs)

    def run(self, env: Env, site: int) -> None:
        self.store(env, self.call(env, site))


class _Literal:
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class PreparedSegment:
    """A segment ready to run on one rank.

    collective: makes the function of a ``comm`` or ``host`` node for this rank.
    """

    def __init__(
        self,
        graph: Graph,
        view: RankView,
        collective: Callable[[Node, RankView], Callable[..., Any]],
        device: torch.device,
    ) -> None:
        names = [n for n, _ in graph.inputs] + [o for node in graph.nodes for o in node.outs]
        slots = {name: k for k, name in enumerate(names)}
        self.size = len(slots)
        self.inputs = len(graph.inputs)
        self.outputs = tuple(slots[o] for o in graph.outputs)
        self.steps = [
            PreparedCall(n, view, slots, function_of(n, view, collective, device)) for n in graph.nodes
        ]
        #: slots that messages fill
        self.late = frozenset(o for s in self.steps if isinstance(s.fn, Issue) for o in s.outs)
        _plan_frees(graph, self.steps, slots)

    def start(self, args: Sequence[Any]) -> Env:
        return [*args, *([None] * (self.size - len(args)))]

    def finish(self, env: Env) -> tuple[Any, ...]:
        return tuple(env[slot] for slot in self.outputs)

    def __call__(self, args: list[Any], site: int) -> tuple[Any, ...]:
        """Run it; the list of arguments is empty afterwards."""
        return self._run(args, site)

    @cached_property
    def _run(self) -> Callable[[list[Any], int], tuple[Any, ...]]:
        """All steps as one function, written at the first call: slots are its local variables."""
        source = _Source()
        source.unpack(range(self.inputs), "args")
        source.lines.append("args.clear()")
        for step in self.steps:
            source.add(step)
        source.lines.append(f"return ({''.join(f'v{slot}, ' for slot in self.outputs)})")
        return source.function()


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

    def run(self, args: list[Any]) -> Sequence[Any]:
        """Its results. A segment empties the list, and holds each argument until its last use there."""
        if isinstance(self.body, PreparedSegment):
            return self.body(args, self.site)
        (step,), slots, ends = self.opened(args)
        step.run(slots, 0)
        return [slots[slot] for slot in ends]

    def opened(self, args: Sequence[Any]) -> tuple[Sequence[PreparedCall], Env, Sequence[int]]:
        """(its steps, the slots that they begin with, those of its results)."""
        if isinstance(self.body, PreparedSegment):
            return self.body.steps, self.body.start(args), self.body.outputs
        return [self.body], [*args, *([None] * len(self.outs))], self.body.outs


class _Source:
    """The text of a function of (args, site). Only numbers are written out: other things are names in it."""

    def __init__(self) -> None:
        self.lines: list[str] = ["pass"]
        self.names: dict[str, Any] = {"only": _only}
        #: slots of results that are on their way
        self.pending: set[int] = set()

    def need(self, slot: int) -> None:
        """Wait for a message before its first use."""
        if slot in self.pending:
            self.pending.discard(slot)
            self.lines.append(f"v{slot} = v{slot}.get()")

    def name(self, thing: Any) -> str:
        """A name for something that the steps take as it is."""
        made = f"c{len(self.names)}"
        self.names[made] = thing
        return made

    def unpack(self, slots: Sequence[int], what: str) -> None:
        self.lines.append(f"[{', '.join(f'v{slot}' for slot in slots)}] = {what}")

    def add(self, step: PreparedCall) -> None:
        for slot in sorted(step.uses):
            self.need(slot)
        if isinstance(step.fn, Issue):
            self.pending.update(step.outs)
        call = f"{self.name(step.fn)}({', '.join(self._arguments(step))})"
        if len(step.outs) == 1:
            self.lines.append(f"v{step.outs[0]} = {call if _gives_a_tensor(step.fn) else f'only({call})'}")
        else:
            self.unpack(step.outs, call)
        if step.frees:
            self.lines.append(f"{''.join(f'v{slot} = ' for slot in step.frees)}None")

    def _arguments(self, step: PreparedCall) -> list[str]:
        texts = dict.fromkeys(range(len(step.template)), "")
        texts.update((position, f"v{slot}") for position, slot in step.refs)
        texts.update((position, f"site + {offset}") for position, offset in step.sites)
        for position, parts in step.nested:
            members = [self.name(p.value) if isinstance(p, _Literal) else f"v{p}" for p in parts]
            texts[position] = f"[{', '.join(members)}]"
        given = [text or self.name(step.template[position]) for position, text in texts.items()]
        if step.kwargs:
            given.append(f"**{self.name(step.kwargs)}")
        if step.kwrefs:
            fixed = {k: v for k, v in step.kwargs.items() if k not in dict(step.kwrefs)}
            named = ", ".join(f"{self.name(k)}: v{slot}" for k, slot in step.kwrefs)
            given[-1] = f"**{self.name(fixed)}, **{{{named}}}"
        return given

    def function(self) -> Callable[[list[Any], int], tuple[Any, ...]]:
        text = "def segment(args, site):\n" + "".join(f"    {line}\n" for line in self.lines)
        exec(compile(text, SEGMENT, "exec"), self.names)
        made: Callable[[list[Any], int], tuple[Any, ...]] = self.names["segment"]
        return made


def _only(result: Any) -> Any:
    """The value of an op with one output."""
    return result[0] if isinstance(result, tuple | list) else result


def _gives_a_tensor(fn: Callable[..., Any]) -> bool:
    """Whether an op is known to return a tensor, and no tuple or list."""
    if not isinstance(fn, torch._ops.OpOverload):
        return False
    returns = fn._schema.returns
    return len(returns) == 1 and str(returns[0].type) == "Tensor"


def function_of(
    node: Node,
    view: RankView,
    collective: Callable[[Node, RankView], Callable[..., Any]],
    device: torch.device,
) -> Callable[..., Any]:
    """What runs a node on a rank. collective: makes that of a ``comm`` or ``host`` node."""
    if is_collective(node) or node.op in HOST_OPS:
        return collective(node, view)
    if node.op == TILES:
        tiles = tiles_of(node)
        return run_in_tiles(tiles, PreparedSegment(tiles.body, view, collective, device))
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
