"""A model's folder appears whole, is the same each time, and is refused once anything in it has changed."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from rigs.known_answers import small
from safetensors import SafetensorError
from safetensors.torch import load_file

from kvcheck.core.base.errors import UsageError
from kvcheck.core.model import llama
from kvcheck.core.model.folder import KNOWN_ANSWERS, read_model, write_model

TINY = small(layers=2, kv_heads=2, nodes=64, digits=4)


def test_a_folder_holds_every_tensor_once_and_says_what_it_is(tmp_path: Path) -> None:
    known = write_model(TINY, tmp_path / "model")
    assert read_model(tmp_path / "model") == known
    index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())
    held: dict[str, torch.Tensor] = {}
    for name in set(index["weight_map"].values()):
        held |= load_file(tmp_path / "model" / name)
    expected = dict(llama.tensors(TINY))
    assert set(held) == set(expected) == set(index["weight_map"])
    for name, weights in expected.items():
        assert torch.equal(held[name], torch.from_numpy(np.ascontiguousarray(weights)).to(torch.bfloat16))
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert held["lm_head.weight"].shape == (config["vocab_size"], config["hidden_size"])
    assert not list(tmp_path.glob(".*")), "a draft was left behind"


def test_a_cache_with_scales_has_them_in_the_checkpoint_by_layer(tmp_path: Path) -> None:
    parameters = dataclasses.replace(TINY, dtype="fp8-kv", kv_scale=8)
    write_model(parameters, tmp_path / "model")
    assert read_model(tmp_path / "model").parameters == parameters
    (path,) = (tmp_path / "model").glob("*.safetensors")
    scales = {name: each.tolist() for name, each in load_file(path).items() if name.endswith("_scale")}
    at = "model.layers.{}.self_attn.{}_scale"
    assert scales == {at.format(0, "k"): [8], at.format(0, "v"): [4], at.format(1, "k"): [4], at.format(1, "v"): [8]}
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["quantization_config"]["kv_cache_scheme"]["num_bits"] == 8
    assert "quantization_config" not in llama.config(TINY)


def test_the_same_parameters_give_the_same_folder(tmp_path: Path) -> None:
    assert write_model(TINY, tmp_path / "a") == write_model(TINY, tmp_path / "b")
    assert write_model(small(nodes=128), tmp_path / "c").digest != read_model(tmp_path / "a").digest


@pytest.mark.parametrize("name", ["config.json", "model-00001.safetensors", "tokenizer.json"])
def test_a_file_that_changed_or_is_gone_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    folder = tmp_path / "model"
    monkeypatch.setattr("kvcheck.core.model.folder._SHARD_BYTES", 1 << 16)
    write_model(TINY, folder)
    assert len(list(folder.glob("*.safetensors"))) > 1
    content = bytearray((folder / name).read_bytes())
    content[len(content) // 2] ^= 1
    (folder / name).write_bytes(content)
    with pytest.raises(UsageError, match=f"{name} is not the file"):
        read_model(folder)
    (folder / name).unlink()
    with pytest.raises(UsageError, match="No such file"):
        read_model(folder)


def test_weights_that_lie_elsewhere_need_not_be_read(tmp_path: Path) -> None:
    write_model(TINY, tmp_path / "model")
    (tmp_path / "model" / "model-00001.safetensors").unlink()
    assert read_model(tmp_path / "model", whole=False).parameters == TINY


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format": 2}, "expected format 1, got 2"),
        ({"files": []}, "expected a table of files"),
        ({"parameters": {}}, "parameters of a known-answer model are a table"),
        ({"digest": "0"}, "was changed: expected digest 0"),
    ],
)
def test_a_damaged_description_is_refused(tmp_path: Path, change: dict[str, object], said: str) -> None:
    path = tmp_path / "model" / KNOWN_ANSWERS
    write_model(TINY, path.parent)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UsageError, match=said):
        read_model(path.parent)


@pytest.mark.parametrize("text", [None, "{", "[]"])
def test_what_is_no_model_is_refused(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / KNOWN_ANSWERS).write_text(text)
    with pytest.raises(UsageError, match=r"no known-answer model|expected format"):
        read_model(tmp_path)


def test_nothing_is_overwritten_and_an_empty_folder_is_taken(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    with pytest.raises(UsageError, match="does not exist yet"):
        write_model(TINY, tmp_path / "full")
    assert (tmp_path / "full" / "mine.txt").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    assert write_model(TINY, tmp_path / "empty").parameters == TINY


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device"),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_disk_that_fills_leaves_no_folder(error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("kvcheck.core.model.folder.save_file", full)
    with pytest.raises(UsageError, match="No space left on device"):
        write_model(TINY, tmp_path / "model")
    assert list(tmp_path.iterdir()) == []
