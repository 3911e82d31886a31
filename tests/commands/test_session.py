"""A session keeps findings with ids of the run: causes first, each symptom with its cause, within limits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvcheck.commands.terminal import Terminal
from kvcheck.core.base.causes import bugs, in_causal_order
from kvcheck.core.base.record import Finding
from kvcheck.core.run.session import MAX_CAUSES_KEPT, MAX_SYMPTOMS_KEPT, Session

CAUSE = Finding(code="KV304", oracle="contract", buffer="index", request=3, message="saved without index")
SYMPTOM = Finding(code="KV102", oracle="content", buffer="index", request=3, message="read index")


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
