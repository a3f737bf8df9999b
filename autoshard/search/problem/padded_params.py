"""A model as `fully_shard` stores it: parameters padded so that every rank has as many rows.

FSDP2 splits dim 0 into pieces of ceil(rows / ranks) rows, the last ones padded or empty (torch's docs of
``torch.distributed.fsdp.fully_shard``), and gathers the padded whole. Our programs store nothing on empty
ranks, so this is for prices only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autoshard.ir.flow import PortClass
from autoshard.rules.states import Digit
from autoshard.search.problem.problem import Model

#: class of a dim that nothing is known of
_NOBODY = -1


def padded_model(model: Model, ways: int) -> Model:
    """The model with dim 0 of every trained parameter, as stored, rounded up to a multiple of ``ways``.

    What computes with a parameter still sees it as it is. The same model if there is nothing to pad.
    """
    classes = {key: _padded(group, ways) for key, group in model.flow.classes.items()}
    changed = {key for key, group in classes.items() if group is not model.flow.classes[key]}
    if not changed:
        return model
    values = dict(model.digits.values)
    for key in changed:
        rows = classes[key].first.type.shape[0]
        values[*key, 0] = _whole(values.get((*key, 0), ()), rows)
    digits = replace(model.digits, values=values)
    return replace(model, flow=replace(model.flow, classes=classes), digits=digits, ways={})


def _padded(group: PortClass, ways: int) -> PortClass:
    type_ = group.first.type
    if not group.grads or group.first.kind != "param" or not type_.shape or type_.shape[0] % ways == 0:
        return group
    shape = (-(-type_.shape[0] // ways) * ways, *type_.shape[1:])
    return replace(group, ports=tuple(replace(p, type=replace(p.type, shape=shape)) for p in group.ports))


def _whole(digits: Sequence[Digit], rows: int) -> tuple[Digit, ...]:
    """The dim as one part; its class is that of the outermost part, which is split first."""
    outermost = min(digits, default=(1, rows, _NOBODY))
    return ((1, rows, outermost[2]),)
