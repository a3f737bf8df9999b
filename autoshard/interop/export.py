"""Plans for people who run something else: torch's own parallel APIs, or transformers' tensor parallelism."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from autoshard.errors import UsageError, VerificationError
from autoshard.interop.by_module import Example
from autoshard.interop.torch_parallel import torch_text
from autoshard.interop.tp_plan import tp_plan_text
from autoshard.runtime.arguments import split_inputs

if TYPE_CHECKING:
    from autoshard.planner.planned import Planned

FORMATS = ("torch", "tp-plan")


@dataclass(frozen=True)
class Exported:
    """The text of a file, and remarks on what of the plan it leaves out, with the reasons."""

    text: str
    remarks: tuple[str, ...]

    def __str__(self) -> str:
        return self.text


def export(
    planned: Planned, format: str = "torch", *, model: nn.Module | None = None, example_inputs: Any = None
) -> Exported:
    """A plan in the words of another runtime.

    format: ``torch`` (a Python module with ``apply(model, mesh)``) or ``tp-plan`` (JSON for transformers).
    model, example_inputs: what was planned, on any device, also meta. With them the model's code is run
    (without data) with the sizes of a rank, and tensors stay split between modules where it is right on
    parts; without them every divided module gives a full output.

    Raises UsageError for another format, or where leaving something out would make the text wrong or empty;
    VerificationError if the plan is not for this model.
    """
    plan, analysis = planned.plan, planned.analysis
    if format not in FORMATS:
        raise UsageError(f"there is no format {format!r}", hint=f"one of {', '.join(FORMATS)}")
    if (model is None) != (example_inputs is None):
        raise UsageError("model and example_inputs go together", hint="give both, or neither")
    if analysis.fingerprint != plan.fingerprint:
        raise VerificationError(
            "the plan was made for another model or other inputs",
            why=f"the graph's fingerprint is {analysis.fingerprint}, the plan's {plan.fingerprint}",
            hint="plan again",
        )
    example = None if model is None else Example(model, *split_inputs(example_inputs))
    text = torch_text if format == "torch" else tp_plan_text
    return Exported(*text(plan, analysis, example))
