"""Which transformer a row means."""

from __future__ import annotations

import re
from dataclasses import dataclass

from autoshard.errors import UsageError
from autoshard.validate.models import Architecture, Experts, Kind, Latent
from autoshard.validate.rows import Run

#: families by the names that people give their models
_LLAMA = r"llama|mistral|qwen|yi\b|internlm|baichuan|vicuna|codestral|smollm|olmo|deepseek"
_GPT = r"gpt|mpt|opt\b|bloom|turing|nlg|bert|megatron|falcon|pythia|galactica|jurassic"
#: relative distance between the parameters that a row states and those of a formula that still agree
_NEAR = 0.1


@dataclass(frozen=True)
class KnownSizes:
    """The sizes of a model. note: how its family was told, where its name does not say or says another."""

    shape: Architecture
    note: str


def architecture_of(run: Run, padded_vocab: int) -> KnownSizes:
    """The transformer of a run; padded_vocab: rows of its embedding.

    With experts, one of the architectures with experts, shared ones or latent attention; else
    a gated feed-forward layer, untied embeddings and rotary positions (``llama``) or two products, one
    embedding and learned positions (``gpt2``): by the parameters that the row states, where one of the two
    agrees with them, else by the name of the model, else by its widths.

    Raises UsageError for what neither is.
    """
    if run.experts:
        return _with_experts(run, padded_vocab)
    kind, note = _kind(run)
    if kind == "gpt2" and run.kv_heads != run.heads:
        raise UsageError(
            f"a {run.model or 'GPT'} with {run.heads} heads and {run.kv_heads} heads of keys and values",
            where=run.id,
            why="models with two products in a feed-forward layer have as many of both here",
        )
    head = run.head_dim if kind == "llama" and run.head_dim else run.hidden // run.heads
    if kind == "llama" and head % 2:
        raise UsageError(f"heads of {head} elements", where=run.id, why="rotary positions need pairs")
    shape = Architecture(*(kind, *_sizes(run)), padded_vocab, positions=run.seq, head_dim=head)
    return KnownSizes(shape, note)


def _sizes(run: Run) -> tuple[int, int, int, int, int]:
    return run.layers, run.hidden, run.heads, run.kv_heads, run.ffn


def _with_experts(run: Run, padded_vocab: int) -> KnownSizes:
    """Raises UsageError for shared experts that are no multiple of others, or are not there beside latent
    attention."""
    experts = Experts(run.experts, run.topk, run.expert_ffn, run.shared_ffn, run.dense_layers)
    latent, told = None, run.latent
    if run.shared_ffn % run.expert_ffn:
        raise UsageError(f"shared experts of {run.shared_ffn}, others of {run.expert_ffn}", where=run.id)
    if told is not None:
        if not run.shared_ffn:
            raise UsageError("latent attention in layers without shared experts", where=run.id)
        widths = (told.kv_lora_rank, told.qk_nope_head_dim, told.qk_rope_head_dim, told.v_head_dim)
        if not all(widths):
            raise UsageError("latent attention without its widths", where=run.id)
        latent = Latent(told.q_lora_rank, *widths)
    kind: Kind = "deepseek_v3" if latent else "glm4_moe" if run.shared_ffn else "qwen3_moe"
    head = run.head_dim or run.hidden // run.heads
    shape = Architecture(
        kind,
        *_sizes(run),
        padded_vocab,
        run.seq,
        head_dim=0 if latent else head,
        experts=experts,
        latent=latent,
    )
    left = [word for word in ("sinks", "window", "hyper", "indexer") if word in run.notes.lower()]
    return KnownSizes(shape, f"left out of {run.model}: {', '.join(left)} of attention" if left else "")


def parameters(run: Run, kind: Kind) -> int:
    """How many a model of these sizes has."""
    h, keys = run.hidden, run.hidden // run.heads * run.kv_heads
    if kind == "llama":
        layer = 2 * h * h + 2 * h * keys + 3 * h * run.ffn + 2 * h
        return run.layers * layer + 2 * run.vocab * h + h
    layer = 2 * h * h + 2 * h * keys + 2 * h * run.ffn + (2 * h + 2 * keys) + (run.ffn + h) + 4 * h
    return run.layers * layer + (run.vocab + run.seq) * h + 2 * h


def _kind(run: Run) -> tuple[Kind, str]:
    named = _by_name(run)
    if run.params is not None:
        kinds: tuple[Kind, Kind] = ("gpt2", "llama")
        off = {kind: abs(parameters(run, kind) / run.params - 1) for kind in kinds}
        fitting = [kind for kind in kinds if off[kind] <= _NEAR]
        if len(fitting) == 1 or (fitting and named is None):
            best = min(fitting, key=lambda kind: off[kind])
            told = f"{run.model or 'the model'} is taken as {_words(best)} by its params_b"
            return best, "" if best == named else told
    if named is not None:
        return named, ""
    taken = f"{run.model or 'the model'} is taken as"
    if run.kv_heads < run.heads or run.ffn < 4 * run.hidden:
        return "llama", f"{taken} {_words('llama')} by its kv_heads and ffn"
    return "gpt2", f"{taken} {_words('gpt2')} by its ffn"


def _by_name(run: Run) -> Kind | None:
    text = f"{run.model} {run.notes}".lower()
    if re.search(_LLAMA, text) or "swiglu" in text or "gated" in text:
        return "llama"
    return "gpt2" if re.search(_GPT, text) else None


def _words(kind: Kind) -> str:
    return "a Llama (gated, untied)" if kind == "llama" else "a GPT (two products, tied)"
