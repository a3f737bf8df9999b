"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

TargetArgument = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        help="module:callable or file.py:callable that returns (model, example_inputs), "
        "or hf:path/to/config.json",
        show_default=False,
    ),
]
MaybeTarget = Annotated[
    str | None,
    typer.Argument(metavar="[TARGET]", help="as for plan; not needed with --plan", show_default=False),
]
MeshOption = Annotated[
    str | None, typer.Option("--mesh", metavar="dp=2,tp=2", help="axes and their sizes, outermost first")
]
ClusterOption = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        metavar="NAME|FILE",
        help="cost model; without --mesh, its best mesh shape is searched [default: h100-dgx]",
    ),
]
BatchOption = Annotated[
    int | None,
    typer.Option(
        "--batch",
        min=1,
        help="sequences of hf: targets, one microbatch unless --global-batch is given [default: 8]",
    ),
]
SeqOption = Annotated[int | None, typer.Option("--seq", min=1, help="tokens per sequence [default: 128]")]
AlsoOption = Annotated[
    str,
    typer.Option(
        "--also",
        metavar="24,16",
        help="for these numbers of ranks, too, with the same sequences per step, for a run that loses nodes",
    ),
]
ForOption = Annotated[
    str | None,
    typer.Option(
        "--for",
        metavar="TOOL",
        help="the best configuration of megatron, torchtitan, accelerate, deepspeed or transformers instead, "
        "as its flags or file (-o FILE)",
    ),
]
LengthsOption = Annotated[
    str | None,
    typer.Option(
        "--lengths",
        metavar="512:0.7,4096:0.3",
        help="lengths of sequences, with the shares of steps that have them: one plan each, chosen together; "
        "or 1:8192, from the shortest to the longest: one plan that fits at any of them",
    ),
]
WithoutOption = Annotated[
    str, typer.Option("--without", metavar="bucket,overlap,ring", help="optional passes to skip")
]
CostModelOption = Annotated[
    str | None, typer.Option("--cluster", metavar="NAME|FILE", help="cost model [default: that of the plan]")
]
RulesOption = Annotated[
    Path | None,
    typer.Option("--rules", metavar="FILE.py", help="your own sharding rules; this file is run"),
]
OverwriteOption = Annotated[
    bool, typer.Option("--overwrite", help="replace an existing folder of the same kind")
]
SeedOption = Annotated[int, typer.Option("--seed", help="of weights, example inputs, data and dropout")]
JsonOption = Annotated[bool, typer.Option("--json", help="print one JSON document on stdout")]
DebugOption = Annotated[bool, typer.Option("--debug", help="show tracebacks")]
OutOption = Annotated[Path, typer.Option("-o", "--out", metavar="DIR", help="folder to write")]
MaybeOut = Annotated[Path | None, typer.Option("-o", "--out", metavar="DIR", help="folder to write")]
FolderArgument = Annotated[
    Path, typer.Argument(metavar="DIR", help="a folder that `autoshard compile` wrote", show_default=False)
]
OtherTarget = Annotated[
    str | None,
    typer.Option("--target", help="path of the model, if it moved since it was compiled"),
]
