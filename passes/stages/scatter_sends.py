"""Of a value that every rank of an axis has whole, each sends a part to the next stage.

The receiving ranks gather the parts over their own, faster links (the scatter/gather optimisation of
Narayanan et al., SC'21, section 4.1). Values that are split already cross as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from autoshard.ir import Origin
from autoshard.ir.boundaries import wires_of
from autoshard.ir.collectives import TensorTransfer, collective
from autoshard.ir.local_bytes import held_bytes
from autoshard.ir.lowered import Instruction, Lowered, PlacedValue, StagePart, with_parts
from autoshard.ir.placement import R, Shard
from autoshard.rules.local import MeshShape

#: (bytes of a value on a rank, axis) -> seconds saved by sending parts over it; negative if that is slower
Saving = Callable[[float, int], float]


def scatter_sends(lowered: Lowered, ports: Collection[str], mesh: MeshShape, saving: Saving) -> Lowered:
    """The program with full copies cut before they are sent, and gathered behind.

    ports: values that every rank has from the start.
    """
    before: dict[tuple[int, str], list[Instruction]] = {}
    after: dict[tuple[int, str], dict[str, Instruction]] = {}
    values = dict(lowered.values)
    for wire in wires_of(lowered, ports):
        placed = values[wire.value]
        split = _split(placed, mesh, saving)
        if split is None:
            continue
        axis, dim = split
        part = f"{wire.value}_part"
        backward = wire.phase != "forward"
        layout = (*placed.layout[:axis], Shard(dim), *placed.layout[axis + 1 :])
        values[part] = PlacedValue(placed.type, layout)
        name, types, where = mesh.names[axis], (placed.type,), (dim, 1, 1, None)
        cut, joined = TensorTransfer(wire.value, part, where), TensorTransfer(part, wire.value, where)
        after.setdefault((wire.source, wire.phase), {})[wire.value] = collective(
            "slice", name, (cut,), types, Origin(), backward
        )
        before.setdefault((wire.target, wire.into), []).append(
            collective("all_gather", name, (joined,), types, Origin(), wire.into != "forward")
        )
    if not after:
        return lowered
    pieces: list[tuple[StagePart, list[Instruction]]] = []
    for old in lowered.parts:
        key = (old.stage, old.phase)
        pieces.append((old, [*before.get(key, ()), *lowered.of(old), *after.get(key, {}).values()]))
    return with_parts(replace(lowered, values=values), pieces)


def _split(placed: PlacedValue, mesh: MeshShape, saving: Saving) -> tuple[int, int] | None:
    """(axis, dim) by which a value is best sent in parts; None to send it as it is."""
    nbytes = float(held_bytes(placed.type, placed.layout, mesh.sizes))
    taken = {p.dim for p in placed.layout if isinstance(p, Shard)}
    result: list[tuple[float, int, int]] = []
    for axis, (p, size) in enumerate(zip(placed.layout, mesh.sizes, strict=True)):
        dims = [d for d, n in enumerate(placed.type.shape) if d not in taken and n and n % size == 0]
        if p == R and size > 1 and dims:
            saved = saving(nbytes, axis)
            if saved > 0:
                result.append((-saved, axis, dims[0]))
    return min(result)[1:] if result else None
