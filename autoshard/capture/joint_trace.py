"""One trace of a function and of its gradients, on fake tensors, without in-place ops.

What AOTAutograd's joint export does, for the kind of function that a capture traces: its arguments are
distinct plain tensors and its outputs are fresh ones, so that nothing has to be known of it before the run
and one run is enough (AOTAutograd makes two, and pulls in the whole compiler). Autograd records above
functionalisation, which in turn is above the recording of nodes; ops are taken apart where autograd takes
them apart, and those few that no rule has (`_TAKEN_APART`).

Leans on private interfaces: the proxy mode and tracer of ``torch.fx.experimental.proxy_tensor``,
``torch._subclasses.functional_tensor``, ``torch.fx.traceback``, ``torch._dispatch.python``, the
``torch._functionalize_*`` queries and ``torch._C._autograd._saved_tensors_hooks_set_tracing``. Run with torch
2.13; ``torch/_functorch/_aot_autograd`` there is the model.
"""

from __future__ import annotations

import importlib
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar, cast

import torch
import torch.fx.traceback as fx_traceback
from torch import fx, nn
from torch._decomp import decomposition_table
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.fx.experimental import proxy_tensor
from torch.utils._python_dispatch import _disable_current_modes

from autoshard.errors import CaptureError

T = TypeVar("T")
InputKind = Literal["plain", "tangent"]
OutputKind = Literal["output", "grad", "mutation", "nothing"]
#: value of a node's ``partitioner_tag`` if it was made while gradients were computed
BACKWARD = "is_backward"


@dataclass(frozen=True)
class Traced:
    """A joint graph and what its ends are.

    root: holds the constants that ``get_attr`` nodes name.
    inputs: per placeholder ``("plain", position of the argument)`` or ``("tangent", position of the
        output)``.
    outputs: per value returned ``("output", position)``, ``("grad", position of the argument)`` or
        ``("mutation", position of the argument)`` for the new value of an argument changed in place;
        ``("nothing", -1)`` in the place of the gradient of an argument that needs none. Where an argument
        that requires grad was changed in place there are no tangents and no gradients.
    """

    graph: fx.Graph
    root: nn.Module
    inputs: tuple[tuple[InputKind, int], ...]
    outputs: tuple[tuple[OutputKind, int], ...]


_ATEN = torch.ops.aten
#: ops that no rule has, as torch itself writes them in others
_TAKEN_APART = (
    _ATEN.affine_grid_generator.default,
    _ATEN.block_diag.default,
    _ATEN.channel_shuffle.default,
    _ATEN.dist.default,
    _ATEN.max_unpool2d.default,
    _ATEN.max_unpool3d.default,
    _ATEN.renorm.default,
    _ATEN.rot90.default,
)
#: elements of the largest tensor that is evaluated
_MOST_VALUES = 1 << 27
#: the arguments of a graph: those of the function, and the gradients of its outputs
_GIVEN = re.compile(r"(primals|tangents)_\d+")


def trace_once(
    fn: Callable[..., tuple[torch.Tensor, ...]], args: Sequence[torch.Tensor], mode: FakeTensorMode
) -> Traced:
    """The graph of ``fn(*args)`` and of its gradients.

    args: distinct fake tensors of ``mode``, no views; those that require grad get one. fn: takes as many
    tensors and returns a tuple of new tensors, no views, none of them twice; it is run once. Outputs that
    require grad get a tangent.
    """
    # the tracer names it without importing it
    importlib.import_module("torch._higher_order_ops.triton_kernel_wrap")
    maker = _recorder()
    tracer, proxies = maker.fx_tracer, maker.proxy_mode
    assert isinstance(tracer, proxy_tensor.PythonKeyTracer)
    with ExitStack() as stack:
        stack.enter_context(fx_traceback.preserve_node_meta())
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        stack.enter_context(torch.random.fork_rng(devices=()))
        stack.enter_context(_without_users_hooks())
        stack.enter_context(mode)
        stack.enter_context(enable_python_dispatcher())
        stack.enter_context(FunctionalTensorMode(_allow_token_discovery=True))
        stack.enter_context(proxies)
        stack.enter_context(proxy_tensor.disable_autocast_cache())
        stack.enter_context(proxy_tensor._set_make_fx_tracer(maker))
        known = {op: decomposition_table[op] for op in _TAKEN_APART if op in decomposition_table}
        stack.enter_context(proxy_tensor.decompose(known))
        for position, arg in enumerate(args):
            _placeholder(tracer, f"primals_{position + 1}", arg)
        stack.enter_context(
            torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.Functionalize))
        )
        return _joint(tracer, fn, args, mode)


