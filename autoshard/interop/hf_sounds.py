"""Batches of sounds for models of transformers."""

from __future__ import annotations

from dataclasses import replace

import torch

from autoshard.errors import UsageError
from autoshard.interop.hf_inputs import (
    OWN_FUNCTION,
    ExampleInputs,
    InputRequest,
    begun,
    classes,
    setting,
    text,
)

#: samples that a frame stands for: 20 ms of 16 kHz
_SAMPLES = 320
#: frames for each token that is said
_FRAMES = 4


def transcribed(asked: InputRequest) -> ExampleInputs:
    """Sounds with what is said in them; as many tokens as asked for, or as the decoder takes.

    Sounds that stand among tokens of text become tokens of text.
    """
    if getattr(asked.model, "main_input_name", "") == "input_ids":
        note = f"text alone: which sounds {type(asked.model).__name__} takes is not known"
        return replace(text(asked), notes=(note,))
    most = setting(asked.config, "max_target_positions", default=asked.seq)
    labels = torch.randint(0, asked.vocabulary, (asked.batch, min(asked.seq, int(most))))
    return ExampleInputs({**_sound(asked), "labels": labels}, begun(asked))


def spelled(asked: InputRequest) -> ExampleInputs:
    """Sounds with what is said in them, fewer tokens than frames."""
    labels = torch.randint(1, asked.vocabulary, (asked.batch, max(1, asked.seq // _FRAMES // 2)))
    return ExampleInputs({**_sound(asked), "labels": labels})


def classified(asked: InputRequest) -> ExampleInputs:
    return ExampleInputs({**_sound(asked), "labels": classes(asked)})


def _sound(asked: InputRequest) -> dict[str, torch.Tensor]:
    """As many frames as asked for, or as the model always takes."""
    config, name = asked.config, getattr(asked.model, "main_input_name", "")
    bins = setting(config, "num_mel_bins")
    shape: tuple[int, ...] | None = None
    if name == "input_values":
        spectrogram = bins is not None and getattr(config, "max_length", None)
        shape = (int(config.max_length), int(bins)) if spectrogram else (asked.seq * _SAMPLES,)
    elif name == "input_features":
        positions = setting(config, "max_source_positions")
        per_frame = setting(config, "feature_projection_input_dim", "input_feat_per_channel")
        if per_frame is not None:
            shape = (asked.seq, int(per_frame))
        elif bins is not None and positions is not None:
            shape = (int(bins), 2 * int(positions))
        elif bins is not None:
            shape = (asked.seq * _FRAMES, int(bins))
    if shape is None:
        raise UsageError(
            f"no sounds are known that {type(asked.model).__name__} takes",
            why=f"its main input is {name or 'unknown'}, and its config does not say of which sizes",
            hint=OWN_FUNCTION,
        )
    return {name: torch.rand((asked.batch, *shape), dtype=asked.dtype)}
