"""Small programs whose peaks are predicted and measured."""

from __future__ import annotations

from benchmarks.estimates_cases import EstimateCase
from benchmarks.models import bench_batch, bench_llama


def small_case(mesh: str, microbatches: int = 1, again: bool = False, tile_rows: int = 0) -> EstimateCase:
    """Two layers of a Llama on four ranks."""
    return EstimateCase(
        "llama",
        lambda: bench_llama(2, 128, 512),
        lambda size: bench_batch(size, 32, 512),
        4,
        mesh,
        1,
        microbatches,
        again,
        tile_rows,
    )


CASES = (
    small_case("dp=4"),
    small_case("tp=4"),
    small_case("fsdp=4", again=True),
    small_case("dp=2,tp=2", microbatches=3),
    small_case("fsdp=2,tp=2", tile_rows=8),
)
