"""Sessions of runs, and the stories of their findings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from rigs.literal_record import FOREIGN, UNTOLD

from kvcheck.commands.main import run
from kvcheck.commands.stories import LEAST_S, SHRINKING_S, STORIES_S, look_for_smaller, tell_stories
from kvcheck.commands.terminal import Terminal
from kvcheck.core.base.causes import bugs, in_causal_order
from kvcheck.core.base.record import Finding, read_record
from kvcheck.core.run.plan import parse_line
from kvcheck.core.run.session import MAX_CAUSES_KEPT, MAX_SYMPTOMS_KEPT, Session
from kvcheck.core.stress import smaller as of_smaller
from kvcheck.core.stress import stories as of_stories
from kvcheck.core.stress.targets.mutants import mutant_target

LINE = "retract-resume:shape=glm-5.1-tiny,mutant=offload-skips-index-buffer,seed=1,schedule=0,expect=KV304"
SMALLER: dict[str, object] = {"line": "a:shape=b", "requests": 1, "pages": 2}
CAUSE = Finding(code="KV304", oracle="contract", buffer="index", request=3, message="saved without index")
SYMPTOM = Finding(code="KV102", oracle="content", buffer="index", request=3, message="read index")


def session_with(tmp_path: Path, *, found: bool = True) -> Session:
    session = Session(argv=[], repro="kvcheck stress", seed=1, plan={}, out=tmp_path, teller=Terminal(is_quiet=True))
    session.keep((FOREIGN,) if found else ())
    return session


@pytest.mark.parametrize(
    ("error", "why"), [(ValueError("no"), "ValueError: no; please report it"), (KeyboardInterrupt(), "interrupted: ")]
)
def test_what_was_found_before_an_error_is_kept(
    error: BaseException, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    session = session_with(tmp_path)

    def broken(*given: object, **named: object) -> Iterator[tuple[str, dict[str, object]]]:
        yield session.findings[0].id, SMALLER
        raise error

    monkeypatch.setattr(of_stories, "stories", lambda *given, **named: dict(broken()))
    monkeypatch.setattr(of_smaller, "smaller", broken)
    tell_stories(session, None)
    look_for_smaller(session, None)
    (finding,) = session.findings
    assert finding.code == FOREIGN.code and finding.minimal == {**(FOREIGN.minimal or {}), **SMALLER}
    assert len(session.warnings) == 2 and all(why in told for told in session.warnings)
    assert capsys.readouterr().err.count(why) == 2


@pytest.mark.parametrize(
    ("max_time_s", "stories_s", "smaller_s"),
    [
        (None, STORIES_S, [SHRINKING_S]),
        (600.0, STORIES_S, [SHRINKING_S]),
        (100.0, 10.0, [10.0]),
        (90.0, 9.0, []),
        (2.0, LEAST_S, []),
    ],
)
def test_they_take_little_time_and_a_search_no_more_than_is_left(
    max_time_s: float | None, stories_s: float, smaller_s: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: dict[str, list[float]] = {"stories": [], "smaller": []}
    session = session_with(tmp_path)

    def stories(findings: object, target_of: object, *, until: float, told: object) -> dict[str, object]:
        limits["stories"].append(until - 1000.0)
        return {each.id: UNTOLD for each in session.findings}

    def smaller(findings: object, target_of: object, *, until: float, told: object) -> Iterator[object]:
        limits["smaller"].append(until - 1000.0)
        return iter(())

    monkeypatch.setattr(Session, "elapsed_s", 90.0)
    monkeypatch.setattr("kvcheck.commands.stories.time.monotonic", lambda: 1000.0)
    monkeypatch.setattr(of_stories, "stories", stories)
    monkeypatch.setattr(of_smaller, "smaller", smaller)
    tell_stories(session, max_time_s)
    look_for_smaller(session, max_time_s)
    assert limits == {"stories": [stories_s], "smaller": smaller_s}
    assert (session.findings[0].story, session.findings[0].minimal) == (UNTOLD, FOREIGN.minimal)


def test_a_run_without_a_finding_has_neither(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((of_stories, "stories"), (of_smaller, "smaller")):
        monkeypatch.setattr(module, name, lambda *given, **named: pytest.fail("nothing was found"))
    session = session_with(tmp_path, found=False)
    tell_stories(session, None)
    look_for_smaller(session, None)
    assert not session.findings and not session.warnings


def test_lines_that_cannot_be_shrunk_and_second_causes_of_a_code_are_left_out() -> None:
    cause = replace(FOREIGN, code="KV304", schedule=LINE, cause=None)
    other = replace(cause, id="2", schedule="hicache:shape=llama-3-tiny,trace=sample,seed=1,schedule=0")
    found = [cause, replace(cause, id="3"), replace(other, code="KV102"), replace(cause, id="4", schedule="")]
    assert [each.id for each, _ in of_smaller._first_causes(found)] == ["1"]
    many = [replace(cause, id=str(at), code=f"KV{at}") for at in range(200, 210)]
    assert len(of_smaller._first_causes(many)) == of_smaller.MOST_CAUSES


@pytest.mark.schedules
def test_the_time_may_be_up_at_once() -> None:
    cause = replace(FOREIGN, code="KV304", schedule=LINE)
    assert not [*of_smaller.smaller([cause], lambda plan: mutant_target(str(plan.mutant)), until=0.0)]


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
    assert f"    small     kvcheck replay {folder.name}#1:small --out {tmp_path}" in printed
    assert f"    missing   {minimal['wait']}" in printed
    small = parse_line(str(minimal["line"]))
    assert small.shape == "llama-3-micro" and len(small.line()) < 300
    name = f"{folder.name}#1"
    assert run(["replay", f"{name}:small", "--out", str(tmp_path)]) == 1
    assert "STILL FAILS 1/1  hicache/llama-3-micro: KV201" in capsys.readouterr().out
    assert run(["replay", name, "--out", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert "hicache/llama-3-tiny: KV201" in printed and f"   next    kvcheck show {name} --out {tmp_path}" in printed
    assert run(["shrink", name, "--runs", "3", "--out", str(tmp_path)]) == 1
    assert f" from    {small.line()}" in capsys.readouterr().out


def new_session(out: Path) -> Session:
    return Session(argv=[], repro="kvcheck stress", seed=1, plan={}, out=out, teller=Terminal(is_quiet=True))


@pytest.fixture
def session(tmp_path: Path) -> Session:
    return new_session(tmp_path)


def test_a_symptom_names_its_cause_by_the_run(session: Session) -> None:
    for _ in range(2):
        session.keep(in_causal_order((SYMPTOM, CAUSE)))
    run = session.run_id
    assert [(each.id, each.code, each.cause) for each in session.findings] == [
        (f"{run}.1", "KV304", None),
        (f"{run}.2", "KV102", f"{run}.1"),
        (f"{run}.3", "KV304", None),
        (f"{run}.4", "KV102", f"{run}.3"),
    ]
    assert [bug.symptoms for bug in bugs(session.findings)] == [{"KV102": 2}]


def test_findings_of_an_interrupted_run_keep_their_causes(session: Session, tmp_path: Path) -> None:
    session.keep(in_causal_order((SYMPTOM, CAUSE)))
    later = new_session(tmp_path)
    later.keep(tuple(session.findings))
    assert [each.cause for each in later.findings] == [None, f"{later.run_id}.1"]


def test_findings_without_ids_are_causes(session: Session) -> None:
    session.keep((CAUSE, SYMPTOM))
    assert [each.cause for each in session.findings] == [None, None]


def test_symptoms_never_displace_a_later_cause(session: Session) -> None:
    many = tuple(replace(SYMPTOM, page=page) for page in range(MAX_SYMPTOMS_KEPT + 7))
    session.keep(in_causal_order((CAUSE, *many)))
    session.keep(in_causal_order((SYMPTOM, CAUSE)))
    kept = session.record(complete=False)
    assert sum(each.cause is None for each in kept.findings) == 2
    assert sum(each.cause is not None for each in kept.findings) == MAX_SYMPTOMS_KEPT
    assert kept.warnings == ("more findings were made and are not in this record: 8",)


def test_a_cause_that_is_not_kept_takes_its_symptoms_with_it(session: Session) -> None:
    for _ in range(MAX_CAUSES_KEPT):
        session.keep((CAUSE,))
    session.keep(in_causal_order((SYMPTOM, CAUSE)))
    assert len(session.findings) == MAX_CAUSES_KEPT and session.left_out == 2
