"""Known-answer models: ordinary model folders with constructed weights, so that every answer is known beforehand."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcheck.core.base.registry import Registry

if TYPE_CHECKING:
    from kvcheck.core.model.family import Family

FAMILIES: Registry[Family] = Registry(
    "architecture of known-answer models",
    {
        "llama": ("kvcheck.core.model.llama:LLAMA", "Llama: MHA, GQA and MQA"),
        "qwen3-next": (
            "kvcheck.core.model.qwen3_next:QWEN3_NEXT",
            "Qwen3-Next: gated delta net, a recurrent state",
        ),
        "deepseek-v3": ("kvcheck.core.model.deepseek_v3:DEEPSEEK_V3", "DeepSeek V3: MLA, a latent for all heads"),
        "deepseek-v32": (
            "kvcheck.core.model.deepseek_v32:DEEPSEEK_V32",
            "DeepSeek V3.2: MLA with an indexer (DSA)",
        ),
        "gpt-oss": (
            "kvcheck.core.model.gpt_oss:GPT_OSS",
            "GPT-OSS: a sliding window and sinks in every second layer",
        ),
    },
)
