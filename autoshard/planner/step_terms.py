"""What of a model adds up over the microbatches of a plan, from captures with two batches."""

from __future__ import annotations

import warnings
from collections.abc import Callable

from autoshard.errors import AutoshardError, UsageError
from autoshard.ir import Folded, TensorType
from autoshard.ir.lowered import PlacedValue
from autoshard.passes.simplify.batch_terms import BatchTerms, CapturedSample, averaged, batch_terms, moved
from autoshard.planner.analysis import Analysis
from autoshard.planner.source import Source
from autoshard.program.loss import loss_position
from autoshard.program.program import Signature
from autoshard.search.problem.problem import batch_of


def step_terms(
    source: Source | None, analysis: Analysis, micro: Analysis, say: Callable[[str], None]
) -> BatchTerms:
    """What adds up over the microbatches of a model.

    source: what to capture again; None for a plan that was made of an analysis, without the model: its losses
    are averaged (`plan` and `compile` have the model). analysis, micro: captured already, micro with the
    batch of a microbatch.
    """
    loss = trained_output(micro.folded)
    batch = batch_of(micro.folded)
    if not micro.folded.joint.batch_inputs:
        return averaged(micro.folded, loss, "no input has a batch")
    if source is None:
        return averaged(micro.folded, loss)
    base = _sample(micro) if batch > 1 else None
    full = analysis if batch_of(analysis.folded) not in (1, batch) else None
    try:
        if full is None:
            full = _captured(source, micro, 2 * batch, say)
        if base is None:
            base = _sample(full)
            full = _captured(source, micro, 2 * base.batch, say)
    except AutoshardError as error:
        return averaged(micro.folded, loss, f"the model cannot be captured with another batch ({error.what})")
    terms = batch_terms(base, _sample(full), loss)
    return terms if batch > 1 else moved(terms, base.folded, micro.folded, loss)


def warn_of(terms: BatchTerms) -> None:
    """Tell, with the user's lines, what is computed for every microbatch by itself."""
    if terms.notes:
        told = "; ".join(terms.notes) + ("; their losses are averaged" if terms.tangent else "")
        warnings.warn(
            f"microbatches are not quite the whole batch: each computes by itself {told}. As with gradient "
            "accumulation, loss and gradients differ from those of one call with the whole batch; plan for "
            "one microbatch if that matters",
            UserWarning,
            stacklevel=3,
        )


def _captured(source: Source, micro: Analysis, batch: int, say: Callable[[str], None]) -> Analysis:
    say(f"capturing again, with {batch} sequences")
    return source.with_batch(micro, batch).analysed(lambda _: None)


def _sample(analysis: Analysis) -> CapturedSample:
    return CapturedSample(analysis.folded, analysis.rules, batch_of(analysis.folded))


def trained_output(folded: Folded) -> int | None:
    """Position of the output that is trained, None if there is none."""
    types: dict[str, TensorType] = {}
    for graph, call in ((folded.segments[c.segment], c) for c in folded.calls):
        types.update((out, graph.types()[inner]) for out, inner in zip(call.outs, graph.outputs, strict=True))
    types.update((p.name, p.type) for p in folded.joint.ports)
    values = {r.value: PlacedValue(types[r.value], ()) for r in folded.joint.results if r.kind == "output"}
    try:
        return loss_position(Signature.of(folded.joint), values)
    except UsageError:
        return None
