"""Device functions that all kernels share, and what the interpreter does differently.

Triton's interpreter runs bf16 arithmetic on bit patterns and truncates when it makes bf16: so kernels cast to
fp32 right after each load, and store through `to_out`.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

#: whether kernels run in the interpreter: decided when triton is imported
INTERPRET = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") == "1")
_BF16 = tl.constexpr(tl.bfloat16)


@triton.jit
def rint(x):  # type: ignore[no-untyped-def]
    """The nearest whole number, ties to even; for |x| < 2^22."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def to_out(x, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """fp32 ``x`` in ``dtype``, rounded to nearest, ties to even."""
    if INTERPRET:
        if dtype == _BF16:
            bits = x.to(tl.uint32, bitcast=True)
            rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
            rounded = tl.where(x == x, rounded, 0x7FC0)
            return rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)
        else:
            return x.to(dtype)
    else:
        return x.to(dtype)


@triton.jit
def dot(a, b):  # type: ignore[no-untyped-def]
    """a b in fp32, of fp32 without rounding to tf32."""
    if INTERPRET:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(a, b, input_precision="ieee")
