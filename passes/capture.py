"""The first pass: from a module and example inputs to one flat graph of forward and backward.

The model is run on tensors without data, on the CPU, whatever device it lives on, and is left exactly
as it was. Attention, cross-entropy and dropout stay whole (see ``autoshard.ops``).
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torch.utils import _pytree as pytree

import autoshard.ops  # noqa: F401 (defines the ops that graphs hold)
from autoshard.errors import AutoshardError, CaptureError
from autoshard.interop import huggingface
from autoshard.ir import Joint, Port
from autoshard.ops.lift import Lifter, lifting
from autoshard.passes.expand_repeats import expand_repeats
from autoshard.passes.import_fx import SEED, Ends, import_joint
from autoshard.passes.repeat_views import repeat_views
from autoshard.passes.repeats import NotApart, NotRepeated, Repeats, find_groups
from autoshard.torch_adapters import aot
from autoshard.torch_adapters.absent import Absent, AbsentUsedError
from autoshard.torch_adapters.checks import checks_pass
from autoshard.torch_adapters.host_random import no_host_random
from autoshard.torch_adapters.known import KnownValues
from autoshard.torch_adapters.origins import COPY, OriginRecorder, user_line

Differentiate = Literal["auto", "all", "none"]
#: images or videos in a batch, if their sizes are to be part of a program
_MOST_ROWS = 256
_PLAIN = (type(None), bool, int, float, complex, str, torch.dtype, torch.device)


def capture(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    differentiate: Differentiate = "auto",
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

    Raises CaptureError, with the line of the model's code, where Python needs the value of a tensor.
    """
    inputs = _inputs_of(tuple(args), dict(kwargs or {}))
    with ExitStack() as stack:
        stack.enter_context(_unchanged(model))
        stack.enter_context(huggingface.prepared(model, kwargs or {}))
        try:
            joint = _whole(model, inputs, differentiate)
        except NeedsValuesError:
            fixed = _inputs_of(tuple(args), dict(kwargs or {}), fix_sizes=True)
            if len(fixed.tensors) == len(inputs.tensors):
                raise
            joint = _whole(model, fixed, differentiate)
        return repeat_views(joint)


def _whole(model: nn.Module, inputs: _Inputs, differentiate: Differentiate) -> Joint:
    """The joint graph of the whole model, its repeated layers traced once if that can be."""
    repeats = _repeats_of(model, inputs, differentiate)
    if repeats is not None:
        try:
            return _with_repeats(model, inputs, differentiate, repeats)
        except (NotRepeated, CaptureError):
            # the plain trace finds the same fault, if it is one, and names the layer's own line
            return _joint(model, inputs, differentiate, None)
    return _joint(model, inputs, differentiate, None)


def _with_repeats(model: nn.Module, inputs: _Inputs, differentiate: Differentiate, repeats: Repeats) -> Joint:
    """The joint graph from one trace per kind of repeated layer, and one of what is around them."""
    try:
        joint = _joint(model, inputs, differentiate, repeats)
        found = expand_repeats(joint, repeats.bodies, repeats.away)
    except (NotApart, AbsentUsedError):
        found = None
    if found is not None:
        return found
    repeats.apart = False  # some parameter has other uses than one layer's: it has to be seen
    joint = _joint(model, inputs, differentiate, repeats)
    found = expand_repeats(joint, repeats.bodies, repeats.away)
    assert found is not None
    return found


def _repeats_of(model: nn.Module, inputs: _Inputs, differentiate: Differentiate) -> Repeats | None:
    """The repeated layers of a model, each traced once, or None if there are none that are certain."""
    repeats = Repeats(find_groups(model))
    if not repeats.groups:
        return None
    state = _state_of(model)
    function = _Function(model, state, inputs, differentiate, repeats)
    mode = aot.fake_mode()
    seed = torch.empty((), dtype=torch.int64, device="meta")
    try:
        with _unchanged(model), torch.enable_grad(), aot.compiling(), mode:
            repeats.install(state.names)
            # nothing looks at which tensor is which, so that one of each type will do for the parameters
            types = {_type_of(t): t for t in state.tensors}
            shared = {key: aot.fake_like(t, mode) for key, t in types.items()}
            held = [shared[_type_of(t)] for t in state.tensors]
            function(*held, *(aot.fake_like(t, mode) for t in [*inputs.tensors, seed]))
        with _unchanged(model):
            repeats.trace_bodies(
                lambda layer, args, kwargs: _joint(layer, _inputs_of(args, kwargs), "all", None)
            )
    except Exception:
        # whatever fails here fails in the plain trace as well, with the model's own line, or is no failure
        return None
    return repeats


