"""The graph of a program for Graphviz: ops, placements, collectives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from autoshard.errors import UsageError
from autoshard.ir.units import bytes_text, seconds_text
from autoshard.report.document_segments import MAIN, ONCE

#: as on the report page; shapes say the same without colour
_OP, _TALK, _INPUT, _WEIGHT = "#0072B2", "#B35900", "#777777", "#00775A"


def dot_text(document: Mapping[str, Any], segment: str | None = None) -> str:
    """The segments of a document (see `autoshard.report.document`), or one of them, as clusters.

    Collectives are ellipses, ops boxes, inputs dashed.
    Raises UsageError if there is no such segment.
    """
    known = {s["name"]: s for s in document["segments"] if s["name"] not in (MAIN, ONCE)}
    if segment is not None and segment not in known:
        raise UsageError(f"there is no segment {segment!r}", hint=f"one of {', '.join(known)}")
    lines = [
        "digraph autoshard {",
        f"  label={_quoted(document['title'] + ' on ' + document['mesh'])};",
        '  graph [fontname="sans-serif", labelloc=t, ranksep=0.4];',
        '  node [fontname="sans-serif", fontsize=10, shape=box, style=rounded];',
        f'  edge [color="{_INPUT}", arrowsize=0.6];',
    ]
    for number, (name, one) in enumerate(known.items()):
        if segment in (None, name):
            lines += _segment(f"s{number}", one)
    return "\n".join([*lines, "}"]) + "\n"


def _segment(prefix: str, segment: Mapping[str, Any]) -> Iterator[str]:
    times = f"{segment['name']}, called {segment['calls']} time{'s' * (segment['calls'] != 1)}"
    yield f"  subgraph {_quoted(f'cluster_{prefix}')} {{"
    yield f"    label={_quoted(times)};"
    node_of: dict[str, str] = {}
    for number, port in enumerate(segment["inputs"]):
        node_of[port["name"]] = f"{prefix}i{number}"
        colour = _WEIGHT if port["kind"] == "weight" else _INPUT
        text = [port["name"], port["type"], port["layout"]]
        yield f'    {node_of[port["name"]]} [label={_lines(text)}, style=dashed, color="{colour}"];'
    for number, node in enumerate(segment["nodes"]):
        name = f"{prefix}n{number}"
        node_of.update(dict.fromkeys(node["outs"], name))
        cost = node["compute"] + node["comm"]
        if "kind" in node:
            payload = f"{bytes_text(node['payload'])}, " if node["payload"] else ""
            text = [f"{node['kind']} over {node['axis']}", f"{node['before']} -> {node['layout']}"]
            text += [f"{payload}{seconds_text(cost)}"] if cost else []
            shape = f'shape=ellipse, style=solid, color="{_TALK}"'
        else:
            text = [f"{node['outs'][0]} = {node['op']}", node["type"], node["layout"]]
            text += [seconds_text(cost)] if cost else []
            shape = f'color="{_OP}"'
        tip = "\n".join(filter(None, (node["module"], node["source"], node["why"])))
        yield f"    {name} [label={_lines(text)}, {shape}, tooltip={_quoted(tip)}];"
    for number, node in enumerate(segment["nodes"]):
        for ref in node["refs"]:
            if ref in node_of:
                yield f"    {node_of[ref]} -> {prefix}n{number};"
    yield "  }"


def _lines(words: Sequence[str]) -> str:
    return _quoted("\n".join(filter(None, words)))


def _quoted(text: str) -> str:
    """A string of the DOT language; line breaks as its escape."""
    plain = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + plain.replace("\r", "").replace("\n", "\\n") + '"'
