"""Bubbles known in closed form, for equal stages and sends that take no time.

All are seconds that a rank is idle in a step from its global beginning to its global end, the same for all
ranks, as `autoshard.schedules.timeline.Timeline` counts. F, B, I, W are the seconds of a rank for one
microbatch, all its chunks together; p ranks, v chunks; B = I + W.
"""

from __future__ import annotations

from math import isclose


def ideal_bubble(
    name: str,
    ranks: int,
    microbatches: int,
    chunks: int = 1,
    *,
    slices: int = 1,
    forward: float = 1.0,
    backward_input: float = 1.0,
    backward_weight: float = 1.0,
) -> float | None:
    """Idle seconds per rank of a named schedule; None where there is no formula.

    - gpipe (Huang et al., 2019, section 2.3), 1f1b (Megatron SC'21, section 2.2.1): (p-1)(F+B).
    - seq1f1b (Sun et al., 2024, section 3.2): (p-1)(F+B)/k with k equal slices, as 1F1B of them.
    - interleaved (Megatron SC'21, section 2.2.2), breadth-first (Lamy-Poirier, 2023):
      (p-1)(F+B)/v, with at least p microbatches.
    - zb-h1 (Qi et al., 2023, sections 2.1 and 2.3): (p-1)(F+I-W), with at least p microbatches. The paper's
      figures have W <= F, I. In general it is (p-1) max(F, I, F+I-W): the last rank starts (p-1) F late,
      and the first one gets its last input gradient (p-1) I after the last one has had it.
    - zb-v (Qi et al., 2023, section 6): none inside a rank with F = I = W and at least 2p-1 microbatches.
      What is left in the makespan is that the last rank starts, or the first one ends, (p-1) F/2 apart.
    """
    f, i, w = forward, backward_input, backward_weight
    hops = ranks - 1
    if name in ("gpipe", "1f1b"):
        return hops * (f + i + w)
    if name == "seq1f1b":
        return hops * (f + i + w) / slices
    if name in ("interleaved", "breadth-first"):
        return hops * (f + i + w) / chunks if microbatches >= ranks or chunks == 1 else None
    if name == "zb-h1":
        return hops * max(f, i, f + i - w) if microbatches >= ranks else None
    if name == "zb-v":
        equal = isclose(f, i) and isclose(f, w)
        return hops * f / 2 if equal and microbatches >= 2 * ranks - 1 else None
    return None


def ideal_bubble_fraction(
    name: str,
    ranks: int,
    microbatches: int,
    chunks: int = 1,
    *,
    slices: int = 1,
    forward: float = 1.0,
    backward_input: float = 1.0,
    backward_weight: float = 1.0,
) -> float | None:
    """`ideal_bubble` as a share of the step; None where there is no formula."""
    idle = ideal_bubble(
        name,
        ranks,
        microbatches,
        chunks,
        slices=slices,
        forward=forward,
        backward_input=backward_input,
        backward_weight=backward_weight,
    )
    if idle is None:
        return None
    return idle / (idle + microbatches * (forward + backward_input + backward_weight))
