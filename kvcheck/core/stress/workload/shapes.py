"""Model presets: micro and tiny shapes for the simulator, and the public dimensions of real models for benchmarks.

A tiny shape keeps page kinds, packed rows and layer patterns of its family and shrinks the rest, but not an NSA index
page: 64 keys of 128 bytes and 64 fp32 scales are 8448 bytes, as in real models. Pages have 64 tokens in the latent
families, whose kernels require it, else 16. A micro shape has pages of two tokens, one or two words in each row, and
two layers. An answering shape keeps the width of rows and states, and has pages of 4 or 8 tokens.

Invariants:
- Every row of every buffer, and every per-layer state, is a multiple of 8 bytes in the micro and tiny shapes. The one
  fp32 scale of an NSA index key is half of that, in all shapes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import torch

from kvcheck.core.base.errors import UsageError
from kvcheck.core.base.registry import unknown_name
from kvcheck.core.cache.pools.shape import ModelShape


def shape(name: str) -> ModelShape:
    if name in SHAPES:
        return SHAPES[name]
    raise UsageError(unknown_name("shape", name, SHAPES))


def _layers(count: int) -> tuple[int, ...]:
    return tuple(range(count))


def _every_fourth(count: int) -> tuple[int, ...]:
    return tuple(range(3, count, 4))


def _but_every_fourth(count: int) -> tuple[int, ...]:
    return tuple(layer for layer in range(count) if layer % 4 != 3)


_FP8: Final = torch.float8_e4m3fn

_TINY: Final = (
    ModelShape(
        name="glm-5.1-tiny",
        family="nsa",
        page_size=64,
        full_layers=_layers(2),
        latent_dim=16,
        index_head_dim=128,
        source="GLM-5.1 with 2 layers and a 16-element latent; index pages have their real size of 8448 bytes.",
    ),
    ModelShape(
        name="deepseek-v3.2-tiny",
        family="nsa",
        page_size=64,
        full_layers=_layers(2),
        kv_dtype=_FP8,
        latent_dim=24,
        latent_row_bytes=40,
        index_head_dim=128,
        source="DeepSeek-V3.2 with 2 layers and a packed row of 40 bytes: 16 fp8, 2 fp32 scales, 8 bf16.",
    ),
    ModelShape(
        name="deepseek-v3-tiny",
        family="mla",
        page_size=8,
        full_layers=_layers(2),
        latent_dim=16,
        source="DeepSeek-V3 with 2 layers and a 16-element latent.",
    ),
    ModelShape(
        name="llama-3-tiny",
        family="mha",
        page_size=4,
        full_layers=_layers(2),
        num_kv_heads=2,
        head_dim=8,
        source="Llama 3 8B with 2 layers and 2 KV heads of 8.",
    ),
    ModelShape(
        name="llama-3-fp8-tiny",
        family="mha",
        page_size=8,
        full_layers=_layers(2),
        kv_dtype=_FP8,
        num_kv_heads=4,
        head_dim=16,
        scale_block=8,
        source="Llama 3 8B in fp8 with 2 layers and 4 KV heads of 16, one fp32 scale for 8 elements.",
    ),
    ModelShape(
        name="gpt-oss-tiny",
        family="swa",
        page_size=4,
        full_layers=(1, 3),
        window_layers=(0, 2),
        num_kv_heads=2,
        head_dim=8,
        window=10,
        source="gpt-oss-20b with 4 layers; its window of 10 tokens ends inside a page.",
    ),
    ModelShape(
        name="qwen3-next-tiny",
        family="mamba",
        page_size=8,
        full_layers=_every_fourth(4),
        state_layers=_but_every_fourth(4),
        num_kv_heads=1,
        head_dim=16,
        conv_dim=16,
        conv_kernel=4,
        ssm_heads=2,
        ssm_key_dim=4,
        ssm_value_dim=4,
        source="Qwen3-Next 80B with one group of four layers. conv_dim is 2 * 1 * 4 + 2 * 4.",
    ),
)

_MICRO: Final = (
    ModelShape(
        name="glm-5.1-micro",
        family="nsa",
        page_size=2,
        full_layers=_layers(2),
        latent_dim=4,
        index_head_dim=8,
        index_quant_block=8,
        source="glm-5.1-tiny with pages of 2, a latent of a word, and index keys of a word with half a one of scale.",
    ),
    ModelShape(
        name="deepseek-v3.2-micro",
        family="nsa",
        page_size=2,
        full_layers=_layers(2),
        kv_dtype=_FP8,
        latent_dim=6,
        latent_row_bytes=16,
        index_head_dim=8,
        index_quant_block=8,
        source="deepseek-v3.2-tiny with pages of 2 and a packed row of 16 bytes: 4 fp8, 2 fp32 scales, 2 bf16.",
    ),
    ModelShape(
        name="deepseek-v3-micro",
        family="mla",
        page_size=2,
        full_layers=_layers(2),
        latent_dim=4,
        source="deepseek-v3-tiny with pages of 2 and a latent of one word.",
    ),
    ModelShape(
        name="llama-3-micro",
        family="mha",
        page_size=2,
        full_layers=_layers(2),
        num_kv_heads=2,
        head_dim=4,
        source="llama-3-tiny with pages of 2 and KV heads of one word.",
    ),
    ModelShape(
        name="llama-3-fp8-micro",
        family="mha",
        page_size=2,
        full_layers=_layers(2),
        kv_dtype=_FP8,
        num_kv_heads=4,
        head_dim=8,
        scale_block=4,
        source="llama-3-fp8-tiny with pages of 2 and 4 KV heads of one word, one fp32 scale for 4 elements.",
    ),
    ModelShape(
        name="gpt-oss-micro",
        family="swa",
        page_size=2,
        full_layers=(1,),
        window_layers=(0,),
        num_kv_heads=2,
        head_dim=4,
        window=5,
        source="gpt-oss-tiny with 2 layers and pages of 2; its window of 5 tokens ends inside a page.",
    ),
    ModelShape(
        name="qwen3-next-micro",
        family="mamba",
        page_size=2,
        full_layers=(1,),
        state_layers=(0,),
        num_kv_heads=1,
        head_dim=4,
        conv_dim=8,
        conv_kernel=3,
        ssm_heads=2,
        ssm_key_dim=1,
        ssm_value_dim=2,
        source="qwen3-next-tiny with 2 layers and pages of 2; a state of 2 heads of 1 by 2.",
    ),
)

_LLAMA_8B: Final = ModelShape(
    name="llama-3-8b",
    family="mha",
    page_size=16,
    full_layers=_layers(32),
    num_kv_heads=8,
    head_dim=128,
    hidden_size=4096,
    source="Llama 3 8B with 32 layers and 8 KV heads of 128. From config.json of meta-llama/Meta-Llama-3-8B.",
)
_GPT_OSS_20B: Final = ModelShape(
    name="gpt-oss-20b",
    family="swa",
    page_size=16,
    full_layers=tuple(range(1, 24, 2)),
    window_layers=tuple(range(0, 24, 2)),
    num_kv_heads=8,
    head_dim=64,
    window=128,
    hidden_size=2880,
    source="gpt-oss-20b with 24 layers, windows of 128 and full attention in turn, and 8 KV heads of 64. From "
    "config.json of openai/gpt-oss-20b.",
)
_REAL: Final = (
    ModelShape(
        name="glm-5.1",
        family="nsa",
        page_size=64,
        full_layers=_layers(78),
        latent_dim=512 + 64,
        index_head_dim=128,
        hidden_size=6144,
        source="GLM-5.1 with 78 layers, a latent of 512 and index keys of 128. From GlmMoeDsaConfig defaults, which "
        "are zai-org/GLM-5: kv_lora_rank 512, qk_rope_head_dim 64, index_head_dim 128 (32 index heads); "
        "Megatron Bridge documents zai-org/GLM-5.1 as the same architecture (its own config.json was not "
        "read); without the multi-token-prediction layer.",
    ),
    ModelShape(
        name="deepseek-v3.2",
        family="nsa",
        page_size=64,
        full_layers=_layers(61),
        kv_dtype=_FP8,
        latent_dim=512 + 64,
        latent_row_bytes=512 + 4 * 4 + 64 * 2,
        index_head_dim=128,
        hidden_size=7168,
        source="DeepSeek-V3.2 with 61 layers and packed rows of 656 bytes: 512 fp8, 4 fp32 scales, 64 bf16. From "
        "config.json of deepseek-ai/DeepSeek-V3.2: kv_lora_rank 512, qk_rope_head_dim 64, index_head_dim 128 "
        "(64 index heads); the row is the layout of FlashMLA's sparse kernels; without the "
        "multi-token-prediction layer.",
    ),
    ModelShape(
        name="deepseek-v3",
        family="mla",
        page_size=64,
        full_layers=_layers(61),
        latent_dim=512 + 64,
        hidden_size=7168,
        source="DeepSeek-V3 with 61 layers and a latent of 512. From config.json of deepseek-ai/DeepSeek-V3: "
        "kv_lora_rank 512, qk_rope_head_dim 64; without the multi-token-prediction layer.",
    ),
    _LLAMA_8B,
    replace(
        _LLAMA_8B,
        name="llama-3-70b",
        full_layers=_layers(80),
        hidden_size=8192,
        source="Llama 3 70B with 80 layers and 8 KV heads of 128. From config.json of meta-llama/Meta-Llama-3-70B.",
    ),
    ModelShape(
        name="llama-3-8b-fp8",
        family="mha",
        page_size=16,
        full_layers=_layers(32),
        kv_dtype=_FP8,
        num_kv_heads=8,
        head_dim=128,
        scale_block=128,
        hidden_size=4096,
        source="Llama 3 8B with fp8 rows. One fp32 scale for each token and head is this preset's choice.",
    ),
    _GPT_OSS_20B,
    replace(
        _GPT_OSS_20B,
        name="gpt-oss-120b",
        full_layers=tuple(range(1, 36, 2)),
        window_layers=tuple(range(0, 36, 2)),
        source="gpt-oss-120b with 36 layers, windows of 128 and full attention in turn, and 8 KV heads of 64. From "
        "config.json of openai/gpt-oss-120b.",
    ),
    ModelShape(
        name="qwen3-next-80b",
        family="mamba",
        page_size=16,
        full_layers=_every_fourth(48),
        state_layers=_but_every_fourth(48),
        num_kv_heads=2,
        head_dim=256,
        conv_dim=2 * 16 * 128 + 32 * 128,
        conv_kernel=4,
        ssm_heads=32,
        ssm_key_dim=128,
        ssm_value_dim=128,
        hidden_size=2048,
        source="Qwen3-Next 80B with 48 layers: every fourth has KV, the others a recurrent state. From config.json "
        "of Qwen/Qwen3-Next-80B-A3B-Instruct: 2 KV heads of 256; linear layers have 16 key heads and 32 "
        "value heads of 128, conv kernel 4; fp32 state is SGLang's default.",
    ),
)

_ANSWERING: Final = (
    ModelShape(
        name="llama-answers",
        family="mha",
        page_size=8,
        full_layers=_layers(2),
        kv_dtype=torch.float32,
        num_kv_heads=4,
        head_dim=64,
        source="Llama with 2 layers and 4 KV heads of 64 in float32: what a known-answer model needs at the least.",
    ),
    ModelShape(
        name="llama-fp8-answers",
        family="mha",
        page_size=8,
        full_layers=_layers(2),
        kv_dtype=_FP8,
        num_kv_heads=4,
        head_dim=64,
        scale_block=64,
        source="The same in fp8, one fp32 scale for each token and head.",
    ),
    ModelShape(
        name="deepseek-answers",
        family="mla",
        page_size=8,
        full_layers=_layers(2),
        kv_dtype=torch.float32,
        latent_dim=512 + 64,
        source="DeepSeek-V3 with 2 layers and its own latent of 512 and 64 in float32.",
    ),
    ModelShape(
        name="gpt-oss-answers",
        family="swa",
        page_size=4,
        full_layers=(1, 3),
        window_layers=(0, 2),
        kv_dtype=torch.float32,
        num_kv_heads=2,
        head_dim=64,
        window=10,
        source="The layers and the window of gpt-oss-tiny, with 2 KV heads of 64 in float32.",
    ),
    ModelShape(
        name="deepseek-v3.2-answers",
        family="nsa",
        page_size=8,
        full_layers=_layers(2),
        kv_dtype=torch.float32,
        latent_dim=512 + 64,
        index_head_dim=128,
        source="DeepSeek-V3.2 with 2 layers, its own latent in float32 and its own index keys of 128. Pages of 8 "
        "tokens: requests over several of them are short.",
    ),
    ModelShape(
        name="qwen3-next-answers",
        family="mamba",
        page_size=8,
        full_layers=_every_fourth(4),
        state_layers=_but_every_fourth(4),
        kv_dtype=torch.float32,
        num_kv_heads=2,
        head_dim=256,
        conv_dim=2 * 2 * 128 + 4 * 128,
        conv_kernel=4,
        conv_dtype=torch.float32,
        ssm_heads=4,
        ssm_key_dim=128,
        ssm_value_dim=128,
        source="Qwen3-Next 80B with one group of four layers and 2 KV heads of 256 in float32. Linear layers have 2 "
        "key heads and 4 value heads of 128.",
    ),
)

SHAPES: Final[dict[str, ModelShape]] = {preset.name: preset for preset in (*_MICRO, *_TINY, *_REAL, *_ANSWERING)}
MICRO_SHAPES: Final[tuple[str, ...]] = tuple(preset.name for preset in _MICRO)
TINY_SHAPES: Final[tuple[str, ...]] = tuple(preset.name for preset in _TINY)
ANSWERING_SHAPES: Final[tuple[str, ...]] = tuple(preset.name for preset in _ANSWERING)
"""Shapes for decoder known-answer: their rows hold the weights' keys and values."""
