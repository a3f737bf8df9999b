"""Bytes as they are counted: what a measurement of memory shows beside the tensors."""

from __future__ import annotations

GIB = 2**30
#: part that the caching allocator holds beyond its tensors. Assumed.
_SLACK = 0.03
#: the CUDA context and the buffers of the collective library (see `cluster.USABLE_FRACTION`)
_CONTEXT = 1.5 * GIB


def counted(peak_bytes: float, kind: str) -> float:
    """What a measurement shows of tensors of so many bytes at their peak.

    kind: in words: ``nvidia-smi`` shows all that the process holds, ``reserved`` what the allocator does,
    anything else the tensors.
    """
    words = kind.lower()
    if "nvidia-smi" in words:
        return peak_bytes * (1 + _SLACK) + _CONTEXT
    return peak_bytes * (1 + _SLACK) if "reserved" in words else peak_bytes
