"""The longest sequence that fits by recipes of ALST: what their code allocates, run through the allocator.

A program of ours is another one (`autoshard plan` with a long ``--seq``), and its parameters are not gathered
as by DeepSpeed: what a step of their code allocates is written down here, tensor by tensor, and the simulated
caching allocator says what that reserves, with ``expandable_segments:True`` as recipes ask for. The sources:

- DeepSpeed, runtime/sequence_parallel/ulysses_sp.py: copies and all-to-alls of queries, keys (repeated where
  there are fewer heads than ranks), values and the context; `TiledMLP`.
- ArcticTraining, arctic_training/monkey_patches.py: reentrant checkpoints that copy a layer's input to the
  host; while a layer runs backward they hold its output and the gradient of that.
- FlashAttention 2, csrc/flash_attn/flash_api.cpp: an fp32 sum of the gradient of queries, and gradients of
  keys and values for every query head where heads share them; FlashAttention 3 sums these in fp32.
- Liger: SwiGLU keeps gate, up and their product; loss and logits in chunks, with the gradient of their input.

Buffers of a collective are marked as used by its stream (``record_stream``), and the host runs ahead of the
GPU: what an all-to-all takes or gives is free for others only after the layer. This is an assumption.

Two figures of the host are fitted to the recipes that it bounds, nothing else is: bytes of a parameter (fp32
master, moments and gradient are 16; pinned buffers are rounded up), and what is left of 1.9 TB. So where the
host is the bound, the prediction is not independent.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autoshard.simulate.caching_allocator import CachingAllocator, Event, Reserved
from autoshard.simulate.device_memory import CONNECTION_BYTES, CONTEXT_BYTES
from benchmarks.max_lengths_recipes import RECIPES, Decoder, LengthRecipe

_GIB = 2**30
_HALF, _FULL = 2, 4
#: what the driver shows of an H100 of 80 GB and an H200 of 141 GB
_H100, _H200 = 79.6 * _GIB, 139.8 * _GIB
#: rings within a node and between nodes
_NCCL = 24 * CONNECTION_BYTES + 16 * 2 * CONNECTION_BYTES
_HOST_BYTES, _HOST_PARAMETER, _NODE = 1.8e12, 26.0, 8
#: an int of 32 bits indexes the elements of a tensor in the kernels of then
_INDEX = 2**31


@dataclass(frozen=True)
class LongestLength:
    """predicted: tokens; bound: what is full: ``GPU``, ``host`` or ``index``. shown: GB that nvidia-smi would
    show at the published length."""

    recipe: LengthRecipe
    predicted: int
    bound: str
    shown: float

    @property
    def ratio(self) -> float:
        return self.predicted / self.recipe.published

    @property
    def shown_error(self) -> float | None:
        """Of the memory at the published length, as a share."""
        return None if self.recipe.shown is None else self.shown / self.recipe.shown - 1


def rows() -> Iterator[LongestLength]:
    for recipe in RECIPES:
        limits = {"GPU": _gpu(recipe), "host": _host(recipe), "index": _indexed(recipe)}
        bound = min(limits, key=lambda name: limits[name])
        shown = (_reserved(recipe, recipe.published).reserved + _beside(recipe)) / (1000 * 2**20)
        yield LongestLength(recipe, int(limits[bound]), bound, shown)


def _beside(recipe: LengthRecipe) -> float:
    return CONTEXT_BYTES + (_NCCL if recipe.gpus > 1 else 0)


def _gpu(recipe: LengthRecipe) -> float:
    room = (_H200 if recipe.h200 else _H100) - _beside(recipe)
    low, high = 1_000, 8 * recipe.published
    while high > 1.002 * low:
        middle = (low + high) // 2
        low, high = (middle, high) if _reserved(recipe, middle).reserved <= room else (low, middle)
    return float(low)


def _host(recipe: LengthRecipe) -> float:
    """Checkpoints of all ranks of a node, beside the optimizer's state."""
    ranks = min(recipe.gpus, _NODE)
    state = _HOST_PARAMETER * recipe.model.parameters * ranks / recipe.gpus
    each = recipe.model.layers * recipe.model.hidden * _HALF * ranks / recipe.sequence
    return (_HOST_BYTES - state) / each if recipe.offload else float("inf")


def _indexed(recipe: LengthRecipe) -> float:
    """Only rows of Liger's kernels of then: the recipe for one GPU fails beyond with an illegal access."""
    if recipe.h200 or not recipe.liger:
        return float("inf")
    return _INDEX * recipe.sequence / max(recipe.model.hidden, recipe.model.queries)


def _reserved(recipe: LengthRecipe, length: int) -> Reserved:
    return CachingAllocator(expandable=True).run(_events(recipe, length))


# -- a step -----------------------------------------------------------------------------------------------


class _Step:
    """Events of a step; sizes are elements of a token of a rank, in 16 bits, unless said otherwise."""

    def __init__(self, recipe: LengthRecipe, length: int) -> None:
        self.recipe, self.tokens = recipe, length / recipe.sequence
        self.out: list[Event] = []

    def make(self, **sizes: float) -> None:
        self.fixed(**{name: size * self.tokens * _HALF for name, size in sizes.items()})

    def fixed(self, **bytes_: float) -> None:
        self.out += bytes_.items()

    def free(self, *names: str) -> None:
        self.out += ((name, None) for name in names)


