"""Numbers as people read them."""

from __future__ import annotations

_STEPS = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def bytes_text(n: float) -> str:
    """``3.50 MiB``"""
    for size, unit in _STEPS:
        if n >= size:
            value = n / size
            return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f} {unit}"
    return f"{n:.0f} B"


def seconds_text(s: float) -> str:
    """``12.3 ms``"""
    for size, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if s >= size:
            value = s / size
            return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f} {unit}"
    return "0 us" if s < 1e-9 else f"{s * 1e6:.2f} us"


def parse_bytes(text: str) -> int:
    """Bytes of ``16GiB``, ``80 GB``, ``512MiB``, ``1e9``; ValueError if it is no size above zero."""
    words = text.strip().lower().removesuffix("b") if not text.strip().isdigit() else text.strip()
    scale = 1
    for power, letter in enumerate("kmgt", 1):
        for ending, base in ((f"{letter}i", 1024), (letter, 1000)):
            if words.endswith(ending):
                words, scale = words.removesuffix(ending), base**power
                break
        if scale > 1:
            break
    count = int(float(words) * scale)
    if count <= 0:
        raise ValueError(f"{text!r} is not a size above zero")
    return count
