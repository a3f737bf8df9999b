"""Which module outputs may stay split: what the model's own code does between two divided modules.

Torch's parallel styles give the code between modules plain local tensors, and nothing checks what it does
with them. Here the forward half is followed op by op with the placements that this code would see. An op
may run on local parts if, by its own rule, the parts it makes are the parts of its result: no sum is left
pending, no offset of the rank is needed, and no full tensor that takes a gradient is used with split ones
(its gradient would be a part of the right one on each rank). And the model's code, run with a rank's sizes,
must make tensors of exactly these parts' shapes (see `local_model`). Where an op may not, the modules whose
split outputs reach it give full outputs instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from autoshard.interop.local_model import LocalModel
from autoshard.interop.module_styles import LeftOut, Style, Uses
from autoshard.ir import Folded, Graph, LocalOffset, LocalSize, Node, TensorType, refs_of
from autoshard.ir.placement import Layout, Partial, Placement, R, Shard, local_shape
from autoshard.planner.analysis import Analysis
from autoshard.rules.local import LocalCall, MeshShape
from autoshard.rules.states import op_states
from autoshard.rules.view import RULES as VIEWS

#: masks that follow each rank's own random numbers outside of a program in any case
RANDOM = "autoshard.dropout"
_FLOATS = ("f16", "bf16", "f32", "f64")


@dataclass(frozen=True, slots=True)
class _Seen:
    """A tensor as the model's code sees it.

    sources: modules whose split outputs it comes from. trained: whether a gradient flows through it.
    """

    placed: Placement = R
    sources: frozenset[str] = frozenset()
    trained: bool = False


#: (segment, node number, placements of its inputs) -> placements of its outputs, or why it may not run so
_Found: TypeAlias = dict[tuple[str, int, tuple[Placement, ...]], "tuple[Placement, ...] | str"]


@dataclass(frozen=True)
class Sound:
    """Styles that are right with the model's code.

    notes: outputs that had to be gathered. split: (number of the call, value) of what its code sees split.
    """

    styles: dict[str, Style]
    notes: list[LeftOut]
    split: frozenset[tuple[int, str]]


@dataclass(frozen=True)
class _Walk:
    """One pass over the forward half.

    styles: filled in as inputs are met. faults: module -> why its output cannot stay split. found: what is
    known of ops, kept between passes. seen: (number of the call, value) -> what the code sees.
    """

    analysis: Analysis
    uses: Uses
    size: int
    styles: dict[str, Style]
    faults: dict[str, str]
    found: _Found
    seen: dict[tuple[int, str], _Seen]


def sound_styles(
    analysis: Analysis,
    uses: Uses,
    wanted: Mapping[str, Style],
    size: int,
    local: LocalModel | None,
    *,
    split_tables: bool = True,
) -> Sound:
    """The styles with the least gathering at module ends that leaves the code between them right.

    Every output is tried as split first; each pass over the graph gathers some more, so that it ends. With no
    ``local`` model to run, all outputs are gathered. size: ranks of the axis. split_tables: whether an
    embedding may give a split output (in transformers it may not).
    """
    styles: dict[str, Style] = {}
    notes: list[LeftOut] = []
    for name, style in wanted.items():
        splits = style.kind in ("columns", "table_columns")
        if local is not None and not local.fitting(style, name):
            notes.append(LeftOut(name, "it is no nn.Linear or nn.Embedding, or does more than these"))
            continue
        unknown = local is None and splits
        styles[name] = replace(
            style, gather_output=unknown or (style.kind == "table_columns" and not split_tables)
        )
        if unknown:
            notes.append(
                LeftOut(name, "its output is gathered: give the model to have the code behind it checked")
            )
    result: _Found = {}
    while True:
        walk = _Walk(analysis, uses, size, dict(styles), {}, result, {})
        _forward(walk)
        if not walk.faults and local is not None:
            _compare(walk, local)
        if not walk.faults:
            split = {place for place, seen in walk.seen.items() if seen.placed != R}
            return Sound(walk.styles, notes, frozenset(split))
        for module, reason in walk.faults.items():
            styles[module] = replace(styles[module], gather_output=True)
            notes.append(LeftOut(module, f"its output is gathered: {reason}"))


def _compare(walk: _Walk, local: LocalModel) -> None:
    """Faults where the model's code, run with a rank's sizes, makes something else than the rank's parts."""
    split = {name for name, s in walk.styles.items() if s.kind.endswith("columns") and not s.gather_output}
    if not split:
        return
    ran = local.graph(walk.styles)
    folded = walk.analysis.folded
    if isinstance(ran, str):
        _fault(walk, split, f"with a rank's sizes the model's code fails ({ran})")
        return
    if _work_of(ran) != _work_of(folded):
        _fault(walk, split, "with a rank's sizes the model's code does other things")
        return
    for number, call in enumerate(folded.calls):
        if not call.backward:
            full, part = _work(folded.segments[call.segment]), _work(ran.segments[call.segment])
            for node, held in zip(full, part, strict=True):
                _check_shapes(walk, number, node, held, split)


