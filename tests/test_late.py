"""Planning loads neither torch's compiler nor its symbols, nor what transformers does not need; who uses them
afterwards gets them."""

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
heavy += ("sympy.core", "scipy.optimize._optimize", "torch.distributed.fsdp", "transformers.models.detr")
assert not [name for name in heavy if name in sys.modules]
"""

#: what was not loaded, used afterwards in the same process
AFTER = (
    PLAN
    + """
import torch, scipy.optimize, transformers.modeling_utils
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, guard_or_false
assert guard_or_false(True) is True and "sympy.core" not in sys.modules
from transformers.loss.loss_for_object_detection import linear_sum_assignment as taken_late
assert type(taken_late).__name__ == "LateName"
rows, cols = taken_late([[2.0, 1.0], [1.0, 2.0]])
assert cols.tolist() == [1, 0]
assert scipy.optimize.linear_sum_assignment is sys.modules["scipy.optimize"].linear_sum_assignment
assert scipy.optimize.__all__ and type(sys.modules["scipy.optimize"]).__name__ == "module"
from scipy.optimize import Bounds
assert Bounds(0, 1).lb == 0

# a function that modeling code took, and the module it is from
assert transformers.modeling_utils.verify_tp_plan({}, None) is None
import transformers.distributed.tensor_parallel as parallel
assert transformers.modeling_utils.verify_tp_plan == parallel.verify_tp_plan
assert type(parallel.verify_tp_plan).__name__ == "function"

# shapes that depend on values: the class that was taken before catches what is raised later
class Branches(torch.nn.Module):
    def forward(self, x):
        return x + 1 if int(x.sum()) > 3 else x

from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.experimental import symbolic_shapes
assert issubclass(symbolic_shapes.GuardOnDataDependentSymNode, GuardOnDataDependentSymNode)
mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
with mode:
    count = torch.ones(3).sum().item()
    try:
        bool(count > 3)
    except GuardOnDataDependentSymNode as error:
        assert "sympy" in type(error.cond).__module__
    else:
        raise AssertionError("nothing raised")
assert "sympy.core" in sys.modules
import sympy
assert sympy.__version__ and sympy.simplify("x + x") == 2 * sympy.Symbol("x")
dynamic = torch.export.Dim("batch")
program = torch.export.export(torch.nn.Linear(2, 2), (torch.ones(3, 2),), dynamic_shapes=[{0: dynamic}])
assert program.module()(torch.ones(5, 2)).shape == (5, 2)

# tensors on meshes
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
mesh = dist.init_device_mesh("cpu", (2,))
held = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])
assert isinstance(held, DTensor) and (held + held).to_local().shape == (2, 2)
"""
)

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
    run(PLAN, str(_config(tmp_path)))


def test_what_was_not_loaded_is_there_for_whoever_uses_it(tmp_path: Path) -> None:
    run(AFTER, str(_config(tmp_path)))


def _config(tmp_path: Path) -> Path:
    pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
    config = {"model_type": "llama", "vocab_size": 32, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


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


#: names that transformers would know from its files, wanted after planning
NAMES = (
    PLAN
    + """
names = sys.modules["transformers"]
assert type(names).__name__ == type(names.models).__name__ == "LateNames"
import transformers.utils
assert transformers.utils._LazyModule is transformers.utils.import_utils._LazyModule
assert transformers.utils._LazyModule.__name__ == "_LazyModule"
from transformers import PreTrainedModel, cache_utils
assert type(names).__name__ == "LateNames"
assert not hasattr(names, "__wrapped__") and names.__version__
from transformers import LlamaForCausalLM
assert type(names).__name__ == "_LazyModule" and names is sys.modules["transformers"]
assert LlamaForCausalLM is sys.modules["transformers.models.llama.modeling_llama"].LlamaForCausalLM
assert names.PreTrainedModel is PreTrainedModel and names.cache_utils is cache_utils
try:
    from transformers import NoSuchModel
except ImportError as error:
    assert "NoSuchModel" in str(error)
else:
    raise AssertionError("nothing raised")
from transformers.models import bert
assert bert.BertModel is names.BertModel
import pickle
again = pickle.dumps(LlamaForCausalLM)
assert pickle.loads(again) is LlamaForCausalLM
"""
)

HUB = """
import sys
from autoshard.interop.late_imports import LateName, late_imports
with late_imports():
    import transformers.utils.hub as hub
assert type(hub._CACHED_NO_EXIST) is LateName and "HfApi" in str(hub.__annotations__["_hf_api"])
assert hub.try_to_load_from_cache("some/model", "config.json", cache_dir=sys.argv[1]) is None
import huggingface_hub.file_download as real
assert hub._CACHED_NO_EXIST is real._CACHED_NO_EXIST and hub.hf_hub_download is real.hf_hub_download
import huggingface_hub
assert isinstance(hub.hf_api(), huggingface_hub.HfApi) and hub.HfApi is huggingface_hub.HfApi
assert hub.cached_file(sys.argv[1], "config.json") is not None
from transformers import AutoConfig
assert AutoConfig.from_pretrained(sys.argv[1]).model_type == "llama"
"""

#: all that is in transformers, as a whole, on one line
ALL = """
import hashlib, json
import transformers, transformers.models
tables = [sorted(map(str, m.__all__)) + sorted(dir(m)) for m in (transformers, transformers.models)]
missing = {n: sorted(map(str, b)) for n, b in transformers._object_missing_backend.items()}
print(hashlib.sha256(json.dumps([tables, sorted(missing.items())]).encode()).hexdigest(), len(tables[0]))
"""

BEFORE = """
from autoshard.interop.late_imports import late_imports
with late_imports():
    import transformers.models.auto.modeling_auto
assert type(transformers).__name__ == "LateNames"
"""


def test_names_of_transformers_are_found_when_they_are_wanted(tmp_path: Path) -> None:
    run(NAMES, str(_config(tmp_path)))


def test_what_only_downloads_need_is_the_real_thing_once_it_is_used(tmp_path: Path) -> None:
    run(HUB, str(_config(tmp_path)))


def test_all_names_of_transformers_are_what_they_are_without_us() -> None:
    plain, late = (
        subprocess.run([sys.executable, "-c", c + ALL], capture_output=True, text=True)
        for c in ("import transformers.models.auto.modeling_auto", BEFORE)
    )
    assert plain.returncode == late.returncode == 0, late.stderr[-3000:]
    assert late.stdout == plain.stdout and late.stdout
