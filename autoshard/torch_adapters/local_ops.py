"""DTensors whose elementwise methods go straight to the local part.

What torch's optimizers do on the CPU is some eight elementwise methods per parameter, each of which costs a
DTensor more in its dispatch than the work on a small shard does. Where all that takes part lies alike, the
result of an elementwise op lies like that, too, and nothing has to be found out.

Leans on the private ``DTensor._local_tensor`` and ``_spec``, on its constructor, and on
``__torch_dispatch__`` as it is since torch 2.13, which lets a subclass delegate. Tried on torch 2.13; plain
DTensors stay what they are on others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor
from torch.torch_version import TorchVersion

from autoshard.torch_adapters.dtensor import Spec, dtensor_of

#: in place: the result has the type of the first operand whatever it is combined with
_IN_PLACE = (
    *("add_", "sub_", "mul_", "div_", "lerp_", "addcmul_", "addcdiv_", "sqrt_", "neg_", "sign_", "abs_"),
    *("__iadd__", "__isub__", "__imul__", "__itruediv__"),
)
_OUT_OF_PLACE = (
    *("add", "sub", "mul", "div", "lerp", "addcmul", "addcdiv", "sqrt", "neg", "sign", "abs"),
    *("__add__", "__sub__", "__mul__", "__truediv__", "__neg__"),
)
#: ops whose result is one of these as well
_KEPT = frozenset(getattr(torch.ops.aten, name).default for name in ("zeros_like", "empty_like", "clone"))
_DETACH = torch.ops.aten.detach.default
_DELEGATES = TorchVersion(torch.__version__) >= "2.13"

Method = Callable[..., Any]


def _locals(spec: Spec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any] | None:
    """The local parts of operands that lie as ``spec`` says, and numbers; None if there is something else."""
    if kwargs and not all(type(x) in (int, float) for x in kwargs.values()):
        return None
    found: list[Any] = []
    for arg in args:
        kind = type(arg)
        if kind is LocalDTensor and (arg._spec is spec or arg._spec == spec):
            found.append(arg._local_tensor)
        elif kind is float or kind is int:
            found.append(arg)
        else:
            return None
    return found


def _in_place(plain: Method) -> Method:
    def method(self: LocalDTensor, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            given = _locals(self._spec, args, kwargs)
            if given is not None:
                plain(self._local_tensor, *given, **kwargs)
                increment_version(self)
                return self
        return plain(self, *args, **kwargs)

    return method


def _out_of_place(plain: Method) -> Method:
    def method(self: LocalDTensor, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            spec = self._spec
            given = _locals(spec, args, kwargs)
            if given is not None:
                made = plain(self._local_tensor, *given, **kwargs)
                if made.dtype == self._local_tensor.dtype:
                    return LocalDTensor(made, spec, requires_grad=False)
        return plain(self, *args, **kwargs)

    return method


def _equipped(kind: type[DTensor]) -> type[DTensor]:
    """The class with its elementwise methods."""
    for names, wrap in ((_IN_PLACE, _in_place), (_OUT_OF_PLACE, _out_of_place)):
        for name in names:
            setattr(kind, name, wrap(getattr(torch.Tensor, name)))
    return kind


@_equipped
class LocalDTensor(DTensor):
    """A DTensor whose elementwise methods take less time; of shards and replicas, never of partial sums.

    Only while no gradients are recorded, and only with others of its kind that lie alike, and numbers:
    everything else is left to DTensor. Copies to a file, another process or by `copy` are plain DTensors.
    """

    __slots__ = ()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: what DTensor does here takes longer than most of what is saved."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = DTensor(self._local_tensor, self._spec, requires_grad=self.requires_grad)
        return plain.__reduce_ex__(protocol)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own class methods are typed as instance methods
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is _DETACH and type(args[0]) is LocalDTensor:  # autograd's, for every gradient
            return LocalDTensor(args[0]._local_tensor.detach(), args[0]._spec, requires_grad=False)
        out = super().__torch_dispatch__(func, types, args, kwargs or {})
        if func in _KEPT and type(out) is DTensor and isinstance(args[0], LocalDTensor):
            spec = args[0]._spec
            # one object for all that lie alike, which is quickest to compare
            return LocalDTensor(
                out._local_tensor, spec if out._spec == spec else out._spec, requires_grad=out.requires_grad
            )
        return out


def quick_of(local: torch.Tensor, spec: Spec) -> DTensor:
    """As `dtensor_of`, with quick elementwise methods on the CPU, where torch's optimizers use them.

    spec: of shards and replicas.
    """
    if not _DELEGATES or local.device.type != "cpu":
        return dtensor_of(local, spec)
    return LocalDTensor(local.view_as(local), spec, requires_grad=False)
