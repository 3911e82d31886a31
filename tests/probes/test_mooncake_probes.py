"""An installed transfer engine: verdicts on a stand-in with one fault at a time, and on an installed library."""

from __future__ import annotations

import json
import re
import venv
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import pytest
from rigs.schemas import check_fits

from kvcheck.commands.main import run
from kvcheck.commands.probes import pass_lines
from kvcheck.core.cache.transfer.mooncake.library import why_unusable
from kvcheck.core.probes.frame.engine_process import EngineProcess, Patience
from kvcheck.core.probes.frame.wire import Ask, Reply
from kvcheck.core.probes.installed import parse_target
from kvcheck.core.probes.mooncake import MOONCAKE, longest_call_s
from kvcheck.core.probes.mooncake.scene import WordPlaces, held
from kvcheck.core.run.plan import Plan, parse_line

STAND_IN = Path(__file__).parents[1] / "fakes" / "_mooncake"
BY_LIBRARY = "landing.batch"
"""Tried on the library alone, where it is installed: it takes a second of CPU time, and `async` is judged alike."""
SHAPES = [
    shape for row in MOONCAKE.probes for subject in row.subjects if (shape := f"{row.name}.{subject}") != BY_LIBRARY
]
FAULTS = [
    ("landing.async", "early", {("KV203", "early")}),
    ("landing.sync", "torn", {("KV103", "torn")}),
    ("landing.async", "late", {("KV203", "late")}),
    ("registration.batch", "unregistered", {("KV308", "up to one byte behind the registered memory")}),
    ("registration.sync", "unregistered", {("KV308", "to memory that was never registered")}),
    ("failure.refused", "unregistered", {("KV308", "accepted")}),
    ("failure.frozen", "unawaited", {("KV203", "early")}),
    ("failure.refused", "late-failure", {("KV203", "after-failure")}),
    ("notification.batch", "early-notification", {("KV203", "notification")}),
    ("death.killed", "dies-with-peer", {("KV902", "writer")}),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the stand-in alone. Its processes are started, not forked from one that has torch."""
    folder = tmp_path_factory.mktemp("transfer") / "env"
    venv.EnvBuilder(with_pip=False, symlinks=True).create(folder)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "stand_in.pth").write_text(f"{STAND_IN}\n")
    return folder


Engines = Callable[[str, str], EngineProcess]


@pytest.fixture(scope="module")
def engines() -> Iterator[Engines]:
    """Children by target and fault. Each is started once."""
    with ExitStack() as open_ones:

        @cache
        def start(target: str, fault: str) -> EngineProcess:
            made = parse_target(target).start(Patience(), variables={"MC_STAND_IN": fault} if fault else {})
            open_ones.callback(made.close)
            return made

        yield start


def ask(child: EngineProcess, shape: str, schedule: int = 0) -> Reply:
    probe, _, subject = shape.partition(".")
    return child.ask(Ask(probe=probe, subject=subject, seed=1, schedule=schedule))


@pytest.mark.processes
@pytest.mark.parametrize(("shape", "fault", "wanted"), FAULTS)
def test_fault_is_found(engines: Engines, place: Path, shape: str, fault: str, wanted: set[tuple[str, str]]) -> None:
    reply = ask(engines(f"mooncake:{place}", fault), shape)
    assert wanted <= {(finding.code, finding.lane) for finding in reply.findings}, reply
    assert all(" of " in finding.message for finding in reply.findings if finding.code != "KV902")
    assert reply.unknown is None, "a schedule that shows the fault is no schedule that cannot be driven"


@pytest.mark.processes
@pytest.mark.parametrize("shape", SHAPES)
def test_the_honest_engine_passes_with_all_that_is_wanted(engines: Engines, place: Path, shape: str) -> None:
    reply = ask(engines(f"mooncake:{place}", ""), shape)
    # What lies in a stopped peer's socket lands later: conditional, of any engine.
    assert ([each for each in reply.findings if each.condition is None], reply.unknown) == ([], None)
    row = MOONCAKE.probe(shape.partition(".")[0])
    assert row is not None and all(getattr(reply.evidence, name) for name in row.wants)
    assert sum(reply.evidence.words_verified.values()) > 0


@pytest.mark.processes
def test_bytes_that_land_after_a_failure_are_conditional(engines: Engines, place: Path) -> None:
    (finding,) = ask(engines(f"mooncake:{place}", "late-failure"), "failure.refused", schedule=1).findings
    assert finding.condition is not None and "looked at 0 are of the write" in finding.message


def stress(place: Path, out: Path, shape: str, *more: str) -> tuple[int, dict[str, object]]:
    asked = ["probe", f"mooncake:{place}", "--probe", shape, "--schedules", "1", "--no-reports"]
    code = run([*asked, *more, "--out", str(out)])
    (stored,) = out.glob("*/run.json")
    record: dict[str, object] = json.loads(stored.read_text())
    return code, record


def test_a_run_announces_how_long_a_pass_takes_and_whether_its_time_is_too_short() -> None:
    plans = [Plan(scenario="transfer", probe=shape, target="mooncake") for shape in SHAPES]
    (line,) = pass_lines([(plan, 12) for plan in plans], None)
    seconds = int(re.findall(r"about (\d+) s", line)[0])
    assert seconds > 60 and pass_lines([(plan, 12) for plan in plans], seconds + 1) == [line]
    assert "--max-time 60" in pass_lines([(plan, 12) for plan in plans], 60.0)[0]
    assert pass_lines([(Plan(scenario="hicache", shape="glm-5.1-tiny"), 3)], 1.0) == []


@pytest.mark.processes
def test_the_engines_own_variables_are_passed_recorded_and_replayed(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MC_STAND_IN", "early")  # of the shell: the plan does not name it
    printed = ("--format", "json")
    assert stress(place, tmp_path / "a", "landing.frozen", *printed)[0] == 4  # one schedule is too few for a pass
    check_fits(json.loads(capsys.readouterr().out), "commands", "probe")
    given = ("--env", "MC_STAND_IN=early", "--env", "MC_X=1")
    code, record = stress(place, tmp_path / "b", "landing.frozen", *given)
    assert code == 1
    assert ("KV203", "early") in {(finding["code"], finding["lane"]) for finding in record["findings"]}  # type: ignore[attr-defined]
    assert record["plan"]["engine_env"] == {"MC_STAND_IN": "early", "MC_X": "1"}  # type: ignore[index]
    assert any("RDMA, NVLink" in warning for warning in record["warnings"])  # type: ignore[attr-defined]
    line = record["findings"][0]["schedule"]  # type: ignore[index]
    assert parse_line(line).engine_variables == {"MC_STAND_IN": "early", "MC_X": "1"}
    capsys.readouterr()
    assert run(["replay", line]) == 1
    assert "STILL FAILS 1/1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["MC_X"], "NAME=VALUE"),
        (["LD_PRELOAD=x"], "NAME=VALUE"),
        (["mc_x=1"], "NAME=VALUE"),
        (["MC_AUTH_TOKEN=1"], "secret"),
        (["MC_STORE=redis://me:word@host"], "secret"),
        (["MC_X=1\nMC_Y=2"], "in one line"),
        (["MC_X=1\x00"], "printable"),
        (["MC_X=1", "MC_X=2"], "once"),
    ],
)
def test_variables_of_others_are_refused(given: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["probe", "mooncake", *(word for each in given for word in ("--env", each))]) == 2
    said = capsys.readouterr().err
    assert told in said and said.count("\n") == 1


PLACES = WordPlaces(1 << 16)


def content(owner: int, generation: int, at: int = 64, size: int = 64) -> bytes:
    return bytes(PLACES.content(owner=owner, generation=generation, at=at, size=size))


@pytest.mark.parametrize(
    ("seen", "kind"),
    [
        (content(1, 2), "wanted"),
        (content(1, 1), "older"),
        (content(1, 3), "newer"),
        (content(2, 2), "foreign"),
        (content(1, 2, at=128), "misplaced"),
        (bytes(64), "unwritten"),
        (b"\xff" * 64, "strange"),
    ],
)
def test_each_word_says_whose_it_is(seen: bytes, kind: str) -> None:
    found = held(seen, owner=1, generation=2, at=64, owners=2, latest=3, before=bytes(64), after=content(1, 2))
    assert getattr(found, kind) == found.words == 8


@pytest.mark.parametrize("cut", range(1, 8))
def test_a_word_that_has_come_in_part_is_no_word_of_nobody(cut: int) -> None:
    new, old = content(1, 2), content(1, 1)
    seen = new[: 8 + cut] + old[8 + cut :]
    found = held(seen, owner=1, generation=2, at=64, owners=2, latest=3, before=old, after=new)
    assert (found.strange, found.foreign, found.misplaced) == (0, 0, 0)
    assert found.wanted + found.older == 8 and found.wanted and found.older


def test_what_was_there_before_is_not_told_of_a_change() -> None:
    old = content(1, 2)
    seen = old[:32] + content(1, 1)[32:]
    found = held(seen, owner=1, generation=3, at=64, owners=2, latest=3, before=old)
    assert (found.words, found.older) == (4, 4)


def test_a_call_is_late_only_behind_the_bound_that_is_stated() -> None:
    assert longest_call_s({"MC_TRANSFER_TIMEOUT": "10"}) > 10
    assert longest_call_s({"MC_TRANSFER_TIMEOUT": "1"}) > 5  # the library takes 5 for it
    assert longest_call_s({}) > 30


@pytest.mark.mooncake
@pytest.mark.processes
@pytest.mark.skipif(why_unusable() is not None, reason="the transfer engine is not installed")
@pytest.mark.parametrize(
    "shape", [BY_LIBRARY, "landing.frozen", "registration.batch", "notification.batch", "death.killed"]
)
def test_the_installed_library_says_the_truth(engines: Engines, shape: str) -> None:
    reply = ask(engines("mooncake", ""), shape)
    assert ([each for each in reply.findings if each.condition is None], reply.unknown) == ([], None)
