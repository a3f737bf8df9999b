"""Layers that repeat are traced once, however deep the model is.

Numbered siblings (``layers.0``, ``layers.1``, ...) are taken as repeats of one another only if that is
certain: the same classes, sizes, types, training flags and attributes all the way down, no hooks of the
user's, and called with arguments of the same types, under the model's own modes (autocast, grad mode,
function modes), with the globals, context variables and outer attributes that the first one was called with.
Numbers in which they differ (``layer_idx``) are replaced, while the one layer is traced, by something that
cannot be used: a layer that looks at its number is no repeat. Whatever is not certain makes the full model
be traced as it stands.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType, MethodType
from typing import Any, NoReturn, TypeAlias

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autoshard.capture.python_state.captured_state import StateWatch
from autoshard.capture.repeat_op import RepeatKey, repeated
from autoshard.ir import Joint
from autoshard.ir.body import Body
from autoshard.ops.lift import Lifter
from autoshard.torch_adapters.modes import ambient_modes

#: fewer siblings are not worth it
LEAST = 3
_SIMPLE = (type(None), bool, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, type)
_OWN = frozenset({"_parameters", "_buffers", "_modules", "training"})


class NotRepeated(Exception):
    """Something about the layers is not certain."""


class NotApart(NotRepeated):
    """A parameter of a layer has other uses than one call of it."""


class _Differs:
    """Stands for a number in which repeated layers differ: any use of it ends the attempt."""

    def _used(self, *args: object) -> NoReturn:
        raise NotRepeated("a layer uses a number that differs between layers")

    __bool__ = __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __hash__ = _used
    __int__ = __index__ = __float__ = __str__ = __format__ = __len__ = __iter__ = _used
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __rmod__ = _used
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __pow__ = __neg__ = __and__ = __or__ = _used


@dataclass
class SiblingGroup:
    """Siblings that look the same. differing: (path inside a sibling, attribute) of numbers that differ."""

    number: int
    members: list[nn.Module]
    differing: list[tuple[str, str]]

    def hide_differences(self) -> None:
        """Make the numbers in which the first member differs from the others unusable."""
        for path, name in self.differing:
            self.members[0].get_submodule(path).__dict__[name] = _Differs()


def find_groups(model: nn.Module) -> list[SiblingGroup]:
    """Groups of repeated layers, outermost first; none inside another."""
    groups: list[SiblingGroup] = []
    _search(model, groups)
    return groups


def _search(module: nn.Module, groups: list[SiblingGroup]) -> None:
    alike: dict[Hashable, list[nn.Module]] = {}
    for name, child in module._modules.items():
        if child is not None:
            key = _shape(child) if name.isdigit() else id(child)
            alike.setdefault(key, []).append(child)
    for members in alike.values():
        if len({id(m) for m in members}) == len(members) >= LEAST and any(
            True for _ in members[0].parameters()
        ):
            groups.append(SiblingGroup(len(groups), members, _differing(members)))
        else:
            for member in members:
                _search(member, groups)


def _shape(module: nn.Module) -> Hashable:
    """Equal for modules that are built alike; numbers are left out (see `_differing`)."""
    if "forward" in module.__dict__:
        return id(module)  # replaced on this instance: what it does besides cannot be known
    tensors = tuple(
        (name, None if t is None else (t.shape, t.dtype, t.requires_grad))
        for table in (module._parameters, module._buffers)
        for name, t in table.items()
    )
    plain = tuple((n, _token(v)) for n, v in module.__dict__.items() if n not in _OWN and not _is_number(v))
    numbers = tuple(n for n, v in module.__dict__.items() if n not in _OWN and _is_number(v))
    children = tuple((n, None if c is None else _shape(c)) for n, c in module._modules.items())
    return type(module), module.training, tensors, plain, numbers, children


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _token(value: object) -> Hashable:
    """Equal for attributes that are the same to a forward."""
    if isinstance(value, _SIMPLE):
        return value
    if isinstance(value, tuple | list):
        return type(value), tuple(v if _is_number(v) else _token(v) for v in value)
    if isinstance(value, dict) and not value:
        return type(value)
    if isinstance(value, set | frozenset) and all(isinstance(v, str) for v in value):
        return type(value), frozenset(value)
    if isinstance(value, MethodType):
        return value.__func__, "method"
    if type(value) is partial and not value.__dict__:
        return partial, _token(value.func), _token(value.args), _token(tuple(value.keywords.items()))
    if isinstance(value, FunctionType):
        return value
    return id(value)


def _differing(members: list[nn.Module]) -> list[tuple[str, str]]:
    result = []
    trees = [dict(m.named_modules(remove_duplicate=False)) for m in members]
    for path, module in trees[0].items():
        for name, value in module.__dict__.items():
            if _is_number(value) and any(tree[path].__dict__[name] != value for tree in trees[1:]):
                result.append((path, name))
    return result


#: number of the group, structure of the arguments, what is known of them
CallKey: TypeAlias = tuple[int, str, tuple[Hashable, ...]]


@dataclass(frozen=True)
class _Call:
    """How a layer was called, and what it gave. outs: flattened output; out_types: of its tensors."""

    module: nn.Module
    group: SiblingGroup
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out_spec: pytree.TreeSpec
    outs: tuple[Any, ...]


@dataclass
class Repeats:
    """Takes the place of the forward of every repeated layer.

    While discovering, the first call of each kind runs and later ones give tensors of the same types; while
    tracing, every call is one op.

    apart: whether trained parameters are left out of these ops but for one, which says that the results have
    gradients. What a call does with them is known from the layer, and each more costs as much as an op. away:
    per call of the last run, what was left out: position among the feeds of its body -> name of the
    parameter. parameters: per layer, its own name of a parameter -> the model's.
    """

    groups: list[SiblingGroup]
    watch: StateWatch
    calls: dict[CallKey, _Call] = field(default_factory=dict)
    bodies: list[Body] = field(default_factory=list)
    numbers: dict[CallKey, int] = field(default_factory=dict)
    tracing: bool = False
    lifter: Lifter | None = None
    modes: Hashable = None
    uncast: Mapping[int, torch.Tensor] = field(default_factory=dict)
    count: int = 0
    apart: bool = True
    away: dict[int, dict[int, str]] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)
    parameters: dict[nn.Module, dict[str, str]] = field(default_factory=dict)

    def install(self, names: Mapping[tuple[int, str], str]) -> None:
        """Replace the forwards; whoever calls this puts the modules' attributes back.

        names: (identity of a module's table of parameters, key in it) -> name of the parameter.
        """
        self.watch.inner = frozenset(
            id(inner.__dict__) for g in self.groups for m in g.members for inner in m.modules()
        )
        for group in self.groups:
            for module in group.members:
                module.__dict__["forward"] = self._forward_of(module, group, module.forward)
                if module not in self.parameters:
                    self.parameters[module] = {
                        f"{path}.{key}" if path else key: names[id(inner._parameters), key]
                        for path, inner in module.named_modules(remove_duplicate=False)
                        for key, value in inner._parameters.items()
                        if value is not None
                    }

    def absent(self) -> set[str]:
        """Names of parameters that no op of a call is given, whatever its body, once bodies are traced."""
        if not (self.tracing and self.apart):
            return set()
        result: set[str] = set()
        for group in self.groups:
            bodies = [self.bodies[number] for key, number in self.numbers.items() if key[0] == group.number]
            targets = [b.away() for b in bodies]
            for module in group.members if targets else ():
                names = self.parameters[module]
                result |= {names[t] for t in set.intersection(*targets)}
        return result

    def begin(self, lifter: Lifter, uncast: Mapping[int, torch.Tensor]) -> None:
        """A run of the model starts. uncast: identity of a parameter's cast, which the model has -> it."""
        self.lifter, self.count, self.modes = lifter, 0, ambient_modes()
        self.uncast = uncast
        self.away.clear()
        self.taken.clear()

    def _forward_of(
        self, module: nn.Module, group: SiblingGroup, forward: Callable[..., Any]
    ) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            assert self.lifter is not None
            unread = dict(self.lifter.unread)
            key = _signature(group, args, kwargs)
            self.lifter.unread = unread  # the layer's body says what it reads
            if ambient_modes() != self.modes:
                raise NotRepeated("a layer runs under modes (autocast, no_grad) that the model does not")
            if self.tracing:
                return self._traced(module, key, args, kwargs)
            if any(m._forward_hooks or m._forward_pre_hooks for m in module.modules()):
                raise NotRepeated("a layer has hooks")
            if self.watch.outer_changed():
                raise NotRepeated("the model changes Python state before a layer is called")
            return self._discovered(module, group, forward, key, args, kwargs)

        return call

    def _discovered(
        self,
        module: nn.Module,
        group: SiblingGroup,
        forward: Callable[..., Any],
        key: CallKey,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        if key not in self.calls:
            before = _attributes(module), _identities(args, kwargs)
            leaves, spec = pytree.tree_flatten(forward(*args, **kwargs))
            if (_attributes(module), _identities(args, kwargs)) != before:
                raise NotRepeated("a layer keeps something of its call")
            self.calls[key] = _Call(module, group, args, kwargs, spec, tuple(leaves))
        known = self.calls[key]
        return pytree.tree_unflatten([_same_type(leaf) for leaf in known.outs], known.out_spec)

    def _traced(self, module: nn.Module, key: CallKey, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if key not in self.numbers or self.lifter is None:
            raise NotRepeated("a layer is called in a new way")
        number, known = self.numbers[key], self.calls[key]
        body = self.bodies[number]
        given, _ = pytree.tree_flatten((args, kwargs))
        passed = body.passed(apart=self.apart)
        self._leave_away(module, body, passed)
        tensors = [
            self.lifter.seed
            if port.target == "seed"
            else given[int(port.target)]
            if port.kind == "input"
            else self._parameter_or_buffer(module, port.target)
            for port in (body.feeds[k] for k in passed)
        ]
        self.lifter.reads(tensors)
        trained = {k for k, _ in body.grads}
        grads = tuple(position for position, k in enumerate(passed) if k in trained)
        new = [leaf for leaf in known.outs if isinstance(leaf, torch.Tensor)]
        outs = tuple((str(t.dtype).removeprefix("torch."), tuple(t.shape)) for t in new)
        tangents = tuple(k for k, t in enumerate(new) if t.requires_grad)
        call = RepeatKey(self.count, number, outs, grads, self.lifter.sites, tangents)
        self.count += 1
        self.lifter.sites += body.sites
        results = iter(repeated(tensors, call))
        leaves = [next(results) if isinstance(leaf, torch.Tensor) else leaf for leaf in known.outs]
        return pytree.tree_unflatten(leaves, known.out_spec)

    def _parameter_or_buffer(self, module: nn.Module, name: str) -> torch.Tensor:
        """The tensor that the full model is given: a layer has its own cast of a parameter."""
        tensor = _tensor_at(module, name)
        return self.uncast.get(id(tensor), tensor)

    def _leave_away(self, module: nn.Module, body: Body, passed: Sequence[int]) -> None:
        """Note what this call is not given."""
        names = self.parameters[module]
        here = {k: names[body.feeds[k].target] for k in set(range(len(body.feeds))) - set(passed)}
        names_here = set(here.values())
        if len(names_here) < len(here) or names_here & self.taken:
            raise NotApart("a parameter is used by two calls")
        self.taken |= names_here
        self.away[self.count] = here

    def trace_bodies(self, capture: Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Joint]) -> None:
        """Trace every kind of layer call that was met; modules must have their own forwards again."""
        for key, call in self.calls.items():
            call.group.hide_differences()
            first = call.group.members[0]
            joint = capture(first, *pytree.tree_map(_without_data, (call.args, call.kwargs)))
            self.numbers[key] = len(self.bodies)
            self.bodies.append(_body(joint, call))
        self.tracing = True


def _tensor_at(module: nn.Module, name: str) -> torch.Tensor:
    """A parameter or buffer by its dotted name."""
    path, _, key = name.rpartition(".")
    inner = module.get_submodule(path)
    result = inner._parameters[key] if key in inner._parameters else inner._buffers[key]
    assert result is not None
    return result


def _attributes(module: nn.Module) -> list[dict[str, int]]:
    """Identities of everything that the modules hold: a forward must leave them alone."""
    return [
        {name: id(value) for table in (m.__dict__, m._buffers) for name, value in table.items()}
        for m in module.modules()
    ]


def _identities(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[int], str]:
    """Which objects a call was given: a layer that puts results into a list changes them."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    return [id(leaf) for leaf in leaves], str(spec)


def _same_type(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return torch.empty_like(leaf).requires_grad_(leaf.requires_grad)


def _without_data(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    plain = torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")
    return plain.requires_grad_(leaf.requires_grad)


def _signature(group: SiblingGroup, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallKey:
    """What a call's graph can depend on: types of tensors, which are the same one, all other values."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    seen: dict[int, int] = {}
    result: list[Hashable] = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            same = seen.setdefault(id(leaf), len(seen))
            result.append((leaf.shape, leaf.dtype, leaf.requires_grad, same))
        elif isinstance(leaf, (*_SIMPLE, int)):
            result.append((type(leaf), leaf))
        else:
            raise NotRepeated(f"a layer is given a {type(leaf).__name__}")
    return group.number, str(spec), tuple(result)


def _body(joint: Joint, call: _Call) -> Body:
    """The parts of a layer's joint graph that calls refer to."""
    if any(r.kind == "buffer" for r in joint.results):
        raise NotRepeated("a layer changes its buffers")
    feeds = tuple(p for p in joint.ports if p.kind in ("param", "buffer", "input"))
    tensors = [k for k, leaf in enumerate(call.outs) if isinstance(leaf, torch.Tensor)]
    outputs = {int(r.target): r.value for r in joint.results if r.kind == "output"}
    tangents = {int(p.target): p.name for p in joint.ports if p.kind == "tangent"}
    trained = [k for k in tensors if call.outs[k].requires_grad]
    if sorted(outputs) != tensors or sorted(tangents) != trained:
        raise NotRepeated("a layer on its own has other outputs, or gradients of others")
    position: dict[tuple[str, str], int] = {(p.kind, p.target): k for k, p in enumerate(feeds)}
    kinds = {"grad": "param", "input_grad": "input"}
    grads = sorted((position[kinds[r.kind], r.target], r.value) for r in joint.results if r.kind in kinds)
    sites = {n.args[3] for n in joint.graph.nodes if n.op == "autoshard.dropout.default"}
    return Body(
        joint,
        feeds,
        tuple(outputs[k] for k in tensors),
        tuple(tangents[k] for k in trained),
        tuple(grads),
        max(sites, default=-1) + 1,
    )
