"""``python -m benchmarks.audit_plans``: the tensor-parallel plans that transformers has, audited.

Every text model with a plan, tiny and random, is sharded on two ranks, and its gradients are compared with
those of one device. Writes a table in markdown.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

os.environ["TRANSFORMERS_VERBOSITY"] = "error"

import torch
import transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from transformers.distributed.tensor_parallel import apply_tensor_parallelism
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as KINDS

import autoshard
from autoshard.auditing.findings import AuditReport
from benchmarks.gpu import table

#: sizes, by all names that configs have for them; a config ignores those it does not know
SMALL: dict[str, Any] = dict.fromkeys(
    ("hidden_size", "n_embd", "moe_intermediate_size", "shared_expert_intermediate_size",
     "expert_ffn_hidden_size"), 32,
) | dict.fromkeys(
    ("intermediate_size", "ffn_hidden_size", "n_inner", "mamba_d_ssm", "vocab_size", "n_positions",
     "max_position_embeddings", "vocab_size_per_layer_input"), 64,
) | dict.fromkeys(
    ("head_dim", "global_head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "mamba_d_head",
     "mamba_head_dim", "mamba_n_heads", "mamba_num_heads", "mamba_d_state", "ssm_state_size", "laurel_rank",
     "query_pre_attn_scalar", "hidden_size_per_layer_input"), 8,
) | dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16) | dict.fromkeys(
    ("num_attention_heads", "n_head", "num_experts", "num_local_experts", "n_routed_experts", "rotary_dim",
     "sliding_window"), 4,
) | dict.fromkeys(
    ("num_hidden_layers", "num_layers", "n_layer", "num_key_value_heads", "num_experts_per_tok", "moe_topk",
     "zero_expert_num", "eos_token_id"), 2,
) | dict.fromkeys(
    ("n_group", "topk_group", "n_groups", "mamba_n_groups", "first_k_dense_replace", "n_shared_experts",
     "bos_token_id"), 1,
) | dict.fromkeys(
    ("attention_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "hidden_dropout", "residual_dropout",
     "embedding_dropout"), 0.0,
) | {"num_kv_shared_layers": 0, "pad_token_id": 0, "use_cache": False}  # fmt: skip
#: what `--flags` turns on where a config knows it
FLAGS = (
    "use_qk_norm", "qk_layernorm", "attention_bias", "mlp_bias", "use_bias", "qkv_bias", "tie_word_embeddings"
)  # fmt: skip
#: without kernels, which have no float64
EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}
LARGEST = 4_000_000
SECONDS = 90
PROVED, SAME, DIFFERS, RAISES, LEFT_OUT = "proved", "equal", "a difference", "raises", "left out"
_numbers = torch.Generator().manual_seed(0)
BATCH = {name: torch.randint(3, 64, (2, 8), generator=_numbers) for name in ("input_ids", "labels")}


@dataclass(frozen=True)
class Row:
    """What came of a model type. flags: those that its config knows."""

    kind: str
    outcome: str
    said: str = ""
    flags: tuple[str, ...] = ()


def kinds() -> list[str]:
    """The text models of transformers that have a plan."""
    known = ((kind, CONFIG_MAPPING[kind]) for kind in sorted(KINDS))
    return [kind for kind, cls in known if getattr(cls, "base_model_tp_plan", None) and not cls.sub_configs]


def build(kind: str, **more: Any) -> nn.Module:
    """A tiny model with random weights.

    Raises:
        ValueError: its config has sizes that `SMALL` does not know.
    """
    cls = CONFIG_MAPPING[kind]
    heads = (
        {"num_key_value_heads": 4} if hasattr(cls, "kv_lora_rank") else {}
    )  # latent attention has no groups
    config = cls(**SMALL | heads | more)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, **EAGER)
    count = sum(p.numel() for p in model.parameters())
    if count > LARGEST:
        raise ValueError(f"{count} parameters of a small config")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64, **EAGER)
    with torch.no_grad():  # biases and what starts at zero, so that all gradients say something
        for name, p in model.named_parameters():
            if (p.dim() == 1 and ("bias" in name or "sinks" in name)) or not p.any():
                p.normal_(0, 0.1)
    trained: nn.Module = model.train()
    return trained


def sharded(model: Any, tp_plan: dict[str, str] | None = None) -> nn.Module:
    """A rank's shards by the plan of the model and additions to it, made as `from_pretrained` makes them."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    plan, _, _ = model._resolve_parallel_plans(DistributedConfig(tp_size=2, tp_plan=tp_plan))
    model._tp_size = 2
    for name, p in list(model.named_parameters(remove_duplicate=False)):  # tied ones are tied after sharding
        owner, _, key = name.rpartition(".")
        setattr(model.get_submodule(owner), key, nn.Parameter(p.detach().clone()))
    shards: Any = apply_tensor_parallelism(model, mesh, plan)
    shards.tie_weights(recompute_mapping=False)
    return shards


