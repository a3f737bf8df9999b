"""THE ordered list of passes, from a captured model to what a rank runs. Start reading here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from autoshard.cost.reshard import ReshardCost
from autoshard.ir import Folded, Joint
from autoshard.ir.comm import BUCKET_BYTES
from autoshard.ir.flow import Flow
from autoshard.ir.lowered import Lowered
from autoshard.ir.statements import statements_of
from autoshard.passes.fuse.fuse_bias import fuse_bias
from autoshard.passes.fuse.fuse_kernels import fuse_kernels
from autoshard.passes.memory.offload import Hosting, offload
from autoshard.passes.memory.recompute import recompute
from autoshard.passes.overlap.bucket import bucket_collectives
from autoshard.passes.overlap.coalesce_layers import join_messages
from autoshard.passes.overlap.defer_reductions import defer_reductions
from autoshard.passes.overlap.gather_once import gather_once
from autoshard.passes.overlap.overlap_grad_reduce import early_reductions
from autoshard.passes.overlap.prefetch import prefetch
from autoshard.passes.overlap.schedule_ops import Seconds, overlap
from autoshard.passes.partition.allreduce_to_reduce_scatter import keep_part
from autoshard.passes.partition.hierarchy import ByLevel, by_level
from autoshard.passes.partition.hpz_secondary_shards import NO_SECONDARY, Secondary, secondary_shards
from autoshard.passes.partition.insert_collectives import insert_collectives
from autoshard.passes.partition.localize import localize
from autoshard.passes.partition.quantize_collectives import Quantising, Sent, quantise_collectives
from autoshard.passes.partition.quantize_norms import quantise_norms
from autoshard.passes.partition.ring_products import Rings, ring_products
from autoshard.passes.sequence.slice_places import places_of
from autoshard.passes.sequence.slice_sequence import slice_sequence
from autoshard.passes.simplify.batch_terms import NO_TERMS, BatchTerms
from autoshard.passes.simplify.count_once import count_once
from autoshard.passes.simplify.decompose import decompose
from autoshard.passes.simplify.fold_repeats import fold_repeats
from autoshard.passes.simplify.normalize import normalize
from autoshard.passes.simplify.scale_terms import scale_terms
from autoshard.passes.simplify.segment_cache import SegmentCache
from autoshard.passes.stages.cut_pipeline import cut_pipeline
from autoshard.passes.stages.scatter_sends import Saving, scatter_sends
from autoshard.passes.stages.split_backward import split_backward
from autoshard.passes.stages.truncate_layers import Shortened
from autoshard.passes.stages.unpartitioned import Unpartitioned
from autoshard.rules.core import RuleFn
from autoshard.rules.local import MeshShape
from autoshard.search.plan.plan import Plan

G = TypeVar("G", Folded, Lowered)
#: told of every graph as it is made: (pass name, graph)
Watch = Callable[[str, "Folded | Lowered"], None]


@dataclass(frozen=True)
class LoweringOptions:
    """What the passes after the search need besides the graph.

    rules: the rule of every op, the user's own among them. split_backward: whether the schedule runs the
    gradients of parameters apart from what other stages wait for. saving: what sending a value between
    stages in parts saves; None to send everything whole. kernels: whether chains that have a kernel
    become one op. bucket: whether collectives of parameters share messages. join: bytes up to which those
    of several layers do, 0 for none. ring: prices of nodes by which products go round in chunks, on the
    mesh before axes are taken apart; None for none of that. seconds: prices of nodes on the last mesh, by
    which ops are ordered beside messages; None to leave them as they are. quantise: with how few bits
    parameters, gradients and activations may travel; None for all of them. hierarchy: axes whose
    collectives are done level by level. secondary: which parameters and gradients are split over fewer
    ranks within a step. hosting: what waits in host memory, None for nothing. known: what passes made of
    segments, for programs that differ in flow and plan alone. terms: what adds up over microbatches.
    """

    flow: Flow
    plan: Plan
    mesh: MeshShape
    reshard: ReshardCost
    rules: Mapping[str, RuleFn]
    split_backward: bool = False
    saving: Saving | None = None
    kernels: bool = False
    bucket: bool = True
    join: int = 0
    beside: bool = False
    ring: Seconds | None = None
    seconds: Seconds | None = None
    quantise: Quantising | None = None
    hierarchy: tuple[ByLevel, ...] = ()
    secondary: Secondary = NO_SECONDARY
    hosting: Hosting | None = None
    known: SegmentCache = field(default_factory=SegmentCache, compare=False, repr=False)
    terms: BatchTerms = NO_TERMS

    def of(self, short: Shortened) -> LoweringOptions:
        """The same for the model without most of its equal layers."""
        return replace(self, flow=short.flow, plan=short.plan)

    @property
    def last_mesh(self) -> MeshShape:
        """The mesh that a rank's program is for: axes that are taken apart are there part by part."""
        mesh = self.mesh
        for each in self.hierarchy:
            mesh = each.levels.refined(mesh)
        return mesh


