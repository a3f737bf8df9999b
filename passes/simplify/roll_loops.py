"""Python loops over the parts of a sequence, which a trace has step by step, as one op each.

Gated delta nets, lightning attention and recurrent layers loop over chunks or positions, so that a trace has
as many copies of the loop's body as there are chunks, forward and backward. Runs of nodes that repeat with a
period, of which every step reads the next slice of the same tensors, become one ``scan`` (`ir.scans`): the
rerolling of unrolled loops of compilers (Stitt and Vahid, DAC 2005; LLVM's loop reroll pass), on graphs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from autoshard.ir import Arg, Graph, Joint, Node, Ref, TensorType, refs_of, substitute
from autoshard.ir.graph import form_of
from autoshard.ir.scans import SCAN, Scan, StepSlice, StepValue
from autoshard.ir.views import ALIASES, RESHAPES, TRANSPOSES, UNIT_DIMS
from autoshard.passes.segment_parts import fresh, without_dead
from autoshard.passes.simplify.decompose import decomposed
from autoshard.passes.simplify.merge_slices import SELECT, STACK, merge_slices
from autoshard.passes.simplify.normalize import IDENTITIES, RANDOM, simplify
from autoshard.rules.body_factors import NoFactorsError, body_factors
from autoshard.rules.core import RuleFn
from autoshard.torch_adapters.random_ops import is_random

#: steps of a loop at least
LEAST = 16
#: ways to cut a run into steps that are tried, those that carry least first
_SHIFTS = 4
_ADD, _SLICE = "aten.add.Tensor", "aten.slice.Tensor"
_VIEWS = RESHAPES | TRANSPOSES | UNIT_DIMS | ALIASES | {SELECT}


def roll_loops(joint: Joint, table: Mapping[str, RuleFn]) -> Joint:
    """The captured model with loops of at least `LEAST` steps as ``scan``; the same where it has none.

    table: the rules of ops, of which the body of a loop has its own.
    """
    bodies = tuple(replace(body, joint=_rolled(body.joint, table)) for body in joint.bodies)
    return replace(_rolled(joint, table), bodies=bodies)


def _rolled(joint: Joint, table: Mapping[str, RuleFn]) -> Joint:
    if not _reads_in_order(joint.graph):
        return joint
    graph = merge_slices(_without_identities(joint.graph), LEAST)
    if not any(_runs(graph)):
        return joint
    graph = _with_reads_where_used(_with_views_where_used(graph))
    tried: set[tuple[str, int]] = set()
    while (rolled := _next(graph, table, tried)) is not None:
        graph = _with_reads_where_used(rolled)
    return replace(joint, graph=graph)


def _reads_in_order(graph: Graph) -> bool:
    """Whether as many slices of one tensor are read as a loop has steps."""
    reads = Counter(n.args[0].name for n in graph.nodes if n.op in (SELECT, _SLICE))
    return any(n >= LEAST for n in reads.values())


def _without_identities(graph: Graph) -> Graph:
    """Without ops that give their argument back, but those that are results."""
    types, same, nodes = graph.types(), dict[str, str](), list[Node]()
    for original in graph.nodes:
        node = substitute(original, lambda name: Ref(same.get(name, name)))
        source = node.args[0].name if node.args and isinstance(node.args[0], Ref) else ""
        plain = node.op in IDENTITIES and source and node.name not in graph.outputs
        if plain and types[source] == node.types[0]:
            same[node.name] = source
        else:
            nodes.append(node)
    return replace(graph, nodes=tuple(nodes))


def _next(graph: Graph, table: Mapping[str, RuleFn], tried: set[tuple[str, int]]) -> Graph | None:
    """With one loop more that is rolled, None if there is none."""
    for run in _runs(graph):
        key = graph.nodes[run.begin].name, run.period
        if key in tried:
            continue
        tried.add(key)
        loop = _Loop.of(graph, run)
        if loop is not None and (result := loop.rolled(table)) is not None:
            return result
    return None


# -- runs of nodes that repeat -----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Run:
    """Nodes ``begin`` to ``end`` (without it), each like the one ``period`` before it."""

    begin: int
    end: int
    period: int

    @property
    def steps(self) -> int:
        return (self.end - self.begin) // self.period


def _runs(graph: Graph) -> Iterator[_Run]:
    """Runs around nodes that read slice after slice of one tensor."""
    types, forms = graph.types(), list[Hashable]()
    reads: dict[tuple[Hashable, ...], list[tuple[int, int]]] = {}
    for k, node in enumerate(graph.nodes):
        if node.op == SELECT:
            source, dim, index = node.args
            entries = reads.setdefault((source.name, dim, node.backward), [])
            index %= types[source.name].shape[dim]
            if not entries or entries[-1][1] != index:
                entries.append((k, index))
    last = -1
    for begin, period in sorted(_even(reads.values())):
        if begin < last:
            continue
        forms = forms or [_form(n) for n in graph.nodes]
        end = begin + period
        while end < len(forms) and forms[end] == forms[end - period]:
            end += 1
        while begin > 0 and forms[begin - 1] == forms[begin - 1 + period]:
            begin -= 1
        computes = any(node.op not in _VIEWS for node in graph.nodes[begin : begin + period])
        if computes and end - begin >= LEAST * period:
            yield _Run(begin, end, period)
            last = end


def _even(reads: Iterable[list[tuple[int, int]]]) -> Iterator[tuple[int, int]]:
    """(first, distance) of reads of slices that follow each other, equally far apart."""
    for entries in reads:
        first = 0
        for k in range(1, len(entries) + 1):
            step = None if k == len(entries) else _distance(entries[k - 1], entries[k])
            if k - first < 2 and step is not None:
                continue
            if step is None or step != _distance(entries[first], entries[first + 1]):
                if k - first >= LEAST:
                    (period, _) = _distance(entries[first], entries[first + 1])
                    yield entries[first][0], period
                first = k - 1 if step is not None else k


def _distance(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    return other[0] - one[0], other[1] - one[1]


def _form(node: Node) -> Hashable:
    """Equal for nodes that differ in what they are given, and in the slice that they read, at most."""
    args = (*node.args[:2], None) if node.op == SELECT else node.args
    return node.op, node.backward, node.types, node.kwargs, form_of(args, lambda _: None)


# -- views of loops ----------------------------------------------------------------------------------------


def _with_views_where_used(graph: Graph) -> Graph:
    """With views in loops made anew by what stands outside of them, which would be handed a copy for every
    step."""
    inside: dict[str, Node] = {}
    home: dict[str, int] = {}
    for number, run in enumerate(_runs(graph)):
        for node in graph.nodes[run.begin : run.end]:
            inside |= dict.fromkeys(node.outs, node)
            home |= dict.fromkeys(node.outs, number)
    taken = set(graph.types())
    nodes: list[Node] = []
    copies: dict[tuple[str, int], str] = {}

    def copied(name: str, at: int) -> str:
        maker = inside.get(name)
        if maker is None or maker.op not in _VIEWS or home[name] == at:
            return name
        if (name, at) not in copies:
            node = substitute(maker, lambda source: Ref(copied(source, at)))
            copies[name, at] = fresh(name, taken, "bw")
            nodes.append(replace(node, outs=(copies[name, at],), backward=current.backward))
        return copies[name, at]

    for current in graph.nodes:
        if current.op == STACK:  # it is made of views as they are
            nodes.append(current)
            continue
        at = home.get(current.name, -1)
        nodes.append(substitute(current, lambda name, at=at: Ref(copied(name, at))))  # type: ignore[misc]
    return without_dead(replace(graph, nodes=tuple(nodes)))


def _with_reads_where_used(graph: Graph) -> Graph:
    """With every slice read before its first use, where the step of a loop has it."""
    waiting: dict[str, Node] = {}
    nodes: list[Node] = []
    for node in graph.nodes:
        for name in refs_of(node):
            if name in waiting:
                nodes.append(replace(waiting.pop(name), backward=node.backward))
        if node.op == SELECT and node.name not in graph.outputs:
            waiting[node.name] = node
        else:
            nodes.append(node)
    return replace(graph, nodes=tuple(nodes))


# -- one loop ----------------------------------------------------------------------------------------------


class _NotALoopError(Exception):
    """Steps are not wired alike."""


@dataclass(frozen=True)
class _Given:
    """What every step of a loop is given at one place: ``kind`` in, carry, same or slice.

    maker: (number of the node in a step, of its output) of what this step or the one before it makes.
    source: the value that is the same, is carried into the first step, or is read in slices.
    """

    kind: str
    maker: tuple[int, int] = (0, 0)
    source: str = ""
    where: StepSlice | None = None


@dataclass
class _Loop:
    """A run cut into steps. begin: the first node. makers: value -> (number of its node, of the output)."""

    graph: Graph
    begin: int
    period: int
    steps: int
    makers: Mapping[str, tuple[int, int]]
    selects: Mapping[str, tuple[str, int, int]]
    given: dict[tuple[int, int], _Given] = field(default_factory=dict)

    @classmethod
    def of(cls, graph: Graph, run: _Run) -> _Loop | None:
        """The loop of a run, cut where the least is carried from step to step; None if it is none."""
        made = {o: (k, m) for k, n in enumerate(graph.nodes) for m, o in enumerate(n.outs)}
        types = graph.types()
        selects = {}
        for node in graph.nodes:
            if node.op == SELECT:
                source, dim, index = node.args
                shape = types[source.name].shape
                selects[node.name] = source.name, dim % len(shape), index % shape[dim]
        shifts = sorted(range(run.period), key=lambda r: (_carried(graph, run, r, made), r))
        for shift in shifts[:_SHIFTS]:
            for first, last in ((0, 0), (1, 0), (0, 1), (1, 1)):
                begin = run.begin + shift + first * run.period
                steps = (run.end - begin) // run.period - last
                if steps < LEAST:
                    continue
                loop = cls(graph, begin, run.period, steps, made, selects)
                try:
                    loop.wire()
                except _NotALoopError:
                    continue
                return loop if any(g.kind == "slice" for g in loop.given.values()) else None
        return None

    def node(self, number: int, step: int) -> Node:
        return self.graph.nodes[self.begin + step * self.period + number]

    @property
    def end(self) -> int:
        return self.begin + self.steps * self.period

    def wire(self) -> None:
        """Tell how every step is given what; raises `_NotALoopError`."""
        for number in range(self.period):
            nodes = [self.node(number, step) for step in range(self.steps)]
            form = _form(nodes[0])
            ragged = any(t is not None and (t.filled or t.ragged) for t in nodes[0].types)
            if ragged or any(_form(node) != form for node in nodes):
                raise _NotALoopError
            names = [list(refs_of(n)) for n in nodes]
            for place in range(len(names[0])):
                self.given[number, place] = self._given([each[place] for each in names], number)
            if nodes[0].op == SELECT:
                self._wire_select(number, nodes)
        carried = {given for given in self.given.values() if given.kind == "carry"}
        numbers = [given.maker[0] for given in carried]
        if len({given.maker for given in carried}) < len(carried):  # a value begins as two
            raise _NotALoopError
        if any(self.given[k, 0].kind == "slice" for k in numbers if self.node(k, 0).op == SELECT):
            raise _NotALoopError

    def _wire_select(self, number: int, nodes: Sequence[Node]) -> None:
        """A ``select`` in a step reads a slice of what is given, or the same one in every step."""
        indices = [n.args[2] for n in nodes]
        if len(set(indices)) == 1:
            return
        given = self.given[number, 0]
        if given.kind != "same":
            raise _NotALoopError
        size = self.graph.types()[given.source].shape[nodes[0].args[1]]
        where = _evenly([i % size for i in indices], nodes[0].args[1], size, self.graph.types()[given.source])
        self.given[number, 0] = _Given("slice", source=given.source, where=where)

    def _place(self, name: str) -> tuple[int, int, int] | None:
        """(step, number of the node in it, of the output), None outside of the loop."""
        at, out = self.makers.get(name, (-1, 0))
        if not self.begin <= at < self.end:
            return None
        step, number = divmod(at - self.begin, self.period)
        return step, number, out

    def _given(self, names: Sequence[str], number: int) -> _Given:
        """How steps are given these values."""
        places = [self._place(name) for name in names]
        second = places[1]
        if second is not None:
            step, at, out = second
            expected = [(k - (1 - step), at, out) for k in range(self.steps)]
            if step == 1 and places == expected:
                return _Given("in", (at, out))
            types = self.graph.types()
            carried = places[0] is None and types[names[0]] == types[names[1]]
            if step == 0 and places[1:] == expected[1:] and carried:
                return _Given("carry", (at, out), names[0])
            raise _NotALoopError
        if any(place is not None for place in places):
            raise _NotALoopError
        if len(set(names)) == 1:
            return _Given("same", source=names[0])
        return self._slices(names)

    def _slices(self, names: Sequence[str]) -> _Given:
        """Values from outside, one for each step: slices of one tensor."""
        reads = [self.selects.get(name) for name in names]
        first = reads[0]
        if first is None or any(r is None or r[:2] != first[:2] for r in reads):
            raise _NotALoopError
        type_ = self.graph.types()[first[0]]
        indices = [r[2] for r in reads if r is not None]
        where = _evenly(indices, first[1], type_.shape[first[1]], type_)
        return _Given("slice", source=first[0], where=where)

    def rolled(self, table: Mapping[str, RuleFn]) -> Graph | None:
        """The graph with one ``scan`` for the loop; None if its body has no factors that may be split."""
        return _Rolling(self).graph(table)


def _carried(graph: Graph, run: _Run, shift: int, made: Mapping[str, tuple[int, int]]) -> int:
    """Bytes that go from one step to the next, if steps begin so many nodes behind the run."""
    begin = run.begin + shift + run.period
    values = {
        name
        for node in graph.nodes[begin + run.period : begin + 2 * run.period]
        for name in refs_of(node)
        if begin <= made.get(name, (-1, 0))[0] < begin + run.period
    }
    return sum(graph.types()[name].nbytes for name in values)


def _evenly(indices: Sequence[int], dim: int, size: int, type_: TensorType) -> StepSlice:
    """Where steps read these slices."""
    dim %= len(type_.shape)
    stride = indices[1] - indices[0]
    if stride == 0 or any(b - a != stride for a, b in pairwise(indices)):
        raise _NotALoopError
    return StepSlice(dim, size, indices[0], stride)


@dataclass
class _Output:
    """What becomes of what a node of a step makes. name: inside the body. full: of the result."""

    name: str
    how: StepValue
    full: str


class _Rolling:
    """Puts one op in the place of a loop."""

    def __init__(self, loop: _Loop) -> None:
        self.loop, self.types = loop, loop.graph.types()
        self.taken = set(self.types)
        #: of the body: name of an input -> (value outside, how it is given)
        self.inputs: dict[str, tuple[str, StepValue]] = {}
        self.known: dict[_Given, str] = {}
        self.nodes = [n for k in range(loop.period) if (n := self._inner(k)) is not None]
        #: value of the loop -> the steps (its number, name outside) whose one is used outside
        self.used = self._used()
        self.carried = {given.maker: name for given, name in self.known.items() if given.kind == "carry"}

    def _inner(self, number: int) -> Node | None:
        """A node of the body; None where a step only reads a slice, which it is given."""
        loop, node = self.loop, self.loop.node(number, 0)
        given = [loop.given[number, place] for place in range(len(list(refs_of(node))))]
        if node.op == SELECT and given[0].kind == "slice":
            return None
        names = iter([self._name(each) for each in given])
        return substitute(node, lambda _: Ref(next(names)))

    def _name(self, given: _Given) -> str:
        """What the body calls a value."""
        if given.kind == "in":
            number, out = given.maker
            node = self.loop.node(number, 0)
            inner = self.loop.given.get((number, 0))
            if node.op == SELECT and inner is not None and inner.kind == "slice":
                return self._name(inner)
            return node.outs[out]
        if given not in self.known:
            name = given.source if given.kind == "same" else fresh(given.source, self.taken, "step")
            how: StepValue = given.where or ("carry" if given.kind == "carry" else "same")
            self.known[given] = name
            self.inputs[name] = given.source, how
        return self.known[given]

    def _used(self) -> dict[tuple[int, int], list[tuple[int, str]]]:
        loop, nodes = self.loop, self.loop.graph.nodes
        outside = [*nodes[: loop.begin], *nodes[loop.end :]]
        names = {r for n in outside for r in refs_of(n)} | set(loop.graph.outputs)
        result: dict[tuple[int, int], list[tuple[int, str]]] = {}
        for step in range(loop.steps):
            for number in range(loop.period):
                for out, name in enumerate(loop.node(number, step).outs):
                    if name in names:
                        result.setdefault((number, out), []).append((step, name))
        return result

    def graph(self, table: Mapping[str, RuleFn]) -> Graph | None:
        """The graph with the op; None where no factor of its body may be split."""
        loop = self.loop
        outputs, after = self._outputs()
        body = self._body(outputs)
        if any(is_random(n.op) or n.op in RANDOM for n in body.nodes):
            return None
        given = tuple(how for _, how in self.inputs.values())
        scan = Scan(loop.steps, body, given, tuple(o.how for o in outputs))
        try:
            factors = body_factors(body, table, scan.carried)
        except NoFactorsError:
            return None
        if all(f in factors.fixed for f in range(len(factors.sizes))):
            return None
        first = loop.node(0, 0)
        refs = [Ref(source) for source, _ in self.inputs.values()]
        outs = tuple(o.full for o in outputs)
        node = Node(SCAN, scan.args(refs), (), outs, scan.result_types(), first.origin, first.backward)
        nodes = loop.graph.nodes
        made = (*nodes[: loop.begin], node, *after, *nodes[loop.end :])
        graph = replace(loop.graph, nodes=made)
        return without_dead(_with_stacks_joined(without_dead(graph)))

    def _body(self, outputs: Sequence[_Output]) -> Graph:
        inputs = tuple((name, self._given_type(*told)) for name, told in self.inputs.items())
        graph = Graph("step", inputs, tuple(self.nodes), tuple(o.name for o in outputs))
        return simplify(decomposed(graph))

    def _given_type(self, source: str, how: StepValue) -> TensorType:
        type_ = self.types[source]
        if not isinstance(how, StepSlice):
            return type_
        return replace(type_, shape=(*type_.shape[: how.dim], *type_.shape[how.dim + 1 :]))

    def _outputs(self) -> tuple[list[_Output], list[Node]]:
        """What the op makes, and the nodes behind it that make what is used of that."""
        loop, last = self.loop, self.loop.steps - 1
        carries, others = list[_Output](), list[_Output]()
        after: list[Node] = []
        for made, name in list(self.carried.items()):
            node, used = loop.node(made[0], 0), self.used.get(made, [])
            end = loop.node(made[0], last).outs[made[1]]
            term = self._summand(made, name) if all(step == last for step, _ in used) else None
            if term is not None:
                total = fresh(end, self.taken, "sum")
                others.append(_Output(term, "sum", total))
                begin = Ref(self.inputs.pop(name)[0])
                self.nodes.remove(next(n for n in self.nodes if node.name in n.outs))
                after.append(replace(loop.node(made[0], last), args=(begin, Ref(total))))
                continue
            carries.append(_Output(node.outs[made[1]], "carry", end))
            rest = [(step, each) for step, each in used if step != last]
            if rest:
                others.append(self._stacked(made, rest, after))
        for made, used in self.used.items():
            if made not in self.carried:
                others.append(self._stacked(made, used, after))
        return [*carries, *others], after

    def _summand(self, made: tuple[int, int], before: str) -> str | None:
        """What every step adds to a value, if that is all that becomes of it."""
        node = next(n for n in self.nodes if self.loop.node(made[0], 0).name in n.outs)
        uses = Counter(r for n in self.nodes for r in refs_of(n))
        plain = node.op == _ADD and len(node.args) == 2 and not node.kwargs and uses[before] == 1
        refs = list(refs_of(node))
        if not plain or len(refs) != 2 or before not in refs or uses[node.name]:
            return None
        (term,) = (r for r in refs if r != before)
        types = {o: t for n in self.nodes for o, t in zip(n.outs, n.types, strict=True)}
        return term if types.get(term) == node.types[0] else None

    def _stacked(self, made: tuple[int, int], used: Sequence[tuple[int, str]], after: list[Node]) -> _Output:
        """The values of all steps as slices of one tensor, of which those are taken that are used."""
        loop = self.loop
        first = loop.node(made[0], 0)
        type_ = first.types[made[1]]
        assert type_ is not None
        where = self._where(used, loop.steps)
        full = fresh(first.outs[made[1]], self.taken, "steps")
        for step, name in used:
            args: tuple[Arg, ...] = (Ref(full), where.dim, where.at(step))
            after.append(Node(SELECT, args, (), (name,), (type_,), first.origin, first.backward))
        inner = first.outs[made[1]]
        if first.op == SELECT and (given := loop.given[made[0], 0]).kind == "slice":
            inner = self._name(given)
        return _Output(inner, where, full)

    def _where(self, used: Sequence[tuple[int, str]], steps: int) -> StepSlice:
        """Where values of steps lie: as the stack that uses them has them, if there is one."""
        names = {name: step for step, name in used}
        for node in self.loop.graph.nodes[self.loop.end :]:
            if node.op == STACK and not names.keys().isdisjoint(refs_of(node)):
                at = {ref.name: k for k, ref in enumerate(node.args[0])}
                order = [at[name] for _, name in used if name in at]
                backwards = len(order) > 1 and order[1] < order[0]
                dim = node.args[1] % len(self._type(node).shape)
                return StepSlice(dim, steps, steps - 1, -1) if backwards else StepSlice(dim, steps)
        return StepSlice(0, steps)

    def _type(self, node: Node) -> TensorType:
        type_ = node.types[0]
        assert type_ is not None
        return type_


def _with_stacks_joined(graph: Graph) -> Graph:
    """With stacks of slices that follow each other in one tensor as that tensor."""
    types, makers, taken = graph.types(), {n.name: n for n in graph.nodes}, set(graph.types())
    nodes: list[Node] = []
    for node in graph.nodes:
        new = _joined(node, makers, types, taken) if node.op == STACK else None
        nodes += [node] if new is None else new
    return replace(graph, nodes=tuple(nodes))


def _joined(
    node: Node, makers: Mapping[str, Node], types: Mapping[str, TensorType], taken: set[str]
) -> list[Node] | None:
    (type_,), (parts, dim) = node.types, node.args
    assert type_ is not None
    dim %= len(type_.shape)
    pieces: list[tuple[str, int, int]] = []
    for ref in parts:
        maker = makers.get(ref.name)
        source, index = ref.name, -1
        if maker is not None and maker.op == SELECT:
            along = len(types[maker.args[0].name].shape)
            if maker.args[1] % along == dim and maker.args[2] >= 0:
                source, index = maker.args[0].name, maker.args[2]
        if index >= 0 and pieces and pieces[-1][0] == source and pieces[-1][2] == index:
            pieces[-1] = source, pieces[-1][1], index + 1
        else:
            pieces.append((source, index, index + 1))
    if 2 * len(pieces) > len(parts):
        return None
    made: list[Node] = []

    def add(op: str, args: tuple[Arg, ...], size: int, *, out: str = "") -> Ref:
        shape = (*type_.shape[:dim], size, *type_.shape[dim + 1 :])
        name = out or fresh(node.name, taken, "of")
        made.append(Node(op, args, (), (name,), (replace(type_, shape=shape),), node.origin, node.backward))
        return Ref(name)

    refs = []
    for source, begin, end in pieces:
        if begin < 0:
            refs.append(add("aten.unsqueeze.default", (Ref(source), dim), 1))
        elif end - begin == types[source].shape[dim]:
            refs.append(Ref(source))
        else:
            refs.append(add("aten.slice.Tensor", (Ref(source), dim, begin, end, 1), end - begin))
    if len(refs) == 1:
        add("aten.reshape.default", (refs[0], type_.shape), type_.shape[dim], out=node.name)
    else:
        add("aten.cat.default", (tuple(refs), dim), type_.shape[dim], out=node.name)
    return made
