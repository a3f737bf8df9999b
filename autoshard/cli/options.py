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
        help="whose prices to use; without --mesh, its best mesh shape is searched [default: h100-dgx]",
    ),
]
GpusOption = Annotated[
    int | None, typer.Option("--gpus", min=1, help="how many devices of the cluster to use")
]
BatchOption = Annotated[int | None, typer.Option("--batch", min=1, help="of hf: targets [default: 8]")]
GlobalBatchOption = Annotated[
    int | None,
    typer.Option("--global-batch", min=1, help="sequences per optimizer step; microbatches are chosen"),
]
OptimizerOption = Annotated[
    str, typer.Option("--optimizer", help="adamw: all in the type of the parameters; adamw-fp32: master copy")
]
RecomputeOption = Annotated[
    bool, typer.Option("--recompute/--no-recompute", help="whether activations may be computed again")
]
PinOption = Annotated[
    list[str] | None,
    typer.Option("--pin", metavar="GLOB=tp:S(0)", help="decide a tensor's placement; may be repeated"),
]
TacticsOption = Annotated[
    str, typer.Option("--tactics", metavar="'dp on batch; auto on tp'", help="decide axis by axis, in order")
]
ScheduleOption = Annotated[
    str,
    typer.Option(
        "--schedule", metavar="1f1b", help="of a pipeline (pp): gpipe, 1f1b, interleaved, zb-h1, ..."
    ),
]
ChunksOption = Annotated[int | None, typer.Option("--chunks", min=1, help="pipeline stages per rank")]
SlicesOption = Annotated[
    int | None,
    typer.Option("--slices", min=1, help="parts of the sequence of a microbatch, with --schedule seq1f1b"),
]
MicrobatchesOption = Annotated[
    int | None, typer.Option("--microbatches", min=1, help="of a step [default: the best number]")
]
AllowOption = Annotated[
    str,
    typer.Option(
        "--allow",
        metavar="int8-weights,int4-gradients",
        help="with how few bits parameters, gradients and activations (int8-activations) may travel where "
        "that is faster [default: all bits]",
    ),
]
OffloadOption = Annotated[
    str,
    typer.Option(
        "--offload",
        metavar="activations,parameters,optimizer",
        help="what lives in host memory between its uses, any of the three [default: nothing]",
    ),
]
HierarchyOption = Annotated[
    str,
    typer.Option(
        "--hierarchy",
        metavar="auto|levels|copy=node|...",
        help="collectives level by level, with copies of parameters split inside a level",
    ),
]
SeqOption = Annotated[int | None, typer.Option("--seq", min=1, help="tokens per sequence [default: 128]")]
MemoryOption = Annotated[
    str | None, typer.Option("--memory", metavar="16GiB", help="bytes per rank [default: 94 % of the device]")
]
ReplicateOption = Annotated[
    bool, typer.Option("--replicate-unknown", help="run ops without a sharding rule on whole tensors")
]
WithoutOption = Annotated[
    str, typer.Option("--without", metavar="bucket,overlap,ring", help="passes that are left out")
]
KernelsOption = Annotated[
    bool,
    typer.Option("--kernels/--no-kernels", help="make ops that have a kernel of the chains around norms"),
]
RingOption = Annotated[
    bool,
    typer.Option("--ring/--no-ring", help="send chunks round while others are multiplied, where that gains"),
]
RulesOption = Annotated[
    Path | None,
    typer.Option("--rules", metavar="FILE.py", help="your own sharding rules; this file is run"),
]
OverwriteOption = Annotated[
    bool, typer.Option("--overwrite", help="replace an older folder of the same kind")
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
    typer.Option("--target", help="where the model is now, if not where it was when compiled"),
]
