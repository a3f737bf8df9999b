"""Dynamic verification: all ranks of a program in one process against the model on one device.

The same batch, forward, gradients, then AdamW steps. A program with dropout is compared with a program
for one rank and the same seed, since the mask of its dropout is a function of the seed and of global
positions, which eager PyTorch's is not.

A step of a program with several microbatches is all of them, compared with one call of the model with the
full batch. Only where a program computes something for every microbatch by itself (`Program.alone`) is it
compared with a program for one rank, which does the same. A batch of the size of one microbatch is verified
as that one. Casts to 8 bits round nothing (`verify.exact_casts`), and no rows of experts are grouped
(`verify.rows_alone`); what either changes is measured apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import Any, Protocol

import torch
from torch import nn
from torch.func import functional_call
from torch.utils import _pytree as pytree

from autoshard.capture.module_snapshot import as_written
from autoshard.capture.python_state.outer_hooks import outer_hooks_apart
from autoshard.cluster.mesh import Mesh
from autoshard.errors import UsageError, VerificationError
from autoshard.ir import DTYPES, Node, Port
from autoshard.ir.collectives import sent_bits
from autoshard.passes.partition.quantize_collectives import Weights
from autoshard.program.program import Program
from autoshard.runtime.lockstep.rounding import Rounding
from autoshard.runtime.lockstep.step_lockstep import Held, StepLockstep
from autoshard.runtime.microbatch import Batch as Arguments
from autoshard.runtime.microbatch import calls_of, full_batch
from autoshard.torch_adapters.dtypes import torch_dtype
from autoshard.torch_adapters.records import from_records, to_records
from autoshard.verify.checks import FLOAT32, HALF, QUANTISED, Check, Tensors, Tolerance, checks_of, largest
from autoshard.verify.exact_casts import with_exact_casts
from autoshard.verify.rounding_noise import beside_rounding
from autoshard.verify.rows_alone import with_rows_alone

LR = 1e-3


@dataclass(frozen=True)
class Rounded:
    """What quantising did to all messages of a kind: see `runtime.lockstep.rounding.Rounding`.

    what: parameters, activations, gradients, tokens, or operands of products. name: the value with the worst
    error; worst, mean: of the errors of all values. share: of rows of experts that travel as means of groups,
    on average.
    """

    kind: str
    what: str
    bits: int
    values: int
    mean: float
    worst: float
    name: str
    share: float = 1.0


@dataclass(frozen=True)
class Verification:
    """The outcome for one program. reference: what it was compared with. rounded: what was sent quantised, or
    cast, or grouped. losses: of each step. cast_loss: of the first with casts that round and rows that are
    grouped, () without any."""

    mesh: str
    ranks: int
    steps: int
    reference: str
    tolerance: Tolerance
    checks: tuple[Check, ...]
    losses: tuple[float, ...] = field(default=())
    rounded: tuple[Rounded, ...] = ()
    cast_loss: tuple[float, ...] = ()

    @property
    def ok(self) -> bool:
        return all(c.ok for c in self.checks)

    def kinds(self) -> dict[str, list[Check]]:
        """Checks by kind, in the order they were made."""
        result: dict[str, list[Check]] = {}
        for check in self.checks:
            result.setdefault(check.kind, []).append(check)
        return result

    def worst(self) -> Check:
        return max(self.checks, key=lambda c: c.error if isfinite(c.error) else inf)


@dataclass(frozen=True)
class StepResult:
    """Forward and backward of a batch: outputs by position (and microbatch), gradients by name."""

    outputs: Tensors
    grads: Tensors

    def by_kind(self) -> dict[str, Tensors]:
        """Kind of checks -> tensors."""
        return {"output": self.outputs, "gradient": self.grads}


class Steppable(Protocol):
    """Something that can be stepped: the model itself, or a program in lockstep."""

    def step(self) -> StepResult:
        """Forward and backward on the batch."""
        ...

    def update(self, eps: float, trained: Sequence[str]) -> None:
        """An AdamW step on the parameters named, with the gradients of the last `step`."""
        ...

    def state(self) -> Tensors:
        """Parameters and buffers by name, whole."""
        ...


def verify(
    program: Program,
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    steps: int = 3,
    one_rank: Program | None = None,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> Verification:
    """Compare a program with the model on real data. The model is on the CPU and is left as it was.

    steps: AdamW steps. one_rank: a program of the same model for one rank, with as many microbatches, where
    `needs_one_rank`.
    Raises UsageError if the model is not the program's, VerificationError if replicas of a value differ
    from rank to rank. A result that is out of tolerance is reported, not raised.
    """
    with as_written(model) as plain, outer_hooks_apart(plain):
        return _verified(program, plain, args, kwargs, steps, one_rank, seed, progress or (lambda _: None))


def _verified(
    program: Program,
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    steps: int,
    one_rank: Program | None,
    seed: int,
    say: Callable[[str], None],
) -> Verification:
    _check_model(program, model)
    if needs_one_rank(program) and one_rank is None:
        terms = "; ".join(program.alone) or "what it keeps in buffers"
        alone = f"computes for every microbatch by itself {terms}"
        raise UsageError(
            f"the program {'has dropout' if has_dropout(program) else alone}",
            hint="compare it with a program for one rank and as many microbatches",
        )
    batch = Batch(program, args, kwargs)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    values = {**parameters, **dict(model.named_buffers())}
    initial = {name: x.detach().clone() for name, x in values.items()}
    named = "eager PyTorch on one process" if one_rank is None else "the program for one rank"
    single = None if one_rank is None else with_rows_alone(with_exact_casts(one_rank))
    ungrouped = with_rows_alone(program)

    def reference(given: Tensors) -> Steppable:
        if single is not None:
            return Ranks(single, given, batch, seed)
        _load(values, given)
        return Eager(model, batch)

    with _restored(values, initial):
        if one_rank is None and model.training != program.signature.training:
            model.train(program.signature.training)
        subject = Ranks(with_exact_casts(ungrouped), initial, batch, seed)
        tolerance = tolerance_of(program)
        checks, losses = _compare(subject, reference(initial), batch, steps, tolerance, say)
        if tolerance is HALF and not all(c.ok for c in checks):
            say("measuring what rounding alone does")
            checks = beside_rounding(
                checks, initial, parameters, lambda at: reference(at).step().by_kind(), tolerance
            )
        rounds, cast_loss = subject, list[float]()
        if program.products or ungrouped is not program:
            named += ", casts unrounded" if program.products else ""
            named += ", rows of experts not grouped" if ungrouped is not program else ""
            say("measuring what casts round, and grouping rows of experts changes")
            rounds = Ranks(program, initial, batch, seed)
            cast_loss = _loss(rounds.step())
    ranks = Mesh.parse(program.full_mesh).world_size
    rounded = tuple(_rounded(program, rounds.lockstep.rounding))
    return Verification(
        program.full_mesh, ranks, steps, named, tolerance, checks, losses, rounded, tuple(cast_loss)
    )


def _rounded(program: Program, errors: Sequence[Rounding]) -> Iterator[Rounded]:
    """By kind of message, what is in it, and bits, in the order in which they first came up."""
    weights = Weights(program.lowered, [p.name for p in program.signature.ports if p.kind == "param"])

    def group(r: Rounding) -> tuple[str, str, int]:
        gathered = "parameters" if r.name in weights.inside[r.segment] else "activations"
        known = {"reduce_scatter": "gradients", "cast": "operands", "dispatch": "tokens", "group": "rows"}
        what = known.get(r.kind, gathered)
        return r.kind, what, r.bits

    for kind, what, bits in dict.fromkeys(map(group, errors)):
        own = [r for r in errors if group(r) == (kind, what, bits)]
        worst = max(own, key=lambda r: r.error)
        names = len({r.name for r in own})
        error, share = (sum(each) / len(own) for each in zip(*((r.error, r.share) for r in own), strict=True))
        yield Rounded(kind, what, bits, names, error, worst.error, worst.name, share)


def fewest_bits(program: Program) -> int:
    """Of what travels quantised; 0 if nothing does."""
    lowered = program.lowered
    nodes = [n for s in lowered.segments.values() for n in s.graph.nodes]
    nodes += [i for i in lowered.main if isinstance(i, Node)]
    sent = [bits for n in nodes for bits in sent_bits(n) if bits]
    return min(sent, default=0)


def tolerance_of(program: Program) -> Tolerance:
    """By the coarsest type among the program's inputs and outputs, or the fewest bits that it sends."""
    bits = fewest_bits(program)
    if bits:
        return QUANTISED[bits]
    values = program.lowered.values
    types = {p.type.dtype for p in program.signature.ports}
    types |= {values[r.value].type.dtype for r in program.signature.results}
    return HALF if types & {"bf16", "f16"} else FLOAT32


