"""Which values of a program are divided where every microbatch is worked on in slices of its sequence.

The slices are the shards of an axis whose ranks run one after the other on the same device. So the rules
that place values on the axes of a mesh (`autoshard/rules/`) place them here, too: what is `Shard` exists
once per slice, what is `Replicate` is made once, of what is `Partial` every slice has a term. What only
depends on the inputs of the model (positions, masks, labels) is made whole and cut where it is used.

Slice c of forward may use what slices 0 to c have made. Of all ops, causal attention alone looks at other
positions than its own (Li et al., "TeraPipe", ICML 2021, section 3.2).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autoshard.errors import UsageError
from autoshard.ir import Joint, Port, TensorType
from autoshard.ir.collectives import is_collective
from autoshard.ir.placement import P, Partial, Placement, R, Shard
from autoshard.ir.statements import Statement, Statements
from autoshard.passes.simplify.causal_masks import CausalMasks
from autoshard.rules.core import Factored, RuleFn
from autoshard.rules.states import digit_of, split_state

ATTENTION = "autoshard.sdpa.default"
ATTENTION_BACKWARD = "autoshard.sdpa_backward.default"
#: the sequence of queries, keys and values
POSITIONS = Shard(2)


@dataclass(frozen=True)
class SlicedStatement:
    """How a statement runs. inputs, outputs: placements of what it uses and makes.

    divided: once per slice; else once, with the last slice of its half if it is late.
    """

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement | None, ...]
    divided: bool
    late: bool = False


@dataclass(frozen=True)
class Places:
    """of: value -> its placement, `Replicate` if it is not there. ways: of all statements, in order."""

    of: Mapping[str, Placement]
    ways: tuple[SlicedStatement, ...]


def places_of(whole: Statements, joint: Joint, rules: Mapping[str, RuleFn], slices: int) -> Places:
    """Place all values of a program on the axis of slices.

    slices: equal parts of the sequence.

    Raises UsageError, naming the op and the user's line, if there are not as many, if the sequence is divided
    in a zigzag or within attention already, or if an op of forward needs positions behind its own slice.
    """
    for statement in whole.all:
        layouts = (whole.values[v].layout for v in statement.makes if v in whole.values)
        shards = [p for layout in layouts for p in layout if isinstance(p, Shard)]
        attends = statement.node.op in (ATTENTION, ATTENTION_BACKWARD)
        if any(p.outer < 0 or (attends and p.dim == POSITIONS.dim) for p in shards):
            raise UsageError(
                "a sequence that an axis divides in a zigzag, or within attention, has no slices",
                where=statement.node.origin.source or statement.node.op,
                hint="use a schedule without slices, 1f1b for instance, or another axis than cp",
            )
    finder = _Finder(whole, joint, rules, slices)
    ways = tuple(finder.way(statement) for statement in whole.all)
    finder.check_results()
    return Places(finder.of, ways)


def sequence_ports(joint: Joint, slices: int) -> tuple[Port, ...]:
    """The inputs that have one element or row per position: [batch, sequence, ...].

    Raises UsageError if there are none, or the sequence has no ``slices`` equal parts.
    """
    inputs = [p for p in joint.ports if p.kind == "input" and len(p.type.shape) > 1]
    tokens = [p for p in inputs if p.target in joint.batch_inputs and not p.type.is_float]
    wide = [p for p in inputs if p.target in joint.batch_inputs and len(p.type.shape) == 3]
    lengths = [p.type.shape[1] for p in (*tokens, *wide)]
    if not lengths:
        raise UsageError(
            "no input of the model has a sequence to divide into slices",
            why="token numbers [batch, sequence] or vectors [batch, sequence, width] were looked for",
            hint="use a schedule without slices, 1f1b for instance",
        )
    if lengths[0] % slices:
        raise UsageError(
            f"a sequence of {lengths[0]} positions has no {slices} equal slices",
            hint="choose a number of slices that divides the sequence",
        )
    return tuple(p for p in inputs if p.type.shape[1] == lengths[0])


class _Finder:
    """Places values in the order in which they are made.

    labels: values of the inputs alone, which are whole, but say where the sequence is. late: full values
    that are there with the last slice of their half only -> whether that is backward. cause: of those, the op
    that needed all slices.
    """

    def __init__(self, whole: Statements, joint: Joint, rules: Mapping[str, RuleFn], slices: int) -> None:
        self.whole, self.joint, self.rules, self.slices = whole, joint, rules, slices
        self.masks = CausalMasks(whole, slices)
        self.of: dict[str, Placement] = {}
        self.free = {p.name for p in joint.ports if p.kind in ("input", "const", "buffer")}
        self.labels: dict[str, Placement] = {p.name: Shard(1) for p in sequence_ports(joint, slices)}
        self.late: dict[str, bool] = {}
        self.cause: dict[str, Statement] = {}
        self.forward = {v for s in whole.all if not s.backward for v in s.makes}
        #: of nodes, which layers share: their rules, and ways in which an input lies so
        self._rules: dict[int, Factored | None] = {}
        self._ways: dict[tuple[int, int, Shard], SlicedStatement | None] = {}

    def _type(self, value: str) -> TensorType:
        return self.whole.values[value].type

    def way(self, statement: Statement) -> SlicedStatement:
        """Place what a statement makes, by what it uses."""
        way = self._way(statement)
        for value, placed in zip(statement.makes, way.outputs, strict=True):
            if isinstance(placed, Shard | Partial):
                self.of[value] = placed
            elif way.late:
                self.late[value] = statement.backward
                self.cause[value] = self._cause(statement)
        return way

    def _cause(self, statement: Statement) -> Statement:
        """The op that made a late value so, by the values it uses."""
        return next((self.cause[v] for v in statement.uses if v in self.cause), statement)

    def _way(self, statement: Statement) -> SlicedStatement:
        uses = statement.uses
        have = [self._at(v, statement) for v in uses]
        if all(v in self.free for v in uses):
            self.free.update(statement.makes)
            self._label(statement)
            return self._whole(statement)
        if is_collective(statement.node):
            return self._moved(statement, have)
        divided = [k for k, p in enumerate(have) if isinstance(p, Shard)]
        if statement.node.op in (ATTENTION, ATTENTION_BACKWARD) and len(divided) > 1:
            return self._attention(statement, have)
        labelled = [] if divided else [k for k, v in enumerate(uses) if v in self.labels]
        for k in (*divided, *labelled):
            placed = have[k] if divided else self.labels[uses[k]]
            assert isinstance(placed, Shard)
            way = self._split(statement, k, placed)
            if way is not None and self._fits(statement, have, way):
                return way
        if divided and statement.backward:
            raise self._refused(statement)
        if divided:
            # an op of the loss, say: products behind it would wait for all slices, and are refused
            return self._whole(statement, late=True)
        return self._summed(statement, have) or self._whole(statement)

    def _at(self, value: str, statement: Statement) -> Placement:
        """Where a value lies for a statement: going back, sums over the slices of forward are there."""
        placed = self.of.get(value, R)
        return R if placed == P and statement.backward and value in self.forward else placed

    def _whole(self, statement: Statement, *, late: bool = False) -> SlicedStatement:
        """Run once, on full values; late: with the last slice in any case.

        Raises UsageError for a product in forward that would have to wait for the last slice.
        """
        full: tuple[Placement | None, ...] = tuple(None if t is None else R for t in statement.node.types)
        late = late or any(
            self._at(v, statement) == P or self.late.get(v) == statement.backward for v in statement.uses
        )
        rule = self._rule(statement) if late and not statement.backward else None
        if rule is not None and rule.kind == "matmul":
            raise self._refused(self._cause(statement))
        return SlicedStatement((R,) * len(statement.uses), full, False, late)

    def _moved(self, statement: Statement, have: Sequence[Placement]) -> SlicedStatement:
        """A collective over another axis: of every slice, or of what is whole."""
        (placed,) = have
        if placed == R or (placed == P and statement.node.kwarg("op", "sum") != "sum"):
            return self._whole(statement)
        return SlicedStatement((placed,), (placed,), True)

    def _summed(self, statement: Statement, have: Sequence[Placement]) -> SlicedStatement | None:
        """An op that is linear in terms that are to be added up: it runs on each of them."""
        rule = self._rule(statement)
        terms = {k for k, p in enumerate(have) if p == P}
        if rule is None or not terms or terms not in [set(group) for group in rule.linear]:
            return None
        if any(self.late.get(v) == statement.backward for v in statement.uses):
            return None
        sums: tuple[Placement | None, ...] = tuple(None if t is None else P for t in statement.node.types)
        return SlicedStatement(tuple(have), sums, True)

    def _rule(self, statement: Statement) -> Factored | None:
        fn, key = self.rules.get(statement.node.op), id(statement.node)
        if key not in self._rules:
            types = [self._type(v) for v in statement.uses]
            self._rules[key] = None if fn is None else fn(statement.node, types)
        return self._rules[key]

    def _split(self, statement: Statement, number: int, placed: Shard) -> SlicedStatement | None:
        """The way in which an input lies like this, if the rule of the op has one."""
        key = (id(statement.node), number, placed)
        if key not in self._ways:
            self._ways[key] = self._split_anew(statement, number, placed)
        return self._ways[key]

    def _split_anew(self, statement: Statement, number: int, placed: Shard) -> SlicedStatement | None:
        rule = self._rule(statement)
        if rule is None:
            return None
        result = digit_of(rule.inputs[number], rule.sizes, placed, self.slices)
        if result is None:
            return None
        factor, digit = result
        if factor not in rule.shardable() or (factor in rule.contiguous and digit[0] > 1):
            return None
        ins = [self._type(v) for v in statement.uses]
        state = split_state(rule, ins, statement.node.types, factor, digit, self.slices)
        if state is None or state.inputs[number] != placed:
            return None
        if any(isinstance(p, Partial) and p != P for p in state.outputs):
            return None
        return SlicedStatement(state.inputs, state.outputs, True)

    def _fits(self, statement: Statement, have: Sequence[Placement], way: SlicedStatement) -> bool:
        """Whether what is there can be had as wanted: full values can be cut, nothing else be joined."""
        for value, placed, wanted in zip(statement.uses, have, way.inputs, strict=True):
            if placed != wanted and placed != R:
                return False
            if placed == R and self.late.get(value) == statement.backward:
                return False
        return True

    def _attention(self, statement: Statement, have: Sequence[Placement]) -> SlicedStatement:
        node = statement.node
        backward = node.op == ATTENTION_BACKWARD
        mask, causal = (node.args[6:8]) if backward else (node.args[3:5])
        if any(p not in (POSITIONS, R) for p in have):
            raise self._refused(statement, "it mixes positions in an unknown way")
        if mask is None and not causal:
            raise self._refused(statement, "every position looks at all others")
        if mask is not None and not causal and not self._hides(statement.uses[-1]):
            raise self._refused(statement, "its mask may let positions look at others behind their slice")
        inputs: list[Placement] = [POSITIONS] * len(have)
        if mask is not None:
            inputs[-1] = R
        way = SlicedStatement(tuple(inputs), (POSITIONS,) * len(node.outs), True)
        if not self._fits(statement, have, way):
            raise self._refused(statement)
        return way

    def _hides(self, mask: str) -> bool:
        """Whether a mask, made of the inputs alone, hides what is behind a position's slice."""
        return mask in self.free and self.masks.hides_later_slices(mask)

    def _label(self, statement: Statement) -> None:
        """Where the sequence is in values that are made of inputs alone."""
        for number, value in enumerate(statement.uses):
            placed = self.labels.get(value)
            way = self._split(statement, number, placed) if isinstance(placed, Shard) else None
            if way is not None:
                new = zip(statement.makes, way.outputs, strict=True)
                self.labels.update((v, p) for v, p in new if isinstance(p, Shard))
                return

    def check_results(self) -> None:
        """Buffers that forward updates would be updated once per slice."""
        for result in self.joint.results:
            if result.kind == "buffer":
                raise UsageError(
                    f"buffer {result.target} is updated in forward",
                    why="a microbatch that is divided along its sequence would update it once per slice",
                    hint="use a schedule without slices, 1f1b for instance",
                )

    def _refused(self, statement: Statement, why: str = "it needs the whole sequence") -> UsageError:
        node = statement.node
        where = " ".join(x for x in (node.origin.source, node.origin.fqn) if x)
        half = "the backward of " if statement.backward else ""
        return UsageError(
            f"{half}{node.op} cannot be divided into slices of the sequence",
            where=where,
            why=f"{why}; slice c of a microbatch may only use positions of slices 0 to c",
            hint="use a schedule without slices, 1f1b for instance",
        )
