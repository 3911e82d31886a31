"""A record survives its file, says the worst verdict, and fits the published schema; anything else is refused."""

from __future__ import annotations

import dataclasses
import gzip
import json
import types
import typing
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
from rigs.gate import bench_row
from rigs.literal_record import FAILED, PASSED, UNJUDGED
from rigs.schemas import check_fits, validator

from kvcheck.core.base.errors import UsageError
from kvcheck.core.base.record import (
    BenchRow,
    Evidence,
    Finding,
    Interval,
    MutantResult,
    RunRecord,
    ScenarioResult,
    Verdict,
    read_record,
)
from kvcheck.core.base.story import Edge, Story, StoryStep, Word
from kvcheck.core.report.to_csv import tables
from kvcheck.core.report.to_html import render

SCHEMA = validator("run").schema
MEASURED = replace(
    PASSED, bench=(bench_row(shape=None, bytes=2048, limit="memcpy", limit_ratio=Interval(0.5, None, None)),)
)
RECORDS = {"fail": FAILED, "pass": PASSED, "unknown": UNJUDGED, "measured": MEASURED}
DEFINITIONS = {
    Evidence: SCHEMA["$defs"]["evidence"],
    Finding: SCHEMA["$defs"]["finding"],
    ScenarioResult: SCHEMA["$defs"]["scenario"],
    MutantResult: SCHEMA["$defs"]["mutant"],
    Interval: SCHEMA["$defs"]["interval"],
    StoryStep: SCHEMA["$defs"]["step"],
    Edge: SCHEMA["$defs"]["edge"],
    Word: SCHEMA["$defs"]["word"],
    Story: SCHEMA["$defs"]["finding"]["properties"]["story"],
    BenchRow: SCHEMA["$defs"]["bench_row"],
    RunRecord: SCHEMA,
}


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_fits_the_schema_and_is_read_back_as_it_was_written(name: str, tmp_path: Path) -> None:
    text = RECORDS[name].to_json()
    check_fits(json.loads(text))
    (tmp_path / "run.json").write_text(text, encoding="utf-8")
    assert read_record(tmp_path) == read_record(tmp_path / "run.json") == RECORDS[name]