def _type_of(tensor: torch.Tensor) -> Hashable:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad


def _joint(model: nn.Module, inputs: _Inputs, differentiate: Differentiate, repeats: Repeats | None) -> Joint:
    """Trace a module whose surroundings are prepared."""
    with _unchanged(model):
        state = _state_of(model)
        if repeats is not None:
            repeats.install(state.names)
        absent = state.absent(repeats.absent()) if repeats is not None else {}
        function = _Function(model, state, inputs, differentiate, repeats, absent)
        seed = torch.empty((), dtype=torch.int64, device="meta")
        given = [t for k, t in enumerate(state.tensors) if k not in absent]
        traced = _trace(function, [*given, *inputs.tensors, seed])
    arguments = [*state.arguments, *inputs.arguments, ("input", SEED, SEED)]
    outputs = [k for k, leaf in enumerate(function.out_leaves) if leaf.position >= 0]
    imported = import_joint(traced, Ends(arguments, outputs, absent), function.recorder.origins)
    return Joint(
        graph=imported.graph,
        ports=imported.ports,
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


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Put back every attribute, parameter, buffer and hook that the run of a model replaces or adds."""
    saved = [
        (m, dict(m.__dict__), [(d, dict(d)) for d in m.__dict__.values() if isinstance(d, dict)])
        for m in model.modules()
    ]
    try:
        yield
    finally:
        for module, attributes, tables in saved:
            _restore(module.__dict__, attributes)
            for table, entries in tables:
                _restore(table, entries)


def _restore(now: Any, before: dict[str, Any]) -> None:
    now.clear()
    now.update(before)


@dataclass(frozen=True)
class _Leaf:
    """One flattened argument or output; position: among the tensors, or -1."""

    position: int
    static: str = ""


@dataclass
class _State:
    """Parameters and buffers: one argument per object, however many names it has.

    slots: (dict of a module, key in it, position among the arguments) of every name.
    """

    slots: list[tuple[dict[str, Any], str, int]] = field(default_factory=list)
    arguments: list[tuple[str, str, str]] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    tied: list[tuple[str, str]] = field(default_factory=list)
    frozen: list[str] = field(default_factory=list)

    @property
    def names(self) -> dict[tuple[int, str], str]:
        """(identity of a module's table, key in it) -> name of the argument."""
        return {(id(table), key): self.arguments[position][1] for table, key, position in self.slots}

    def absent(self, names: Collection[str]) -> dict[int, Absent]:
        """What stands for the parameters of these names, by position."""
        return {
            k: Absent(tensor)
            for k, ((_, name, _), tensor) in enumerate(zip(self.arguments, self.tensors, strict=True))
            if name in names
        }


def _state_of(model: nn.Module) -> _State:
    state = _State()
    known: dict[int, int] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for kind, table in (("param", module._parameters), ("buffer", module._buffers)):
            for key, tensor in table.items():
                if tensor is None:
                    continue
                name = f"{prefix}.{key}" if prefix else key
                position = known.get(id(tensor))
                if position is None:
                    known[id(tensor)] = position = len(state.tensors)
                    _check_plain(tensor, name)
                    if kind == "param" and not tensor.requires_grad:
                        state.frozen.append(name)
                    state.arguments.append((kind, name, name))
                    state.tensors.append(tensor)
                elif kind == "param":
                    state.tied.append((name, state.arguments[position][1]))
                state.slots.append((table, key, position))
    return state


@dataclass
class _Inputs:
    """The flattened call. leaves: per leaf the position among the tensors, or (-1, repr)."""

    spec: pytree.TreeSpec
    values: list[Any] = field(default_factory=list)
    leaves: list[_Leaf] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    arguments: list[tuple[str, str, str]] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)


def _inputs_of(args: tuple[Any, ...], kwargs: dict[str, Any], *, fix_sizes: bool = False) -> _Inputs:
    paths, spec = pytree.tree_flatten_with_path((args, kwargs))
    inputs = _Inputs(spec)
    for number, (path, value) in enumerate(paths):
        name = _path_name(path)
        inputs.names.append(name)
        inputs.values.append(value)
        if isinstance(value, torch.Tensor) and not (fix_sizes and _is_table_of_sizes(value)):
            _check_plain(value, name)
            inputs.leaves.append(_Leaf(len(inputs.tensors)))
            inputs.arguments.append(("input", str(number), name))
            inputs.tensors.append(value)
        else:
            inputs.leaves.append(_Leaf(-1, repr(value)))
    return inputs


def _is_table_of_sizes(tensor: torch.Tensor) -> bool:
    """Whether this may be the (height, width) or (time, height, width) of some images, with its values."""
    return (
        tensor.dim() == 2
        and tensor.shape[1] in (2, 3)
        and tensor.shape[0] <= _MOST_ROWS
        and tensor.dtype in (torch.int32, torch.int64)
        and tensor.device.type != "meta"
        and not aot.is_fake(tensor)
    )


def _path_name(path: Sequence[Any]) -> str:
    """``input_ids``, ``args[0]``, ``batch['x']``."""
    where, *rest = path
    text = "args" if where.idx == 0 else ""
    for key in rest:
        text += key.key if not text and isinstance(key, pytree.MappingKey) else pytree.keystr((key,))
    return text


def _check_plain(tensor: torch.Tensor, name: str) -> None:
    if isinstance(tensor, (nn.UninitializedParameter, nn.UninitializedBuffer)):
        raise CaptureError(
            f"{name} has no shape yet",
            why="lazy modules learn their shapes from data",
            hint="call the model once on real data, then capture",
        )
    if aot.is_wrapper(tensor) or tensor.layout is not torch.strided:
        raise CaptureError(
            f"{name} is a {type(tensor).__name__} of layout {tensor.layout}, not a plain tensor",
            why="shards are made from plain dense tensors",
            hint="give the model before it is distributed, quantised or made sparse",
        )


class _Function:
    """The function that is traced: parameters, buffers, inputs and the dropout seed are arguments.

    absent: parameters, by position, that are no arguments because nothing traced uses them. It is run more
    than once; what describes the output is that of the last run.
    """

    def __init__(
        self,
        model: nn.Module,
        state: _State,
        inputs: _Inputs,
        differentiate: Differentiate,
        repeats: Repeats | None,
        absent: Mapping[int, Absent] | None = None,
    ) -> None:
        self.model, self.state, self.inputs, self.differentiate = model, state, inputs, differentiate
        self.repeats, self.absent = repeats, absent or {}
        names: dict[int, str] = {}
        for name, module in model.named_modules():
            names.setdefault(id(module), name)
        self.recorder = OriginRecorder(names)
        self.out_spec = pytree.tree_structure(())
        self.out_leaves: list[_Leaf] = []
        self.replaced: set[int] = set()

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        split = len(self.state.tensors)
        given = iter(tensors)
        held = [self.absent[k] if k in self.absent else next(given) for k in range(split)]
        tensors = (*held, *given)
        known = KnownValues()
        with self.recorder.running(), aot.plain_model_code(), known, checks_pass():
            state = self._state(tensors)
            args, kwargs = self._arguments(tensors[split:], known)
            lifter = Lifter(tensors[-1])
            if self.repeats is not None:
                self.repeats.begin(lifter)
            with lifting(lifter, self.recorder.at):
                output = _call_model(self.model, args, kwargs)
            aot.mark(COPY)
            self._write_back(tensors, state)
            return self._outputs(output)

    def _arguments(self, tensors: Sequence[torch.Tensor], known: KnownValues) -> tuple[Any, Any]:
        """The call with copies of all inputs, so that the model may change them in place."""
        aot.mark(COPY)
        leaves = [
            torch.clone(tensors[leaf.position])
            if leaf.position >= 0
            else known.add(value)
            if isinstance(value, torch.Tensor)
            else value
            for leaf, value in zip(self.inputs.leaves, self.inputs.values, strict=True)
        ]
        args, kwargs = pytree.tree_unflatten(leaves, self.inputs.spec)
        return args, kwargs

    def _state(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Give the model its parameters and buffers; what it assigns anew it gets as a copy.

        Autograd may keep the old value of such a buffer, while writing it back changes the argument.
        """
        aot.mark(COPY)
        held = list(tensors[: len(self.state.tensors)])
        for position in self.replaced:
            held[position] = torch.clone(held[position])
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
        values, self.out_spec = pytree.tree_flatten(output)
        self.out_leaves = []
        found: list[torch.Tensor] = []
        for value in values:
            if isinstance(value, torch.Tensor):
                self.out_leaves.append(_Leaf(len(found)))
                found.append(value)
            else:
                _check_static(value)
                self.out_leaves.append(_Leaf(-1, repr(value)))
        wanted = _differentiated(found, self.differentiate)
        return tuple(torch.clone(t if k in wanted else t.detach()) for k, t in enumerate(found))


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


def _call_model(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Apart, so that its frame tells the model's own code from what is above it."""
    return model(*args, **kwargs)


def _trace(function: _Function, tensors: Sequence[torch.Tensor]) -> aot.Traced:
    try:
        return _traced(function, tensors, compiling=True)
    except (AutoshardError, NotRepeated, AbsentUsedError):
        raise
    except Exception as error:
        explained = _explained(error)
        if isinstance(explained, NeedsValuesError):
            raise explained from error
        try:
            # some models take shorter ways when they are compiled, which fail for some inputs
            return _traced(function, tensors, compiling=False)
        except Exception:
            raise explained from error


def _traced(function: _Function, tensors: Sequence[torch.Tensor], *, compiling: bool) -> aot.Traced:
    mode = aot.fake_mode()
    flag = aot.compiling() if compiling else nullcontext()
    # the first call of a model may be one for inference, the next one for training
    with torch.inference_mode(False), torch.enable_grad(), flag, _no_garbage_collection(), no_host_random():
        return aot.trace_joint(function, [aot.fake_like(t, mode) for t in tensors])


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A trace makes many small objects that all stay: looking through them again and again is wasted."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


class NeedsValuesError(CaptureError):
    """Python code of the model asks for values of tensors, or shapes depend on them."""


def _explained(error: Exception) -> CaptureError:
    """What went wrong, at which line of the model, and the usual way out."""
    line, text = user_line(error.__traceback__, _call_model.__code__)
    where = f"{line}: {text}" if text else line
    if isinstance(error, aot.DATA_DEPENDENT):
        return NeedsValuesError(
            "the model's Python code asks for the value of a tensor",
            where=where,
            why="values are known only when a program runs, but Python runs now (an if, a while, .item(), "
            "int() or a print on a tensor)",
            hint="torch.where(condition, a, b) or a mask instead of a branch; a number passed as an argument "
            "instead of .item()",
        )
    if isinstance(error, aot.DYNAMIC_SHAPE):
        return NeedsValuesError(
            "the shape of a tensor depends on values",
            where=where,
            why="all shapes in a program are fixed (nonzero, unique, boolean indexing and repeats given by a "
            "tensor have shapes that are not)",
            hint="torch.where(mask, x, 0) or x * mask instead of x[mask]; a buffer of the largest size "
            "with a mask",
        )
    reason = str(error).strip().splitlines()
    return CaptureError(
        "the model fails while it is traced" if line else "tracing failed",
        where=where,
        why=f"{type(error).__name__}: {reason[0] if reason else ''}",
        hint="run the model once on real inputs of these shapes; if that works, the statement needs the data "
        "of a tensor",
    )


def _described(leaf: _Leaf) -> tuple[str, str]:
    return ("tensor", "") if leaf.position >= 0 else ("static", leaf.static)


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
