"""Hugging Face transformers gives the known answers, where an environment with it is named.

    python3 -m venv envs/transformers && envs/transformers/bin/pip install torch==2.13.0 transformers
    REAL_TRANSFORMERS=envs/transformers pytest tests/model/test_transformers.py

transformers runs in its own interpreter, on a folder that `write_model` wrote.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rigs.known_answers import marks, small, walk
from safetensors.torch import load_file, save_file

from kvcheck.core.model.alphabet import Alphabet
from kvcheck.core.model.answers import answers
from kvcheck.core.model.folder import write_model
from kvcheck.core.model.parameters import Parameters

ENVIRONMENT = os.environ.get("REAL_TRANSFORMERS", "")
pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not ENVIRONMENT, reason="REAL_TRANSFORMERS names no environment with transformers"),
]
REQUESTS = 100  # of each test
TOKENS = 16
PLACES = 61
SCRIPT = Path(__file__).with_name("transformers_answers.py")
SHAPES: tuple[dict[str, Any], ...] = (
    {},
    {"kv_heads": 2, "group": 1},
    {"kv_heads": 2, "group": 4, "head_dim": 128, "layers": 6},
    {"kv_heads": 1, "group": 8, "layers": 3},
    {"kv_heads": 8, "group": 1, "digits": 8, "head_dim": 128},
    {"kv_heads": 32, "group": 1, "digits": 32, "base": 2, "layers": 3, "head_dim": 128},
    {"family": "deepseek-v3"},
    {"family": "deepseek-v3", "kv_heads": 16, "digits": 16, "base": 2, "layers": 3},
    {"family": "gpt-oss"},
    {"family": "gpt-oss", "kv_heads": 2, "group": 8, "layers": 3, "window": 40},
    {"family": "deepseek-v32"},
    {"family": "deepseek-v32", "kv_heads": 16, "digits": 16, "base": 2, "layers": 3, "top_k": 32},
    {"family": "qwen3-next"},
    {"family": "qwen3-next", "kv_heads": 2, "group": 8, "digits": 6, "nodes": 1024, "layers": 9},
)
ATTENTION = {"gpt-oss": "eager"}
"""Where transformers has no other one that a CPU runs."""


def requests(parameters: Parameters) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Walks and position tests with their known answers."""
    asked = [walk(parameters, count=PLACES, seed=seed) for seed in range(REQUESTS)]
    asked += [marks(parameters, count=PLACES, seed=seed) for seed in range(REQUESTS)]
    return [(request, answers(Alphabet(parameters), request, TOKENS)) for request in asked]


def judged(folder: Path, parameters: Parameters, dtype: str, attention: str | None = None) -> dict[str, Any]:
    """What the script says of the folder. attention: transformers' own; by architecture where it is None."""
    attention = attention or ATTENTION.get(parameters.family, "sdpa")
    path = folder.with_suffix(".json")
    path.write_text(json.dumps(requests(parameters)), encoding="utf-8")
    interpreter = Path(ENVIRONMENT) / "bin" / "python"
    done = subprocess.run(
        [interpreter, SCRIPT, folder, path, dtype, attention],
        env={"PATH": os.environ["PATH"], "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "HOME": str(folder.parent)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize("changes", SHAPES, ids=str)
def test_transformers_gives_the_known_answers(changes: dict[str, Any], dtype: str, tmp_path: Path) -> None:
    parameters = small(**changes)
    write_model(parameters, tmp_path / "model")
    said = judged(tmp_path / "model", parameters, dtype)
    sys.stdout.write(f"{changes} {dtype} {said}\n")  # the published figures: pytest -rP
    assert (said["judged"], said["wrong"]) == (2 * REQUESTS * TOKENS, 0)
    assert said["margin"] > 15.9


def test_attention_that_stores_its_scores_in_bf16_gives_them_too(tmp_path: Path) -> None:
    write_model(small(), tmp_path / "model")
    assert judged(tmp_path / "model", small(), "bfloat16", "eager")["wrong"] == 0


def test_one_changed_weight_is_seen(tmp_path: Path) -> None:
    parameters, folder = small(), tmp_path / "model"
    write_model(parameters, folder)
    (path,) = folder.glob("*.safetensors")
    weights = load_file(path)
    name = "model.layers.2.self_attn.v_proj.weight"
    rows = torch.arange(parameters.head_dim, 2 * parameters.head_dim)  # one KV head
    weights[name][rows] = weights[name][rows.roll(1)]
    save_file(weights, path, metadata={"format": "pt"})
    said = judged(folder, parameters, "float64")
    assert said["wrong"] > said["judged"] / 2
