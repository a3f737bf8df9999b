"""What a user may choose: how a plan is searched, and which optional passes a program is made with.

The fields are the keyword arguments of `autoshard.plan`, `compile` and `parallelize`, the options of the
commands, and entries of ``request.json``: a new choice is a new field here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import Field, asdict, dataclass, field, fields, replace
from typing import Any, Literal, TypeVar, get_args

from autoshard.errors import UsageError

T = TypeVar("T")
#: gradients of the one loss that a model returns, or of all its outputs
Differentiate = Literal["auto", "all"]
#: types that a model may compute in, "" for its own
PRECISIONS = ("", "bf16", "fp16")
#: formats of the operands of matrix products (`ir.scaled`), "" for the type that the model computes in
PRODUCTS = ("", "float8-tensorwise", "float8-rowwise", "float8-rowwise-gw-hp", "mxfp8", "nvfp4")
#: how ops of a program are run, "" for inductor on GPUs and interpreter elsewhere
Codegen = Literal["", "interpreter", "inductor"]


def option(default: Any, help: str, **cli: Any) -> Any:
    """A field with its help. cli: how the commands write it: flag, metavar, least (of a number), hidden,
    counts (whether a file of them may stand for it)."""
    return field(default=default, metadata={"help": help, **cli})


@dataclass(frozen=True)
class PlanOptions:
    """How a plan is searched."""

    memory: int | None = option(
        None, "bytes per rank [default: 94 % of the device]", metavar="16GiB", unit="bytes"
    )
    devices: int | None = option(None, "how many devices of the cluster to use", flag="--gpus", least=1)
    global_batch: int | None = option(
        None, "sequences per optimizer step; the number of microbatches is then chosen", least=1
    )
    optimizer: str = option(
        "adamw",
        "adamw: all in the type of the parameters; adamw-fp32: master copy; muon, soap, shampoo: of matrices",
    )
    precision: str = option(
        "",
        "type to compute in, bf16 or fp16; parameters, gradients and moments stay in the model's "
        "[default: the model's]",
        metavar="bf16",
    )
    products: str = option(
        "",
        "8-bit or 4-bit format of the operands of products with parameters: "
        f"{', '.join(PRODUCTS[1:])}; with ':' and module paths, of these only [default: none]",
        metavar="float8-rowwise[:GLOB,...]",
    )
    tile_rows: int | None = option(
        None,
        "compute MLPs, head and loss for so many tokens of a rank at a time, 0: all at once; logits are then "
        "not returned [default: all at once, unless no plan fits like that without recomputing most layers]",
        least=0,
    )
    expert_chunks: int | None = option(
        None,
        "exchange the tokens of experts in so many chunks, one beside the products of another "
        "[default: as many as are faster, where experts are exchanged]",
        least=1,
    )
    replicate_experts: str = option(
        "",
        "experts of each layer that every rank computes for its own tokens; of a file of counts, the N that "
        "are chosen most often [default: none]",
        metavar="COUNTS.json:N|3,17;0,5",
        counts=True,
    )
    allow: str = option(
        "",
        "what may change results. With how few bits parameters, gradients, activations and tokens of experts "
        "may travel where that is faster; lsh-moe: alike rows of experts travel as their mean, this share of "
        "all [default: nothing]",
        metavar="int8-weights,int4-gradients,int8-activations,int8-tokens,lsh-moe:0.2",
    )
    recompute: bool = option(True, "whether activations may be recomputed in backward")
    pins: tuple[str, ...] = option(
        (), "decide a tensor's placement; may be repeated", flag="--pin", metavar="GLOB=tp:S(0)"
    )
    tactics: str = option("", "decide axis by axis, in order", metavar="'dp on batch; auto on tp'")
    schedule: str = option(
        "", "of a pipeline (pp): gpipe, 1f1b, interleaved, zb-h1, ... [default: the best]", metavar="1f1b"
    )
    chunks: int | None = option(None, "pipeline stages per rank [default: the best]", least=1)
    microbatches: int | None = option(None, "of a step [default: the best number]", least=1)
    slices: int | None = option(
        None, "parts of the sequence of a microbatch, with --schedule seq1f1b [default: 2]", least=1
    )
    replicate_unknown: bool = option(False, "run ops without a sharding rule on global tensors")
    offload: str = option(
        "",
        "what lies in host memory between its uses, any of three, or none [default: what is faster]",
        metavar="activations,parameters,optimizer",
    )
    differentiate: Differentiate = option(
        "auto", "auto: gradients of the loss that the model returns; all: of all outputs"
    )
    stored: tuple[tuple[str, str, tuple[int, ...]], ...] = option(
        (), "parameters that are sharded already: name, layout, pipeline stages", hidden=True
    )
    microbatch_size: int | None = option(
        None, "sequences of a microbatch, or the nearest number that divides a step's", hidden=True
    )
    replicate_small_batch: bool = option(
        False, "let ranks that a batch has too few rows for compute alike", hidden=True
    )
    baselines: bool = option(False, "also price what users choose by hand", hidden=True)

    def __post_init__(self) -> None:
        for each in fields(self):
            value, least = getattr(self, each.name), each.metadata.get("least", 1)
            if each.type == "int | None" and value is not None and (type(value) is not int or value < least):
                unit = each.metadata.get("unit", "")
                what = (
                    f"bytes per rank, for instance {16 << 30:_}"
                    if unit
                    else f"a whole number from {least} on"
                )
                raise UsageError(f"{each.name} is {value!r}", hint=f"give {what}")
        if self.precision not in PRECISIONS:
            raise UsageError(f"precision is {self.precision!r}", hint="bf16 or fp16")
        if self.products.partition(":")[0] not in PRODUCTS:
            raise UsageError(f"products is {self.products!r}", hint=f"one of {', '.join(PRODUCTS[1:])}")


@dataclass(frozen=True)
class PassOptions:
    """Which optional passes a program is made with. The defaults shorten a step and round nothing."""

    allow: str = option(
        "",
        "with how few bits parameters, gradients, activations and tokens of experts may travel where that is "
        "faster [default: all bits]; lsh-moe is for plans",
        metavar="int8-weights,int4-gradients,int8-activations,int8-tokens",
    )
    hierarchy: str = option(
        "off",
        "collectives level by level, with copies of parameters sharded inside a level",
        metavar="auto|levels|copy=node|...",
    )
    kernels: bool = option(False, "one op, with a kernel, for each of the chains around norms")
    bucket: bool = option(True, "collectives of parameters share buckets")
    overlap: bool = option(True, "order ops so that collectives overlap with computing")
    ring: bool = option(
        True, "products beside a gather or a reduce-scatter in chunks round the ranks, where that is faster"
    )
    codegen: str = option(
        "",
        "inductor: what stands between collectives is compiled; interpreter: every op is called "
        "[default: inductor on GPUs]",
        metavar="inductor|interpreter",
    )
    cuda_graphs: bool = option(False, "a step is recorded and launched at once, on GPUs")
    offload: str = option("", "instead of the plan's", hidden=True)

    def __post_init__(self) -> None:
        check_codegen(self.codegen)


def check_codegen(name: str) -> str:
    """The name. Raises UsageError unless it is a `Codegen`."""
    if name not in get_args(Codegen):
        raise UsageError(f"codegen is {name!r}", hint="inductor or interpreter")
    return name


def options_from(kind: type[T], values: Mapping[str, Any], base: T | None = None) -> T:
    """Options by name, on top of others. Raises UsageError for a name that there is not."""
    _check_names(values, [f.name for f in fields(kind)])  # type: ignore[arg-type]
    return kind(**values) if base is None else replace(base, **values)  # type: ignore[type-var]


def split_options(values: Mapping[str, Any]) -> tuple[PlanOptions, PassOptions]:
    """Options of both kinds by name; one that both have is given to both. Raises UsageError for others."""
    planned, passed = ({f.name for f in fields(kind)} for kind in (PlanOptions, PassOptions))
    _check_names(values, sorted(planned | passed))
    return (
        for_plan(PlanOptions(**{k: v for k, v in values.items() if k in planned})),
        PassOptions(**{k: v for k, v in values.items() if k in passed}),
    )


def _check_names(given: Iterable[str], known: Sequence[str]) -> None:
    for name in given:
        if name not in known:
            raise UsageError(f"there is no option {name!r}", hint=f"one of {', '.join(known)}")


def allowed(text: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(what a plan is made for, what a program is compiled with) of ``allow``, word by word."""
    words = [w.strip() for w in text.split(",") if w.strip()]
    of_plan = tuple(w for w in words if w.partition(":")[0] == "lsh-moe")
    return of_plan, tuple(w for w in words if w not in of_plan)


def for_plan(options: PlanOptions) -> PlanOptions:
    """Options of a plan that is compiled with the same words of ``allow``: those that are its own."""
    return replace(options, allow=",".join(allowed(options.allow)[0]))


def chosen_of(options: PlanOptions) -> dict[str, Any]:
    """The fields that differ from their defaults, as JSON has them."""
    plain = asdict(PlanOptions())
    return {name: value for name, value in asdict(options).items() if value != plain[name]}


def visible_fields(kind: type[Any]) -> list[Field[Any]]:
    """Those that commands have options for."""
    return [f for f in fields(kind) if not f.metadata.get("hidden")]
