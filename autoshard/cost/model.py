"""The prices that the search uses on one mesh of one cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autoshard.cluster.cluster import Device
from autoshard.cost.collective import seconds
from autoshard.cost.compute import compute_seconds
from autoshard.cost.reshard import ReshardCost, local_numel
from autoshard.ir import DTYPES, TensorType
from autoshard.placement import Layout
from autoshard.rules.core import Factored
from autoshard.rules.states import OpState


@dataclass(frozen=True)
class CostModel:
    """Compute by roofline, reshards by latency and bandwidth."""

    device: Device
    reshard: ReshardCost

    def local_bytes(self, type_: TensorType, layout: Layout, sizes: Sequence[int]) -> float:
        """Bytes on the fullest rank."""
        return local_numel(type_.shape, layout, sizes) * DTYPES[type_.dtype][1]

    def op_seconds(
        self,
        rule: Factored,
        ins: Sequence[TensorType],
        outs: Sequence[TensorType | None],
        state: OpState,
        sizes: Sequence[int],
    ) -> float:
        """Seconds of one call in one state, on the fullest rank.

        A call that exchanges rows sends every tensor of rows once, over that axis. That rows are spread
        evenly over their owners is assumed: imbalance has no price.
        """
        if rule.kind == "view":
            return 0.0
        moved = sum(self.local_bytes(t, lay, sizes) for t, lay in zip(ins, state.inputs, strict=True))
        dtype = "f32"
        for type_, layout in zip(outs, state.outputs, strict=True):
            if type_ is not None and layout is not None:
                moved += self.local_bytes(type_, layout, sizes)
                dtype = type_.dtype if type_.is_float else dtype
        busy = float(
            compute_seconds(rule.flops / state.ways, moved, dtype, self.device, matmul=rule.kind == "matmul")
        )
        return busy + self.exchange_seconds(rule, ins, outs, state, sizes)

    def exchange_seconds(
        self,
        rule: Factored,
        ins: Sequence[TensorType],
        outs: Sequence[TensorType | None],
        state: OpState,
        sizes: Sequence[int],
    ) -> float:
        """Seconds of the all-to-alls of a call: of every tensor that has rows, there or back."""
        axis = rule.exchanged(state.inputs, state.outputs)
        if axis is None:
            return 0.0
        rows = {r for r, _ in rule.exchange}
        tensors = [
            *zip(rule.inputs, ins, state.inputs, strict=True),
            *zip(rule.outputs, outs, state.outputs, strict=True),
        ]
        return sum(
            float(seconds("all_to_all", self.local_bytes(type_, layout, sizes), self.reshard.links[axis]))
            for dims, type_, layout in tensors
            if dims is not None and type_ is not None and layout is not None
            if any(rows & set(dim) for dim in dims)
        )
