"""Runs a captured graph on real tensors: the reference that nothing of autoshard's own runtime is part of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autoshard.ir import DTYPES, Arg, Dtype, Joint, Ref
from autoshard.passes.simplify.fold_repeats import flat


def evaluate(
    joint: Joint,
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    seed: int = 0,
) -> dict[tuple[str, str], torch.Tensor]:
    """``(kind, target) -> value`` of every result; tangents are ones. The model is not changed."""
    joint = flat(joint)
    leaves = pytree.tree_leaves((args, dict(kwargs or {})))
    params = dict(model.named_parameters())
    buffers = dict(model.named_buffers(remove_duplicate=False))
    env: dict[str, Any] = {}
    for port in joint.ports:
        if port.kind == "param":
            env[port.name] = params[port.target].detach()
        elif port.kind == "buffer":
            env[port.name] = buffers[port.target].detach()
        elif port.kind == "const":
            env[port.name] = joint.constants[port.target]
        elif port.kind == "tangent":
            env[port.name] = torch.ones(port.type.shape, dtype=_dtype(port.type.dtype))
        elif port.target == "seed":
            env[port.name] = torch.tensor(seed)
        else:
            env[port.name] = leaves[int(port.target)].detach()
        value = env[port.name]
        assert (tuple(value.shape), value.dtype) == (port.type.shape, _dtype(port.type.dtype)), port
    with torch.no_grad():
        for node in joint.graph.nodes:
            _run(node, env)
    return {(r.kind, r.target): env[r.value] for r in joint.results}


def _run(node: Any, env: dict[str, Any]) -> None:
    namespace, name, overload = node.op.split(".")
    op = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    out = op(*[_value(a, env) for a in node.args], **{k: _value(v, env) for k, v in node.kwargs})
    outs = [out] if isinstance(out, torch.Tensor) else list(out)
    for key, value, type_ in zip(node.outs, outs, node.types, strict=True):
        env[key] = value
        if type_ is not None:
            found = (tuple(value.shape), value.dtype)
            shape = type_.shape if type_.filled is None else (len(value), *type_.shape[1:])
            assert found == (shape, _dtype(type_.dtype)), (node, found)


def _value(arg: Arg, env: Mapping[str, Any]) -> Any:
    if isinstance(arg, Ref):
        return env[arg.name]
    if isinstance(arg, Dtype):
        return _dtype(arg.name)
    if isinstance(arg, tuple):
        return [_value(a, env) for a in arg]
    return arg


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, DTYPES[name][0])
    assert isinstance(dtype, torch.dtype)
    return dtype
