"""Shared test set-up: one thread a process, no network, reproducible Hypothesis, GPU tests need a GPU."""

from __future__ import annotations

import os

# Before anything imports torch or a tokenizer; child processes inherit it.
os.environ.update(
    OMP_NUM_THREADS="1",
    MKL_NUM_THREADS="1",
    HF_HUB_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
)

import socket

import pytest
from hypothesis import settings

settings.register_profile("autoshard", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("autoshard")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the files of tests/golden anew")


#: files that start processes of their own: one worker runs them, so that these do not wait for each other;
#: first, since together they take longest
PROCESSES = (
    "test_pipeline.py",
    "test_gloo.py",
    "test_pipeline_api.py",
    "test_export.py",
    "test_hierarchy.py",
    "test_ring.py",
    "test_offload.py",
    "test_guard.py",
    "test_profile.py",
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    last = len(PROCESSES)
    items.sort(key=lambda item: PROCESSES.index(item.path.name) if item.path.name in PROCESSES else last)
    for item in items:
        name = item.path.name
        item.add_marker(pytest.mark.xdist_group("processes" if name in PROCESSES else name))
    gpu_items = [item for item in items if "gpu" in item.keywords]
    if not gpu_items:
        return
    import torch

    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, and torch sees none")
    for item in gpu_items:
        item.add_marker(skip)


@pytest.fixture
def free_port() -> int:
    """A TCP port of this machine that nothing listened on a moment ago."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port
