"""Rules that users bring along: values that are handed over, never entered in a table of ours."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, TypeAlias

from autoshard.errors import UsageError
from autoshard.ir import Node, TensorType
from autoshard.rules.core import Factored

if TYPE_CHECKING:
    from autoshard.rules.core import RuleFn


@dataclass(frozen=True, slots=True)
class UserRule:
    """The rule of one op (``namespace.name.overload``); can be called like the function it was made of."""

    op: str
    fn: RuleFn = field(repr=False)

    def __call__(self, node: Node, ins: Sequence[TensorType]) -> Factored:
        return self.fn(node, ins)


#: rules as users hand them over: some of them, or a module that holds them
Rules: TypeAlias = "Iterable[UserRule] | ModuleType | None"


def rule(op: str) -> Callable[[RuleFn], UserRule]:
    """Decorator: the function becomes the rule of an op; see `autoshard.rules` for how to write one.

    Nothing is registered: pass the result as ``rules=[...]``, or its full module as ``rules=module``.
    """
    if not isinstance(op, str) or len(op.split(".")) != 3 or not all(op.split(".")):
        raise UsageError(
            f"{op!r} is not the name of an op", hint="namespace.name.overload: 'mine.op.default'"
        )
    return lambda fn: UserRule(op, fn)


def user_rules(rules: Rules) -> tuple[UserRule, ...]:
    """The rules in what a user handed over. Raises UsageError for anything else, or two of one op."""
    given = list(vars(rules).values()) if isinstance(rules, ModuleType) else list(rules or ())
    result = {id(r): r for r in given if isinstance(r, UserRule)}
    other = next((r for r in given if not isinstance(r, UserRule)), None)
    if other is not None and not isinstance(rules, ModuleType):
        raise UsageError(
            f"{other!r} is not a rule", hint="decorate the function with @autoshard.rule('mine.op.default')"
        )
    twice = {r.op for r in result.values() if sum(r.op == o.op for o in result.values()) > 1}
    if twice:
        raise UsageError(f"there are two rules for {', '.join(sorted(twice))}", hint="hand over one")
    return tuple(result.values())


def rule_table(own: Mapping[str, RuleFn], rules: Rules) -> Mapping[str, RuleFn]:
    """Our rules and the user's. Raises UsageError if an op has a rule of ours already."""
    added = user_rules(rules)
    # in the text of a program aten ops have no namespace: `sum.dim` must not be read in two ways
    reserved = {op.split(".")[1] for op in own} | {"comm", "autoshard"}
    unclear = sorted(r.op for r in added if r.op.split(".")[0] in reserved)
    if unclear:
        raise UsageError(
            f"{', '.join(unclear)} cannot have a rule",
            why="its namespace is the name of a built-in op or namespace",
            hint="define the op in another namespace",
        )
    taken = sorted(r.op for r in added if r.op in own)
    if taken:
        raise UsageError(
            f"{', '.join(taken)} has a rule already",
            why="passes rely on what the rules of built-in ops say",
            hint="leave your rule out; if the built-in one is wrong, report it",
        )
    return MappingProxyType({**own, **{r.op: r.fn for r in added}})
