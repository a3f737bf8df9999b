"""Every kernel and configuration compiled ahead of time, without a GPU. A process without the interpreter.

Compiled are the launches of the large samples, whose sizes are all multiples of 16: in bf16 for sm_80 or in
fp32 for sm_90, with `make test-all` both, with ``--all`` in every element type. Prints a JSON document per
machine code. Other arguments: names of kernels, none for all.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator

import torch
from triton_aot import compile_launch

import autoshard.ops  # noqa: F401 (defines the ops)
from autoshard.kernels.launch import Launch
from autoshard.kernels.registry import KernelSpec, specs

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
USUAL = (("bf16", 80), ("f32", 90))
ALL = tuple((name, arch) for name in DTYPES for arch in (80, 90))


def launches(spec: KernelSpec, dtype: torch.dtype) -> Iterator[Launch]:
    """One launch of each configuration that the large samples need."""
    seen = set()
    for args in spec.large(None, dtype, torch.device("meta")):
        for launch in spec.prepare()(*args)[1]:
            types = tuple(a.dtype if isinstance(a, torch.Tensor) else type(a) for a in launch.args)
            key = (launch.kernel.__name__, types, tuple(sorted(launch.constants.items())), launch.warps)
            if key not in seen:
                seen.add(key)
                yield launch


def main() -> None:
    wanted = [a for a in sys.argv[1:] if a != "--all"]
    for number, spec in enumerate(specs().values()):
        usual = USUAL if os.environ.get("AUTOSHARD_ALL_CASES") else USUAL[number % 2 :][:1]
        for name, arch in ALL if "--all" in sys.argv else usual:
            for launch in launches(spec, DTYPES[name]) if not wanted or spec.name in wanted else ():
                code = compile_launch(launch, arch)
                found = {
                    "kernel": spec.name,
                    "function": code.name,
                    "constants": str(dict(launch.constants)),
                    "warps": launch.warps,
                    "dtype": name,
                    "arch": arch,
                    "registers": code.registers,
                    "shared": code.shared,
                    "spills": code.spills,
                    "wide": code.wide,
                    "narrow": code.narrow,
                    "allowed": launch.narrow,
                }
                print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
