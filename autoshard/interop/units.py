"""The parts of a model that are sharded, gathered and recomputed as one: its repeated layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autoshard.planner.analysis import Analysis
from autoshard.search.plan.plan import Plan


@dataclass(frozen=True)
class Layers:
    """The children of one container that are numbered and hold parameters: ``model.layers``, 0 to 31."""

    container: str
    numbers: tuple[int, ...]

    @property
    def contiguous(self) -> bool:
        """Whether the numbers are all of 0, 1, 2, ..., so that the container's children are the layers."""
        return self.numbers == tuple(range(len(self.numbers)))

    def names(self) -> tuple[str, ...]:
        return tuple(f"{self.container}.{n}" for n in self.numbers)


def layer_lists(params: Iterable[str]) -> tuple[Layers, ...]:
    """The outermost lists of layers of a model, from the names of its parameters; a list has two or more."""
    result: dict[str, list[int]] = {}
    for name in params:
        words = name.split(".")
        at = next((k for k, word in enumerate(words) if word.isdigit()), 0)
        if at:  # 0: no number, or the model itself is a list, whose items may be of any kind
            numbers = result.setdefault(".".join(words[:at]), [])
            if int(words[at]) not in numbers:
                numbers.append(int(words[at]))
    return tuple(Layers(c, tuple(sorted(n))) for c, n in result.items() if len(n) > 1)


@dataclass(frozen=True)
class Gathering:
    """When a part's gathered parameters are freed. again: after forward, to be regathered for backward
    (ZeRO-3, arXiv:1910.02054 section 5). mixed: the plan decides differently for some of its parameters.
    """

    again: bool
    mixed: bool


def gathering(plan: Plan, analysis: Analysis, within: Sequence[str], axes: Sequence[int]) -> Gathering:
    """What the plan says of most bytes of the parameters whose names start with one of ``within``.

    within: prefixes that end with a dot, or "" for all. axes: numbers of the mesh axes that store parts.
    """
    repeated = kept = 0
    for key, group in analysis.flow.classes.items():
        if group.first.kind != "param":
            continue
        life = plan.params[key]
        if all(life.stored[a] == life.use[a] for a in axes):
            continue
        count = sum(p.target.startswith(tuple(within)) for p in group.ports) * group.first.type.nbytes
        if life.keep:
            kept += count
        else:
            repeated += count
    return Gathering(repeated > kept, repeated > 0 and kept > 0)


def recomputed(plan: Plan, analysis: Analysis) -> tuple[dict[str, tuple[str, ...]], list[str]]:
    """The layers whose forward runs again in backward, by policy; and the segments of which that is true but
    which are no layers.
    """
    result: dict[str, tuple[str, ...]] = {}
    others: list[str] = []
    for segment, how in plan.recompute.items():
        labels = [c.label for c in analysis.folded.calls if c.segment == segment]
        if labels and all(labels):
            layers = dict.fromkeys((*result.get(how.policy, ()), *labels[: how.calls]))
            result[how.policy] = tuple(layers)
        else:
            others.append(segment)
    return result, others
