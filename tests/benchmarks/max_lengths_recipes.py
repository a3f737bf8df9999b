"""Recipes of ALST for the longest sequence that trains, as snowflakedb/ArcticTraining publishes them.

projects/sequence-parallelism/run-*.yml, each with its ``max_length``; some say what nvidia-smi showed. Nodes
of 8 GPUs with 1.9 TB (README there). Sizes of models are those of their configs.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Decoder:
    """A decoder by its sizes. parameters: how many. qk_norm: whether queries and keys are normalised."""

    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    parameters: float
    qk_norm: bool = False
    head: int = 128

    @property
    def queries(self) -> int:
        return self.heads * self.head

    @property
    def keys(self) -> int:
        return self.kv_heads * self.head


LLAMA_8B = Decoder(4096, 14336, 32, 32, 8, 128256, 8.03e9)
LLAMA_70B = Decoder(8192, 28672, 80, 64, 8, 128256, 70.55e9)
QWEN_32B = Decoder(5120, 25600, 64, 64, 8, 151936, 32.76e9, qk_norm=True)


@dataclass(frozen=True)
class LengthRecipe:
    """A run of one sequence per step and group of ``sequence`` ranks.

    liger: fused kernels for norms, rotations, SwiGLU (where the MLP is not tiled) and the loss. published:
    the longest that trained, in tokens. shown: GB that nvidia-smi showed, None where it is not said. h200:
    with FlashAttention 3 and kernels that index in 64 bits. sdpa: attention of torch, for which keys and
    values are repeated. host_full: whether the source says that the host, not the GPU, was full.
    """

    name: str
    model: Decoder
    gpus: int
    sequence: int
    published: int
    liger: bool = True
    tiled: bool = True
    offload: bool = True
    parameters_away: bool = False
    h200: bool = False
    shown: float | None = None
    sdpa: bool = False
    host_full: bool = False


def _plain(name: str, gpus: int, published: int, **how: object) -> LengthRecipe:
    base = {"liger": False, "tiled": False, "offload": False}
    return LengthRecipe(name, LLAMA_8B, gpus, 1, published, **{**base, **how})  # type: ignore[arg-type]


RECIPES = (
    _plain("h100-sp1-llama-8b-baseline", 1, 36_000, parameters_away=True),
    LengthRecipe("h100-sp1-llama-8b", LLAMA_8B, 1, 1, 500_000, parameters_away=True),
    LengthRecipe("h100-sp1-qwen3-32b", QWEN_32B, 1, 1, 230_000, parameters_away=True),
    _plain("h100-sp8-llama-8b-no-ulysses-no-liger-no-extras", 8, 32_000),
    _plain("h100-sp8-llama-8b-no-ulysses-yes-liger-no-extras", 8, 160_000, liger=True),
    LengthRecipe(
        "h100-sp8-llama-8b-no-mlp-no-act-offload", LLAMA_8B, 8, 8, 1_100_000, tiled=False, offload=False
    ),
    LengthRecipe("h100-sp8-llama-8b-yes-mlp", LLAMA_8B, 8, 8, 1_200_000, offload=False, sdpa=True),
    LengthRecipe("h100-sp8-llama-8b-yes-act-offload", LLAMA_8B, 8, 8, 2_400_000, tiled=False),
    LengthRecipe("h100-sp8-llama-8b", LLAMA_8B, 8, 8, 3_800_000),
    LengthRecipe("h100-sp8-llama-70b", LLAMA_70B, 8, 8, 200_000, offload=False, host_full=True),
    LengthRecipe("h100-sp8-qwen3-32b", QWEN_32B, 8, 8, 1_550_000),
    LengthRecipe("h100-sp16-llama-8b", LLAMA_8B, 16, 16, 8_000_000),
    LengthRecipe("h100-sp16-llama-70b", LLAMA_70B, 16, 16, 1_200_000),
    LengthRecipe("h100-sp16-qwen3-32b", QWEN_32B, 16, 16, 4_000_000),
    _plain("h100-sp32-llama-8b-baseline", 32, 36_000),
    LengthRecipe("h100-sp32-llama-8b", LLAMA_8B, 32, 32, 15_500_000),
    LengthRecipe("h100-sp32-llama-70b", LLAMA_70B, 32, 32, 4_000_000, shown=47.70, host_full=True),
    LengthRecipe("h100-sp32-qwen3-32b", QWEN_32B, 32, 32, 7_000_000, shown=71.55),
    LengthRecipe("h100-sp64-llama-70b", LLAMA_70B, 64, 64, 10_000_000, shown=53.83, host_full=True),
    LengthRecipe("h100-sp64-qwen3-32b", QWEN_32B, 64, 64, 15_000_000, shown=71.00),
    _plain("h200-sp1-llama-8b-baseline", 1, 65_000, parameters_away=True, h200=True, shown=137.36),
    _plain("h200-sp1-llama-8b-liger", 1, 300_000, parameters_away=True, h200=True, shown=134.96, liger=True),
    LengthRecipe(
        "h200-sp1-llama-8b-liger-offload",
        LLAMA_8B,
        1,
        1,
        650_000,
        tiled=False,
        parameters_away=True,
        h200=True,
        shown=126.81,
    ),
    LengthRecipe(
        "h200-sp1-llama-8b-liger-offload-tiled-mlp",
        LLAMA_8B,
        1,
        1,
        1_200_000,
        parameters_away=True,
        h200=True,
        shown=136.15,
    ),
)
