"""FLOP of a step by a formula, as papers count them to tell their throughput."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autoshard.validate.rows import Run


def step_flop(run: Run, *, recompute: bool) -> float:
    """FLOP of a step of a run, all devices together.

    recompute: whether forward counts twice, with full recomputation. For ffn = 4 hidden and
    as many heads of keys as of queries this is 96 B s l h^2 (1 + s / 6h + V / 16lh), or 72 without the second
    forward: Narayanan et al., SC'21, equation 3. Attention counts without a mask; a gated feed-forward layer,
    which a row tells by ffn < 4 hidden, has three products.
    """
    hidden, ffn, seq = run.hidden, run.ffn, run.seq
    keys = hidden * run.kv_heads / run.heads
    products = 3 if ffn < 4 * hidden else 2
    layer = 2 * (2 * hidden * hidden + 2 * hidden * keys + products * hidden * ffn) + 4 * seq * hidden
    head = 2 * hidden * run.vocab
    forwards = 4 if recompute else 3
    tokens = run.batch * seq
    # the head is outside of what is recomputed
    return float(tokens * (forwards * run.layers * layer + 3 * head))
