"""FlexAttention: the op that `torch.nn.attention.flex_attention.flex_attention` calls, and its modifications.

Leans on that op, on what ``BlockMask.as_tuple()`` holds and in which order, on the check that refuses
gradients on CPUs, and on how torch calls a modification for all scores at once. Tried on torch 2.11 and 2.13.
Its module takes seconds to import, so it is looked up where a model's code has imported it.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch

_REQUIRES_GRAD = torch.Tensor.requires_grad.__get__  # type: ignore[attr-defined]


def _imported() -> Any:
    return sys.modules.get("torch.nn.attention.flex_attention")


def attention_ops() -> tuple[Any, ...]:
    """The op of FlexAttention, if its module is imported."""
    flex = _imported()
    return () if flex is None else (flex.flex_attention_hop,)


def is_block_mask(value: object) -> bool:
    flex = _imported()
    return flex is not None and isinstance(value, flex.BlockMask)


def refuses_gradients(func: Any, frame: FrameType) -> bool:
    """Whether a function asks for gradients to refuse them, as FlexAttention does on CPUs."""
    flex = _imported() if func == _REQUIRES_GRAD else None
    return flex is not None and frame.f_code is flex._validate_device.__code__


def mask_of(block_mask: Sequence[Any], device: torch.device) -> torch.Tensor | None:
    """The mask [b or 1, h or 1, s, t] that a block mask stands for, True: attend; None if that is all of it.

    block_mask: what the op is given, ``BlockMask.as_tuple()``.
    """
    flex, (rows, keys, blocks, *_, modification) = _imported(), block_mask
    if modification is flex.noop_mask:
        return None
    mask: torch.Tensor = flex.create_mask(modification, *blocks.shape[:2], rows, keys, str(device))
    return mask


def softcap_of(score_mod: Callable[..., torch.Tensor]) -> float:
    """The c of a modification that makes c tanh(score / c), 0.0 of any other."""
    try:  # symbolic_trace takes functions alone, no methods or partials
        traced = torch.fx.symbolic_trace(lambda score, b, h, q, k: score_mod(score, b, h, q, k))
        nodes = list(traced.graph.nodes)
    except Exception:  # the user's code, which may ask for values: whatever it raises, it is no soft cap
        return 0.0
    score, *_, result = nodes
    calls = [n for n in nodes if n.op not in ("placeholder", "output")]
    if len(calls) != 3 or result.args[0] is not calls[-1]:
        return 0.0
    divided, curved, multiplied = calls
    cap = next((a for a in multiplied.args if isinstance(a, int | float)), 0.0)
    tanh = curved.target in (torch.tanh, "tanh") and curved.args == (divided,)
    back = multiplied.target in (operator.mul, torch.mul) and curved in multiplied.args
    down = divided.target in (operator.truediv, torch.div) and divided.args == (score, cap)
    return float(cap) if tanh and back and down and cap > 0 else 0.0


def change_of(score_mod: Callable[..., torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """What changes scores [b, h, s, t]; None if nothing does."""
    flex = _imported()
    if score_mod is flex._identity:
        return None
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    def change(scores: torch.Tensor) -> torch.Tensor:
        each = [torch.arange(n, device=scores.device) for n in scores.shape]
        with TransformGetItemToIndex():
            changed: torch.Tensor = flex._vmap_for_bhqkv(score_mod, prefix=(0,))(scores, *each)
        return changed

    return change
