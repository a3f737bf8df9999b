"""The function that is traced: a model whose parameters, buffers and inputs are all arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, Literal

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autoshard.capture import tracing
from autoshard.capture.data_dependent.constant_eval import Shadows
from autoshard.capture.data_dependent.finite_checks import Finite
from autoshard.capture.data_dependent.known_values import KnownValues
from autoshard.capture.data_dependent.masked_rows import ChosenRows, chosen_rows
from autoshard.capture.data_dependent.value_checks import checks_pass
from autoshard.capture.inputs import Inputs, Leaf, State
from autoshard.capture.meta_args import Absent
from autoshard.capture.origins import COPY, OriginRecorder
from autoshard.capture.precision import UNCHANGED, MixedPrecision
from autoshard.capture.python_state.captured_state import StateWatch
from autoshard.capture.repeats import Repeats
from autoshard.capture.sparse_mixtures import SparseMixtures
from autoshard.errors import CaptureError
from autoshard.ops.lift import Lifter, lifting
from autoshard.torch_adapters.records import from_records, to_records

Differentiate = Literal["auto", "all", "none"]
#: marks outputs that have a gradient in the model's own run
GRAD = "grad"
_PLAIN = (type(None), bool, int, float, complex, str, torch.dtype, torch.device)


class Function:
    """The function that is traced: parameters, buffers, inputs and the dropout seed are arguments.

    absent: parameters, by position, that are no arguments because nothing traced uses them. It may be
    run more than once: what describes the output is that of the last run. replaced: positions of the buffers
    that some run assigned anew, of which further runs hold copies. with_values: keep the values of tensors
    that are made from numbers alone, for code that asks for them. watch: notes what Python state is used.
    precision: the type that the model gets its parameters and inputs in.
    """

    def __init__(
        self,
        model: nn.Module,
        state: State,
        inputs: Inputs,
        differentiate: Differentiate,
        repeats: Repeats | None,
        absent: Mapping[int, Absent] | None = None,
        *,
        with_values: bool = False,
        watch: StateWatch | None = None,
        precision: MixedPrecision = UNCHANGED,
    ) -> None:
        self.watch, self.precision = watch, precision
        self.model, self.state, self.inputs, self.differentiate = model, state, inputs, differentiate
        self.repeats, self.absent = repeats, absent or {}
        self.with_values = with_values
        self.recorder = OriginRecorder(state.modules)
        self.out_spec = pytree.tree_structure(())
        self.out_leaves: list[Leaf] = []
        #: see `Lifter`
        self.like_queries = False
        #: targets of inputs that nothing was asked of: they may be any others
        self.unread: frozenset[str] = frozenset()
        self.replaced: set[int] = set()
        self.raising: set[tuple[int, int]] = set()
        #: whether chosen rows are slots of experts
        self.slots = True
        #: whether rows that are mostly zeros are, which takes matrices of many experts in one tensor
        self.sparse = any(t.dim() == 3 for t in state.tensors)

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        split = len(self.state.tensors)
        given = iter(tensors)
        held = [self.absent[k] if k in self.absent else next(given) for k in range(split)]
        tensors = (*held, *given)
        known = KnownValues()
        sparse = (SparseMixtures(),) if self.sparse else ()
        asked = (Shadows(), chosen_rows(self.raising, self.slots), Finite()) if self.with_values else ()
        with ExitStack() as stack:
            contexts: tuple[AbstractContextManager[Any], ...] = (
                self.recorder.running(),
                tracing.plain_model_code(self.state.hooked()),
                known,
                checks_pass(),
                *asked,
                *sparse,
            )
            modes = [stack.enter_context(context) for context in contexts]
            state = self._state(tensors)
            uncast = {
                id(new): old
                for (kind, _, _), new, old in zip(self.state.arguments, state, tensors, strict=False)
                if kind == "param" and new is not old
            }
            args, kwargs = self._arguments(tensors[split:], known)
            lifter = Lifter(tensors[-1], like_queries=self.like_queries)
            lifter.unread = self._inputs_by_identity(args, kwargs)
            watched = nullcontext() if self.watch is None else self.watch.running()
            asked_grad = None if self.watch is None else self.watch.note_grad_mode
            with lifting(lifter, self.recorder.at, asked_grad), watched:
                if self.repeats is not None:
                    self.repeats.begin(lifter, uncast)
                output = call_model(self.model, args, kwargs)
                for mode in modes:
                    if isinstance(mode, ChosenRows):
                        mode.returns(output)
            self.unread = frozenset(lifter.unread.values())
            tracing.mark(COPY)
            self._write_back(tensors, state)
            if self.watch is not None:
                self.watch.finish_run()
            return self._outputs(output)

    def _inputs_by_identity(self, args: Any, kwargs: Any) -> dict[int, str]:
        """Tensors of the call -> the targets of their ports."""
        leaves = pytree.tree_leaves((args, kwargs))
        if len(leaves) != len(self.inputs.leaves):
            return {}
        return {
            id(x): self.inputs.arguments[leaf.position][1]
            for x, leaf in zip(leaves, self.inputs.leaves, strict=True)
            if leaf.position >= 0
        }

    def _arguments(self, tensors: Sequence[torch.Tensor], known: KnownValues) -> tuple[Any, Any]:
        """The call with copies of all inputs, so that the model may change them in place."""
        tracing.mark(COPY)
        leaves = [
            self.precision.of_input(torch.clone(tensors[leaf.position]))
            if leaf.position >= 0
            else known.add(value)
            if isinstance(value, torch.Tensor)
            else value
            for leaf, value in zip(self.inputs.leaves, self.inputs.values, strict=True)
        ]
        args, kwargs = from_records(pytree.tree_unflatten(leaves, self.inputs.spec))
        return args, kwargs

    def _state(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Give the model its parameters and buffers; what it assigns anew it gets as a copy.

        Autograd may keep the old value of such a buffer, while writing it back changes the argument.
        """
        tracing.mark(COPY)
        held = list(tensors[: len(self.state.tensors)])
        for position in self.replaced:
            held[position] = torch.clone(held[position])
        for position, (kind, name, _) in enumerate(self.state.arguments):
            if kind == "param" and position not in self.absent:
                owner = self.model.get_submodule(name.rpartition(".")[0])
                held[position] = self.precision.of_parameter(held[position], owner)
        for table, key, position in self.state.slots:
            table[key] = held[position]
        return held

    def _write_back(self, tensors: Sequence[torch.Tensor], held: Sequence[torch.Tensor]) -> None:
        """Buffers that were assigned anew count as changed in place."""
        for table, key, position in self.state.slots:
            new, old = table.get(key), tensors[position]
            kind, name, _ = self.state.arguments[position]
            if new is held[position] or kind != "buffer":
                continue
            self.replaced.add(position)
            if not isinstance(new, torch.Tensor) or new.shape != old.shape or new.dtype != old.dtype:
                raise CaptureError(
                    f"the forward replaces the buffer {name} by something of another type",
                    why="the state of a program has fixed shapes",
                    hint="keep the shape and the element type of buffers",
                )
            with torch.no_grad():
                old.copy_(new)

    def _outputs(self, output: Any) -> tuple[torch.Tensor, ...]:
        """The tensors in the output, copied so that none is another one or an input."""
        values, self.out_spec = pytree.tree_flatten(to_records(output))
        self.out_leaves = []
        result: list[torch.Tensor] = []
        for value in values:
            if isinstance(value, torch.Tensor):
                self.out_leaves.append(Leaf(len(result)))
                result.append(value)
            else:
                _check_static(value)
                self.out_leaves.append(Leaf(-1, repr(value)))
        wanted = _differentiated(result, self.differentiate)
        able = {k for k, t in enumerate(result) if t.requires_grad and t.is_floating_point()}
        self.out_leaves = [
            Leaf(leaf.position, GRAD) if leaf.position in able else leaf for leaf in self.out_leaves
        ]
        return tuple(torch.clone(t if k in wanted else t.detach()) for k, t in enumerate(result))


def _differentiated(outputs: Sequence[torch.Tensor], differentiate: Differentiate) -> set[int]:
    """Positions of the outputs that get a gradient."""
    if differentiate == "none":
        return set()
    able = {k for k, t in enumerate(outputs) if t.requires_grad and t.is_floating_point()}
    scalars = {k for k in able if outputs[k].dim() == 0}
    return scalars if differentiate == "auto" and len(scalars) == 1 else able


def _check_static(value: object) -> None:
    if not isinstance(value, _PLAIN):
        raise CaptureError(
            f"the model returns a {type(value).__module__}.{type(value).__qualname__}",
            why="tensors inside it cannot be seen",
            hint="return tensors, tuples, lists, dicts, or register the class with "
            "torch.utils._pytree.register_pytree_node",
        )


def call_model(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Apart, so that its frame tells the model's own code from what is above it."""
    return model(*args, **kwargs)
