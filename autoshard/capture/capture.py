"""The first pass: from a module and example inputs to one graph of forward and backward.

The model is run on tensors without data, on the CPU, whatever device it lives on, and is left exactly
as it was. Attention, cross-entropy and dropout stay whole (see ``autoshard.ops``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

import autoshard.ops  # noqa: F401 (defines the ops that graphs hold)
from autoshard.capture import huggingface, tracing
from autoshard.capture.expand_repeats import apart
from autoshard.capture.expert_slots import SlotsError
from autoshard.capture.import_fx import SEED, Imported, TracedSignature, import_joint
from autoshard.capture.inputs import Inputs, Leaf, State, inputs_of, state_of
from autoshard.capture.meta_args import AbsentUsedError
from autoshard.capture.module_snapshot import ModuleSnapshot, as_written
from autoshard.capture.name_order import sets_in_order
from autoshard.capture.precision import MixedPrecision
from autoshard.capture.python_state.captured_state import StateWatch, graph_digest
from autoshard.capture.python_state.changes import Changes, refuse_counting
from autoshard.capture.python_state.code_reads import CodeReads
from autoshard.capture.python_state.outer_hooks import outer_hooks_apart
from autoshard.capture.repeats import NotApart, NotRepeated, Repeats, find_groups
from autoshard.capture.trace import DynamicShapeError, NeedsValuesError, trace, with_retries
from autoshard.capture.traced_function import Differentiate, Function
from autoshard.errors import CaptureError
from autoshard.ir import Joint, Port, refs_of


def capture(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    differentiate: Differentiate = "auto",
    precision: str = "",
) -> Joint:
    """Trace ``model(*args, **kwargs)`` and its gradients.

    model: on any device, also meta; not changed. args, kwargs: example inputs, any pytree; tensors may be
    real, fake or on meta: only shapes, types and requires_grad matter, all shapes become fixed. Where Python
    needs the numbers in a small table of sizes (rows of two or three integers, such as the height and width
    of each image), they become part of the program, which refuses others. Tensors that the forward changes in
    place are changed in the graph, but not given back unless they are buffers.
    differentiate: ``"auto"``: if exactly one output is a floating scalar that requires grad (a loss), only
    that one; otherwise, and with ``"all"``, all floating outputs that require grad; ``"none"``: no
    backward.
    precision: ``"bf16"``, ``"fp16"``: the model is given its parameters and floating inputs in that type,
    as FSDP2's ``MixedPrecisionPolicy(param_dtype=...)`` gives them; gradients come in the parameters' own.

    Raises CaptureError, with the line of the model's code, where Python needs the value of a tensor.
    """
    inputs = inputs_of(tuple(args), dict(kwargs or {}))
    with ExitStack() as stack:
        model, code, replaced = stack.enter_context(prepared(model, kwargs or {}))
        watch = StateWatch.of(model, code, replaced)
        stack.callback(watch.state.restore)
        stack.enter_context(watch.attributes.recording())
        task = _Task(ModuleSnapshot.of(model), inputs, differentiate, watch, MixedPrecision(precision))
        try:
            joint = task.whole()
        except NeedsValuesError as asked:
            joint = task.with_values(asked)
    return replace(joint, captured_state=watch.captured(joint))


@contextmanager
def prepared(
    model: nn.Module, kwargs: Mapping[str, Any]
) -> Iterator[tuple[nn.Module, CodeReads, list[tuple[Any, str]]]]:
    """The model, ready to run on tensors without data: as written, its own hooks apart, sets in order.

    Gives what its code reads, and (object, attribute) of what is set meanwhile, too.
    """
    with ExitStack() as stack:
        model = stack.enter_context(as_written(model))
        code = CodeReads.of(model)
        stack.enter_context(outer_hooks_apart(model))
        stack.enter_context(sets_in_order(model))
        yield model, code, stack.enter_context(huggingface.prepared(model, kwargs))


@dataclass(frozen=True)
class _Task:
    """A model to trace whose surroundings are prepared."""

    kept: ModuleSnapshot
    inputs: Inputs
    differentiate: Differentiate
    watch: StateWatch
    precision: MixedPrecision

    def with_values(self, asked: NeedsValuesError) -> Joint:
        """The graph of a model whose code asks for values: of tables of sizes, then of all that is known.

        Looking for values takes time, which models that ask for none are spared. asked: what is raised if
        that leads nowhere.
        """
        fixed = inputs_of(*self.inputs.call, fix_sizes=True)
        if len(fixed.tensors) < len(self.inputs.tensors):
            with suppress(NeedsValuesError):  # it asks for other numbers than these, too
                return replace(self, inputs=fixed).whole()
        try:
            return replace(self, inputs=fixed).whole(with_values=True)
        except NeedsValuesError:
            raise
        except CaptureError as error:
            if isinstance(asked, DynamicShapeError):
                raise  # rows that a mask chooses were followed: this is another matter
            # of two ways through the model the first one says what is the matter
            raise (asked.__cause__ if isinstance(asked.__cause__, CaptureError) else asked) from error

    def whole(self, *, with_values: bool = False) -> Joint:
        """The joint graph of the full model, its repeated layers traced once if that can be."""
        state = state_of(self.kept.module)
        repeats = self._repeats(state, with_values)
        if repeats is not None:
            try:
                return self._with_repeats(state, repeats, with_values)
            except (NotRepeated, CaptureError):
                # the plain trace finds the same fault, if it is one, and names the layer's own line
                return self._joint(None, with_values=with_values)
        return self._joint(None, with_values=with_values)

    def _with_repeats(self, state: State, repeats: Repeats, with_values: bool) -> Joint:
        """The joint graph from one trace per kind of repeated layer, and one of what is around them."""
        self.watch.groups[:] = [group.members for group in repeats.groups]
        with suppress(NotApart, AbsentUsedError):
            joint = self._joint(repeats, state, with_values=with_values)
            if apart(joint, repeats.away):
                return _of_bodies(joint, repeats)
        repeats.apart = False  # some parameter has other uses than one layer's: it has to be seen
        return _of_bodies(self._joint(repeats, state, with_values=with_values), repeats)

    def _repeats(self, state: State, with_values: bool) -> Repeats | None:
        """The repeated layers of a model, each traced once, or None if there are none that are certain."""
        model, kept, inputs = self.kept.module, self.kept, self.inputs
        repeats = Repeats(find_groups(model), self.watch)
        if not repeats.groups:
            return None
        function = Function(
            model,
            state,
            inputs,
            self.differentiate,
            repeats,
            with_values=with_values,
            watch=self.watch,
            precision=self.precision,
        )
        mode = tracing.fake_mode()
        seed = torch.empty((), dtype=torch.int64, device="meta")
        try:
            with kept, torch.enable_grad(), tracing.compiling(), mode:
                repeats.install(state.names)
                # nothing looks at which tensor is which, so that one of each type will do for the parameters
                types = {_type_of(t): t for t in state.tensors}
                shared = {key: tracing.fake_like(t, mode) for key, t in types.items()}
                held = [shared[_type_of(t)] for t in state.tensors]
                given = [*held, *(tracing.fake_like(t, mode) for t in [*inputs.tensors, seed])]
                with_retries(function, lambda: function(*given))
            # layers are traced one by one, and each is left as it was
            with ExitStack() as stack:
                for group in repeats.groups:
                    stack.enter_context(ModuleSnapshot.of(group.members[0]))
                repeats.trace_bodies(
                    lambda layer, args, kwargs: _Task(
                        ModuleSnapshot.of(layer),
                        inputs_of(args, kwargs),
                        "all",
                        self.watch,
                        replace(self.precision, inputs=False),
                    )._layer(with_values)
                )
        except Exception:
            # what fails here fails in the plain trace as well, with the model's own line, or is no failure
            return None
        return repeats

    def _layer(self, with_values: bool) -> Joint:
        """The joint graph of a repeated layer, which may ask for values of what follows from numbers."""
        try:
            return self._joint(None)
        except NeedsValuesError:
            if not with_values:
                raise
            return self._joint(None, with_values=True)

    def _joint(
        self, repeats: Repeats | None, state: State | None = None, *, with_values: bool = False
    ) -> Joint:
        """Trace the model. state: of the module, if that is known.

        Where the code left a value changed that it also read, it is traced as the second call would be.
        Raises CaptureError if that is another graph, or changes the value further.
        """
        joint = self._traced(repeats, state, with_values, Changes())
        changed = self.watch.changes.read
        if changed:
            try:
                second = self._traced(repeats, state, with_values, self.watch.changes)
            except CaptureError as error:  # tensors that stay from call to call are not there
                raise refuse_counting(changed[0]) from error
            if self.watch.changes.read or graph_digest(second) != graph_digest(joint):
                raise refuse_counting((*self.watch.changes.read, *changed)[0])
        return joint

    def _traced(
        self, repeats: Repeats | None, state: State | None, with_values: bool, left: Changes
    ) -> Joint:
        """One trace. left: what an earlier call has left changed."""
        model, inputs, watch = self.kept.module, self.inputs, self.watch
        with self.kept, watch.after(left) as watch:
            state = state or state_of(model)
            if repeats is not None:
                repeats.install(state.names)
            absent = state.absent(repeats.absent()) if repeats is not None else {}
            function = Function(
                model,
                state,
                inputs,
                self.differentiate,
                repeats,
                absent,
                with_values=with_values,
                watch=watch,
                precision=self.precision,
            )
            seed = torch.empty((), dtype=torch.int64, device="meta")
            given = [t for k, t in enumerate(state.tensors) if k not in absent]
            arguments = [*state.arguments, *inputs.arguments, ("input", SEED, SEED)]

            def imported_trace() -> Imported:
                traced = trace(function, [*given, *inputs.tensors, seed])
                outputs = [k for k, leaf in enumerate(function.out_leaves) if leaf.position >= 0]
                signature = TracedSignature(arguments, outputs, absent)
                return import_joint(traced, signature, function.recorder.origins)

            try:
                imported = imported_trace()
            except SlotsError:
                if not (function.slots or function.sparse):
                    raise
                function.slots = function.sparse = False
                imported = imported_trace()
        watch.constants += imported.sources
        return Joint(
            graph=imported.graph,
            ports=_read(imported, function.unread),
            results=imported.results,
            in_tree=_dumped(inputs.spec, "arguments"),
            in_leaves=tuple(_described(leaf) for leaf in inputs.leaves),
            out_tree=_dumped(function.out_spec, "output"),
            out_leaves=tuple(_described(leaf) for leaf in function.out_leaves),
            input_names=tuple(inputs.names),
            tied=tuple(state.tied),
            frozen=tuple(state.frozen),
            constants=dict(imported.constants),
            batch_inputs=_batch_inputs(imported.ports),
            training=model.training,
        )


def _of_bodies(joint: Joint, repeats: Repeats) -> Joint:
    """With the layers that its graph calls."""
    away = {call: dict(names) for call, names in repeats.away.items()}
    return replace(joint, bodies=tuple(repeats.bodies), away=away) if repeats.bodies else joint


def _type_of(tensor: torch.Tensor) -> Hashable:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad


def _read(imported: Imported, unread: Collection[str]) -> tuple[Port, ...]:
    """Without the inputs that nothing was asked of, so that calls may differ in them."""
    used = {r for n in imported.graph.nodes for r in refs_of(n)} | {r.value for r in imported.results}
    return tuple(p for p in imported.ports if p.kind != "input" or p.target not in unread or p.name in used)


def _described(leaf: Leaf) -> tuple[str, str]:
    return ("tensor" if leaf.position >= 0 else "static", leaf.static)


def _dumped(spec: pytree.TreeSpec, what: str) -> str:
    try:
        return pytree.treespec_dumps(spec)
    except NotImplementedError as error:
        raise CaptureError(
            f"the structure of the {what} cannot be written down",
            why=str(error),
            hint="give the class a serialized_type_name where it is registered with "
            "torch.utils._pytree.register_pytree_node, or use tuples, lists and dicts",
        ) from None


def _batch_inputs(ports: Sequence[Port]) -> tuple[str, ...]:
    """Inputs whose first size is the most common one among all inputs."""
    inputs = [p for p in ports if p.kind == "input" and p.type.shape and p.type.shape[0] > 0]
    if not inputs:
        return ()
    sizes = Counter(p.type.shape[0] for p in inputs)
    batch = max(sizes, key=sizes.__getitem__)
    return tuple(p.target for p in inputs if p.type.shape[0] == batch)
