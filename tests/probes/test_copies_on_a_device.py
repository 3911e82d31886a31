"""Probes host-copy and retract with real streams, on a stand-in engine over a stand-in device, and on a real one."""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from fakes.cuda import Machine, installed
from rigs.probe_on_device import FLAG, NO_KERNELS, compiled, replies

from kvcheck.core.probes.frame.cuda_streams import CudaMachine
from kvcheck.core.probes.frame.engine_process import Patience
from kvcheck.core.probes.frame.guard import CannotDrive
from kvcheck.core.probes.frame.streams import LAZY, HoldReport
from kvcheck.core.probes.frame.wire import Ask, Reply
from kvcheck.core.probes.installed import parse_target
from kvcheck.core.probes.sglang.rig import compiled_copies
from kvcheck.core.probes.sglang.rig.compiled_copies import TRIAL, CompiledCopies, require_compiled
from kvcheck.core.probes.sglang.rig.host_tier import PinnedMemory

SCHEDULES = 4
"""Two layouts, each with copies that are held throughout and at random."""
GOOD = ""
HELD = "work is held until the process lets it go"
ENGINE = os.environ.get("REAL_SGLANG_CUDA", "")

COPY_FAULTS = {
    "early-ack": {"KV201"},
    "ack-lost": {"KV901"},
    "index-not-backed-up": {"KV102", "KV104", "KV304"},
    "load-overtakes": {"KV102"},
    "keys-no-wait": {"KV201"},
    "middle-no-wait": {"KV201"},
    "list-changed": {"KV302"},
    "list-too-short": {"KV301"},
}
"""Fault -> codes of which one is found."""
RETRACT_FAULTS = {"save-overtakes": "request 4's bytes", "restore-overtakes": "request 3's bytes"}
"""Fault -> whose bytes the request gets: of whoever had its pages before, or those that it got."""


def copies(fake: Path, fault: str) -> list[Reply]:
    return replies(fake, FLAG, "host-copy.nsa-direct", SCHEDULES, (fault,))[fault]


def retractions(fake: Path, fault: str) -> list[Reply]:
    return replies(fake, FLAG, "retract.nsa", 2, (fault,))[fault]


@pytest.mark.processes
def test_right_copies_pass_while_each_is_held_and_no_watchdog_ends_a_hold(fake: Path) -> None:
    good = copies(fake, GOOD)
    for reply in good:
        assert (reply.findings, reply.unknown, reply.stubs) == ((), None, ())
        assert reply.notes[-1] == HELD and reply.notes[0].startswith("compiled copies: ")
        assert reply.evidence.orderings_checked and {"kv_buffer", "index_k"} <= set(reply.evidence.words_verified)
    assert any("transfer_kv_all_layer_direct_lf_pf" in note for note in good[1].notes)


@pytest.mark.processes
@pytest.mark.parametrize("fault", COPY_FAULTS)
def test_a_wrong_copy_is_found_on_a_device(fake: Path, fault: str) -> None:
    said = copies(fake, fault)
    assert {each.code for reply in said for each in reply.findings} & COPY_FAULTS[fault]
    assert not any(reply.unknown for reply in said)


@pytest.mark.processes
def test_a_schedule_whose_hold_the_watchdog_ended_is_no_pass(fake: Path) -> None:
    for reply in copies(fake, "waits-on-load"):
        assert (reply.findings, reply.unknown) == ((), "not exercised: orderings_checked")
        assert "not exercised: the orders of a try, as the watchdog ended a hold of it" in reply.notes
        assert reply.evidence.words_verified


@pytest.mark.processes
def test_a_copy_that_overtakes_the_model_behind_its_fence_is_found_where_all_is_held(fake: Path) -> None:
    (reply,) = replies(fake, FLAG, "host-copy.mha-direct", 1, ("fence-ignored",))["fence-ignored"]
    assert "KV201" in {each.code for each in reply.findings} and not reply.unknown


@pytest.mark.processes
def test_an_environment_without_compiled_copies_is_no_pass_and_says_what_to_do(fake: Path) -> None:
    (reply,) = replies(fake, NO_KERNELS, "host-copy.nsa-direct", 1, (GOOD,))[GOOD]
    assert reply.unknown and not reply.findings
    assert "sgl_kernel.kvcacheio is not in this environment; next: kvcheck env sglang==" in reply.unknown


@pytest.mark.processes
def test_a_request_that_waits_for_the_batches_at_work_passes(fake: Path) -> None:
    for reply in retractions(fake, GOOD):
        assert (reply.findings, reply.unknown, reply.notes) == ((), None, (HELD,))
        assert reply.evidence.orderings_checked == 2


@pytest.mark.processes
@pytest.mark.parametrize("fault", RETRACT_FAULTS)
def test_a_save_or_restore_that_overtakes_a_batch_is_found(fake: Path, fault: str) -> None:
    for reply in retractions(fake, fault):
        assert {each.buffer for each in reply.findings} == {"kv_buffer", "index_k"}
        for found in reply.findings:
            assert (found.code, found.lane) == ("KV201", "overlap") and RETRACT_FAULTS[fault] in found.message
            assert found.condition and "overlapped scheduling" in found.condition


@pytest.mark.processes
def test_what_is_lost_while_nothing_is_at_work_is_no_matter_of_order(fake: Path) -> None:
    for reply in retractions(fake, "index-lost"):
        assert reply.findings and all(each.condition is None for each in reply.findings)
        assert "KV201" not in {each.code for each in reply.findings}


@pytest.fixture
def device() -> Any:
    with installed(5) as machine:
        yield machine


