"""A plan as Python text that uses torch's own parallelism alone: public APIs of torch 2.11 to 2.13.

The text is a module with ``apply(model, mesh)``. It is made of the parts that the plan needs and no more;
what torch cannot express stands in the text's first comment, with the reason.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field

from autoshard._version import __version__
from autoshard.cluster import Mesh
from autoshard.interop.by_module import ByModule, Example, by_module, check_order, globs, note_lines
from autoshard.interop.module_styles import Style
from autoshard.interop.units import Layers, gathering, layer_lists, recomputed
from autoshard.planner.analysis import Analysis
from autoshard.search.plan.plan import Plan

_WIDTH = 106


@dataclass(frozen=True)
class _Part:
    """A piece of the text. imports: (module, name), a name being perhaps ``as dist``.

    helpers: functions that stand before ``apply``. body: lines of ``apply``. remarks: (reason, names) that
    the reader should know.
    """

    imports: tuple[tuple[str, str], ...] = ()
    helpers: tuple[str, ...] = ()
    body: tuple[str, ...] = ()
    remarks: tuple[tuple[str, tuple[str, ...]], ...] = field(default=())


def torch_text(plan: Plan, analysis: Analysis, example: Example | None) -> tuple[str, tuple[str, ...]]:
    """(text of the Python module, remarks on what it leaves out) for a plan and the model it is for.

    Raises UsageError where torch has no way to lay out the mesh (shards outside of replicas).
    """
    result = by_module(plan, analysis, example)
    check_order(result.mesh)
    layers = layer_lists(result.params)
    parts = [
        _tensor_parallel(result),
        _recomputation(plan, analysis, layers),
        _data_parallel(plan, analysis, result, layers),
    ]
    reasons = [*note_lines(result), *((r, list(names)) for part in parts for r, names in part.remarks)]
    remarks = tuple(f"{', '.join(names)}: {reason}" if names else reason for reason, names in reasons)
    text = "\n".join(
        [*_head(plan, result.mesh, reasons), *_imports(parts), *_functions(plan, result.mesh, parts)]
    )
    return text.rstrip() + "\n", remarks


def _tensor_parallel(result: ByModule) -> _Part:
    if not result.styles:
        return _Part()
    names: set[str] = {"parallelize_module"}
    lines = []
    rows: dict[str, list[str]] = {}
    for module, style in result.styles.items():
        rows.setdefault(_style_text(style), []).append(module)
    order = list(result.styles)
    entries: dict[str, str] = {}
    for text, modules in rows.items():
        names.add(text.split("(")[0])
        entries.update(dict.fromkeys(globs(modules, result.modules), text))
    for pattern in sorted(entries, key=lambda p: order.index(_first(p, order))):
        lines.append(f'        "{pattern}": {entries[pattern]},')
    helper = "\n".join(
        [
            "def tensor_parallel_plan():",
            f'    """How modules are divided over the axis {result.axis}; each ``*`` stands for a number."""',
            "    return {",
            *lines,
            "    }",
        ]
    )
    text = "".join(lines)
    layouts = ["Replicate"] if "Replicate(" in text else []
    return _Part(
        (
            *(("torch.distributed.tensor.parallel", n) for n in sorted(names)),
            *(("torch.distributed.tensor", n) for n in layouts),
        ),
        (helper,),
        (f'parallelize_module(model, mesh["{result.axis}"], tensor_parallel_plan())',),
    )


def _first(pattern: str, names: Sequence[str]) -> str:
    """The first name that a pattern matches, word by word."""
    words = pattern.split(".")
    for name in names:
        other = name.split(".")
        if len(other) == len(words) and all(w in ("*", o) for w, o in zip(words, other, strict=True)):
            return name
    raise KeyError(pattern)


def _style_text(style: Style) -> str:
    """The call that makes torch's style."""
    if style.kind in ("columns", "table_columns"):
        return f"ColwiseParallel({'output_layouts=Replicate()' if style.gather_output else ''})"
    return f"RowwiseParallel({'input_layouts=Replicate()' if style.full_input else ''})"


