"""`kvcheck live --own-model` and `kvcheck model reference` against a server whose answers nobody knows beforehand."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes.server import Fake
from rigs.own_engine import FAULTS, OwnEngine

from kvcheck.commands import reference
from kvcheck.commands.main import run
from kvcheck.core.base.record import RunRecord, Verdict, read_record
from kvcheck.core.live import doubts, health
from kvcheck.core.live.exchange import Answer, End
from kvcheck.core.live.own import runner as own_runner
from kvcheck.core.live.own.arms import Matched, Treated
from kvcheck.core.live.own.reference import FILE, read_reference
from kvcheck.core.live.own.statistic import Level, Measured, ReportedDeviation

ENGINES = ("sglang", "vllm")
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


@pytest.fixture(autouse=True)
def _no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_runner, "SETTLE_S", 0.0)
    monkeypatch.setattr(health, "PAUSE_S", 0.01)
    monkeypatch.setattr(doubts, "PAUSE_S", 0.01)


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Iterator[str]:
    yield str(request.param)


class Asked:
    """Runs kvcheck against a server."""

    def __init__(self, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.out, self.capsys = out, capsys

    def __call__(self, url: str, *arguments: str, scenarios: tuple[str, ...] = ("prefix-cache",)) -> tuple[int, str]:
        words = ["live", url, *scenarios, "--own-model", "--out", str(self.out), *SMALL, *arguments]
        return self.said(*words)

    def said(self, *words: str) -> tuple[int, str]:
        code = run([*words])
        said = self.capsys.readouterr()
        return code, said.out + said.err

    def record(self) -> RunRecord:
        (folder,) = self.out.iterdir()
        return read_record(folder)


@pytest.fixture
def ask(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Asked:
    return Asked(tmp_path / "runs", capsys)


def served(engine: str, fault: str | None = None, **options: Any) -> Fake:
    return Fake(None, engine, model=OwnEngine(fault=fault, **{"pool": 8192, "token_s": 0.0002, **options}))


def test_every_fault_of_the_engine_has_its_end() -> None:
    assert set(ENDS) == set(FAULTS)


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
    facts = record.environment["server"]
    assert isinstance(facts, dict)
    (arms,) = facts["own_model"].values()
    rows = {arm["arm"]: arm for arm in arms["arms"]}
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
    facts = ask.record().environment["server"]
    assert isinstance(facts, dict)
    (arms,) = facts["own_model"].values()
    rows = {arm["arm"]: arm for arm in arms["arms"]}
    assert rows["treated"]["other"] and rows["matched"]["other"] >= rows["treated"]["other"] * 0.8
    assert rows["matched"]["cached"] == rows["treated"]["cached"], "hits inside answers are the same"


def test_a_server_that_does_not_say_its_hits_is_not_accused_for_them(ask: Asked) -> None:
    with served("vllm", says_hits=False, warm=0.1) as server:
        code, said = ask(server.url)
    assert code == 4 and "hit: the server does not say" in said, said
    assert "answers that hit fresh pages are" in said, "controls hit what treated requests may have hit"


def test_a_server_that_does_not_say_its_hits_is_accused_for_garbage(ask: Asked) -> None:
    with served("vllm", "stale", says_hits=False) as server:
        code, said = ask(server.url)
    assert code == 1 and "KV810" in said, said


def test_batches_of_other_sizes_round_otherwise_and_are_no_finding(ask: Asked) -> None:
    """`priority` sends twice as many at a time as others: so do its controls, where they fit."""
    with served("sglang", crowd=0.05) as server:
        code, said = ask(server.url, scenarios=("priority",))
    assert code != 1 and "unsteady" not in said, said
    facts = ask.record().environment["server"]
    assert isinstance(facts, dict)
    (arms,) = facts["own_model"].values()
    rows = {arm["arm"]: arm for arm in arms["arms"]}
    assert min(rows["treated"]["other"], rows["control"]["other"]) > 5  # how many meet is up to the machine


def test_batches_of_a_size_that_controls_do_not_fit_into_are_no_finding(ask: Asked) -> None:
    with served("sglang", crowd=0.05, few=3, pool=1200) as server:
        code, said = ask(server.url, scenarios=("retract-resume",))
    assert code == 4 and "controls at a time and the scenario has 4" in said, said
    assert "unsteady: request" in said and "so were many others" in said, said


def test_a_model_that_recites_nothing_is_told(ask: Asked) -> None:
    with served("vllm", recites=False) as server:
        code, said = ask(server.url)
    assert code == 0 and "recites no code" in said, said


def test_a_pass_needs_hits(ask: Asked) -> None:
    with served("vllm", pool=0) as server:
        code, said = ask(server.url)
    assert code == 4 and "hit: 0 of 1 requests" in said, said


@pytest.mark.parametrize("fault", ["some-500", "half", "garbage", "dies"])
def test_broken_answers_are_no_pass(fault: str, ask: Asked) -> None:
    with Fake(None, "vllm", model=OwnEngine(pool=8192), fault=fault, first=40) as server:
        code, said = ask(server.url)
    assert code in (1, 2, 4), said


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("live", "URL", "--own-model", "--known-answers", "x"), "expected one of both"),
        (("live", "URL", "--vocabulary", "512"), "expected --own-model beside it"),
        (("live", "URL", "--own-model", "--vocabulary", "100"), "expected 256 to"),
        (("live", "URL", "--own-model", "--api", "openai"), "no way to ask openai"),
        (("live", "URL", "--own-model", "--reference", "nothing"), "nothing is no reference"),
        (("live", "http://127.0.0.1:9", "--own-model"), "expected a running server"),
        (("model", "reference"), "Missing argument 'URL'"),
        (("model", "reference", "URL"), "Missing argument 'DIR'"),
        (("model", "reference", "DIR", "URL"), "expected http://HOST:PORT"),
        (("model", "reference", "http://127.0.0.1:9", "DIR"), "expected a running server"),
        (("model", "reference", "URL", "DIR", "--requests", "0"), "--requests"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_cannot_be_asked_is_one_line_and_exit_2(
    words: tuple[str, ...], told: str, ask: Asked, tmp_path: Path
) -> None:
    with served("vllm") as server:
        said = {"URL": server.url, "DIR": str(tmp_path / "kept")}
        code, text = ask.said(*(said.get(word, word) for word in words))
    assert code == 2 and told in text, text
    assert not ask.out.exists() and not (tmp_path / "kept").exists()


def test_time_that_is_up_is_no_pass(ask: Asked) -> None:
    with served("vllm", token_s=0.01) as server:
        code, said = ask(server.url, "--max-time", "1")
    assert code == 4 and "own-model/prefix-cache" in said, said


def test_an_interrupt_keeps_what_was_judged(ask: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Treated.ask

    def interrupted(arm: Treated, sending: Any) -> Any:
        if sending.question.number > 15:
            time.sleep(0.3)
        answer = asked(arm, sending)
        if sending.question.number == 12:
            import _thread

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
        (folder,) = ask.out.iterdir()
        model = server.model
        assert isinstance(model, OwnEngine)
        model.planted.clear()
        model._plain.clear()
        code, said = ask.said("replay", f"{folder.name}#1", "--out", str(ask.out))
        assert code == 1 and "STILL FAILS 1/1  own-model/prefix-cache/sglang" in said, said
        code, said = ask.said("replay", f"{folder.name}#1", "--out", str(ask.out))
        assert code == 4 and "NOT REPRODUCED 0/1" in said, said


def test_the_report_shows_arms_evidence_and_noise(ask: Asked, tmp_path: Path) -> None:
    with served("vllm", "stale", run=0.001) as server:
        code, said = ask(server.url)
    assert code == 1, said
    (folder,) = ask.out.iterdir()
    page = tmp_path / "page.html"
    code, said = ask.said("report", folder.name, "--out", str(ask.out), "-o", f"html={page}")
    assert code == 0, said
    text = page.read_text()
    for word in (
        'id="arms"',
        "<td>treated</td>",
        "<td>matched</td>",
        "own-model/prefix-cache",
        "KV810",
        "recite their code",
    ):
        assert word in text
    assert "own_model" not in text[text.index('id="server"') : text.index("</table>", text.index('id="server"'))]


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
    ask.out.rename(tmp_path / "first")
    with served(engine, run=0.5, seed=1) as other:
        code, said = ask(other.url, "--reference", str(kept))
        assert code in (0, 1) and "own-model/reference" in said, "a noisy build is told by its own noise"
    data = json.loads((kept / FILE).read_text())
    assert "key" not in json.dumps(data["facts"])


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


def test_another_build_with_other_numbers_is_a_finding(ask: Asked, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    with served("vllm") as server:
        assert ask.said("model", "reference", server.url, str(kept), "--requests", "20")[0] == 0
    with served("vllm", recites=False) as other:
        code, said = ask(other.url, "--reference", str(kept))
    assert code == 1 and "KV811" in said, said
    assert ask.record().findings[0].cell == "own-model/reference/vllm"


def test_a_reference_of_another_model_is_refused(ask: Asked, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    with served("vllm") as server:
        assert ask.said("model", "reference", server.url, str(kept), "--requests", "5")[0] == 0
    with served("sglang") as other:
        code, said = ask(other.url, "--reference", str(kept))
    assert code == 2 and "its server had engine vllm, and this one has sglang" in said, said
    assert not ask.out.exists()