class Asked:
    """A module of an engine that calls a copy by its name, and what the copy was given."""

    def __init__(self, raises: Exception | None = None) -> None:
        self.module = ModuleType("engine.pools")
        self.given: list[dict[str, Any]] = []
        self.raises = raises
        vars(self.module).update({TRIAL: self._copy, "other": 8})

    def _copy(self, **named: Any) -> None:
        if self.raises:
            raise self.raises
        self.given.append(named)


def test_only_copies_are_held_and_their_names_are_given_back(device: Machine) -> None:
    streams, asked = CudaMachine("cuda"), Asked()
    streams.reset(LAZY, 1)
    held = CompiledCopies(streams, pytest.fail)
    before = dict(vars(asked.module))
    with held.lent_to([asked.module, asked.module]):
        with streams.on(streams.side()):
            vars(asked.module)[TRIAL](item_size=8)
        assert vars(asked.module)["other"] == 8 and "transfer_kv_direct" not in vars(asked.module)
    assert vars(asked.module) == before and asked.given == [{"item_size": 8}]
    assert (held.asked, held.has_copied) == ({TRIAL: 1}, True)
    streams.settle()
    assert streams.take_report() == HoldReport(placed=1)


def test_what_a_copy_refuses_is_told_and_an_error_of_the_device_is_no_finding(device: Machine) -> None:
    told: list[str] = []
    streams = CudaMachine("cuda")
    held = CompiledCopies(streams, told.append)
    refuses = Asked(RuntimeError("Destination indices must be a CUDA tensor\nException raised from ..."))
    with held.lent_to([refuses.module]):
        vars(refuses.module)[TRIAL]()
    assert told == [f"{TRIAL} refuses: Destination indices must be a CUDA tensor"]
    for text in ("CUDA error: an illegal memory access was encountered", "build failed\nnvcc: not found"):
        fails = Asked(RuntimeError(text))
        with held.lent_to([fails.module]), pytest.raises(CannotDrive, match=f"{TRIAL} cannot run here: [Cb]"):
            vars(fails.module)[TRIAL]()
    assert len(told) == 1


def bad_trial(**named: Any) -> None:
    named["dst"].fill_(7)


def no_image(**_: Any) -> None:
    raise RuntimeError("CUDA error: no kernel image is available for execution on the device")


@pytest.mark.parametrize(
    ("trial", "why"),
    [
        (bad_trial, f"{TRIAL} moved other bytes than it was asked to"),
        (no_image, f"{TRIAL} does not run on this device: RuntimeError: CUDA error: no kernel image is available"),
        (None, f"has no {TRIAL}"),
    ],
)
def test_no_copies_here_are_no_pass(trial: object, why: str, device: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 0))
    found = compiled(device)
    monkeypatch.setattr(compiled_copies, "import_module", lambda name: found)
    assert require_compiled("cpu").endswith("compute capability 7.0")
    del found.transfer_kv_all_layer_lf_ph
    assert require_compiled("cpu").endswith("; without transfer_kv_all_layer_lf_ph")
    vars(found)[TRIAL] = trial
    if trial is None:
        delattr(found, TRIAL)
    with pytest.raises(CannotDrive, match=r"compute capability 7\.0: ") as raised:
        require_compiled("cpu")
    assert why in str(raised.value) and "next: kvcheck env sglang==" in str(raised.value)


class Runtime:
    """A CUDA runtime that pins what is not pinned."""

    def __init__(self) -> None:
        self.pinned: set[int] = set()

    def cudaHostRegister(self, start: int, size: int, flags: int) -> int:
        code = 712 if start in self.pinned else 0
        self.pinned.add(start)
        return code

    def cudaHostUnregister(self, start: int) -> int:
        code = 0 if start in self.pinned else 713
        self.pinned.discard(start)
        return code

    def cudaGetErrorString(self, code: int) -> str:
        return f"error {code}"


def test_pinned_memory_is_given_back_but_for_what_the_engine_gave_back(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, memory = Runtime(), PinnedMemory()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    with memory.watched():
        seen: Any = torch.cuda.cudart()
        assert [seen.cudaHostRegister(start, 64, 0) for start in (1, 2, 2)] == [0, 0, 712]
        assert seen.cudaHostUnregister(1) == 0 and seen.cudaGetErrorString(712) == "error 712"
    assert torch.cuda.cudart() is runtime and memory.starts == [2]
    memory.give_back()
    assert runtime.pinned == set() and memory.starts == []
    memory.starts.append(3)
    with pytest.raises(CannotDrive, match="cudaHostUnregister says 713"):
        memory.give_back()


@pytest.mark.gpu
@pytest.mark.sglang
@pytest.mark.processes
@pytest.mark.skipif(not ENGINE, reason="REAL_SGLANG_CUDA names no environment; see kvcheck env --device cuda")
@pytest.mark.parametrize(
    "shape", ["host-copy.mha-kernel", "host-copy.nsa-kernel", "host-copy.nsa-direct", "retract.nsa", "retract.mamba"]
)
def test_a_release_on_a_real_device_has_a_verdict(shape: str) -> None:
    probe, _, subject = shape.partition(".")
    child = parse_target(f"sglang:{ENGINE}").start(Patience(answer_s=600.0), "cuda")
    try:
        said = [child.ask(Ask(probe=probe, subject=subject, seed=1, schedule=at)) for at in range(SCHEDULES)]
    finally:
        child.close()
    assert [(each.findings, each.unknown) for each in said] == [((), None)] * SCHEDULES
    assert all(each.evidence.orderings_checked and HELD in each.notes for each in said)
