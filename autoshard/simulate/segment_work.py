"""A program as work: every op on the shapes of one rank, once per segment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from autoshard.cluster.mesh import Mesh
from autoshard.ir import DTYPES, Call, Node, refs_of
from autoshard.ir.collectives import exact_transfer, goes_in_turn
from autoshard.ir.lowered import PlacedValue
from autoshard.ir.views import VIEWS
from autoshard.program.program import Program
from autoshard.rules import attention
from autoshard.rules.chains import NOT_FUSED, FusedKernels
from autoshard.rules.stops import stops_of
from autoshard.simulate.behaviour import Behaviour
from autoshard.simulate.framework_saved import Keeping
from autoshard.simulate.op_work import NARROWED, Ops, kept_scores
from autoshard.simulate.segment_cache import OfSegments
from autoshard.simulate.work import CollectiveWork, HostWork, OpTask, Sheet, Transfer


class Sheets:
    """The sheets of a program for one rank of a stage (default: the fullest).

    Where chains of elementwise ops are one kernel each, what only ops of a chain read is neither written nor
    read. known: of other programs placed alike.
    """

    def __init__(
        self, program: Program, behaviour: Behaviour, rank: int = 0, known: OfSegments | None = None
    ) -> None:
        self.program, self.behaviour = program, behaviour
        self.known = known or OfSegments()
        mesh = Mesh.parse(program.mesh)
        self.ops = Ops(mesh, mesh.coords(rank), behaviour)
        # a loss may keep other bytes than the program where nothing else does
        as_said = behaviour.keeps == "program" and behaviour.loss_kept is None
        self.keeping = None if as_said else Keeping(program, behaviour.keeps)
        self._known: dict[str, Sheet] = {}
        self._nodes: dict[int, tuple[Node, Sheet]] = {}

    def of(self, segment: str) -> Sheet:
        """The sheet of a segment."""
        result = self._known.get(segment)
        if result is None:
            new = self.program.lowered.segments[segment]
            dropped, weights = self.dropped(segment), self._weights(segment)

            def make() -> Sheet:
                inputs = [n for n, _ in new.graph.inputs]
                graph = new.graph
                return self._sheet(graph.nodes, inputs, graph.outputs, new.placed(), dropped, weights)

            result = self._known[segment] = self.known.of("sheet", new, (dropped, weights), make)
        return result

    def _weights(self, segment: str) -> frozenset[str]:
        """Values of a segment that are parameters, gathered or looked at in another way."""
        if self.behaviour.narrow_weights:
            return frozenset()
        lowered = self.program.lowered
        new = lowered.segments[segment].graph
        full = {
            v for p in lowered.parts if p.phase in ("gather", "count") for i in lowered.of(p) for v in i.outs
        }
        ports = full | {p.name for p in self.program.signature.ports if p.kind == "param"}
        call = next(i for i in lowered.main if isinstance(i, Call) and i.segment == segment)
        result = {n for (n, _), arg in zip(new.inputs, call.args, strict=True) if arg in ports}
        for node in new.nodes:
            if (node.op in VIEWS or exact_transfer(node) == "all_gather") and result.issuperset(
                refs_of(node)
            ):
                result.update(node.outs)
        return frozenset(result)

    def dropped(self, segment: str) -> frozenset[str]:
        """Values that a segment hands to backward in the program, or takes there, and kernels do not."""
        return frozenset() if self.keeping is None else self.keeping.dropped.get(segment, frozenset())

    def of_node(self, node: Node) -> Sheet:
        """The sheet of an instruction of main, whose arguments are what it uses, in order."""
        known = self._nodes.get(id(node))
        if known is None:
            inputs = list(dict.fromkeys(refs_of(node)))
            new = self._sheet((node,), inputs, node.outs, self.program.lowered.values)
            known = self._nodes[id(node)] = (node, new)
        return known[1]

    # -- one segment -----------------------------------------------------------------------------------

    def _sheet(
        self,
        nodes: Sequence[Node],
        inputs: Sequence[str],
        outputs: Sequence[str],
        values: Mapping[str, PlacedValue],
        dropped: frozenset[str] = frozenset(),
        weights: frozenset[str] = frozenset(),
    ) -> Sheet:
        sources: dict[str, int] = {name: ~k for k, name in enumerate(inputs)}
        fused, narrow = self.fused(nodes, outputs, dropped), self.narrow(nodes)
        tasks: list[OpTask] = []
        views: dict[int, int] = {}  # of every task
        stops, at = dict[int, int](), frozenset(stops_of(nodes))
        for number, node in enumerate(nodes):
            if number in at:
                stops[len(tasks)] = stops.get(len(tasks), 0) + 1
            used = [sources[name] for name in dict.fromkeys(refs_of(node)) if name in sources]
            beats = self.ops.in_order(node, values, fused.of_node(node), weights, narrow)
            if node.op in VIEWS or (not beats and exact_transfer(node) == "slice"):
                source = used[0] if used else None
                if source is not None:
                    sources.update(dict.fromkeys(node.outs, source))
                views[len(tasks)] = views.get(len(tasks), 0) + 1
                continue
            outside, first = used, len(tasks)
            for beat in beats:
                used = [first + k for k in beat.after] or outside
                after = tuple(sorted({u for u in used if u >= 0}))
                given = tuple(sorted({~u for u in used if u < 0}))
                op, turn = node.op.rpartition(".")[0], goes_in_turn(node)
                tasks.append(OpTask(node.name, op, beat.work, after, given, turn=turn))
            sources.update(dict.fromkeys(node.outs, len(tasks) - 1))
        outs = tuple(sources[name] for name in outputs)
        return Sheet(_with_views(tasks, views), outs, tuple(stops.get(k, 0) for k in range(len(tasks) + 1)))

    def fused(
        self, nodes: Sequence[Node], outputs: Sequence[str], dropped: frozenset[str] = frozenset()
    ) -> FusedKernels:
        """The fused kernels of ops; none where every op is a kernel."""
        return FusedKernels.of(nodes, outputs, dropped) if self.behaviour.fused else NOT_FUSED

    def narrow(self, nodes: Sequence[Node]) -> frozenset[str]:
        """Values that are gathered as narrow copies, as only products of narrow factors take them, and what
        looks at them in another way."""
        if not (self.behaviour.narrow_gathers and self.behaviour.product_dtype):
            return frozenset()
        source: dict[str, str] = {}  # of gathered values and views of them
        users: dict[str, set[str]] = {}
        for node in nodes:
            taken = [source[name] for name in dict.fromkeys(refs_of(node)) if name in source]
            if node.op in VIEWS:
                source.update(dict.fromkeys(node.outs, taken[0]) if taken else {})
                continue
            for name in taken:
                users.setdefault(name, set()).add(node.op)
            if exact_transfer(node) == "all_gather":
                source.update((name, name) for name in node.outs)
        return frozenset(n for n, first in source.items() if users.get(first, {""}) <= NARROWED)

    def masks(self, segment: str) -> float:
        """Bytes of the masks of hidden dropout in a forward segment, a byte per element.

        Dropout stands before every sum of two activations that a segment hands on or normalizes: after
        attention, after the feed-forward layer, and after the embeddings (Korthikanti et al., 2022, section
        4.1: 2 s b h of a layer's bytes).
        """
        if not self.behaviour.dropout:
            return 0.0
        new = self.program.lowered.segments[segment]
        values = new.placed()
        result = 0.0
        for node in new.graph.nodes:
            out = values.get(node.name)
            refs = list(refs_of(node))
            if node.op != "aten.add.Tensor" or len(refs) < 2 or out is None or not out.type.is_float:
                continue
            if all(len(values[r].type.shape) == len(out.type.shape) for r in refs):
                result += self.ops.nbytes(out) / DTYPES[out.type.dtype][1]
        return result

    def scores(self, segment: str) -> float:
        """Bytes of the scores that unfused attention in a segment keeps for backward."""
        result = 0.0
        new = self.program.lowered.segments[segment]
        values = new.placed()
        for node in new.graph.nodes:
            if node.op in attention.RULES and "backward" not in node.op:
                q, k = (self.ops.shape(values[name]) for name in list(refs_of(node))[:2])
                result += kept_scores(q[0] * q[1] * q[2] * k[2], values, node, self.behaviour)
        return result


def _with_views(tasks: Sequence[OpTask], before: Mapping[int, int]) -> tuple[OpTask, ...]:
    """Tasks with the views that are issued before each of them; those before a message, or after all, go to
    another that computes. before: number of a task, or one beyond the last -> views."""
    computing = [
        k for k, task in enumerate(tasks) if not isinstance(task.work, CollectiveWork | HostWork | Transfer)
    ]
    result: dict[int, int] = {}
    for k, count in before.items():
        if computing:
            at = next((c for c in computing if c >= k), computing[-1])
            result[at] = result.get(at, 0) + count
    return tuple(replace(task, views=result[k]) if k in result else task for k, task in enumerate(tasks))
