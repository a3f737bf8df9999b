"""A deep model with most of its equal layers left out, for what can be said of all of them by looking at few.

Layers are equal if their calls are, and if what they take and give stands to them as it does for the layer
before: its values come from as far back, its parameters are used as the other's are. Of a run of such layers
the first and the last stay, and those behind the gap take what those before it make. Nothing else changes:
names, segments and the other calls stay what they are.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from autoshard.ir import Call, Folded
from autoshard.ir.flow import Flow
from autoshard.search.plan.plan import Plan, Recompute

#: layers may be equal in turns of so many
_TURNS = range(1, 9)
#: a value that so many other layers use is the model's rather than one layer's
_MANY = 4
#: at least so many blocks are left out, or it is not worth it
_WORTH = 4

#: what a call does, but for which layer it is of
_Look: TypeAlias = tuple[Hashable, ...]


@dataclass(frozen=True)
class Gap:
    """Layers that were left out, by the labels of calls.

    like: the layers right before, each block of which is as those left out are. behind: as many right after
    them. end: the layer after those, "" if there is none. left_out: in order, some full blocks.
    """

    like: tuple[str, ...]
    behind: tuple[str, ...]
    end: str
    left_out: tuple[str, ...]

    @property
    def blocks(self) -> int:
        return len(self.left_out) // len(self.like)

    def of(self, blocks: int) -> Gap:
        """The same with only the first so many of the blocks missing."""
        return replace(self, left_out=self.left_out[: blocks * len(self.like)])


@dataclass(frozen=True)
class Shortened:
    """What is left of a model, how values travel in it, its plan, and where layers are missing, in order."""

    folded: Folded
    flow: Flow
    plan: Plan
    gaps: tuple[Gap, ...]


class Shorter:
    """A model without most of its equal layers, in several lengths."""

    def __init__(self, folded: Folded, flow: Flow, plan: Plan) -> None:
        self._plan = plan
        self._layers = _Layers(folded, flow, plan.recompute)
        self._gaps = self._layers.gaps()

    def model(self, *, more: int = 0, at: int | None = None) -> Shortened | None:
        """The model; None if there are no gaps, or if anything but layers uses what they make.

        more: blocks of equal layers that stay at each gap beside one on either side of it; at: at that one
        alone, by number.
        """
        gaps = [
            (first + more * turn, count - more * turn, turn) if at in (None, number) else (first, count, turn)
            for number, (first, count, turn) in enumerate(self._gaps)
        ]
        return _Shortening(self._layers, self._plan, gaps).made() if gaps else None


class _Layers:
    """The layers of a model in the order of forward.

    labels: of calls, of each layer one. number: label -> its place. calls: of each layer.
    """

    def __init__(self, folded: Folded, flow: Flow, recompute: Mapping[str, Recompute]) -> None:
        self.folded, self.flow, self.recompute = folded, flow, recompute
        forward = dict.fromkeys(c.label for c in folded.calls if c.label and not c.backward)
        self.labels = tuple(forward)
        self.number = {label: k for k, label in enumerate(self.labels)}
        self.calls: list[list[Call]] = [[] for _ in self.labels]
        #: value -> (layer, call of it, place among what that gives)
        self.maker: dict[str, tuple[int, int, int]] = {}
        #: value -> layers that use it
        users: dict[str, set[int]] = {}
        for call in folded.calls:
            layer = self.number.get(call.label)
            if layer is not None:
                own = self.calls[layer]
                self.maker.update((v, (layer, len(own), k)) for k, v in enumerate(call.outs))
                own.append(call)
            for value in call.args:
                users.setdefault(value, set()).add(-1 if layer is None else layer)
        self.users = users
        self.results = {r.value: r for r in folded.joint.results}
        #: identities of the calls that backward recomputes
        self.again = self._run_again()

    def gaps(self) -> list[tuple[int, int, int]]:
        """(first layer left out, how many, of how many a block is)."""
        looks = self._looks()
        result: list[tuple[int, int, int]] = []
        at = 0
        while at < len(looks):
            turn, end = self._run(looks, at)
            blocks = (end - at) // turn - 2
            if blocks >= _WORTH:
                result.append((at + turn, blocks * turn, turn))
            at = end
        return result

    @staticmethod
    def _run(looks: Sequence[_Look], at: int) -> tuple[int, int]:
        """(layers in a turn, end) of the longest run of equal layers from here on."""
        best = (1, at + 1)
        for turn in _TURNS:
            end = at + turn
            while end < len(looks) and looks[end] == looks[end - turn]:
                end += 1
            if end - at >= 2 * turn and end > best[1]:
                best = (turn, end)
        return best

    def _looks(self) -> list[_Look]:
        """What each layer does; equal for layers that are."""
        return [
            tuple(self._look(layer, call, id(call) in self.again) for call in calls)
            for layer, calls in enumerate(self.calls)
        ]

    def _run_again(self) -> set[int]:
        left = {name: choice.calls for name, choice in self.recompute.items()}
        result: set[int] = set()
        for call in self.folded.calls:
            if not call.backward and left.get(call.segment, 0) > 0:
                left[call.segment] -= 1
                result.add(id(call))
        return result

    def _look(self, layer: int, call: Call, again: bool) -> _Look:
        taken = tuple(self._taken(layer, value) for value in call.args)
        given = tuple(self._given(value) for value in call.outs)
        return call.segment, call.backward, again, taken, given

    def _taken(self, layer: int, value: str) -> Hashable:
        """Where a layer has a value from, as another layer would say it."""
        new = self.maker.get(value)
        if new is not None and not self.is_shared(value):
            return "made", layer - new[0], new[1:]
        place = self.flow.class_of.get(value)
        if place is not None and self.users[value] == {layer}:
            return "own", place
        return "shared", value

    def is_shared(self, value: str) -> bool:
        """Whether many layers use what a layer makes: a bias of all attention, say."""
        return len(self.users[value] - {self.maker[value][0]}) >= _MANY

    def _given(self, value: str) -> Hashable:
        """What a value is for beside other layers; equal for no two layers if that is anything but the
        gradient of a parameter."""
        result = self.results.get(value)
        if -1 in self.users.get(value, ()) or (result is not None and result.kind != "grad"):
            return "elsewhere", value
        return "grad" if result is not None else ""


class _Shortening:
    """Leaves gaps."""

    def __init__(self, layers: _Layers, plan: Plan, gaps: Sequence[tuple[int, int, int]]) -> None:
        self.layers, self.plan, self.gaps = layers, plan, gaps
        self.gap_of = {k: gap for gap in gaps for k in range(gap[0], gap[0] + gap[1])}

    def made(self) -> Shortened | None:
        layers, folded = self.layers, self.layers.folded
        joint = folded.joint
        calls = self._calls()
        if calls is None:
            return None
        gone = {v for k in self.gap_of for call in layers.calls[k] for v in call.outs}
        numbers = [n for n, r in enumerate(joint.results) if r.value not in gone]
        results = tuple(joint.results[n] for n in numbers)
        used = {value for call in calls for value in call.args} | {r.value for r in results}
        # whatever only the layers left out use is of them, with its gradient
        ports = tuple(p for p in joint.ports if p.name in used or p.name not in layers.users)
        lost = {p.target for p in joint.ports if p.kind == "param"} - {p.target for p in ports}
        left = {r.target for r in joint.results if r.value in gone}
        if not left <= lost or any(r.kind == "grad" and r.target in lost for r in results):
            return None
        at = {n: k for k, n in enumerate(numbers)}
        plan = replace(
            self.plan,
            results={at[n]: layout for n, layout in self.plan.results.items() if n in at},
            recompute=self._recompute(),
        )
        short = replace(folded, calls=tuple(calls), joint=replace(joint, ports=ports, results=results))
        # the classes of ports keep their names, by which the plan knows them
        flow = replace(layers.flow, results=tuple(layers.flow.results[n] for n in numbers))
        return Shortened(short, flow, plan, tuple(map(self._gap, self.gaps)))

    def _calls(self) -> list[Call] | None:
        """Those that are left, in order; None if something that they take is not there by then.

        What stands for a call that is left out comes where that would have come: in backward a layer may take
        a view that the layer before it makes.
        """
        layers, folded = self.layers, self.layers.folded
        #: by identity, in order: the calls that stay, with what they take
        left: dict[int, Call] = {}
        #: call that is left out -> the one that stands for it
        stands: dict[int, int] = {}
        for call in folded.calls:
            layer = layers.number.get(call.label)
            if layer is not None and layer in self.gap_of:
                continue
            args: list[str] = []
            for value in call.args:
                other = self._instead(layer, value)
                if other is None:
                    return None
                if other != value:
                    stands[id(self._maker(value))] = id(self._maker(other))
                args.append(other)
            left[id(call)] = replace(call, args=tuple(args))
        known = {p.name for p in folded.joint.ports}
        ordered: list[Call] = []
        for call in folded.calls:
            new = left.pop(id(call) if id(call) in left else stands.get(id(call), 0), None)
            if new is None:
                continue
            if not known.issuperset(new.args):
                return None
            known.update(new.outs)
            ordered.append(new)
        return ordered

    def _maker(self, value: str) -> Call:
        layer, number, _ = self.layers.maker[value]
        return self.layers.calls[layer][number]

    def _instead(self, layer: int | None, value: str) -> str | None:
        """The value that stands for one that a layer takes, None if nothing does."""
        new = self.layers.maker.get(value)
        if new is None or new[0] not in self.gap_of:
            return value
        first, count, turn = self.gap_of[new[0]]
        maker = new[0]
        if layer is None or self.layers.is_shared(value):
            return None
        if layer >= first + count and maker >= first + count - turn:
            maker -= count
        elif layer < first and maker < first + turn:
            maker += count
        else:
            return None
        return self.layers.calls[maker][new[1]].outs[new[2]]

    def _recompute(self) -> dict[str, Recompute]:
        """The same calls of those that are left."""
        layers = self.layers
        gone = [c for k in self.gap_of for c in layers.calls[k] if id(c) in layers.again]
        return {
            name: Recompute(choice.policy, choice.calls - sum(c.segment == name for c in gone))
            for name, choice in self.plan.recompute.items()
        }

    def _gap(self, gap: tuple[int, int, int]) -> Gap:
        first, count, turn = gap
        labels, behind = self.layers.labels, first + count
        return Gap(
            labels[first - turn : first],
            labels[behind : behind + turn],
            labels[behind + turn] if behind + turn < len(labels) else "",
            labels[first:behind],
        )
