"""A known-answer model of the llama family as one GGUF file, which llama.cpp loads.

    python tools/servers/llama_gguf.py FOLDER FILE

Invariants:
- Weights are those of the folder, in 32-bit floats, whatever its dtype: nothing is rounded.
- llama.cpp rotates neighbouring pairs of a head, where the folder's layout rotates its two halves. The rows of queries
  and keys are put into that order.
- Token ids are those of the folder; the words are written as they stand in its tokenizer.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from safetensors.torch import load_file

MAGIC, VERSION, ALIGNMENT = b"GGUF", 3, 32
F32 = 0
NORMAL, CONTROL = 1, 3
NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}
"""Names of tensors: Hugging Face's and GGUF's; those of a layer without their `model.layers.N.` and `blk.N.`."""


@dataclass(frozen=True, slots=True)
class Value:
    """A value of GGUF's metadata. kind: number of its type. packed: its bytes."""

    kind: int
    packed: bytes


def main(arguments: Sequence[str]) -> None:
    folder, file = arguments
    write_gguf(Path(folder), Path(file))


def write_gguf(folder: Path, file: Path) -> None:
    values = {name.encode(): value for name, value in metadata(folder).items()}
    weights = [*tensors(folder)]
    with file.open("wb") as out:
        out.write(MAGIC + struct.pack("<IQQ", VERSION, len(weights), len(values)))
        for name, value in values.items():
            out.write(_string(name) + struct.pack("<I", value.kind) + value.packed)
        offset = 0
        for title, tensor in weights:
            shape = tensor.shape[::-1]  # the fastest dimension comes first
            out.write(_string(title.encode()) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape))
            out.write(struct.pack("<IQ", F32, offset))
            offset += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        _pad(out)
        for _, tensor in weights:
            out.write(tensor.numpy().tobytes())
            _pad(out)


def metadata(folder: Path) -> dict[str, Value]:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    vocabulary = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    words = sorted(vocabulary["model"]["vocab"], key=vocabulary["model"]["vocab"].get)
    special = {word["content"] for word in vocabulary["added_tokens"] if word["special"]}
    return {
        "general.architecture": Value(8, _string(b"llama")),
        "general.name": Value(8, _string(folder.name.encode())),
        "general.alignment": _uint(ALIGNMENT),
        "llama.context_length": _uint(config["max_position_embeddings"]),
        "llama.embedding_length": _uint(config["hidden_size"]),
        "llama.block_count": _uint(config["num_hidden_layers"]),
        "llama.feed_forward_length": _uint(config["intermediate_size"]),
        "llama.attention.head_count": _uint(config["num_attention_heads"]),
        "llama.attention.head_count_kv": _uint(config["num_key_value_heads"]),
        "llama.attention.key_length": _uint(config["head_dim"]),
        "llama.attention.value_length": _uint(config["head_dim"]),
        "llama.attention.layer_norm_rms_epsilon": _float(config["rms_norm_eps"]),
        "llama.rope.dimension_count": _uint(config["head_dim"]),
        "llama.rope.freq_base": _float(config["rope_theta"]),
        "llama.vocab_size": _uint(config["vocab_size"]),
        "tokenizer.ggml.model": Value(8, _string(b"llama")),
        "tokenizer.ggml.tokens": _array(8, [_string(b"\xe2\x96\x81" + word.encode()) for word in words]),
        "tokenizer.ggml.scores": _array(6, [struct.pack("<f", 0.0)] * len(words)),
        "tokenizer.ggml.token_type": _array(
            5, [struct.pack("<i", CONTROL if word in special else NORMAL) for word in words]
        ),
        "tokenizer.ggml.bos_token_id": _uint(config["bos_token_id"]),
        "tokenizer.ggml.eos_token_id": _uint(config["eos_token_id"]),
        "tokenizer.ggml.padding_token_id": _uint(config["pad_token_id"]),
        "tokenizer.ggml.add_bos_token": Value(7, struct.pack("<?", False)),
    }


def tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """GGUF's name and the weights of each tensor, in the order of the folder's files. Raises KeyError for an unknown
    name."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for file in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            weights = tensor.to(torch.float32)
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                weights = neighbouring_pairs(weights, head_dim=config["head_dim"])
            if not name.startswith("model.layers."):
                yield NAMES[name], weights
                continue
            _, _, layer, rest = name.split(".", 3)
            yield f"blk.{layer}.{NAMES[rest]}", weights


def neighbouring_pairs(weights: torch.Tensor, *, head_dim: int) -> torch.Tensor:
    """Rows of each head in llama.cpp's order: row i and row i + head_dim / 2, which rotate as a pair, side by side."""
    heads = weights.view(-1, 2, head_dim // 2, weights.shape[1])
    return heads.transpose(1, 2).reshape(weights.shape)


def _string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def _uint(number: int) -> Value:
    return Value(4, struct.pack("<I", number))


def _float(number: float) -> Value:
    return Value(6, struct.pack("<f", number))


def _array(kind: int, items: Sequence[bytes]) -> Value:
    return Value(9, struct.pack("<IQ", kind, len(items)) + b"".join(items))


def _pad(out: BinaryIO) -> None:
    out.write(b"\0" * (-out.tell() % ALIGNMENT))


if __name__ == "__main__":
    main(sys.argv[1:])
