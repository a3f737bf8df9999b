"""What the planner is timed on: models, clusters, and the goals for a cold process."""

from __future__ import annotations

from dataclasses import dataclass

from autoshard.validate.models import Architecture, Experts, Latent


@dataclass(frozen=True)
class Case:
    """One thing to plan.

    mesh: "" to search it. batch: sequences per optimizer step; with a mesh in one piece, in any memory. runs:
    fresh processes, of which the median is shown. goal_s: from a model that was built to its plan; goal_gib:
    of the process; None without a goal. optimizer: see `cost.recipe`.
    """

    name: str
    model: Architecture
    devices: int
    batch: int
    seq: int
    mesh: str = ""
    cluster: str = "h100-dgx"
    optimizer: str = "adamw-fp32"
    runs: int = 3
    goal_s: float | None = None
    goal_gib: float | None = None


#: Llama Team, The Llama 3 Herd of Models (2024), table 3
LLAMA3_8B = Architecture("llama", 32, 4096, 32, 8, 14336, 128256, 8192)
#: DeepSeek-AI, DeepSeek-V3 Technical Report (2024), section 4.2
DEEPSEEK_V3 = Architecture(
    *("deepseek_v3", 61, 7168, 128, 128, 18432, 129280, 4096),
    experts=Experts(256, 8, 2048, shared=2048, dense=3),
    latent=Latent(1536, 512, 128, 64, 128),
)


def gpt(layers: int, hidden: int, heads: int) -> Architecture:
    """A GPT with the vocabulary of Narayanan et al., SC'21, and 2,048 positions."""
    return Architecture("gpt2", layers, hidden, heads, heads, 4 * hidden, 51200, 2048)


#: Narayanan et al., SC'21, table 1
GPT3_175B, GPT_1T = gpt(96, 12288, 96), gpt(128, 25600, 160)

CASES = (
    Case("Llama-3 8B", LLAMA3_8B, 64, 512, 4096, goal_s=2, goal_gib=1),
    Case("GPT-3 175B", GPT3_175B, 1024, 1536, 2048, goal_s=3, goal_gib=1.5),
    Case("GPT 1T", GPT_1T, 3072, 3072, 2048, goal_s=5, goal_gib=1.5),
    Case("DeepSeek-V3 671B", DEEPSEEK_V3, 2048, 2048, 4096, runs=1, goal_s=8, goal_gib=2),
    Case("GPT-3 175B, mesh given", GPT3_175B, 128, 16, 2048, mesh="dp=16,tp=8"),
    Case("GPT 1T", GPT_1T, 100_000, 12_500, 2048, runs=1),
)

#: pairs, the larger first, which says how often both run by turns; goals: how many times the seconds of the
#: smaller the larger may take
DEPTH = (
    Case("96 layers", GPT3_175B, 1024, 1536, 2048, runs=7),
    Case("12 layers", gpt(12, 12288, 96), 1024, 1536, 2048),
)
#: the same layers where memory does not decide: more of a model then only is more of the same
DEPTH_GIVEN = (
    Case("96 layers, mesh given", GPT3_175B, 128, 16, 2048, mesh="dp=16,tp=8", runs=5),
    Case("12 layers, mesh given", gpt(12, 12288, 96), 128, 16, 2048, mesh="dp=16,tp=8"),
)
DEPTH_GOAL = 1.3
WIDTH = (
    Case("8,192 GPUs", GPT3_175B, 8192, 8192, 2048),
    Case("64 GPUs", GPT3_175B, 64, 1536, 2048),
)
WIDTH_GOAL = 2.0
