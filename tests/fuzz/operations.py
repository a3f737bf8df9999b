"""The statements that random models are made of, by family: each gives an expression, or raises Unfit."""

from __future__ import annotations

from collections.abc import Callable

from fuzz.draw import Scene, Unfit

#: of any number
_SMOOTH = (
    "torch.tanh({})", "torch.sigmoid({})", "torch.sin({})", "torch.cos({})", "F.gelu({})", "F.silu({})",
    "F.gelu({}, approximate='tanh')", "F.softplus({})", "F.elu({})", "F.mish({})", "torch.atan({})",
    "torch.erf({})", "torch.exp(-{}.abs())", "torch.sqrt(1.5 + torch.sin({}))",
    "torch.rsqrt(1.5 + torch.cos({}))", "torch.log(2.0 + torch.tanh({}))", "torch.log1p({}.pow(2))",
    "torch.asinh({})", "F.logsigmoid({})", "torch.reciprocal(2.0 + torch.tanh({}))",
    "torch.expm1(torch.tanh({}))", "torch.exp2(torch.tanh({}))", "F.softsign({})", "{}.square()",
    "{}.pow(3)", "-{}", "1.0 - {}", "2.0 * {}", "{} / 3.0", "F.celu({})", "torch.sinh(torch.tanh({}))",
    "torch.acos(0.9 * torch.tanh({}))", "torch.atanh(0.9 * torch.tanh({}))",
    "torch.lgamma(1.5 + torch.sigmoid({}))", "torch.erfinv(0.9 * torch.tanh({}))",
    "torch.logit(torch.sigmoid({}))", "F.tanhshrink({})", "torch.cosh(torch.tanh({}))",
    "torch.log2(1.5 + torch.sigmoid({}))", "torch.erfc({})", "torch.log10(1.5 + torch.sigmoid({}))",
    "torch.nan_to_num({})", "F.dropout({}, 0.5, training=False)", "{}.clone()", "{}.detach() * 0.5",
    "2.0 ** torch.tanh({})", "torch.tan(torch.tanh({}))", "{}.contiguous()",
)  # fmt: skip
_KINKED = (
    "F.relu({})", "F.leaky_relu({}, 0.1)", "F.hardtanh({})", "F.hardswish({})", "F.hardsigmoid({})",
    "{}.abs()", "F.softshrink({}, 0.3)", "F.hardshrink({}, 0.3)", "{}.clamp(-0.7, 0.9)",
    "{}.clamp(min=0.1)", "F.relu6({})", "{}.floor() * 0.3", "{}.round() + {}", "{}.sign() * {}",
    "{}.frac()", "{}.trunc() - {}", "{}.ceil() + {}", "torch.threshold({}, 0.1, -0.2)",
    "{}.masked_fill({} > 0.4, 0.25)", "torch.where({} > 0.1, {}, -0.5)",
)  # fmt: skip
_PAIRS = (
    "{} + {}", "{} - {}", "{} * {}", "torch.maximum({}, {})", "torch.minimum({}, {})",
    "torch.atan2({}, {})", "{} / (2.0 + torch.tanh({}))", "torch.logaddexp({}, {})", "torch.hypot({}, {})",
    "{} * {}.detach()", "torch.where({} > {}, 0.5, 1.5)", "torch.lerp({}, {}, 0.3)",
    "torch.add({}, {}, alpha=0.5)", "torch.fmax({}, {})", "torch.xlogy({}, 1.5 + torch.tanh({}))",
    "torch.copysign({}, {})", "torch.remainder({}, 2.0 + torch.tanh({}))",
    "torch.sigmoid({}).pow(torch.tanh({}))", "torch.clamp({}, max={})",
    "F.mse_loss({}, {}, reduction='none')", "F.smooth_l1_loss({}, {}, reduction='none')",
    "torch.sub({}, {}, alpha=2)", "torch.rsub({}, {})", "F.huber_loss({}, {}, reduction='none', delta=0.5)",
    "torch.fmod({}, 1.5 + torch.sigmoid({}))",
)  # fmt: skip


