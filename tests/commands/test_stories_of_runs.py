"""Stories in a run: a story that breaks, or is interrupted, takes no finding and no verdict with it."""

from __future__ import annotations

from pathlib import Path

import pytest
from rigs.literal_record import FOREIGN, UNTOLD

from kvcheck.commands.stories import LEAST_S, STORIES_S, tell_stories
from kvcheck.commands.terminal import Terminal
from kvcheck.core.run.session import Session
from kvcheck.core.stress import stories as made


def session_with(tmp_path: Path, *, found: bool) -> Session:
    session = Session(argv=[], repro="kvcheck stress", seed=1, plan={}, out=tmp_path, teller=Terminal(is_quiet=True))
    session.keep((FOREIGN,) if found else ())
    return session


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (ValueError("story: expected less"), "not told: ValueError: story: expected less; please report it"),
        (KeyboardInterrupt(), "interrupted: how findings came about is not told"),
    ],
)
def test_a_story_that_cannot_be_made_leaves_the_findings(
    error: BaseException, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*given: object, **named: object) -> None:
        raise error

    monkeypatch.setattr(made, "stories", fail)
    session = session_with(tmp_path, found=True)
    tell_stories(session, None)
    assert [each.code for each in session.findings] == [FOREIGN.code]
    assert len(session.warnings) == 1 and why in session.warnings[0]
    assert why in capsys.readouterr().err


@pytest.mark.parametrize(
    ("max_time_s", "limit_s"), [(None, STORIES_S), (600.0, STORIES_S), (100.0, 10.0), (2.0, LEAST_S)]
)
def test_stories_have_little_time(
    max_time_s: float | None, limit_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[float] = []

    def record(findings: object, target_of: object, *, until: float, told: object) -> dict[str, object]:
        seen.append(until)
        return {each.id: UNTOLD for each in session.findings}

    monkeypatch.setattr("kvcheck.commands.stories.time.monotonic", lambda: 1000.0)
    monkeypatch.setattr(made, "stories", record)
    session = session_with(tmp_path, found=True)
    tell_stories(session, max_time_s)
    assert seen == [1000.0 + limit_s] and session.findings[0].story == UNTOLD


def test_a_run_without_a_finding_tells_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(made, "stories", lambda *given, **named: pytest.fail("a story of nothing"))
    session = session_with(tmp_path, found=False)
    tell_stories(session, None)
    assert not session.findings and not session.warnings
