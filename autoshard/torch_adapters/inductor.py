"""Inductor, torch's compiler of FX graphs, for a function of ops that makes no use of Python state.

Leans on ``compile_fx_inner``, which takes a list that it empties (so that each argument lives until its last
use) and adds no wrappers per call, on what torch's ``compile_fx`` does to a graph before that, on where
Inductor keeps its cache, on what `torch.compiler` saves of it, and on the functionalization of
``torch.func``. Tried on torch 2.11 and 2.13.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch.utils._filelock import FileLock

#: takes a list of tensors, which is empty afterwards
Compiled: TypeAlias = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]
#: of an output: shape, strides, and the first of the inputs and outputs before it that has its memory
Form: TypeAlias = "tuple[tuple[int, ...], tuple[int, ...], int | None]"

_NO_OPS: Mapping[Any, Any] = MappingProxyType({})


def compile_function(
    function: Callable[..., tuple[torch.Tensor, ...]],
    inputs: Sequence[torch.Tensor],
    kept: Path | None = None,
    made_of: Mapping[Any, Callable[..., Any]] = _NO_OPS,
) -> tuple[Compiled, list[Form]]:
    """(machine code of a function for inputs of these types, shapes and strides; the forms of its outputs).

    kept: a folder of compiled graphs, one file each under a hash of the graph, of torch and of the device.
    made_of: op -> what makes it of ops that Inductor knows. Outputs have the strides that the function gives
    them. What Inductor raises is raised as it is.
    """
    from torch._guards import TracingContext, tracing
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes
    from torch._inductor.virtualized import V
    from torch.fx.experimental.proxy_tensor import make_fx

    plain = torch.func.functionalize(function, remove="mutations")
    with torch.no_grad():
        traced = make_fx(
            plain, decomposition_table={**select_decomp_table(), **made_of}, tracing_mode="fake"
        )(*inputs)
        fakes = [n.meta["val"] for n in traced.graph.find_nodes(op="placeholder")]
        (end,) = traced.graph.find_nodes(op="output")
        outs = [n.meta["val"] for n in end.args[0]]
        forms = forms_of(fakes, outs)
        mode = (fakes or outs)[0].fake_mode
        # without a tracing context Inductor caches no graph
        with V.set_fake_mode(mode), tracing(TracingContext(mode)):
            joint_graph_passes(traced)
            (end,) = traced.graph.find_nodes(op="output")
            # outputs keep their strides: what comes after may take views of them
            end.meta["user_visible_output_idxs"] = list(range(len(outs)))
            traced.recompile()
            key = _key(traced, fakes)
            with _alone(key), _stored_in(None if kept is None else kept / key):
                call: Any = compile_fx_inner(traced, fakes, is_inference=True)
    return call, forms


def _key(traced: torch.fx.GraphModule, inputs: Sequence[torch.Tensor]) -> str:
    """A hash of a graph, of torch and of the kind of device."""
    forms = [(str(x.dtype), tuple(x.shape), x.stride(), str(x.device)) for x in inputs]
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return hashlib.sha256(f"{traced.graph} {forms} {torch.__version__} {device}".encode()).hexdigest()


@contextmanager
def _stored_in(file: Path | None) -> Iterator[None]:
    """Inductor finds in its cache what a file has of a graph; what it compiles is written there."""
    from torch.compiler._cache import CacheArtifactManager

    if file is None:
        yield
        return
    if file.is_file():
        torch.compiler.load_cache_artifacts(file.read_bytes())
    with CacheArtifactManager.with_fresh_cache():
        yield
        new = None if file.is_file() else torch.compiler.save_cache_artifacts()
    if new is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=file.parent)
        with os.fdopen(handle, "wb") as out:
            out.write(new[0])
        os.replace(name, file)


@contextmanager
def _alone(key: str) -> Iterator[None]:
    """Of the processes of a machine that compile the same graph at the same time, one goes first; the others
    find what it made in Inductor's cache."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    folder = Path(cache_dir()) / "autoshard-locks"
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(str(folder / key)):
        yield


def forms_of(inputs: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]) -> list[Form]:
    """The forms of outputs."""
    memory: dict[int, int] = {}
    for number, x in enumerate(inputs):
        memory.setdefault(x.untyped_storage()._cdata, number)
    result: list[Form] = []
    for number, x in enumerate(outs, len(inputs)):
        first = memory.setdefault(x.untyped_storage()._cdata, number)
        result.append((tuple(x.shape), tuple(x.stride()), first if first < number else None))
    return result
