"""Triton's ahead-of-time compiler: a launch becomes the machine code of a GPU that need not be there.

Triton must not run in its interpreter in the process that compiles. The machine code is read with the
disassembler of the triton wheel.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from autoshard.kernels.launch import ALIGN, Launch

_POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.bool: "*i1",
}
#: of SASS: what an instruction does -> its width in bytes where nothing is said
_ACCESS = re.compile(r"\b(LDG|STG|LDL|STL)((?:\.[A-Z0-9_]+)*)\b")


@dataclass(frozen=True)
class Compiled:
    """A kernel as machine code.

    registers: per thread. shared: bytes of shared memory of a block. spills: accesses of local memory, that
    is, of registers that did not fit. accesses: (what, bytes) -> instructions that access global memory.
    """

    name: str
    arch: int
    registers: int
    shared: int
    spills: int
    accesses: dict[tuple[str, int], int]

    @property
    def narrow(self) -> int:
        """Accesses of global memory of less than 16 bytes."""
        return sum(count for (_, width), count in self.accesses.items() if width < 16)

    @property
    def wide(self) -> int:
        return sum(count for (_, width), count in self.accesses.items() if width >= 16)


def compile_launch(launch: Launch, arch: int) -> Compiled:
    """The machine code of a launch for compute capability ``arch`` (80, 90), as Triton's JIT would make it.

    Numbers that are 1 become constants, numbers and pointers that are multiples of 16 are declared so;
    tensors of the device "meta" count as aligned.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature: dict[str, str] = {}
    constants: dict[str, Any] = dict(launch.constants)
    attributes: dict[tuple[int, ...], list[list[object]]] = {}
    for place, (name, arg) in enumerate(zip(launch.kernel.arg_names, launch.args, strict=False)):
        if arg is None or (isinstance(arg, int) and arg == 1):
            signature[name], constants[name] = "constexpr", arg
            continue
        signature[name] = _type(arg)
        if _divisible(arg):
            attributes[(place,)] = [["tt.divisibility", ALIGN]]
    for name in launch.constants:
        signature[name] = "constexpr"
    source = ASTSource(launch.kernel, signature, constants, attributes)
    options = {"num_warps": launch.warps}
    built = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    sass = _read(built.asm["cubin"])
    found = re.search(r"REG:(\d+)", sass)
    if found is None:
        raise RuntimeError("cuobjdump -res-usage names no registers")
    registers = int(found[1])
    counted = Counter(_access(kind, words) for kind, words in _ACCESS.findall(sass))
    spills = sum(n for (kind, _), n in counted.items() if kind in ("LDL", "STL"))
    accesses = {key: n for key, n in sorted(counted.items()) if key[0] in ("LDG", "STG")}
    name = launch.kernel.__name__
    return Compiled(name, arch, registers, built.metadata.shared, spills, accesses)


def _type(arg: Any) -> str:
    if isinstance(arg, torch.Tensor):
        return _POINTERS[arg.dtype]
    if isinstance(arg, float):
        return "fp32"
    return "i32" if -(2**31) <= arg < 2**31 else "i64"


def _divisible(arg: Any) -> bool:
    if isinstance(arg, torch.Tensor):
        if arg.device.type == "meta":
            return arg.storage_offset() * arg.element_size() % ALIGN == 0
        return arg.data_ptr() % ALIGN == 0
    return isinstance(arg, int) and arg % ALIGN == 0


def _access(kind: str, words: str) -> tuple[str, int]:
    """(LDG, bytes) of ``LDG`` and ``.E.U8.CONSTANT`` and the like."""
    found = re.search(r"\.(?:[US]?(8|16|64|128))(?:\.|$)", words)
    return kind, int(found[1]) // 8 if found else 4


def _read(cubin: bytes) -> str:
    """Resource usage and instructions."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        asked = [str(tool), "-res-usage", "-sass", str(file)]
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout
