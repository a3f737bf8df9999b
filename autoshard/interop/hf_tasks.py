"""What a Hugging Face config is trained for: the class that has a loss, and which inputs that takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from autoshard.errors import UsageError
from autoshard.interop import hf_images, hf_inputs, hf_sounds
from autoshard.interop.hf_inputs import OWN_FUNCTION, ExampleInputs, InputRequest

Maker: TypeAlias = Callable[[InputRequest], ExampleInputs]


@dataclass(frozen=True)
class HfTask:
    """auto: the class of transformers that builds models for it. inputs: makes a batch."""

    auto: str
    inputs: Maker


#: an architecture that several of these know is what the first of them says
TASKS = (
    HfTask("AutoModelForImageTextToText", hf_images.image_text),
    HfTask("AutoModelForSpeechSeq2Seq", hf_sounds.transcribed),
    HfTask("AutoModelForCausalLM", hf_inputs.text),
    HfTask("AutoModelForMaskedLM", hf_inputs.text),
    HfTask("AutoModelForSeq2SeqLM", hf_inputs.two_texts),
    HfTask("AutoModelForSequenceClassification", hf_inputs.classified_text),
    HfTask("AutoModelForTokenClassification", hf_inputs.tagged_text),
    HfTask("AutoModelForQuestionAnswering", hf_inputs.spans),
    HfTask("AutoModelForImageClassification", hf_images.classified),
    HfTask("AutoModelForSemanticSegmentation", hf_images.segmented),
    HfTask("AutoModelForVideoClassification", hf_images.videos),
    HfTask("AutoModelForZeroShotImageClassification", hf_images.pairs),
    HfTask("AutoModelForCTC", hf_sounds.spelled),
    HfTask("AutoModelForAudioClassification", hf_sounds.classified),
    HfTask("AutoModelForObjectDetection", hf_images.unlabelled),
    HfTask("AutoModelForUniversalSegmentation", hf_images.unlabelled),
    HfTask("AutoModelForInstanceSegmentation", hf_images.unlabelled),
    HfTask("AutoModelForDepthEstimation", hf_images.unlabelled),
)
_BY_AUTO = {task.auto: task for task in TASKS}

#: end of an architecture's name -> the auto class that builds it
_BY_SUFFIX = (
    ("ForMaskedLM", "AutoModelForMaskedLM"),
    ("ForImageClassification", "AutoModelForImageClassification"),
    ("ForConditionalGeneration", "AutoModelForSeq2SeqLM"),
    ("ForCausalLM", "AutoModelForCausalLM"),
    ("LMHeadModel", "AutoModelForCausalLM"),
)
#: what a config that names no class with a loss is taken for, if it may be several things
_USUAL = (
    "AutoModelForCausalLM",
    "AutoModelForMaskedLM",
    "AutoModelForImageClassification",
    "AutoModelForImageTextToText",
    "AutoModelForSpeechSeq2Seq",
    "AutoModelForCTC",
    "AutoModelForZeroShotImageClassification",
    "AutoModelForAudioClassification",
    "AutoModelForVideoClassification",
    "AutoModelForSemanticSegmentation",
    "AutoModelForObjectDetection",
    "AutoModelForUniversalSegmentation",
    "AutoModelForInstanceSegmentation",
    "AutoModelForDepthEstimation",
)


def task_of(config: Any) -> HfTask:
    """The task of the class that the config names, or else of what its model type is usually trained for.

    Raises UsageError if there is none.
    """
    from transformers.models import auto as classes

    named = [t for t in TASKS if set(_names(getattr(classes, t.auto), config)) & set(config.architectures)]
    if named:
        return named[0]
    ends = [name for end, name in _BY_SUFFIX for a in config.architectures if a.endswith(end)]
    for name in (*ends, *_order(config)):
        if type(config) in getattr(classes, name)._model_mapping:
            return _BY_AUTO[name]
    raise UsageError(
        f"no model with a loss is known for the model type {config.model_type!r}",
        why="it is neither a language model nor one for images, videos or sounds that has one",
        hint=OWN_FUNCTION,
    )


def _names(auto: Any, config: Any) -> tuple[str, ...]:
    """Names of the classes that an auto class has for a model type."""
    result = auto._model_mapping._model_mapping.get(config.model_type, ())
    return (result,) if isinstance(result, str) else tuple(result)


def _order(config: Any) -> list[str]:
    from transformers.models.auto import AutoModelForMaskedLM

    order = list(_USUAL)
    masked = type(config) in AutoModelForMaskedLM._model_mapping
    if getattr(config, "is_encoder_decoder", False):
        order.insert(0, "AutoModelForSeq2SeqLM")
    elif "masked" in str(config.architectures).lower() or masked:
        order[:2] = reversed(order[:2])
    return order
