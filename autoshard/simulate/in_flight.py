"""Bytes of messages from where they are issued to where something needs what they bring."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import count

from autoshard.ir import Node, refs_of
from autoshard.ir.collectives import COLLECTIVES, axes_of, goes_in_turn
from autoshard.ir.lowered import PlacedValue
from autoshard.ir.offload import STORE
from autoshard.ir.quantized import FEW
from autoshard.simulate.op_work import Ops


@dataclass(frozen=True)
class OnTheWay:
    """A message; its results count as there since it was issued.

    outs: what it brings. turn: of those of which one at a time is on its way, see `turn_of`. held:
    bytes that it takes beside its results until it has arrived. finish: that unpacking it takes beside that.
    """

    outs: frozenset[str]
    turn: str
    held: float
    finish: float


def message_of(node: Node, values: Mapping[str, PlacedValue], ops: Ops) -> OnTheWay:
    """Of a collective as the runtime issues it (`runtime.collectives`), what stays in memory as it is sent
    counted with nothing."""
    taken = sum(ops.nbytes(values[n]) for n in refs_of(node))
    if node.op == STORE:  # what is copied stays until the copy is done
        return OnTheWay(frozenset(node.outs), turn_of(node), taken, 0.0)
    given = sum(ops.nbytes(values[n]) for n in node.outs if n in values)
    spec = COLLECTIVES[node.op]
    cut, joined = ops.strewn(node, values)  # what does not lie in memory as it is sent, and as it comes
    held = finish = 0.0
    if ops.behaviour.transport == "memory" and spec.family == "layout":
        # what is sent lies there until it arrives, and what comes is made from what the others have sent
        new = {"all_reduce": given / ops.ways(node), "all_to_all": 2.0 * given}.get(spec.transfer, given)
        return OnTheWay(frozenset(node.outs), turn_of(node), taken - given, new)
    match spec.family, spec.transfer:
        case "layout", "all_gather":
            held, finish = (taken if spec.bucket and joined else 0.0), (given if joined else 0.0)
        case "layout", "reduce_scatter":
            held = taken if cut else 0.0
            if ops.behaviour.transport == "network":  # the parts of all ranks come first, then their sum
                held, finish = held + taken - given, given
                if taken > FEW:  # only what others send arrives
                    held -= given
        case "layout", "all_to_all":
            held, finish = (taken if cut else 0.0), (given if joined else 0.0)
        case "experts", _:
            held = 2.0 * ops.sent_tokens(node, values)[-1] - given  # what goes, and what comes
        case "quantised", "all_gather":
            held, finish = ops.packed(node, values) - given, 2.0 * given
        case "quantised", _:
            held, finish = 2.0 * ops.packed(node, values) - given, given + taken
    return OnTheWay(frozenset(node.outs), turn_of(node), held, finish)


def turn_of(node: Node) -> str:
    """The axes of a reduce-scatter, or ``host`` for a store, of which one at a time is on its way; "" for all
    else."""
    if node.op == STORE:
        return "host"
    return "+".join(axes_of(node)) if goes_in_turn(node) else ""


class Messages:
    """Those on their way while the ops of a rank run one after the other. held: their bytes together."""

    def __init__(self, late: Iterable[OnTheWay] = ()) -> None:
        self.held = 0.0
        self._all: dict[int, OnTheWay] = {}
        #: what is brought -> numbers of messages, and likewise their turns; some may have arrived
        self._bringing: dict[str, list[int]] = {}
        self._taking_turns: dict[str, list[int]] = {}
        self._numbers = count()
        self.issue(late)

    def issue(self, messages: Iterable[OnTheWay]) -> None:
        for number, message in zip(self._numbers, messages, strict=False):
            self._all[number] = message
            self.held += message.held
            for out in message.outs:
                self._bringing.setdefault(out, []).append(number)
            if message.turn:
                self._taking_turns.setdefault(message.turn, []).append(number)

    def bringing(self) -> tuple[OnTheWay, ...]:
        """Those that bring anything."""
        return tuple(m for m in self._all.values() if m.outs)

    def of_turns(self, turns: Iterable[str]) -> tuple[OnTheWay, ...]:
        """Those of which one at a time is on its way."""
        numbers = (n for turn in turns for n in self._taking_turns.get(turn, ()))
        return tuple(self._all[number] for number in self._there(numbers))

    def arrive(self, needed: Iterable[str], turn: str = "") -> float:
        """Wait for those that bring something needed, or whose turn it is; the most bytes while they are
        unpacked."""
        peak = 0.0
        numbers = [n for name in needed for n in self._bringing.pop(name, ())]
        for number in self._there((*numbers, *self._taking_turns.pop(turn, ()))):
            peak = max(peak, self._arrived(number))
        return peak

    def arrive_all(self) -> float:
        return max(map(self._arrived, tuple(self._all)), default=0.0)

    def _there(self, numbers: Iterable[int]) -> list[int]:
        """Those of them that have not arrived, in the order in which they were issued."""
        return sorted({n for n in numbers if n in self._all})

    def _arrived(self, number: int) -> float:
        """The bytes while it is unpacked."""
        message = self._all.pop(number)
        peak = self.held + message.finish
        self.held = self.held - message.held if self._all else 0.0
        return peak
