"""A known-answer model as a GGUF file: what is read back from its bytes, and that the rotation stays the same."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy
import torch
from rigs.known_answers import small
from safetensors.torch import load_file

from kvcheck.core.model.folder import write_model
from tools.servers.llama_gguf import neighbouring_pairs, write_gguf

SCALARS = {4: "<I", 5: "<i", 6: "<f", 7: "<?"}


class Reader:
    def __init__(self, file: Path) -> None:
        self._data, self._at = file.read_bytes(), 0
        assert self._data[:4] == b"GGUF"
        self._at = 4
        version, tensors, values = self._unpack("<I"), self._unpack("<Q"), self._unpack("<Q")
        assert version == 3
        self.values = {self._string(): self._value(self._unpack("<I")) for _ in range(values)}
        shapes: dict[str, tuple[list[int], int]] = {}
        for _ in range(tensors):
            name = self._string()
            shape = [self._unpack("<Q") for _ in range(self._unpack("<I"))]
            assert self._unpack("<I") == 0, "32-bit floats"
            shapes[name] = (shape[::-1], self._unpack("<Q"))
        begin = -(-self._at // 32) * 32
        self.tensors = {name: self._floats(shape, begin + offset) for name, (shape, offset) in shapes.items()}

    def _unpack(self, kind: str) -> Any:
        (value,) = struct.unpack_from(kind, self._data, self._at)
        self._at += struct.calcsize(kind)
        return value

    def _string(self) -> str:
        length = self._unpack("<Q")
        self._at += length
        return self._data[self._at - length : self._at].decode()

    def _value(self, kind: int) -> Any:
        if kind == 8:
            return self._string()
        if kind == 9:
            item, count = self._unpack("<I"), self._unpack("<Q")
            return [self._value(item) for _ in range(count)]
        return self._unpack(SCALARS[kind])

    def _floats(self, shape: list[int], offset: int) -> torch.Tensor:
        assert offset % 32 == 0
        count = int(numpy.prod(shape))
        return torch.from_numpy(numpy.frombuffer(self._data, "<f4", count, offset).reshape(shape).copy())


def test_the_file_holds_the_folders_model(tmp_path: Path) -> None:
    folder, parameters = tmp_path / "model", small(layers=2, kv_heads=2, digits=5)
    write_model(parameters, folder)
    write_gguf(folder, tmp_path / "model.gguf")
    read = Reader(tmp_path / "model.gguf")
    config = json.loads((folder / "config.json").read_text())
    weights = {name: each for file in folder.glob("*.safetensors") for name, each in load_file(file).items()}
    assert len(read.tensors) == len(weights) == 3 + 9 * parameters.layers
    values = "model.layers.1.self_attn.v_proj.weight"
    assert read.tensors["blk.1.attn_v.weight"].equal(weights[values].float())
    keys = weights["model.layers.1.self_attn.k_proj.weight"].float()
    assert read.tensors["blk.1.attn_k.weight"].equal(neighbouring_pairs(keys, head_dim=64))
    assert read.values["llama.attention.head_count_kv"] == 2 and read.values["llama.attention.head_count"] == 4
    assert read.values["llama.rope.freq_base"] == numpy.float32(config["rope_theta"])
    words = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    assert read.values["tokenizer.ggml.tokens"] == [f"▁{word}" for word in sorted(words, key=words.get)]
    assert read.values["tokenizer.ggml.token_type"][:4] == [3, 3, 3, 1], "<pad>, <begin> and <end> are no words"


def test_scores_are_the_same_under_either_rotation() -> None:
    generator = torch.Generator().manual_seed(1)
    dim, heads = 8, 3
    query, key = (torch.randn(heads * dim, 5, generator=generator) for _ in range(2))
    seen = torch.randn(5, 2, generator=generator)  # the input at two positions
    angles = torch.tensor([1.0, 0.3, 0.1, 0.02])

    def score(rotate: Any, *, paired: bool) -> torch.Tensor:
        rows = [neighbouring_pairs(each, head_dim=dim) if paired else each for each in (query, key)]
        first, second = (
            rotate((each @ seen[:, at]).view(heads, dim), position)
            for each, at, position in ((rows[0], 0, 7), (rows[1], 1, 3))
        )
        return (first * second).sum(-1)

    def halves(x: torch.Tensor, position: int) -> torch.Tensor:
        a, b, (cos, sin) = x[:, :4], x[:, 4:], ((position * angles).cos(), (position * angles).sin())
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def neighbours(x: torch.Tensor, position: int) -> torch.Tensor:
        a, b, (cos, sin) = x[:, 0::2], x[:, 1::2], ((position * angles).cos(), (position * angles).sin())
        return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(1)

    expected = score(halves, paired=False)
    assert torch.allclose(score(neighbours, paired=True), expected, rtol=1e-5)
    assert not torch.allclose(score(neighbours, paired=False), expected, rtol=1e-2)
