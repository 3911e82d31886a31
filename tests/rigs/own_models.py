"""Small model folders whose answers nobody knows beforehand: random weights, and a model that completes sequences.

random    Llama of any size, weights at the scale of their inputs: as sensitive to each page as a trained model
copying   two layers of Llama that are written: layer 0 copies each token's predecessor, layer 1 finds the position
          whose predecessor is the current token and says what stands there. It recites, as trained models do
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file

from kvcheck.core.model.rotary import plan_rotary

Weights = dict[str, npt.NDArray[np.float64]]

CODE = 64
"""Dimensions of a token's code in the copying model; codes of two tokens agree in few of them."""


def random_model(
    folder: Path,
    *,
    vocabulary: int = 1024,
    layers: int = 4,
    hidden: int = 256,
    heads: int = 4,
    seed: int = 1,
    sharp: float = 3.0,
) -> Path:
    """Random weights. sharp: the scale of logits."""
    rng = np.random.default_rng(seed)
    head_dim, inner = hidden // heads, hidden * 2

    def drawn(rows: int, columns: int, scale: float = 1.0) -> npt.NDArray[np.float64]:
        return rng.standard_normal((rows, columns)) * scale / np.sqrt(columns)

    weights: Weights = {
        "model.embed_tokens.weight": rng.standard_normal((vocabulary, hidden)),
        "model.norm.weight": np.ones(hidden),
        "lm_head.weight": drawn(vocabulary, hidden, sharp),
    }
    for layer in range(layers):
        at = f"model.layers.{layer}"
        weights |= {
            f"{at}.input_layernorm.weight": np.ones(hidden),
            f"{at}.post_attention_layernorm.weight": np.ones(hidden),
            f"{at}.self_attn.q_proj.weight": drawn(hidden, hidden, 2.0),
            f"{at}.self_attn.k_proj.weight": drawn(hidden, hidden, 2.0),
            f"{at}.self_attn.v_proj.weight": drawn(hidden, hidden, 2.0),
            f"{at}.self_attn.o_proj.weight": drawn(hidden, hidden, 2.0),
            f"{at}.mlp.gate_proj.weight": drawn(inner, hidden),
            f"{at}.mlp.up_proj.weight": drawn(inner, hidden),
            f"{at}.mlp.down_proj.weight": drawn(hidden, inner),
        }
    sizes = {"hidden_size": hidden, "heads": heads, "head_dim": head_dim, "inner": inner, "theta": 10_000.0}
    return _write(folder, weights, vocabulary, layers, sizes)


def copying_model(folder: Path, *, vocabulary: int = 2048, length: int = 2048, seed: int = 1) -> Path:
    """Weights that complete repeated sequences. The residual: a token's code, its predecessor's, what was found."""
    rng = np.random.default_rng(seed)
    hidden, head_dim, theta = 4 * CODE, 2 * CODE, 1e15
    rotary = plan_rotary(head_dim, length, theta)
    own, before, found, constant = 0, CODE, 2 * CODE, 3 * CODE
    codes = np.sign(rng.standard_normal((vocabulary, CODE))) / np.sqrt(CODE)
    size = 8.0 * np.sqrt(hidden)  # the constant rules the norm: each register comes out of it divided by 8
    embedding = np.zeros((vocabulary, hidden))
    embedding[:, own : own + CODE] = codes * 8.0
    embedding[:, constant] = size

    def square() -> npt.NDArray[np.float64]:
        return np.zeros((head_dim, hidden))

    # Layer 0: a query for the position before, by rotary pairs alone; its value is that token's own code.
    query, key, value, out = square(), square(), square(), np.zeros((hidden, head_dim))
    half, unit = head_dim // 2, np.sqrt(hidden)  # what the norm makes of the constant
    strength = 40.0 / rotary.gap
    for pair, weight, frequency in zip(rotary.fast, rotary.weights, rotary.frequencies, strict=True):
        amount = strength * weight * np.sqrt(head_dim) / unit
        query[pair, constant], query[pair + half, constant] = (amount * np.cos(frequency), -amount * np.sin(frequency))
        key[pair, constant] = 1.0 / unit
    value[:CODE, own : own + CODE] = np.eye(CODE)
    out[before : before + CODE, :CODE] = 8.0 * np.eye(CODE)
    first = {"q": query, "k": key, "v": value, "o": out}
    # Layer 1: the position whose predecessor is the current token, by content in pairs that turn slowly.
    query, key, value, out = square(), square(), square(), np.zeros((hidden, head_dim))
    for number, dim in enumerate(rotary.slow_dims[:CODE]):
        query[dim, own + number] = 60.0 * np.sqrt(head_dim)
        key[dim, before + number] = 1.0
    value[:CODE, own : own + CODE] = np.eye(CODE)
    out[found : found + CODE, :CODE] = 8.0 * np.eye(CODE)
    second = {"q": query, "k": key, "v": value, "o": out}
    head = np.zeros((vocabulary, hidden))
    head[:, found : found + CODE] = 20.0 * codes
    weights: Weights = {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": np.ones(hidden),
        "lm_head.weight": head,
    }
    for layer, attention in enumerate((first, second)):
        at = f"model.layers.{layer}"
        weights |= {f"{at}.self_attn.{name}_proj.weight": matrix for name, matrix in attention.items()}
        weights |= {
            f"{at}.input_layernorm.weight": np.ones(hidden),
            f"{at}.post_attention_layernorm.weight": np.ones(hidden),
            f"{at}.mlp.gate_proj.weight": np.zeros((64, hidden)),
            f"{at}.mlp.up_proj.weight": np.zeros((64, hidden)),
            f"{at}.mlp.down_proj.weight": np.zeros((hidden, 64)),
        }
    sizes = {"hidden_size": hidden, "heads": 1, "head_dim": head_dim, "inner": 64, "theta": theta}
    return _write(folder, weights, vocabulary, 2, sizes)


def _write(folder: Path, weights: Weights, vocabulary: int, layers: int, sizes: dict[str, float]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": sizes["hidden_size"],
        "intermediate_size": sizes["inner"],
        "num_hidden_layers": layers,
        "num_attention_heads": sizes["heads"],
        "num_key_value_heads": sizes["heads"],
        "head_dim": sizes["head_dim"],
        "max_position_embeddings": 2048,
        "rope_theta": sizes["theta"],
        "rope_parameters": {"rope_type": "default", "rope_theta": sizes["theta"]},
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    words = {f"word{number}": number for number in range(vocabulary)}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "word0"},
    }
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 2048, "unk_token": "word0"}
    for name, content in (
        ("config.json", config),
        ("generation_config.json", {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "do_sample": False}),
        ("tokenizer.json", tokenizer),
        ("tokenizer_config.json", names | {"bos_token": "word1", "eos_token": "word2", "pad_token": "word0"}),
    ):
        (folder / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    tensors = {name: torch.from_numpy(np.ascontiguousarray(each)).to(torch.bfloat16) for name, each in weights.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
