"""Shared test set-up: one thread a process, no network, reproducible Hypothesis, GPU tests need a GPU."""

from __future__ import annotations

import os

# Before anything imports torch or a tokenizer; child processes inherit it. The last three are read by glibc
# as a process starts, so by xdist's workers and by ranks: memory that is freed is kept for the next tensor.
os.environ.update(
    OMP_NUM_THREADS="1",
    MKL_NUM_THREADS="1",
    HF_HUB_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
    MALLOC_TRIM_THRESHOLD_="2000000000",
    MALLOC_MMAP_THRESHOLD_="1000000000",
    MALLOC_TOP_PAD_="16777216",
)

import gc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from sampling import VARIABLE, sampled, unlike

settings.register_profile("autoshard", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("autoshard")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the files of tests/golden anew")


def pytest_configure(config: pytest.Config) -> None:
    """Each file of tests/golden is written by a case of its own, so all cases run."""
    if config.getoption("--update-golden"):
        os.environ[VARIABLE] = "1"


#: files whose plans are of the same models: one worker runs them all, and makes each plan once
#: (`pipelines`, `sliced`; `planned`)
ALIKE = (
    (
        "test_pipeline.py",
        "test_sequence_slices.py",
        "test_pipeline_cuts.py",
        "test_verify_static.py",
        "test_simulate.py",
        "test_timeline.py",
        "test_hostile_pipeline.py",
        "test_sharing.py",
    ),
    (
        "test_families.py",
        "test_export.py",
        "test_planner.py",
        "test_fuse_pass.py",
        "test_experts.py",
        "test_offload.py",
        "test_mutations.py",
        "test_ring_products.py",
        "test_explain.py",
        "test_program.py",
    ),
)
#: files in the order in which workers take them: what takes long first
FIRST = (
    *(file for files in ALIKE for file in files),
    "test_checkpoint.py",
    "test_rules.py",
    "test_user_state.py",
    "test_gloo.py",
    "test_pipeline_api.py",
    "test_aot.py",
    "test_calls.py",
    "test_trainer.py",
    "test_planning_requests.py",
    "test_stage_partition.py",
    "test_branch_and_bound.py",
    "test_precision.py",
    "test_weights.py",
    "test_guides.py",
    "test_recompute.py",
    "test_advise.py",
    "test_hierarchy.py",
    "test_validate.py",
    "test_capture.py",
    "test_bench.py",
    "test_fuzz.py",
    "test_compile_once.py",
    "test_architectures.py",
    "test_repeats.py",
    "test_estimates.py",
    "test_profile.py",
    "test_cli.py",
)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """``--dist loadfile`` gives files that are alike to one worker, as if they were one file."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class LoadAlike(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = Path(super()._split_scope(nodeid)).name
            return next((files[0] for files in ALIKE if file in files), file)

    return LoadAlike(config, log)


def pytest_collection_finish() -> None:
    """Graphs are millions of small objects that live on: they are not looked through again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 100)


def _fast() -> set[tuple[str, str]]:
    """(file, function) of tests that ``make quick`` runs."""
    lines = (Path(__file__).parent / "fast.txt").read_text().splitlines()
    rows = (line.partition(": ") for line in lines if not line.startswith("#"))
    return {(file, name) for file, _, names in rows for name in names.split()}


def _shares() -> dict[tuple[str, str], str]:
    """(file, function) of long tests -> which cases run at every commit: ``6``, one in six; ``=2``, two."""
    lines = (Path(__file__).parent / "sampled.txt").read_text().splitlines()
    rows = (line.partition(": ") for line in lines if not line.startswith("#"))
    pairs = ((file, *word.split("/")) for file, _, words in rows for word in words.split())
    return {(file, name): share for file, name, share in pairs}


def _chosen(cases: list[pytest.Item], share: str) -> list[pytest.Item]:
    if share.startswith("="):
        return unlike(cases, int(share[1:]), lambda item: item.nodeid)
    return sampled(cases, int(share), lambda item: item.nodeid)


def _named(item: pytest.Item) -> tuple[str, str]:
    """(file, function) of a test."""
    file, _, test = item.nodeid.partition("::")
    return file, test.partition("[")[0]


def _leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Cases of long tests: see `sampling`."""
    cases: dict[tuple[str, str], list[pytest.Item]] = {}
    for item in items:
        cases.setdefault(_named(item), []).append(item)
    shares = _shares()
    if not any("::" in argument for argument in config.args):
        files = {file for file, _ in cases}
        unknown = [row for row in shares if row[0] in files and row not in cases]
        assert not unknown, f"tests/sampled.txt has {unknown}"
    kept: set[pytest.Item] = set()
    for key, own in cases.items():
        kept.update(_chosen(own, shares.get(key, "1")))
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    fast = _fast()
    _leave_out(config, items)
    for item in items:
        if _named(item) not in fast:
            item.add_marker(pytest.mark.slow)
    last = len(FIRST)
    items.sort(key=lambda item: FIRST.index(item.path.name) if item.path.name in FIRST else last)
    gpu_items = [item for item in items if "gpu" in item.keywords]
    if not gpu_items:
        return
    import torch

    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, and torch sees none")
    for item in gpu_items:
        item.add_marker(skip)
