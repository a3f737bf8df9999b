"""What a step takes, and holds, when some experts are chosen more often than others."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from autoshard.cluster.cluster import Cluster
from autoshard.cluster.mesh import Mesh
from autoshard.errors import UsageError
from autoshard.ir.experts import owner_ways
from autoshard.ir.routing import EVEN, Routing, parse_replicas, placed_by_load, zipf
from autoshard.program.program import Program
from autoshard.search.plan.plan_json import plan_from_json
from autoshard.simulate.behaviour import behaviour_on
from autoshard.simulate.op_work import product_of
from autoshard.simulate.step import StepEstimate, estimate_step

_ROUTES = frozenset(("autoshard.route.default", "autoshard.route_part.default"))


@dataclass(frozen=True)
class RoutedStep:
    """A step with some routing.

    load: slots of the fullest rank over the average. seconds: of the step. peak: bytes of the fullest rank,
    all layers being as the fullest. order: which expert stands at each place, per layer, where that is
    not the order of the model. moved: experts that are on another rank then, of all layers.
    """

    name: str
    load: float
    seconds: float
    peak: float
    order: tuple[tuple[int, ...], ...] = ()
    moved: int = 0


@dataclass(frozen=True)
class _Experts:
    """Of a program. ways: ranks that have unlike experts."""

    chosen: int
    count: int
    ways: int


def routed_steps(
    program: Program, cluster: Cluster, even: StepEstimate, words: Sequence[str], moves: int | None = None
) -> list[RoutedStep]:
    """The step for each of some routings, after that of even routing.

    even: the step of the program as it is simulated otherwise. words: ``worst``, ``zipf=1.2`` or files of
    counts. For counts there is another one with experts placed by load, if none are replicated. moves:
    experts of a layer that may be moved for that. Raises UsageError for a program without experts that ranks
    divide, and for what is no routing.
    """
    experts = _experts_of(program)
    replicas = parse_replicas(plan_from_json(program.plan).replicate_experts) if program.plan else ()
    result = [RoutedStep("even", 1.0, even.seconds, even.fullest.peak)]
    for word in words:
        routing = replace(_routing(word, experts), replicas=replicas)
        result.append(_step(program, cluster, experts, word, routing))
        if routing.ordered and routing.layers and not replicas:
            orders = tuple(placed_by_load(counts, experts.ways, moves) for counts in routing.layers)
            pairs = zip(routing.layers, orders, strict=True)
            placed = replace(routing, layers=tuple(tuple(c[e] for e in order) for c, order in pairs))
            step = _step(program, cluster, experts, f"{word}, experts placed by load", placed)
            result.append(replace(step, order=orders, moved=sum(_moved(o, experts) for o in orders)))
    return result


def _moved(order: Sequence[int], experts: _Experts) -> int:
    width = experts.count // experts.ways
    return sum(place // width != expert // width for place, expert in enumerate(order))


def _step(program: Program, cluster: Cluster, experts: _Experts, name: str, routing: Routing) -> RoutedStep:
    how = partial(behaviour_on, cluster.device, program.codegen)
    step = estimate_step(program, cluster, behaviour=how(routing=routing))
    layer = routing.fullest_layer(experts.ways)
    full = step if layer == routing else estimate_step(program, cluster, behaviour=how(routing=layer))
    return RoutedStep(
        name, routing.load(experts.chosen, experts.count, experts.ways), step.seconds, full.fullest.peak
    )


def _experts_of(program: Program) -> _Experts:
    sizes, all_ = Mesh.parse(program.mesh).sizes, list[_Experts]()
    for segment in program.lowered.segments.values():
        for node in segment.graph.nodes:
            if product_of(node).op in _ROUTES:
                placed = segment.placed()[node.outs[0]]
                assert placed.type.filled is not None
                ways = owner_ways(placed.layout, sizes)
                if ways > 1:
                    all_.append(_Experts(*placed.type.filled, ways))
    if all_:
        return min(all_, key=lambda e: e.count)  # of replicas there are said to be more
    raise UsageError(
        "no ranks of this program have unlike experts", why="then all have as many tokens, whatever is chosen"
    )


def _routing(word: str, experts: _Experts) -> Routing:
    if word == "even":
        return EVEN
    if word == "worst":
        return Routing(worst=True)
    if word == "round-robin":
        return Routing(round_robin=True)
    kind, _, number = word.partition("=")
    if kind == "zipf":
        try:
            return Routing((zipf(float(number), experts.count),), ordered=False)
        except ValueError:
            raise UsageError(
                f"{number!r} is no exponent", where=f"routing {word!r}", hint="zipf=1.2"
            ) from None
    return Routing(counts_of(Path(word)))


def counts_of(path: Path) -> tuple[tuple[float, ...], ...]:
    """Tokens of each expert by layer, from a JSON file. Raises UsageError."""
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        hint = "even, round-robin, worst, zipf=1.2, or a JSON file of tokens of each expert, or by layer"
        raise UsageError("cannot read the routing", where=str(path), why=str(error), hint=hint) from error
    layers = read if isinstance(read, list) and read and isinstance(read[0], list) else [read]
    for counts in layers:
        fine = isinstance(counts, list) and all(type(n) in (int, float) and n >= 0 for n in counts)
        if not fine or not sum(counts):
            raise UsageError("the routing is no list of tokens of each expert", where=str(path))
    return tuple(tuple(map(float, counts)) for counts in layers)
