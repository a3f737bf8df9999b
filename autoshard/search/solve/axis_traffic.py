"""What the axes of a mesh send in a step, roughly and unsolved: enough to lay ranks on devices."""

from __future__ import annotations

from collections import Counter

from autoshard.cluster.mesh import Mesh
from autoshard.cost.stage_machines import full_mesh
from autoshard.search.problem.problem import Model, batch_of
from autoshard.search.solve.configuration import data_ways
from autoshard.search.solve.formulate import layer_calls

#: collectives of activations in a layer, there and back; each sends them about twice (Shoeybi et al.,
#: "Megatron-LM", arXiv 1909.08053, section 3)
_INSIDE = 4 * 2


def between_layers(model: Model) -> float:
    """Bytes that one sequence hands from one layer to the next; the most of any pair."""
    layers = {c.segment for c in model.folded.calls if c.label and not c.backward}
    backward = model.folded.is_backward()
    values = [
        model.folded.segments[target[0]].types()[target[1]].nbytes
        for source, target in model.flow.edges
        if source[0] in layers and target[0] in layers and not backward[target[0]]
    ]
    return max(values, default=0) / max(1, batch_of(model.folded))


def tied_bytes(model: Model) -> float:
    """Bytes of parameters that are used in several places, as by embedding and head: the first and the last
    stage of a pipeline then add up their gradients."""
    users = Counter(v for call in model.folded.calls if not call.backward for v in set(call.args))
    ports = (p for group in model.flow.classes.values() if group.grads for p in group.ports)
    return float(sum(port.type.nbytes for port in ports if users[port.name] > 1))


def traffic_of(model: Model, inner: Mesh, ranks: int, total: int) -> dict[str, float]:
    """Bytes per step of every axis on one rank of a pipeline. total: sequences of a step."""
    full, ways = full_mesh(inner, ranks), data_ways(inner)
    handed = between_layers(model) * total / ways
    layers = sum(layer_calls(model.folded).values()) / ranks
    stored = sum(len(group.ports) * group.first.type.nbytes for group in model.flow.classes.values())
    held = stored / ranks / (inner.world_size // ways)
    traffic = {}
    for axis in full.axes:
        if axis.name == "pp":
            traffic[axis.name] = 2 * handed / (inner.world_size // ways)
        elif axis.meaning.splits_batch:
            traffic[axis.name] = 2 * held
        else:
            traffic[axis.name] = _INSIDE * layers * handed
    return traffic
