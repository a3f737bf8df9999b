"""Follow every value of a program to the term of the model that it is, and check each op on the way.

All ranks of a stage run the same text, so a stage is followed once. Collectives change where a value lies and
not which term it is; everything else must be an op of the model on the terms at hand, on placements that its
rule allows, with the arguments that its localizer gives for them. What backward recomputes is the same
term as in forward. A value that could not be followed is not judged again by what uses it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from autoshard.ir import Call, Node, TensorType, refs_of
from autoshard.ir.boundaries import wires_of
from autoshard.ir.collectives import EXPERT_RELAY, exact_transfer, is_ring, sent_bits, spec_of, transfer_of
from autoshard.ir.lowered import Lowered, LoweredSegment, PlacedValue, StagePart
from autoshard.ir.placement import Layout
from autoshard.ir.slices import Slices
from autoshard.rules.attention import KEYS
from autoshard.rules.quantized_gather import NORMS, WIRED
from autoshard.verify.grouped_keys import is_grouped, written_out
from autoshard.verify.moves import MOVES, broken_moves, moves_of
from autoshard.verify.operators import Lies, OpChecker
from autoshard.verify.quantized_norms import QuantizedRows
from autoshard.verify.result import Finding, ProgramLocation, Rule
from autoshard.verify.rings import broken_levels, on_levels, opened
from autoshard.verify.sequence_slices import Pieces
from autoshard.verify.value_numbering import (
    ADD,
    Pattern,
    TermTable,
    Uses,
    is_sum,
    positional,
    site_of,
    spelled,
)

#: the term of a value that could not be followed
LOST = -1
#: what gives its input back; ranks may copy a gradient so that two parameters do not share it
_COPIES = ("aten.clone.default", "aten.alias.default")
_FUSED = "aten.addmm.default"
#: what stands for a chain of ops (`passes/fuse/fuse_kernels.py`): it has no rule, and its parts are not known
#: here
KERNELS = frozenset(
    (*WIRED, *NORMS, "autoshard.layer_norm_backward.default", "autoshard.rms_norm_backward.default")
)
_PHASES = ("gather", "count", "forward", "backward", "weight", "reduce")


@dataclass(frozen=True, slots=True)
class _Ready:
    """A node of a program, prepared to be followed at every call.

    number: of the node among all prepared. moves: (source, out) of a collective that only moves, else None.
    op, args: as `spelled`. ins, in_layouts, out_layouts, types: of what it takes and makes. parts: the ops
    that a ring, or attention of groups of heads, stands for, in order; None for other nodes, and () where the
    text is broken.
    """

    number: int
    node: Node
    refs: tuple[str, ...]
    moves: tuple[tuple[str, str], ...] | None
    op: str
    args: str
    ins: tuple[TensorType, ...]
    lies: Lies
    site: int
    parts: tuple[_Ready, ...] | None = None


@dataclass
class Followed:
    """What came of it.

    own: stage -> value -> term. calls, nodes, moves: how many were followed; rounded: collectives among them
    that send fewer bits than values have. kernels: ops that stand for chains, which are not followed. judged:
    different questions that were asked of the rules.
    """

    findings: list[Finding] = field(default_factory=list)
    own: dict[int, dict[str, int]] = field(default_factory=dict)
    calls: int = 0
    nodes: int = 0
    moves: int = 0
    rounded: int = 0
    kernels: int = 0
    judged: int = 0


class Walk:
    """One program against the terms of its model."""

    def __init__(
        self,
        lowered: Lowered,
        ports: Collection[str],
        terms: TermTable,
        judge: OpChecker,
        slices: Slices | None = None,
    ) -> None:
        """slices: of a microbatch; equal ones, if nothing is said."""
        self.lowered, self.terms, self.judge = lowered, terms, judge
        slices = slices or Slices.equal(1 + max(p.slice for p in lowered.parts))
        self.pieces = Pieces(terms, judge, slices) if len(slices) > 1 else None
        self.wires = {(w.value, w.target): w.source for w in wires_of(lowered, ports)}
        self.out = Followed(own={p.stage: {} for p in lowered.parts})
        self._numbers = 0
        #: (node, term's pattern) -> what is wrong, None if nothing is
        self._judged: dict[tuple[int, int], tuple[Rule, str] | None] = {}
        self._told: set[tuple[str, int, int, str]] = set()
        self._ready = {name: self._prepared(name, s) for name, s in lowered.segments.items()}

    def run(self) -> Followed:
        for part in sorted(self.lowered.parts, key=_turn):
            self._part(part)
        return self.out

    # -- what is the same for every call -----------------------------------------------------------

    def _prepared(self, name: str, segment: LoweredSegment) -> tuple[_Ready, ...]:
        types = segment.graph.types()
        values = {v: PlacedValue(t, segment.layouts[v]) for v, t in types.items()}
        wires = QuantizedRows.of(segment.graph, values)
        result = []
        for number, node in enumerate(segment.graph.nodes):
            at = ProgramLocation(node.outs[0], segment=name, number=number)
            result.append(self._checked(node, values, at, wires))
        for wire in wires.made.keys() & set(segment.graph.outputs):
            self._tell(
                "collective", f"{name} hands out {wire}", ProgramLocation(wire, segment=name), "it is a wire"
            )
        return tuple(result)

    def _checked(
        self, node: Node, values: Mapping[str, PlacedValue], at: ProgramLocation, wires: QuantizedRows
    ) -> _Ready:
        """A node, ready to be followed; what is wrong with it as a collective is told. wires: around it."""
        if node.kwargs and on_levels(node):
            wrong = broken_levels(node, values, self.judge.mesh)
            if wrong:
                self._tell("collective", f"{_short(node.op)} does not make {at.value}", at, wrong)
            self.out.rounded += any(sent_bits(node))
            node = replace(node, kwargs=())
        ready = self._node(node, values)
        if node.op == EXPERT_RELAY.op:  # its result is that of the message that it sends on
            return replace(ready, moves=((ready.refs[0], node.name),))
        for value, why in wires.broken(node, values, self.judge.mesh):
            self._tell("collective", f"{_short(node.op)} does not make {value}", at, why)
        spec = spec_of(node)
        if spec is not None and spec.packed:
            rows = wires.gather_of_rows(node, values, self.judge.mesh)
            if isinstance(rows, str):
                self._tell("collective", f"{_short(node.op)} does not make {at.value}", at, rows)
            else:
                self._check_move(self._node(*rows), rows[1], at)
            return ready
        grouped = is_grouped(node, values)
        if not (grouped or (is_ring(node) and node.op not in KEYS)):
            self._check_move(ready, values, at)
            return ready
        result = (written_out if grouped else opened)(node, values, self.judge.rules, self.judge.mesh)
        if isinstance(result, str):
            kind: Rule = "arguments" if grouped else "collective"
            self._tell(kind, f"{_short(node.op)} does not make {at.value}", at, result)
            return replace(ready, parts=())
        nodes, inner = result
        parts = tuple(self._node(n, inner) for n in nodes)
        for part in parts:
            self._check_move(part, inner, at)
        return replace(ready, parts=parts)

    def _node(self, node: Node, values: Mapping[str, PlacedValue]) -> _Ready:
        refs = tuple(refs_of(node))
        self._numbers += 1
        outs: tuple[Layout | None, ...] = tuple(
            values[o].layout if t is not None else None for o, t in zip(node.outs, node.types, strict=True)
        )
        moves = None
        if node.op in MOVES:
            moves = tuple((m.source, m.out) for m in moves_of(node) or ())
        return _Ready(
            self._numbers,
            node,
            refs,
            moves,
            *spelled(positional(node)),
            tuple(values[r].type for r in refs),
            (tuple(values[r].layout for r in refs), outs),
            site_of(node),
        )

    def _check_move(self, ready: _Ready, values: Mapping[str, PlacedValue], at: ProgramLocation) -> None:
        if ready.moves is None:
            return
        for rule, value, why in broken_moves(ready.node, values, self.judge.mesh):
            where = ProgramLocation(
                value.partition(".")[0], at.stage, at.phase, at.slice, at.item, at.segment, at.number
            )
            self._tell(rule, f"{_short(ready.op)} does not make {value}", where, why)

    # -- the parts ---------------------------------------------------------------------------------

    def _part(self, part: StagePart) -> None:
        own = self.out.own[part.stage]
        for number in range(part.start, part.stop):
            item = self.lowered.main[number]
            at = ProgramLocation(
                item.outs[0] if item.outs else "", part.stage, part.phase, part.slice, number
            )
            if isinstance(item, Call):
                self._call(item, own, at)
            else:
                self._main_node(item, own, at)

    def _value(self, value: str, at: ProgramLocation) -> int:
        """The term of a value that an instruction of main takes."""
        own = self.out.own[at.stage]
        if value in own:
            return own[value]
        if value in self.terms.ports:
            return self.terms.ports[value]
        source = self.wires.get((value, at.stage))
        if source is None or value not in self.out.own[source]:
            self._tell("function", f"{value} is used before anything makes it", at)
            return LOST
        return self.out.own[source][value]

    def _call(self, call: Call, own: dict[str, int], at: ProgramLocation) -> None:
        self.out.calls += 1
        segment = self.lowered.segments[call.segment]
        graph, values = segment.graph, self.lowered.values
        env: dict[str, int] = {}
        for (inner, type_), value in zip(graph.inputs, call.args, strict=True):
            self._interface(value, inner, PlacedValue(type_, segment.layouts[inner]), values, call, at)
            env[inner] = self._value(value, at)
        for number, ready in enumerate(self._ready[call.segment]):
            self._follow(ready, env, call.site, at, call.segment, number)
        types = graph.types() if call.outs else {}
        for out, inner in zip(call.outs, graph.outputs, strict=True):
            self._interface(out, inner, PlacedValue(types[inner], segment.layouts[inner]), values, call, at)
            own[out] = self._summed(own, out, env[inner])

    def _interface(
        self,
        value: str,
        inner: str,
        wanted: PlacedValue,
        values: Mapping[str, PlacedValue],
        call: Call,
        at: ProgramLocation,
    ) -> None:
        if values[value] != wanted:
            self._tell(
                "interface",
                f"{value} is not what {call.segment} calls {inner}",
                _of(at, value),
                f"{_placed(values[value])} outside, {_placed(wanted)} inside",
            )

    def _main_node(self, node: Node, own: dict[str, int], at: ProgramLocation) -> None:
        values = self.lowered.values
        ready = self._checked(node, values, at, QuantizedRows())
        env = {r: self._value(r, at) for r in ready.refs}
        self._follow(ready, env, 0, at, "", -1)
        own.update({out: self._summed(own, out, env[out]) for out in node.outs})

    def _summed(self, own: Mapping[str, int], value: str, term: int) -> int:
        """The term of a value that this part makes, and slices before it may have added to."""
        if self.pieces is None or value not in own or LOST in (own[value], term):
            return term
        return self.pieces.added(own[value], term)

    # -- one node ----------------------------------------------------------------------------------

    def _follow(
        self, ready: _Ready, env: dict[str, int], site: int, at: ProgramLocation, segment: str, number: int
    ) -> None:
        """Give the outputs of a node their terms."""
        if ready.parts is not None:
            inner = dict(env)
            for part in ready.parts:
                self._follow(part, inner, site, at, segment, number)
            env.update({out: inner.get(out, LOST) for out in ready.node.outs})
            return
        if ready.moves is not None:
            self.out.moves += 1
            self.out.rounded += transfer_of(ready.node) != exact_transfer(ready.node)
            env.update({out: env[source] for source, out in ready.moves})
            # what a broken text leaves out is lost
            env.update({out: LOST for out in ready.node.outs if out not in env})
            return
        self.out.nodes += 1
        if ready.node.op in KERNELS:
            self.out.kernels += 1
            env.update(dict.fromkeys(ready.node.outs, LOST))
            return
        taken = tuple([env[r] for r in ready.refs])
        if LOST in taken:
            env.update(dict.fromkeys(ready.node.outs, LOST))
            return
        uses = (taken, ready.site + site if ready.site >= 0 else -1)
        new = self._match(ready, uses)
        if new is not None:
            env.update(zip(ready.node.outs, new, strict=True))
            return
        env.update(dict.fromkeys(ready.node.outs, LOST))
        rule, what, why = self._why_not(ready, uses)
        # what a ring makes between its ops has no name in the program
        value = ready.node.outs[0].partition(".")[0]
        where = ProgramLocation(value, at.stage, at.phase, at.slice, at.item, segment, number)
        self._tell(rule, what, where, why)

    def _match(self, ready: _Ready, uses: Uses) -> tuple[int, ...] | None:
        """The terms of what a node makes, None if it makes none of the model."""
        for new in self.terms.by_uses.get(uses, ()):
            if self._verdict(ready, new.pattern) is None:
                return new.outs
        if self.pieces is not None:
            fits = partial(self._fits, ready)
            parts = self.pieces.made(positional(ready.node), uses[0], uses[1], fits)
            if parts is not None:
                return parts
        if ready.node.op in _COPIES and len(ready.refs) == 1 and self._copies(ready):
            return uses[0]
        if ready.node.op == _FUSED and len(ready.refs) == 3:
            return self._fused(ready, uses)
        if ready.node.op == ADD:
            return self._sum(ready, uses)
        return None

    def _fits(self, ready: _Ready, pattern: Pattern) -> bool:
        return self._verdict(ready, pattern) is None

    def _verdict(self, ready: _Ready, pattern: Pattern) -> tuple[Rule, str] | None:
        key = (ready.number, pattern.number)
        if key not in self._judged:
            self.out.judged += 1
            self._judged[key] = self._judge(ready, pattern)
        return self._judged[key]

    def _judge(self, ready: _Ready, pattern: Pattern) -> tuple[Rule, str] | None:
        """What keeps a node from being an op of the model: types, placements, or arguments."""
        if pattern.node.types != ready.node.types or pattern.ins != ready.ins:
            return "function", f"the model's {_short(pattern.node.op)} has other types"
        result = self.judge.of(pattern, ready.lies)
        if result.broken is not None:
            return result.broken
        if (result.op, result.args) != (ready.op, ready.args):
            wanted = f"{_short(result.op)}{result.args}"
            return "arguments", f"the model's {_short(pattern.node.op)} is {_plain(wanted)} on these shards"
        return None

    def _copies(self, ready: _Ready) -> bool:
        node = ready.node
        return node.types[0] == ready.ins[0] and ready.lies[0][0] == ready.lies[1][0] and len(node.args) == 1

    def _fused(self, ready: _Ready, uses: Uses) -> tuple[int, ...] | None:
        """The product and the sum that are one call (`passes/fuse/fuse_bias.py`), if it may run like that."""
        result = self._fusion(ready, uses)
        return None if result is None or result[0] is not None else result[1]

    def _fusion(self, ready: _Ready, uses: Uses) -> tuple[tuple[Rule, str] | None, tuple[int, ...]] | None:
        """(what is wrong with it, terms) of a product and a sum in one; None if the model has none such."""
        (bias, a, b), _ = uses
        (bias_lies, a_lies, b_lies), (out,) = ready.lies
        for product, new in self._options((a, b)):
            if product.node.op != "aten.mm.default":
                continue
            for total, sums in self._options((new[0], bias)):
                plain = total.node.op == ADD and not total.node.kwargs
                if not plain or total.node.types != ready.node.types or ready.node.kwargs:
                    continue
                lies: tuple[Lies, Lies] = (((a_lies, b_lies), (out,)), ((out or (), bias_lies), (out,)))
                judged = [self.judge.of(p, lie) for p, lie in zip((product, total), lies, strict=True)]
                return next((j.broken for j in judged if j.broken is not None), None), sums
        return None

    def _options(self, taken: tuple[int, ...]) -> Iterator[tuple[Pattern, tuple[int, ...]]]:
        """(pattern, what it makes) of every op of the model that takes these terms."""
        for new in self.terms.by_uses.get((taken, -1), ()):
            yield new.pattern, new.outs
        if self.pieces is not None:
            yield from self.pieces.options(taken, -1)

    def _sum(self, ready: _Ready, uses: Uses) -> tuple[int, ...] | None:
        """A sum of gradients that the model adds up in another order, or of which a stage has some terms."""
        pattern = self.terms.patterns.of(ready.node, ready.ins)
        if not is_sum(pattern) or self.judge.of(pattern, ready.lies).broken is not None:
            return None
        if any(self.terms.made.get(t) is None for t in uses[0]):
            return None
        return self.terms.make(pattern, uses).outs

    # -- in words ----------------------------------------------------------------------------------

    def _why_not(self, ready: _Ready, uses: Uses) -> tuple[Rule, str, str]:
        op = _short(ready.op)
        fused = self._fusion(ready, uses) if ready.node.op == _FUSED and len(ready.refs) == 3 else None
        if fused is not None and fused[0] is not None:
            return fused[0][0], f"{op} cannot run on these placements", fused[0][1]
        near = self._near(ready, uses)
        judged = [(self._verdict(ready, pattern), pattern) for pattern in near]
        same = [v for v, p in judged if v is not None and v[0] != "function" and _alike(ready, p)]
        if same:
            rule, why = same[0]
            wrong = "has wrong arguments" if rule == "arguments" else "cannot run on these placements"
            return rule, f"{op} {wrong}", why
        if near:
            ops = ", ".join(dict.fromkeys(_short(p.node.op) for p in near))
            what = f"the model computes no such {op} of these values"
            return "function", what, f"it computes {ops} of them"
        return "function", f"the model computes nothing of what {op} takes here", self._expected(ready, uses)

    def _near(self, ready: _Ready, uses: Uses) -> list[Pattern]:
        """The ops that the model does on these terms, or on what they are parts of."""
        result = [new.pattern for new in self.terms.by_uses.get(uses, ())]
        if self.pieces is not None:
            result += self.pieces.near(positional(ready.node), *uses)
        return result

    def _expected(self, ready: _Ready, uses: Uses) -> str:
        """What the model takes in place of it, where all but one input are as in the model."""
        for (taken, site), new in self.terms.by_uses.items():
            if len(taken) != len(uses[0]) or not any(_alike(ready, m.pattern) for m in new):
                continue
            differ = [k for k, (a, b) in enumerate(zip(taken, uses[0], strict=True)) if a != b]
            if len(differ) == 1 and len(taken) > 1 and site == uses[1]:
                return f"with its other inputs, the model takes something else than {ready.refs[differ[0]]}"
        return ""

    def _tell(self, rule: Rule, what: str, at: ProgramLocation, why: str = "") -> None:
        """Once per place in the text: a segment may be called many times."""
        key = (at.segment, at.number, -1 if at.number >= 0 else at.item, at.value)
        if key not in self._told:
            self._told.add(key)
            self.out.findings.append(Finding(rule, what, at, why))


def _turn(part: StagePart) -> tuple[int, int, int]:
    """The order in which what a part takes has been made: forward goes up the stages, backward down."""
    up = part.phase in ("gather", "count", "forward", "reduce")
    return (
        _PHASES.index(part.phase),
        part.slice if part.phase == "forward" else -part.slice,
        part.stage if up else -part.stage,
    )


def _alike(ready: _Ready, pattern: Pattern) -> bool:
    """Whether a node looks like an op of the model: the same, or what a rank calls in place of it."""
    name = pattern.node.op.split(".")[1]
    return name in ready.op.split(".")[1] or ready.op.split(".")[1] in name


def _of(at: ProgramLocation, value: str) -> ProgramLocation:
    return ProgramLocation(value, at.stage, at.phase, at.slice, at.item)


def _placed(placed: PlacedValue) -> str:
    return f"{placed.type} {' '.join(map(str, placed.layout))}"


def _short(op: str) -> str:
    namespace, name, overload = op.split(".")
    head = name if namespace == "aten" else f"{namespace}.{name}"
    return head if overload == "default" else f"{head}.{overload}"


def _plain(text: str) -> str:
    """The text without the names of our classes."""
    return text.replace("Ref(name='", "#").replace("')", "")
