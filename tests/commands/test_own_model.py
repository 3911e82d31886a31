"""`kvcheck live --own-model` and `kvcheck model reference` against a server whose answers nobody knows beforehand."""

from __future__ import annotations

import _thread
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from fakes.server import Fake
from rigs.own_engine import FAULTS, OwnEngine
from rigs.server_runs import Commands

from kvcheck.commands import reference
from kvcheck.core.base.record import Verdict
from kvcheck.core.live import health
from kvcheck.core.live.exchange import Answer, End
from kvcheck.core.live.own import runner as own_runner
from kvcheck.core.live.own.arms import Matched, Treated
from kvcheck.core.live.own.reference import FILE, read_reference
from kvcheck.core.live.own.statistic import Level, Measured, ReportedDeviation

pytestmark = pytest.mark.usefixtures("no_waits")
SMALL = ("--requests", "25", "--concurrency", "4", "--no-reports", "--seed", "3")

# fault: (exit code, codes of findings that it ends in, a text that the terminal shows). A request that reads a foreign
# page recites it only where it asks for a code of that page; else it is far from its reference.
ENDS: dict[str, tuple[int, set[str], str]] = {
    "stale": (1, {"KV810"}, "it came again, and not in fresh copies"),
    "foreign": (1, {"KV809", "KV810"}, "kvcheck explain KV8"),
    "foreign-answer": (1, {"KV809"}, "can know"),
    "slight": (0, set(), "a known-answer model tells them apart"),
    "no-logprobs": (2, set(), "the server gives no log-probabilities"),
    "no-salts": (4, set(), "the reference is not cold"),
}


class Asked(Commands):
    def __call__(self, url: str, *arguments: str, scenarios: tuple[str, ...] = ("prefix-cache",)) -> tuple[int, str]:
        return self.said("live", url, *scenarios, "--own-model", "--out", str(self.out), *SMALL, *arguments)

    def arms(self) -> dict[str, Any]:
        """The arms that the record has, by name."""
        (arms,) = self.server_facts()["own_model"].values()
        return {arm["arm"]: arm for arm in arms["arms"]}