def _check_shapes(walk: _Walk, number: int, node: Node, held: Node, split: set[str]) -> None:
    """A fault if a rank's run of an op gives tensors of other shapes than its parts have."""
    for name, type_, small in zip(node.outs, node.types, held.types, strict=True):
        if type_ is None or small is None:
            continue
        seen = walk.seen[number, name]
        if small.shape != local_shape(type_.shape, (seen.placed,), (walk.size,), (0,)):
            where = node.origin.source or node.origin.fqn or node.op
            why = f"at {where} the model's code takes a rank's part for something else"
            _fault(walk, seen.sources or split, why)


def _work_of(folded: Folded) -> tuple[object, ...]:
    """What two captures of one model have in common whatever their sizes are: the forward ops, in order."""
    calls = tuple((c.segment, c.label) for c in folded.calls if not c.backward)
    segments = dict.fromkeys(name for name, _ in calls)
    return calls, tuple(tuple((n.op, n.origin.fqn) for n in _work(folded.segments[s])) for s in segments)


def _work(graph: Graph) -> list[Node]:
    """The ops that do more than lay a tensor out anew: views come and go with dims of size 1, and a wrong one
    shows in the shape of what is made of it."""
    return [node for node in graph.nodes if node.op not in VIEWS]


def _forward(walk: _Walk) -> None:
    folded = walk.analysis.folded
    frozen = set(folded.joint.frozen)
    main: dict[str, _Seen] = {}
    for port in folded.joint.ports:
        module = port.target.rpartition(".")[0]
        if port.kind == "param" and module in walk.styles:
            main[port.name] = _Seen(_inside(walk.styles[module], port.target))
        else:
            main[port.name] = _Seen(trained=port.kind == "param" and port.target not in frozen)
    for number, call in enumerate(folded.calls):
        if call.backward:
            continue
        graph = folded.segments[call.segment]
        seen = {name: main[value] for value, (name, _) in zip(call.args, graph.inputs, strict=True)}
        _segment(walk, number, call.segment, graph, seen)
        main.update((value, seen[name]) for value, name in zip(call.outs, graph.outputs, strict=True))
    for result in folded.joint.results:
        if result.kind in ("output", "buffer") and result.value in main:
            _fault(walk, main[result.value].sources, "the model returns it")


def _inside(style: Style, param: str) -> Placement:
    """A divided module's own parameter, where it is met in the graph: the bias is added to what the
    module gives, and the weight only stands in the product, which is looked at as a whole."""
    split = style.kind == "columns" and not style.gather_output
    return Shard(0) if split and param.endswith(".bias") else R