def _events(recipe: LengthRecipe, length: int) -> list[Event]:
    """Two layers going back stand for all, as all free what they make but their checkpoints."""
    step, model = _Step(recipe, length), recipe.model
    step.fixed(parameters=0.0 if recipe.parameters_away else _HALF * model.parameters / recipe.gpus)
    table = _HALF * float(model.vocab * model.hidden)
    step.fixed(embedding=table)
    step.make(output0=model.hidden)
    step.free("embedding")
    for layer in range(model.layers):
        _forward(step, model, layer)
        if recipe.offload:
            step.free(f"output{layer}")
    _loss(step, model, table)
    for number in range(2):
        _backward(step, model)
        step.free(f"output{model.layers - 1 - number}")
    return step.out


def _forward(step: _Step, model: Decoder, layer: int) -> None:
    """A layer going forward, which keeps its input alone."""
    recipe, hidden, queries = step.recipe, float(model.hidden), float(model.queries)
    keys = float(model.keys * max(1, recipe.sequence // model.kv_heads))
    held = ("sent_q", "sent_k", "sent_v", "context_back") if recipe.sequence > 1 else ()
    step.fixed(layer=(2 * hidden * (queries + model.keys) + 3 * hidden * model.ffn) * _HALF)
    step.make(y=hidden, q=queries, k=keys, v=keys)
    step.make(**{name: keys if name in ("sent_k", "sent_v") else queries for name in held})
    step.make(context=queries, projected=queries, after=hidden)
    step.free("y", "q", "k", "v", "context", "projected")
    step.make(normed=hidden)
    if not recipe.tiled:
        step.make(gate=model.ffn, up=model.ffn, product=model.ffn)
    step.make(mlp=hidden, **({"shards": hidden} if recipe.tiled else {}))
    step.free("gate", "up", "product", "shards", "normed")
    step.make(**{f"output{layer + 1}": hidden})
    step.free("mlp", "after", "layer", *held)


def _loss(step: _Step, model: Decoder, table: float) -> None:
    step.fixed(head=table)
    step.make(normed=model.hidden)
    if step.recipe.liger:
        # chunks whose logits are as large as their input; the gradient of the weight is summed up
        step.make(gradient=model.hidden, chunk=model.hidden, chunk_gradient=model.hidden)
        step.fixed(head_gradient=table)
        step.free("chunk", "chunk_gradient", "head_gradient")
    else:
        # logits, in fp32, their log-softmax, and its gradient in fp32
        step.make(
            logits=model.vocab, wide=2 * model.vocab, log=2 * model.vocab, wide_gradient=2 * model.vocab
        )
        step.free("log", "wide", "wide_gradient", "logits")
        step.make(gradient=model.hidden)
    step.free("normed", "head", f"output{model.layers}")


def _backward(step: _Step, model: Decoder) -> None:
    """A layer is run again from its input, and back. `gradient`: of its output."""
    recipe, hidden = step.recipe, float(model.hidden)
    ways = recipe.sequence
    repeat = max(1, ways // model.kv_heads)
    shared = model.heads // ways > max(1, model.kv_heads // ways)
    queries, keys = float(model.queries), float(model.keys * repeat)
    layer = (2 * hidden * (queries + model.keys) + 3 * hidden * model.ffn) * _HALF
    step.fixed(layer=layer)
    step.make(x=hidden, y=hidden)
    if model.qk_norm:
        step.make(raw_q=queries, raw_k=float(model.keys))
    step.make(q=queries, k=keys, v=keys)
    held: list[str] = []
    if ways > 1:
        # what all-to-alls take and give
        step.make(sent_q=queries, sent_k=keys, sent_v=keys, context_back=queries)
        held += ["sent_q", "sent_k", "sent_v", "context_back"]
    if recipe.sdpa:
        step.make(repeated_k=queries, repeated_v=queries)
    step.make(context=queries, projected=queries, after=hidden, normed=hidden)
    if recipe.tiled:
        step.make(mlp=hidden, shards=hidden)
        step.free("shards")
    else:
        step.make(gate=model.ffn, up=model.ffn, product=model.ffn, mlp=hidden)
    step.make(output=hidden)
    step.free("mlp")
    step.make(d_normed=hidden)
    if not recipe.tiled:
        # in plain PyTorch SiLU and the product have results and gradients of their own
        more = {} if recipe.liger else {"act": model.ffn, "d_gate": model.ffn, "d_up": model.ffn}
        step.make(d_product=model.ffn, **more)
        step.free("product", "d_product", "gate", "up", *more)
    step.free("normed")
    step.make(residual=hidden)
    step.free("after", "d_normed")
    step.make(d_context=queries)
    step.free("projected")
    if ways > 1:
        step.make(sent_d=queries, d_context_here=queries)
        held.append("sent_d")
        step.free("d_context")
    # fp32 sums of the gradient of queries; keys and values per query head, or summed in fp32
    spread = 0.0 if not shared else (2 * keys if recipe.h200 else queries)
    step.make(d_sum=2 * queries, d_q=queries, d_k=keys, d_v=keys, spread_k=spread, spread_v=spread)
    step.free("d_sum", "spread_k", "spread_v", "context", "q", "k", "v", "repeated_k", "repeated_v")
    step.free("d_context_here", "d_context")
    step.make(d_y=hidden, d_x=hidden)
    step.free(
        "d_q", "d_k", "d_v", "d_y", "y", "x", "raw_q", "raw_k", "output", "residual", "gradient", "layer"
    )
    step.free(*held)
    step.make(gradient=hidden)
    step.free("d_x")
