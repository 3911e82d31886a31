"""`kvcheck live URL` against a server that has one fault: exit code, finding and what is said."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from fakes.server import FAULTS, KEY, Fake
from rigs.model_engine import COUNTS
from rigs.server_runs import ALPHABET, Commands

from kvcheck.commands import asked
from kvcheck.core.base.record import Verdict
from kvcheck.core.live.clients.sglang import SglangClient
from kvcheck.core.live.exchange import Answer, End, Exchange, Question, Sending
from kvcheck.core.live.sending import RequestSender
from kvcheck.core.model.alphabet import HEADER
from kvcheck.core.model.answers import answers, walk_prompt

pytestmark = pytest.mark.usefixtures("no_waits")
SCENARIOS = ("prefix-cache", "retract-resume", "aborts")

# fault: (exit code, codes of findings that it has to end in, a text that the terminal shows)
ENDS: dict[str, tuple[int, set[str], str]] = {
    "foreign-page": (1, {"KV801", "KV802"}, "it points to"),
    "stale-page": (1, {"KV801", "KV802"}, "found nothing"),
    "wrong-token": (1, {"KV801"}, "without a known cause"),
    "shifted": (1, {"KV803"}, "the answer is the right one, but"),
    "other-answer": (1, {"KV801", "KV802", "KV803"}, "KV802"),
    "other-model": (2, set(), "does not serve this model"),
    "response-cache": (4, set(), "may come from a response cache"),
    "last-token-cache": (1, {"KV801", "KV802", "KV808"}, ""),
    "hang": (2, set(), "did not answer one cold request"),
    "hang-once": (1, {"KV806"}, "got no answer"),
    "dies": (1, {"KV806"}, "takes no connection any more"),
    "some-500": (4, set(), "status 500: out of luck"),
    "garbage": (1, {"KV807"}, ""),
    "half": (1, {"KV807"}, "ended after"),
    "slow": (0, set(), ""),
    "needs-key": (2, set(), "a key is needed"),
    "cached-count": (4, set(), "the count of answers is false, and no hit counts"),
    "always-less-one": (4, set(), "the count of answers is false, and no hit counts"),
    "one-page-more": (4, set(), "the count of answers is false, and no hit counts"),
    "always-zero": (4, set(), "it reports cached tokens, as none, and its own counter moved by"),
    "hits-doubled": (4, set(), "one of both is false, so neither counts"),
    "front-cache": (1, {"KV801", "KV802", "KV803", "KV808"}, "answered requests"),
    "frozen-counters": (4, set(), "stood still"),
    "after-abort": (1, {"KV804"}, "abort"),
}
IDS = walk_prompt(ALPHABET, range(40), 0)
QUESTION = Question(number=99, ids=IDS, expected=answers(ALPHABET, IDS, 8))
SILENT = Answer(end=End.SILENT, tokens=())


class Asked(Commands):
    def __init__(self, model: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
        super().__init__(out, capsys)
        self.model = model

    def __call__(
        self, url: str, *arguments: str, scenarios: tuple[str, ...] = SCENARIOS, admin: bool = True
    ) -> tuple[int, str]:
        words = ["live", url, *scenarios, "--known-answers", str(self.model), *(["--admin"] if admin else [])]
        sizes = ["--schedules", "1", "--requests", "12", "--out", str(self.out), "--no-reports"]
        return self.said(*words, *sizes, "--seed", "1", *arguments)

    def line(self) -> str:
        """The line of its first cell."""
        cells = self.record().plan["cells"]
        assert isinstance(cells, list)
        return str(cells[0])


@pytest.fixture
def ask(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Asked:
    return Asked(model, tmp_path / "runs", capsys)


def fake(engine: str, fault: str | None = None, **options: Any) -> Fake:
    """A server whose tokens take time, so that requests meet."""
    return Fake(ALPHABET, engine, fault=fault, **{"token_s": 0.002, "pool": 1024, **options})


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_ends_in_its_code_and_finding(fault: str, engine: str, ask: Asked) -> None:
    code, findings, text = ENDS[fault]
    with fake(engine, fault, first=3) as server:
        patience = ("--timeout", "1") if fault.startswith("hang") else ()
        ended, said = ask(server.url, *patience, scenarios=("aborts" if fault == "after-abort" else "prefix-cache",))
    assert ended == code, said
    if code == 2:
        assert text in said
    else:
        record = ask.record()
        assert text in said or any(text in each.message for each in record.findings)
        codes = {finding.code for finding in record.findings}
        assert bool(codes & findings) == bool(findings), said
        assert not codes - findings, said


@pytest.mark.parametrize("fault", [fault for fault in COUNTS if fault not in ("cached-count", "hits-doubled")])
def test_false_counts_without_metrics_are_no_evidence_and_no_finding(fault: str, engine: str, ask: Asked) -> None:
    with fake(engine, fault, has_metrics=False) as server:
        code, said = ask(server.url, "--require", "hit=1", scenarios=("prefix-cache",))
    assert code == 4, said
    record = ask.record()
    assert record.findings == () and not record.evidence.observed.get("hit")
    assert "--enable-prompt-tokens-details" not in said


def test_a_response_cache_is_told_first_and_no_page_is_named(engine: str, ask: Asked) -> None:
    with fake(engine, "front-cache") as server:
        code, said = ask(server.url, scenarios=("prefix-cache",))
    assert code == 1, said
    assert said.index("a response cache or a proxy") < said.index(" ✘ 1  KV")
    record = ask.record()
    assert {(each.layer, each.page) for each in record.findings} == {(None, None)} and " to layer" not in said
    assert all(each.minimal is not None and each.minimal["suspects"] == [] for each in record.findings)


@pytest.mark.parametrize(
    "variation",
    [
        *({"has_metrics": False}, {"beside": 1}, {"beside": 1, "is_pinned": True}, {"beside": 2}, {"lag": True}),
        *({"traffic": 7}, {"page": 1}, {"page": 64, "pool": 4096}),
    ],
    ids=str,
)
def test_a_legal_server_passes_whatever_its_counters_count(variation: dict[str, Any], engine: str, ask: Asked) -> None:
    with fake(engine, **variation) as server:
        # An abort by call may go to another server than the request, where several answer in turns.
        code, said = ask(server.url, scenarios=("prefix-cache", *(() if "beside" in variation else ("aborts",))))
    assert code == 0, said
    assert "a response cache or a proxy" not in said


@pytest.mark.parametrize(
    "variation", [{"beside": 4}, {"beside": 4, "is_pinned": True}, {"has_metrics": False}], ids=str
)
def test_an_abort_that_may_have_reached_another_server_accuses_nobody(
    variation: dict[str, Any], engine: str, ask: Asked
) -> None:
    """Calls reach the first server, whoever answers; without counters nothing shows that there is one server alone."""
    fault = None if "beside" in variation else "after-abort"
    with fake(engine, fault, **variation) as server:
        code, said = ask(server.url, scenarios=("aborts",))
    assert code == 4 and ask.record().findings == (), said
    assert "a balancer may have sent the abort to another one" in said


def test_an_abort_is_not_aimed_where_counters_are_read_elsewhere(engine: str, ask: Asked) -> None:
    with fake(engine, "after-abort") as server:
        code, said = ask(server.url, "--metrics", f"{server.url}/metrics", scenarios=("aborts",))
    assert code == 4 and ask.record().findings == (), said


def test_a_right_server_passes_and_says_what_it_did(engine: str, ask: Asked) -> None:
    with fake(engine) as server:
        code, said = ask(server.url)
    assert code == 0, said
    record = ask.record()
    seen = record.evidence.observed
    assert record.verdict is Verdict.PASS
    assert all(seen[kind] > 0 for kind in ("token", "hit", "hit-token", "retract", "abort", "evict")), seen
    assert ask.server_facts()["engine"] == engine
    assert ask.server_facts()["evidence"]["hit"] == "each request: cached tokens"


def test_a_scenario_that_a_server_lacks_is_told_and_unknown_where_it_was_named(engine: str, ask: Asked) -> None:
    with fake(engine) as server:
        code, said = ask(server.url, scenarios=())
        named, how = ask(server.url, scenarios=("hicache",))
    assert code == 0, said
    untried = {line.split()[2] for line in said.splitlines() if line.startswith(" not tried ")}
    assert {"hicache:", "pd-transfer:"} <= untried and ("priority:" in untried) == (engine == "vllm")
    assert named == 4 and "start " in how


def test_without_leave_nothing_is_retracted_or_reset(engine: str, ask: Asked) -> None:
    with fake(engine) as server:
        ask(server.url, admin=False)
        called = [path for path, _ in server.calls]
    assert called and not [path for path in called if re.search("pause|continue|flush|reset", path)]


def test_a_requirement_that_is_not_met_is_unknown(engine: str, ask: Asked) -> None:
    with fake(engine) as server:
        assert ask(server.url, "--require", "hit=1", scenarios=("prefix-cache",))[0] == 0
    with fake(engine) as server:
        code, said = ask(server.url, "--require", "hit=1,retract=100000", scenarios=("prefix-cache",))
    assert code == 4 and "require/retract" in said and "of 100000 retractions" in said


def test_a_key_is_sent_and_recorded_nowhere(engine: str, ask: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVER_KEY", KEY)
    with fake(engine, "needs-key") as server:
        code, said = ask(server.url, "--key-env", "SERVER_KEY", scenarios=("prefix-cache",))
    assert code == 0 and KEY not in said, said
    assert all(KEY not in path.read_text(encoding="utf-8") for path in ask.folder.iterdir() if path.is_file())


def test_a_server_that_says_its_key_has_it_masked(engine: str, ask: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVER_KEY", "0.")
    with fake(engine) as server:
        ask(server.url, "--key-env", "SERVER_KEY", scenarios=("prefix-cache",))
    assert ask.server_facts()["version"] in ("<key>5.23", "<key>32.0")  # of 0.5.23 and 0.32.0


def test_a_finding_is_replayed_k_of_n_times(engine: str, ask: Asked) -> None:
    with fake(engine, "wrong-token") as server:
        assert ask(server.url, scenarios=("prefix-cache",))[0] == 1
        finding = ask.record().findings[0]
        code, said = ask.said("replay", finding.id, "--out", str(ask.out), "--times", "3")
    assert code == 1 and "STILL FAILS 3/3" in said


def test_a_line_that_a_right_server_answers_rightly_is_unknown_and_never_fixed(engine: str, ask: Asked) -> None:
    with fake(engine) as server:
        assert ask(server.url, scenarios=("prefix-cache",))[0] == 0
        code, said = ask.said("replay", ask.line(), "--times", "2", "--format", "json")
    assert code == 4 and json.loads(said)["verdict"] == "unknown"
    assert "NOT REPRODUCED 0/2" in json.loads(said)["text"] and "--admin" in json.loads(said)["text"]


def test_a_finding_of_a_server_leads_to_its_record(ask: Asked) -> None:
    """It has no story."""
    with fake("sglang", "wrong-token") as server:
        assert ask(server.url, scenarios=("prefix-cache",))[0] == 1
        first = f"{ask.record().run_id}#1"
        replayed = ask.kept("replay", first)[1]
    code, shown = ask.kept("show", first)
    assert code == 0 and str(ask.folder / "run.json") in shown and "kvcheck explain KV801" in shown
    assert f"next    kvcheck report {ask.record().run_id} -o html=report.html" in replayed
    assert "kvcheck show" not in replayed


def test_a_replay_asks_other_words_the_second_time(engine: str, ask: Asked) -> None:
    with fake(engine) as server:
        assert ask(server.url, scenarios=("prefix-cache",))[0] == 0
        first = [tuple(each.get("input_ids") or each["prompt"]) for each in server.bodies]
        ask.said("replay", ask.line(), "--times", "2")
        again = [tuple(each.get("input_ids") or each["prompt"]) for each in server.bodies[len(first) :]]
    of_round = first[2:]  # a cold walk and a cold position test came before
    middle = len(again) // 2
    assert sorted(again[1:middle]) == sorted(of_round)
    assert not set(again[middle + 1 :]) & set(first)


def test_a_gate_takes_a_run_of_a_server(engine: str, ask: Asked) -> None:
    with fake(engine) as server:
        assert ask(server.url, scenarios=("prefix-cache", "aborts"))[0] == 0
    code, said = ask.said("gate", str(ask.folder))
    assert code == 0 and "tokens" in said


def test_a_prefill_server_alone_is_refused_and_not_accused(ask: Asked) -> None:
    with fake("sglang", mode="prefill") as server:
        code, said = ask(server.url)
    assert code == 2 and "--decode URL" in said, said


def test_a_pair_that_shows_no_transfers_is_unknown_and_says_what_to_start(ask: Asked) -> None:
    with fake("sglang", mode="prefill") as prefill, fake("sglang", mode="decode") as decode:
        code, said = ask(prefill.url, "--decode", decode.url, scenarios=("pd-transfer",))
    assert (
        code == 4 and "transfer: the server does not say how many requests there were; start both servers with" in said
    ), said


def test_a_server_that_other_runs_have_used_is_not_accused_of_their_first_tokens(ask: Asked) -> None:
    """Pages of one token: a request can begin as one of an earlier run by chance, with its header and a place."""
    with fake("sglang", page=1, pool=1 << 20) as server:
        for first in range(ALPHABET.parameters.nodes):
            server.model.remember([*HEADER, ALPHABET.place(first)])
        code, said = ask(server.url, scenarios=("prefix-cache", "aborts"))
    assert code == 0, said


def test_an_interrupt_before_the_first_request_is_130(ask: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(client: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(SglangClient, "counters", interrupted)
    with fake("sglang") as server:
        code, said = ask(server.url, scenarios=("prefix-cache",))
    assert code == 130 and "interrupted" in said, said


def test_an_interrupt_asks_no_server_that_hangs_for_its_health(ask: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of five calls may wait for half a minute."""
    health: list[object] = []

    def interrupted(sender: RequestSender, *arguments: Any) -> None:
        sender.interrupted.exchanges.append(Exchange(Sending(question=QUESTION, rid="r"), SILENT))
        raise KeyboardInterrupt

    monkeypatch.setattr(RequestSender, "send", interrupted)
    monkeypatch.setattr(SglangClient, "is_alive", lambda client: health.append(client) or True)
    with fake("sglang") as server:
        code, said = ask(server.url, scenarios=("prefix-cache",))
    assert code == 130 and not health, said


