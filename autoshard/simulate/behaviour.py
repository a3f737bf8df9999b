"""How the code that runs a step behaves where a program does not say."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from autoshard.cluster.cluster import Device
from autoshard.cost.recipe import ADAMW, Recipe
from autoshard.ir.routing import EVEN, Routing

#: ``program``: what backward of the program reads. ``kernels``: every kernel keeps its inputs: products and
#: attention theirs, a chain of elementwise ops and row sums the values it starts from. ``compiled``: the
#: fewest bytes from which such chains can make all that is read (torch's min-cut partitioner). ``ops``: what
#: every second product makes, attention, and reduce-scatters; the rest runs again from the layer's input
#: (torchtitan, models/llama3/infra/parallelize.py: op-level selective checkpointing).
Keeps: TypeAlias = Literal["program", "kernels", "compiled", "ops"]


#: ``device``: NCCL's, which reduces on its way. ``network``: our runtime's between CPUs of several machines,
#: where a reduce-scatter exchanges parts and adds them up afterwards. ``memory``: our runtime's between CPUs
#: of one machine: a message is packed where others read it, and unpacked, added up or joined from there.
Transport: TypeAlias = Literal["device", "network", "memory"]


@dataclass(frozen=True)
class Behaviour:
    """What a simulated step assumes about kernels, messages and the optimizer; by default, our runtime's.

    attention: ``flash`` keeps no scores (Dao et al., NeurIPS 2022), ``unfused`` runs a product, a softmax
    with its dropout and a product, and keeps the scores for backward. attention_native: whether the
    kernel of ``flash`` is written for the device; torch's and flash-attn 2 are for Ampere.
    attention_reach: what it reaches of the rate of flash-attn 2. recomputes_scores: whether backward
    computes the scores again (selective recomputation of Korthikanti et al., MLSys 2023, section 5);
    nothing with ``flash``. full_recompute: whether a layer that is recomputed is so to its end,
    needed or not. keeps: what forward keeps for backward; with ``ops``, backward runs every second
    product of a layer again. fused: whether chains of pointwise ops are single kernels; fused_bytes:
    whether what stays inside them then takes no memory, which a compiler does not promise. norm_reads: how
    often backward of a norm reads what it takes: twice if a kernel makes the gradient of its input and
    another those of its weight. loss_kept, loss_peak: bytes per logit that the loss keeps for backward,
    and that it holds at most, all copies together; None: as the program says. recipe: what a trained
    parameter has beside itself. gradient_dtype: of the reduction of gradients, "" for that of the
    program. gradient_buffers: whether gradients lie in buffers of the recipe's width that are there all
    the time and are reduced in place, or in tensors that backward makes. sum_bytes: per element of a
    gradient, moved to add it to those of the microbatches before; None: as our runtime, which reads it
    and reads and writes the sum, if there are several microbatches. full_parameters: whether the part of
    a parameter that a rank updates lies in the gathered parameter, where that stays gathered. stand_ins:
    whether a tensor of every shape that weights of layers have stands in for gradients that went to
    buffers. step_bytes: per element that a rank updates, of what the update makes and frees.
    gradients_overlap: whether gradients are reduced while backward computes, or after it.
    gathers_overlap: whether parameters are gathered while something computes. tensor_overlap: whether
    collectives of activations run in parts beside their products. backward_overlap: whether those of
    backward run beside ops that do not need them, as the products for weight gradients. late_waits:
    whether messages are issued where they stand in the program and waited for where they are needed, as
    our runtime does; the three before then mean nothing. blocking_sends: whether a stage waits until its
    message has arrived before it computes on, so that both ranks are busy with it once. scattered_sends:
    whether what goes between stages is sent in a part per tensor rank and gathered there (Narayanan et
    al., SC'21, section 4.1). copied_messages: whether what is gathered or scattered along another dim
    than the first is copied to, or from, the way it is sent; not where activations lie with the sequence
    first. flat_parameters, flat_gradients: whether parameters of one message are views of a tensor that
    is gathered as it lies, and gradients of one that is reduced so. ready_bytes: per element of a
    gradient, moved to make it ready for its reduction beside a copy in its own type. dropout:
    probability, whose masks of one byte are kept, 0 for none. product_dtype: of the large products, ""
    for that of the parameters; four_bits: whether products of 4-bit operands have units of their own;
    narrow_bytes: that making narrow copies of their factors moves per
    element; narrow_weights: whether weights are made narrow for every product, or once a step, which is
    not counted; narrow_gathers: whether what only such products take is made narrow before it is
    gathered. eager: whether modules of layers issue ops in Python, which takes their host longer than a
    program. blocking_launches: whether the host waits until an op is done before it issues the next
    (CUDA_LAUNCH_BLOCKING). exchange: what goes to experts: a row per ``choice``, or one per ``rank``
    that has some of a token's choice; exchange_tasks: what the host issues for each beside what a program
    has; exchange_overlap: whether another microbatch computes meanwhile. routing: how often experts are
    chosen. transport: of messages within a stage. steps_overlap: whether a pipeline rank begins the next step
    while others still compute. name: of what the figures are for.
    """

    attention: Literal["flash", "unfused"] = "flash"
    attention_native: bool = False
    attention_reach: float = 1.0
    recomputes_scores: bool = False
    full_recompute: bool = False
    keeps: Keeps = "program"
    fused: bool = False
    fused_bytes: bool = False
    norm_reads: int = 1
    loss_kept: float | None = None
    loss_peak: float | None = None
    recipe: Recipe = field(default=ADAMW)
    gradient_dtype: str = ""
    gradient_buffers: bool = False
    sum_bytes: float | None = None
    full_parameters: bool = False
    stand_ins: bool = False
    step_bytes: float = 0.0
    gradients_overlap: bool = False
    gathers_overlap: bool = False
    tensor_overlap: bool = False
    backward_overlap: bool = False
    blocking_sends: bool = False
    late_waits: bool = True
    scattered_sends: bool = False
    copied_messages: bool = True
    flat_parameters: bool = False
    flat_gradients: bool = False
    ready_bytes: float = 0.0
    dropout: float = 0.0
    product_dtype: str = ""
    four_bits: bool = False
    narrow_bytes: float = 3.0
    narrow_weights: bool = True
    narrow_gathers: bool = False
    eager: bool = False
    blocking_launches: bool = False
    exchange: Literal["choice", "rank"] = "rank"
    exchange_tasks: int = 0
    exchange_overlap: bool = False
    routing: Routing = EVEN
    transport: Transport = "device"
    steps_overlap: bool = False
    name: str = ""


def behaviour_on(
    device: Device, codegen: str = "", *, recipe: Recipe = ADAMW, routing: Routing = EVEN
) -> Behaviour:
    """Of our runtime. codegen: of the program, "" where the device decides."""
    fused = codegen == "inductor" or (not codegen and device.compiled)
    return Behaviour(fused=fused, recipe=recipe, routing=routing, four_bits="f4" in device.peak_flops)
