"""What a name that someone types means in a program: a parameter, an input, a module, or a value."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Literal

from autoshard.errors import UsageError
from autoshard.ir import Call, Node, Port
from autoshard.program.layers import relabelled, upwards
from autoshard.program.program import Program
from autoshard.report.decided import starred

Kind = Literal["parameter", "buffer", "input", "module", "value"]
_KINDS: Mapping[str, Kind] = {"param": "parameter", "buffer": "buffer", "const": "buffer", "input": "input"}
#: more than a reader can use
_MOST_NAMES = 8


@dataclass(frozen=True)
class Place:
    """A value: of a call of a segment, by the call's number in main, or of main itself (call None)."""

    call: int | None
    value: str


@dataclass(frozen=True)
class LookupSubject:
    """What was asked about. port: of a parameter, buffer or input. place: of a value."""

    kind: Kind
    name: str
    port: Port | None = None
    place: Place | None = None


class ProgramIndex:
    """Names in a program, and where its values are made."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.lowered = program.lowered

    # -- names -----------------------------------------------------------------------------------------

    @cached_property
    def ports(self) -> Mapping[str, Port]:
        """Parameters, buffers and inputs under the names they have in the model."""
        names = self.program.signature.input_names
        ports: dict[str, Port] = {}
        for port in self.program.signature.ports:
            if port.kind in _KINDS:
                digits = port.kind == "input" and port.target.isdigit()
                ports.setdefault(names[int(port.target)] if digits else port.target, port)
        return ports

    def name_of(self, port: Port) -> str:
        """What a port is called in the model."""
        return next((name for name, other in self.ports.items() if other is port), port.target or port.name)

    @cached_property
    def modules(self) -> Mapping[str, tuple[Place, ...]]:
        """Module -> the values that its forward makes, in order, those of modules inside it among them."""
        values: dict[str, list[Place]] = {}
        for number, item in enumerate(self.lowered.main):
            if isinstance(item, Call) and not item.backward:
                nodes = self.lowered.segments[item.segment].graph.nodes
                for node, note in zip(nodes, self.program.notes[item.segment], strict=True):
                    result = result_of(node)
                    for module in upwards(self.relabelled(note.fqn, item.label)) if result else ():
                        values.setdefault(module, []).append(Place(number, result))
        return {name: tuple(places) for name, places in values.items()}

    @cached_property
    def labels(self) -> frozenset[str]:
        """Layers that main calls."""
        return frozenset(i.label for i in self.lowered.main if isinstance(i, Call) and i.label)

    def relabelled(self, module: str, label: str) -> str:
        """A module of a segment in the layer ``label``."""
        return relabelled(module, label, self.labels)

    def find(self, name: str) -> LookupSubject:
        """The one thing that a name, the end of one, or a glob means.

        Values are ``SEGMENT/VALUE`` as `autoshard inspect` prints them, or VALUE alone where that is one.
        UsageError with the nearest names if there is nothing, with all of them if there is more than one.
        """
        exact = self._exact(name)
        if exact is not None:
            return exact
        names = [*self.ports, *self.modules]
        near = [
            k for k in names if k.endswith(f".{name}") or fnmatchcase(k, name) or fnmatchcase(k, f"*.{name}")
        ]
        if len({starred(k, self.labels) for k in near}) == 1:
            near = near[:1]  # repeated layers are decided about together
        if len(near) == 1:
            subject = self._exact(near[0])
            assert subject is not None
            return subject
        if near:
            raise UsageError(f"{name!r} could be more than one thing", hint=f"one of {_few(near)}")
        raise UsageError(
            f"nothing in the program is called {name!r}",
            why="names are those of the model's modules, parameters and inputs, or SEGMENT/VALUE",
            hint=f"close to it: {_few(close)}"
            if (close := self._close(name, names))
            else "autoshard inspect shows them",
        )

    def _exact(self, name: str) -> LookupSubject | None:
        port = self.ports.get(name)
        if port is not None:
            return LookupSubject(_KINDS[port.kind], name, port)
        if name in self.modules:
            return LookupSubject("module", name)
        segment, slash, value = name.rpartition("/")
        places = [(seg, place) for (seg, exact), place in self._values.items() if exact == value]
        if slash:
            # passes may have cut the segment in parts, whose names begin with its own
            exact = [p for p in places if p[0] == segment]
            places = exact or [p for p in places if p[0].startswith(f"{segment}_")]
        if len(places) > 1:
            raise UsageError(
                f"more than one segment has a value {value!r}",
                hint=f"one of {_few([f'{seg}/{value}' for seg, _ in places])}",
            )
        return LookupSubject("value", f"{places[0][0]}/{value}", place=places[0][1]) if places else None

    @cached_property
    def _values(self) -> Mapping[tuple[str, str], Place]:
        """(segment, value) -> where its first call makes it."""
        places: dict[tuple[str, str], Place] = {}
        seen: set[str] = set()
        for number, item in enumerate(self.lowered.main):
            if isinstance(item, Call) and item.segment not in seen:
                seen.add(item.segment)
                for node in self.lowered.segments[item.segment].graph.nodes:
                    typed = zip(node.outs, node.types, strict=True)
                    places.update({(item.segment, o): Place(number, o) for o, t in typed if t is not None})
        return places

    def _close(self, name: str, names: Sequence[str]) -> list[str]:
        end = name.rpartition(".")[2]
        close = get_close_matches(name, names, n=3, cutoff=0.5)
        return list(dict.fromkeys([*close, *(k for k in names if k.endswith(f".{end}"))]))[:3]

    # -- where values come from ------------------------------------------------------------------------

    @cached_property
    def makers(self) -> Mapping[str, tuple[int, int]]:
        """Main value -> (number of the instruction that makes it, position among its results)."""
        return {v: (k, at) for k, item in enumerate(self.lowered.main) for at, v in enumerate(item.outs)}

    @cached_property
    def ports_by_value(self) -> Mapping[str, Port]:
        return {p.name: p for p in self.program.signature.ports}

    def same_layers(self, place: Place) -> tuple[str, ...]:
        """Labels of all calls of the segment that a value belongs to."""
        item = None if place.call is None else self.lowered.main[place.call]
        if not isinstance(item, Call):
            return ()
        segment = item.segment
        calls = [i for i in self.lowered.main if isinstance(i, Call) and i.segment == segment and i.label]
        return tuple(dict.fromkeys(i.label for i in calls))


def result_of(node: Node) -> str:
    """The first tensor that a node makes, "" if it makes none."""
    typed = zip(node.outs, node.types, strict=True)
    return next((out for out, type_ in typed if type_ is not None), "")


def _few(names: Collection[str]) -> str:
    shown = list(names)[:_MOST_NAMES]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f", and {more} more" if more else "")