@pytest.fixture
def ask(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Asked:
    return Asked(tmp_path / "runs", capsys)


def served(engine: str, fault: str | None = None, **options: Any) -> Fake:
    return Fake(None, engine, model=OwnEngine(fault=fault, **{"pool": 8192, "token_s": 0.0002, **options}))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_ends_in_its_code_and_finding(fault: str, engine: str, ask: Asked) -> None:
    code, codes, text = ENDS[fault]
    with served(engine, fault) as server:
        ended, said = ask(server.url)
    assert ended == code, said
    assert text in said
    assert "p = " in said or text != "it came again, and not in fresh copies"
    if code == 1:
        model = server.model
        assert isinstance(model, OwnEngine) and model.planted
        found = ask.record().findings
        assert {finding.code for finding in found} <= codes and found, said
        assert {finding.minimal["rid"] for finding in found if finding.minimal} <= {*model.planted}, "nobody else"


@pytest.mark.parametrize(
    "noise", [{}, {"warm": 0.1}, {"run": 0.02}, {"batch": 0.002}, {"run": 0.01, "warm": 0.05}], ids=str
)
def test_a_server_without_a_fault_passes_whatever_its_noise(noise: dict[str, float], engine: str, ask: Asked) -> None:
    with served(engine, **noise) as server:
        code, said = ask(server.url)
    assert code == 0, said
    record = ask.record()
    assert record.verdict is Verdict.PASS and record.evidence.observed["hit"] > 0
    assert "not looked for: one request less than" in said and "recite the code" in said
    assert ("4 groups by the pages that they share; not looked for: many small" in said) == bool(noise)
    rows = ask.arms()
    assert set(rows) == {"cold", "again", "control", "treated", "matched"}
    assert rows["cold"]["cached"] == rows["control"]["cached"] == 0 < rows["treated"]["cached"]
    assert (rows["matched"]["compared"] > 0) == bool(noise), "an exact server needs no matched controls"
    if noise:
        assert rows["matched"]["cached"] == rows["treated"]["cached"], "the hits of the treated requests"


@pytest.mark.parametrize("scenario, verdict", [("aborts", Verdict.UNKNOWN), ("prefix-cache", Verdict.FAIL)])
def test_answers_that_the_engine_did_not_compute_are_told_first(
    scenario: str, verdict: Verdict, engine: str, ask: Asked
) -> None:
    """What is stored is too long for a prompt that only begins as another one."""
    with Fake(None, engine, model=OwnEngine(pool=8192, token_s=0.0002), fault="front-cache") as server:
        said = ask(server.url, scenarios=(scenario,))[1]
    (row,) = ask.record().scenarios
    assert row.verdict is verdict and row.reason is not None, said
    assert row.reason.startswith("the engine computed") and "a response cache or a proxy" in row.reason


@pytest.mark.parametrize(
    "variation", [{"has_metrics": False}, {"beside": 1, "is_pinned": True}, {"lag": True}, {"traffic": 7}], ids=str
)
def test_counters_that_count_something_else_are_no_doubt(variation: dict[str, Any], engine: str, ask: Asked) -> None:
    with Fake(None, engine, model=OwnEngine(pool=8192, token_s=0.0002), **variation) as server:
        said = ask(server.url)[1]
    assert "a response cache or a proxy" not in said


def test_pages_that_an_answer_wrote_round_otherwise_and_are_no_finding(engine: str, ask: Asked) -> None:
    """The next turn of a conversation hits them. A control that computed them as part of a prompt would be nearer."""
    with served(engine, decoded=0.2) as server:
        code, said = ask(server.url)
    assert code == 0, said
    rows = ask.arms()
    assert rows["treated"]["other"] and rows["matched"]["other"] >= rows["treated"]["other"] * 0.8
    assert rows["matched"]["cached"] == rows["treated"]["cached"], "hits inside answers are the same"


def test_batches_of_other_sizes_round_otherwise_and_are_no_finding(ask: Asked) -> None:
    """`priority` sends twice as many at a time as others: so do its controls, where they fit."""
    with served("sglang", crowd=0.05) as server:
        code, said = ask(server.url, scenarios=("priority",))
    assert code != 1 and "unsteady" not in said, said
    rows = ask.arms()
    assert min(rows["treated"]["other"], rows["control"]["other"]) > 5  # how many meet is up to the machine


def test_batches_of_a_size_that_controls_do_not_fit_into_are_no_finding(ask: Asked) -> None:
    with served("sglang", crowd=0.05, few=3, pool=1200) as server:
        code, said = ask(server.url, scenarios=("retract-resume",))
    assert code == 4 and "controls at a time and the scenario has 4" in said, said
    assert "unsteady: request" in said and "so were many others" in said, said


@pytest.mark.parametrize(
    ("options", "fault", "code", "told"),
    [
        ({"says_hits": False, "warm": 0.1}, None, 4, "hit: the server does not say"),
        ({"says_hits": False}, "stale", 1, "KV810"),
        ({"recites": False}, None, 0, "recites no code"),
        ({"pool": 0}, None, 4, "hit: 0 of 1 requests"),
        ({"token_s": 0.01}, None, 4, "own-model/prefix-cache"),  # its time is up
    ],
)
def test_a_server_that_shows_less(options: dict[str, Any], fault: str | None, code: int, told: str, ask: Asked) -> None:
    with served("vllm", fault, **options) as server:
        ended, said = ask(server.url, *(("--max-time", "1") if "token_s" in options else ()))
    assert ended == code and told in said, said


@pytest.mark.parametrize("fault", ["some-500", "half", "garbage", "dies"])
def test_broken_answers_are_no_pass(fault: str, ask: Asked) -> None:
    with Fake(None, "vllm", model=OwnEngine(pool=8192), fault=fault, first=40) as server:
        code, said = ask(server.url)
    assert code in (1, 2, 4), said


@pytest.mark.parametrize("fault", ["half", "garbage"])
def test_a_first_answer_that_is_broken_is_not_put_down_to_the_vocabulary(fault: str, engine: str, ask: Asked) -> None:
    with Fake(None, engine, model=OwnEngine(pool=8192), fault=fault) as server:
        code, said = ask(server.url)
    assert code == 2 and "vocabulary" not in said and "was not answered" in said, said


@pytest.mark.parametrize(
    ("words", "told"), [("--vocabulary 100", "expected 256 to"), ("--api openai", "no way to ask openai")]
)
def test_a_model_that_cannot_be_asked_is_exit_2(words: str, told: str, ask: Asked) -> None:
    with served("vllm") as server:
        code, said = ask(server.url, *words.split())
    assert code == 2 and told in said and not ask.out.exists(), said


def test_an_interrupt_keeps_what_was_judged(ask: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Treated.ask

    def interrupted(arm: Treated, sending: Any) -> Any:
        if sending.question.number > 15:
            time.sleep(0.3)
        answer = asked(arm, sending)
        if sending.question.number == 12:
            threading.Timer(0.05, _thread.interrupt_main).start()
        return answer

    monkeypatch.setattr(Treated, "ask", interrupted)
    with served("vllm") as server:
        code, said = ask(server.url)
    assert code == 130, said
    record = ask.record()
    assert not record.complete and record.evidence.observed["token"] > 0
    assert record.scenarios[0].verdict is Verdict.UNKNOWN


def test_a_round_that_is_judged_again_after_an_interrupt_counts_once(
    ask: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interrupt comes while a server that answers no more is asked whether it is well."""
    judged: list[Measured] = []
    judge, health_of = own_runner.judge, iter((KeyboardInterrupt, None))

    def told(measured: Measured, level: Level) -> list[ReportedDeviation]:
        judged.append(measured)
        return judge(measured, level)

    def interrupted(*arguments: Any, **named: Any) -> Any:
        if (raised := next(health_of)) is not None:
            raise raised
        return health.judge_health(*arguments, **named)

    monkeypatch.setattr(own_runner, "judge", told)
    monkeypatch.setattr(own_runner, "judge_health", interrupted)
    with served("vllm", warm=0.1) as server:
        code, said = ask(server.url)
    assert code == 130, said
    first, last = judged
    assert first.treated == last.treated and first.now_matched and not last.earlier, "it is no round before itself"


def test_a_run_without_matched_answers_says_what_it_did_not_look_for(
    ask: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Matched, "ask", lambda arm, sending: Answer(end=End.REFUSED, reason="no"))
    with served("vllm", warm=0.1) as server:
        _, said = ask(server.url)
    assert "no treated request has a matched one" in said and "not looked for: many small" in said, said


def test_a_line_is_replayed(ask: Asked, capsys: pytest.CaptureFixture[str]) -> None:
    with served("sglang", "stale") as server:
        code, said = ask(server.url)
        assert code == 1, said
        model = server.model
        assert isinstance(model, OwnEngine)
        model.planted.clear()
        model._plain.clear()
        replay = ("replay", f"{ask.folder.name}#1", "--out", str(ask.out))
        code, said = ask.said(*replay)
        assert code == 1 and "STILL FAILS 1/1  own-model/prefix-cache/sglang" in said, said
        code, said = ask.said(*replay)
        assert code == 4 and "NOT REPRODUCED 0/1" in said, said


def test_the_report_shows_arms_evidence_and_noise(ask: Asked, tmp_path: Path) -> None:
    with served("vllm", "stale", run=0.001) as server:
        code, said = ask(server.url)
    assert code == 1, said
    page = tmp_path / "page.html"
    code, said = ask.said("report", ask.folder.name, "--out", str(ask.out), "-o", f"html={page}")
    assert code == 0, said
    text = page.read_text()
    assert all(word in text for word in ('id="arms"', "<td>treated</td>", "<td>matched</td>", "KV810"))


def test_a_reference_is_kept_and_compared(engine: str, ask: Asked, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    with served(engine) as server:
        words = ("model", "reference", server.url, str(kept), "--requests", "20", "--seed", "1")
        code, said = ask.said(*words)
        assert code == 0 and "kept 20 requests" in said and "equal bit for bit" in said, said
        assert len(read_reference(kept).kept) == 20
        code, said = ask.said(*words)
        assert code == 2 and "exists" in said
        code, said = ask(server.url, "--reference", str(kept))
        assert code == 0 and f"own-model/reference/{engine}" in said, said
    assert "key" not in json.dumps(json.loads((kept / FILE).read_text())["facts"])


def test_a_reference_that_cannot_be_written_is_refused_before_its_requests_are_sent(ask: Asked, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with served("vllm") as server:
        for folder in (tmp_path / "file", tmp_path / "file" / "kept"):
            code, said = ask.said("model", "reference", server.url, str(folder))
            assert code == 2 and f"cannot write {folder}" in said and "name another DIR" in said, said
        assert len(server.bodies) == 2, "one cold request each"


def test_a_reference_that_another_run_wrote_meanwhile_stays(
    ask: Asked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = reference._record

    def slow(*arguments: Any) -> Any:
        made = recorded(*arguments)
        (tmp_path / FILE).write_text("theirs")
        return made

    monkeypatch.setattr(reference, "_record", slow)
    with served("vllm") as server:
        code, said = ask.said("model", "reference", server.url, str(tmp_path), "--requests", "4")
    assert code == 2 and "exists" in said, said
    assert (tmp_path / FILE).read_text() == "theirs"


def test_a_reference_with_holes_leaves_no_folder(ask: Asked, tmp_path: Path) -> None:
    with Fake(None, "vllm", model=OwnEngine(pool=8192), fault="some-500") as server:
        code, said = ask.said("model", "reference", server.url, str(tmp_path / "kept"))
    assert code == 4 and "was not answered" in said, said
    assert not (tmp_path / "kept").exists()


@pytest.mark.parametrize(
    ("engine", "code", "told"),
    [("vllm", 1, "own-model/reference/vllm"), ("sglang", 2, "its server had engine vllm, and this one has sglang")],
)
def test_another_build_is_a_finding_and_another_engine_is_refused(
    engine: str, code: int, told: str, ask: Asked, tmp_path: Path
) -> None:
    kept = tmp_path / "kept"
    with served("vllm") as server:
        assert ask.said("model", "reference", server.url, str(kept), "--requests", "20")[0] == 0
    with served(engine, recites=False) as other:
        ended, said = ask(other.url, "--reference", str(kept))
    assert ended == code and told in said and ("KV811" in said) == (code == 1), said
    assert ask.out.exists() == (code == 1)
