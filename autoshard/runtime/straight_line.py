"""Steps as the text of one Python function whose local variables are their slots: little Python per op."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, TypeAlias

import torch

from autoshard.runtime.compiled_subgraphs import Subgraph
from autoshard.runtime.pending import Issue
from autoshard.runtime.prepared_call import Literal, PreparedCall, only
from autoshard.torch_adapters.inductor import Compiled

#: the file name of a segment's function in tracebacks
SEGMENT = "<segment>"
#: (arguments, site) -> results, or what gives them from stop to stop; the list of arguments is empty
#: afterwards
SegmentCode = Callable[[list[Any], int], Any]
#: from stop to stop (`rules.stops`), and then the results
Stopping: TypeAlias = "Generator[None, None, Sequence[Any]]"


def to_its_end(stopping: Stopping) -> Sequence[Any]:
    """What comes of it if it stops nowhere."""
    while True:
        try:
            next(stopping)
        except StopIteration as end:
            results: Sequence[Any] = end.value
            return results


class FunctionText:
    """The text of a function of (args, site). Only numbers are written out: other things are names in it."""

    def __init__(self, inputs: int) -> None:
        """inputs: how many slots are arguments."""
        self.lines: list[str] = []
        self.unpack(range(inputs), "args")
        self.lines.append("args.clear()")
        self.names: dict[str, Any] = {"only": only}
        #: slots of results that are on their way
        self.pending: set[int] = set()

    def need(self, slot: int) -> None:
        """Wait for a message before its first use."""
        if slot in self.pending:
            self.pending.discard(slot)
            self.lines.append(f"v{slot} = v{slot}.get()")

    def stop(self, steps: Iterable[PreparedCall]) -> None:
        self.lines += ["yield" for step in steps if step.stops]

    def name(self, thing: Any) -> str:
        """A name for something that the steps take as it is."""
        new = f"c{len(self.names)}"
        self.names[new] = thing
        return new

    def unpack(self, slots: Sequence[int], what: str) -> None:
        self.lines.append(f"[{', '.join(f'v{slot}' for slot in slots)}] = {what}")

    def add(self, step: PreparedCall) -> None:
        self.stop([step])
        for slot in sorted(step.awaits):
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

    def add_subgraph(self, part: Subgraph, code: Compiled) -> None:
        """Call what a subgraph was compiled to, which holds what nothing else needs until its last use."""
        self.stop(part.steps)
        for slot in part.takes:
            self.need(slot)
        self.lines.append(f"xs = [{', '.join(f'v{slot}' for slot in part.takes)}]")
        if part.dead:
            self.lines.append(f"{''.join(f'v{slot} = ' for slot in part.dead)}None")
        self.unpack(part.gives, f"{self.name(code)}(xs)")

    def _arguments(self, step: PreparedCall) -> list[str]:
        texts = dict.fromkeys(range(len(step.template)), "")
        texts.update((position, f"v{slot}") for position, slot in step.refs)
        texts.update((position, f"site + {offset}") for position, offset in step.sites)
        for position, parts in step.nested:
            members = [self.name(p.value) if isinstance(p, Literal) else f"v{p}" for p in parts]
            texts[position] = f"[{', '.join(members)}]"
        given = [text or self.name(step.template[position]) for position, text in texts.items()]
        if step.kwargs:
            given.append(f"**{self.name(step.kwargs)}")
        if step.kwrefs:
            fixed = {k: v for k, v in step.kwargs.items() if k not in dict(step.kwrefs)}
            named = ", ".join(f"{self.name(k)}: v{slot}" for k, slot in step.kwrefs)
            given[-1] = f"**{self.name(fixed)}, **{{{named}}}"
        return given

    def function(self, outputs: Sequence[int]) -> SegmentCode:
        """outputs: slots of the results."""
        lines = [*self.lines, f"return ({''.join(f'v{slot}, ' for slot in outputs)})"]
        text = "def segment(args, site):\n" + "".join(f"    {line}\n" for line in lines)
        exec(compile(text, SEGMENT, "exec"), self.names)
        new: SegmentCode = self.names["segment"]
        return new


def _gives_a_tensor(fn: Callable[..., Any]) -> bool:
    """Whether an op is known to return a tensor, and no tuple or list."""
    if not isinstance(fn, torch._ops.OpOverload):
        return False
    returns = fn._schema.returns
    return len(returns) == 1 and str(returns[0].type) == "Tensor"
