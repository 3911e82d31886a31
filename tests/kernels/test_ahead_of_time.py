"""Each Triton kernel, compiled for A100, H100 and B200 from what the interpreted tests launch, without a GPU."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from rigs import ahead_of_time
from rigs.ahead_of_time import SHARED_BYTES, problems, problems_of, problems_of_hold
from rigs.interpreted import needs_triton
from rigs.large_launches import HOLD, HOLD_CONSTANTS, LARGE
from rigs.launches import argument_of, listed

pytestmark = [pytest.mark.compiled, pytest.mark.processes(starts=True), needs_triton]

CAPABILITIES = (80, 90, 100)
KERNELS = sorted({name for name, _, _ in listed()})


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda name: name.rpartition(":")[2])
def test_what_the_interpreted_tests_launch_compiles(kernel: str, capability: int, tmp_path: Path) -> None:
    launches = [each for each in sorted(listed(), key=repr) if each[0] == kernel]
    assert launches
    for launch in launches:
        found = problems(launch, capability, tmp_path)
        assert not found, f"{launch}: {found}"


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("name", LARGE)
def test_the_sizes_of_models_compile(name: str, capability: int, tmp_path: Path) -> None:
    assert problems(LARGE[name], capability, tmp_path) == []


def edited(tmp_path: Path, module: str, old: str, new: str) -> Any:
    """A kernel module with one text replaced."""
    source = importlib.util.find_spec(f"kvcheck.kernels.{module}")
    assert source is not None and source.origin is not None
    text = Path(source.origin).read_text(encoding="utf-8")
    assert text.count(old) >= 1
    file = tmp_path / f"edited_{module}.py"
    file.write_text(text.replace(old, new), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def holding(tmp_path: Path, old: str, new: str) -> list[str]:
    """The problems of an edited hold on an H100."""
    kernel = edited(tmp_path, "hold_triton", old, new)._KERNEL
    return problems_of(kernel, 90, [*map(argument_of, HOLD)], HOLD_CONSTANTS, tmp_path)


def test_a_hold_that_reads_its_flag_or_its_clock_once_or_has_no_loop_is_told(tmp_path: Path) -> None:
    assert holding(tmp_path, "volatile=True", "volatile=True") == []
    assert "does not read the flag anew at each look" in holding(tmp_path, "volatile=True", "volatile=False")
    found = holding(tmp_path, "is_late = cuda.globaltimer() - begun", "is_late = begun * look")
    assert found == ["does not read the clock anew at each look"]
    assert problems_of_hold("ret;", has_clock=False) == ["has no loop"]


def test_a_kernel_with_what_a_device_lacks_is_told(tmp_path: Path) -> None:
    stored = "is_raised.to(tl.int64)"
    kernel = edited(
        tmp_path, "hold_triton", stored, "is_raised.to(tl.float32).to(tl.float8e4nv).to(tl.float32)"
    )._KERNEL
    assert holding(tmp_path, stored, stored) == []
    (found,) = problems_of(kernel, 80, [*map(argument_of, HOLD)], HOLD_CONSTANTS, tmp_path)
    assert "fp8e4nv not supported" in found


def test_a_launch_that_takes_too_much_shared_memory_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    launch = min((each for each in listed() if each[0].endswith("digest_triton:_fold_block")), key=repr)
    assert problems(launch, 90, tmp_path) == []
    monkeypatch.setitem(SHARED_BYTES, 90, 1)
    (found,) = problems(launch, 90, tmp_path)
    assert found.endswith("bytes of shared memory of 1")


def test_a_kernel_that_spills_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    used = {"REG": 255, "STACK": 24, "SHARED": 0, "LOCAL": 16}
    monkeypatch.setattr(ahead_of_time, "resources", lambda cubin, folder: used)
    assert holding(tmp_path, "volatile=True", "volatile=True") == ["spills: 16 bytes of local memory, 24 of stack"]
