"""Capture: the joint graph computes what eager mode does, and leaves the model as it was."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from joint_eval import evaluate
from torch import nn
from torch.utils import _pytree as pytree

from autoshard.capture.capture import capture as captured
from autoshard.errors import CaptureError
from autoshard.ir import Joint, refs_of
from autoshard.ops.dropout import keep_mask
from autoshard.passes.simplify.fold_repeats import flat


class Fn(nn.Module):
    """A module whose forward is any function of itself and the arguments."""

    def __init__(self, fn: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.fn = fn
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn(self, *args, **kwargs)


def capture(*args: Any, **kwargs: Any) -> Joint:
    """With all layers written out."""
    return flat(captured(*args, **kwargs))


def linear(**parts: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    return {"l": nn.Linear(8, 8), **parts}


@pytest.fixture
def x() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(4, 8)


def check(model: nn.Module, *args: Any, rtol: float = 1e-4, **kwargs: Any) -> Joint:
    """Capture, evaluate, compare outputs, gradients and buffers with eager mode."""
    model = copy.deepcopy(model)
    before = {k: (v, v.clone()) for k, v in model.state_dict(keep_vars=True).items()}
    random = torch.get_rng_state()
    joint = capture(model, args, kwargs)
    assert torch.equal(random, torch.get_rng_state())
    assert gc.isenabled() and not torch.compiler.is_compiling()
    for name, now in model.state_dict(keep_vars=True).items():
        assert now is before[name][0] and torch.equal(now, before[name][1]) and now.grad is None
    well_formed(joint)
    results = evaluate(joint, model, args, kwargs)
    leaves = pytree.tree_leaves(model(*args, **kwargs))
    outputs = {str(k): v for k, v in enumerate(leaves) if isinstance(v, torch.Tensor)}
    assert {t for kind, t in results if kind == "output"} == set(outputs)
    for target, value in outputs.items():
        torch.testing.assert_close(results["output", target], value.detach(), rtol=rtol, atol=1e-6)
    tangents = {p.target for p in joint.ports if p.kind == "tangent"}
    if tangents:
        sum(outputs[t].sum() for t in tangents).backward()  # type: ignore[union-attr]
    compare_grads(model, results, rtol)
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(results.get(("buffer", name), before_value(before, name, buffer)), buffer)
    return joint


def before_value(before: dict[str, Any], name: str, buffer: torch.Tensor) -> torch.Tensor:
    return before[name][1] if name in before else buffer


def compare_grads(model: nn.Module, results: dict[tuple[str, str], torch.Tensor], rtol: float) -> None:
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            assert ("grad", name) not in results
        else:
            found = results["grad", name]
            atol = 0.1 * rtol * float(parameter.grad.abs().max())
            torch.testing.assert_close(found, parameter.grad, rtol=rtol, atol=atol + 1e-8)


def well_formed(joint: Joint) -> None:
    """Names are unique identifiers defined before use; forward nodes come first and need no tangent."""
    known = {name for name, _ in joint.graph.inputs}
    assert [p.name for p in joint.ports] == [n for n, _ in joint.graph.inputs]
    assert len(known) == len(joint.ports)
    seen_backward = False
    for node in joint.graph.nodes:
        assert all(r in known for r in refs_of(node)), node
        assert node.backward or not seen_backward
        seen_backward |= node.backward
        for out in node.outs:
            assert out.isidentifier() and out not in known
            known.add(out)
    assert all(r.value in known for r in joint.results)


def ops(joint: Joint) -> list[str]:
    return [n.op for n in joint.graph.nodes]


# --- models of plain torch


def test_linear_relu_in_place(x: torch.Tensor) -> None:
    joint = check(nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 2)), x)
    assert {n.origin.fqn for n in joint.graph.nodes} == {"0", "1", "2"}
    assert all(n.origin.source.startswith("test_capture.py") or n.origin.source for n in joint.graph.nodes)
    assert joint.batch_inputs == ("0",)


def test_batch_norm_updates_buffers() -> None:
    head = (nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 2))
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), *head)
    joint = check(model, torch.randn(2, 3, 8, 8))
    assert {r.target for r in joint.results if r.kind == "buffer"} == {
        "1.running_mean",
        "1.running_var",
        "1.num_batches_tracked",
    }


def test_buffer_assigned_anew(x: torch.Tensor) -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.n = self.n + x.mean(0).detach()
        self.left_behind = x
        return self.l(x + self.n)

    model = Fn(forward, **linear())
    model.register_buffer("n", torch.zeros(8))
    assert [r.target for r in check(model, x).results if r.kind == "buffer"] == ["n"]
    capture(model, (x,))
    assert not hasattr(model, "left_behind") and torch.equal(model.n, torch.zeros(8))


def test_tied_weights_have_one_port_and_one_gradient(x: torch.Tensor) -> None:
    a, b = nn.Linear(8, 8), nn.Linear(8, 8)
    b.weight = a.weight
    joint = check(Fn(lambda s, x: s.b(s.a(x).tanh()).sum(), a=a, b=b), x)
    assert joint.tied == (("b.weight", "a.weight"),)
    assert [r.target for r in joint.results if r.kind == "grad"].count("a.weight") == 1


def test_frozen_parameters_have_no_gradient(x: torch.Tensor) -> None:
    model = Fn(lambda s, x: s.l(x).sum(), **linear())
    model.l.weight.requires_grad_(False)
    assert check(model, x).frozen == ("l.weight",)
    model.l.bias.requires_grad_(False)
    joint = check(model, x)
    assert not any(n.backward for n in joint.graph.nodes)
    assert not any(p.kind == "tangent" for p in joint.ports)


def test_outputs_of_all_kinds(x: torch.Tensor) -> None:
    def forward(self: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        z = self.l(x)
        return x, self.l.weight, z, None, 3, {"a": y, "b": z[:2]}, z

    joint = check(Fn(forward, **linear()), x, y=x)
    assert joint.out_leaves[3:5] == (("static", "None"), ("static", "3"))
    assert joint.input_names == ("args[0]", "y")
    values = {r.target: r.value for r in joint.results if r.kind == "output"}
    ports = {p.target: p.name for p in joint.ports if p.kind == "input"}
    assert values["0"] == ports["0"] and values["5"] == ports["1"]
    assert pytree.treespec_loads(joint.out_tree).num_leaves == 8


def test_only_a_lone_scalar_loss_is_differentiated(x: torch.Tensor) -> None:
    def forward(self: Any, x: torch.Tensor) -> Any:
        z = self.l(x)
        return {"loss": z.square().mean(), "logits": z}

    model = Fn(forward, **linear())
    assert [p.target for p in check(model, x).ports if p.kind == "tangent"] == ["0"]
    every = capture(model, (x,), differentiate="all")
    assert [p.target for p in every.ports if p.kind == "tangent"] == ["0", "1"]
    assert not any(n.backward for n in capture(model, (x,), differentiate="none").graph.nodes)


def test_gradient_of_an_input(x: torch.Tensor) -> None:
    joint = check(Fn(lambda s, x: s.l(x).sum(), **linear()), x.requires_grad_())
    assert ("input_grad", "0") in {(r.kind, r.target) for r in joint.results}


def test_nested_inputs_and_static_arguments(x: torch.Tensor) -> None:
    def forward(self: Any, batch: Any, scale: float, flag: bool = False) -> torch.Tensor:
        return self.l(batch["x"]["u"]) * scale + (batch["y"][0] if flag else 0)

    joint = check(Fn(forward, **linear()), {"x": {"u": x}, "y": [x]}, 2.0, flag=True)
    assert joint.input_names == ("args[0]['x']['u']", "args[0]['y'][0]", "args[1]", "flag")
    assert joint.in_leaves[2:] == (("static", "2.0"), ("static", "True"))


def test_inputs_changed_in_place_are_left_alone(x: torch.Tensor) -> None:
    model = Fn(lambda s, x: s.l(x.mul_(2)), **linear())
    joint = capture(model, (x,))
    results = evaluate(joint, model, (x,))
    torch.testing.assert_close(results["output", "0"], model(x.clone()))


def test_constants_keep_their_values(x: torch.Tensor) -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.l(x) * torch.tensor([1.0, 2, 3, 4, 5, 6, 7, 8]) * self.table

    joint = check(Fn(forward, **linear(table=torch.arange(8.0))), x)
    assert sorted(joint.constants) == ["const_0", "const_1"]


def test_calls_of_a_shared_layer_are_counted(x: torch.Tensor) -> None:
    model = Fn(lambda s, x: s.l(s.l(s.l(x).tanh()).tanh()).sum(), **linear())
    joint = check(model, x)
    assert {n.origin.call for n in joint.graph.nodes if n.op == "aten.addmm.default"} == {0, 1, 2}
    assert {n.origin.call for n in joint.graph.nodes if n.backward and n.origin.fqn == "l"} == {0, 1, 2}


def test_a_layer_that_calls_a_part_twice_stays_together(x: torch.Tensor) -> None:
    layer = Fn(lambda s, x: s.l(s.l(x).tanh()), **linear())
    joint = check(Fn(lambda s, x: s.h[0](s.h[0](x)).sum(), h=nn.ModuleList([layer])), x)
    calls = [n.origin.call for n in joint.graph.nodes if n.op == "aten.addmm.default"]
    assert calls == [0, 0, 1, 1]


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_code_runs_once(x: torch.Tensor, reentrant: bool) -> None:
    inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.5))

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(self.inner, x * self.w, use_reentrant=reentrant).sum()

    model = Fn(forward, inner=inner, w=nn.Parameter(torch.ones(8)))
    joint = capture(model, (x,))
    assert ops(joint).count("aten.tanh.default") == 1
    assert ops(joint).count("autoshard.dropout.default") == 2


@pytest.mark.parametrize("dense", [False, True])
def test_views_of_attention_as_on_a_gpu_and_as_on_the_cpu(x: torch.Tensor, dense: bool) -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        q = self.l(x).view(-1, 1, 2, 4).transpose(1, 2)
        q = q.contiguous() if dense else q
        out = F.scaled_dot_product_attention(q.expand(-1, -1, 3, -1).contiguous() if dense else q, q, q)
        return (out.view(-1, 12) if dense else out.transpose(1, 2).view(-1, 8)).pow(2).sum()

    check(Fn(forward, **linear()), x)


def reentrant(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.l(torch.utils.checkpoint.checkpoint(self.l, x, use_reentrant=True)).sum()


@pytest.mark.filterwarnings("ignore:None of the inputs")
def test_reentrant_checkpoints_of_what_has_no_gradient_have_none(x: torch.Tensor) -> None:
    model = Fn(reentrant, **linear())
    check(model, x)
    check(model, x.clone().requires_grad_())
    alone = Fn(lambda s, x: torch.utils.checkpoint.checkpoint(s.l, x, use_reentrant=True).sum(), **linear())
    assert all(r.kind != "grad" for r in capture(alone, (x,)).results)


def test_reentrant_checkpoints_and_hooks_on_gradients_are_refused(x: torch.Tensor) -> None:
    model = Fn(reentrant, **linear())
    handle = model.l.weight.register_post_accumulate_grad_hook(lambda p: None)
    capture(model, (x,))  # nothing leads back into the checkpoint
    with pytest.raises(CaptureError, match=r"l\.weight has a hook on its gradient"):
        capture(model, (x.clone().requires_grad_(),))
    handle.remove()
    capture(model, (x.clone().requires_grad_(),))


def test_autograd_function_and_lstm(x: torch.Tensor) -> None:
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return 2 * grad * ctx.saved_tensors[0]

    check(Fn(lambda s, x: Square.apply(s.l(x)).sum(), **linear()), x)
    joint = check(Fn(lambda s, x: s.r(x[:, None])[0].sum(), r=nn.LSTM(8, 4, batch_first=True)), x)
    assert not any("mkldnn" in op for op in ops(joint))


def test_model_on_meta_with_fixed_device_names() -> None:
    with torch.device("meta"):
        model = Fn(lambda s, x: s.l(x) + torch.arange(8, device="cuda"), **linear())
    joint = capture(model, (torch.empty(4, 8, device="meta"),))
    assert model.l.weight.is_meta and len(ops(joint)) > 3


def test_refusals_name_the_line(x: torch.Tensor) -> None:
    def branch(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = self.l(x)
        if y.sum() > 0:
            return y
        return -y

    cases: list[tuple[Callable[..., Any], str, str]] = [
        (branch, "value of a tensor", "if y.sum() > 0:"),
        (lambda s, x: s.l(x) * x.max().item(), "value of a tensor", "item()"),
        (lambda s, x: s.l(x[x[:, 0] > 0]), "shape of a tensor", "x[:, 0] > 0"),
        (lambda s, x: s.l(x) @ x, "fails while it is traced", "@ x"),
    ]
    for forward, what, text in cases:
        with pytest.raises(CaptureError, match=what) as caught:
            capture(Fn(forward, **linear()), (x,))
        assert "test_capture.py:" in caught.value.where and text in caught.value.where
        assert caught.value.why and caught.value.hint
    assert gc.isenabled() and not torch.compiler.is_compiling()


def test_code_without_a_file(x: torch.Tensor) -> None:
    scope: dict[str, Any] = {}
    exec("def good(s, x):\n    return s.l(x)\ndef bad(s, x):\n    return x if x.sum() > 0 else -x\n", scope)
    joint = check(Fn(scope["good"], **linear()), x)
    assert {n.origin.source for n in joint.graph.nodes} == {"<string>:2"}
    with pytest.raises(CaptureError) as caught:
        capture(Fn(scope["bad"], **linear()), (x,))
    assert caught.value.where == "<string>:4"


def test_parameters_must_not_be_changed_by_forward(x: torch.Tensor) -> None:
    model = Fn(lambda s, x: (s.l.weight.data.mul_(0.5), s.l(x))[1], **linear())
    with pytest.raises(CaptureError, match=r"changes the parameter l\.weight"):
        capture(model, (x,))


def test_outputs_that_cannot_be_written_down(x: torch.Tensor) -> None:
    @dataclass
    class Opaque:
        value: torch.Tensor

    class Nameless:
        def __init__(self, value: torch.Tensor) -> None:
            self.value = value

    pytree.register_pytree_node(Nameless, lambda n: ([n.value], None), lambda v, _: Nameless(*v))
    for make, name in ((Opaque, "Opaque"), (Nameless, "Nameless")):
        with pytest.raises(CaptureError, match=name):
            capture(Fn(lambda s, x, make=make: make(s.l(x)), **linear()), (x,))


# --- lifted ops


def masks() -> dict[str, tuple[torch.Tensor | None, bool]]:
    torch.manual_seed(3)
    empty_row = torch.rand(2, 1, 5, 7) > 0.3
    empty_row[:, :, 2] = False
    return {
        "none": (None, False),
        "causal": (None, True),
        "bool": (torch.rand(2, 1, 5, 7) > 0.3, False),
        "empty row": (empty_row, False),
        "padding": (torch.arange(7) < torch.tensor([[[[4]]], [[[7]]]]), False),
        "float": (torch.randn(5, 7), False),
        "three dims": (torch.randn(3, 5, 7), False),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("channels", [8, 6])
@pytest.mark.parametrize("kind", masks())
def test_sdpa_equals_torch(kind: str, channels: int, dtype: torch.dtype) -> None:
    mask, causal = masks()[kind]
    sizes = ((5, 8), (7, 8), (7, channels))
    q, k, v = (torch.randn(2, 3, n, d, dtype=dtype).requires_grad_() for n, d in sizes)
    mask = mask.to(dtype) if mask is not None and mask.is_floating_point() else mask
    want = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=0.3)
    found, lse = torch.ops.autoshard.sdpa(q, k, v, mask, causal, 0.3)
    grad = torch.randn_like(want)
    close = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 3e-2, "atol": 3e-2}
    torch.testing.assert_close(found, want, **close)
    for a, b in zip(
        torch.autograd.grad(found, (q, k, v), grad), torch.autograd.grad(want, (q, k, v), grad), strict=True
    ):
        torch.testing.assert_close(a, b, **close)
    if dtype == torch.float32 and kind != "empty row":
        scores = (q * 0.3) @ k.transpose(-1, -2)
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
        if causal:
            scores = scores.masked_fill(torch.ones(5, 7, dtype=torch.bool).triu(1), -torch.inf)
        torch.testing.assert_close(lse, scores.logsumexp(-1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_equals_torch(smoothing: float, reduction: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Fn(lambda s, x, t: F.cross_entropy(s.l(x), t, **options), **linear())
    model.to(dtype)
    target = torch.tensor([1, 7, 3, 0, 3])
    options = {"reduction": reduction, "label_smoothing": smoothing, "ignore_index": 3}
    rtol = 1e-4 if dtype == torch.float32 else 5e-2
    joint = check(model, torch.randn(5, 8, dtype=dtype), target, rtol=rtol)
    assert "autoshard.xent.default" in ops(joint) and "autoshard.xent_backward.default" in ops(joint)


def test_other_forms_of_cross_entropy_stay(x: torch.Tensor) -> None:
    weight = torch.rand(8)
    check(Fn(lambda s, x: F.cross_entropy(s.l(x), torch.arange(4), weight=weight), **linear()), x)
    check(Fn(lambda s, x: F.cross_entropy(s.l(x), x.softmax(-1)), **linear()), x)
    joint = check(Fn(lambda s, x: F.cross_entropy(s.l(x)[None], torch.zeros(1, 8).long()), **linear()), x)
    assert not any("autoshard" in op for op in ops(joint))


def test_dropout_mask_does_not_depend_on_sharding() -> None:
    seed = torch.tensor(99)
    full = (6, 10, 8)
    whole = keep_mask(full, 0.3, seed, 2, (0, 0, 0), full)
    part = keep_mask((2, 5, 3), 0.3, seed, 2, (4, 5, 2), full)
    assert torch.equal(part, whole[4:, 5:, 2:5])
    huge = (1 << 20, 1 << 14, 3)
    a = keep_mask((2, 4, 3), 0.5, seed, 0, (1 << 19, 9, 0), huge)
    assert torch.equal(a[1:, 2:], keep_mask((1, 2, 3), 0.5, seed, 0, ((1 << 19) + 1, 11, 0), huge))


def test_dropout_masks_look_random() -> None:
    def mask(seed: int, site: int) -> torch.Tensor:
        return keep_mask((512, 512), 0.25, torch.tensor(seed), site, (0, 0), (512, 512)).double()

    first = mask(0, 0)
    others = (mask(0, 1), mask(1, 0), mask(1 << 32, 0), first.roll(1, 0), first.roll(1, 1), first.T)
    assert abs(first.mean() - 0.75) < 0.005
    for other in others:
        correlation = ((first - 0.75) * (other - 0.75)).mean() / (0.75 * 0.25)
        assert abs(correlation) < 0.01


def test_dropout_is_linear_with_the_same_mask(x: torch.Tensor) -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(self.l(x), 0.5, inplace=True).sum() + torch.dropout(x, 0.5, True).sum()

    model = Fn(forward, **linear())
    joint = capture(model, (x,))
    sites = [n.args[3] for n in joint.graph.nodes if n.op == "autoshard.dropout.default"]
    assert sites == [0, 1, 0]
    assert [p.target for p in joint.ports if p.kind == "input"] == ["0", "seed"]
    first, again, other = (evaluate(joint, model, (x,), seed=s) for s in (1, 1, 2))
    torch.testing.assert_close(first, again)
    assert not torch.equal(first["grad", "l.weight"], other["grad", "l.weight"])


def test_multi_head_attention_is_lifted() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    joint = check(layer, torch.randn(2, 5, 8))
    assert ops(joint).count("autoshard.sdpa.default") == 1
    assert ops(joint).count("autoshard.sdpa_backward.default") == 1
    noisy = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
    assert ops(capture(noisy, (torch.randn(2, 5, 8),))).count("autoshard.dropout.default") == 8


def test_grouped_heads_are_repeated(x: torch.Tensor) -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        q, k = self.l(x).view(1, 4, 4, 2), x.view(1, 4, 2, 4)[..., :2].transpose(1, 2)
        return F.scaled_dot_product_attention(q.transpose(1, 2), k, k, is_causal=True, enable_gqa=True)

    assert "autoshard.sdpa.default" in ops(check(Fn(forward, **linear()), x))


def test_learned_bias_is_not_lifted(x: torch.Tensor) -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        q = self.l(x).view(1, 1, 4, 8)
        return F.scaled_dot_product_attention(q, q, q, attn_mask=self.bias)

    joint = check(Fn(forward, **linear(bias=nn.Parameter(torch.randn(4, 4)))), x)
    assert not any("sdpa" in op for op in ops(joint))


def test_opcheck() -> None:
    q, k, v = (torch.randn(2, 3, 5, 8, requires_grad=True) for _ in range(3))
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    sdpa = torch.ops.autoshard.sdpa.default
    for mask, causal in ((None, True), (torch.rand(2, 1, 5, 5) > 0.3, False)):
        torch.library.opcheck(sdpa, (q, k, v, mask, causal, 0.3), test_utils=checks)
        out, lse = sdpa(q, k, v, mask, causal, 0.3)
        args = (torch.randn_like(out), q, k, v, out, lse, mask, causal, 0.3)
        detached = tuple(a.detach() if isinstance(a, torch.Tensor) else a for a in args)
        torch.library.opcheck(torch.ops.autoshard.sdpa_backward.default, detached, test_utils=checks)
    logits, target = torch.randn(6, 9, requires_grad=True), torch.randint(0, 9, (6,))
    torch.library.opcheck(torch.ops.autoshard.xent.default, (logits, target, -100, 0.1), test_utils=checks)
    lse = logits.detach().logsumexp(1)
    grads = (torch.rand(6), logits.detach(), target, lse, -100, 0.1)
    torch.library.opcheck(torch.ops.autoshard.xent_backward.default, grads, test_utils=checks)
    drop = (torch.randn(4, 6, requires_grad=True), 0.3, torch.tensor(5), 1, [2, 0], [8, 6])
    torch.library.opcheck(torch.ops.autoshard.dropout.default, drop, test_utils=checks)


# --- Hugging Face

SMALL = {"vocab_size": 97, "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32}
LLAMA = {**SMALL, "intermediate_size": 48, "num_key_value_heads": 2}
FAMILIES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "gpt2": (
        {"vocab_size": 97, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4},
        ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    ),
    "llama": (LLAMA, ("attention_dropout",)),
    "mixtral": ({**LLAMA, "num_local_experts": 4}, ("attention_dropout",)),
    "bert": ({**SMALL, "intermediate_size": 48}, ("hidden_dropout_prob", "attention_probs_dropout_prob")),
    "t5": (
        {"vocab_size": 97, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4},
        ("dropout_rate",),
    ),
    "vit": (
        {**SMALL, "intermediate_size": 48, "image_size": 32, "patch_size": 8, "num_labels": 5},
        ("hidden_dropout_prob", "attention_probs_dropout_prob"),
    ),
}
ARCHITECTURES = {"t5": "T5ForConditionalGeneration", "bert": "BertForMaskedLM", "gpt2": "GPT2LMHeadModel"}


def family(
    name: str, folder: Any, *, dropout: float, device: str = "cpu"
) -> tuple[nn.Module, dict[str, Any]]:
    """A two-layer model of a family, from a config file."""
    pytest.importorskip("transformers")
    import json

    from autoshard.interop.huggingface import load_hf_config

    entries, drops = FAMILIES[name]
    config = {"model_type": name, **entries, **dict.fromkeys(drops, dropout)}
    if name == "t5":
        config["decoder_start_token_id"] = 0
    if name in ARCHITECTURES:
        config["architectures"] = [ARCHITECTURES[name]]
    (folder / "config.json").write_text(json.dumps(config))
    model, made = load_hf_config(folder / "config.json", 2, 12, device=device, seed=3)
    return model, made.inputs


@pytest.mark.parametrize("name", FAMILIES)
def test_family_equals_eager(name: str, tmp_path: Any) -> None:
    model, inputs = family(name, tmp_path, dropout=0.0)
    config = copy.deepcopy(model.config)
    joint = capture(model, (), inputs)
    assert model.config == config and model.training
    well_formed(joint)
    results = evaluate(joint, model, (), inputs)
    loss = model(**inputs).loss
    torch.testing.assert_close(results["output", "0"], loss.detach(), rtol=1e-4, atol=1e-6)
    loss.backward()
    compare_grads(model, results, 1e-3)
    assert [p.target for p in joint.ports if p.kind == "tangent"] == ["0"]
    assert "autoshard.sdpa.default" in ops(joint) and "autoshard.xent.default" in ops(joint)
    assert pytree.treespec_loads(joint.out_tree).num_leaves == len(joint.out_leaves)
    layered = [n for n in joint.graph.nodes if n.origin.fqn]
    assert len(layered) > 0.9 * len(joint.graph.nodes)
    assert all("transformers/" in n.origin.source for n in layered if not n.backward)


@pytest.mark.parametrize("name", FAMILIES)
def test_family_with_dropout(name: str, tmp_path: Any) -> None:
    model, inputs = family(name, tmp_path, dropout=0.2)
    joint = capture(model, (), inputs)
    first, again, other = (evaluate(joint, model, (), inputs, seed=s)["output", "0"] for s in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)
    drops = [n for n in joint.graph.nodes if n.op == "autoshard.dropout.default"]
    forward = [n.args[3] for n in drops if not n.backward]
    assert forward == list(range(len(forward)))
    assert sorted(n.args[3] for n in drops if n.backward) == forward


@pytest.mark.parametrize("name", FAMILIES)
def test_family_on_meta_gives_the_same_graph(name: str, tmp_path: Any) -> None:
    real, inputs = family(name, tmp_path, dropout=0.0)
    meta, shapes = family(name, tmp_path, dropout=0.0, device="meta")
    assert all(p.is_meta for p in meta.parameters()) and all(t.is_meta for t in shapes.values())
    assert capture(meta, (), shapes) == capture(real, (), inputs)


def test_causal_models_build_no_mask(tmp_path: Any) -> None:
    model, inputs = family("llama", tmp_path, dropout=0.0)
    attention = [n for n in capture(model, (), inputs).graph.nodes if n.op == "autoshard.sdpa.default"]
    assert all(n.args[3] is None and n.args[4] is True for n in attention)
    padded = {**inputs, "attention_mask": torch.tensor([[1] * 12, [1] * 9 + [0] * 3])}
    joint = capture(model, (), padded)
    results = evaluate(joint, model, (), padded)
    torch.testing.assert_close(results["output", "0"], model(**padded).loss.detach(), rtol=1e-4, atol=1e-6)


def test_packed_sequences_as_in_eager_mode(tmp_path: Any) -> None:
    model, inputs = family("llama", tmp_path, dropout=0.0)
    inputs["position_ids"] = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5]] * 2)
    for kwargs in (inputs, {**inputs, "use_cache": False}):
        results = evaluate(capture(model, (), kwargs), model, (), kwargs)
        want = model(**kwargs).loss.detach()
        torch.testing.assert_close(results["output", "0"], want, rtol=1e-4, atol=1e-6)
