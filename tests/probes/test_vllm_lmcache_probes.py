"""Engines that are no SGLang: blocks, scheduler and host chunks, on stand-ins with one fault at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.engine import put_fault

from kvcheck.commands.main import run
from kvcheck.core.base.record import read_record
from kvcheck.core.probes.frame.engine_process import EngineProcess, Patience
from kvcheck.core.probes.frame.wire import Ask, Reply
from kvcheck.core.probes.installed import parse_target

SCHEDULES = 2
GOOD = ""
FAULTS = [
    ("vllm", "blocks.full", "free-twice", {"KV402"}),
    ("vllm", "blocks.full", "no-count", {"KV402"}),
    ("vllm", "blocks.full", "leak", {"KV401"}),
    ("vllm", "blocks.full", "stale-hash", {"KV301", "KV102"}),
    ("vllm", "blocks.full", "short-hit", {"KV301"}),
    ("vllm", "blocks.full", "hands-out-held", {"KV402", "KV403"}),
    ("vllm", "blocks.full", "no-reset", {"KV301", "KV102"}),
    ("vllm", "scheduler.priority", "preempts-planned", {"KV102"}),
    ("vllm", "scheduler.priority", "keeps-preempted", {"KV401"}),
    ("vllm", "scheduler.fcfs", "forgets-preempted", {"KV901"}),
    ("vllm", "cpu-offload.lru", "evicts-pinned", {"KV202"}),
    ("vllm", "cpu-offload.lru", "place-twice", {"KV403"}),
    ("vllm", "cpu-offload.lru", "failed-stays", {"KV101"}),
    ("vllm", "cpu-offload.lru", "forgets-room", {"KV401"}),
    ("vllm", "cpu-offload.lru", "pending-is-hit", {"KV301"}),
    ("vllm", "cpu-offload.lru", "no-reset", {"KV101"}),
    ("vllm", "connector.lazy", "stores-hold-nothing", {"KV102"}),
    ("vllm", "connector.eager", "runs-before-it-is-loaded", {"KV102"}),
    ("vllm", "connector.lazy", "host-unpinned", {"KV102"}),
    ("vllm", "connector.eager", "loads-leak", {"KV401"}),
    ("lmcache", "local-cpu.lru", "evicts-held", {"KV202"}),
    ("lmcache", "local-cpu.lru", "place-twice", {"KV403"}),
    ("lmcache", "local-cpu.lru", "no-count", {"KV202"}),
    ("lmcache", "local-cpu.lru", "leak", {"KV401"}),
    ("lmcache", "local-cpu.lru", "pin-stays", {"KV401"}),
    ("lmcache", "local-cpu.lru", "never-evicts", {"KV401"}),
    ("lmcache", "local-cpu.lru", "forgets", {"KV301"}),
]


def first_bad(child: EngineProcess, shape: str) -> Reply:
    """The first schedule that is no pass, or the last."""
    probe, _, subject = shape.partition(".")
    asks = [Ask(probe=probe, subject=subject, seed=1, schedule=number) for number in range(SCHEDULES)]
    replies = [child.ask(ask) for ask in asks]
    return next((reply for reply in replies if reply.findings or reply.unknown), replies[-1])


@pytest.fixture(scope="module")
def children(fake: Path) -> Iterator[dict[str, EngineProcess]]:
    started = {name: parse_target(f"{name}:{fake}").start(Patience()) for name in ("vllm", "lmcache")}
    yield started
    for child in started.values():
        child.close()


@pytest.mark.processes
@pytest.mark.parametrize(("engine", "shape", "fault", "codes"), FAULTS)
def test_fault_is_found(
    children: dict[str, EngineProcess], fake: Path, engine: str, shape: str, fault: str, codes: set[str]
) -> None:
    put_fault(fake, fault)
    bad = first_bad(children[engine], shape)
    assert codes <= {finding.code for finding in bad.findings}, bad


@pytest.mark.processes
@pytest.mark.parametrize(("engine", "shape"), sorted({row[:2] for row in FAULTS}))
def test_a_good_engine_counts_all(children: dict[str, EngineProcess], fake: Path, engine: str, shape: str) -> None:
    put_fault(fake, GOOD)
    good = first_bad(children[engine], shape)
    assert (good.findings, good.unknown) == ((), None)
    row = parse_target(engine).spec.probe(shape.partition(".")[0])
    assert row is not None and row.wants and all(getattr(good.evidence, name) for name in row.wants)


@pytest.mark.processes
def test_a_name_that_has_moved_is_in_the_reason_of_an_unknown(children: dict[str, EngineProcess], fake: Path) -> None:
    put_fault(fake, "pins-are-watched")
    unknown = first_bad(children["lmcache"], "local-cpu.lru").unknown or ""
    assert "the control case failed: pin raised AssertionError: config is required" in unknown
    assert "; done without: this release has no pins.watch (tried lmcache.v1.pin_monitor:PinMonitor" in unknown


@pytest.mark.processes
def test_equal_asks_have_equal_answers(children: dict[str, EngineProcess], fake: Path) -> None:
    put_fault(fake, "runs-before-it-is-loaded")
    first, again = (first_bad(children["vllm"], "connector.eager") for _ in range(2))
    other = parse_target(f"vllm:{fake}").start(Patience())
    assert first.findings and first == again == first_bad(other, "connector.eager")
    other.close()


@pytest.mark.processes
def test_scenarios_are_run_and_replayed(fake: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--out", str(tmp_path)]
    put_fault(fake, "leak")
    asked = ["probe", f"vllm:{fake}", "--probe"]
    assert run([*asked, "prefix-cache", "--schedules", "2", *out]) == 1
    (path,) = tmp_path.glob("*/run.json")
    line = read_record(path).findings[0].schedule
    assert line.startswith("prefix-cache:") and "again     kvcheck replay " in capsys.readouterr().out
    assert run(["replay", line, "--times", "3"]) == 1
    assert "STILL FAILS 3/3" in capsys.readouterr().out
    assert run([*asked, "nvlink-aux", *out]) == 2
