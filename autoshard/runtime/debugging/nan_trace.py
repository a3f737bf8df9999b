"""NaNs under ``torch.autograd.detect_anomaly()``: in which op of the user's model they begin, and where."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from autoshard.errors import AnomalyError
from autoshard.runtime.debugging.op_places import OpPlace, OpPlaces
from autoshard.runtime.groups import reduced
from autoshard.runtime.pending import arrived
from autoshard.runtime.prepared_steps import PreparedItem
from autoshard.runtime.straight_line import Stopping

if TYPE_CHECKING:
    from autoshard.runtime.runner import Runner

K = TypeVar("K")
_NEVER = 1 << 62


class NanTrace:
    """Of one call, forward and backward: a NaN is followed from the op that made it to what it spoils.

    All ranks number the ops alike, as they run one program. forward: whether it sees that, too.
    """

    def __init__(self, places: OpPlaces, *, forward: bool) -> None:
        self.places, self.forward = places, forward
        #: value of main -> number of what its NaN began in
        self.began: dict[str, int] = {}
        #: by number: an op, or the name of a value that the call was given
        self._all: list[OpPlace | str] = []
        self._known: set[str] = set()

    @classmethod
    def if_asked(cls, places: OpPlaces, *, forward: bool) -> NanTrace | None:
        """One for what begins, in torch's anomaly mode."""
        asked = torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()
        return cls(places, forward=forward) if asked else None

    def arrived(self, values: dict[str, Any], names: Sequence[str]) -> list[Any]:
        """Values, waited for; those that no op was seen to make are looked at."""
        result = {name: arrived(values[name]) for name in names}
        for name in [n for n in result if n not in self._known]:
            self._note(self.places.values.get(name, name), self.began, [name], [result[name]], [])
        self._known.update(names)
        return [result[name] for name in names]

    def run(self, item: PreparedItem, args: Sequence[Any]) -> Stopping:
        """The results of an instruction, from stop to stop, each of its ops looked at."""
        steps, slots, ends = item.opened(args)
        began = {k: self.began[a] for k, a in enumerate(item.args) if a in self.began}
        for step, place in zip(steps, self.places.of(item.instruction), strict=True):
            if step.stops:
                yield
            step.run(slots, item.site)
            for slot in step.outs:
                slots[slot] = arrived(slots[slot])
            before = [began[slot] for slot in step.uses if slot in began]
            self._note(place, began, step.outs, [slots[slot] for slot in step.outs], before)
        self._known.update(item.outs)
        self.began |= {o: began[slot] for o, slot in zip(item.outs, ends, strict=True) if slot in began}
        return [slots[slot] for slot in ends]

    def _note(
        self,
        place: OpPlace | str,
        began: dict[K, int],
        keys: Sequence[K],
        values: Sequence[Any],
        before: Sequence[int],
    ) -> None:
        for key, x in zip(keys, values, strict=True):
            if isinstance(x, torch.Tensor) and x.is_floating_point() and bool(x.isnan().any()):
                began[key] = min(before, default=len(self._all))
        self._all.append(place)

    def check(self, runner: Runner) -> None:
        """Raise AnomalyError, on all ranks, if a gradient has a NaN on one of them; collective."""
        results = [r.value for r in runner.program.signature.results if r.kind in ("grad", "input_grad")]
        own = min((self.began[v] for v in results if v in self.began), default=None)
        rank, world = dist.get_rank(), dist.get_world_size()
        code = torch.tensor(_NEVER if own is None else own * world + rank, device=runner.device)
        first = int(reduced(runner.axis_groups, code, "min"))
        if first == _NEVER:
            return
        number, rank = divmod(first, world)
        place = self._all[number]
        if isinstance(place, str):
            port = next(p for p in runner.program.signature.ports if p.name == place)
            given = runner.input_name(port) if port.kind == "input" else port.target
            raise AnomalyError(f"a gradient is NaN, and so was {port.kind} {given}", where=f"rank {rank}")
        hint = "look for a division by zero, a root or a logarithm of zero, a row that is masked as a whole"
        if not self.forward:
            hint = "call the model inside detect_anomaly(), too: the NaN may have begun before"
        why = f"rank {rank} has its first NaN there"
        raise AnomalyError(f"a gradient is NaN from {place} on", where=place.source, why=why, hint=hint)
