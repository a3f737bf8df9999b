"""How the code that runs a step behaves where a program does not say."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from autoshard.cost.recipe import ADAMW, Recipe


@dataclass(frozen=True)
class Behaviour:
    """What a simulated step assumes about kernels, messages and the optimizer; by default, our runtime's.

    attention: ``flash`` keeps no scores (Dao et al., NeurIPS 2022), ``unfused`` runs a product, a softmax
    with its dropout and a product, and keeps the scores for backward. attention_again: whether backward
    computes the scores again (selective recomputation of Korthikanti et al., MLSys 2023, section 5); nothing
    with ``flash``. whole_recompute: whether a layer that is computed again is so to its end, needed or not.
    products_again: share of the products of layers that backward computes again.
    fused: whether chains of pointwise ops are single kernels. fused_loss: whether the loss keeps no logits in
    fp32. recipe: what a trained parameter has beside itself. gradient_dtype: of the reduction of gradients,
    "" for that of the program. gradient_buffers: whether gradients lie in buffers that are there all the
    time, or in tensors that backward makes. gradients_overlap: whether they are reduced while backward
    computes, or after it. gathers_overlap: whether parameters are gathered while something computes.
    tensor_overlap: whether collectives of activations run in parts beside their products. backward_overlap:
    whether those of backward run beside ops that do not need them, as the products for weight gradients.
    late_waits: whether messages are issued where they stand in the program and
    waited for where they are needed, as our runtime does; the three before are then of no meaning.
    blocking_sends: whether a stage waits for its messages before it computes on. scattered_sends: whether
    what goes between stages is sent in a part per tensor rank and gathered there (Narayanan et al., SC'21,
    section 4.1). dropout: probability, whose masks of one byte are kept, 0 for none. product_dtype: of the
    large products, "" for that of the parameters. exchanged_sums: whether a reduce-scatter exchanges parts
    and adds them up afterwards, as our runtime does on the CPU; it then holds both at once. name: of what the
    figures are for.
    """

    attention: Literal["flash", "unfused"] = "flash"
    attention_again: bool = False
    whole_recompute: bool = False
    products_again: float = 0.0
    fused: bool = False
    fused_loss: bool = False
    recipe: Recipe = field(default=ADAMW)
    gradient_dtype: str = ""
    gradient_buffers: bool = False
    gradients_overlap: bool = False
    gathers_overlap: bool = False
    tensor_overlap: bool = False
    backward_overlap: bool = False
    blocking_sends: bool = False
    late_waits: bool = True
    scattered_sends: bool = False
    dropout: float = 0.0
    product_dtype: str = ""
    exchanged_sums: bool = False
    name: str = ""
