"""What fills the memory of a rank where it runs out: the values of a program, by the user's modules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from traceback import walk_tb
from typing import Any

import torch
import torch.distributed as dist

from autoshard.ir.units import bytes_text
from autoshard.runtime.debugging.op_places import OpPlace, OpPlaces
from autoshard.runtime.prepared_steps import PreparedItem
from autoshard.runtime.straight_line import SEGMENT

#: the rest is one more row
_ROWS = 8
_GIVEN = {"param": "parameters", "input": "inputs", "buffer": "buffers", "const": "constants"}


def is_out_of_memory(error: BaseException) -> bool:
    """Of a device, or of the process."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator: " in str(error)


def note_held(error: BaseException, places: OpPlaces, values: Mapping[str, Any], item: PreparedItem) -> None:
    """Add to an error of memory in which op it ran out, and whose values the call holds."""
    given = {p.name: _GIVEN[p.kind] for p in places.program.signature.ports if p.kind in _GIVEN}
    place, inside = _inside(error, places, item)
    held = [(given[n], x) for n, x in values.items() if n in given]
    held += [(places.values[n].module, x) for n, x in values.items() if n in places.values] + inside
    nbytes_of: Counter[str] = Counter()
    seen: set[int] = set()
    for row, x in held:
        # what shares memory counts once, with the first
        if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in seen:
            seen.add(x.untyped_storage().data_ptr())
            nbytes_of[row or "(root)"] += x.untyped_storage().nbytes()
    rows = nbytes_of.most_common(_ROWS)
    if len(nbytes_of) > _ROWS:
        rows.append((f"{len(nbytes_of) - _ROWS} others", nbytes_of.total() - sum(size for _, size in rows)))
    table = "\n".join(f"  {bytes_text(size):>10}  {row}" for row, size in rows)
    rank = dist.get_rank() if dist.is_initialized() else 0
    error.add_note(
        f"autoshard: rank {rank} ran out of memory in {place} ({place.source}). The call holds "
        f"{bytes_text(nbytes_of.total())}, by the module that made it:\n{table}\n"
        "Gradients of earlier calls and the state of the optimizer are not in it."
    )


def _inside(
    error: BaseException, places: OpPlaces, item: PreparedItem
) -> tuple[OpPlace, list[tuple[str, Any]]]:
    """The op that failed, and the values that its segment held by then, with their modules."""
    steps, _, _ = item.opened([None] * len(item.args))
    own, failed = places.of(item.instruction), None
    outs = [(place, o) for step, place in zip(steps, own, strict=True) for o in step.outs]
    local: Mapping[str, Any] = {}
    for frame, _ in walk_tb(error.__traceback__):
        if frame.f_code.co_filename == SEGMENT:
            local = frame.f_locals
        elif isinstance(frame.f_locals.get("place"), OpPlace):
            # ops are run one by one, for a profiler or for NaNs
            failed, slots = frame.f_locals["place"], frame.f_locals["slots"]
            local = {f"v{o}": slots[o] for _, o in outs if slots[o] is not None}
    failed = failed or next((place for place, o in outs if f"v{o}" not in local), own[-1])
    held = [(place.module, local[f"v{o}"]) for place, o in outs if f"v{o}" in local]
    # arguments that main does not hold any more
    taken = [(places.values[a].module, f"v{k}") for k, a in enumerate(item.args) if a in places.values]
    return failed, held + [(module, local[slot]) for module, slot in taken if slot in local]