@pytest.mark.parametrize("signals, is_written", [(1, True), (2, False)])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_after_the_verdict_leaves_the_verdict(
    number: signal.Signals, signals: int, is_written: bool, ask: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = asked.write_reports

    def signalled(*arguments: Any, **named: Any) -> Any:
        for _ in range(signals):
            os.kill(os.getpid(), number)
        return write(*arguments, **named)

    def handler(number: int, frame: object) -> None:
        raise AssertionError("main's handler has no part in the end of a run")

    monkeypatch.setattr(asked, "write_reports", signalled)
    before = signal.signal(number, handler)
    try:
        with fake("sglang", "wrong-token") as server:
            code, said = ask(server.url, "--reports", scenarios=("prefix-cache",))
        assert signal.getsignal(number) is handler
    finally:
        signal.signal(number, before)
    record = ask.record()
    assert (code, record.exit_code, record.complete) == (1, 1, True), said
    assert (ask.folder / "report.html").exists() == is_written
    again = f"kvcheck report {record.run_id} --out {ask.out}"
    assert (again in said) != is_written and any(again in each for each in record.warnings) != is_written


@pytest.mark.parametrize("path", ["/chat", "/api/v2"])
def test_a_path_that_the_server_lacks_is_named(path: str, engine: str, ask: Asked) -> None:
    with fake(engine) as server:
        code, said = ask(server.url + path)
    assert code == 2 and f"leave {path} out" in said, said


@pytest.mark.parametrize("key", [None, "another"])
def test_a_missing_or_wrong_key_is_named_by_its_option(
    key: str | None, engine: str, ask: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THE_KEY", key or "")
    with fake(engine, "needs-key") as server:
        code, said = ask(server.url, *([] if key is None else ["--key-env", "THE_KEY"]))
    assert code == 2 and "--key-env" in said and ("holds another" in said) == (key is not None), said


def test_a_run_without_time_says_so(engine: str, ask: Asked) -> None:
    with fake(engine) as server:
        code, said = ask(server.url, "--max-time", "0.001", scenarios=("prefix-cache",))
    assert code == 4 and "its time was up; use a larger --max-time" in said
