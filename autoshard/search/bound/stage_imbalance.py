"""How much longer the busiest ranks of a pipeline take than equal ones would, before anything is cut.

Layers have parts that nothing can be cut into, and embedding and head belong to the first and the last stage:
many stages of few layers are never alike, however they are cut.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from autoshard.ir import refs_of
from autoshard.search.problem.decisions import NodeVar
from autoshard.search.problem.problem import Model
from autoshard.search.solve.formulate import ShardingProblem
from autoshard.search.solve.pipeline_model import Pipe
from autoshard.search.solve.solve_placements import PlacementSolution
from autoshard.search.solve.stage_cuts import places_of

#: halvings of the interval in which the busiest stage lies: to a thousandth of its longest part
_STEPS = 10


def imbalance_seconds(formulated: ShardingProblem, placements: PlacementSolution, pipe: Pipe) -> float:
    """Of a step whose stages are no more alike than they can be."""
    return placements.seconds * busiest(chain_of(formulated, placements), pipe)


def chain_of(formulated: ShardingProblem, placements: PlacementSolution) -> tuple[float, ...]:
    """Seconds of the parts of one forward between which it may be cut, in order (as `staging` chooses them).

    Backward is taken to follow forward part by part, which is enough to compare stages.
    """
    folded = formulated.model.folded
    work: dict[int, float] = {}
    for key, table in formulated.problem.terms.alone.items():
        if key.kind == "work" and not key.backward:
            for variable, costs in table.items():
                work[variable] = work.get(variable, 0.0) + float(costs[placements.states[variable]])
    counts = folded.counts()
    seconds: dict[tuple[str, int], float] = {}
    for number, seconds_of_all in work.items():
        nodes = [v for v in formulated.problem.together(number) if isinstance(v, NodeVar)]
        calls_of_all = sum(counts[node.segment] for node in nodes)
        for node in nodes:
            seconds[node.segment, node.number] = seconds_of_all / calls_of_all
    calls = [c.segment for c in folded.calls if not c.backward]
    crossing = {name: _crossing(formulated.model, name) for name in dict.fromkeys(calls)}
    chosen = set(places_of([crossing[name] for name in calls]))
    parts: list[float] = []
    so_far = 0.0
    for call, name in enumerate(calls):
        for number in range(len(crossing[name])):
            so_far += seconds.get((name, number), 0.0)
            if (call, number) in chosen:
                parts.append(so_far)
                so_far = 0.0
    return (*parts, so_far)


def _crossing(model: Model, name: str) -> list[float]:
    """Bytes that a call of a segment hands on behind each of its ops, parameters left out."""
    graph = model.folded.segments[name]
    types = graph.types()
    ports = {target[1] for source, target in model.flow.edges if target[0] == name and not source[0]}
    ends = {ref: len(graph.nodes) for ref in graph.outputs}
    for number in reversed(range(len(graph.nodes))):
        for ref in refs_of(graph.nodes[number]):
            ends.setdefault(ref, number)
    steps = [0.0] * (len(graph.nodes) + 1)
    values = [(value, 0) for value, _ in graph.inputs if value not in ports]
    values += [(out, number) for number, node in enumerate(graph.nodes) for out in node.outs]
    for value, begin in values:
        if ends.get(value, -1) > begin:
            steps[begin] += types[value].nbytes
            steps[ends[value]] -= types[value].nbytes
    return list(accumulate(steps[:-1]))


def imbalance(chain: Sequence[float], stages: int, speeds: Sequence[float] = ()) -> float:
    """Seconds of the busiest of so many stages over those of equal ones, at the best cuts; at least 1.0.

    speeds: of the stages, if they differ: one twice as fast does what takes the others twice as long.
    """
    ends = list(accumulate(chain))
    if stages <= 1 or not ends or not ends[-1]:
        return 1.0
    speeds = speeds or (1.0,) * stages
    mean, longest = ends[-1] / sum(speeds), max(chain)
    low, high = max(1.0, longest / mean / max(speeds)), 1.0 + longest / mean / min(speeds)
    if _fits(ends, speeds, low * mean):
        return low
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if _fits(ends, speeds, middle * mean) else (middle, high)
    return high


def _fits(ends: Sequence[float], speeds: Sequence[float], most: float) -> bool:
    """Whether stages of so many seconds at most hold everything; ends: where each part ends."""
    start, done = 0.0, 0
    for speed in speeds:
        done = bisect_right(ends, start + speed * most * (1 + 1e-9), done)
        if done == len(ends):
            return True
        start = ends[done - 1] if done else 0.0
    return False


def busiest(chain: Sequence[float], pipe: Pipe) -> float:
    """Seconds of a step over those with equal stages.

    The busiest stage delays the others as if it stood for all of its rank; its rank has other chunks, too,
    and waits less for them. The truth lies between, and half way is taken.
    """
    beyond = imbalance(chain, pipe.ranks * pipe.chunks, pipe.stage_speeds) - 1.0
    return 1.0 + beyond * (1.0 + 1.0 / pipe.chunks) / 2
