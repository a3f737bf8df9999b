"""A program as work: every op on the shapes of one rank, once per segment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autoshard.cluster.mesh import Mesh
from autoshard.ir import Node, refs_of
from autoshard.ir.lowered import Placed
from autoshard.program.program import Program
from autoshard.rules import attention, pointwise
from autoshard.simulate.behaviour import Behaviour
from autoshard.simulate.ops import VIEWS, Ops, collective_kind, kept_scores, placed_of
from autoshard.simulate.work import Sheet, Task

_POINTWISE = frozenset(pointwise.RULES)


class Sheets:
    """The sheets of a program for one rank of a stage (default: the fullest).

    Where chains of elementwise ops are one kernel each, what only ops of a chain read is neither written nor
    read.
    """

    def __init__(self, program: Program, behaviour: Behaviour, rank: int = 0) -> None:
        self.program, self.behaviour = program, behaviour
        mesh = Mesh.parse(program.mesh)
        self.ops = Ops(mesh, mesh.coords(rank), behaviour)
        self._known: dict[str, Sheet] = {}
        self._nodes: dict[int, tuple[Node, Sheet]] = {}

    def of(self, segment: str) -> Sheet:
        """The sheet of a segment."""
        found = self._known.get(segment)
        if found is None:
            made = self.program.lowered.segments[segment]
            found = self._known[segment] = self._sheet(
                made.graph.nodes, [n for n, _ in made.graph.inputs], made.graph.outputs, placed_of(made)
            )
        return found

    def of_node(self, node: Node) -> Sheet:
        """The sheet of an instruction of main, whose arguments are what it uses, in order."""
        known = self._nodes.get(id(node))
        if known is None:
            inputs = list(dict.fromkeys(refs_of(node)))
            made = self._sheet((node,), inputs, node.outs, self.program.lowered.values)
            known = self._nodes[id(node)] = (node, made)
        return known[1]

    # -- one segment -----------------------------------------------------------------------------------

    def _sheet(
        self,
        nodes: Sequence[Node],
        inputs: Sequence[str],
        outputs: Sequence[str],
        values: Mapping[str, Placed],
    ) -> Sheet:
        sources: dict[str, int] = {name: ~k for k, name in enumerate(inputs)}
        kept = self.inside(nodes, outputs)
        tasks: list[Task] = []
        for node in nodes:
            used = [sources[name] for name in dict.fromkeys(refs_of(node)) if name in sources]
            if node.op in VIEWS or collective_kind(node) == "slice":
                source = used[0] if used else None
                if source is not None:
                    sources.update(dict.fromkeys(node.outs, source))
                continue
            for work in self.ops.work(node, values, kept):
                after = tuple(sorted({u for u in used if u >= 0}))
                given = tuple(sorted({~u for u in used if u < 0}))
                tasks.append(Task(node.name, node.op.rpartition(".")[0], work, after, given))
                used = [len(tasks) - 1]
            sources.update(dict.fromkeys(node.outs, len(tasks) - 1))
        return Sheet(tuple(tasks), tuple(sources[name] for name in outputs))

    def inside(self, nodes: Sequence[Node], outputs: Sequence[str]) -> frozenset[str]:
        """Values that stay inside fused kernels: made elementwise, and read by elementwise ops alone."""
        if not self.behaviour.fused:
            return frozenset()
        users: dict[str, list[Node]] = {}
        alias: dict[str, str] = {}
        for node in nodes:
            names = [alias.get(n, n) for n in dict.fromkeys(refs_of(node))]
            if node.op in VIEWS:
                alias.update(dict.fromkeys(node.outs, names[0]) if names else {})
                continue
            for name in names:
                users.setdefault(name, []).append(node)
        out = {alias.get(n, n) for n in outputs}
        made = {o: n for n in nodes for o in n.outs}
        inside = {
            name
            for name, node in made.items()
            if node.op in _POINTWISE
            and name not in out
            and users.get(name)
            and all(u.op in _POINTWISE for u in users[name])
        }
        return frozenset(inside | {a for a, root in alias.items() if root in inside})

    def scores(self, segment: str) -> float:
        """Bytes of the scores that unfused attention in a segment keeps for backward."""
        found = 0.0
        made = self.program.lowered.segments[segment]
        values = placed_of(made)
        for node in made.graph.nodes:
            if node.op in attention.RULES and "backward" not in node.op:
                q, k = (self.ops.shape(values[name]) for name in list(refs_of(node))[:2])
                found += kept_scores(q[0] * q[1] * q[2] * k[2], values, node, self.behaviour)
        return found