def _filled(d: Scene, form: str, name: str) -> str:
    return form.replace("{}", name)


def smooth(d: Scene) -> str:
    return _filled(d, d.any(*_SMOOTH), d.real())


def kinked(d: Scene) -> str:
    return _filled(d, d.any(*_KINKED), d.real())


def pair(d: Scene) -> str:
    """Two values that broadcast."""
    first = d.real()
    other = d.real(lambda t: _broadcast(d.shape(first), tuple(t.shape)))
    return _two(d.any(*_PAIRS), first, other)


def _two(form: str, first: str, other: str) -> str:
    return form.replace("{}", first, 1).replace("{}", other, 1)


def with_parameter(d: Scene) -> str:
    """A value and a parameter of some of its dims, or sizes 1 in their place."""
    name = d.wide(1)
    shape = d.shape(name)
    begin = 0 if d.maybe(0.15) else d.rng.randrange(len(shape))
    sizes = [1 if d.maybe(0.3) else n for n in shape[begin:]]
    if begin == 0 and sizes[0] == d.batch:
        sizes[0] = 1
    other = d.param(*sizes)
    first, second = d.any((name, other), (other, name))
    return _two(d.any(*_PAIRS[:6]), first, second)


def three(d: Scene) -> str:
    a = d.real()
    b = d.real(lambda t: _broadcast(d.shape(a), tuple(t.shape)))
    c = d.real(lambda t: _broadcast(d.shape(a), tuple(t.shape)))
    return d.any(
        f"torch.addcmul({a}, {b}, {c}, value=0.5)",
        f"torch.addcdiv({a}, {b}, 2.0 + torch.tanh({c}))",
        f"torch.lerp({a}, {b}, torch.sigmoid({c}))",
        f"torch.where({a} > {b}, {b}, {c})",
    )