def _recorder() -> proxy_tensor._MakefxTracer:
    """What records nodes into a graph of its own; bodies of control flow ops find it as their parent."""
    maker = proxy_tensor._MakefxTracer({}, "real", True, False, False, False, True)
    tracer = proxy_tensor.PythonKeyTracer()
    tracer.root = nn.Module()
    tracer.graph = fx.Graph(tracer_cls=proxy_tensor.PythonKeyTracer)
    tracer.tensor_attrs = {}
    tracer.record_stack_traces = False
    maker.fx_tracer = tracer
    maker._disable_torch_fn_metadata_mode = True  # costs time, and nothing reads what it notes
    maker._construct_modes_with_fx_tracer(tracer)
    return maker


def _joint(
    tracer: proxy_tensor.PythonKeyTracer,
    fn: Callable[..., tuple[torch.Tensor, ...]],
    args: Sequence[torch.Tensor],
    mode: FakeTensorMode,
) -> Traced:
    given = [FunctionalTensor.to_functional(t) for t in args]
    outs = fn(*given)
    for node in tracer.graph.nodes:
        node.meta["partitioner_tag"] = "is_forward"
    for t in given:
        _sync(t)
    changed = [k for k, t in enumerate(given) if _is_changed(t, args[k])]
    trained = [k for k, t in enumerate(args) if t.requires_grad]
    led = [] if set(changed) & set(trained) else [k for k, t in enumerate(outs) if t.requires_grad]
    result: dict[int, torch.Tensor | None] = {}
    if led and trained:
        tangents = _tangents(tracer, [outs[k] for k in led], mode)
        grads = _gradients(
            [outs[k] for k in led], given, [given[k] for k in trained], list(tangents.values())
        )
        late = [k for k, t in enumerate(given) if k not in changed and _is_changed(t, args[k])]
        if late or any(_is_changed(t, before) for before, t in tangents.items()):
            raise CaptureError(
                "a backward changes a tensor in place that it was given",
                why="the gradients of a program only depend on what it is given",
                hint="return new tensors from the backward of an autograd function",
            )
        result = dict(zip(trained, grads, strict=True))
    ends: list[tuple[OutputKind, int, torch.Tensor | None]] = [
        *(("mutation", k, given[k]) for k in changed),
        *(("output", k, t) for k, t in enumerate(outs)),
    ]
    if result:
        ends += [("grad", k, result[k]) if k in result else ("nothing", -1, None) for k in range(len(args))]
    values = [None if t is None else _node_of(tracer, _inner(t)) for _, _, t in ends]
    tracer.create_node("output", "output", (values,), {})
    _copy_to_backward(tracer.graph)
    tracer.graph.eliminate_dead_code()
    _drop_tokens(tracer.graph)
    inputs: list[tuple[InputKind, int]] = [("plain", k) for k in range(len(args))]
    inputs += [("tangent", k) for k in led if result]
    return Traced(tracer.graph, tracer.root, tuple(inputs), tuple((kind, k) for kind, k, _ in ends))


def recording() -> proxy_tensor.PythonKeyTracer | None:
    """What records the graph of the trace that is going on, None outside of one."""
    mode = proxy_tensor.get_proxy_mode()
    return None if mode is None else cast(proxy_tensor.PythonKeyTracer, mode.tracer)


def depends_on_arguments(tensor: torch.Tensor) -> bool:
    """Whether a tensor of the trace that is going on was computed from an argument of the traced function.

    An argument itself was not: models put their parameters into lists.
    """
    tracer = recording()
    if tracer is None or not isinstance(tensor, FunctionalTensor):
        return False
    node = _node_of(tracer, _inner(tensor))
    if not isinstance(node, fx.Node) or node.op == "placeholder":
        return False
    seen, queue = {node}, [node]
    while queue:
        each = queue.pop()
        if each.op == "placeholder":
            return True
        fresh = [n for n in each.all_input_nodes if n not in seen]
        seen.update(fresh)
        queue += fresh
    return False


def evaluated(tensor: torch.Tensor, then: Callable[[torch.Tensor | None], T]) -> T:
    """What ``then`` makes of the values of a tensor of the trace that is going on, which follow from numbers
    alone; it is given None for a large one."""
    tracer = recording()
    node = _node_of(tracer, _inner(tensor)) if tracer is not None else tensor
    with torch.no_grad(), torch.random.fork_rng(devices=()), _disable_current_modes():
        if tracer is not None and isinstance(node, fx.Node):
            return then(_values(tracer, node))
        known = not isinstance(tensor, FunctionalTensor) and not tensor.is_meta
        return then(tensor.detach() if known else None)


