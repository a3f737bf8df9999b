"""Batches of images, with classes or with text, for models of transformers."""

from __future__ import annotations

import inspect
from dataclasses import replace
from math import isqrt
from typing import Any

import torch

from autoshard.interop.hf_inputs import ExampleInputs, InputRequest, classes, setting, text, tokens

#: patches along each side of an image, where the model takes any number
_PATCHES = 16


def classified(asked: InputRequest) -> ExampleInputs:
    return ExampleInputs({"pixel_values": _pixels(asked), "labels": classes(asked)})


def segmented(asked: InputRequest) -> ExampleInputs:
    pixels = _pixels(asked)
    return ExampleInputs({"pixel_values": pixels, "labels": classes(asked, *pixels.shape[-2:])})


def unlabelled(asked: InputRequest) -> ExampleInputs:
    """For models whose loss looks for the best match of what they give with what is there, in numpy."""
    note = "images without labels: the step ends with the outputs, no loss is part of it"
    return ExampleInputs({"pixel_values": _pixels(asked)}, (note,))


def videos(asked: InputRequest) -> ExampleInputs:
    frames = int(setting(asked.config, "num_frames", "frames_per_clip", default=16))
    name = getattr(asked.model, "main_input_name", "pixel_values")
    shape = (asked.batch, frames, *_image(asked))
    return ExampleInputs({name: torch.rand(shape, dtype=asked.dtype), "labels": classes(asked)})


def pairs(asked: InputRequest) -> ExampleInputs:
    """Images with their captions, of as many tokens as these may have."""
    most = setting(asked.config.get_text_config(), "max_position_embeddings", default=asked.seq)
    ids = tokens(replace(asked, seq=min(asked.seq, int(most))))
    return ExampleInputs({"input_ids": ids, "pixel_values": _pixels(asked), "return_loss": True})


def image_text(asked: InputRequest) -> ExampleInputs:
    """Text with an image in front of it, whose tokens are part of the sequence.

    Where it is not known which images a model takes, or how many tokens they become, the text is alone.
    """
    taken = inspect.signature(asked.model.forward).parameters
    token = setting(asked.config, "image_token_id", "image_token_index")
    try:
        sized = "image_grid_thw" in taken
        images, count = _sized(asked) if sized else _fixed(asked, None if token is None else int(token))
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        why = str(error).strip().split("\n")[0][:120]
        note = f"text alone: which images {type(asked.model).__name__} takes is not known ({why})"
        return replace(text(asked), notes=(note,))
    # what follows an image is at least half of the sequence
    full = asked.seq if 2 * count <= asked.seq else asked.seq + count
    ids = tokens(replace(asked, seq=full))
    if token is not None:
        ids = torch.where(ids == int(token), 0 if token else 1, ids)
        ids[:, 1 : 1 + count] = int(token)
    inputs = {"input_ids": ids, "labels": ids.clone(), **images}
    inner = getattr(asked.model, "model", asked.model)
    if sized and "position_ids" in taken and hasattr(inner, "get_rope_index"):
        # in time, height and width; the model would count them from the tokens' values
        inputs["position_ids"] = torch.arange(full).expand(3, asked.batch, full)
    if "token_type_ids" in taken or "mm_token_type_ids" in taken:
        name = "mm_token_type_ids" if "mm_token_type_ids" in taken else "token_type_ids"
        kinds = torch.zeros((asked.batch, full), dtype=torch.int64)
        kinds[:, 1 : 1 + count] = 1
        inputs[name] = kinds
    note = f"sequences of {full} tokens, {count} of them an image" if count else "images beside the text"
    return ExampleInputs(inputs, (note,))


def _sized(asked: InputRequest) -> tuple[dict[str, Any], int]:
    """Images as rows of patches, their sizes as numbers; tokens of each."""
    vision = asked.config.vision_config
    merge = int(setting(vision, "spatial_merge_size", "merge_size", default=2))
    side = max(merge, min(_PATCHES, merge * isqrt(max(1, asked.seq // 2))) // merge * merge)
    patch = int(vision.patch_size) ** 2 * int(setting(vision, "temporal_patch_size", default=1))
    width = patch * int(setting(vision, "in_channels", "in_chans", "num_channels", default=3))
    pixels = torch.rand((asked.batch * side * side, width), dtype=asked.dtype)
    # these numbers are needed as such
    sizes = torch.tensor([[1, side, side]] * asked.batch, device="cpu")
    return {"pixel_values": pixels, "image_grid_thw": sizes}, (side // merge) ** 2


def _fixed(asked: InputRequest, token: int | None) -> tuple[dict[str, Any], int]:
    """Images of the one size that the model takes; how many tokens of the text each replaces."""
    pixels = _pixels(asked)
    if token is None:
        return {"pixel_values": pixels}, 0
    with torch.no_grad():
        model: Any = asked.model
        result = model.get_image_features(pixel_values=pixels)
    result = getattr(result, "pooler_output", result)
    parts = [result] if isinstance(result, torch.Tensor) else list(result)
    count = sum(p.numel() // p.shape[-1] for p in parts)
    return {"pixel_values": pixels}, count // asked.batch


def _pixels(asked: InputRequest) -> torch.Tensor:
    """[batch, channels, height, width]."""
    return torch.rand((asked.batch, *_image(asked)), dtype=asked.dtype)


def _image(asked: InputRequest) -> tuple[int, int, int]:
    """(channels, height, width)."""
    size = setting(asked.config, "image_size", default=224)  # some models take images of any size
    if isinstance(size, dict):
        size = size["height"], size["width"]
    height, width = (size, size) if isinstance(size, int) else size
    channels = setting(asked.config, "num_channels", "in_channels", "in_chans", default=3)
    return int(channels), int(height), int(width)