def _recomputation(plan: Plan, analysis: Analysis, layers: Sequence[Layers]) -> _Part:
    result, others = recomputed(plan, analysis)
    imports: list[tuple[str, str]] = []
    helpers: list[str] = []
    body: list[str] = []
    for policy, names in result.items():
        imports += [("functools", "partial"), ("torch.utils.checkpoint", "checkpoint")]
        options = "use_reentrant=False"
        if policy == "selective":
            imports += [
                ("torch.utils.checkpoint", "CheckpointPolicy"),
                ("torch.utils.checkpoint", "create_selective_checkpoint_contexts"),
            ]
            helpers.append(_SELECTIVE)
            body.append("contexts = partial(create_selective_checkpoint_contexts, keep_products)")
            options += ", context_fn=contexts"
        for loop in _loops(names, layers):
            body += [loop, f"    layer.forward = partial(checkpoint, layer.forward, {options})"]
    why = "runs again in backward in the plan, but is no module of its own; here it is kept"
    remarks = ((why, tuple(others)),) if others else ()
    return _Part(tuple(imports), tuple(helpers), tuple(body), remarks)


_SELECTIVE = '''def keep_products(context, op, *args, **kwargs):
    """Matrix products and attention are kept for backward; what is cheap between them is computed again."""
    kept = ("mm", "addmm", "bmm", "baddbmm", "convolution", "scaled_dot_product", "flash_attention")
    found = any(word in str(op) for word in kept)
    return CheckpointPolicy.MUST_SAVE if found else CheckpointPolicy.PREFER_RECOMPUTE'''


def _data_parallel(plan: Plan, analysis: Analysis, result: ByModule, layers: Sequence[Layers]) -> _Part:
    size = dict(zip(result.mesh.names, result.mesh.sizes, strict=True))
    replicas, shards = size.get("dp", 1) > 1, size.get("fsdp", 1) > 1
    if shards:
        return _fully_sharded(plan, analysis, result, layers, replicas)
    if not replicas:
        return _Part()
    if result.axis:
        # DistributedDataParallel takes the DTensors of a divided module out of its parameters
        return _Part(
            (("torch.distributed", "as dist"), ("torch.distributed.tensor", "DTensor")),
            (_AVERAGE,),
            ('average_gradients(model, mesh["dp"])',),
        )
    return _Part(
        (("torch.nn.parallel", "DistributedDataParallel"),),
        (),
        ('model = DistributedDataParallel(model, device_mesh=mesh["dp"])',),
    )


_AVERAGE = '''def average_gradients(model, mesh):
    """Make every gradient the mean over the ranks of a mesh with one axis, as soon as it is made."""
    group, ranks = mesh.get_group(), mesh.size()

    def average(param):
        grad = param.grad.to_local() if isinstance(param.grad, DTensor) else param.grad
        dist.all_reduce(grad.div_(ranks), group=group)

    for param in model.parameters():
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(average)'''


def _fully_sharded(
    plan: Plan, analysis: Analysis, result: ByModule, layers: Sequence[Layers], replicas: bool
) -> _Part:
    axes = [result.mesh.index("fsdp")]
    where = '"dp", "fsdp"' if replicas else '"fsdp"'
    body = [f"data_mesh = mesh[{where}]"]
    mixed = []
    for group in layers:
        how = gathering(plan, analysis, [f"{name}." for name in group.names()], axes)
        mixed += [f"{group.container}.*"] * how.mixed
        for loop in _loops(group.names(), layers):
            body += [loop, f"    fully_shard(layer, mesh=data_mesh, reshard_after_forward={how.again})"]
    inside = tuple(f"{name}." for group in layers for name in group.names())
    rest = [name for name in result.params if not name.startswith(inside)]
    how = gathering(plan, analysis, rest, axes)
    mixed += ["the rest of the model"] * how.mixed
    body.append(f"fully_shard(model, mesh=data_mesh, reshard_after_forward={how.again})")
    remarks = []
    if mixed:
        why = (
            "the plan frees some gathered parameters after forward and keeps others; here all of a unit are "
            "treated as most of its bytes are"
        )
        remarks.append((why, tuple(mixed)))
    return _Part((("torch.distributed.fsdp", "fully_shard"),), (), tuple(body), tuple(remarks))


