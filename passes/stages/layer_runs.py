"""Calls of repeated layers that follow each other in the same way, each wired to its neighbours alike.

A stretch is units of one or more calls (models alternate kinds of layers), one after the other. What a call
is given and who uses what it makes is described by how far away it is; where a call and the one a unit later
are described alike, any one of them says what all of them are like.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from autoshard.capture.expand_repeats import ZEROS
from autoshard.capture.repeat_op import REPEAT, REPEAT_BACKWARD, RepeatKey
from autoshard.ir import Joint, Node, Ref, refs_of

#: kinds of layers that may take turns
_LONGEST = 8


@dataclass(frozen=True)
class CallOfLayer:
    """One call of a repeated layer in a captured model: its node, and that of its gradient if it has one."""

    key: RepeatKey
    forward: Node
    backward: Node | None

    def nodes(self) -> Iterator[Node]:
        yield self.forward
        if self.backward is not None:
            yield self.backward


@dataclass(frozen=True)
class Stretch:
    """Calls number ``first`` to ``first + size * units`` (without it) of the model, ``size`` in a unit."""

    first: int
    size: int
    units: int

    def unit(self, number: int) -> range:
        """Calls of a unit; negative numbers count from the end."""
        start = self.first + (number % self.units) * self.size
        return range(start, start + self.size)


def calls_of(joint: Joint) -> list[CallOfLayer]:
    """In the order of the calls."""
    forward: dict[int, tuple[RepeatKey, Node]] = {}
    backward: dict[int, Node] = {}
    for node in joint.graph.nodes:
        if node.op == REPEAT:
            key = RepeatKey.parse(node.args[1])
            forward[key.call] = key, node
        elif node.op == REPEAT_BACKWARD:
            backward[RepeatKey.parse(node.args[2]).call] = node
    return [CallOfLayer(*forward[call], backward.get(call)) for call in sorted(forward)]


class Wiring:
    """How calls of layers hang together in a captured model."""

    def __init__(self, joint: Joint, calls: Sequence[CallOfLayer]) -> None:
        self.joint, self.calls = joint, calls
        self.ports = {p.name: p for p in joint.ports}
        #: value -> the call that makes it, in which phase, at which position
        self.made = {
            out: (k, node.backward, position)
            for k, call in enumerate(calls)
            for node in call.nodes()
            for position, out in enumerate(node.outs)
        }

    def stretches(self, least: int) -> Iterator[Stretch]:
        """Of at least so many units, none in another."""
        start, end = 0, len(self.calls)
        while start < end:
            result = next(
                (s for size in range(1, _LONGEST + 1) if (s := self._from(start, size)).units >= least), None
            )
            if result is None:
                start += 1
            else:
                yield result
                start += result.size * result.units

    def own(self, call: int) -> list[str]:
        """Ports that only this call uses, in the order of what its layer is fed."""
        at = self.calls[call]
        away = self.joint.away.get(at.key.call, {})
        given = iter(at.forward.args[0])
        feeds = range(len(self.joint.bodies[at.key.body].feeds))
        fed = [self._parameters[away[k]] if k in away else next(given).name for k in feeds]
        return [name for name in fed if self._owned(name, call)]

    def _from(self, start: int, size: int) -> Stretch:
        """The longest from a call on with units of a size."""
        about, end = self._described, start
        while end + size < len(about) and about[end] == about[end + size] and about[end][0] <= size:
            end += 1
        return Stretch(start, size, (end - start) // size + 1 if end > start else 0)

    @cached_property
    def _parameters(self) -> Mapping[str, str]:
        return {p.target: p.name for p in self.joint.ports if p.kind == "param"}

    @cached_property
    def _zeros(self) -> Mapping[str, Hashable]:
        """What stands for gradients of what nothing uses: value -> type."""
        return {n.name: n.types for n in self.joint.graph.nodes if n.op in ZEROS}

    @cached_property
    def _users(self) -> Mapping[str, list[tuple[object, ...]]]:
        """Per value who uses it: calls by number, phase and position, others by name."""
        users: dict[str, list[tuple[object, ...]]] = {}
        numbers = {n.name: (k, n.backward) for k, call in enumerate(self.calls) for n in call.nodes()}
        for node in self.joint.graph.nodes:
            if node.name in numbers:
                # what the gradient's node has of the forward's tensors, it has of the layer's own call
                for position, ref in enumerate(node.args[0]):
                    users.setdefault(ref.name, []).append((*numbers[node.name], position))
            elif node.op not in ZEROS:  # they ask for no more than a type
                for name in refs_of(node):
                    users.setdefault(name, []).append(("node", node.name))
        for result in self.joint.results:
            users.setdefault(result.value, []).append(("result", result.kind, result.target))
        return users

    def _owned(self, name: str, call: int) -> bool:
        port = self.ports.get(name)
        return (
            port is not None
            and port.kind in ("param", "buffer")
            and all(user[0] == call for user in self._users.get(name, ()))
        )

    @cached_property
    def _described(self) -> list[tuple[int, Hashable]]:
        """Per call how far away it reaches at most, and what it is like: the same of calls that are alike."""
        return [self._description(k) for k in range(len(self.calls))]

    def _description(self, k: int) -> tuple[int, Hashable]:
        call, reach = self.calls[k], 0

        def source(ref: Ref) -> Hashable:
            nonlocal reach
            if ref.name in self.made:
                at, backward, position = self.made[ref.name]
                reach = max(reach, abs(k - at))
                return k - at, backward, position
            if ref.name in self._zeros and len(self._users[ref.name]) == 1:
                return self._zeros[ref.name]
            return "own" if self._owned(ref.name, k) else ref.name

        def use(user: tuple[object, ...]) -> Hashable:
            nonlocal reach
            if isinstance(user[0], int):
                reach = max(reach, abs(k - user[0]))
                return k - user[0], *user[1:]
            own = user[:2] == ("result", "grad") and self._owned(self._parameters[str(user[2])], k)
            return "own" if own else user

        about: list[Hashable] = [call.key.body, tuple(sorted(self.joint.away.get(call.key.call, ())))]
        for node in call.nodes():
            about.append(tuple([source(ref) for ref in node.args[0]]))
            about.append(tuple([tuple(map(use, self._users.get(out, ()))) for out in node.outs]))
        return reach, tuple(about)