def _segment(walk: _Walk, number: int, segment: str, graph: Graph, seen: dict[str, _Seen]) -> None:
    types = graph.types()
    for site, node in enumerate(graph.nodes):
        names = list(refs_of(node))
        ins = [seen[name] for name in names]
        product = walk.uses.products.get((number, site))
        if product is not None and product.module in walk.styles:
            seen[node.name] = walk.seen[number, node.name] = _styled(walk, product.module, node, ins)
            continue
        new = _plain(walk, (segment, site), node, ins, [types[n] for n in names])
        for name, type_, out in zip(node.outs, node.types, new, strict=True):
            if type_ is not None:
                seen[name] = replace(out, trained=out.trained and type_.dtype in _FLOATS)
                walk.seen[number, name] = seen[name]


def _styled(walk: _Walk, module: str, node: Node, ins: list[_Seen]) -> _Seen:
    """The output of a divided module; the walk's styles learn how its input arrives."""
    style, type_ = walk.styles[module], node.types[0]
    assert type_ is not None
    given = ins[1] if style.kind.startswith("table") else ins[0]
    last = Shard(len(type_.shape) - 1)
    if given.placed != R and not (given.placed == last and style.kind == "rows"):
        _fault(walk, given.sources, f"{module} would be given {given.placed}")
        given = _Seen()
    walk.styles[module] = replace(style, full_input=given.placed == R)
    if style.kind in ("rows", "table_rows") or style.gather_output:
        return _Seen(trained=True)
    return _Seen(last, frozenset((module,)), True)


def _plain(
    walk: _Walk, where: tuple[str, int], node: Node, ins: list[_Seen], types: list[TensorType]
) -> list[_Seen]:
    """The outputs of an op of the model's own code."""
    trained = any(s.trained for s in ins)
    full = [_Seen(trained=trained)] * len(node.outs)
    placed = tuple(s.placed for s in ins)
    if all(p == R for p in placed):
        return full
    sources = frozenset[str]().union(*(s.sources for s in ins))
    op = f"{node.op.split('.')[1]} at {node.origin.source or node.origin.fqn or where[0]}"
    if any(s.placed == R and s.trained for s in ins):
        _fault(walk, sources, f"{op} also uses a whole tensor, which would get a part of its gradient")
        return full
    key = (*where, placed)
    if key not in walk.found:
        walk.found[key] = _local_results(walk, where, node, placed, types)
    result = walk.found[key]
    if isinstance(result, str):
        _fault(walk, sources, f"{op} {result}")
        return full
    return [_Seen(p, sources if p != R else frozenset(), trained) for p in result]


def _local_results(
    walk: _Walk, where: tuple[str, int], node: Node, placed: tuple[Placement, ...], types: list[TensorType]
) -> tuple[Placement, ...] | str:
    """Placements of the outputs of an op that runs on local parts; or why it may not."""
    rule, digits = walk.analysis.rules[where], walk.analysis.digits.factors[where]
    layouts: tuple[Layout, ...] = tuple((p,) for p in placed)
    states = op_states(rule, types, node.types, digits, (walk.size,), lambda axis, classes: True)
    fitting = [s for s in states if s.inputs == layouts]
    if len(fitting) != 1:
        return "does not give parts of its result from parts split like that"
    (state,) = fitting
    outs = tuple(R if layout is None else layout[0] for layout in state.outputs)
    if any(isinstance(p, Partial) for p in outs):
        return "leaves a sum pending between the ranks"
    if rule.local is not None and not node.op.startswith(RANDOM):
        local = rule.local(
            LocalCall(node, tuple(types), layouts, state.outputs, MeshShape(("axis",), (walk.size,)))
        )
        if local.op != node.op or any(isinstance(a, LocalOffset) for a in _leaves(local)):
            return "depends on which part a rank holds"
        if any(isinstance(a, LocalSize) for a in _leaves(local)):
            return "has parts of different sizes"
    return outs


def _leaves(node: Node) -> Iterable[object]:
    stack: list[object] = [*node.args, *(v for _, v in node.kwargs)]
    while stack:
        item = stack.pop()
        if isinstance(item, tuple):
            stack.extend(item)
        else:
            yield item


def _fault(walk: _Walk, sources: Iterable[str], reason: str) -> None:
    for module in sources:
        walk.faults.setdefault(module, reason)
