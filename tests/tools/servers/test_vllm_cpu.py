"""How vLLM's CPU build is started: the command line and variables that its tables give.

Invariants:
- Nothing is started; the flags that the engine really has are seen by `make real-servers`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvcheck.core.base.errors import UsageError
from tools.servers.faults.planting import LOG, ORDERS
from tools.servers.vllm_cpu import FAULTS, VARIANTS, Sizes, command, fault_log, fault_orders


def after(words: tuple[str, ...], flag: str) -> str:
    """What follows a flag."""
    return words[words.index(flag) + 1]


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_is_served_on_this_machine_alone_with_a_small_pool(variant: str, tmp_path: Path) -> None:
    made = command(Path("env"), Path("models/m4"), port=1234, folder=tmp_path, variant=variant)
    assert made.words[:3] == ("env/bin/vllm", "serve", "models/m4")
    assert [after(made.words, flag) for flag in ("--host", "--port", "--served-model-name")] == [
        "127.0.0.1",
        "1234",
        "m4",
    ]
    slots = int(after(made.words, "--num-gpu-blocks-override")) * int(after(made.words, "--block-size"))
    assert slots == Sizes().slots > int(after(made.words, "--max-model-len"))
    assert made.variables["OMP_NUM_THREADS"] == "1" and ORDERS not in made.variables


def test_the_storage_is_in_the_folder_that_is_given(tmp_path: Path) -> None:
    made = command(Path("env"), Path("m4"), port=1234, folder=tmp_path, variant="storage")
    settings = json.loads(after(made.words, "--kv-transfer-config"))
    assert "--no-enable-chunked-prefill" in made.words
    assert Path(settings["kv_connector_extra_config"]["shared_storage_path"]).parent == tmp_path


def test_faults_are_loaded_only_where_they_are_asked_for(tmp_path: Path) -> None:
    made = command(Path("env"), Path("m4"), port=1234, folder=tmp_path, has_faults=True)
    module, _, name = after(made.words, "--worker-extension-cls").partition(".")
    assert f"class {name}:" in (FAULTS / f"{module}.py").read_text()
    assert made.variables["PYTHONPATH"] == str(FAULTS)
    assert [made.variables[each] for each in (ORDERS, LOG)] == [str(fault_orders(tmp_path)), str(fault_log(tmp_path))]


def test_an_unknown_variant_and_a_pool_without_room_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="known: plain, priority, storage"):
        command(Path("env"), Path("m4"), port=1234, folder=tmp_path, variant="host")
    for sizes in ({"longest": 2048, "slots": 2048}, {"longest": 100, "slots": 1000}):
        with pytest.raises(UsageError, match="a pool has whole pages of 32"):
            Sizes(**sizes)