def _values(tracer: proxy_tensor.PythonKeyTracer, node: fx.Node) -> torch.Tensor | None:
    """Of a node, by the graph up to it; outside of all modes."""
    needed, queue = {node}, [node]
    while queue:
        fresh = [n for n in queue.pop().all_input_nodes if n not in needed]
        needed.update(fresh)
        queue += fresh
    values: dict[fx.Node, Any] = {}
    for each in (n for n in tracer.graph.nodes if n in needed):
        made = each.meta.get("val")
        if isinstance(made, torch.Tensor) and made.numel() > _MOST_VALUES:
            return None
        args, kwargs = fx.map_arg((each.args, each.kwargs), values.__getitem__)
        if each.op == "get_attr":
            values[each] = operator.attrgetter(each.target)(tracer.root)
        else:
            values[each] = each.target(*args, **kwargs)
    result: torch.Tensor = values[node]
    return result


def recorded(
    tracer: proxy_tensor.PythonKeyTracer,
    op: torch._ops.OpOverload,
    lists: Sequence[Sequence[torch.Tensor]],
    text: str,
    types: Sequence[tuple[str, tuple[int, ...]]],
) -> list[torch.Tensor]:
    """A node ``op(*lists, text)`` in the graph that is recorded, and tensors for the list that it gives.

    lists: of tensors of the trace; what they are is not changed. types: (dtype, sizes) per result. No mode
    sees the op, and autograd does not either.
    """
    functional = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FUNCTIONAL)
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        inner = [[_inner(t) for t in tensors] for tensors in lists]
        known = [[_node_of(tracer, t) for t in tensors] for tensors in inner]
        first = inner[0][0]
        assert isinstance(first, FakeTensor)
        # what the tracer's own way notes of the arguments for a code generator takes longer than all the rest
        create = partial(fx.Tracer.create_node, tracer, "call_function")
        node = create(op, (*known, text), {}, name=op._opname)
        new = [_like(first, getattr(torch, dtype), sizes) for dtype, sizes in types]
        node.meta["val"] = new
        for position, tensor in enumerate(new):
            each = create(operator.getitem, (node, position), {})
            each.meta["val"] = tensor
            slot = proxy_tensor._ProxyTensor(tracer.proxy(each), None)
            proxy_tensor.set_proxy_slot(tensor, tracer, slot)
        # as `FunctionalTensor.to_functional` does for what has no gradient
        return [FunctionalTensor(torch._to_functional_tensor(t), functional) for t in new]


def _like(first: FakeTensor, dtype: torch.dtype, sizes: tuple[int, ...]) -> FakeTensor:
    """A new tensor beside another one; outside of all modes."""
    return FakeTensor(first.fake_mode, torch.empty(sizes, dtype=dtype, device="meta"), first.device)


def _placeholder(tracer: proxy_tensor.PythonKeyTracer, name: str, tensor: torch.Tensor) -> None:
    """An argument of the graph, and ``tensor`` from now on its value."""
    proxy = tracer.create_proxy("placeholder", name, (), {})
    with proxy_tensor.disable_proxy_modes_tracing():
        proxy_tensor.track_tensor_tree(tensor, proxy, constant=None, tracer=tracer)


def _tangents(
    tracer: proxy_tensor.PythonKeyTracer, outs: Sequence[torch.Tensor], mode: FakeTensorMode
) -> dict[torch.Tensor, torch.Tensor]:
    """New arguments of the graph, laid out like the outputs that they are the gradients of.

    Returns the functional tensor of each.
    """
    *_, last = (n for n in tracer.graph.nodes if n.op == "placeholder")
    tangents: dict[torch.Tensor, torch.Tensor] = {}
    for number, out in enumerate(outs):
        like = _inner(out)
        with _disable_current_modes(), mode:
            tangent = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
        with tracer.graph.inserting_after(last):
            _placeholder(tracer, f"tangents_{number + 1}", tangent)
        last = last.next
        last.meta["partitioner_tag"] = BACKWARD
        tangents[tangent] = FunctionalTensor.to_functional(tangent)
    return tangents


def _gradients(
    outs: Sequence[torch.Tensor],
    given: Sequence[torch.Tensor],
    wanted: Sequence[torch.Tensor],
    tangents: Sequence[torch.Tensor],
) -> Sequence[torch.Tensor | None]:
    nodes = _number_nodes([t.grad_fn for t in outs if t.grad_fn is not None])
    known = {id(t) for t in given}
    for leaf in (cast(Any, n).variable for n in nodes if hasattr(n, "variable")):
        # a tensor of the run that the code itself has made a leaf has a gradient that nobody asks for
        if id(leaf) not in known and not depends_on_arguments(leaf):
            raise CaptureError(
                f"a tensor of shape {list(leaf.shape)} has a gradient and is no parameter of the model",
                why="forward uses it, and a program computes gradients of parameters and inputs alone",
                hint="register it (nn.Parameter, or a submodule that is an attribute), or use it under "
                "torch.no_grad()",
            )
    # anomaly mode asks for values, which there are none of
    with fx_traceback.preserve_node_meta(), torch.autograd.set_detect_anomaly(False):
        fx_traceback.get_current_meta()["partitioner_tag"] = BACKWARD
        return torch.autograd.grad(outs, wanted, grad_outputs=tangents, allow_unused=True)


