"""What a trace runs in: fake tensors, the compiling state, model code without its runtime, marks on nodes.

Leans on private interfaces: the fake tensor mode, ``torch.compiler._is_compiling_flag``, the node metadata
of ``torch.fx.traceback`` and the insides of ``torch.utils.checkpoint`` and ``nn.Transformer``. Tried on torch
2.11 and 2.13; 2.11 loses the marks of some nodes, so that it folds fewer layers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.fx.traceback as fx_traceback
import torch.utils.checkpoint
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from autoshard.capture.joint_trace import BACKWARD, Traced, trace_once
from autoshard.errors import CaptureError
from autoshard.torch_adapters.replaced import replaced

#: key of our mark in the ``custom`` metadata of a node
MARK = "autoshard"
#: what torch raises where a shape depends on values
DYNAMIC_SHAPE: tuple[type[Exception], ...] = (DynamicOutputShapeException,)


def is_data_dependent(error: Exception) -> bool:
    """Whether Python code asked for a value that only a run can give."""
    if isinstance(error, (DataDependentOutputException, GuardOnDataDependentSymNode)):
        return True
    # what `tolist` of a tensor that is functionalised raises (torch 2.11 to 2.13)
    return isinstance(error, RuntimeError) and "its data is not allocated yet" in str(error)


def trace_joint(
    fn: Callable[..., tuple[torch.Tensor, ...]], args: Sequence[torch.Tensor], mode: FakeTensorMode
) -> Traced:
    """``joint_trace.trace_once`` without stack traces on nodes (ours are cheaper) and without torch's log."""
    with _quiet_fx(), _quiet_log():
        return trace_once(fn, args, mode)


def fake_mode() -> FakeTensorMode:
    """Tensors without data; real tensors that the code brings along are taken as constants."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def fake_like(tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    """A fake CPU tensor with the shape, strides, type and requires_grad of ``tensor``, a leaf."""
    with mode:
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    return fake.requires_grad_(tensor.requires_grad)


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether a tensor wraps others (DTensor, quantised and nested tensors)."""
    return is_traceable_wrapper_subclass(tensor)


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no data because it was made for tracing."""
    return isinstance(tensor, FakeTensor)


def constant_of(value: object) -> torch.Tensor | None:
    """The real tensor behind an attribute of a traced graph, or None."""
    if isinstance(value, FakeTensor):
        return value.constant
    return value if isinstance(value, torch.Tensor) else None


@contextmanager
def compiling() -> Iterator[None]:
    """Make ``torch.compiler.is_compiling()`` true, so that models skip checks of values.

    The exporting flag stays off: under it models build masks they would not need, since an exported
    program must serve other shapes; a captured one is of fixed shape.
    """
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


@contextmanager
def _quiet_fx() -> Iterator[None]:
    """No stack traces on nodes: ours are cheaper. torch 2.11 cannot do without."""
    config = cast(Any, torch.fx.config)
    if not hasattr(config, "do_not_emit_stack_traces"):
        yield
        return
    before = config.do_not_emit_stack_traces
    config.do_not_emit_stack_traces = True
    try:
        yield
    finally:
        config.do_not_emit_stack_traces = before


@contextmanager
def _quiet_log() -> Iterator[None]:
    """What fails on fake tensors is reported as an error of ours."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


@dataclass(frozen=True)
class _DirectCall:
    """Stands in for the autograd function of reentrant checkpoints. hooked: see `plain_model_code`."""

    hooked: str

    def apply(self, function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        if not any(isinstance(x, torch.Tensor) and x.requires_grad for x in args):
            with torch.no_grad():  # nothing leads back into it, to its parameters neither
                return function(*args)
        if self.hooked and torch.is_grad_enabled():
            raise CaptureError(
                f"{self.hooked} has a hook on its gradient, and the model uses reentrant checkpoints",
                why="each of them runs a backward of its own, so that a gradient may arrive in several parts "
                "and the hook run for each; a program gives it whole",
                hint="checkpoint(..., use_reentrant=False), or remove the hook",
            )
        return function(*args)


def _keep_all(*args: Any, **kwargs: Any) -> Iterator[None]:
    """Stands in for the context of other checkpoints."""
    yield


def _said_to_be_causal(mask: object, is_causal: bool | None = None, size: int | None = None) -> bool:
    """Stands in for the comparison of a mask with the causal one: a hint that changes no result."""
    return bool(is_causal)


@contextmanager
def _no_mkldnn() -> Iterator[None]:
    """Without the public ``torch.backends.mkldnn.flags``, which warns about unrelated settings."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


@contextmanager
def plain_model_code(hooked: str = "") -> Iterator[None]:
    """Take out what the code of a model asks of the runtime, not of the mathematics.

    ``torch.utils.checkpoint`` runs its function once (what is recomputed is decided by plans), recurrent
    layers are written out rather than given to a CPU library, ``nn.Transformer`` uses the mask it is given
    without looking whether it is the causal one, and autograd records no Python stacks.

    hooked: a parameter with a hook on its gradient, if there is one: it bars reentrant checkpoints.
    """
    module = torch.utils.checkpoint
    with (
        replaced(torch.nn.modules.transformer, "_detect_is_causal_mask", _said_to_be_causal),
        replaced(module, "CheckpointFunction", _DirectCall(hooked)),
        replaced(module, "_checkpoint_without_reentrant_generator", _keep_all),
        _no_mkldnn(),
        torch.autograd.set_detect_anomaly(False),
    ):
        yield


def mark(number: int) -> None:
    """Put ``number`` on all nodes traced from now on; it is copied to their backward nodes."""
    fx_traceback.get_current_meta()["custom"] = {MARK: number}


def unmark() -> None:
    """End the effect of ``mark``."""
    fx_traceback.get_current_meta().pop("custom", None)


def mark_of(node: torch.fx.Node) -> int | None:
    """The number that ``mark`` put on a node."""
    custom = node.meta.get("custom")
    return custom.get(MARK) if custom else None


def is_tagged_backward(node: torch.fx.Node) -> bool:
    """Whether a node was traced while gradients were computed."""
    return node.meta.get("partitioner_tag") == BACKWARD
