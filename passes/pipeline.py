"""THE ordered list of passes, from a captured model to what a rank runs. Start reading here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from autoshard.cost.reshard import ReshardCost
from autoshard.ir import Folded, Joint
from autoshard.ir.collectives import BUCKET_BYTES
from autoshard.ir.flow import Flow
from autoshard.ir.lowered import Lowered
from autoshard.ir.similar_rows import RowGroups
from autoshard.ir.slices import Slices
from autoshard.ir.statements import statements_of
from autoshard.passes.fuse.fuse_bias import fuse_bias
from autoshard.passes.fuse.fuse_kernels import fuse_kernels
from autoshard.passes.fuse.group_keys import group_keys
from autoshard.passes.memory.join_recompute import join_recompute
from autoshard.passes.memory.offload import Hosting, offload
from autoshard.passes.memory.recompute import recompute
from autoshard.passes.memory.tile_rows import tile_rows
from autoshard.passes.overlap.bucket import bucket_collectives
from autoshard.passes.overlap.chunk_experts import chunk_experts
from autoshard.passes.overlap.coalesce_layers import join_messages
from autoshard.passes.overlap.defer_reductions import defer_reductions
from autoshard.passes.overlap.gather_once import gather_once
from autoshard.passes.overlap.overlap_grad_reduce import early_reductions
from autoshard.passes.overlap.prefetch import prefetch
from autoshard.passes.overlap.schedule_ops import Seconds, overlap
from autoshard.passes.partition.allreduce_to_reduce_scatter import keep_part
from autoshard.passes.partition.axis_levels import Levels, axis_levels
from autoshard.passes.partition.hierarchy import ByLevel, by_level
from autoshard.passes.partition.hpz_secondary_shards import NO_SECONDARY, Secondary, secondary_shards
from autoshard.passes.partition.insert_collectives import insert_collectives
from autoshard.passes.partition.localize import localize
from autoshard.passes.partition.narrow_gathers import narrow_gathers
from autoshard.passes.partition.quantize_collectives import Quantising, Sent, quantise_collectives
from autoshard.passes.partition.quantize_norms import quantise_norms
from autoshard.passes.partition.ring_products import Rings, ring_products
from autoshard.passes.sequence.slice_places import places_of
from autoshard.passes.sequence.slice_sequence import slice_sequence
from autoshard.passes.simplify.attention_parts import attention_parts
from autoshard.passes.simplify.band_masks import band_masks
from autoshard.passes.simplify.batch_terms import NO_TERMS, BatchTerms
from autoshard.passes.simplify.cast_products import ProductCasts, cast_products
from autoshard.passes.simplify.causal_convs import causal_convs
from autoshard.passes.simplify.count_once import count_once
from autoshard.passes.simplify.decompose import decompose
from autoshard.passes.simplify.fold_repeats import fold_repeats
from autoshard.passes.simplify.group_rows import group_rows
from autoshard.passes.simplify.narrow_parameters import narrow_parameters
from autoshard.passes.simplify.normalize import normalize
from autoshard.passes.simplify.replicate_experts import replicate_experts
from autoshard.passes.simplify.roll_loops import roll_loops
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

T = TypeVar("T")
#: told of every graph as it is made: (name of the pass with its number, graph)
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
    join_recompute: whether what a layer recomputes is part of its backward. by_node: without prices, whether
    a token goes once to each node (`passes.partition.axis_levels`).
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
    join_recompute: bool = True
    by_node: bool = False

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


@dataclass(frozen=True)
class PassContext:
    """What passes ask for besides the graph. unpartitioned: of a model that `place` made, if there is one."""

    folded: Folded
    options: LoweringOptions
    unpartitioned: Unpartitioned | None = None

    @property
    def slices(self) -> int:
        """Parts of the sequence of a microbatch."""
        return len(self.lengths)

    @property
    def lengths(self) -> Slices:
        """Of these parts."""
        pipeline = self.options.plan.pipeline
        return pipeline.sliced if pipeline else Slices.equal(1)

    @property
    def once_a_step(self) -> bool:
        """Whether the program runs once in a step."""
        return self.options.plan.microbatches * self.slices == 1

    def ports(self, *kinds: str) -> set[str]:
        """Inputs of these kinds; all without any."""
        return {p.name for p in self.folded.joint.ports if not kinds or p.kind in kinds}

    def gradients(self, lowered: Lowered) -> set[str]:
        """Values that are gradients of parameters."""
        results = zip(self.folded.joint.results, lowered.results, strict=True)
        return {value for result, value in results if result.kind == "grad"}

    def late_gradients(self, lowered: Lowered) -> set[str]:
        """Gradients that the plan keeps unreduced until the end of a step."""
        if not self.options.plan.moves_apart:
            return set()
        ports = late_ports(self.folded, self.options)
        late = {p.target for p in self.folded.joint.ports if p.name in ports}
        results = zip(self.folded.joint.results, lowered.results, strict=True)
        return {value for result, value in results if result.kind == "grad" and result.target in late}


def _always(context: object) -> bool:
    return True


@dataclass(frozen=True)
class Pass:
    """One step of lowering.

    run: (graph, context) -> graph. when: whether it runs. needs, gives: what must be so of a graph before
    it, and is so after it.
    """

    name: str
    run: Callable[[Any, Any], Any]
    when: Callable[[Any], bool] = _always
    needs: frozenset[str] = frozenset()
    gives: frozenset[str] = frozenset()


def _pass(
    name: str,
    run: Callable[[Any, Any], Any],
    when: Callable[[Any], bool] = _always,
    needs: str = "",
    gives: str = "",
) -> Pass:
    return Pass(name, run, when, frozenset(needs.split()), frozenset(gives.split()))


def _set(option: T | None) -> T:
    """An option that ``when`` asks for."""
    assert option is not None
    return option


def _insert(folded: Folded, context: PassContext) -> Lowered:
    options = context.options
    return insert_collectives(folded, options.flow, options.plan, options.mesh, options.reshard)


def _cut(lowered: Lowered, context: PassContext) -> Lowered:
    pipeline, options = context.options.plan.pipeline, context.options
    cuts = pipeline.cuts if pipeline else ()
    return cut_pipeline(lowered, context.folded.joint, cuts, options.mesh, context.unpartitioned)


def _localize(lowered: Lowered, context: PassContext) -> Lowered:
    return localize(lowered, context.options.rules, context.options.mesh, context.options.known)


def _inside(options: LoweringOptions) -> dict[str, int]:
    """Axes over several nodes, with the ranks that each has of them, but for those that are taken apart."""
    apart = {each.levels.axis for each in options.hierarchy}
    links = zip(options.mesh.names, options.reshard.links, strict=True)
    return {name: link.together for name, link in links if link.together and name not in apart}


def _axis_levels(lowered: Lowered, context: PassContext) -> Lowered:
    options = context.options
    levels = Levels(_inside(options), options.seconds, options.by_node)
    return axis_levels(lowered, options.mesh, levels)


def _ring(lowered: Lowered, context: PassContext) -> Lowered:
    options = context.options
    apart = frozenset(each.levels.axis for each in options.hierarchy)
    rings = Rings(options.mesh, _set(options.ring), apart, moving=options.seconds is not None)
    return ring_products(lowered, context.ports("param"), context.gradients(lowered), rings, options.known)


def _by_level(lowered: Lowered, context: PassContext) -> Lowered:
    mesh = context.options.mesh
    for each in context.options.hierarchy:
        lowered, mesh = by_level(lowered, mesh, each), each.levels.refined(mesh)
    return lowered


def _defer(lowered: Lowered, context: PassContext) -> Lowered:
    late, size = context.late_gradients(lowered), BUCKET_BYTES if context.options.bucket else 0
    return defer_reductions(lowered, context.gradients(lowered), late, size)


def _quantize(lowered: Lowered, context: PassContext) -> Lowered:
    options = context.options
    sent = Sent(
        context.ports("param"), context.gradients(lowered), context.ports("input"), context.ports("tangent")
    )
    return quantise_collectives(lowered, sent, options.last_mesh, _set(options.quantise))


def _offload(lowered: Lowered, context: PassContext) -> Lowered:
    params, grads = context.ports("param"), context.gradients(lowered)
    return offload(lowered, params, grads, _set(context.options.hosting), summed=not context.once_a_step)


def _stores(context: PassContext) -> bool:
    hosting = context.options.hosting
    return hosting is not None and (hosting.kinds.activations or hosting.kinds.parameters)


def _wants_norms(context: PassContext) -> bool:
    quantise = context.options.quantise
    return context.options.kernels and quantise is not None and bool(quantise.precision.activations)


#: before the search, on what a capture gives
SIMPLIFYING = (
    _pass(
        "fold",
        lambda joint, c: fold_repeats(
            cast_products(group_rows(roll_loops(narrow_parameters(joint), c.rules), c.row_groups), c.products)
        ),
        gives="segments",
    ),
    _pass("decompose", lambda folded, c: decompose(folded), needs="segments"),
    _pass(
        "replicate_experts",
        lambda folded, c: replicate_experts(folded, c.replicated),
        lambda c: bool(c.replicated),
        needs="segments",
    ),
    _pass(
        "chunk_experts",
        lambda folded, c: chunk_experts(folded, c.expert_chunks),
        lambda c: c.expert_chunks > 1,
        needs="segments",
    ),
    _pass("normalize", lambda folded, c: normalize(folded), needs="segments", gives="canonical"),
    _pass("band_masks", lambda folded, c: band_masks(folded), needs="canonical"),
    _pass(
        "tile_rows",
        lambda folded, c: tile_rows(folded, c.rows, c.rules),
        lambda c: c.rows > 0,
        needs="canonical",
    ),
    _pass("attention_parts", lambda folded, c: attention_parts(folded), needs="canonical"),
    _pass("causal_convs", lambda folded, c: causal_convs(folded), needs="canonical"),
)
#: up to ops on global tensors with their collectives
PARTITIONING = (
    _pass("insert_collectives", _insert, needs="segments canonical", gives="layouts"),
    _pass(
        "narrow_gathers",
        lambda g, c: narrow_gathers(g, c.options.mesh.sizes),
        lambda c: bool(c.options.plan.products),
        needs="layouts",
    ),
    _pass(
        "scale_terms",
        lambda g, c: scale_terms(g, c.options.terms, len(c.options.mesh.names)),
        lambda c: bool(c.options.terms),
        needs="layouts",
    ),
    _pass(
        "recompute",
        lambda g, c: recompute(g, c.options.plan.recompute, c.options.rules, c.options.mesh),
        needs="layouts",
    ),
)
#: what a rank computes of it, which of a sliced sequence is only said once it is sliced
LOCALIZING = (_pass("localize", _localize, lambda c: c.slices == 1, needs="layouts", gives="local"),)
#: from the program of all stages to that of a rank
FINISHING = (
    _pass("cut_pipeline", _cut, needs="layouts", gives="stages"),
    _pass(
        "count_once",
        lambda g, c: count_once(g, c.ports("input", "buffer", "const")),
        lambda c: bool(c.options.terms),
        needs="stages",
    ),
    _pass(
        "scatter_sends",
        lambda g, c: scatter_sends(g, c.ports(), c.options.mesh, _set(c.options.saving)),
        lambda c: c.options.plan.pipeline is not None and c.options.saving is not None,
        needs="stages",
    ),
    _pass(
        "gather_once",
        lambda g, c: gather_once(g, kept_ports(c.folded, c.options)),
        lambda c: c.options.plan.moves_apart and bool(kept_ports(c.folded, c.options)),
        needs="stages",
    ),
    _pass(
        "split_backward",
        lambda g, c: split_backward(g),
        lambda c: c.options.split_backward,
        needs="stages",
    ),
    _pass(
        "slice_sequence",
        lambda g, c: slice_sequence(g, c.folded.joint, c.lengths, c.options.rules, c.options.mesh),
        lambda c: c.slices > 1,
        needs="stages",
    ),
    _pass("localize_slices", _localize, lambda c: c.slices > 1, needs="layouts", gives="local"),
    _pass(
        "join_recompute",
        lambda g, c: join_recompute(g, c.ports("tangent")),
        lambda c: c.options.join_recompute and bool(c.options.plan.recompute),
        needs="local stages",
    ),
    _pass("group_keys", lambda g, c: group_keys(g), needs="local"),
    _pass("axis_levels", _axis_levels, lambda c: bool(_inside(c.options)), needs="local"),
    _pass("ring_products", _ring, lambda c: c.options.ring is not None, needs="local"),
    _pass(
        "bucket",
        lambda g, c: bucket_collectives(g, c.ports("param"), apart=c.options.beside),
        lambda c: c.options.bucket,
        needs="local",
    ),
    _pass("defer_reductions", _defer, needs="local", gives="once"),
    _pass(
        "allreduce_to_reduce_scatter",
        lambda g, c: keep_part(g),
        lambda c: bool(c.options.hierarchy) or c.options.quantise is not None,
        needs="local",
    ),
    _pass(
        "hierarchy",
        _by_level,
        lambda c: bool(c.options.hierarchy),
        needs="once",
        gives="refined",
    ),
    _pass(
        "hpz_secondary_shards",
        lambda g, c: secondary_shards(g, c.ports("param"), c.gradients(g), c.options.secondary),
        lambda c: c.options.secondary != NO_SECONDARY,
        needs="refined",
    ),
    _pass("quantize_collectives", _quantize, lambda c: c.options.quantise is not None, needs="once"),
    _pass("fuse_bias", lambda g, c: fuse_bias(g), needs="local"),
    _pass(
        "fuse_kernels",
        lambda g, c: fuse_kernels(g, c.options.last_mesh, c.options.reshard.memory_bandwidth),
        lambda c: c.options.kernels,
        needs="local",
        gives="kernels",
    ),
    _pass(
        "quantize_norms", lambda g, c: quantise_norms(g, c.options.last_mesh), _wants_norms, needs="kernels"
    ),
    _pass(
        "prefetch",
        lambda g, c: prefetch(g, c.ports("param"), c.options.seconds if c.options.beside else None),
        lambda c: c.options.seconds is not None,
        needs="once",
    ),
    _pass(
        "overlap_grad_reduce",
        lambda g, c: early_reductions(g, _set(c.options.seconds)),
        lambda c: c.options.seconds is not None and c.once_a_step and c.options.plan.pipeline is None,
        needs="once",
    ),
    _pass("offload", _offload, _stores, needs="once"),
    _pass(
        "coalesce_layers",
        lambda g, c: join_messages(g, c.options.last_mesh, c.options.join),
        lambda c: bool(c.options.join),
        needs="once",
    ),
    _pass(
        "schedule_ops",
        lambda g, c: overlap(g, _set(c.options.seconds), c.options.known),
        lambda c: c.options.seconds is not None,
        needs="once",
    ),
)
PASSES = (*SIMPLIFYING, *PARTITIONING, *LOCALIZING, *FINISHING)
#: names with their place in the order, as dumps and ``inspect --after`` have them
NUMBERED = {each.name: f"{number:02}_{each.name}" for number, each in enumerate(PASSES, 1)}
#: the first pass whose result is on a mesh whose axes may have been taken apart
REFINES = NUMBERED["hierarchy"]


def run_passes(passes: Sequence[Pass], graph: Any, context: Any, watch: Watch | None) -> Any:
    """The graph after all of these passes that apply."""
    for each in passes:
        if each.when(context):
            graph = each.run(graph, context)
            if watch is not None:
                watch(NUMBERED[each.name], graph)
    return graph


@dataclass(frozen=True)
class Simplifying:
    """What the passes before the search are asked for.

    rows: tokens of a tile on a rank, 0 for no tiles. rules: of all ops. products: which are cast, None: none.
    expert_chunks: in which tokens of experts are exchanged. replicated: experts of each layer, or of all
    layers, that every rank computes. row_groups: of alike rows of experts, None for none.
    """

    rows: int = 0
    rules: Mapping[str, RuleFn] = field(default_factory=dict)
    products: ProductCasts | None = None
    expert_chunks: int = 1
    replicated: tuple[tuple[int, ...], ...] = ()
    row_groups: RowGroups | None = None


def simplify(joint: Joint, watch: Watch | None = None, how: Simplifying | None = None) -> Folded:
    """The passes before the search, on what `capture` gives. how: None for no optional ones."""
    folded: Folded = run_passes(SIMPLIFYING, joint, how or Simplifying(), watch)
    return folded


def place(folded: Folded, how: LoweringOptions) -> Lowered:
    """The passes after the search up to what every rank of an uncut model computes."""
    context = PassContext(folded, how)
    return _localize(run_passes(PARTITIONING, folded, context, None), context)


def check_slices(folded: Folded, how: LoweringOptions, slices: int) -> None:
    """UsageError, naming the op and the user's line, unless microbatches can be divided into slices."""
    lowered: Lowered = run_passes(PARTITIONING, folded, PassContext(folded, how), None)
    places_of(statements_of(lowered), folded.joint, how.rules, slices)


