"""The full model before placements, stored beside its program so that one can be checked against the other.

It is written in the same text as a program, on a mesh without axes, and read back by the same parser.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields, replace

from autoshard.errors import VerificationError
from autoshard.ir import Call, Folded, Graph, Joint
from autoshard.ir.lowered import Lowered, LoweredSegment, PlacedValue, StagePart
from autoshard.passes.simplify.batch_terms import NO_TERMS, BatchTerms
from autoshard.passes.simplify.scale_terms import scale_terms
from autoshard.program.parse import parse_program
from autoshard.program.program import NodeNote, Program, Signature
from autoshard.program.text import main_lines, segment_lines


def original_of(folded: Folded, names: Mapping[str, str], terms: BatchTerms = NO_TERMS) -> Lowered:
    """The folded model (as after ``030_normalize``) as a program on a mesh without axes.

    names: port -> what the program calls it. terms: what adds up over its microbatches. Results keep the
    order of the joint graph.
    """
    segments = {n: LoweredSegment(g, dict.fromkeys(g.types(), ()), {}) for n, g in folded.segments.items()}
    values = {names[p.name]: PlacedValue(p.type, ()) for p in folded.joint.ports}
    calls = [_renamed(c, names) for c in folded.calls]
    for call in calls:
        graph = folded.segments[call.segment]
        types = graph.types()
        values.update({o: PlacedValue(types[i], ()) for o, i in zip(call.outs, graph.outputs, strict=True)})
    main = (*(c for c in calls if not c.backward), *(c for c in calls if c.backward))
    first = sum(not c.backward for c in calls)
    parts = (StagePart(0, "forward", 0, first), StagePart(0, "backward", first, len(main)))
    results = tuple(names.get(r.value, r.value) for r in folded.joint.results)
    new = Lowered(segments, main, values, results, parts)
    return scale_terms(new, replace(terms, tangent=names.get(terms.tangent, "")), axes=0)


def folded_of(original: Lowered, signature: Signature) -> Folded:
    """The folded model that `original_of` wrote down; its inputs are called as the program calls them.

    signature: of the program, whose ports it shares.
    """
    calls = tuple(item for item in original.main if isinstance(item, Call))
    results = tuple(replace(r, value=v) for r, v in zip(signature.results, original.results, strict=True))
    inputs = tuple((p.name, p.type) for p in signature.ports)
    same = {f.name: getattr(signature, f.name) for f in fields(signature)}
    joint = Joint(Graph("joint", inputs, (), original.results), **{**same, "results": results})
    return Folded({name: s.graph for name, s in original.segments.items()}, calls, joint)


def _renamed(call: Call, names: Mapping[str, str]) -> Call:
    return replace(call, args=tuple(names.get(a, a) for a in call.args))


def notes_of_original(original: Lowered) -> dict[str, tuple[NodeNote, ...]]:
    """Where each node of each segment of the model comes from."""
    return {
        name: tuple(NodeNote(n.origin.fqn, n.origin.source) for n in segment.graph.nodes)
        for name, segment in original.segments.items()
    }


def original_text(original: Lowered, signature: Signature, notes: Mapping[str, tuple[NodeNote, ...]]) -> str:
    """The text of ``original.py``. signature: of the program, whose ports it shares."""
    results = tuple(replace(r, value=v) for r, v in zip(signature.results, original.results, strict=True))
    as_program = Program("", original, replace(signature, results=results), dict(notes))
    lines = ["# the model as captured, decomposed and normalized; shapes are those of one microbatch", ""]
    for name, segment in original.segments.items():
        own = notes.get(name) or (NodeNote(),) * len(segment.graph.nodes)
        lines += ["", *segment_lines(segment, own, ()), ""]
    lines += ["", *main_lines(as_program, ())]
    return "\n".join(lines).rstrip("\n") + "\n"


def parse_original(
    text: str, results: tuple[str, ...], signature: Signature, ops: Collection[str]
) -> Lowered:
    """The model of a text. Raises VerificationError unless it has the ports and results of the program."""
    lowered, ports, _ = parse_program(text, (), ops)
    if ports != signature.ports:
        raise VerificationError(
            "original.py and program.py have different inputs", hint="compile the program again"
        )
    new = {p.name for p in ports} | {o for i in lowered.main for o in i.outs}
    if len(results) != len(signature.results) or not new.issuperset(results):
        raise VerificationError(
            "original.py does not make the results that the manifest names", hint="compile the program again"
        )
    return replace(lowered, results=results)
