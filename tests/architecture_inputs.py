"""One batch for each kind of model: text, images, speech, graphs, ..."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import plain_nets
import torch
from torch.nn import functional as F

BATCH, SEQ, VOCAB, LABELS = 4, 8, 96, plain_nets.LABELS
#: the token that stands for a patch of an image
IMAGE = 90
Inputs = Callable[[], dict[str, Any]]


def tokens() -> dict[str, Any]:
    """Text with labels; some of them do not count."""
    labels = torch.randint(3, VOCAB, (BATCH, SEQ))
    labels[0, :3] = -100
    return {"input_ids": torch.randint(3, VOCAB, (BATCH, SEQ)), "labels": labels}


def padded() -> dict[str, Any]:
    """Text with a mask."""
    mask = torch.ones(BATCH, SEQ, dtype=torch.int64)
    mask[1, 6:] = 0
    return {**tokens(), "attention_mask": mask}


def classified_text() -> dict[str, Any]:
    return {
        "input_ids": torch.randint(3, VOCAB, (BATCH, SEQ)),
        "labels": torch.randint(0, LABELS, (BATCH,)),
    }


def pretraining() -> dict[str, Any]:
    return {**padded(), "next_sentence_label": torch.randint(0, 2, (BATCH,))}


def next_sentences() -> dict[str, Any]:
    return {"input_ids": torch.randint(3, VOCAB, (BATCH, SEQ)), "labels": torch.randint(0, 2, (BATCH,))}


def spans() -> dict[str, Any]:
    """Text, and where the answer begins and ends."""
    ends = {f"{end}_positions": torch.randint(0, SEQ, (BATCH,)) for end in ("start", "end")}
    return {"input_ids": torch.randint(3, VOCAB, (BATCH, SEQ)), **ends}


def tagged() -> dict[str, Any]:
    labels = torch.randint(0, LABELS, (BATCH, SEQ))
    labels[1, 2:] = -100
    return {"input_ids": torch.randint(3, VOCAB, (BATCH, SEQ)), "labels": labels}


def choices() -> dict[str, Any]:
    return {"input_ids": torch.randint(3, VOCAB, (BATCH, 3, SEQ)), "labels": torch.randint(0, 3, (BATCH,))}


def boxed() -> dict[str, Any]:
    """Text and where each word stands on its page."""
    return {**tagged(), "bbox": torch.randint(0, 500, (BATCH, SEQ, 4)).cumsum(-1) // 2}


def images(size: int = 16) -> Inputs:
    return lambda: {
        "pixel_values": torch.randn(BATCH, 3, size, size),
        "labels": torch.randint(0, LABELS, (BATCH,)),
    }


def segmented(size: int) -> Inputs:
    return lambda: {
        "pixel_values": torch.randn(BATCH, 3, size, size),
        "labels": torch.randint(0, LABELS, (BATCH, size, size)),
    }


def pixels() -> dict[str, Any]:
    """Images as one token for each pixel."""
    return {"input_ids": torch.randint(0, 32, (BATCH, 16)), "labels": torch.randint(0, 2, (BATCH,))}


def hidden_patches() -> dict[str, Any]:
    return {"pixel_values": torch.randn(BATCH, 3, 16, 16), "bool_masked_pos": torch.rand(BATCH, 16) < 0.5}


def videos() -> dict[str, Any]:
    return {"pixel_values": torch.randn(BATCH, 4, 3, 16, 16), "labels": torch.randint(0, LABELS, (BATCH,))}


def speech_features(bins: int = 8, frames: int = 16) -> Inputs:
    return lambda: {
        "input_features": torch.randn(BATCH, bins, frames),
        "labels": torch.randint(3, VOCAB, (BATCH, SEQ)),
    }


def spectrograms() -> dict[str, Any]:
    return {"input_values": torch.randn(BATCH, 16, 8), "labels": torch.randint(0, LABELS, (BATCH,))}


def waves(samples: int = 200) -> Inputs:
    return lambda: {
        "input_values": torch.randn(BATCH, samples),
        "labels": torch.randint(0, LABELS, (BATCH,)),
    }


def spoken(samples: int = 200) -> Inputs:
    """Sound with what is said; some sentences are shorter."""

    def make() -> dict[str, Any]:
        labels = torch.randint(1, 12, (BATCH, 5))
        labels[0, 3:] = -100
        return {"input_values": torch.randn(BATCH, samples), "labels": labels}

    return make


def framed() -> dict[str, Any]:
    labels = F.one_hot(torch.randint(0, LABELS, (BATCH, 25)), LABELS)
    return {"input_values": torch.randn(BATCH, 200), "labels": labels}


def transcribed() -> dict[str, Any]:
    return {"input_features": torch.randn(BATCH, 32, 8), "labels": torch.randint(3, VOCAB, (BATCH, SEQ))}


def pairs() -> dict[str, Any]:
    """Images with their captions."""
    return {
        "input_ids": torch.randint(3, VOCAB, (BATCH, SEQ)),
        "pixel_values": torch.randn(BATCH, 3, 16, 16),
        "return_loss": True,
    }


def masked_images() -> dict[str, Any]:
    """Images and the noise that chooses which patches are hidden."""
    return {"pixel_values": torch.randn(BATCH, 3, 16, 16), "noise": torch.rand(BATCH, 16)}


def forecasts() -> dict[str, Any]:
    return {"past_values": torch.randn(BATCH, 16, 2), "future_values": torch.randn(BATCH, 4, 2)}


def per_pixel(size: int = 8) -> Inputs:
    return lambda: {
        "pixel_values": torch.randn(BATCH, 3, size, size),
        "wanted": torch.rand(BATCH, 1, size, size),
    }


def history() -> dict[str, Any]:
    """What was observed, and what came after."""
    past, future = 10, 4
    return {
        "past_values": torch.randn(BATCH, past),
        "past_time_features": torch.rand(BATCH, past, 1),
        "past_observed_mask": torch.ones(BATCH, past),
        "future_values": torch.randn(BATCH, future),
        "future_time_features": torch.rand(BATCH, future, 1),
    }


def described(patches: int) -> Inputs:
    """Images with text that has a token for each patch."""

    def make() -> dict[str, Any]:
        ids = torch.randint(3, 80, (BATCH, SEQ + patches))
        ids[:, 1 : 1 + patches] = IMAGE
        labels = torch.where(ids == IMAGE, -100, ids)
        return {"input_ids": ids, "pixel_values": torch.randn(BATCH, 3, 16, 16), "labels": labels}

    return make


def captioned() -> dict[str, Any]:
    ids = torch.randint(3, 80, (BATCH, SEQ))
    return {"input_ids": ids, "pixel_values": torch.randn(BATCH, 3, 16, 16), "labels": ids.clone()}


def sized() -> dict[str, Any]:
    """Images of 4 x 4 patches each, with their sizes as numbers, and text with a token for 2 x 2 of them."""
    ids = torch.randint(3, 80, (BATCH, 12))
    ids[:, 1:5] = IMAGE
    return {
        "input_ids": ids,
        "labels": torch.where(ids == IMAGE, -100, ids),
        "pixel_values": torch.randn(BATCH * 16, 3 * 4 * 4 * 2),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * BATCH),
        "position_ids": torch.arange(12).expand(3, BATCH, 12),
    }


def image_captions() -> dict[str, Any]:
    return {"pixel_values": torch.randn(BATCH, 3, 16, 16), "labels": torch.randint(3, VOCAB, (BATCH, SEQ))}


def labelled(**shapes: tuple[int, ...]) -> Inputs:
    return lambda: {
        **{name: torch.randn(BATCH, *shape) for name, shape in shapes.items()},
        "labels": torch.randint(0, LABELS, (BATCH,)),
    }


def written() -> dict[str, Any]:
    lengths = torch.tensor([3, 2, 1, 3])
    labels = torch.randint(1, LABELS, (BATCH, 3))
    return {"pixel_values": torch.randn(BATCH, 3, 8, 12), "labels": labels, "lengths": lengths}


def graph() -> dict[str, Any]:
    labels = torch.randint(0, LABELS, (12,))
    return {"nodes": torch.randn(12, 8), "edges": torch.randint(0, 12, (2, 30)), "labels": labels}


def clicked() -> dict[str, Any]:
    sparse = torch.randint(0, 17, (BATCH, 3))
    return {"dense": torch.randn(BATCH, 6), "sparse": sparse, "labels": torch.rand(BATCH).round()}


def noisy() -> dict[str, Any]:
    step = torch.rand(BATCH) * 10
    return {"noisy": torch.randn(BATCH, 3, 8, 8), "noise": torch.randn(BATCH, 3, 8, 8), "step": step}


def twins() -> dict[str, Any]:
    same = torch.tensor([1.0, -1.0, 1.0, -1.0])
    return {"left": torch.randn(BATCH, 8), "right": torch.randn(BATCH, 8), "same": same}
