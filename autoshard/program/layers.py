"""Which parts of the model the stages of a program are made of, in words."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from autoshard.ir import Call
from autoshard.program.program import Program

_NUMBERED = re.compile(r"^(.*?)(\d+)$")


@dataclass(frozen=True)
class _Layer:
    """A layer, or a module outside layers. part: of a layer, whether another stage has some of it, too."""

    label: str
    part: bool


def layers_of_stages(program: Program) -> tuple[str, ...]:
    """Per stage, its layers as ranges of their labels, with the modules outside layers whose parameters it
    uses: ``model.embed_tokens, model.layers.0-7, part of model.layers.8``."""
    lowered = program.lowered
    count = 1 + max((p.stage for p in lowered.parts), default=0)
    modules = {p.name: p.target.rpartition(".")[0] for p in program.signature.ports if p.kind == "param"}
    result: list[list[str]] = [[] for _ in range(count)]
    layers = {i.label for i in lowered.main if isinstance(i, Call)}
    for part in lowered.parts:
        if part.phase != "forward":
            continue
        for item in lowered.of(part):
            if isinstance(item, Call) and not item.label:
                result[part.stage] += [modules[a] for a in item.args if a in modules]
            elif isinstance(item, Call):
                result[part.stage].append(item.label)
    own = [list(dict.fromkeys(filter(None, labels))) for labels in result]
    return tuple(
        ", ".join(
            _ranges([_Layer(x, x in layers and any(x in o for o in own if o is not labels)) for x in labels])
        )
        for labels in own
    )


def _ranges(layers: Sequence[_Layer]) -> list[str]:
    """Neighbours whose labels differ by one in their last number, in one word."""
    result: list[str] = []
    at = 0
    while at < len(layers):
        end = at
        while end + 1 < len(layers) and _follows(layers[end], layers[end + 1]):
            end += 1
        last = "" if end == at else f"-{_numbered(layers[end].label)[1]}"
        result.append(("part of " if layers[at].part else "") + layers[at].label + last)
        at = end + 1
    return result


def _follows(one: _Layer, other: _Layer) -> bool:
    (head, number), (next_head, next_number) = _numbered(one.label), _numbered(other.label)
    return not one.part and not other.part and head == next_head and 0 <= number == next_number - 1


def _numbered(label: str) -> tuple[str, int]:
    """What stands before the number at the end, and the number; -1 if there is none."""
    match = _NUMBERED.match(label)
    return (match.group(1), int(match.group(2))) if match else (label, -1)


def upwards(module: str) -> Iterable[str]:
    """A module and those it is in, innermost first; nothing for the root."""
    parts = module.split(".") if module else []
    return (".".join(parts[:end]) for end in range(len(parts), 0, -1))


def relabelled(module: str, label: str, labels: Collection[str]) -> str:
    """A module of a segment, whose names are those of one of its layers, in the layer ``label``.

    labels: of all layers.
    """
    if not label:
        return module
    layer = next((m for m in upwards(module) if m in labels), "")
    return label + module[len(layer) :] if layer else module
