"""Steps on packed documents as transformers' collator makes them, of which every batch has another number."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from families import family
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import DataCollatorWithFlattening

import autoshard


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_documents_of_any_number_share_a_program() -> None:
    """What FlashAttention is told of them (a tensor of as many numbers) is not read."""
    collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_tensors="pt")
    eager, _ = family("llama-packed").make()
    model, _ = family("llama-packed").make()

    def batch(*lengths: int) -> dict[str, Any]:
        return dict(collator([{"input_ids": torch.randint(3, 96, (n,)).tolist()} for n in lengths]))

    parallel: Any = autoshard.parallelize(model, "dp=1", example_inputs=batch(10, 22), cluster="cpu-gloo")
    for lengths in ((10, 22), (5, 27), (4, 8, 20), (32,), (1, 1, 1, 29)):
        given = batch(*lengths)
        torch.testing.assert_close(parallel(**given).loss, eager(**given).loss)
    # the second has the longest length, a number of Python, as an argument
    assert len(parallel._autoshard_family.programs) == 2
