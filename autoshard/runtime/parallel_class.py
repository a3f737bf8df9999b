"""The class of a parallel model, and the model as the user built it, for a capture."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from autoshard.capture.module_snapshot import ModuleSnapshot
from autoshard.errors import UsageError
from autoshard.program.program import Signature
from autoshard.runtime.eager_calls import EagerHook
from autoshard.search.plan.plan import Plan
from autoshard.search.plan.plan_json import plan_from_json
from autoshard.torch_adapters.dtypes import torch_dtype
from autoshard.torch_adapters.hooks import drop_hooks

#: of attributes that a parallel model has, and the user's has not
_PREFIX = "_autoshard"
#: in the class of a parallel model: the user's own
_USERS = "_autoshard_class"
#: a method of transformers' models that puts other parameters in the place of embeddings
_RESIZES = "resize_token_embeddings"
#: in a parallel model: the forward that the user put on the instance
FORWARD = "_autoshard_forward"


class _SetsOnUsers(type):
    """Of the classes of parallel models: what is set on one is set on the class that the user wrote.

    ``type(model).gain = 2.0`` means that class, and captures are of models of that class.
    """

    def __setattr__(cls, name: str, value: Any) -> None:
        if _USERS in vars(cls):
            setattr(vars(cls)[_USERS], name, value)
        else:
            super().__setattr__(name, value)

    def __delattr__(cls, name: str) -> None:
        if _USERS in vars(cls):
            delattr(vars(cls)[_USERS], name)
        else:
            super().__delattr__(name)


def parallel_class(users: type, mixin: type, methods: Mapping[str, Callable[[Any], Any]]) -> type:
    """The class of parallel models of a class.

    mixin: what comes before it. methods: what is made of methods that it has.
    """
    meta = type(users)
    kind = _SetsOnUsers if meta is type else type(meta.__name__, (_SetsOnUsers, meta), {})
    names: dict[str, Any] = {"__module__": users.__module__, "forward": _signed(mixin, users)}
    if not hasattr(users, "plan"):
        names["plan"] = _PlanOfModel()
    if hasattr(users, "generate"):
        names["generate"] = _on_gathered(users.generate)
    if hasattr(users, _RESIZES):
        names[_RESIZES] = _before_sharding(getattr(users, _RESIZES))
    for name, wrap in methods.items():
        if hasattr(users, name):
            names[name] = wrap(getattr(users, name))
    new: type = kind(users.__name__, (mixin, users), names)
    type.__setattr__(new, _USERS, users)  # not before: the user's code may set something while it is made
    return new


def _signed(mixin: Any, users: Any) -> Callable[..., Any]:
    """The mixin's forward with the signature and the docstring of the user's, by which trainers choose what
    they pass."""

    @functools.wraps(users.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return mixin.forward(self, *args, **kwargs)

    return forward


class _PlanOfModel:
    """``model.plan``: the decisions of the program that ran last; a user's own attribute goes before it."""

    def __get__(self, module: Any, owner: type | None = None) -> Plan | None:
        return None if module is None else plan_from_json(module._autoshard.program.plan)


def _on_gathered(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method that calls the model many times, on parameters that are gathered once."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self._autoshard_eager.gathered(self):
            return method(self, *args, **kwargs)

    return call


def _before_sharding(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method that changes parameters' sizes if it is given one."""

    @functools.wraps(method)
    def call(self: Any, size: int | None = None, *args: Any, **kwargs: Any) -> Any:
        size = kwargs.pop("new_num_tokens", size)
        if size is not None:
            raise UsageError(
                f"{method.__name__}({size}) of a parallel model",
                why="its embeddings are sharded, and its programs are for their sizes",
                hint="resize them before the model is parallelized",
            )
        return method(self, size, *args, **kwargs)

    return call


def users_class(module: nn.Module) -> Any:
    """The class that the user wrote, of a parallel model or of another."""
    return vars(type(module)).get(_USERS, type(module))


@contextmanager
def as_built(module: nn.Module, signature: Signature) -> Iterator[nn.Module]:
    """A parallel module as the user built it, for a capture: of its own class, tensors without data.

    signature: of any of its programs. What is trained is what requires a gradient now; in a pipeline, whose
    ranks know their own parameters alone, what the signature says.
    """
    kind, staged = type(module), getattr(module, "is_pipeline", False)
    held = dict(module.named_parameters(remove_duplicate=False))
    with ModuleSnapshot.of(module):
        module.__class__ = users_class(module)
        if FORWARD in module.__dict__:
            module.__dict__["forward"] = module.__dict__[FORWARD]
        for name in [n for n in module.__dict__ if n.startswith(_PREFIX)]:
            del module.__dict__[name]
        for each in module.modules():
            drop_hooks(each, EagerHook)
        tensors: dict[str, torch.Tensor] = {}
        for port in signature.ports:
            if port.kind in ("param", "buffer"):
                x = torch.empty(port.type.shape, dtype=torch_dtype(port.stored_dtype), device="meta")
                here = None if staged else held.get(port.target)
                grad = port.target not in signature.frozen if here is None else here.requires_grad
                grad = grad and x.is_floating_point()
                tensors[port.target] = nn.Parameter(x, requires_grad=grad) if port.kind == "param" else x
        for name, target in [*((n, n) for n in tensors), *signature.tied]:
            path, _, key = name.rpartition(".")
            owner, x = module.get_submodule(path), tensors[target]
            owner.__dict__.pop(key, None)  # the shape of what another stage holds
            table: dict[str, Any] = owner._parameters if isinstance(x, nn.Parameter) else owner._buffers
            table[key] = x
        try:
            yield module
        finally:
            module.__class__ = kind