def _broadcast(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    return all(x == y or 1 in (x, y) for x, y in zip(reversed(a), reversed(b), strict=False))


# -- products --------------------------------------------------------------------------------------


def linear(d: Scene) -> str:
    name = d.wide(1)
    n, m = d.shape(name)[-1], d.any(2, 3, 4, 6, 8, 8, 12)
    bias = f", {d.param(m)}" if d.maybe() else ""
    return f"F.linear({name}, {d.param(m, n)}{bias}) / {n}"


def product(d: Scene) -> str:
    name = d.wide(1)
    *lead, n = d.shape(name)
    m = d.size()
    if len(lead) == 1:
        return d.any(
            f"torch.addmm({d.param(m)}, {name}, {d.param(n, m)}, beta=0.5, alpha=0.3)",
            f"{name} @ {d.param(n, m)} / {n}",
            f"torch.mv({name}, {d.param(n)})",
            f"{name} @ {name}.t() / {n}",
            f"{name}.t() @ {name} / {lead[0]}",
            f"torch.cdist({name}, {d.param(m, n)})",
        )
    if len(lead) == 2:
        return d.any(
            f"torch.matmul({name}, {d.param(n, m)}) / {n}",
            f"torch.bmm({name}, {name}.transpose(1, 2)) / {n}",
            f"torch.einsum('bsn,nm->bms', {name}, {d.param(n, m)}) / {n}",
            f"torch.einsum('bsn,btn->bst', {name}, {name}) / {n}",
            f"torch.einsum('bsn,hnm->bhsm', {name}, {d.param(2, n, m)}) / {n}",
            f"torch.baddbmm({d.param(1, 1)}, {name}, {name}.transpose(1, 2), alpha=0.2)",
            f"torch.einsum('bsn,sn->bs', {name}, {d.param(lead[1], n)}) / {n}",
        )
    if not lead:
        return d.any(f"torch.dot({name}, {d.param(n)})", f"torch.outer({name}, {d.param(m)})")
    return d.any(
        f"{name} @ {name}.transpose(-1, -2) / {n}",
        f"torch.matmul({name}, {d.param(n, m)}) / {n}",
        f"torch.tensordot({name}, {d.param(lead[-1], n, m)}, dims=([-2, -1], [0, 1])) / {n}",
    )


def meet(d: Scene) -> str:
    """A product of two values."""
    a = d.wide(2)
    n = d.shape(a)[-1]
    b = d.real(lambda t: t.dim() >= 2 and t.shape[-1] == n)
    return f"torch.matmul({a}, {b}.transpose(-1, -2)) / {n}"


# -- views -----------------------------------------------------------------------------------------


def reshaped(d: Scene) -> str:
    """Dims merged and split anew."""
    name = d.wide(1)
    sizes: list[int] = []
    for n in d.shape(name):
        if sizes and d.maybe(0.35):
            sizes[-1] *= n
        else:
            sizes.append(n)
    shape: list[int] = []
    for n in sizes:
        ways = [k for k in range(2, n) if n % k == 0]
        if ways and d.maybe(0.4):
            k = d.any(*ways)
            shape += [k, n // k]
        else:
            shape.append(n)
    if d.maybe(0.2):
        shape[d.rng.randrange(len(shape))] = -1
    call = d.any("reshape", "reshape", "view")
    return f"{name}.{call}({', '.join(map(str, shape))})"


def moved(d: Scene) -> str:
    name = d.wide(1)
    count = len(d.shape(name))
    order = d.rng.sample(range(count), count)
    a, b = d.dim(name), d.dim(name)
    return d.any(
        f"{name}.permute({', '.join(map(str, order))})",
        f"{name}.transpose({a}, {b})",
        f"{name}.transpose({a}, {b}).contiguous()",
        f"{name}.movedim({a}, {b})",
        f"{name}.unsqueeze({a})",
        f"{name}.squeeze()",
        f"{name}.squeeze({a})",
        f"{name}.flatten({min(a % count, b % count)}, {max(a % count, b % count)})",
        f"{name}.flip({a})",
        f"torch.roll({name}, {d.any(1, 2, -1)}, {a})",
        f"torch.roll({name}, {d.any(1, 2)})",
        f"{name}.mT",
    )


def copied(d: Scene) -> str:
    name = d.wide(1)
    shape = d.shape(name)
    times = ", ".join(str(d.any(1, 1, 2)) for _ in shape)
    k = d.dim(name)
    return d.any(
        f"{name}.repeat({times})",
        f"{name}.repeat({d.any(2, 3)}, {times})",
        f"{name}.unsqueeze({k}).expand({', '.join(map(str, _with(shape, k, 3)))})",
        f"{name}.repeat_interleave({d.any(2, 3)}, dim={k})",
        f"torch.stack([{name}, {name} * 0.5], {k})",
        f"{name}.new_zeros({list(shape)}) + {name}",
        f"torch.ones_like({name}) * {name}.mean()",
    )


def _with(shape: tuple[int, ...], dim: int, size: int) -> list[int]:
    sizes = list(shape)
    sizes.insert(dim if dim >= 0 else len(shape) + 1 + dim, size)
    return sizes


def cut(d: Scene) -> str:
    """Parts of a value."""
    name = d.wide(1)
    k = d.dim(name)
    n = d.shape(name)[k]
    if n < 2:
        raise Unfit
    begin = d.rng.randrange(n)
    end = d.rng.randrange(begin + 1, n + 1)
    many = d.any(2, 3)
    first = d.rng.randrange(1, n)
    count = len(d.shape(name))
    index = ", ".join([":"] * (k % count) + [f"{begin}:{end}" if d.maybe() else f"{begin % 2}::{many}"])
    return d.any(
        f"{name}.split({-(-n // many)}, {k})",
        f"{name}.split([{first}, {n - first}], {k})",
        f"{name}.chunk({many}, {k})",
        f"{name}.narrow({k}, {begin}, {end - begin})",
        f"{name}[{index}]",
        f"{name}[..., {d.any(-1, 0)}]",
        f"{name}.select({k}, {d.rng.randrange(-n, n)})",
        f"torch.unbind({name}, {k})",
        f"{name}.unfold({k}, {max(1, n // 2)}, {d.any(1, 2)})",
        f"torch.tensor_split({name}, 2, {k})",
    )


def joined(d: Scene) -> str:
    a = d.wide(1)
    k = d.dim(a) % len(d.shape(a))
    shape = d.shape(a)

    def alike(t: object) -> bool:
        other = tuple(t.shape)  # type: ignore[attr-defined]
        return len(other) == len(shape) and all(
            i == k or x == y for i, (x, y) in enumerate(zip(shape, other, strict=True))
        )

    b = d.real(alike)
    parts = [a, b, d.param(*shape)] if d.maybe(0.2) and shape[0] != d.batch else [a, b]
    d.rng.shuffle(parts)
    return f"torch.cat([{', '.join(parts)}], {k})"


def edges(d: Scene) -> str:
    name = d.wide(2)
    k = d.dim(name)
    n = d.shape(name)[k]
    return d.any(
        f"F.pad({name}, ({d.any(0, 1)}, {d.any(1, 2)}))",
        f"F.pad({name}, (1, 0, 0, {d.any(1, 2)}), value=0.5)",
        f"F.pad({name}, ({d.any(0, 1)}, 1), mode='{d.any('reflect', 'replicate')}')",
        f"{name}.tril({d.any(-1, 0, 1)})",
        f"{name}.triu({d.any(-1, 0, 1)})",
        f"{name}.diagonal({d.any(0, 1)}, -2, -1)",
        f"torch.select_scatter({name}, {name}.select({k}, 0) * 0.5, {k}, {d.rng.randrange(n)})",
        f"torch.slice_scatter({name}, {name}.narrow({k}, 0, 1) * 0.5, {k}, 0, 1)",
        f"put({name}, {k}, {d.rng.randrange(n)}, 0.3)",
        f"put({name}, {k}, {d.rng.randrange(n)}, {name}.mean())",
    )


# -- reductions ------------------------------------------------------------------------------------


def reduced(d: Scene) -> str:
    name = d.wide(1)
    count = len(d.shape(name))
    dims = sorted(d.rng.sample(range(count), d.rng.randrange(1, min(count, 2) + 1)))
    keep = d.any("", ", keepdim=True")
    one = d.dim(name)
    many = d.any(str(one), str(tuple(dims)))
    return d.any(
        f"{name}.sum({many}{keep}) * 0.3",
        f"{name}.mean({many}{keep})",
        f"{name}.amax({many}{keep})",
        f"{name}.amin({many}{keep})",
        f"torch.logsumexp({name}, {many}{keep})",
        f"{name}.var({many}, correction=0{keep})",
        f"({name}.var({many}, correction=0{keep}) + 0.1).sqrt()",
        f"torch.linalg.vector_norm({name}, {d.any(1, 2)}, {many}{keep})",
        f"torch.tanh({name}).prod({one}{keep})",
        f"{name}.max({one}{keep}).values",
        f"{name}.min({one}{keep})",
        f"{name}.median({one}{keep}).values",
        f"{name}.sum() * 0.1",
        f"{name}.mean()",
        f"{name}.max()",
        f"torch.nansum({name}, {one}{keep}) * 0.2",
        f"torch.std_mean({name} + 0.0, {one}, correction=0)",
        f"{name}.std({one}, correction=0{keep}) + 0.1",
    )


def scanned(d: Scene) -> str:
    name = d.wide(1)
    k = d.dim(name)
    n = d.shape(name)[k]
    return d.any(
        f"{name}.cumsum({k}) * 0.5",
        f"torch.logcumsumexp({name}, {k})",
        f"torch.tanh({name}).cumprod({k})",
        f"{name}.cummax({k}).values",
        f"{name}.sort({k}, stable=True).values",
        f"{name}.sort({k}, stable=True, descending=True)",
        f"{name}.topk({d.rng.randrange(1, n + 1)}, {k})",
        f"{name}.kthvalue({d.rng.randrange(1, n + 1)}, {k}).values",
        f"{name}.argsort({k}, stable=True)",
        f"{name}.argmax({k})",
        f"{name}.argmin({k}, keepdim=True)",
    )


# -- norms and attention ---------------------------------------------------------------------------


def normed(d: Scene) -> str:
    name = d.wide(2)
    shape = d.shape(name)
    n = shape[-1]
    k = d.dim(name)
    if n < 2:
        raise Unfit
    groups = d.any(*[g for g in (1, 2, 3, 4) if shape[1] % g == 0])
    return d.any(
        f"F.layer_norm({name}, ({n},), {d.param(n)}, {d.param(n)})",
        f"F.layer_norm({name}, ({n},))",
        f"F.layer_norm({name}, {tuple(shape[-2:])})",
        f"F.rms_norm({name}, ({n},), {d.param(n)}, eps=1e-3)",
        f"{name} * torch.rsqrt({name}.pow(2).mean(-1, keepdim=True) + 1e-2) * {d.param(n)}",
        f"F.group_norm({name}, {groups}, {d.param(shape[1])}, {d.param(shape[1])}, eps=1e-2)",
        f"F.batch_norm({name}, None, None, {d.param(shape[1])}, {d.param(shape[1])}, True, 0.1, 1e-2)",
        f"F.instance_norm({name}, eps=1e-2)",
        f"F.softmax({name}, {k})",
        f"F.log_softmax({name}, {k})",
        f"F.softmin({name}, {k})",
        f"F.normalize({name}, dim={k}, eps=1e-2)",
        f"F.cosine_similarity({name}, {name}.flip({k}), dim={k}, eps=1e-2)",
        f"F.glu({name}, {k})",
    )


def statistics(d: Scene) -> str:
    """A norm with running statistics."""
    if d.inside:
        raise Unfit
    name = d.wide(2)
    c = d.shape(name)[1]
    mean, var = d.buffer(c), d.buffer(c)
    training = d.maybe(0.7)
    return f"F.batch_norm({name}, {mean}, {var}, {d.param(c)}, {d.param(c)}, {training}, 0.1, 1e-2)"


def attention(d: Scene) -> str:
    name = d.real(lambda t: t.dim() in (3, 4) and t.shape[-1] >= 2)
    shape = d.shape(name)
    heads = name
    if len(shape) == 3:
        count = d.any(*[h for h in (1, 2, 4) if shape[-1] % h == 0])
        heads = f"{name}.view({shape[0]}, {shape[1]}, {count}, {shape[-1] // count}).transpose(1, 2)"
    key = d.any(heads, f"torch.tanh({heads})", f"{heads}.flip(-2)")
    mask = d.any(
        "", "is_causal=True", f"attn_mask={d.param(shape[-2], shape[-2])}" if len(shape) == 4 else ""
    )
    call = f"F.scaled_dot_product_attention({heads}, {key}, torch.sin({heads}), {mask})"
    return call if len(shape) == 4 else f"{call}.transpose(1, 2).reshape({', '.join(map(str, shape))})"


# -- indices ---------------------------------------------------------------------------------------


def looked_up(d: Scene) -> str:
    # a tensor of no dims as an index is a number to Python, which a capture does not have
    name = d.ints(lambda t: t.numel() > 0 and int(t.min()) >= 0 and 0 < t.dim() < 4)
    top = int(d.values[name].max()) + 1
    rows = d.any(7, 8, 12)
    if top > rows:
        raise Unfit
    e = d.any(4, 6, 8)
    return d.any(
        f"F.embedding({name}, {d.param(rows, e)})",
        f"F.embedding({name}, {d.param(rows, e)}, padding_idx=0)",
        f"{d.param(rows, e)}[{name}]",
        f"F.one_hot({name}, {rows}).to(torch.float64) @ {d.param(rows, e)}",
    )


def gathered(d: Scene) -> str:
    name = d.wide(1, 4)
    shape = d.shape(name)
    k = d.dim(name)
    n = shape[k]
    count = d.any(1, 2, 3, 5)
    index = d.buffer(count, kind="ints", top=n) if not d.inside else f"torch.arange({min(count, n)})"
    count = count if not d.inside else min(count, n)
    whole = [*shape]
    whole[k] = count
    spread = f"{index}.view({', '.join('-1' if i == k % len(shape) else '1' for i in range(len(shape)))})"
    sizes = ", ".join(map(str, whole))
    wide = f"{spread}.expand({sizes})"
    return d.any(
        f"{name}.index_select({k}, {index})",
        f"{name}.gather({k}, {wide})",
        f"torch.take_along_dim({name}, {spread}, {k})",
        f"{name}[{', '.join([':'] * (k % len(shape)) + [index])}]",
        f"torch.zeros_like({name}).scatter_add({k}, {wide}, {name}.narrow({k}, 0, 1).expand({sizes}))",
        f"{name}.index_add({k}, {index}, {name}.index_select({k}, {index}) * 0.5)",
        f"{name}.index_fill({k}, {index}, 0.3)",
        f"{name}.scatter({k}, {wide}, 0.25)",
    )


def labelled(d: Scene) -> str:
    """A loss of every row, by labels."""
    labels = d.ints(lambda t: t.dim() >= 1 and int(t.min()) >= 0)
    shape = d.shape(labels)
    name = d.real(lambda t: tuple(t.shape[:-1]) == shape and t.shape[-1] > int(d.values[labels].max()))
    c = d.shape(name)[-1]
    rows, flat = f"{name}.reshape(-1, {c})", f"{labels}.reshape(-1)"
    return d.any(
        f"F.cross_entropy({rows}, {flat})",
        f"F.cross_entropy({rows}, {flat}, reduction='none')",
        f"F.cross_entropy({rows}, {flat}, ignore_index={d.any(0, 1)}, reduction='sum')",
        f"F.cross_entropy({rows}, {flat}, label_smoothing=0.1)",
        f"F.nll_loss(F.log_softmax({rows}, -1), {flat})",
        f"F.log_softmax({name}, -1).gather(-1, {labels}.unsqueeze(-1)).squeeze(-1)",
        f"{name}.gather(-1, {labels}.unsqueeze(-1))",
    )


def masked(d: Scene) -> str:
    mask = d.bools()
    name = d.real(lambda t: _broadcast(tuple(t.shape), d.shape(mask)))
    return d.any(
        f"{name}.masked_fill({mask}, 0.5)",
        f"torch.where({mask}, {name}, 0.1 * {name})",
        f"{name} * {mask}",
        f"torch.where({mask}, {name}, {d.param(1)})",
        f"F.binary_cross_entropy_with_logits({name} * {mask}, {mask} * torch.ones_like({name}))",
    )


def compared(d: Scene) -> str:
    """Truth values and whole numbers."""
    name = d.wide(1)
    k = d.dim(name)
    return d.any(
        f"{name} > 0.1",
        f"{name} <= {name}.mean()",
        f"({name} > 0).any({k})",
        f"({name} > -0.5).all({k}, keepdim=True)",
        f"torch.logical_or({name} > 1, {name} < -0.2)",
        f"~({name} > 0.3)",
        f"({name} > 0).sum({k})",
        f"({name} > 0).long()",
        f"({name}.abs() * 3).long() % 5",
        f"torch.isfinite({name})",
        f"({name} > 0) & ({name} < 1)",
        f"torch.arange({d.shape(name)[k]})",
        f"({name} > 0).long().cumsum({k})",
    )


def counted(d: Scene) -> str:
    """Whole numbers from whole numbers, and numbers from these."""
    name = d.ints()
    return d.any(
        f"{name}.to(torch.float64) * 0.3",
        f"{name} % 3",
        f"({name} + 1) % 5",
        f"{name} * 2 // 3",
        f"{name} == 1",
        f"{name}.clamp(0, 2)",
        f"{name} & 3",
    )


# -- images ----------------------------------------------------------------------------------------


def convolved(d: Scene) -> str:
    name = d.real(lambda t: t.dim() in (3, 4))
    shape = d.shape(name)
    rank = len(shape) - 2
    c, o = shape[1], d.any(2, 4, 4, 6)
    groups = d.any(*[g for g in (1, 1, 1, 2, c) if c % g == 0 and o % g == 0])
    size = d.any(1, 2, 3)
    weight = d.param(o, c // groups, *([size] * rank))
    bias = d.param(o) if d.maybe() else "None"
    more = f"stride={d.any(1, 1, 2)}, padding={d.any(0, 1)}, dilation={d.any(1, 1, 2)}, groups={groups}"
    if d.maybe(0.2):
        weight = d.param(c, o // groups, *([size] * rank))
        return f"F.conv_transpose{rank}d({name}, {weight}, {bias}, groups={groups}) / {c}"
    return f"F.conv{rank}d({name}, {weight}, {bias}, {more}) / {c * size}"


def pooled(d: Scene) -> str:
    name = d.real(lambda t: t.dim() in (3, 4) and t.shape[-1] >= 2)
    rank = len(d.shape(name)) - 2
    if rank == 1:
        return d.any(
            f"F.max_pool1d({name}, 2)",
            f"F.avg_pool1d({name}, 2, stride=1)",
            f"F.adaptive_avg_pool1d({name}, 1)",
            f"F.interpolate({name}, scale_factor=2)",
        )
    return d.any(
        f"F.max_pool2d({name}, 2)",
        f"F.max_pool2d({name}, 3, stride=1, padding=1)",
        f"F.avg_pool2d({name}, 2)",
        f"F.adaptive_avg_pool2d({name}, {d.any(1, 2)})",
        f"F.adaptive_max_pool2d({name}, 1)",
        f"F.interpolate({name}, scale_factor=2, mode='{d.any('nearest', 'bilinear', 'bicubic')}')",
        f"F.pixel_unshuffle({name}, 2)",
        f"F.pixel_shuffle({name}, 2)",
        f"F.unfold({name}, 2)",
    )


def recurrent(d: Scene) -> str:
    name = d.real(lambda t: t.dim() == 3)
    batch, _, n = d.shape(name)
    m, gates = d.any(2, 3, 4), d.any(3, 4)
    parts = (d.param(gates * m, n), d.param(gates * m, m), d.param(gates * m), d.param(gates * m))
    state = f"{name}.new_zeros(1, {batch}, {m})"
    rest = f"[{', '.join(parts)}], True, 1, 0.0, True, False, True"
    if gates == 3:
        return f"torch.gru({name}, {state}, {rest})[0]"
    return f"torch.lstm({name}, ({state}, {state}), {rest})[0]"


def spectral(d: Scene) -> str:
    name = d.wide(1)
    k = d.dim(name)
    return d.any(
        f"torch.view_as_real(torch.fft.rfft({name}, dim={k}, norm='ortho'))",
        f"torch.fft.rfft({name}, dim={k}, norm='ortho').real",
        f"torch.fft.irfft(torch.fft.rfft({name}, dim={k}) * 0.5, n={d.shape(name)[k]}, dim={k})",
        f"torch.fft.fft({name}, dim={k}, norm='ortho').imag",
    )


Family = Callable[[Scene], str]
#: (how often, family)
FAMILIES: tuple[tuple[int, Family], ...] = (
    (10, smooth), (6, kinked), (10, pair), (6, with_parameter), (3, three),
    (14, linear), (8, product), (4, meet),
    (8, reshaped), (8, moved), (4, copied), (8, cut), (5, joined), (4, edges),
    (8, reduced), (4, scanned),
    (8, normed), (2, statistics), (6, attention),
    (8, looked_up), (4, gathered), (5, labelled), (4, masked), (4, compared), (3, counted),
    (5, convolved), (4, pooled), (1, spectral), (1, recurrent),
)  # fmt: skip


def drawn_statement(d: Scene) -> str | None:
    """An expression of a family taken at random; None if nothing suits it."""
    weights = [w for w, _ in FAMILIES]
    families = [f for _, f in FAMILIES]
    known = len(d.given)
    try:
        expression = d.rng.choices(families, weights)[0](d)
    except (Unfit, IndexError):
        d.keep_used(known, "")
        return None
    if not d.maybe(0.03):  # else parameters that nothing uses stay
        d.keep_used(known, expression)
    return expression
