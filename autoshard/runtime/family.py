"""The programs of one parallel model, on one set of parameters: one for every kind of call.

A call is answered by the program whose arguments, modes and attributes are its own. The first call of a new
kind captures the model as it is then, and plans it with every parameter where it is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from autoshard.capture.inputs import inputs_of
from autoshard.errors import CaptureError, UsageError
from autoshard.program.program import Program, Signature
from autoshard.runtime.arguments import Arguments, number_tensor
from autoshard.runtime.checks.agreement import (
    WeightHashes,
    any_rank,
    check_first_call,
    gives_parts,
    parts_differ,
)
from autoshard.runtime.checks.call_guard import CallGuard, Captured, Inputs
from autoshard.runtime.checks.kept_tables import check_tables
from autoshard.runtime.checks.recapture import with_inputs
from autoshard.runtime.groups import reduced
from autoshard.runtime.local_batch import batch_leaves, gathered_batch, global_example
from autoshard.runtime.outputs import Rows
from autoshard.runtime.parallel_class import as_built
from autoshard.runtime.runner import Runner
from autoshard.runtime.said import say_once
from autoshard.runtime.sized_programs import LARGER, SizedPrograms
from autoshard.runtime.stepper import Stepper
from autoshard.runtime.weights import check_replicas, check_written


@dataclass(eq=False)
class BoundProgram:
    """A program of a model on this rank. captured: None for one that was stored. sized: where this one was
    planned, its like for other sizes."""

    runner: Runner
    stepper: Stepper
    guard: CallGuard
    captured: Captured | None
    sized: SizedPrograms | None = None

    def suits(self, module: nn.Module, elsewhere: Collection[str]) -> bool:
        """Whether it is for the mode that a model is in, and has the gradients of what is trained.

        elsewhere: what ranks of a pipeline train that was frozen.
        """
        signature = self.runner.program.signature
        if module.training != signature.training and self.mode_matters:
            return False
        frozen = self.runner.frozen
        return not (frozen and torch.is_grad_enabled()) or not (
            not frozen.isdisjoint(elsewhere)
            or any(p.requires_grad for n, p in module.named_parameters() if n in frozen)
        )

    def check(self, module: nn.Module) -> None:
        """Raise UsageError, naming what differs, if it is not the program of a model as it is now."""
        training = self.runner.program.signature.training
        if self.mode_matters and module.training != training:
            was, now = ("train", "eval") if training else ("eval", "train")
            raise UsageError(
                f"the program was compiled in {was} mode and is called in {now} mode",
                why="the model has dropout or running statistics, which differ between the two",
                hint=f"compile a second program with the model in {now} mode",
            )
        self.guard.check()

    @property
    def mode_matters(self) -> bool:
        """Whether it is another program in training mode than in evaluation mode."""
        results = self.runner.program.signature.results
        return self.runner.seed_port is not None or any(r.kind == "buffer" for r in results)


#: binds a program of a model whose parameters lie where they are: like which one, program, what its capture
#: left
Binding = Callable[[BoundProgram, Program, Captured], BoundProgram]


class ProgramFamily:
    """Chooses the program of a call.

    built: the weights that the model was built with, until the first call. local_batch: whether every rank
    calls with a batch of its own. parts: whether ranks give their own rows of the batch, None until the first
    call.
    """

    def __init__(self, first: BoundProgram, built: WeightHashes, local_batch: bool, bind: Binding) -> None:
        self.programs = [first]
        self.current = first
        self.built: WeightHashes | None = built
        self.local_batch, self.bind = local_batch, bind
        self.parts: bool | None = None
        #: what tensors that got memory without values were then, by name, until the first call
        self.unwritten: Mapping[str, object] = {}
        #: parameters of a pipeline that were frozen and are trained on some rank
        self.unfrozen: frozenset[str] = frozenset()
        #: whether the model was on the meta device, and was given values
        self.filled = False
        #: programs in whose place there is one for the gradients of all outputs
        self._replaced: dict[Runner, BoundProgram] = {}
        #: structure of arguments, positions of numbers in it that the code does not take as tensors
        self._numbers: list[tuple[Any, frozenset[int]]] = []

    def copied(self, copies: Mapping[BoundProgram, BoundProgram], bind: Binding) -> ProgramFamily:
        """The same of a copy of the module. copies: of each program."""
        first = copies[self.programs[0]]
        new = ProgramFamily(first, WeightHashes({}, {}), self.local_batch, bind)
        new.programs, new.current = [copies[p] for p in self.programs], copies[self.current]
        new.built, new.parts, new.unfrozen = None, self.parts, self.unfrozen
        return new

    def grows(self, step: bool) -> bool:
        """Whether programs for other calls can be compiled. step: of all microbatches."""
        first = self.programs[0]
        return first.captured is not None and (step or first.runner.program.stages is None)

    @property
    def _has_steps(self) -> bool:
        """Whether a step is more than a call."""
        program = self.programs[0].runner.program
        return program.stages is not None or program.microbatches > 1

    def of_call(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, step: bool = False
    ) -> tuple[list[Any], Rows | None]:
        """Make the program of a call the current one. step: it is one of all microbatches.

        Returns the leaves of its arguments, as the program takes them, and the rows of this rank where ranks
        call with their own. Raises UsageError where there is no program and none can be compiled; collective.
        """
        step = step and self._has_steps
        rows: tuple[int, int] | None = None
        if self.local_batch:
            leaves, spec = pytree.tree_flatten((args, kwargs))
            runner = self.current.runner
            leaves, rows = gathered_batch(leaves, runner.axis_groups, runner.device)
            args, kwargs = pytree.tree_unflatten(leaves, spec)
        self._learn_trained(module)
        result = self._known(module, args, kwargs, step)
        if result is None and self.grows(step):
            result = self._compiled(module, args, kwargs, step)
        if result is None:
            # says what differs; of shapes, the program that is called does
            self.current.check(module)
            result = self.current, self.current.runner.arguments.flattened(args, kwargs)
            self._check_global(*result, step)
        self.current, leaves = result
        runner = self.current.runner
        if self.built is not None:
            check_written(module)
            check_first_call(runner, module, self.built, leaves)
            if self.filled:
                check_replicas(module)
            self.built, self.parts = None, gives_parts(runner, leaves)
        return leaves, self._rows(runner, rows)

    def _learn_trained(self, module: nn.Module) -> None:
        """What ranks of a pipeline train by now, each of which has some parameters; collective if any of all
        were frozen."""
        bound = self.programs[0]
        frozen = [n for n in bound.runner.program.signature.frozen if n not in self.unfrozen]
        if bound.stepper.pipe is None or not frozen or not torch.is_grad_enabled():
            return
        trained = {n for n, p in module.named_parameters() if p.requires_grad}
        flags = torch.tensor([int(n in trained) for n in frozen], device=bound.runner.device)
        known = reduced([bound.stepper.pipe], flags, "max").tolist()
        self.unfrozen |= {n for n, flag in zip(frozen, known, strict=True) if flag}

    @property
    def _signature(self) -> Signature:
        """For `as_built`: what is frozen there is frozen on all ranks."""
        signature = self.programs[0].runner.program.signature
        return replace(signature, frozen=tuple(n for n in signature.frozen if n not in self.unfrozen))

    def _check_global(self, bound: BoundProgram, leaves: list[Any], step: bool) -> None:
        """UsageError if all ranks give a batch that has the size of one rank's rows: it would count twice."""
        runner = bound.runner
        calls = runner.program.microbatches if step else 1
        if self.parts is False and runner.form_of(leaves, calls) == "part":
            raise UsageError(
                "all ranks give one batch of the size of one rank's rows",
                why="the first call gave the global batch, and no program is for one of this size",
                hint="drop the last incomplete batch, or fill it up with rows that the loss leaves out",
            )

    def _rows(self, runner: Runner, local: tuple[int, int] | None) -> Rows | None:
        if local is not None:
            axes = tuple(range(runner.place_mesh.ndim))
            return Rows(*local, axes, runner.place_mesh.size())
        return runner.batch_rows if self.parts else None

    def _known(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], step: bool
    ) -> tuple[BoundProgram, list[Any]] | None:
        ordered = [self.current, *(p for p in self.programs if p is not self.current)]
        matching = []
        for bound in ordered:
            leaves = bound.runner.arguments.matched(args, kwargs)
            calls = bound.runner.program.microbatches if step else 1
            form = None if leaves is None else bound.runner.form_of(leaves, calls)
            if leaves is not None and form is not None and bound.suits(module, self.unfrozen):
                if form != "part" and not self.parts and bound is self.current and bound.guard.holds():
                    return bound, leaves
                matching.append((bound, leaves, form))
        for bound, leaves in self._of_form(matching):
            if bound.guard.accepts():
                return bound, leaves
        return None

    def _of_form(
        self, matching: Sequence[tuple[BoundProgram, list[Any], str]]
    ) -> list[tuple[BoundProgram, list[Any]]]:
        """Those whose arguments are global, or a rank's rows, as ranks give them."""
        parts = self.parts
        some = next(((b, x) for b, x, form in matching if form == "part"), None)
        if parts is False and some is not None:
            parts = parts_differ(some[0].runner, some[1])
        unlike = {True: "global", False: "part"}
        return [(b, x) for b, x, form in matching if parts is None or form != unlike[parts]]

    def _compiled(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], step: bool
    ) -> tuple[BoundProgram, list[Any]] | None:
        """A program for a kind of call that there was none of. step: of microbatches, whose plan stays."""
        first = self.programs[0]
        assert first.captured is not None
        leaves, spec = pytree.tree_flatten((args, kwargs))
        leaves = [x.full_tensor() if isinstance(x, DTensor) else x for x in leaves]
        bound = self._resized(module, leaves, spec, step)
        pipeline = first.runner.program.stages is not None
        if bound is None and step and not pipeline and not self._is_small(leaves):
            return None
        bound = bound or self._of_numbers(module, leaves, spec, step)
        if bound is None:
            bound = self._bound(module, pytree.tree_unflatten(leaves, spec))
        return self._with(bound, args, kwargs, step)

    def compile_ahead(self, module: nn.Module, inputs: Inputs) -> None:
        """Compile the program of a kind of call that there will be; collective. The current one stays."""
        leaves, spec = pytree.tree_flatten(inputs)
        leaves = [torch.zeros_like(x, device="cpu") if _is_meta(x) else x for x in leaves]
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        self._with(self._bound(module, (args, kwargs)), args, kwargs, self._has_steps)

    def _is_small(self, leaves: Sequence[Any]) -> bool:
        """Whether a step that no number of microbatches suits is small enough for a single one."""
        runner = self.programs[0].runner
        planned = sum(p.type.numel for p in runner.inputs)
        return _elements(leaves) <= LARGER * planned

    def _with(
        self, bound: BoundProgram, args: tuple[Any, ...], kwargs: dict[str, Any], step: bool
    ) -> tuple[BoundProgram, list[Any]]:
        """Keep a program that was compiled for a call."""
        check_tables(self._stored, bound.runner.program)
        self.programs.append(bound)
        ports = bound.runner.inputs
        given = ", ".join(f"{bound.runner.input_name(p)} {p.type}" for p in ports)
        count = bound.runner.program.microbatches
        of = f", {count} microbatch{'es' * (count > 1)}" if step else ""
        say_once(f"program {len(self.programs)} of the model, for {given}{of}")
        taken = bound.runner.arguments.matched(args, kwargs)
        assert taken is not None
        assert bound.runner.form_of(taken, count if step else 1) is not None
        return bound, taken

    def _resized(
        self, module: nn.Module, leaves: Sequence[Any], spec: Any, step: bool
    ) -> BoundProgram | None:
        """A program for other sizes of the arguments alone, with the plan that there is."""
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        given = _elements(leaves)

        def rank(bound: BoundProgram) -> tuple[bool, bool, int]:
            """Those for the model as it is now come first: for others it is captured to know. Of them, the
            smallest that were planned for no less."""
            planned = bound.runner.program.microbatches * sum(p.type.numel for p in bound.runner.inputs)
            return not bound.guard.unchanged(), planned < given, abs(planned - given)

        for bound in sorted(self.programs, key=rank):
            taken = bound.runner.arguments.matched(args, kwargs)
            alike = taken is not None and bound.runner.takes_sizes_like(taken)
            if taken is None or not alike or bound.captured is None or bound.sized is None:
                continue
            if not bound.suits(module, self.unfrozen) or not bound.guard.accepts():
                continue
            inputs = bound.runner.arguments.unflattened(taken)
            if self.parts:
                inputs, _ = self._of_parts(inputs)
            with as_built(module, self._signature):
                program = (bound.sized.of_step if step else bound.sized.of)(module, inputs)
            if program is None:
                continue
            return self._agreed(module, bound, program, with_inputs(bound.captured, inputs), taken)
        return None

    def _bound(self, module: nn.Module, inputs: Inputs) -> BoundProgram:
        first = self.programs[0]
        assert first.captured is not None
        pins: tuple[str, ...] = ()
        given = pytree.tree_leaves(inputs)
        if self.parts:
            inputs, pins = self._of_parts(inputs)
        with as_built(module, self._signature):
            program, captured = first.captured.compiled(module, inputs, "auto", self._stored, pins)
        bound = self._agreed(module, first, program, captured, given)
        bound.sized = SizedPrograms(program, captured)
        return bound

    def _agreed(
        self, module: nn.Module, like: BoundProgram, program: Program, captured: Captured, leaves: list[Any]
    ) -> BoundProgram:
        """A program, bound, that all ranks have for the arguments of a call; collective."""
        bound = self.bind(like, program, captured)
        check_first_call(bound.runner, module, WeightHashes({}, {}), leaves)
        return bound

    def _if_captured(self, module: nn.Module, inputs: Inputs) -> BoundProgram | None:
        """The program for these inputs; None where the code does not take them."""
        try:
            return self._bound(module, inputs)
        except CaptureError:
            return None

    @property
    def _stored(self) -> list[Program]:
        """Programs that say where parameters lie."""
        return [p.runner.program for p in self.programs]

    def _of_parts(self, inputs: Inputs) -> tuple[Inputs, tuple[str, ...]]:
        """The global inputs of which ranks give their rows, and pins that divide them so."""
        runner = self.programs[0].runner
        rows = runner.batch_rows
        if rows is None:
            return inputs, ()
        placed = ",".join(
            f"{axis}:{'S(0)' if k in rows.axes else 'R'}" for k, axis in enumerate(runner.shape.names)
        )
        named = inputs_of(*inputs)
        pins = tuple(f"{named.names[k]}={placed}" for k in batch_leaves(named.values))
        return global_example(inputs, rows.ways), pins

    def _of_numbers(
        self, module: nn.Module, leaves: Sequence[Any], spec: Any, step: bool
    ) -> BoundProgram | None:
        """A program that takes ints and floats as inputs, which another one has in it with other values.

        None where code needs them as numbers, or does something else with a tensor: what the other program
        gives for its numbers, this one has to give, too.
        """
        for known in self.programs:
            arguments = known.runner.arguments
            numbers = _numbers(arguments, leaves) if arguments.spec == spec else {}
            as_known = [number_tensor(numbers[k]) if k in numbers else x for k, x in enumerate(leaves)]
            fits = numbers and known.suits(module, self.unfrozen) and known.guard.unchanged()
            if (
                not fits
                or (spec, frozenset(numbers)) in self._numbers
                or known.runner.form_of(as_known, known.runner.program.microbatches if step else 1) is None
            ):
                continue
            example = [number_tensor(x) if k in numbers else x for k, x in enumerate(leaves)]
            bound = self._if_captured(module, pytree.tree_unflatten(example, spec))
            if bound is not None and _give_alike(known, bound, module, as_known, step):
                return bound
            self._numbers.append((spec, frozenset(numbers)))
        return None

    def take_all_outputs(self, module: nn.Module, runner: Runner, missed: Sequence[int]) -> BoundProgram:
        """In place of a program, one for the gradients of all outputs. missed: those without one so far."""
        if runner in self._replaced:
            return self._replaced[runner]
        number = next(k for k, bound in enumerate(self.programs) if bound.runner is runner)
        old = self.programs[number]
        captured = old.captured
        if captured is None:
            raise UsageError(
                f"a loss depends on output {missed[0]} of the model, of which the program takes no gradient",
                why="it was compiled for the gradient of the loss that the model returns alone",
                hint='compile it with plan(..., differentiate="all")',
            )
        with as_built(module, runner.program.signature):
            program, more = captured.compiled(module, captured.inputs, "all", self._stored, ())
        bound = self.bind(old, program, more)
        bound.sized = SizedPrograms(program, more)
        self.programs[number] = self._replaced[runner] = bound
        if self.current is old:
            self.current = bound
        return bound


