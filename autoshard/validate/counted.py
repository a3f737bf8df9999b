"""Bytes as they are counted: what a measurement of memory shows beside the tensors."""

from __future__ import annotations

from math import inf

GIB = 2**30
#: part that the caching allocator holds beyond its tensors: blocks that are split and not free as a whole
_SLACK = 0.15
#: that it cannot give back when memory runs out (see `cluster.USABLE_FRACTION`)
_LEAST_SLACK = 0.03
#: the CUDA context with the code of all kernels; and the buffers of the collective library (NCCL: some MiB
#: per channel, peer and protocol) for the communicators of a kind of parallelism
_CONTEXT, _COMMUNICATORS = 1.0 * GIB, 1.5 * GIB


def counted(peak_bytes: float, kind: str, axes: int = 1, memory_bytes: float = inf) -> float:
    """What a measurement shows of tensors of so many bytes at their peak.

    kind: in words: ``nvidia-smi`` shows all that the process holds, ``reserved`` what the allocator does,
    anything else the tensors. axes: kinds of parallelism that have ranks. memory_bytes: of the device; as it
    fills up, the allocator gives free blocks back before it fails (torch, c10/cuda/CUDACachingAllocator.cpp:
    release_cached_blocks), so that no more than this is shown of what fits.
    """
    words = kind.lower()
    shows_all = "nvidia-smi" in words
    if not shows_all and "reserved" not in words:
        return peak_bytes
    beside = _beside(axes)
    least, most = peak_bytes * (1 + _LEAST_SLACK), peak_bytes * (1 + _SLACK)
    reserved = min(most, max(least, memory_bytes - beside))
    return reserved + beside if shows_all else reserved


def fits(peak_bytes: float, memory_bytes: float, axes: int) -> bool:
    """Whether tensors of so many bytes at their peak fit in a device, when all that can be given back is."""
    return peak_bytes * (1 + _LEAST_SLACK) + _beside(axes) <= memory_bytes


def _beside(axes: int) -> float:
    """Bytes that a process holds beside what its allocator does."""
    return _CONTEXT + axes * _COMMUNICATORS


def unit_of(kind: str) -> float:
    """Bytes of what a measurement calls a GB: 10^9 unless it says GiB; ``nvidia-smi`` counts in MiB, of which
    people call 1000 a GB."""
    words = kind.lower()
    if "nvidia-smi" in words:
        return 1000.0 * 2**20
    return 1e9 if "gb" in words and "gib" not in words else GIB
