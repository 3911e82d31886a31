"""The pages about servers say what their tables say, and the tables what is promised of equal servers."""

from __future__ import annotations

import pytest
from servers.published_tables import NOT_PLANTED, OWN, SERVE, TOLD_APART, equal, own, read, reuse

ONE_IN = 20


def test_the_page_of_prices_has_the_rows_of_its_table() -> None:
    page = (SERVE / "README.md").read_text(encoding="utf-8").splitlines()
    rows = read(SERVE / "serve.csv")
    assert [line for line in (*reuse(rows), *equal(rows)) if line not in page] == []


def test_the_page_of_own_models_has_the_rows_of_its_table() -> None:
    page = (OWN / "README.md").read_text(encoding="utf-8").splitlines()
    assert [line for line in own(read(OWN / "trials.csv")) if line not in page] == []


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_equal_servers_were_told_apart_in_one_of_twenty_runs_at_most(engine: str) -> None:
    rows = [row for row in read(SERVE / "serve.csv") if row["case"] == f"{engine}-equal"]
    runs = {row["run_id"] for row in rows}
    apart = {row["run_id"] for row in rows if row["verdict"] in TOLD_APART}
    assert runs and len(apart) * ONE_IN <= len(runs)
    assert not any(row["exit_code"] == "1" for row in rows), "a wrong answer"


def test_no_run_without_a_fault_accused_a_server() -> None:
    clean = [row for row in read(OWN / "trials.csv") if not row["is_found"] or row["note"] == NOT_PLANTED]
    assert clean and all(row["exit_code"] != "1" for row in clean)


def test_no_finding_named_a_request_that_had_not_read_the_planted_page() -> None:
    assert {row["beside"] for row in read(OWN / "trials.csv")} <= {"0", ""}, "older rows lack it"


@pytest.mark.parametrize("kind", ["stale", "needle"])
def test_a_planted_page_was_found_in_nineteen_of_twenty_runs_of_both_engines_together(kind: str) -> None:
    rows = [row for row in read(OWN / "trials.csv") if row["case"].endswith(kind)]
    found = [row["is_found"] == "1" for row in rows if not row["note"].startswith(NOT_PLANTED)]
    assert len(found) >= 15 and sum(found) * ONE_IN >= (ONE_IN - 1) * len(found)
