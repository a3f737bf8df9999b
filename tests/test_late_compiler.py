"""Planning does not load torch's compiler; who uses it afterwards gets it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PLAN = """
import sys
from typer.testing import CliRunner
from autoshard.cli.main import app
words = ["plan", "hf:" + sys.argv[1], "--cluster", "h100-dgx", "--gpus", "2", "--batch", "4", "--seq", "8"]
done = CliRunner().invoke(app, words)
assert done.exit_code == 0, done.output
heavy = ("torch._dynamo.eval_frame", "torch._inductor.compile_fx", "torch._functorch.aot_autograd")
assert not [name for name in heavy if name in sys.modules]
"""

#: decorated while the compiler is not there, used when it is
USE = """
import torch
from autoshard.torch_adapters.late_compiler import defer_compiler
defer_compiler()
import sys

@torch.compiler.disable
def plain(x):
    return x + torch.compiler.is_compiling()

@torch.compiler.disable(recursive=False)
def around(x):
    return x * 2

@torch._dynamo.allow_in_graph
def allowed(x):
    return x.sin()

assert plain(torch.ones(1)).item() == 1 and around(torch.ones(1)).item() == 2
import torch._dynamo.config, torch._inductor.config
torch._dynamo.config.recompile_limit = 5
assert "torch._dynamo.eval_frame" not in sys.modules
graphs = []

def backend(module, inputs):
    graphs.append(module)
    return module

@torch.compile(backend=backend)
def f(x):
    y = allowed(x) * 2
    return around(plain(y)) + 1

x = torch.rand(3)
torch.testing.assert_close(f(x), (x.sin() * 2) * 2 + 1)
assert "torch._dynamo.eval_frame" in sys.modules and len(graphs) == 2
assert [n.target for n in graphs[0].graph.nodes if n.op == "call_function"][0] is allowed
assert torch._dynamo.config.recompile_limit == 5
assert torch._dynamo.config is sys.modules["torch._dynamo.config"]
torch.testing.assert_close(torch.compile(torch.sin, backend="aot_eager")(x), x.sin())
from torch._inductor.compile_fx import compile_fx
from torch._dynamo.eval_frame import DisableContext
import torch._dynamo.eval_frame as again
assert again.DisableContext is DisableContext is torch._dynamo.eval_frame.DisableContext
before = torch._dynamo
defer_compiler()
assert torch._dynamo is before is sys.modules["torch._dynamo"]
"""


def run(code: str, *args: str) -> None:
    done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def test_planning_does_not_load_the_compiler(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
    config = {"model_type": "llama", "vocab_size": 32, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    run(PLAN, str(tmp_path))


def test_the_compiler_is_there_for_whoever_uses_it() -> None:
    run(USE)


def test_a_module_of_the_compiler_brings_its_package() -> None:
    run(
        "import torch, sys\n"
        "from autoshard.torch_adapters.late_compiler import defer_compiler\n"
        "defer_compiler()\n"
        "from torch._dynamo.source import ConstantSource\n"
        "import torch._dynamo.source as source\n"
        "assert source is sys.modules['torch._dynamo.source'] and source.ConstantSource is ConstantSource\n"
        "assert source is torch._dynamo.source and torch._dynamo.optimize\n"
    )