def simplify(joint: Joint, watch: Watch | None = None) -> Folded:
    """The passes before the search, on what `capture` gives."""
    folded = _watched("010_fold", fold_repeats(joint), watch)
    folded = _watched("020_decompose", decompose(folded), watch)
    return _watched("030_normalize", normalize(folded), watch)


def place(folded: Folded, how: LoweringOptions, watch: Watch | None = None) -> Lowered:
    """The passes after the search up to what every rank of an uncut model computes."""
    lowered = _moved(folded, how, watch)
    return _watched("050_localize", localize(lowered, how.rules, how.mesh, how.known), watch)


def _moved(folded: Folded, how: LoweringOptions, watch: Watch | None) -> Lowered:
    """The graph with collectives, its ops still on whole tensors."""
    lowered = insert_collectives(folded, how.flow, how.plan, how.mesh, how.reshard)
    _watched("040_insert_collectives", lowered, watch)
    if how.terms:
        lowered = _watched("042_scale_terms", scale_terms(lowered, how.terms, len(how.mesh.names)), watch)
    lowered = recompute(lowered, how.plan.recompute, how.rules, how.mesh)
    return _watched("045_recompute", lowered, watch)


def check_slices(folded: Folded, how: LoweringOptions, slices: int) -> None:
    """UsageError, naming the op and the user's line, unless microbatches can be divided into slices."""
    places_of(statements_of(_moved(folded, how, None)), folded.joint, how.rules, slices)


def lower(
    folded: Folded, how: LoweringOptions, watch: Watch | None = None, uncut: Unpartitioned | None = None
) -> Lowered:
    """All passes after the search.

    uncut: what `place` makes of the model, if that is known and microbatches are not divided into slices.
    """
    pipeline = how.plan.pipeline
    slices = pipeline.slices if pipeline else 1
    if uncut is not None:
        assert slices == 1
        lowered = uncut.whole.lowered
    else:
        # a slice of an op is cut out of the whole op: what a rank runs of it is said afterwards
        lowered = place(folded, how, watch) if slices == 1 else _moved(folded, how, watch)
    lowered = cut_pipeline(lowered, folded.joint, pipeline.cuts if pipeline else (), how.mesh, uncut)
    _watched("052_cut_pipeline", lowered, watch)
    if how.terms:
        given = {p.name for p in folded.joint.ports if p.kind in ("input", "buffer", "const")}
        lowered = _watched("053_count_once", count_once(lowered, given), watch)
    if pipeline and how.saving is not None:
        ports = {p.name for p in folded.joint.ports}
        lowered = scatter_sends(lowered, ports, how.mesh, how.saving)
        _watched("054_scatter_sends", lowered, watch)
    kept = kept_ports(folded, how)
    if kept and how.plan.microbatches > 1:
        lowered = gather_once(lowered, kept)
        _watched("056_gather_once", lowered, watch)
    if how.split_backward:
        lowered = split_backward(lowered)
        _watched("057_split_backward", lowered, watch)
    if slices > 1:
        lowered = slice_sequence(lowered, folded.joint, slices, how.rules, how.mesh)
        _watched("058_slice_sequence", lowered, watch)
        lowered = _watched("059_localize", localize(lowered, how.rules, how.mesh, how.known), watch)
    if how.ring is not None:
        ports, grads = _ports(folded, "param"), _results(folded, lowered, "grad")
        apart = {each.levels.axis for each in how.hierarchy}
        how_to = Rings(how.mesh, how.ring, frozenset(apart), moving=how.seconds is not None)
        lowered = _watched(
            "059b_ring_products", ring_products(lowered, ports, grads, how_to, how.known), watch
        )
    if how.bucket:
        lowered = _watched("060_bucket", bucket_collectives(lowered, apart=how.beside), watch)
    grads = _results(folded, lowered, "grad")
    late = _late(folded, how, lowered)
    message = BUCKET_BYTES if how.bucket else 0
    lowered = _watched("070_defer_reductions", defer_reductions(lowered, grads, late, message), watch)
    params, grads = _ports(folded, "param"), _results(folded, lowered, "grad")
    if how.hierarchy or how.quantise is not None:
        lowered = _watched("071_keep_part", keep_part(lowered), watch)
    if how.hierarchy:
        mesh = how.mesh
        for each in how.hierarchy:
            lowered, mesh = by_level(lowered, mesh, each), each.levels.refined(mesh)
        _watched("072_hierarchy", lowered, watch)
    if how.secondary != NO_SECONDARY:
        lowered = secondary_shards(lowered, params, grads, how.secondary)
        _watched("074_secondary_shards", lowered, watch)
    if how.quantise is not None:
        sent = Sent(params, grads, _ports(folded, "input"), _ports(folded, "tangent"))
        lowered = quantise_collectives(lowered, sent, how.last_mesh, how.quantise)
        _watched("075_quantise_collectives", lowered, watch)
    lowered = _watched("080_fuse_bias", fuse_bias(lowered), watch)
    if how.kernels:
        fused = fuse_kernels(lowered, how.last_mesh, how.reshard.memory_bandwidth)
        lowered = _watched("090_fuse_kernels", fused, watch)
        if how.quantise is not None and how.quantise.precision.activations:
            lowered = _watched("091_quantise_norms", quantise_norms(lowered, how.last_mesh), watch)
    if how.seconds is not None:
        lowered = _watched(
            "092_prefetch", prefetch(lowered, params, how.seconds if how.beside else None), watch
        )
        if how.plan.microbatches * slices == 1 and pipeline is None:
            lowered = _watched("092b_early_reductions", early_reductions(lowered, how.seconds), watch)
    if how.hosting is not None and (how.hosting.kinds.activations or how.hosting.kinds.parameters):
        grads, summed = _results(folded, lowered, "grad"), how.plan.microbatches * slices > 1
        lowered = offload(lowered, params, grads, how.hosting, summed=summed)
        _watched("093_offload", lowered, watch)
    if how.join:
        lowered = join_messages(lowered, how.last_mesh, how.join)
        _watched("093b_join_messages", lowered, watch)
    if how.seconds is not None:
        lowered = _watched("094_overlap", overlap(lowered, how.seconds, how.known), watch)
    return lowered


