"""A known-answer model as a folder: the engine's files, and known_answers.json for the judge.

Invariants:
- The folder appears complete in one step.
- known_answers.json holds the digest of every other file: a changed folder is refused.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from kvcheck import __version__
from kvcheck.core.base.errors import UsageError
from kvcheck.core.base.identity import file_digest
from kvcheck.core.model import FAMILIES
from kvcheck.core.model.alphabet import BEGIN, END, PAD, Alphabet
from kvcheck.core.model.parameters import Parameters

KNOWN_ANSWERS = "known_answers.json"
FORMAT = 1
AGAIN = "make the model again with kvcheck model make"
_SHARD_BYTES = 1 << 29
_TORCH = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp8-kv": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class KnownAnswers:
    """The content of known_answers.json. files: name -> SHA-256."""

    parameters: Parameters
    files: dict[str, str]

    @property
    def digest(self) -> str:
        text = json.dumps([FORMAT, self.parameters.to_json(), sorted(self.files.items())], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def write_model(parameters: Parameters, out: Path) -> KnownAnswers:
    """Write the model into `out`. Raises UsageError unless it is new or empty and can be written."""
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise UsageError(f"{out} exists; expected a folder that does not exist yet. Name another DIR, or remove it")
    draft = out.absolute().parent / f".{out.name}.{secrets.token_hex(4)}.tmp"
    try:
        draft.mkdir(parents=True)
        known = _write_files(parameters, draft)
        if out.exists():
            out.rmdir()
        os.replace(draft, out)
    except (OSError, SafetensorError) as error:
        raise UsageError(f"cannot write {out}: {getattr(error, 'strerror', None) or error}") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return known


def read_model(folder: Path, *, whole: bool = True) -> KnownAnswers:
    """Read known_answers.json and compare files with their digests; whole: weights too. Raises UsageError."""
    path = folder / KNOWN_ANSWERS
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not JSON"
        raise UsageError(
            f"{folder} is no known-answer model: {path.name}: {reason}; make one with kvcheck model make"
        ) from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        got = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise UsageError(f"{path}: expected format {FORMAT}, got {got}; make the model again with this kvcheck")
    files = data.get("files")
    if not isinstance(files, dict) or not all(isinstance(value, str) for value in files.values()):
        raise UsageError(f"{path}: expected a table of files and their SHA-256")
    known = KnownAnswers(Parameters.from_json(data.get("parameters")), files)
    if data.get("digest") != known.digest:
        raise UsageError(
            f"{path} was changed: expected digest {data.get('digest')}, got {known.digest}; make the model again"
        )
    for name, expected in files.items():
        if (whole or not name.endswith(".safetensors")) and file_digest(folder / name, AGAIN) != expected:
            raise UsageError(f"{folder / name} is not the file that {KNOWN_ANSWERS} names; make the model again")
    return known


def _write_files(parameters: Parameters, folder: Path) -> KnownAnswers:
    family = FAMILIES.load(parameters.family)
    _write_weights(parameters, folder)
    for name, content in (
        ("config.json", family.config(parameters)),
        (
            "generation_config.json",
            {"bos_token_id": BEGIN, "eos_token_id": END, "pad_token_id": PAD, "do_sample": False},
        ),
        ("tokenizer.json", _tokenizer(Alphabet(parameters))),
        ("tokenizer_config.json", _tokenizer_config(parameters)),
    ):
        (folder / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    known = KnownAnswers(parameters, {path.name: file_digest(path, AGAIN) for path in sorted(folder.iterdir())})
    content = {
        "format": FORMAT,
        "kvcheck": __version__,
        "parameters": parameters.to_json(),
        "files": known.files,
        "digest": known.digest,
    }
    (folder / KNOWN_ANSWERS).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return known


def _write_weights(parameters: Parameters, folder: Path) -> None:
    places: dict[str, str] = {}
    total = 0
    for number, shard in enumerate(_shards(parameters), 1):
        name = f"model-{number:05d}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        (folder / name).chmod(0o666 & ~_umask())  # the library makes it for its owner alone; servers run as others
        places |= dict.fromkeys(shard, name)
        total += sum(tensor.nbytes for tensor in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


def _shards(parameters: Parameters) -> Iterator[dict[str, torch.Tensor]]:
    shard: dict[str, torch.Tensor] = {}
    for name, weights in FAMILIES.load(parameters.family).tensors(parameters):
        shard[name] = torch.from_numpy(weights).to(_TORCH[parameters.dtype])
        if sum(tensor.nbytes for tensor in shard.values()) >= _SHARD_BYTES:
            yield shard
            shard = {}
    if shard:
        yield shard


def _tokenizer(alphabet: Alphabet) -> dict[str, object]:
    """One word a token, split at spaces, for engines that take text only."""
    words = alphabet.words()
    special = [
        {"id": i, "content": words[i], "special": True}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for i in (PAD, BEGIN, END)
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": {word: i for i, word in enumerate(words)}, "unk_token": words[PAD]},
    }


def _tokenizer_config(parameters: Parameters) -> dict[str, object]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<begin>",
        "eos_token": "<end>",
        "pad_token": "<pad>",
        "unk_token": "<pad>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": parameters.length,
    }


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