def _number_nodes(roots: Sequence[torch.autograd.graph.Node]) -> set[torch.autograd.graph.Node]:
    """All nodes of autograd's graph; what each does carries the number of the forward op that made it."""
    seen, queue = set(roots), list(roots)
    while queue:
        node = queue.pop()
        number = node._sequence_nr()
        node.register_prehook(_entering(number))
        node.register_hook(_leaving)
        for after, _ in node.next_functions:
            if after is not None and after not in seen:
                seen.add(after)
                queue.append(after)
    return seen


def _entering(number: int) -> Callable[[Any], None]:
    def enter(grads: Any) -> None:
        fx_traceback.set_stack_trace([])
        fx_traceback.set_grad_fn_seq_nr(number)

    return enter


def _leaving(inputs: Any, grads: Any) -> None:
    # what comes between two nodes adds up gradients: of no forward op
    fx_traceback.set_stack_trace([fx_traceback.GRADIENT_ACC_SPECIAL_STACK])
    fx_traceback.reset_grad_fn_seq_nr()


def _is_changed(new: torch.Tensor, old: torch.Tensor) -> bool:
    """Whether an argument was changed in place, its values or how they lie.

    new: the functional tensor made from ``old``.
    """
    wrapped = new.elem  # type: ignore[attr-defined]
    if torch._functionalize_has_data_mutation(wrapped):  # type: ignore[attr-defined]
        return True
    after = torch._from_functional_tensor(wrapped)
    moved = torch._functionalize_was_storage_changed(wrapped)
    if moved and after.untyped_storage()._cdata != old.untyped_storage()._cdata:
        return True
    return torch._functionalize_has_metadata_mutation(wrapped) and _lies(after) != _lies(old)


def _lies(tensor: torch.Tensor) -> tuple[object, ...]:
    """Where the elements of a tensor are in its memory."""
    return tensor.shape, tensor.stride(), tensor.storage_offset()


def _sync(tensor: torch.Tensor) -> None:
    """Bring a functional tensor up to date with what was written to its views."""
    cast(Any, torch)._sync(tensor)


def _inner(tensor: torch.Tensor) -> torch.Tensor:
    """The fake tensor behind a functional one."""
    if not isinstance(tensor, FunctionalTensor):
        return tensor
    _sync(tensor)
    return torch._from_functional_tensor(tensor.elem)


def _proxy_of(tracer: proxy_tensor.PythonKeyTracer, tensor: torch.Tensor) -> Any:
    slot: Any = proxy_tensor.get_proxy_slot(tensor, tracer, tensor, lambda result: result.proxy)
    return slot


def _node_of(tracer: proxy_tensor.PythonKeyTracer, tensor: torch.Tensor) -> Any:
    proxy = _proxy_of(tracer, tensor)
    return proxy.node if isinstance(proxy, fx.Proxy) else proxy


def _copy_to_backward(graph: fx.Graph) -> None:
    """Give nodes of the backward the ``custom`` metadata of the forward op whose gradient they compute."""
    forward: dict[int, fx.Node] = {}
    for node in graph.nodes:
        number = node.meta.get("seq_nr")
        if number is None:
            continue
        if node.meta.get("partitioner_tag") != BACKWARD:
            forward.setdefault(number, node)
        elif node.op != "placeholder" and number in forward and not node.meta.get("is_gradient_acc"):
            custom = forward[number].meta.get("custom")
            if custom is not None:
                node.meta["custom"] = {**node.meta.get("custom", {}), **custom}


def _drop_tokens(graph: fx.Graph) -> None:
    """Take out the arguments that torch gives a backward for what its forward does beside its results, as
    checking that a matrix can be inverted, where nothing is left of that."""
    for node in graph.find_nodes(op="placeholder"):
        if not _GIVEN.fullmatch(str(node.target)) and not node.users:
            graph.erase_node(node)


@contextmanager
def _without_users_hooks() -> Iterator[None]:
    """Hooks on tensors saved for the backward are for a run, not for a graph."""
    before = torch._C._autograd._saved_tensors_hooks_set_tracing(True)
    try:
        yield
    finally:
        torch._C._autograd._saved_tensors_hooks_set_tracing(before)