def _elements(leaves: Sequence[Any]) -> int:
    return sum(x.numel() for x in leaves if isinstance(x, torch.Tensor))


def _is_meta(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.is_meta


def _numbers(arguments: Arguments, leaves: Sequence[Any]) -> dict[int, int | float]:
    """Position of a number -> its value in a program; empty unless nothing but numbers differs."""
    result: dict[int, int | float] = {}
    for k, ((kind, text), leaf) in enumerate(zip(arguments.leaves, leaves, strict=True)):
        if kind == "tensor" or repr(leaf) == text:
            continue
        try:
            value = type(leaf)(text) if type(leaf) in (int, float) else None
        except ValueError:
            value = None
        if value is None or repr(value) != text:
            return {}
        result[k] = value
    return result


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    same = a.dtype == b.dtype and a.shape == b.shape
    return same and torch.allclose(a, b, rtol=1e-4, atol=1e-5, equal_nan=True)


def _give_alike(
    one: BoundProgram, other: BoundProgram, module: nn.Module, leaves: Sequence[Any], step: bool
) -> bool:
    """Whether two programs give the same outputs for arguments, on all ranks; collective."""
    result = [_outputs(bound, module, leaves, step) for bound in (one, other)]
    alike = len(result[0]) == len(result[1]) and all(map(_close, *result))
    return not any_rank(one.runner, not alike)


@torch.no_grad()
def _outputs(bound: BoundProgram, module: nn.Module, leaves: Sequence[Any], step: bool) -> list[torch.Tensor]:
    """What a program gives, without a change of the module. step: of all microbatches, their loss."""
    buffers = {n: b.clone() for n, b in module.named_buffers(remove_duplicate=False)}
    if step:
        loss, _ = bound.stepper.evaluate(module, leaves)
        for name, buffer in module.named_buffers(remove_duplicate=False):
            buffer.copy_(buffers[name])
        return [loss]
    params, inputs = bound.runner.arguments_of(module, leaves)
    outs = bound.runner.outputs(bound.runner.forward(params, inputs, buffers))
    return [x.to_local() if isinstance(x, DTensor) else x for x in outs]
