"""A program: what every rank runs, and how its ends meet the user's model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property

from autoshard.capture.precision import UNCHANGED, MixedPrecision
from autoshard.ir import Joint, Port, Result
from autoshard.ir.lowered import Lowered
from autoshard.ir.offload import NO_OFFLOAD, Offload
from autoshard.ir.slices import Slices
from autoshard.schedules.schedule import Schedule

#: raised when the meaning of a program folder changes
FORMAT = 8


@dataclass(frozen=True)
class Signature:
    """How the program's ends meet the model: see `Joint` for the fields."""

    ports: tuple[Port, ...]
    results: tuple[Result, ...]
    in_tree: str
    in_leaves: tuple[tuple[str, str], ...]
    out_tree: str
    out_leaves: tuple[tuple[str, str], ...]
    input_names: tuple[str, ...]
    tied: tuple[tuple[str, str], ...]
    frozen: tuple[str, ...]
    training: bool
    batch_inputs: tuple[str, ...] = ()

    @property
    def batched(self) -> tuple[int, ...]:
        """Positions of arguments with a batch."""
        return tuple(map(int, self.batch_inputs))

    @cached_property
    def gradients(self) -> frozenset[str]:
        """Values that are gradients of parameters."""
        return frozenset(r.value for r in self.results if r.kind == "grad")

    @classmethod
    def of(cls, joint: Joint) -> Signature:
        return cls(**{f.name: getattr(joint, f.name) for f in fields(cls)})


@dataclass(frozen=True)
class NodeNote:
    """What a dump says beside a node."""

    fqn: str = ""
    source: str = ""
    why: str = ""


@dataclass(frozen=True)
class PipelineStages:
    """How the stages of a program are run.

    position: of the pp axis in the mesh of all ranks. turns: (stage of a forward, stage of a backward that
    runs as one with it) -> which of the two, 0 or 1, goes on at each of their stops (`rules.stops`). parts:
    of each slice of a microbatch, how many of the equal parts of its sequence; () where slices are equal.
    """

    schedule: Schedule
    position: int = 0
    turns: Mapping[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)
    parts: tuple[int, ...] = ()

    @property
    def slices(self) -> Slices:
        """Of the sequence of a microbatch."""
        return Slices(self.parts) if self.parts else Slices.equal(self.schedule.slices)


@dataclass(frozen=True)
class StoredState:
    """What a program was captured from, in a form that another process can compare.

    graph: digest of the captured graph (`capture.python_state.captured_state.graph_digest`). attributes,
    variables: that the model's code read, by label, with their values as text; no text for an object.
    grad_mode, environment, tables: see `CapturedState`. local: whether the graph depends on objects that no
    other process has, so that each has to capture it.
    """

    graph: str = ""
    attributes: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    grad_mode: bool = False
    environment: bool = False
    local: bool = False
    tables: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Program:
    """One program for all ranks of a mesh; what differs from rank to rank are symbols in its text.

    mesh: ``dp=2,tp=2``, the ranks that run one stage. stages: None if all of them run everything. lowered:
    segments and main. notes: segment -> one note per node. plan: JSON text of the plan it was made from.
    dumps: pass name -> text of the graph after it. constants: port target -> torch tensor. target: where the
    model came from (``hf:config.json``), if known. user_ops: ops in it whose rules are the user's own.
    original: the model before placements (`autoshard.program.original`), None if it was not kept; and where
    each of its nodes comes from. microbatches: how often a step runs the program, each time on another part
    of the batch; its shapes are those of one microbatch of all ranks together.
    sums: outputs, by position, of which the full batch's is the sum over microbatches. alone: what is
    computed for every microbatch by itself, where the full batch would give something else. classes: port
    name -> the key under which the plan decides about it and all ports that are used alike (``@3``); empty
    for a program whose folder does not say.
    offload: what lives in host memory. state: of the captured model. codegen, cuda_graphs: how its ops run
    (`autoshard.PassOptions`). code_cache: a folder of what Inductor made of it, which is not stored.
    """

    mesh: str
    lowered: Lowered
    signature: Signature
    notes: dict[str, tuple[NodeNote, ...]]
    plan: str = ""
    dumps: Mapping[str, str] = field(default_factory=dict)
    constants: dict[str, object] = field(default_factory=dict)
    target: str = ""
    options: tuple[tuple[str, str], ...] = ()
    user_ops: tuple[str, ...] = ()
    microbatches: int = 1
    stages: PipelineStages | None = None
    original: Lowered | None = None
    original_notes: dict[str, tuple[NodeNote, ...]] = field(default_factory=dict)
    classes: dict[str, str] = field(default_factory=dict)
    offload: Offload = NO_OFFLOAD
    sums: tuple[str, ...] = ()
    alone: tuple[str, ...] = ()
    state: StoredState = StoredState()
    codegen: str = ""
    cuda_graphs: bool = False
    code_cache: str = ""

    @cached_property
    def precision(self) -> MixedPrecision:
        """What the model computes in."""
        return MixedPrecision(json.loads(self.plan).get("precision", "")) if self.plan else UNCHANGED

    @cached_property
    def products(self) -> str:
        """In which format the operands of products are, "" for the type that the model computes in."""
        return str(json.loads(self.plan).get("products", "")) if self.plan else ""

    @cached_property
    def allow(self) -> str:
        """What changes the model (`options.PlanOptions.allow`), "" for nothing."""
        return str(json.loads(self.plan).get("allow", "")) if self.plan else ""

    @property
    def full_mesh(self) -> str:
        """The mesh of all ranks, with its pp axis: ``pp=4,dp=2,tp=2``."""
        if self.stages is None:
            return self.mesh
        axes = self.mesh.split(",")
        axes.insert(self.stages.position, f"pp={self.stages.schedule.ranks}")
        return ",".join(axes)
