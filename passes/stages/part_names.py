"""Names of segments that a pass took apart."""

from __future__ import annotations

import re
from dataclasses import replace

from autoshard.ir import Call
from autoshard.ir.collectives import transfer_of
from autoshard.ir.lowered import Lowered

#: of a segment that was taken apart
_PART = re.compile(r"_part(_\d+)?$")


def parts_named(made: Lowered, before: Lowered) -> Lowered:
    """Segments that were taken apart under the names that they had, their gathers as ``_gather``."""
    names: dict[str, str] = {}
    taken = set(made.segments)
    for name, segment in made.segments.items():
        base = _PART.sub("", name)
        if name in before.segments or base not in before.segments:
            continue
        makers = {o: n for n in segment.graph.nodes for o in n.outs}
        gathers = all(o in makers and transfer_of(makers[o]) == "all_gather" for o in segment.graph.outputs)
        wanted = f"{base}_gather" if gathers else base
        if wanted not in taken:
            taken.add(wanted)
            names[name] = wanted
    segments = {
        names.get(n, n): replace(s, graph=replace(s.graph, name=names.get(n, n)))
        for n, s in made.segments.items()
    }
    main = tuple(
        replace(i, segment=names.get(i.segment, i.segment)) if isinstance(i, Call) else i for i in made.main
    )
    return replace(made, segments=segments, main=main)
