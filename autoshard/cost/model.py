"""The prices that the search uses on one mesh of one cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autoshard.cluster.cluster import Device
from autoshard.cost.compute import compute_seconds
from autoshard.cost.reshard import ReshardCost, local_numel
from autoshard.ir import DTYPES, TensorType
from autoshard.placement import Layout
from autoshard.rules.core import Factored
from autoshard.rules.states import OpState


@dataclass(frozen=True)
class CostModel:
    """Compute by roofline, reshards by latency and bandwidth.

    plain: reshards of activations. bucketed: of parameters and gradients, whose collectives are
    issued together and so share the latency.
    """

    device: Device
    plain: ReshardCost
    bucketed: ReshardCost

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
        """Seconds of one call in one state, on the fullest rank."""
        if rule.kind == "view":
            return 0.0
        moved = sum(self.local_bytes(t, lay, sizes) for t, lay in zip(ins, state.inputs, strict=True))
        dtype = "f32"
        for type_, layout in zip(outs, state.outputs, strict=True):
            if type_ is not None and layout is not None:
                moved += self.local_bytes(type_, layout, sizes)
                dtype = type_.dtype if type_.is_float else dtype
        return float(
            compute_seconds(rule.flops / state.ways, moved, dtype, self.device, matmul=rule.kind == "matmul")
        )
