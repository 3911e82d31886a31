"""The pages about servers say what their tables say, and the tables what is promised of equal servers."""

from __future__ import annotations

import pytest
from servers.published_tables import SERVE, TOLD_APART, equal, read, reuse

ONE_IN = 20


def test_the_page_of_prices_has_the_rows_of_its_table() -> None:
    page = (SERVE / "README.md").read_text(encoding="utf-8").splitlines()
    rows = read(SERVE / "serve.csv")
    assert [line for line in (*reuse(rows), *equal(rows)) if line not in page] == []


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_equal_servers_were_told_apart_in_one_of_twenty_runs_at_most(engine: str) -> None:
    rows = [row for row in read(SERVE / "serve.csv") if row["case"] == f"{engine}-equal"]
    runs = {row["run_id"] for row in rows}
    apart = {row["run_id"] for row in rows if row["verdict"] in TOLD_APART}
    assert runs and len(apart) * ONE_IN <= len(runs)
    assert not any(row["exit_code"] == "1" for row in rows), "a wrong answer"
