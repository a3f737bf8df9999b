"""A plan: what was decided and why. No cost is stored in it beyond the margin to the next best choice."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import msgspec

from autoshard.ir.flow import Place
from autoshard.ir.placement import Layout
from autoshard.ir.slices import Slices
from autoshard.rules.states import OpState
from autoshard.search.problem.decisions import ParamState


class Why(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The reason of one decision.

    reason: in words. alternative: the next best choice, "" if there was no other. margin: seconds that
    the full step would lose with it, everything else being decided anew.
    """

    reason: str
    alternative: str = ""
    margin: float = 0.0

    def __str__(self) -> str:
        if not self.alternative:
            return self.reason
        return f"{self.reason}; next best {self.alternative} +{self.margin * 1e6:.0f} us"


class OptimalityGap(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The step time of the plan, and the dual bound of all plans, by the cost model.

    configuration_bound: the dual bound of plans with the same mesh and microbatches.
    """

    seconds: float
    dual_bound: float
    gap: float
    method: str
    variables: int
    states: int
    configuration_bound: float = 0.0

    @property
    def configuration_gap(self) -> float:
        """Share of the seconds that another plan with the same mesh and microbatches may save at most."""
        return max(0.0, (self.seconds - self.configuration_bound) / self.seconds) if self.seconds else 0.0


class Recompute(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What backward recomputes instead of saving it.

    policy: ``full`` saves only the inputs of a call; ``selective`` also saves the results of matrix
    products and attention, and recomputes what is cheap between them. calls: for so many calls of the
    segment, the first ones of the forward pass (whose activations are live longest).
    """

    policy: Literal["selective", "full"]
    calls: int


class Cut(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where a pipeline stage ends.

    call: number of a call of the forward pass. value: the stage ends with the op of that call that makes it,
    "" to end with the full call. label: the layer of the call, for readers.
    """

    call: int
    value: str = ""
    label: str = ""

    def __str__(self) -> str:
        inside = f", value {self.value}" if self.value else ""
        return f"the cut after call {self.call}{f' ({self.label})' if self.label else ''}{inside}"


class Pipeline(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How the model is cut into stages and in which order they run.

    ranks: size of the pp axis. position: its place among the axes of the mesh. schedule: by its name in
    `autoshard.schedules`. chunks: stages per rank. cuts: the ends of all stages but the last. slices: into
    how many parts of its sequence every microbatch is divided. parts: of each of these, how many of the equal
    parts of the sequence it has; () where they are equal.
    """

    ranks: int
    position: int
    schedule: str
    chunks: int
    cuts: tuple[Cut, ...]
    slices: int = 1
    parts: tuple[int, ...] = ()

    @property
    def sliced(self) -> Slices:
        """The slices of a microbatch."""
        return Slices(self.parts) if self.parts else Slices.equal(self.slices)

    @property
    def stages(self) -> int:
        return len(self.cuts) + 1


@dataclass(frozen=True)
class Plan:
    """Decisions for one model on one mesh.

    mesh: ``dp=2,tp=2``. cluster: name of the cluster of the cost model. budget: bytes per
    rank, None if no limit was set.
    fingerprint: of the folded graph the plan is for. nodes: the way every op runs. values: the layout
    of shared values and segment inputs. params: the strategy of every class of parameters. ports: layout
    of inputs and tangents. results: layout of outputs, by position in the joint results.
    why: reasons, under the same keys as text. warnings: things a reader should know. target: where the
    model came from. replicated: ops without a rule, which run replicated. microbatches: the graph is
    one microbatch, and a step runs it so many times. batch: sequences of a microbatch over the full mesh,
    0 if the model has no batch. order: the device of every rank, () if rank r has device r. recompute:
    forward segment -> what of it is recomputed in backward. pipeline: None for a single stage; the mesh is
    that of the ranks of one stage. offload: what it takes to be in host memory (see `offload.Offload`).
    step_fingerprint: of the graph that a program of several microbatches is stored with, whose losses add up
    to those of the full batch; "" where that is the graph the plan is for. precision: in which the model
    computes, "" for its own. tile_rows: tokens of a tile of what is wide, on a rank, 0 for no tiles
    (`passes.memory.tile_rows`). products: which are cast, and how (`PlanOptions.products`). expert_chunks: in
    which tokens of experts are exchanged, 1 for all at once (`passes.overlap.chunk_experts`).
    replicate_experts: see `PlanOptions`. allow: what of `PlanOptions.allow` changes the model. differentiate:
    of which outputs there are gradients (`PlanOptions.differentiate`).
    """

    mesh: str
    cluster: str
    budget: int | None
    fingerprint: str
    nodes: dict[tuple[str, int], OpState]
    values: dict[Place, Layout]
    params: dict[Place, ParamState]
    ports: dict[Place, Layout]
    results: dict[int, Layout]
    why: dict[str, Why]
    warnings: tuple[str, ...]
    optimality: OptimalityGap
    target: str = ""
    replicated: tuple[str, ...] = ()
    microbatches: int = 1
    batch: int = 0
    order: tuple[int, ...] = ()
    recompute: dict[str, Recompute] = field(default_factory=dict)
    pipeline: Pipeline | None = None
    offload: str = ""
    step_fingerprint: str = ""
    precision: str = ""
    tile_rows: int = 0
    products: str = ""
    expert_chunks: int = 1
    replicate_experts: str = ""
    allow: str = ""
    differentiate: str = "auto"

    @property
    def moves_apart(self) -> bool:
        """Whether what parameters send once a step goes before the first microbatch and behind the last (see
        `passes.overlap.gather_once`, `passes.overlap.defer_reductions`)."""
        return self.microbatches > 1 or self.pipeline is not None


def why_key(kind: str, *parts: object) -> str:
    """The key of a reason: ``node/layers_fwd/12``, ``param/@3``."""
    return "/".join([kind, *map(str, parts)])