def has_dropout(program: Program) -> bool:
    """Whether the program draws random numbers."""
    return any(p.target == "seed" for p in program.signature.ports)


def needs_one_rank(program: Program) -> bool:
    """Whether the model itself, called with a full batch, gives something else than the program."""
    updates = any(r.kind == "buffer" for r in program.signature.results)
    return has_dropout(program) or (program.microbatches > 1 and (updates or bool(program.alone)))


def parameter_bytes(program: Program) -> int:
    """Bytes of all parameters and buffers of the model a program was made from."""
    held = (p for p in program.signature.ports if p.kind in ("param", "buffer"))
    return sum(p.type.numel * DTYPES[p.stored_dtype][1] for p in held)


def _check_model(program: Program, model: nn.Module) -> None:
    given = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    for port in program.signature.ports:
        if port.kind not in ("param", "buffer"):
            continue
        result = given.get(port.target)
        if result is None or tuple(result.shape) != port.type.shape:
            what = "is missing" if result is None else f"has shape {list(result.shape)}"
            raise UsageError(
                f"{port.kind} {port.target} {what}",
                why=f"the program was compiled from a model where it has shape {list(port.type.shape)}",
                hint="compile a program for this model",
            )


@contextmanager
def _restored(values: Tensors, initial: Tensors) -> Iterator[None]:
    try:
        yield
    finally:
        _load(values, initial)


