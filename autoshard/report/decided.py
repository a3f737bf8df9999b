"""The decisions of a plan under the names that a reader knows, from a program alone: nothing is captured."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from autoshard.cluster.mesh import Mesh
from autoshard.errors import UsageError
from autoshard.ir import Call, Port
from autoshard.passes.pipeline import NUMBERED
from autoshard.program.program import Program
from autoshard.program.text import axis_names, layout_text
from autoshard.search.plan.plan import Plan, Why, why_key
from autoshard.search.plan.plan_json import plan_from_json
from autoshard.search.reasons.explain import strategy_text

#: the last pass before the search: its segments and the order of their ops are what a plan is about
_SEARCHED = NUMBERED["normalize"]
_LAST_NUMBER = re.compile(r"\.\d+(?=\.|$)")


@dataclass(frozen=True)
class Op:
    """An op that a plan decides about. segment, number: its place in the plan. name: of its first result.

    op: as in the text of a program (``mm``). module: path in the model, "" outside. source: the user's line.
    calls: how often a step of one microbatch runs it.
    """

    segment: str
    number: int
    name: str
    op: str
    module: str
    source: str
    calls: int


@dataclass(frozen=True)
class Decisions:
    """The plan of a program, and what its keys stand for."""

    program: Program
    plan: Plan

    @classmethod
    def of(cls, program: Program) -> Decisions:
        """UsageError if the program does not hold the plan it was made from, or the graph that is about."""
        if not program.plan:
            raise UsageError("the program does not hold its plan", hint="compile it again")
        if _SEARCHED not in program.dumps:
            raise UsageError(
                "the program does not hold the graph that its plan is about",
                why=f"it has no dump after {_SEARCHED}",
                hint="compile it again",
            )
        return cls(program, plan_from_json(program.plan))

    @cached_property
    def mesh(self) -> Mesh:
        """Of the ranks of one stage: what the layouts of the plan are about.

        The program's own mesh may have more axes, where emitting took one apart by the levels of the wiring.
        """
        return Mesh.parse(self.plan.mesh)

    @cached_property
    def ops(self) -> Mapping[tuple[str, int], Op]:
        """Every op of the graph that was searched, by its key in the plan."""
        return {(op.segment, op.number): op for op in ops_of_dump(self.program.dumps[_SEARCHED])}

    @cached_property
    def by_value(self) -> Mapping[tuple[str, str], Op]:
        """The same by (segment, name of the first result)."""
        return {(op.segment, op.name): op for op in self.ops.values()}

    @cached_property
    def labels(self) -> frozenset[str]:
        """Layers: ``model.layers.0``, ..."""
        return frozenset(i.label for i in self.program.lowered.main if isinstance(i, Call) and i.label)

    @cached_property
    def classes(self) -> Mapping[str, tuple[Port, ...]]:
        """Parameters and buffers that the plan decides about together, by their key (``@3``)."""
        ports_by_key: dict[str, list[Port]] = {}
        for port in self.program.signature.ports:
            key = self.program.classes.get(port.name)
            if key is not None and ("", key) in self.plan.params:
                ports_by_key.setdefault(key, []).append(port)
        return {key: tuple(ports) for key, ports in ports_by_key.items()}

    def op_of(self, segment: str, value: str) -> Op | None:
        """The op of the searched graph that makes a value of the program, None for what passes made.

        Passes may cut a segment in parts, whose names begin with its own.
        """
        for prefix in sorted(self.plan_segments, key=len, reverse=True):
            if (segment == prefix or segment.startswith(f"{prefix}_")) and (prefix, value) in self.by_value:
                return self.by_value[prefix, value]
        return None

    def why_of_op(self, segment: str, value: str, note: str) -> Why:
        """The reason of an op. note: what the program says, and the plan's reason must say the same."""
        op = self.op_of(segment, value)
        why = None if op is None else self.plan.why.get(why_key("node", op.segment, op.number))
        return why if why is not None and str(why) == note else Why(note)

    @cached_property
    def plan_segments(self) -> frozenset[str]:
        return frozenset(segment for segment, _ in self.ops)

    def why_of_port(self, port: Port) -> Why:
        """The reason for how a parameter, a buffer or an input lies."""
        key = self.program.classes.get(port.name)
        if key is None:
            return Why("")
        kind = "param" if ("", key) in self.plan.params else "port"
        return self.plan.why.get(why_key(kind, key), Why(""))

    def strategy_of_port(self, port: Port) -> str:
        """How a parameter is stored and used: ``dp:R tp:S(0) used as dp:R tp:R, ZeRO-3``; else its layout."""
        strategy = self.plan.params.get(("", self.program.classes.get(port.name, "")))
        if strategy is not None:
            return strategy_text(strategy, self.mesh)
        layout = self.program.lowered.values[port.name].layout
        return layout_text(layout, axis_names(self.program.mesh))

    def starred(self, name: str) -> str:
        """A module or parameter of a layer as that of any layer: ``model.layers.*.mlp``."""
        return starred(name, self.labels)


def starred(name: str, labels: Collection[str]) -> str:
    """A name inside one of the layers ``labels`` as that in any layer: ``model.layers.*.mlp``."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        label = ".".join(parts[:end])
        if label in labels:
            return ".".join([starred_label(label), *parts[end:]])
    return name


def starred_label(label: str) -> str:
    """``model.layers.*`` for ``model.layers.3``: the last number of a path is that of the layer."""
    matches = list(_LAST_NUMBER.finditer(label))
    return label if not matches else f"{label[: matches[-1].start()]}.*{label[matches[-1].end() :]}"


def ops_of_dump(text: str) -> Iterator[Op]:
    """The ops of a dump of a folded graph, in order; see `autoshard.program.dump.folded_lines`."""
    lines = text.splitlines()
    for function in ast.parse(text).body:
        assert isinstance(function, ast.FunctionDef)
        calls = _calls(lines[function.lineno - 2])
        at, module, source, number = function.lineno, "", "", 0
        for statement in function.body:
            for line in lines[at - 1 : statement.lineno]:
                if line.startswith("    # --- "):
                    module, _, source = line.removeprefix("    # --- ").partition("  ")
                    module, source = (module, source) if source else _one(module)
            at = statement.lineno
            if isinstance(statement, ast.Return) or statement.value is None:  # type: ignore[attr-defined]
                continue
            name, call = _target(statement), statement.value  # type: ignore[attr-defined]
            assert isinstance(call, ast.Call)
            yield Op(function.name, number, name, ast.unparse(call.func), module, source.strip(), calls)
            number += 1


def _one(words: str) -> tuple[str, str]:
    """What stands alone behind the dashes is a module, or begins with a blank and is a line."""
    return ("", words) if words.startswith(" ") else (words, "")


def _calls(line: str) -> int:
    match = re.search(r"\(called (\d+) times\)$", line)
    return int(match.group(1)) if match else 1


def _target(statement: ast.stmt) -> str:
    """The first name that a statement gives a value."""
    target = statement.target if isinstance(statement, ast.AnnAssign) else statement.targets[0]  # type: ignore[attr-defined]
    first = target.elts[0] if isinstance(target, ast.Tuple) else target
    assert isinstance(first, ast.Name)
    return first.id