def lower(
    folded: Folded, how: LoweringOptions, watch: Watch | None = None, uncut: Unpartitioned | None = None
) -> Lowered:
    """All passes after the search.

    uncut: what `place` makes of the model, if that is known and microbatches are not divided into slices.
    """
    context = PassContext(folded, how, uncut)
    graph, passes = _begun(context)
    lowered: Lowered = run_passes(passes, graph, context, watch)
    return lowered


def lower_by_share(
    folded: Folded, how: LoweringOptions, uncut: Unpartitioned | None = None
) -> Callable[[float, bool], Lowered]:
    """The same for any share of the activations in host memory, loaded ahead or not: what comes before that
    is run once."""
    context = PassContext(folded, how, uncut)
    graph, passes = _begun(context)
    at = next(n for n, each in enumerate(passes) if each.run is _offload)
    graph = run_passes(passes[:at], graph, context, None)

    def stored(share: float, ahead: bool) -> Lowered:
        own = replace(how, hosting=how.hosting and how.hosting.storing(share, ahead))
        lowered: Lowered = run_passes(passes[at:], graph, PassContext(folded, own, uncut), None)
        return lowered

    return stored


def _begun(context: PassContext) -> tuple[Folded | Lowered, tuple[Pass, ...]]:
    """(what passes begin with, those that are left)."""
    uncut = context.unpartitioned
    if uncut is None:
        return context.folded, (*PARTITIONING, *LOCALIZING, *FINISHING)
    assert context.slices == 1
    return uncut.whole.lowered, FINISHING


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
