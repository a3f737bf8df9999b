"""Every kernel compiled ahead of time for sm_80 and sm_90, without a GPU. A process without the interpreter.

For the large samples (all sizes multiples of 16) prints one line per kernel, configuration and arch:
name, type, arch, registers, spills, wide and narrow accesses, narrow ones allowed.
"""

from __future__ import annotations

import sys

import torch

import autoshard.ops  # noqa: F401 (defines the ops)
from autoshard.kernels.registry import specs
from autoshard.torch_adapters.triton_aot import compile_launch

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


def main() -> None:
    wanted = sys.argv[1:]
    for spec in specs().values():
        if wanted and spec.name not in wanted:
            continue
        for name, dtype in DTYPES.items():
            seen = set()
            for args in spec.large(None, dtype, torch.device("meta")):
                for launch in spec.prepare()(*args)[1]:
                    types = tuple(a.dtype if isinstance(a, torch.Tensor) else None for a in launch.args)
                    key = (
                        launch.kernel.__name__,
                        types,
                        tuple(sorted(launch.constants.items())),
                        launch.warps,
                    )
                    if key in seen:
                        continue
                    seen.add(key)
                    for arch in (80, 90):
                        c = compile_launch(launch, arch)
                        print(
                            spec.name,
                            name,
                            c.name,
                            arch,
                            c.registers,
                            c.spills,
                            c.wide,
                            c.narrow,
                            launch.narrow,
                            c.accesses,
                            flush=True,
                        )


if __name__ == "__main__":
    main()