def _load(values: Tensors, given: Tensors) -> None:
    with torch.no_grad():
        for name, x in values.items():
            x.copy_(given[name])
            x.grad = None


class Batch:
    """The arguments of the calls and the tangents of their outputs, the same for both sides.

    calls: (positional, keyword) arguments of every microbatch. whole: those of all of them together.
    tangents: for each microbatch. sums: positions of outputs that are sums over microbatches. precision: what
    the model computes in.
    """

    def __init__(self, program: Program, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.aliases = frozenset(alias for alias, _ in program.signature.tied)
        self.precision = program.precision
        args, kwargs = to_records((args, kwargs))
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if pytree.treespec_dumps(spec) != program.signature.in_tree:
            raise UsageError(
                "the example inputs are not those the program was compiled for",
                why=f"it was compiled for {', '.join(program.signature.input_names)}",
                hint="compile the program again",
            )
        self.calls = calls_of(program, leaves)
        self.whole: Arguments = (args, kwargs)
        if program.stages is not None and len(self.calls) < program.microbatches:
            # a schedule runs all its microbatches: the same one again and again
            self.calls *= program.microbatches
            self.whole = full_batch(program, self.whole)
        self.tangents = {p.target: _tangent(p) for p in program.signature.ports if p.kind == "tangent"}
        self.sums = frozenset(program.sums)
        #: all tensors that the model returns; those of them that the program makes
        self.leaves = [str(k) for k, (kind, _) in enumerate(program.signature.out_leaves) if kind != "static"]
        self.positions = sorted((r.target for r in program.signature.results if r.kind == "output"), key=int)

    def label(self, position: str, call: int) -> str:
        """What the output at a position is called: ``0``, or ``0 of microbatch 2``."""
        return position if len(self.calls) == 1 else f"{position} of microbatch {call + 1}"

    def joined(self, outputs: Tensors, wanted: Tensors) -> Tensors:
        """Outputs of the full batch from those of its microbatches, in the shapes that are wanted."""
        result: Tensors = {}
        for position, like in wanted.items():
            pieces = [outputs[self.label(position, call)] for call in range(len(self.calls))]
            result[position] = _joined(pieces, like, position in self.sums)
        return result


def _joined(pieces: Sequence[torch.Tensor], like: torch.Tensor, sums: bool) -> torch.Tensor:
    """One value of the microbatches: added up, put together along the dim that is longer, or one of them."""
    first = pieces[0]
    if len(pieces) == 1 or first.dim() != like.dim():
        return first
    if sums:
        return torch.stack(list(pieces)).sum(0)
    longer = [d for d, (n, m) in enumerate(zip(first.shape, like.shape, strict=True)) if n != m]
    return torch.cat(list(pieces), longer[0]) if len(longer) == 1 else first


def _tangent(port: Port) -> torch.Tensor:
    """1 for a loss, reproducible noise of that size for anything else."""
    dtype = torch_dtype(port.type.dtype)
    if not port.type.shape:
        return torch.ones((), dtype=dtype)
    noise = torch.randn(port.type.shape, generator=torch.Generator().manual_seed(int(port.target)))
    return (noise / max(1, port.type.numel) ** 0.5).to(dtype)


class Eager:
    """The model as it is, called once with the full batch."""

    def __init__(self, model: nn.Module, batch: Batch) -> None:
        self.model, self.batch = model, batch
        self.precision = batch.precision
        named = dict(model.named_parameters(remove_duplicate=False))
        self.named = {n: p for n, p in named.items() if n not in batch.aliases}
        self.optimizer: torch.optim.Optimizer | None = None

    def step(self) -> StepResult:
        self.model.zero_grad()
        args, kwargs = self.precision.of_call(self.batch.whole)
        given = from_records(args), from_records(kwargs)
        try:
            output = to_records(functional_call(self.model, self.precision.parameters(self.model), *given))
        except NotImplementedError as error:
            raise UsageError(
                "the model itself does not run on this machine",
                why=str(error),
                hint="verify it where it does, or prove the program alone: autoshard verify --static",
            ) from error
        leaves = [x for x in pytree.tree_leaves(output) if isinstance(x, torch.Tensor)]
        outputs = dict(zip(self.batch.leaves, leaves, strict=True))
        outputs = {k: outputs[k] for k in self.batch.positions}
        count = len(self.batch.calls)
        ends = [(outputs[k], _joined([t] * count, outputs[k], False)) for k, t in self.batch.tangents.items()]
        if ends:
            torch.autograd.backward([x for x, _ in ends], [t for _, t in ends])
        grads = {n: p.grad for n, p in self.named.items() if p.grad is not None}
        return StepResult({k: x.detach() for k, x in outputs.items()}, grads)

    def update(self, eps: float, trained: Sequence[str]) -> None:
        if self.optimizer is None and trained:
            self.optimizer = torch.optim.AdamW([self.named[n] for n in trained], lr=LR, eps=eps)
        if self.optimizer is not None:
            self.optimizer.step()

    def state(self) -> Tensors:
        result = {n: p.detach() for n, p in self.named.items()}
        return result | {n: b.detach() for n, b in self.model.named_buffers()}


class Ranks:
    """A program, all ranks in lockstep. Each rank updates its own shards: AdamW works element by element."""

    def __init__(self, program: Program, initial: Tensors, batch: Batch, seed: int) -> None:
        self.program, self.batch, self.seed, self.steps = program, batch, seed, 0
        self.runner = StepLockstep(program, len(batch.calls))
        self.lockstep = self.runner.lockstep
        ports = program.signature.ports
        self.ends = {p.target: p for p in ports if p.kind in ("param", "buffer")}
        self.ports = {target: p.name for target, p in self.ends.items()}
        self.held = {t: self.runner.held(initial[t], n) for t, n in self.ports.items()}
        given = [
            p for p in ports if p.kind in ("const", "tangent") or (p.kind == "input" and p.target != "seed")
        ]
        calls = [pytree.tree_leaves(call) for call in batch.calls]
        self.fixed = [
            {p.name: self.lockstep.shards(_fixed_value(program, batch, leaves, p), p.name) for p in given}
            for leaves in calls
        ]
        self.seeds = [p.name for p in ports if p.target == "seed"]
        self.optimizer: torch.optim.Optimizer | None = None
        self.grads: dict[str, Held] = {}

    def step(self) -> StepResult:
        fixed = [dict(values) for values in self.fixed]
        for call, values in enumerate(fixed):
            for name in self.seeds:
                number = self.seed * 1_000_003 + self.steps + call
                values[name] = self.lockstep.shards(torch.tensor(number), name)
        with torch.no_grad():
            new = self.runner.step({self.ports[t]: self._taken(t) for t in self.held}, fixed)
        outputs: Tensors = {}
        grads: Tensors = {}
        self.grads = {}
        for result in self.program.signature.results:
            meaning = f"{result.kind} {result.target}"
            if result.kind == "output":
                for call, results in enumerate(new.outputs[result.value]):
                    label = self.batch.label(result.target, call)
                    outputs[label] = self._whole([results], result.value, meaning)
            elif result.kind == "grad":
                self.grads[result.target] = new.grads[result.value]
                grads[result.target] = self._whole(new.grads[result.value].values(), result.value, meaning)
            elif result.kind == "buffer":
                # a buffer is whole on every rank, however the program makes it
                full = self._whole([new.buffers[result.value]], result.value, meaning)
                self.held[result.target] = self.runner.held(full, self.ports[result.target])
        self.steps += len(self.fixed)
        return StepResult(outputs, grads)

    def _taken(self, target: str) -> Held:
        """What the program takes of a parameter, which may be stored in a wider type."""
        held, port = self.held[target], self.ends[target]
        if not port.stored:
            return held
        dtype = torch_dtype(port.type.dtype)
        return {rank: [x.to(dtype) for x in shards] for rank, shards in held.items()}

    def update(self, eps: float, trained: Sequence[str]) -> None:
        trained = [target for target in trained if target in self.grads]
        if self.optimizer is None and trained:
            pieces = [x for target in trained for shards in self.held[target].values() for x in shards]
            self.optimizer = torch.optim.AdamW(pieces, lr=LR, eps=eps)
        for target in trained:
            for rank, shards in self.held[target].items():
                for piece, grad in zip(shards, self.grads[target][rank], strict=True):
                    piece.grad = grad
        if self.optimizer is not None:
            self.optimizer.step()

    def state(self) -> Tensors:
        return {t: self._whole(x.values(), self.ports[t], f"parameter {t}") for t, x in self.held.items()}

    def _whole(self, held: Iterable[Sequence[torch.Tensor]], value: str, meaning: str) -> torch.Tensor:
        """The value from its shards; stages that hold the same must hold equal shards."""
        try:
            result = [self.lockstep.whole(shards, value) for shards in held]
            for other in result[1:]:
                if not torch.allclose(other, result[0], rtol=1e-5, atol=1e-6, equal_nan=True):
                    raise AssertionError(f"{value} differs between pipeline stages")
            return result[0]
        except AssertionError as error:
            raise VerificationError(
                f"{meaning} is not the same on ranks that should hold the same",
                where=f"value {value} of the program",
                why=str(error),
                hint="this is a mistake in the program: please report it with its folder",
            ) from None


def _fixed_value(program: Program, batch: Batch, leaves: Sequence[Any], port: Port) -> torch.Tensor:
    """The global value of an input, a constant or a tangent; leaves: the arguments of the call."""
    if port.kind == "tangent":
        return batch.tangents[port.target]
    value = program.constants[port.target] if port.kind == "const" else leaves[int(port.target)]
    if not isinstance(value, torch.Tensor) or tuple(value.shape) != port.type.shape:
        shape = list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        raise UsageError(
            f"{port.kind} {port.target} is {shape}",
            why=f"the program takes the shape {list(port.type.shape)}",
            hint="compile the program again for these inputs",
        )
    return value.detach()


def _compare(
    subject: Steppable,
    reference: Steppable,
    batch: Batch,
    steps: int,
    tolerance: Tolerance,
    say: Callable[[str], None],
) -> tuple[tuple[Check, ...], tuple[float, ...]]:
    checks: list[Check] = []
    losses: list[float] = []
    eps = 1e-8
    for step in range(max(1, steps)):
        say(f"step {step + 1} of {max(1, steps)}")
        wanted = reference.step()
        result = subject.step()
        if isinstance(reference, Eager):
            result = StepResult(batch.joined(result.outputs, wanted.outputs), result.grads)
        losses += _loss(result)
        if step == 0:
            checks += checks_of("output", result.outputs, wanted.outputs, tolerance)
            wanted_grads = _with_zeros(wanted.grads, result.grads)
            checks += checks_of("gradient", result.grads, wanted_grads, tolerance)
            # Adam divides by the size of the gradient: with a smaller eps, elements whose gradient is
            # mathematically zero would move by the sign of their rounding error
            eps = max(1e-8, tolerance.floor * largest(wanted.grads))
        if steps:
            # eager gives no gradient at all where a program gives zeros; AdamW must then leave it alone
            trained = list(wanted.grads)
            reference.update(eps, trained)
            subject.update(eps, trained)
    if steps:
        after = f"after {steps} step{'s' if steps > 1 else ''}"
        # a step of AdamW moves by about LR whatever the parameter's size
        state = subject.state()
        wanted_state = {k: v for k, v in reference.state().items() if k in state}
        checks += checks_of(f"state {after}", state, wanted_state, tolerance, least=10 * LR)
    return tuple(checks), tuple(losses)


def _loss(step: StepResult) -> list[float]:
    """The first floating scalar among the outputs, its sum over the microbatches; none if there is none."""
    scalars = {k: float(x) for k, x in step.outputs.items() if x.dim() == 0 and x.is_floating_point()}
    first = next(iter(scalars), "").split(" ")[0]
    result = [x for k, x in scalars.items() if k.split(" ")[0] == first]
    return [sum(result)] if result else []


def _with_zeros(wanted: Tensors, result: Tensors) -> Tensors:
    """A gradient of zero may be missing in eager mode."""
    return wanted | {k: torch.zeros_like(v) for k, v in result.items() if k not in wanted and not v.any()}
