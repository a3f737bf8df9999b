"""Batches of text for models of transformers, and what all batches are made from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

#: what to do about a model for which no batch is known
OWN_FUNCTION = "write a function that returns (model, example inputs), and name it as FILE.py:FUNCTION"


@dataclass(frozen=True)
class InputRequest:
    """A model that needs a batch of so many examples, of ``seq`` tokens (or frames of sound) each."""

    model: nn.Module
    config: Any
    batch: int
    seq: int

    @property
    def dtype(self) -> torch.dtype:
        return next(self.model.parameters()).dtype

    @property
    def vocabulary(self) -> int:
        """Size of the vocabulary that the labels are taken from."""
        return int(self.config.get_text_config(decoder=True).vocab_size)


@dataclass(frozen=True)
class ExampleInputs:
    """Keyword arguments of the forward, labels included, and what the reader has to know of them."""

    inputs: dict[str, Any]
    notes: tuple[str, ...] = ()


def setting(config: Any, *names: str, default: Any = None) -> Any:
    """The first of these entries that a config, or the part of it about images or sounds, has."""
    parts = ("vision_config", "audio_config", "encoder_config", "encoder", "text_config")
    for part in (config, *(getattr(config, p, None) for p in parts)):
        for name in names:
            result = None if part is None else getattr(part, name, None)
            if result is not None:
                return result
    return default


def tokens(asked: InputRequest) -> torch.Tensor:
    """[batch, seq]."""
    vocabulary = int(asked.config.get_text_config().vocab_size)
    return torch.randint(0, vocabulary, (asked.batch, asked.seq))


def classes(asked: InputRequest, *shape: int) -> torch.Tensor:
    """The class of each example, or of each part of it."""
    return torch.randint(0, int(asked.config.num_labels), (asked.batch, *shape))


def text(asked: InputRequest) -> ExampleInputs:
    ids = tokens(asked)
    return ExampleInputs({"input_ids": ids, "labels": ids.clone()})


def two_texts(asked: InputRequest) -> ExampleInputs:
    labels = torch.randint(0, asked.vocabulary, (asked.batch, asked.seq))
    return ExampleInputs({"input_ids": tokens(asked), "labels": labels}, begun(asked))


def begun(asked: InputRequest) -> tuple[str, ...]:
    """Have labels shifted by a model whose config does not say what its decoder begins with: a note for
    each token that is then 0. Which token it is changes no shape."""
    config: Any = asked.model.config
    names = ("decoder_start_token_id", "pad_token_id") if config.is_encoder_decoder else ()
    missing = [name for name in names if getattr(config, name, None) is None]
    for name in missing:
        setattr(config, name, 0)
    return tuple(f"the config has no {name}: 0 is taken" for name in missing)


def classified_text(asked: InputRequest) -> ExampleInputs:
    return ExampleInputs({"input_ids": tokens(asked), "labels": classes(asked)})


def tagged_text(asked: InputRequest) -> ExampleInputs:
    return ExampleInputs({"input_ids": tokens(asked), "labels": classes(asked, asked.seq)})


def spans(asked: InputRequest) -> ExampleInputs:
    ends = [torch.randint(0, asked.seq, (asked.batch,)) for _ in range(2)]
    return ExampleInputs({"input_ids": tokens(asked), "start_positions": ends[0], "end_positions": ends[1]})
