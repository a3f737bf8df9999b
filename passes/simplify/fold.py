"""Cut the joint graph into segments and recognise repeated ones.

Nodes of one layer and one phase (forward or backward) form a run. Runs with the same canonical form
(ops, arguments, types, inner wiring, which values leave) are one segment, called several times.
Correctness does not depend on how the runs are cut: anything that differs simply stays apart.
"""

from __future__ import annotations

import functools
import keyword
import re
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace

from autoshard.ir import Call, CallSite, Folded, Graph, Joint, Node, Ref, TensorType, refs_of
from autoshard.ir.graph import form_of
from autoshard.ir.names import free_name

DROPOUT = "autoshard.dropout.default"
SITE_ARG = 3
_LAYER = re.compile(r"^(.*?\.\d+)(?:\.|$)")


@dataclass
class _Run:
    label: str
    backward: bool
    nodes: list[Node] = field(default_factory=list)


def fold(joint: Joint) -> Folded:
    """The joint graph as calls of unique segments; dead nodes are left out."""
    nodes, uses = _live(joint)
    runs = _runs(nodes, uses)
    users = _outside_users(runs, joint, uses)
    types = joint.graph.types()
    ports = {p.name: p.target for p in joint.ports}
    known: dict[Hashable, str] = {}
    segments: dict[str, Graph] = {}
    calls: list[Call] = []
    for run in runs:
        inputs, outputs, body, base = _canonical(run, users)
        # equal bodies on inputs of other shapes are other segments: what a rank holds of them differs
        key = (body, tuple(types[v] for v in inputs), tuple(joint.apart.get(v) for v in inputs))
        if key not in known:
            name = free_name(_segment_name(run), segments)
            known[key] = name
            segments[name] = _segment(name, run, inputs, outputs, types, ports, base)
        calls.append(Call(known[key], inputs, outputs, run.label, run.backward, base))
    return Folded(segments, tuple(calls), joint)


def _live(joint: Joint) -> tuple[list[Node], dict[str, tuple[str, ...]]]:
    """The nodes that some result needs, and what each of them uses (under its first output)."""
    wanted = {r.value for r in joint.results}
    kept: list[Node] = []
    uses: dict[str, tuple[str, ...]] = {}
    for node in reversed(joint.graph.nodes):
        if not wanted.isdisjoint(node.outs):
            kept.append(node)
            uses[node.name] = used = tuple(refs_of(node))
            wanted.update(used)
    kept.reverse()
    return kept, uses


def layer_of(node: Node) -> str:
    """The layer a node lies in: the module path down to its first numbered part, and the call."""
    layer = _layer_name(node.origin.fqn)
    return layer if not layer or node.origin.call == 0 else f"{layer}#{node.origin.call}"


@functools.lru_cache(maxsize=4096)
def _layer_name(fqn: str) -> str:
    match = _LAYER.match(fqn)
    return match.group(1) if match else ""


def _runs(nodes: list[Node], uses: dict[str, tuple[str, ...]]) -> list[_Run]:
    """Runs in an order that respects all uses.

    A node joins the last run of its layer if nothing it needs is produced later than that run.
    """
    runs: list[_Run] = []
    where: dict[str, int] = {}
    last: dict[tuple[str, bool], int] = {}
    for node in nodes:
        key = (layer_of(node), node.backward)
        needed = max([where.get(r, -1) for r in uses[node.name]], default=-1)
        at = last.get(key, -1)
        if at < needed or at < 0 or (runs and runs[-1].backward != node.backward and at != len(runs) - 1):
            runs.append(_Run(*key))
            at = last[key] = len(runs) - 1
        runs[at].nodes.append(node)
        for out in node.outs:
            where[out] = at
    return runs


def _outside_users(runs: list[_Run], joint: Joint, uses: dict[str, tuple[str, ...]]) -> set[str]:
    """Values used outside the run that makes them."""
    home = {out: k for k, run in enumerate(runs) for node in run.nodes for out in node.outs}
    outside = {r.value for r in joint.results}
    for k, run in enumerate(runs):
        for node in run.nodes:
            outside.update([r for r in uses[node.name] if home.get(r, -1) != k])
    return outside


def _canonical(run: _Run, users: set[str]) -> tuple[tuple[str, ...], tuple[str, ...], Hashable, int]:
    """(inputs, outputs, key equal for equal bodies, lowest dropout site) of a run."""
    number: dict[str, int] = {}
    inputs: list[str] = []
    outputs: list[str] = []
    new: set[str] = {out for node in run.nodes for out in node.outs}
    base = min((int(n.args[SITE_ARG]) for n in run.nodes if n.op == DROPOUT), default=0)
    body: list[Hashable] = [run.backward]

    def canon(name: str) -> Hashable:
        if name not in number:
            number[name] = len(number)
            if name not in new:
                inputs.append(name)
        return ("ref", number[name])

    for node in run.nodes:
        args = form_of(_relative_site(node, base).args, canon)
        entry = (node.op, args, tuple([(k, form_of(v, canon)) for k, v in node.kwargs]))
        for out in node.outs:
            number.setdefault(out, len(number))
        leaving = tuple(out in users for out in node.outs)
        body.append((entry, node.types, leaving))
        outputs.extend(out for out in node.outs if out in users)
    return tuple(inputs), tuple(outputs), tuple(body), base


def _relative_site(node: Node, base: int) -> Node:
    if node.op != DROPOUT:
        return node
    args = list(node.args)
    args[SITE_ARG] = CallSite(int(args[SITE_ARG]) - base)
    return replace(node, args=tuple(args))


def _segment(
    name: str,
    run: _Run,
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    types: Mapping[str, TensorType],
    ports: dict[str, str],
    base: int,
) -> Graph:
    """The body, with inputs renamed to what they are in the model where that is known."""
    taken = {out for node in run.nodes for out in node.outs}
    rename: dict[str, str] = {}
    for value in inputs:
        target = ports.get(value, "")
        wish = _identifier(_relative(target, run.label)) if target and not target.isdigit() else value
        rename[value] = free_name(wish, taken | set(rename.values()))
    nodes = tuple(_rename(_relative_site(node, base), rename) for node in run.nodes)
    return Graph(name, tuple((rename[v], types[v]) for v in inputs), nodes, outputs)


def _rename(node: Node, names: dict[str, str]) -> Node:
    from autoshard.ir import substitute

    return substitute(node, lambda name: Ref(names.get(name, name)))


def _relative(target: str, label: str) -> str:
    prefix = label.split("#", maxsplit=1)[0] + "."
    return target[len(prefix) :] if target.startswith(prefix) else target


def _identifier(text: str) -> str:
    name = re.sub(r"\W+", "_", text).strip("_") or "x"
    return f"v_{name}" if name[0].isdigit() or keyword.iskeyword(name) else name


def _segment_name(run: _Run) -> str:
    phase = "bwd" if run.backward else "fwd"
    label = run.label.split("#")[0]
    if not label:
        return f"outer_{phase}"
    return f"{_identifier(label.rsplit('.', 1)[0].rsplit('.', 1)[-1])}_{phase}"
