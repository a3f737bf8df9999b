"""A folded model on a mesh as a pairwise cost network.

Every variable's states are priced alone (compute time, bytes held), every use of a value is an edge
priced by the cheapest reshard between what is produced and what is wanted. Repeated layers share
their variables: costs count as often as the segment is called, so depth costs nothing.

A value with several uses gets a variable of its own: one reshard serves them all, and a replicated
copy also serves a use that wants a shard, since slicing is free.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from math import prod

import numpy as np

from autoshard.cluster.axes import AxisMeaning
from autoshard.errors import UsageError
from autoshard.ir import TensorType
from autoshard.ir.flow import Place, PortClass
from autoshard.ir.placement import Layout, Partial, Placement, R, Shard, layout_ok, shard_of_digit
from autoshard.rules.attention import repeats_of
from autoshard.rules.chains import InKernel
from autoshard.rules.core import Factored
from autoshard.rules.states import OpState, op_states
from autoshard.search.problem.cost_entries import (
    BatchPricing,
    Busy,
    CallGroup,
    Circulating,
    Entry,
    Exchanged,
    Fixed,
    Joined,
    Laid,
    LayoutChange,
    Recomputed,
    ValueBytes,
)
from autoshard.search.problem.cost_terms import Bytes, Time
from autoshard.search.problem.decisions import NodeVar, ParamVar, PortVar, ResultVar, ValueVar, Variable
from autoshard.search.problem.exposed_collectives import reduce_chains
from autoshard.search.problem.merge_entries import merged
from autoshard.search.problem.op_classes import batch_dims
from autoshard.search.problem.param_buckets import Shares
from autoshard.search.problem.param_strategies import SENT, ParamStrategies, strategies_of
from autoshard.search.problem.problem import MORE, Blueprint, Model, Problem, batch_of
from autoshard.search.problem.problem_prices import Prices
from autoshard.search.problem.search_axes import SearchAxes
from autoshard.solver.solution_cache import SolutionCache


def build_problem(
    model: Model,
    axes: SearchAxes,
    prices: Prices,
    *,
    strict: bool = True,
    loose: frozenset[object] = frozenset(),
    stored: Mapping[str, Layout] | None = None,
    waves: bool = False,
) -> Problem:
    """The decisions about a model on a mesh.

    strict: work must be divided over an axis where its meaning says so (the batch over dp and fsdp,
    products inside layers over tp); otherwise that is left to the costs. loose: keys of parameters and ops
    (as in `Problem.index`) to which that does not apply. stored: layouts that parameters have already.
    waves: see `CostModel.op_seconds`.
    """
    return _Builder(model, axes, prices, strict, loose, stored or {}, waves).build()


class _Builder:
    def __init__(
        self,
        model: Model,
        axes: SearchAxes,
        prices: Prices,
        strict: bool,
        loose: frozenset[object],
        stored: Mapping[str, Layout],
        waves: bool,
    ) -> None:
        self.stored, self.waves = stored, waves
        self.model, self.axes, self.prices, self.strict, self.loose = model, axes, prices, strict, loose
        self.sizes, self.meanings, self.cost = axes.sizes, axes.meanings, prices.ops
        self.variables: list[Variable] = []
        self.entries: list[Entry] = []
        self.splits = tuple((m.allows(False), m.allows(True), m.divides_sequence) for m in axes.meanings)
        self.index: dict[object, int] = {}
        self.others: dict[int, list[NodeVar | ValueVar]] = {}
        self.counts = model.folded.counts()
        self.backward = model.folded.is_backward()
        self.types = {name: g.types() for name, g in model.folded.segments.items()}
        self.producer: dict[Place, tuple[int, int]] = {}
        #: the op that makes a value, and which of its values that is
        self.makers: dict[Place, tuple[int, int]] = {}
        #: layouts of values in the states of variables, once for all that are alike
        self.laid: dict[object, Laid] = {}
        #: reshards and calls that many edges and calls share
        self.ways: dict[tuple[TensorType, bool, Laid, Laid, bool, bool], LayoutChange] = {}
        self.calls: dict[object, CallGroup] = {}
        self.growing: dict[Place, bool] = {}
        self.strategies: dict[object, ParamStrategies] = {}
        self.scalable = not model.kinds.twice
        #: of exchanges: one chunk waits, others travel beside products, as far as the device overlaps these
        self.exposed = 1 - (1 - 1 / model.expert_chunks) * self.cost.device.overlap
        labelled = {c.segment for c in model.folded.calls if c.label}
        self.layers = labelled or set(model.folded.segments)
        self.kept = model.kept
        self.kinds, self.users = model.kinds.ops, model.kinds.users

    # -- variables ---------------------------------------------------------------------------------

    def build(self) -> Problem:
        self._check_batch()
        for name in self.model.folded.segments:
            self._nodes(name)
        for name in self.model.folded.segments:
            self._values(name)
        for group in self.model.flow.classes.values():
            self._port(group)
        for number, (place, kind, _) in enumerate(self.model.flow.results):
            if kind != "grad":
                self._result(number, place)
        for name in self.model.folded.segments:
            self._edges_inside(name)
        self._edges_between()
        for key, place, count in self.kept.bytes:
            if place in self.producer:
                self._hold(key, place, count)
        blueprint = Blueprint(
            tuple(len(v.states) for v in self.variables),
            tuple(merged(self.entries) if self.others else self.entries),
            BatchPricing(self.cost, self.sizes, waves=self.waves),
            self._batch() if self.scalable else 0,
        )
        choices, cache = sum(blueprint.states), SolutionCache(self.model.orders)
        return Problem(
            self.axes,
            blueprint.terms(),
            tuple(self.variables),
            self.index,
            choices,
            cache,
            blueprint,
            others=self.others,
        )

    def _batch(self) -> int:
        """Sequences of the model if more of them leave all decisions as they are, or else 0."""
        free = any(m.is_free and size > 1 for size, m in zip(self.sizes, self.meanings, strict=True))
        ways = prod(size for size, m in zip(self.sizes, self.meanings, strict=True) if m.splits_batch)
        batch = batch_of(self.model.folded)
        # what is inside a single sequence may be split as if it were the batch
        return 0 if free or batch < 2 * ways else batch

    def _grows(self, place: Place, type_: TensorType) -> bool:
        """Whether a value holds the batch, and so grows with it."""
        grows = self.growing.get(place)
        if grows is None:
            dims = self.model.kinds.dims.get(place)
            dims = batch_dims(self.model.digits, place, type_) if dims is None else dims
            self.scalable &= dims < 2
            grows = self.growing[place] = dims > 0
        return grows

    def _check_batch(self) -> None:
        ways = 1
        for size, meaning in zip(self.sizes, self.meanings, strict=True):
            ways *= size if meaning.splits_batch else 1
        if ways == 1:
            return
        ports = [p for p in self.model.folded.joint.ports if p.kind == "input"]
        batch = [p for p in ports if p.target in self.model.folded.joint.batch_inputs]
        if not batch:
            raise UsageError(
                "no input has a batch dim to shard",
                why="the mesh has an axis that shards the batch, and no input has a common dim 0",
                hint="use an axis with another meaning, for instance tp",
            )
        for port in batch:
            layout = self._batch_layout()
            if not layout_ok(port.type.shape, layout, self.sizes):
                raise UsageError(
                    f"a batch of {port.type.shape[0]} is too small for {ways} batch shards",
                    where=f"input {self._input_name(port.target)} {port.type}",
                    why="every rank of the axes that shard the batch needs at least one sequence",
                    hint=f"give a batch that is a multiple of {ways}, or a mesh that shards the batch less",
                )

    def _batch_layout(self) -> Layout:
        return tuple(
            Shard(0) if meaning.splits_batch and size > 1 else R
            for size, meaning in zip(self.sizes, self.meanings, strict=True)
        )

    def _input_name(self, target: str) -> str:
        return self.model.folded.joint.input_names[int(target)] if target.isdigit() else target

    def _add(self, key: object, variable: Variable) -> int:
        number = len(self.variables)
        self.variables.append(variable)
        self.index[key] = number
        return number

    def _add_node(self, name: str, number: int, states: tuple[OpState, ...]) -> int:
        """The variable of an op: that of one which it may decide with, if that has the very same states."""
        variable = NodeVar(name, number, states)
        first = self.model.alike.ops.get((name, number))
        number_of_first = None if first is None else self.index.get(("node", *first))
        if number_of_first is None or self.variables[number_of_first].states != states:
            return self._add(("node", name, number), variable)
        return self._join(("node", name, number), variable, number_of_first)

    def _add_value(self, place: Place, layouts: tuple[Layout, ...]) -> int:
        """The same of a value, whose layouts may be in another order."""
        variable = self.index.get(self._first_value(place))
        if variable is None or set(self.variables[variable].states) != set(layouts):
            return self._add(place, ValueVar(place, layouts))
        return self._join(place, ValueVar(place, layouts), variable)

    def _first_value(self, place: Place) -> Place | None:
        """What a value may decide with: the same value of the op that its own decides with."""
        if place not in self.makers:
            return self.model.alike.inputs.get(place)
        name, (number, position) = place[0], self.makers[place]
        first = self.model.alike.ops.get((name, number))
        if first is None or self.index["node", *first] != self.index["node", name, number]:
            return None
        return first[0], self.model.folded.segments[first[0]].nodes[first[1]].outs[position]

    def _join(self, key: object, variable: NodeVar | ValueVar, number: int) -> int:
        self.index[key] = number
        self.others.setdefault(number, []).append(variable)
        return number

    def _allowed(self, axis: int, classes: frozenset[int]) -> bool:
        return self._meaning_allows(self.meanings[axis], classes)

    def _allowed_slots(self, axis: int, classes: frozenset[int]) -> bool:
        """The same of an op on tokens that were sent to their experts, over an axis that splits tokens."""
        of_experts = bool(classes & self.model.digits.experts)
        return self._allowed_stacked(axis, classes) if of_experts else self._allowed(axis, classes)

    def _allowed_stacked(self, axis: int, classes: frozenset[int]) -> bool:
        """The same of an op that puts matrices of experts together, or takes one out: over an axis that sends
        tokens to experts, matrices may lie in parts until they are exchanged for experts."""
        meaning = self.meanings[axis]
        sends = meaning.splits_batch_inside or meaning.divides_sequence
        return sends or self._meaning_allows(meaning, classes)

    def _stacks(self, name: str, number: int, rule: Factored) -> bool:
        """Whether a call has matrices of experts along a dim that stays in one piece."""
        factors = self.model.digits.factors[name, number]
        classes = {digit[2] for f in rule.fixed for digit in factors[f]}
        still = rule.kind in ("view", "pointwise") and not rule.exchange
        return still and bool(classes & self.model.digits.experts)

    def _meaning_allows(self, meaning: AxisMeaning, classes: frozenset[int]) -> bool:
        """Whether an axis of this meaning may split what belongs to these classes."""
        digits = self.model.digits
        if meaning.divides_sequence and digits.zigzag:
            divided = digits.zigzag | digits.windowed | digits.heads
            return bool(classes & divided) and not classes & digits.causal
        return not classes & digits.zigzag and meaning.allows(bool(classes & digits.batch))

    def _must_divide(self, name: str, number: int, rule: Factored) -> list[bool]:
        """Per axis, whether a call has to be divided over it where that is possible."""
        inside = rule.kind == "matmul" and name in self.layers
        # of what experts have in place of a batch, sums of gradients may be left to their terms
        batch = any(
            d[2] in self.model.digits.batch for f in self.model.digits.factors[name, number] for d in f
        )
        return [
            self.strict and ((m.splits_batch and batch) or (m.divides_products and inside))
            for m in self.meanings
        ]

    def _nodes(self, name: str) -> None:
        for number, node in enumerate(self.model.folded.segments[name].nodes):
            rule = self.model.rules[name, number]
            free = ("node", name, number) in self.loose
            must = [False] * len(self.sizes) if free else self._must_divide(name, number, rule)
            states = self._states(name, number, tuple(must))
            call = self._call(name, number, states)
            var = self._add_node(name, number, states)
            recomputed = self.kept.recomputed_by([(name, number)])
            exchange = Time("exchange", self.backward[name], *recomputed)
            if rule.exchange:
                self.entries.append(Exchanged(exchange, var, self.counts[name], call, self.exposed))
            if rule.ring and any(rule.circulates(s.inputs, s.outputs) is not None for s in states):
                repeats = repeats_of(node, self.model.folded.segments[name])
                self.entries.append(Circulating(exchange, var, self.counts[name], call, repeats))
            self._busy(name, number, var, call, recomputed)
            for position, out in enumerate(node.outs):
                self.producer[name, out] = (var, position)
                self.makers[name, out] = (number, position)

    def _busy(self, name: str, number: int, var: int, call: CallGroup, recomputed: tuple[str, bool]) -> None:
        """Computing of a call, and what recomputing it adds."""
        count = self.counts[name]
        if recomputed[0] and self.cost.device.compiled:
            op = self.model.recomputed[name, number]
            written = op.backward
            if op.reads:
                outs = self.model.folded.segments[name].nodes[number].outs
                written = written._replace(unmoved=written.unmoved.difference(outs))
            calls = [self._call(name, number, call.states, k) for k in (op.forward, op.backward, written)]
            if any(other is not call for other in calls):
                self.entries.append(Busy(Time("work"), var, count, call))
                key = Time("again", False, *recomputed)
                self.entries.append(Recomputed(key, var, count, (call, *calls), op.reads))
                return
        self.entries.append(Busy(Time("work", self.backward[name], *recomputed), var, count, call))

    def _states(self, name: str, number: int, must: tuple[bool, ...]) -> tuple[OpState, ...]:
        """The states of a call; many calls are alike."""
        kind, cache = self.kinds[name, number], self.model.ways
        rule = self.model.rules[name, number]
        stacks = self._stacks(name, number, rule)
        key = (kind.divided, must, self.sizes, self.splits, stacks)
        if key not in cache:
            node = self.model.folded.segments[name].nodes[number]
            digits = self.model.digits.factors[name, number]
            # ops that send tokens divide these over an axis, and experts with them
            allowed = self._allowed if rule.exchange else self._allowed_slots
            allowed = self._allowed_stacked if stacks else allowed
            cache[key] = tuple(op_states(rule, kind.ins, node.types, digits, self.sizes, allowed, must))
        return cache[key]

    def _call(
        self,
        name: str,
        number: int,
        states: tuple[OpState, ...],
        kernel: InKernel | None = None,
    ) -> CallGroup:
        """A call in its states; many calls are alike. kernel: that it is a part of, if not as it stands."""
        kind, node = self.kinds[name, number], self.model.folded.segments[name].nodes[number]
        inside, joined = kind.inside, kind.joined
        if kernel is not None:
            inside, joined = kernel.among((*kind.refs, *node.outs)), kernel.joined
        # the model keeps the states of all calls, so that their identity stays theirs
        key = (kind.costs, id(states), inside, joined)
        cached = self.calls.get(key)
        if cached is None:
            rule = self.model.rules[name, number]
            cached = self.calls[key] = CallGroup(
                rule, kind.ins, node.types, states, kind.grow, kind.grows, kind.turned, inside, joined
            )
        return cached

    def _values(self, name: str) -> None:
        """A variable for every segment input and every value with more than one use."""
        graph = self.model.folded.segments[name]
        uses: dict[str, int] = {}
        layouts_of: dict[str, dict[Layout, None]] = {}
        for number in range(len(graph.nodes)):
            var = self.variables[self.index["node", name, number]]
            assert isinstance(var, NodeVar)
            for position, ref in enumerate(self.kinds[name, number].refs):
                uses[ref] = uses.get(ref, 0) + 1
                layouts_of.setdefault(ref, {}).update((s.inputs[position], None) for s in var.states)
        for out in set(graph.outputs):
            uses[out] = uses.get(out, 0) + 1
        full: Layout = (R,) * len(self.sizes)
        inputs = {value for value, _ in graph.inputs}
        for value, type_ in [
            *graph.inputs,
            *((v, t) for v, t in self.types[name].items() if v not in inputs),
        ]:
            if value not in inputs and uses.get(value, 0) < 2:
                continue
            layouts = tuple(dict.fromkeys([full, *layouts_of.get(value, {})]))
            if value not in inputs:
                layouts = tuple(dict.fromkeys([*layouts, *self._produced(name, value)]))
            place = (name, value)
            var_number = self._add_value(place, layouts)
            offered = self._source(var_number, 0)
            if value not in inputs:
                producer, position = self.producer[place]
                kinds = self._talk(name, self.users.get(place, ()), place)
                self._connect(kinds, producer, position, var_number, offered, place, type_, self.counts[name])
            self.producer[place] = (var_number, 0)

    def _talk(self, name: str, nodes: Sequence[tuple[str, int]], made: Place) -> tuple[Time, Time]:
        """(kind of seconds of a reshard on the way to ops and to a value of a segment, the same of those to
        layouts of more bytes)."""
        kind = Time("talk", self.backward[name], *self.kept.recomputed_by(nodes))
        if kind.cheap or made not in self.kept.read:
            return kind, kind
        # selective recomputation starts from the smaller of the two, or from one that is saved anyway
        repeated = kind._replace(segment=name, cheap=True)
        return repeated if self.kept.read[made] else kind._replace(segment=name), repeated

    def _produced(self, name: str, value: str) -> list[Layout]:
        producer, position = self.producer[name, value]
        var = self.variables[producer]
        assert isinstance(var, NodeVar)
        layouts = dict.fromkeys(s.outputs[position] for s in var.states)
        return [layout for layout in layouts if layout is not None]

    def _layouts(
        self,
        place: Place,
        type_: TensorType,
        axes: Sequence[bool],
        sizes: Sequence[int],
        meanings: Sequence[AxisMeaning],
        *,
        plain: bool = False,
    ) -> list[Layout]:
        """All layouts of a value that only split the given axes; plain: as torch's own Shard."""
        per_axis: list[list[Placement]] = []
        for axis, size in enumerate(sizes):
            factors: dict[Placement, frozenset[int]] = {}
            for dim in range(len(type_.shape)) if axes[axis] and size > 1 else ():
                for outer, part, cls in self.model.digits.values.get((*place, dim), ()):
                    placed = shard_of_digit(type_.shape[dim], dim, outer, part, size)
                    if placed is not None and not (plain and (placed.outer != 1 or placed.inner > 1)):
                        factors[placed] = factors.get(placed, frozenset()) | {cls}
            meaning = meanings[axis]
            per_axis.append([R, *(p for p, c in factors.items() if self._layout_allowed(meaning, c))])
        return [c for c in product(*per_axis) if layout_ok(type_.shape, c, sizes)]

    def _layout_allowed(self, meaning: AxisMeaning, classes: frozenset[int]) -> bool:
        anyhow = meaning.stores_sharded or meaning.divides_sequence
        return anyhow or self._meaning_allows(meaning, classes)

    def _port(self, group: PortClass) -> None:
        kind = group.first.kind
        if kind in ("param", "buffer", "const"):
            self._param(group)
            return
        type_ = group.first.type
        given = kind == "input"
        layouts = [self._input_layout(group)] if given else self._plain_layouts(group.key, type_)
        self._add(group.key, PortVar(group.key, tuple(layouts)))

    def _input_layout(self, group: PortClass) -> Layout:
        port = group.first
        is_batch = port.target in self.model.folded.joint.batch_inputs and port.type.shape[0] > 1
        return self._batch_layout() if is_batch else (R,) * len(self.sizes)

    def _param(self, group: PortClass) -> None:
        uses: dict[Layout, None] = dict.fromkeys([(R,) * len(self.sizes)])
        phases: set[bool] = set()
        for target in self.model.flow.targets.get(group.key, ()):
            var = self.variables[self.index[target]]
            assert isinstance(var, ValueVar)
            phases.add(self.backward[target[0]])
            uses.update(dict.fromkeys(u for u in var.states if not _is_partial(u)))
        strategies = self._strategies(group, tuple(uses), frozenset(phases))
        number = self._add(group.key, ParamVar(group.key, strategies.states))
        for key, seconds in strategies.seconds.items():
            self.entries.append(Fixed(key, number, None, seconds))
        for kind, held in strategies.held.items():
            self.entries.append(Fixed(kind, number, None, held))

    def _strategies(
        self, group: PortClass, uses: tuple[Layout, ...], phases: frozenset[bool]
    ) -> ParamStrategies:
        """How a parameter may live; many are alike."""
        share = self.model.shares.get(group.key, Shares()).gather
        stored = tuple(self._stored_layouts(group))
        port, trained = group.first, bool(group.grads)
        key = (port.kind, port.type, trained, len(group.ports), stored, uses, phases, share)
        if key not in self.strategies:
            self.strategies[key] = strategies_of(group, stored, uses, phases, self.axes, self.prices, share)
        return self.strategies[key]

    def _stored_layouts(self, group: PortClass) -> list[Layout]:
        """Layouts over the mesh that a parameter may have between steps."""
        port, meanings = group.first, self.axes.mesh_meanings
        known = {self.stored[p.target] for p in group.ports if p.target in self.stored}
        if port.kind == "param" and known:
            if len(known) > 1:
                raise UsageError(
                    f"parameters that are used alike are stored unlike: {port.target} and others",
                    why=f"as {' and '.join(' '.join(map(str, layout)) for layout in sorted(known, key=str))}",
                    hint="parallelize a second model for such calls",
                )
            return list(known)
        if port.kind != "param" or not group.grads:
            free = [m.name == "tp" or m.is_free for m in meanings]
            free = [f and port.kind == "param" for f in free]
            return self._representable(group.key, port.type, free)
        layouts = self._representable(group.key, port.type, [m.may_store_sharded for m in meanings])
        for axis, meaning in enumerate(meanings):
            if meaning.stores_sharded or (
                self.strict
                and meaning.divides_products
                and group.key not in self.loose
                and self._is_matrix(group)
            ):
                split = [lay for lay in layouts if isinstance(lay[axis], Shard)]
                layouts = split or layouts
        return layouts

    def _is_matrix(self, group: PortClass) -> bool:
        """Whether it is a weight matrix of a layer."""
        uses = (name for name, _ in self.model.flow.targets.get(group.key, ()))
        return len(group.first.type.shape) > 1 and any(name in self.layers for name in uses)

    def _representable(self, place: Place, type_: TensorType, axes: Sequence[bool]) -> list[Layout]:
        """Layouts that a DTensor can have: plain shards, or evenly split parts of a fused dim."""
        representable = []
        mesh = self.axes
        for layout in self._layouts(place, type_, axes, mesh.mesh_sizes, mesh.mesh_meanings):
            shards = [p for p in layout if isinstance(p, Shard)]
            fused = [p for p in shards if p.outer > 1]
            if any(p.inner > 1 or p.outer < 0 for p in shards):
                continue
            if fused and (len({p.dim for p in shards}) < len(shards)):
                continue
            representable.append(layout)
        return representable

    def _result(self, number: int, place: Place) -> None:
        type_ = self._type(place)
        layouts = self._plain_layouts(place, type_)
        var = self._add(("result", number), ResultVar(number, tuple(layouts)))
        backward = bool(place[0]) and self.backward[place[0]]
        kind = Time("talk", backward)
        self._connect_place((kind, kind), place, var, self._laid(layouts), type_, 1)

    def _plain_layouts(self, place: Place, type_: TensorType) -> list[Layout]:
        every = [True] * len(self.sizes)
        return self._layouts(place, type_, every, self.sizes, self.meanings, plain=True)

    def _type(self, place: Place) -> TensorType:
        if place[0] == "":
            return self.model.flow.classes[place].first.type
        return self.types[place[0]][place[1]]

    # -- edges -------------------------------------------------------------------------------------

    def _source_layouts(self, var: int, position: int) -> Sequence[Layout | None]:
        return self._source(var, position).layouts

    def _source(self, var: int, position: int) -> Laid:
        """What a variable gives, by its states; position: which of its values."""
        variable = self.variables[var]
        if isinstance(variable, NodeVar):
            return self._of_calls(variable.states, position, given=True)
        if isinstance(variable, ParamVar):
            return self._laid([s.use for s in variable.states])
        return self._laid(variable.states)

    def _of_calls(self, states: tuple[OpState, ...], position: int, *, given: bool) -> Laid:
        """Layouts of one value that a call gives or takes; many calls have the very same states."""
        key = (id(states), position, given)  # the model keeps them, so their identity stays theirs
        if key not in self.laid:
            self.laid[key] = self._laid([(s.outputs if given else s.inputs)[position] for s in states])
        return self.laid[key]

    def _laid(self, layouts: Sequence[Layout | None]) -> Laid:
        key = tuple(layouts)
        laid = self.laid.get(key)
        if laid is None:
            laid = self.laid[key] = Laid(key)
        return laid

    def _connect(
        self,
        kinds: tuple[Time, Time],
        source: int,
        position: int,
        target: int,
        required: Laid,
        place: Place,
        type_: TensorType,
        count: int,
    ) -> None:
        """Add the cost of the reshard between two variables, ``count`` times. kinds: see `_talk`. place: of
        the value."""
        reduces, inside = place not in self.model.unreduced, place in self.model.kinds.inside
        given = self._source(source, position)
        way = self._way(type_, self._grows(place, type_), given, required, reduces, inside=inside)
        self.entries.append(Joined(*kinds, source, target, count, way))

    def _way(
        self,
        type_: TensorType,
        grows: bool,
        given: Laid,
        target: Laid,
        reduces: bool,
        *,
        inside: bool = False,
    ) -> LayoutChange:
        """Many edges are alike."""
        key = (type_, grows, given, target, reduces, inside)
        if key not in self.ways:
            self.ways[key] = LayoutChange(*key)
        return self.ways[key]

    def _connect_place(
        self,
        kinds: tuple[Time, Time],
        place: Place,
        target: int,
        required: Laid,
        type_: TensorType,
        count: int,
    ) -> None:
        source, position = self.producer[place] if place in self.producer else (self.index[place], 0)
        self._connect(kinds, source, position, target, required, place, type_, count)

    def _edges_inside(self, name: str) -> None:
        for number, node in enumerate(self.model.folded.segments[name].nodes):
            refs, view = self.kinds[name, number].refs, self.model.rules[name, number].kind == "view"
            # what other ops make of a value is saved, or they run again
            kinds = self._talk(name, [(name, number)], (name, node.outs[0] if view else ""))
            target = self.index["node", name, number]
            var = self.variables[target]
            assert isinstance(var, NodeVar)
            for position, ref in enumerate(refs):
                required = self._of_calls(var.states, position, given=False)
                type_ = self.types[name][ref]
                self._connect_place(kinds, (name, ref), target, required, type_, self.counts[name])

    def _edges_between(self) -> None:
        for (source, target), count in self.model.flow.edges.items():
            var = self.index[target]
            kind = Time("talk", self.backward[target[0]])
            self._connect_place((kind, kind), source, var, self._source(var, 0), self._type(target), count)
        for group in self.model.flow.classes.values():
            for grad in group.grads:
                self._gradient(group, grad)

    def _gradient(self, group: PortClass, grad: Place) -> None:
        """The reduction of a gradient from where it is made to where the parameter is stored."""
        target = self.index[group.key]
        variable = self.variables[target]
        assert isinstance(variable, ParamVar)
        maker, position = self.producer[grad]
        full = (R,) * len(self.sizes)
        given = [self.axes.to_mesh(g or full) for g in self._source_layouts(maker, position)]
        stored = [strategy.stored for strategy in variable.states]
        # a parameter may be stored in a larger shape than it is used in (see `search.problem.padded_params`)
        type_ = replace(self._type(grad), shape=group.first.type.shape)
        share = self.model.shares[group.key].reduce
        table = self.prices.params.reshard.table(type_, list(dict.fromkeys([*given, *stored])), share)
        rows, cols = [table.index[g] for g in given], [table.index[s] for s in stored]
        matrix = len(group.ports) * table.seconds[np.ix_(rows, cols)]
        sizes = self.axes.mesh_sizes
        bytes_of = partial(self.prices.params.local_bytes, type_, sizes=sizes)
        nbytes = np.array([bytes_of(g) for g in given])
        if grad[0] in self.layers:
            sent = np.where([_is_partial(g) for g in given], nbytes, 0.0)
            self.entries.append(Fixed(Bytes("sent"), maker, None, SENT * sent))
        late = np.array([strategy.late for strategy in variable.states])
        # what waits for the last microbatch is counted as large as the parameter in use, not larger
        used = np.array([bytes_of(self.axes.to_mesh(strategy.use)) for strategy in variable.states])
        matrix = np.where((nbytes[:, None] > MORE * used) & late, np.inf, matrix)
        infinite = np.isinf(matrix)
        chains = reduce_chains(given, stored, table, self.axes.mesh_meanings, share.other)
        if chains is not None:
            once, each = np.where(late, chains, 0.0), np.where(late, 0.0, chains)
            self.entries.append(Fixed(Time("once"), maker, target, len(group.ports) * once))
            self.entries.append(Fixed(Time("inline", True), maker, target, len(group.ports) * each))
        for kind, wanted in ((Time("last", True), late), (Time("reduce", True), ~late)):
            if wanted.any():
                self.entries.append(Fixed(kind, maker, target, np.where(wanted | infinite, matrix, 0.0)))

    def _hold(self, key: Bytes, place: Place, count: int) -> None:
        var, position = self.producer[place]
        type_ = self._type(place)
        layouts = self._source_layouts(var, position)
        held = [0.0 if lay is None else self.cost.local_bytes(type_, lay, self.sizes) for lay in layouts]
        self.entries.append(ValueBytes(key, var, count * np.array(held), self._grows(place, type_)))


def _is_partial(layout: Layout) -> bool:
    return any(isinstance(p, Partial) for p in layout)
