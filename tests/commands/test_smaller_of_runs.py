"""Smaller schedules in a run: what was found stays, whatever becomes of the search, and a stored line can be replayed.

Invariants:
- The session here is real; what searches is replaced, but for one whole run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from rigs.literal_record import FOREIGN

from kvcheck.commands.main import run
from kvcheck.commands.stories import SHRINKING_S, look_for_smaller
from kvcheck.commands.terminal import Terminal
from kvcheck.core.base.record import read_record
from kvcheck.core.run.plan import parse_line
from kvcheck.core.run.session import Session
from kvcheck.core.stress import smaller as made
from kvcheck.core.stress.smaller import MOST_CAUSES, smaller
from kvcheck.core.stress.targets.mutants import mutant_target

LINE = "retract-resume:shape=glm-5.1-tiny,mutant=offload-skips-index-buffer,seed=1,schedule=0,expect=KV304"


def session_with(tmp_path: Path, *, found: bool = True) -> Session:
    session = Session(argv=[], repro="kvcheck stress", seed=1, plan={}, out=tmp_path, teller=Terminal(is_quiet=True))
    session.keep((FOREIGN,) if found else ())
    return session


@pytest.mark.parametrize(
    ("error", "why"),
    [(ValueError("no"), "not looked for: ValueError: no; please report it"), (KeyboardInterrupt(), "interrupted: ")],
)
def test_what_was_found_before_an_error_is_kept(
    error: BaseException, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    session = session_with(tmp_path)

    def broken(*given: object, **named: object) -> Iterator[tuple[str, dict[str, object]]]:
        yield session.findings[0].id, {"line": "a:shape=b", "requests": 1, "pages": 2}
        raise error

    monkeypatch.setattr(made, "smaller", broken)
    look_for_smaller(session, None)
    assert session.findings[0].minimal == {**(FOREIGN.minimal or {}), "line": "a:shape=b", "requests": 1, "pages": 2}
    assert len(session.warnings) == 1 and why in session.warnings[0] and why in capsys.readouterr().err


@pytest.mark.parametrize(
    ("max_time_s", "elapsed_s", "limit_s"), [(None, 90.0, SHRINKING_S), (95.0, 90.0, 5.0), (90.0, 90.0, None)]
)
def test_it_takes_no_more_than_is_left(
    max_time_s: float | None,
    elapsed_s: float,
    limit_s: float | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[float] = []

    def record(findings: object, target_of: object, *, until: float, told: object) -> Iterator[object]:
        seen.append(until)
        return iter(())

    session = session_with(tmp_path)
    monkeypatch.setattr(Session, "elapsed_s", elapsed_s)
    monkeypatch.setattr("kvcheck.commands.stories.time.monotonic", lambda: 1000.0)
    monkeypatch.setattr(made, "smaller", record)
    look_for_smaller(session, max_time_s)
    assert seen == ([] if limit_s is None else [1000.0 + limit_s])
    assert session.findings[0].minimal == FOREIGN.minimal


def test_a_run_without_a_finding_looks_for_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(made, "smaller", lambda *given, **named: pytest.fail("nothing was found"))
    look_for_smaller(session_with(tmp_path, found=False), None)


def test_lines_that_cannot_be_shrunk_and_second_causes_of_a_code_are_left_out() -> None:
    cause = replace(FOREIGN, code="KV304", schedule=LINE, cause=None)
    other = replace(cause, id="2", schedule="hicache:shape=llama-3-tiny,trace=sample,seed=1,schedule=0")
    found = [cause, replace(cause, id="3"), replace(other, code="KV102"), replace(cause, id="4", schedule="")]
    assert [each.id for each, _ in made._first_causes(found)] == ["1"]
    many = [replace(cause, id=str(at), code=f"KV{at}") for at in range(200, 210)]
    assert len(made._first_causes(many)) == MOST_CAUSES


@pytest.mark.schedules
def test_the_time_may_be_up_at_once() -> None:
    cause = replace(FOREIGN, code="KV304", schedule=LINE)
    assert not [*smaller([cause], lambda plan: mutant_target(str(plan.mutant)), until=0.0)]


@pytest.mark.schedules
def test_a_failing_run_stores_a_smaller_line_that_replays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "hicache --shape llama-3-tiny --mutant backup-before-forward --seed 1 --schedules 8 --no-reports --out"
    assert run(["stress", *words.split(), str(tmp_path)]) == 1
    printed = capsys.readouterr().out.splitlines()
    (folder,) = tmp_path.iterdir()
    minimal = read_record(folder).findings[0].minimal
    assert minimal is not None and minimal["requests"] == 1 and minimal["pages"] == 1
    assert str(minimal["wait"]).startswith(
        "hicache.backup on hicache.d2h waits for decode.write on forward: with it, 0 of"
    )
    assert f"    small   kvcheck replay {minimal['line']}" in printed
    assert f"    wait    {minimal['wait']}" in printed
    small = parse_line(str(minimal["line"]))
    assert small.shape == "llama-3-micro" and len(small.line()) < 300
    name = f"{folder.name}#1"
    assert run(["replay", f"{name}:small", "--out", str(tmp_path)]) == 1
    assert "STILL FAILS 1/1  hicache/llama-3-micro: KV201" in capsys.readouterr().out
    assert run(["replay", name, "--out", str(tmp_path)]) == 1
    assert "hicache/llama-3-tiny: KV201" in capsys.readouterr().out
    assert run(["shrink", name, "--runs", "3", "--out", str(tmp_path)]) == 1
    assert f" from    {small.line()}" in capsys.readouterr().out
