"""A record survives its file, says the worst verdict, and fits the published schema; anything else is refused.

Invariants:
- The schema and the dataclasses have the same keys and the same nullable keys; neither can drift alone.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from pathlib import Path

import jsonschema
import pytest
from literal_record import FAILED, PASSED, UNJUDGED

from kvcheck.core.errors import UsageError
from kvcheck.core.record import Evidence, Finding, MutantResult, RunRecord, ScenarioResult, Verdict, read_record

SCHEMA = json.loads((Path(__file__).parent.parent / "reports" / "run.schema.json").read_text(encoding="utf-8"))
RECORDS = {"fail": FAILED, "pass": PASSED, "unknown": UNJUDGED}
DEFINITIONS = {
    Evidence: SCHEMA["$defs"]["evidence"],
    Finding: SCHEMA["$defs"]["finding"],
    ScenarioResult: SCHEMA["$defs"]["scenario"],
    MutantResult: SCHEMA["$defs"]["mutant"],
    RunRecord: SCHEMA,
}


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_is_read_back_as_it_was_written(name: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(RECORDS[name].to_json(), encoding="utf-8")
    assert read_record(tmp_path) == RECORDS[name]
    assert read_record(tmp_path / "run.json") == RECORDS[name]


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_fits_the_schema(name: str) -> None:
    raw = json.loads(RECORDS[name].to_json())
    jsonschema.validate(raw, SCHEMA)
    assert raw["verdict"] == name


def test_the_schema_itself_is_valid() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert SCHEMA["additionalProperties"] is False


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"surprise": 1}, "surprise"),
        ({"verdict": "passed"}, "passed"),
        ({"exit_code": 5}, "5"),
        ({"schema_version": "2"}, "2"),
        ({"scenarios": [{"id": "a/b"}]}, "required"),
        ({"seed": "1"}, "type"),
    ],
)
def test_the_schema_refuses_what_is_not_a_record(change: dict[str, object], complaint: str) -> None:
    raw = {**json.loads(PASSED.to_json()), **change}
    with pytest.raises(jsonschema.ValidationError, match=complaint):
        jsonschema.validate(raw, SCHEMA)


@pytest.mark.parametrize("value", DEFINITIONS, ids=lambda value: value.__name__)
def test_schema_and_dataclass_have_the_same_keys(value: type) -> None:
    definition = DEFINITIONS[value]
    hints = typing.get_type_hints(value)
    names = [row.name for row in dataclasses.fields(value)]
    assert sorted(definition["properties"]) == sorted(definition["required"]) == sorted(names)
    optional = {name for name in names if types.NoneType in typing.get_args(hints[name])}
    nullable = {name for name, rule in definition["properties"].items() if "null" in rule.get("type", ())}
    assert nullable == optional


@pytest.mark.parametrize(
    ("verdicts", "worst"),
    [
        ([], Verdict.UNKNOWN),
        ([Verdict.PASS], Verdict.PASS),
        ([Verdict.PASS, Verdict.UNKNOWN], Verdict.UNKNOWN),
        ([Verdict.UNKNOWN, Verdict.FAIL, Verdict.PASS], Verdict.FAIL),
    ],
)
def test_the_worst_verdict_wins(verdicts: list[Verdict], worst: Verdict) -> None:
    assert Verdict.worst(verdicts) is worst


def test_exit_codes_of_verdicts() -> None:
    assert [verdict.exit_code for verdict in (Verdict.PASS, Verdict.FAIL, Verdict.UNKNOWN)] == [0, 1, 4]


def test_evidence_adds_up_and_none_stays_none() -> None:
    one = Evidence(schedules=1, retractions=2, words_verified={"latent": 3})
    two = Evidence(schedules=4, transfers=5, words_verified={"latent": 6, "metadata": 7})
    total = one.plus(two)
    assert (total.schedules, total.retractions, total.transfers, total.aborts) == (5, 2, 5, None)
    assert total.words_verified == {"latent": 9, "metadata": 7}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (FAILED.to_json()[:200], "truncated"),
        ("[]", "expected a run record with schema_version, got list"),
        ('{"schema_version": "9"}', "expected schema_version '1', got '9'"),
        ('{"schema_version": "1"}', "not a complete run record"),
        (PASSED.to_json().replace('"pass"', '"passed"'), "not a complete run record"),
    ],
)
def test_a_file_that_is_no_record_is_refused(text: str, complaint: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=complaint):
        read_record(tmp_path)


def test_a_missing_record_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"expected a run\.json or its folder"):
        read_record(tmp_path / "nothing")