@pytest.mark.parametrize(
    "change",
    [{"surprise": 1}, {"verdict": "passed"}, {"exit_code": 5}, {"schema_version": "2"}, {"seed": "1"}],
    ids=str,
)
def test_the_schema_refuses_what_is_not_a_record(change: dict[str, object]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        check_fits({**json.loads(PASSED.to_json()), **change})


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


def test_evidence_adds_up_and_none_stays_none() -> None:
    one = Evidence(schedules=1, retractions=2, words_verified={"latent": 3}, observed={"hit": 1})
    two = Evidence(
        schedules=4, transfers=5, words_verified={"latent": 6, "k": 7}, observed={"hit": 2}, situations={"a": 2}
    )
    total = one.plus(two)
    assert (total.schedules, total.retractions, total.transfers, total.aborts) == (5, 2, 5, None)
    assert (total.words_verified, total.observed) == ({"latent": 9, "k": 7}, {"hit": 3})
    assert total.situations == {"a": 2}


Place = tuple[str | int, ...]
DAMAGE: tuple[object, ...] = (None, True, 5, 1.5, "x", [], {}, [5], {"x": "x"}, [1, None], 10**30, 1e300)


def changed(value: object, place: Place, new: object) -> object:
    """A copy of parsed JSON with one place changed."""
    if not place:
        return new
    assert isinstance(value, (dict, list))
    copy: typing.Any = value.copy()
    copy[place[0]] = changed(copy[place[0]], place[1:], new)
    return copy


def places(value: object, here: Place = ()) -> Iterator[Place]:
    """Every place inside parsed JSON; of a list its first item, which is read as all are."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for key, item in pairs:
        yield (*here, key)
        yield from places(item, (*here, key))


def nested(levels: int) -> object:
    """Lists in lists."""
    value: object = 1
    for _ in range(levels):
        value = [value]
    return value


def test_whatever_one_place_holds_the_file_is_a_record_or_refused(tmp_path: Path) -> None:
    whole = json.loads(FAILED.to_json())
    path = tmp_path / "run.json"
    refused = 0
    for place in places({key: whole[key] for key in whole if key != "schema_version"}):
        for damage in DAMAGE:
            raw = changed(whole, place, damage)
            path.write_text(json.dumps(raw), encoding="utf-8")
            try:
                record = read_record(path)
            except UsageError:
                refused += 1
            else:
                assert json.loads(record.to_json()) == raw
    assert refused > 500


def damaged(place: Place, damage: object) -> str:
    return json.dumps(changed(json.loads(FAILED.to_json()), place, damage))


def lasting(number: str) -> str:
    return PASSED.to_json().replace('"duration_s": 4.875', f'"duration_s": {number}')


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (FAILED.to_json()[:200], "truncated"),
        ("[]", "expected a run record with schema_version, got list"),
        *((f'{{"schema_version": {each}}}', f"got {each}: another v".replace('"', "'")) for each in ('"6"', "1")),
        ('{"schema_version": "1"}', "not a complete run record"),
        (PASSED.to_json().replace('"pass"', '"passed"'), "not a complete run record"),
        (damaged(("findings", 0, "code"), 5), r"record\.findings\[0\]\.code: expected str, got int"),
        (damaged(("evidence", "words_verified"), {"x": "x"}), r"words_verified\.x: expected int, got str"),
        (damaged(("evidence", "events"), True), "events: expected int, got bool"),
        (damaged(("plan",), {"a": nested(40)}), "at most 32 levels"),
        (damaged(("environment",), {"x": 10**21}), r"environment\.x: expected a number of at most 20 digits"),
        (damaged(("findings", 0), {}), r"findings\[0\]: the key 'buffer' is missing"),
        *((lasting(each), None) for each in ("NaN", "Infinity", "-Infinity", "1e999", "9" * 5000, "[" * 100_000)),
    ],
    ids=lambda value: str(value)[-40:],
)
def test_a_file_that_is_no_record_is_refused_by_its_key(text: str, complaint: str | None, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=complaint):
        read_record(tmp_path)
    with pytest.raises(UsageError):
        read_record(tmp_path / "missing")


@pytest.mark.parametrize(
    "run_id", ["", ".", "..", "../evil", "/root/x", "a/b", "a\\b", "a\nb", "a\0b", "\ud800", "x" * 200, "-o"]
)
def test_a_run_id_that_is_no_plain_name_is_refused(run_id: str, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps({**json.loads(PASSED.to_json()), "run_id": run_id}), encoding="utf-8")
    with pytest.raises(UsageError, match="expected one plain file name"):
        read_record(path)


def test_the_largest_record_that_is_read_can_be_shown(tmp_path: Path) -> None:
    raw = json.loads(FAILED.to_json())
    raw["plan"] = {"deep": nested(31), "large": -(10**20)}
    raw["evidence"]["words_verified"] = {"\ud800\x1b": 10**20, "less": -(10**20)}
    raw["findings"][0].update(layer=10**20, page=-(10**20), minimal={"deep": nested(31)})
    (tmp_path / "run.json").write_text(json.dumps(raw), encoding="utf-8")
    record = read_record(tmp_path)
    assert "100,000,000,000,000,000,000" in render(record)
    assert str(10**20) in tables(record)["findings.csv"]


def test_a_record_never_holds_what_is_not_json() -> None:
    with pytest.raises(ValueError, match="Out of range float"):
        dataclasses.replace(PASSED, plan={"max_time_s": float("inf")}).to_json()


def test_a_packed_record_is_read_and_a_damaged_one_refused(tmp_path: Path) -> None:
    path, packed = tmp_path / "sglang.json.gz", gzip.compress(FAILED.to_json().encode())
    path.write_bytes(packed)
    assert read_record(path) == FAILED
    for damaged in (packed[:-20], packed[:100] + b"\xff" * 20 + packed[120:], FAILED.to_json().encode(), b""):
        path.write_bytes(damaged)
        with pytest.raises(UsageError):
            read_record(path)


def test_published_records_are_read_by_this_build() -> None:
    paths = sorted((Path(__file__).parents[2] / "reports" / "published").rglob("*.json.gz"))
    assert paths and all(read_record(path).complete for path in paths)