def _results(folded: Folded, lowered: Lowered, kind: str) -> set[str]:
    """Values that are results of a kind."""
    results = zip(folded.joint.results, lowered.results, strict=True)
    return {value for result, value in results if result.kind == kind}


def _ports(folded: Folded, kind: str) -> set[str]:
    """Inputs of a kind."""
    return {p.name for p in folded.joint.ports if p.kind == kind}


def kept_ports(folded: Folded, how: LoweringOptions) -> set[str]:
    """Parameters whose gathered copies the plan keeps from forward to backward."""
    states = how.plan.params
    ports = [p.name for p in folded.joint.ports if p.kind == "param"]
    return {n for n in ports if (s := states.get(how.flow.class_of[n])) is not None and s.keep}


def late_ports(folded: Folded, how: LoweringOptions) -> set[str]:
    """Parameters whose gradients the plan reduces once a step, if it has several microbatches."""
    states = how.plan.params
    ports = [p.name for p in folded.joint.ports if p.kind == "param"]
    return {n for n in ports if (s := states.get(how.flow.class_of[n])) is not None and s.late}


def _late(folded: Folded, how: LoweringOptions, lowered: Lowered) -> set[str]:
    """Gradients that the plan keeps whole until the end of a step of several microbatches."""
    if how.plan.microbatches == 1:
        return set()
    ports = late_ports(folded, how)
    late = {p.target for p in folded.joint.ports if p.name in ports}
    results = zip(folded.joint.results, lowered.results, strict=True)
    return {value for result, value in results if result.kind == "grad" and result.target in late}


#: the first pass whose result is on a mesh whose axes may have been taken apart
REFINES = "072_hierarchy"
#: names of the passes, for ``inspect --after``
PASSES = (
    "010_fold",
    "020_decompose",
    "030_normalize",
    "040_insert_collectives",
    "042_scale_terms",
    "045_recompute",
    "050_localize",
    "052_cut_pipeline",
    "053_count_once",
    "054_scatter_sends",
    "056_gather_once",
    "057_split_backward",
    "058_slice_sequence",
    "059_localize",
    "059b_ring_products",
    "060_bucket",
    "070_defer_reductions",
    "071_keep_part",
    "072_hierarchy",
    "074_secondary_shards",
    "075_quantise_collectives",
    "080_fuse_bias",
    "090_fuse_kernels",
    "091_quantise_norms",
    "092_prefetch",
    "092b_early_reductions",
    "093_offload",
    "093b_join_messages",
    "094_overlap",
)


def _watched(name: str, graph: G, watch: Watch | None) -> G:
    if watch is not None:
        watch(name, graph)
    return graph
