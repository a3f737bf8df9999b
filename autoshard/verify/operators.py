"""One op of a program against one of the model: its placements, and the arguments that follow from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autoshard.errors import AutoshardError
from autoshard.ir.placement import Layout
from autoshard.rules.core import Factored, RuleFn, opaque
from autoshard.rules.local import LocalCall, MeshShape
from autoshard.verify.result import Rule
from autoshard.verify.states import broken_state
from autoshard.verify.value_numbering import Pattern, spelled

#: layouts of inputs and of outputs
Lies = tuple[tuple[Layout, ...], tuple["Layout | None", ...]]


@dataclass(frozen=True, slots=True)
class Judgement:
    """Whether an op may run with some placements, and what a rank then calls.

    broken: (rule, why), None if it may. op, args: as `terms.spelled` gives them.
    """

    broken: tuple[Rule, str] | None
    op: str
    args: str


class OpChecker:
    """Judges ops of a model on the placements that a program gives them; each question is answered once."""

    def __init__(self, rules: Mapping[str, RuleFn], mesh: MeshShape) -> None:
        self.rules, self.mesh = rules, mesh
        self._factored: dict[int, Factored] = {}
        self._known: dict[tuple[int, Lies], Judgement] = {}

    def of(self, pattern: Pattern, lies: Lies) -> Judgement:
        """May ``pattern`` run with its tensors lying like that, and as what."""
        key = (pattern.number, lies)
        if key not in self._known:
            self._known[key] = self._judged(pattern, lies)
        return self._known[key]

    def factored(self, pattern: Pattern) -> Factored:
        """The factors of an op; without a rule it needs full tensors."""
        if pattern.number not in self._factored:
            fn = self.rules.get(pattern.node.op)
            new = opaque(pattern.ins, pattern.node.types) if fn is None else fn(pattern.node, pattern.ins)
            new.check(pattern.ins, pattern.node.types)
            self._factored[pattern.number] = new
        return self._factored[pattern.number]

    def _judged(self, pattern: Pattern, lies: Lies) -> Judgement:
        node = pattern.node
        rule = self.factored(pattern)
        broken = broken_state(rule, pattern.ins, node.types, *lies, self.mesh)
        if broken is None and rule.local is not None:
            try:
                node = rule.local(LocalCall(node, pattern.ins, *lies, self.mesh))
            except AutoshardError as error:
                broken = ("placement", error.what)
        return Judgement(broken, *spelled(node))