def _loops(names: Sequence[str], layers: Sequence[Layers]) -> list[str]:
    """The ``for`` lines that go over layers by name."""
    wanted, lines = set(names), []
    for group in layers:
        own = [name for name in group.names() if name in wanted]
        wanted.difference_update(own)
        if not own:
            continue
        if group.contiguous and tuple(own) == group.names()[: len(own)]:
            part = "" if len(own) == len(group.numbers) else f"[:{len(own)}]"
            children = f"model.{group.container}.children()"
            lines.append(f"for layer in {f'list({children}){part}' if part else children}:")
        else:
            numbers = ", ".join(name.rpartition(".")[2] for name in own)
            items = f'model.get_submodule(f"{group.container}.{{n}}") for n in ({numbers},)'
            lines.append(f"for layer in [{items}]:")
    if wanted:
        items = ", ".join(f'model.get_submodule("{name}")' for name in names if name in wanted)
        lines.append(f"for layer in [{items}]:")
    return lines


def _head(plan: Plan, mesh: Mesh, reasons: Sequence[tuple[str, Sequence[str]]]) -> list[str]:
    data = [n for n, s in zip(mesh.names, mesh.sizes, strict=True) if s > 1 and n in ("dp", "fsdp")]
    target = plan.target or "A model"
    batch = (
        f"Each rank takes its own part of the batch along {' and '.join(data)}; along other axes all ranks "
        "take the same. A loss that is a mean is the mean over a rank's own part, and gradients are the mean "
        "over these ranks: equal to training on the whole batch where every part counts the same number of "
        "items (padding and ignored labels included)."
        if data
        else "All ranks take the same batch."
    )
    random = (
        "All ranks start from the same weights, and ranks that take the same batch from the same random seed."
    )
    lines = [
        f'"""{target} on the mesh {mesh}, planned by autoshard {__version__}: torch 2.11 to 2.13 alone.',
        "",
        f"    torchrun --nproc-per-node {mesh.world_size} ...",
        f"    mesh = init_device_mesh(device_type, {mesh.sizes}, mesh_dim_names={mesh.names})",
        "    model = apply(model, mesh)    # then make the optimizer",
        "",
        *_wrapped(f"{batch} {random}"),
    ]
    if plan.microbatches > 1:
        text = (
            f"The plan divides each step into {plan.microbatches} microbatches: call forward and backward "
            "that often on equal parts of a rank's batch, each loss divided by their number, then step."
        )
        lines += ["", *_wrapped(text)]
    if plan.recompute:
        text = (
            "Layers that run again in backward must leave nothing behind: switch caches of keys and values "
            "off (use_cache=False)."
        )
        lines += ["", *_wrapped(text)]
    lines += ['"""', ""]
    if reasons:
        lines += ["# Not as planned:", "#"]
        for reason, what in reasons:
            lines += _comment(", ".join(what), reason)
        lines.append("")
    return lines


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH)


def _comment(names: str, reason: str) -> list[str]:
    text = f"{names}: {reason}." if names else f"{reason}."
    return textwrap.wrap(
        text, _WIDTH, initial_indent="# * ", subsequent_indent="#   ", break_long_words=False
    )


def _imports(parts: Sequence[_Part]) -> list[str]:
    wanted: dict[str, set[str]] = {}
    for part in parts:
        for module, name in part.imports:
            wanted.setdefault(module, set()).add(name)
    lines = []
    own = [m for m in wanted if not m.startswith("torch")]
    for module in [*sorted(own), *[""] * bool(own), *sorted(set(wanted) - set(own))]:
        if not module:
            lines.append("")
            continue
        names = wanted[module]
        plain = sorted(n for n in names if n and not n.startswith("as "))
        lines += [f"import {module} {n}" for n in names if n.startswith("as ")]
        if plain:
            lines.append(f"from {module} import {', '.join(plain)}")
    return lines


def _functions(plan: Plan, mesh: Mesh, parts: Sequence[_Part]) -> list[str]:
    shape = ", ".join(f'"{n}": {s}' for n, s in zip(mesh.names, mesh.sizes, strict=True))
    lines = ["", f"MESH = {{{shape}}}"]
    if plan.microbatches > 1:
        lines.append(f"MICROBATCHES = {plan.microbatches}")
    for helper in dict.fromkeys(h for part in parts for h in part.helpers):
        lines += ["", "", *helper.splitlines()]
    lines += [
        "",
        "",
        "def apply(model, mesh):",
        '    """Make the model parallel on a DeviceMesh with the axes of MESH; gives back what to call."""',
        "    shape = dict(zip(mesh.mesh_dim_names or (), mesh.shape))",
        "    if shape != MESH:",
        '        raise ValueError(f"the mesh is {shape}, and this was planned for {MESH}")',
    ]
    for part in parts:
        lines += [f"    {line}" for line in part.body]
    return [*lines, "    return model"]
