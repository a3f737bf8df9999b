"""The captured model: one graph of forward and backward, and what its ends mean."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from autoshard.ir.body import NONE_AWAY, Away, Body
from autoshard.ir.graph import Graph
from autoshard.ir.types import TensorType

PortKind = Literal["param", "buffer", "input", "tangent", "const"]
#: a leaf of the output
NOT_MADE = ("not made", "")
ResultKind = Literal["output", "grad", "input_grad", "buffer"]


@dataclass(frozen=True, slots=True)
class Port:
    """One input of the joint graph.

    name: the value's name in the graph.
    kind: ``param`` and ``buffer`` (target: the module's own name; tied parameters have one port under
        their first name), ``input`` (target: position among the flattened call arguments, as text),
        ``tangent`` (target: position of the output it belongs to), ``const`` (target: key in constants).
    stored: element type in which a parameter is stored that the graph takes in a narrower one; else "".
    """

    name: str
    kind: PortKind
    target: str
    type: TensorType
    stored: str = ""

    @property
    def stored_dtype(self) -> str:
        """Element type that the model and its optimizer have."""
        return self.stored or self.type.dtype


@dataclass(frozen=True, slots=True)
class Result:
    """One output of the joint graph.

    value: name of the value in the graph.
    kind, target: ``output`` (position among the flattened outputs of the model), ``grad`` (parameter
        name), ``input_grad`` (position of the input), ``buffer`` (new value of that buffer).
    """

    value: str
    kind: ResultKind
    target: str


@dataclass(frozen=True)
class Joint:
    """A captured model.

    graph: functional, forward nodes before backward nodes. A call of a repeated layer is one node there (see
        `capture.expand_repeats`, which writes them out). bodies, away: of those layers; the gradients of
        parameters that are away are among the results once layers are written out.
    in_tree: JSON text of the pytree of ``(args, kwargs)``.
    in_leaves: for each flattened call argument ``("tensor", "")`` or ``("static", repr)``: a
        non-tensor argument is fixed at capture.
    out_tree: JSON text of the pytree of the model's output.
    out_leaves: for each flattened output ``("tensor", "grad")`` if the model's own run would have a gradient
        for it, ``("tensor", "")`` if not, ``("static", repr)`` (None, numbers), `NOT_MADE` for a tensor that
        never exists for all tokens (`passes.memory.tile_rows`).
    input_names: for each flattened call argument its path, for messages (``input_ids``, ``args[0]``).
    tied: alias parameter name -> the name its port has.
    frozen: names of parameters without gradient.
    constants: tensors that the model's code made from Python data (port target -> torch.Tensor).
    batch_inputs: targets of input ports whose dim 0 is the batch.
    captured_state: what the model's Python code read, for calls to compare
    (`capture.python_state.captured_state`).
    apart: value of a port -> what layers must agree in to be one segment, besides their ops: how their
        parameters are sharded already.
    """

    graph: Graph
    ports: tuple[Port, ...]
    results: tuple[Result, ...]
    in_tree: str
    in_leaves: tuple[tuple[str, str], ...]
    out_tree: str
    out_leaves: tuple[tuple[str, str], ...]
    input_names: tuple[str, ...]
    tied: tuple[tuple[str, str], ...] = ()
    frozen: tuple[str, ...] = ()
    constants: dict[str, object] = field(default_factory=dict, compare=False, hash=False)
    batch_inputs: tuple[str, ...] = ()
    training: bool = True
    bodies: tuple[Body, ...] = ()
    away: Away = field(default_factory=lambda: NONE_AWAY, hash=False)
    captured_state: Any = field(default=None, compare=False, hash=False, repr=False)
    apart: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def sequences(self) -> int:
        """The batch that the model was captured with; 1 if no input has one."""
        inputs = (p for p in self.ports if p.kind == "input" and p.target in self.batch_inputs)
        return next((p.type.shape[0] for p in inputs), 1)
