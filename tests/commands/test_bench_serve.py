"""`kvcheck bench serve` against servers that speak as engines do: exit codes, rows, refusals, what reads its runs."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fakes.server import Fake
from fakes.speech import KEY
from rigs.server_runs import ALPHABET, Commands

from kvcheck.commands import bench_serve
from kvcheck.commands.main import run
from kvcheck.core.base.record import RunRecord, Verdict
from kvcheck.core.base.server_facts import SERVE_CASES
from kvcheck.core.live.prices.bench import ServeBench

pytestmark = pytest.mark.usefixtures("no_waits")
SIZES = ("--requests", "8", "--concurrency", "2", "--prompt", "96", "--answer", "6", "--rounds", "6")


class Asked(Commands):
    def __init__(self, model: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
        super().__init__(out, capsys)
        self.model = model

    def __call__(self, url: str, *arguments: str) -> tuple[int, str]:
        words = ["bench", "serve", url, "--known-answers", str(self.model), "--out", str(self.out)]
        return self.said(*words, *SIZES, "--seed", "1", *arguments)


@pytest.fixture
def ask(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Asked:
    return Asked(model, tmp_path / "runs", capsys)


def fake(engine: str, fault: str | None = None, **options: Any) -> Fake:
    return Fake(ALPHABET, engine, fault=fault, **{"token_s": 0.0005, "pool": 4096, **options})


def verdicts(record: RunRecord) -> dict[str, Verdict]:
    return {row.id: row.verdict for row in record.scenarios}


def test_one_server_is_compared_with_and_without_reuse(engine: str, ask: Asked) -> None:
    with fake(engine) as server:
        code, said = ask(server.url)
    record = ask.record()
    assert code == 0, said
    assert [(row.case, row.arm, row.baseline) for row in record.bench] == [
        (case, "reuse", "fresh") for case in SERVE_CASES
    ]
    assert list(verdicts(record)) == [*SERVE_CASES, "integrity/fresh", "integrity/reuse"]
    assert set(verdicts(record).values()) == {Verdict.PASS}
    seen = {row.id: row.evidence.observed for row in record.scenarios}
    assert seen["integrity/reuse"]["hit"] > 0 == seen["integrity/fresh"]["hit"]
    assert all(row.device == engine and row.shape == "llama-4x4x64" and row.size == "8x96+6@2" for row in record.bench)
    assert all(f"\n {case}, " in said for case in SERVE_CASES), said
    assert ask.server_facts()["engine"] == engine


def test_two_servers_get_the_same_load_in_other_tokens(ask: Asked) -> None:
    with fake("sglang") as target, fake("vllm") as versus:
        code, said = ask(target.url, "--versus", versus.url)
        sizes = [
            [len(body.get("input_ids") or body["prompt"]) for body in server.bodies[1:]] for server in (target, versus)
        ]
        asked = [{tuple(body.get("input_ids") or body["prompt"]) for body in each.bodies} for each in (target, versus)]
    assert code == 0, said
    record = ask.record()
    assert {(row.arm, row.baseline, row.device) for row in record.bench} == {("versus", "target", "sglang, vllm")}
    a_pass = 8 + 2 + 1  # timed, the groups' prompts, and the prompt of the position test
    assert (len(sizes[0]), len(sizes[1])) == (a_pass * (1 + 4 * 6), a_pass * (1 + 2 * 6))
    assert sorted(sizes[0][:a_pass]) == sorted(sizes[1][:a_pass]) and not asked[0] & asked[1]
    facts = ask.server_facts()
    assert (facts["engine"], facts["versus.engine"]) == ("sglang", "vllm")


def test_a_wrong_token_fails_the_run_and_no_price_is_a_measurement(engine: str, ask: Asked) -> None:
    with fake(engine) as target, fake(engine, "wrong-token") as versus:
        code, said = ask(target.url, "--versus", versus.url)
    record = ask.record()
    assert code == 1, said
    assert verdicts(record)["integrity/versus"] is Verdict.FAIL and record.findings
    assert {verdicts(record)[case] for case in SERVE_CASES} == {Verdict.UNKNOWN}
    assert "not a measurement: " in said and "wrong token" in said
    assert run(["gate", str(ask.folder)]) == 1


@pytest.mark.parametrize(("fault", "text"), [("some-500", "status 500: out of luck"), ("response-cache", "")])
def test_what_was_not_answered_by_the_engine_is_unknown(engine: str, fault: str, text: str, ask: Asked) -> None:
    with fake(engine, fault) as server:
        code, said = ask(server.url)
    assert (code in (0, 4)) if fault == "response-cache" else code == 4, said
    assert text in said


def test_the_same_server_twice_is_one_server(engine: str, ask: Asked) -> None:
    with fake(engine) as server:
        code, said = ask(server.url, "--versus", server.url, "--rounds", "1")
        assert len([path for path, _ in server.calls if path == "/v1/models"]) <= 3
    assert code == 4 and "expected 6 rounds or more, got 1" in said
    assert "of target and versus together" in said


def test_prompts_that_come_back_after_a_flood_are_for_two_servers_that_say_their_pool(ask: Asked) -> None:
    with fake("vllm", pool=512) as target, fake("vllm", pool=512) as versus:
        code, said = ask(target.url, "--versus", versus.url, "--load", "returning", "--rounds", "1")
        most = len(target.bodies) - 1
    assert code == 4, said
    assert "8x96+6@2 returning" in said
    assert most == (1 + 4) * (11 + 7)  # seven requests of 104 tokens are 130 % of 512


def test_a_load_that_the_server_cannot_take_is_refused(ask: Asked) -> None:
    with fake("sglang", pool=1 << 22) as server:
        for words, told in (
            (["--prompt", "510"], "expected at most 512 tokens together"),
            (["--load", "returning", "--versus", server.url], "fill the pool"),
        ):
            code, said = ask(server.url, *words)
            assert code == 2 and told in said and not ask.out.exists()


def test_another_model_is_refused(engine: str, ask: Asked) -> None:
    with fake(engine, "other-model") as server:
        code, said = ask(server.url)
        with fake(engine) as right:
            _, of_two = ask(right.url, "--versus", server.url)
    assert code == 2 and "does not serve this model" in said and not ask.out.exists()
    assert "--versus: the server does not serve this model" in of_two, "which of the two"


def test_a_key_is_sent_and_recorded_nowhere(engine: str, ask: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVER_KEY", KEY)
    with fake(engine, "needs-key") as server:
        code, said = ask(server.url, "--key-env", "SERVER_KEY", "--rounds", "1")
    assert code == 4 and KEY not in said, said
    assert all(KEY not in path.read_text(encoding="utf-8") for path in ask.folder.iterdir() if path.is_file())


def test_without_leave_nothing_is_flushed_and_with_it_before_each_pass(engine: str, ask: Asked) -> None:
    paths: list[list[str]] = []
    for words in ((), ("--admin",)):
        with fake(engine) as server:
            ask(server.url, "--rounds", "1", *words)
            paths.append([path for path, _ in server.calls if "cache" in path])
    assert paths[0] == [] and len(paths[1]) == 2 + 6


def test_an_interrupt_keeps_the_finished_rounds(engine: str, ask: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = ServeBench.add_round

    def interrupt(name: str, answered: int) -> None:
        raise KeyboardInterrupt

    def stops(bench: ServeBench, **how: Any) -> bool:
        if len(bench.rounds.times) == 6:
            how["told"] = interrupt
        return whole(bench, **how)

    monkeypatch.setattr(ServeBench, "add_round", stops)
    with fake(engine) as server:
        code, said = ask(server.url, "--rounds", "9")
    record = ask.record()
    assert code == 130 and not record.complete, said
    assert [len(row.ratios) for row in record.bench] == [6] * 3 and "interrupted: the finished rounds are kept" in said
    assert verdicts(record)["integrity/fresh"] is Verdict.PASS


def test_the_time_limit_ends_a_run_and_says_so(engine: str, ask: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    warm = ServeBench.warm_up

    def late(bench: ServeBench, **how: Any) -> bool:
        goes_on = warm(bench, **how)
        monkeypatch.setattr(bench_serve, "time", SimpleNamespace(monotonic=lambda: float("inf")))
        return goes_on

    monkeypatch.setattr(ServeBench, "warm_up", late)
    with fake(engine) as server:
        code, said = ask(server.url)
    assert code == 4 and "got 0: its time was up; use a larger --max-time" in said


def test_reports_gate_and_compare_take_its_runs(ask: Asked, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with fake("sglang") as server:
        for _ in range(2):
            assert ask(server.url)[0] == 0
    first, second = sorted(ask.out.iterdir())
    page = (first / "report.html").read_text(encoding="utf-8")
    assert "integrity/fresh" in page and "integrity/reuse" in page
    with (first / "bench.csv").open(encoding="utf-8", newline="") as stream:
        assert [row["case"] for row in csv.DictReader(stream)] == list(SERVE_CASES)
    assert run(["gate", str(first), str(second)]) == 0
    assert run(["compare", str(first), str(second), "--out", str(ask.out)]) == 0
    assert run(["report", str(first), "-o", f"md={tmp_path / 'report.md'}"]) == 0
    capsys.readouterr()
    budget = tmp_path / "budgets.toml"
    budget.write_text(
        '[[budget]]\ncase = "serve-throughput"\narm = "reuse"\nbaseline = "fresh"\nmax_ratio = 0.000001\n',
        encoding="utf-8",
    )
    assert run(["gate", str(first), "--budget", str(budget), "--format", "json"]) in (3, 4)
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert any("it needs its servers: run kvcheck bench serve again" in note for note in row["notes"])
