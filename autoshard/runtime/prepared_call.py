"""One op of a program, ready to be called on numbered slots."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from autoshard.ir import CallSite, Node, Ref, refs_of
from autoshard.runtime.pending import Issue
from autoshard.runtime.resolve import RankView

#: values by slot
Env = list[Any]


class PreparedCall:
    """One call: gather arguments from slots, call, put results into slots, free what is dead."""

    __slots__ = (
        "fn",
        "frees",
        "kwargs",
        "kwrefs",
        "nested",
        "node",
        "outs",
        "refs",
        "sites",
        "stops",
        "template",
    )

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
        #: whether another microbatch may go on before it
        self.stops = False

    @property
    def uses(self) -> set[int]:
        """The slots of its arguments."""
        nested = {part for _, parts in self.nested for part in parts if not isinstance(part, Literal)}
        return {slot for _, slot in (*self.refs, *self.kwrefs)} | nested

    @property
    def awaits(self) -> set[int]:
        """Those of them that have to be there: all but a message that the op sends on."""
        if isinstance(self.fn, Issue) and self.fn.relays:
            _, (first, *_) = self.nested[0]
            return self.uses - {first}
        return self.uses

    def _add(self, position: int, value: Any, slots: Mapping[str, int]) -> None:
        self.template.append(None)
        if isinstance(value, Ref):
            self.refs.append((position, slots[value.name]))
        elif isinstance(value, CallSite):
            self.sites.append((position, value.offset))
        elif isinstance(value, tuple) and any(True for _ in refs_of(value)):
            self.nested.append(
                (position, [slots[v.name] if isinstance(v, Ref) else Literal(v) for v in value])
            )
        else:
            self.template[position] = list(value) if isinstance(value, tuple) else value

    def arguments(self, env: Env, site: int) -> list[Any]:
        args = self.template.copy()
        for position, slot in self.refs:
            args[position] = env[slot]
        for position, parts in self.nested:
            args[position] = [p.value if isinstance(p, Literal) else env[p] for p in parts]
        for position, offset in self.sites:
            args[position] = site + offset
        return args

    def store(self, env: Env, result: Any) -> None:
        if len(self.outs) == 1:
            env[self.outs[0]] = only(result)
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


class Literal:
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


def only(result: Any) -> Any:
    """The value of an op with one output."""
    return result[0] if isinstance(result, tuple | list) else result
