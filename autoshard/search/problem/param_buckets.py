"""Which part of a message a parameter is: those of a segment travel together, some across segments.

A message of n bytes that stands for a share s of a larger one is priced as s times the larger one, n / s: it
pays its part of the latency, and every byte as it costs in the large message.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from autoshard.cost.reshard import ALONE, Share
from autoshard.ir.collectives import BUCKET_BYTES
from autoshard.ir.flow import Flow, Place


@dataclass(frozen=True)
class Shares:
    """Of one member of a class of parameters.

    gather: beside the other parameters of the segment that uses it, where it is most. reduce: beside the
    other gradients of the segment that makes its own; reductions that leave it full run once a step,
    `BUCKET_BYTES` at a time.
    """

    gather: Share = ALONE
    reduce: Share = ALONE


def shares_of(flow: Flow) -> dict[Place, Shares]:
    """Of every class of parameters. Layouts are not known yet: all are taken to be split alike."""
    params = {key: group for key, group in flow.classes.items() if group.first.kind == "param"}
    nbytes = {key: float(group.first.type.nbytes) for key, group in params.items()}
    users = {key: {name for name, _ in flow.targets.get(key, ())} for key in params}
    used: defaultdict[str, float] = defaultdict(float)
    produced: defaultdict[str, float] = defaultdict(float)
    for key, group in params.items():
        for segment in users[key]:
            used[segment] += nbytes[key]
        for segment, _ in group.grads:
            produced[segment] += nbytes[key]
    trained = sum(len(group.ports) * nbytes[key] for key, group in params.items() if group.grads)
    message = min(float(BUCKET_BYTES), trained)

    def share(key: Place, totals: Iterable[float]) -> float:
        return min(1.0, max((nbytes[key] / total for total in totals if total), default=1.0))

    shares: dict[Place, Shares] = {}
    for key, group in params.items():
        if not nbytes[key]:
            shares[key] = Shares()
            continue
        gather = share(key, (used[s] for s in users[key]))
        scatter = share(key, (produced[segment] for segment, _ in group.grads))
        shares[key] = Shares(Share(gather, gather), Share(share(key, [message]), scatter))
    return shares