def audited(model: nn.Module, tp_plan: dict[str, str] | None = None) -> AuditReport:
    """The report of one step of two ranks."""
    with autoshard.audit(model, "tp=2", batch=BATCH) as audit:
        return audit.rank(lambda copy: sharded(copy, tp_plan)(**BATCH).loss.backward())


def row(kind: str, flags: bool = False) -> Row:
    """Audit a type. An error of the model on one device leaves it out."""
    known = tuple(f for f in FLAGS if flags and hasattr(CONFIG_MAPPING[kind], f))
    try:
        with _at_most(SECONDS):
            report = audited(build(kind, **dict.fromkeys(known, True)))
    except Exception as error:
        return Row(kind, LEFT_OUT, f"{type(error).__name__}: {' '.join(str(error).split())}", known)
    if report.ok and report.proof is not None:
        return Row(kind, SAME if report.proof.why else PROVED, report.proof.why, known)
    outcome = RAISES if report.findings[0].kind == "error" else DIFFERS
    said = "; ".join(f"{f.what} ({f.lines[0].split(',')[0]})" if f.lines else f.what for f in report.findings)
    return Row(kind, outcome, said, known)


@contextmanager
def _at_most(seconds: int) -> Iterator[None]:
    def late(*_: object) -> None:
        raise TimeoutError(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def page(rows: Iterable[Row]) -> Iterator[str]:
    """Lines of markdown: a count, and a row for each type with something to say."""
    found = list(rows)
    count = ", ".join(
        f"{sum(r.outcome == o for r in found)} {o}" for o in (PROVED, SAME, DIFFERS, RAISES, LEFT_OUT)
    )
    versions = f"transformers {transformers.__version__}, torch {torch.__version__}"
    yield f"{versions}, tp=2. {len(found)} types: {count}."
    yield ""
    cells = [(f"`{r.kind}`", r.outcome, _short(r.said), _short(", ".join(r.flags))) for r in found]
    yield from table(("type", "outcome", "finding", "flags"), (c for c in cells if c[1] != PROVED))


def _short(text: str, most: int = 240) -> str:
    text = text.replace("|", "\\|")
    return text if len(text) <= most else f"{text[:most]} ..."


def measured(names: Iterable[str], flags: bool, say: Callable[[str], None]) -> Iterator[Row]:
    for kind in names:
        start = time.time()
        try:  # a process each, as memory of one that takes too long stays with its threads
            with ProcessPoolExecutor(1, get_context("fork")) as pool:
                found = pool.submit(row, kind, flags).result()
        except BrokenProcessPool:
            found = Row(kind, LEFT_OUT, "its process was killed, as for want of memory")
        say(f"{kind}: {found.outcome} {found.said} ({time.time() - start:.1f} s)")
        yield found


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.audit_plans", description=__doc__)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help="model types of transformers; default: all")
    parser.add_argument("--flags", action="store_true", help=f"with {', '.join(FLAGS)} where there are")
    parser.add_argument(
        "-o", "--out", type=Path, metavar="FILE", help="where the table goes; default: stdout"
    )
    told = parser.parse_args()
    rows = measured(told.kinds or kinds(), told.flags, lambda text: print(text, file=sys.stderr, flush=True))
    text = "\n".join(page(rows)) + "\n"
    told.out.write_text(text) if told.out else print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
