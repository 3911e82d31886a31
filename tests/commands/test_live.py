"""`kvcheck live URL` against a server that has one fault: exit code, finding and what is said.

Invariants:
- Each fault of the fake server has a row here, and the code that it has to end in.
"""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes import server as server_of_tests
from fakes.server import FAULTS, KEY, Fake
from rigs.known_answers import small
from rigs.model_engine import COUNTS

from kvcheck.commands.main import run
from kvcheck.core.base.record import RunRecord, Verdict, read_record
from kvcheck.core.live import doubts, health, runner
from kvcheck.core.live.clients import asking
from kvcheck.core.live.clients.sglang import SglangClient
from kvcheck.core.model.alphabet import HEADER, Alphabet
from kvcheck.core.model.folder import write_model

PARAMETERS = small(nodes=1024, digits=6)
ALPHABET = Alphabet(PARAMETERS)
SCENARIOS = ("prefix-cache", "retract-resume", "aborts")
ENGINES = ("sglang", "vllm")

# fault: (exit code, codes of findings that it has to end in, a text that the terminal shows)
ENDS: dict[str, tuple[int, set[str], str]] = {
    "foreign-page": (1, {"KV801", "KV802"}, "it points to"),
    "stale-page": (1, {"KV801", "KV802"}, "found nothing"),
    "wrong-token": (1, {"KV801", "KV802"}, "where"),
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


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("known-answers") / "model"
    write_model(PARAMETERS, folder)
    return folder


@pytest.fixture(autouse=True)
def _no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "SETTLE_S", 0.0)
    monkeypatch.setattr(health, "PAUSE_S", 0.01)
    monkeypatch.setattr(doubts, "PAUSE_S", 0.01)
    monkeypatch.setattr(asking, "GRACE_S", 0.02)


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Iterator[str]:
    yield str(request.param)


class Asked:
    """Runs kvcheck against a fake server."""

    def __init__(self, model: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.model, self.out, self.capsys = model, out, capsys

    def __call__(self, url: str, *arguments: str, scenarios: tuple[str, ...] = SCENARIOS) -> tuple[int, str]:
        words = ["live", url, *scenarios, "--known-answers", str(self.model)]
        sizes = ["--schedules", "1", "--requests", "12", "--out", str(self.out), "--no-reports"]
        code = run([*words, *sizes, "--admin", "--seed", "1", *arguments])
        said = self.capsys.readouterr()
        return code, said.out + said.err

    def record(self) -> RunRecord:
        (folder,) = self.out.iterdir()
        return read_record(folder)


@pytest.fixture
def ask(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Asked:
    return Asked(model, tmp_path / "runs", capsys)


def fake(engine: str, fault: str | None = None, **options: Any) -> Fake:
    """A server whose tokens take time, so that requests meet."""
    return Fake(ALPHABET, engine, fault=fault, **{"token_s": 0.002, "pool": 1024, **options})


def test_every_fault_of_the_fake_server_has_its_end() -> None:
    assert set(ENDS) == set(FAULTS)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_ends_in_its_code_and_finding(fault: str, engine: str, ask: Asked) -> None:
    code, findings, text = ENDS[fault]
    with fake(engine, fault, first=3) as server:
        patience = ("--timeout", "1") if fault.startswith("hang") else ()
        ended, said = ask(server.url, *patience, scenarios=("aborts" if fault == "after-abort" else "prefix-cache",))
    assert ended == code, said
    assert text in said
    if code != 2:
        codes = {finding.code for finding in ask.record().findings}
        assert bool(codes & findings) == bool(findings), said
        assert not codes - findings, said


@pytest.mark.parametrize("fault", [fault for fault in COUNTS if fault not in ("cached-count", "hits-doubled")])
def test_false_counts_without_metrics_are_no_evidence_and_no_finding(fault: str, engine: str, ask: Asked) -> None:
    with fake(engine, fault, has_metrics=False) as server:
        code, said = ask(server.url, "--require", "hit=1", scenarios=("prefix-cache",))
    assert code == 4, said
    record = ask.record()
    assert record.findings == ()
    assert not record.evidence.observed.get("hit")
    assert "--enable-prompt-tokens-details" not in said


def test_a_response_cache_is_told_first_and_no_page_is_named(engine: str, ask: Asked) -> None:
    with fake(engine, "front-cache") as server:
        code, said = ask(server.url, scenarios=("prefix-cache",))
    assert code == 1, said
    verdict = next(i for i, line in enumerate(said.splitlines()) if "prefix-cache/" in line and "FAIL" in line)
    assert "a response cache or a proxy" in said.splitlines()[verdict + 1]
    record = ask.record()
    assert [row.reason for row in record.scenarios if "answered requests" in (row.reason or "")]
    assert {(each.layer, each.page) for each in record.findings} == {(None, None)}
    assert "points to layer" not in said and "point to layer" not in said
    assert all(each.minimal is not None and each.minimal["suspects"] == [] for each in record.findings)


@pytest.mark.parametrize(
    "variation",
    [
        {"has_metrics": False},
        {"beside": 1},
        {"beside": 1, "is_pinned": True},
        {"beside": 2},
        {"lag": True},
        {"traffic": 7},
        {"page": 1},
        {"page": 64, "pool": 4096},
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
    assert code == 4, said
    assert ask.record().findings == ()
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
    assert record.verdict is Verdict.PASS
    seen = record.evidence.observed
    assert all(seen[kind] > 0 for kind in ("token", "hit", "hit-token", "retract", "abort", "evict")), seen
    facts = record.environment["server"]
    assert isinstance(facts, dict)
    assert facts["engine"] == engine
    assert facts["evidence"]["hit"] == "each request: cached tokens"


def test_an_address_that_ends_in_v1_is_taken(engine: str, ask: Asked) -> None:
    with fake(engine) as server:
        code, said = ask(f"{server.url}/v1", scenarios=("prefix-cache",))
        called = [path for path, _ in server.calls]
    assert code == 0, said
    assert not [path for path in called if path.startswith("/v1/v1")]


@pytest.mark.processes
def test_the_stand_in_server_starts_by_hand_as_its_docstring_shows(model: Path) -> None:
    words = [sys.executable, str(Path(server_of_tests.__file__)), "--model", str(model), "--port", "0"]
    with subprocess.Popen([*words, "--engine", "sglang", "--fault", "foreign-page"], stdout=subprocess.PIPE) as started:
        try:
            assert started.stdout is not None
            url = started.stdout.readline().decode().strip()
            with urllib.request.urlopen(f"{url}/model_info", timeout=30) as answer:
                assert json.load(answer)["is_generation"] is True
        finally:
            started.terminate()


def test_scenarios_that_nobody_named_and_a_server_lacks_are_told(engine: str, ask: Asked) -> None:
    with fake(engine) as server:
        code, said = ask(server.url, scenarios=())
    assert code == 0, said
    assert "not tried: hicache" in said
    assert "not tried: pd-transfer" in said
    assert ("not tried: priority" in said) == (engine == "vllm")


def test_a_named_scenario_that_a_server_lacks_is_unknown_and_says_what_to_change(engine: str, ask: Asked) -> None:
    with fake(engine) as server:
        code, said = ask(server.url, scenarios=("hicache",))
    assert code == 4
    assert "start " in said


def test_a_requirement_that_is_not_met_is_unknown(engine: str, ask: Asked) -> None:
    with fake(engine) as server:
        assert ask(server.url, "--require", "hit=1", scenarios=("prefix-cache",))[0] == 0
    with fake(engine) as server:
        code, said = ask(server.url, "--require", "hit=1,retract=100000", scenarios=("prefix-cache",))
    assert code == 4
    assert "require/retract" in said
    assert "of 100000 retractions" in said


def test_without_leave_nothing_is_retracted_or_reset(engine: str, model: Path, tmp_path: Path) -> None:
    words = [
        "--known-answers",
        str(model),
        "--out",
        str(tmp_path),
        "--no-reports",
        "--schedules",
        "1",
        "--requests",
        "8",
    ]
    with fake(engine) as server:
        run(["live", server.url, "retract-resume", "prefix-cache", "aborts", *words])
        called = [path for path, _ in server.calls]
    forbidden = ("pause", "continue", "flush", "reset")
    assert called
    assert not [path for path in called if any(word in path for word in forbidden)]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "expected --known-answers DIR"),
        (["--known-answers", "MODEL"], "expected a running server"),
        (["http://10.0.0.1:1", "--known-answers", "MODEL"], "add --allow-remote"),
        (["http://user:secret@127.0.0.1:1", "--known-answers", "MODEL"], "no password"),
        (["https://", "--known-answers", "MODEL"], "lacks a host"),
        (["--known-answers", "/nowhere"], "is no known-answer model"),
        (["--known-answers", "MODEL", "--require", "hits=1"], "expected KIND=NUMBER"),
        (["--known-answers", "MODEL", "--requests", "0"], "--requests: expected at least 1, got 0"),
        (["--known-answers", "MODEL", "--concurrency", "0"], "--concurrency: expected"),
        (["--known-answers", "MODEL", "--timeout", "nan"], "--timeout: expected"),
        (["--known-answers", "MODEL", "--timeout", "1e300"], "at most 86,400"),
        (["--known-answers", "MODEL", "--key-env", "NO_SUCH"], "found none"),
        (["--known-answers", "MODEL", "--api", "tgi"], "unknown engine 'tgi'"),
        (["--known-answers", "MODEL", "--out", "/proc/no"], "expected a running server"),
        (["http://127.0.0.1:1", "nonsense", "--known-answers", "MODEL"], "unknown scenario"),
        (["127.0.0.1:8000"], "http:// is missing; expected http://127.0.0.1:8000"),
        (["localhost:8000", "--known-answers", "MODEL"], "expected http://localhost:8000"),
        (["[::1]:8000", "--own-model"], "expected http://[::1]:8000"),
        (["gpu-7.lab:8000/v1", "--own-model"], "expected http://gpu-7.lab:8000/v1"),
        (["sglang:envs/fork"], "an installed engine is judged by kvcheck probe sglang:envs/fork"),
        (["tiny"], "URL: expected http://HOST:PORT, got 'tiny'"),
    ],
)
def test_what_cannot_be_asked_is_one_line_and_exit_2(
    arguments: list[str], said: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without an address of its own a line asks one where nothing listens."""
    words = [str(model) if word == "MODEL" else word for word in arguments]
    url = [] if words and not words[0].startswith("-") else ["http://127.0.0.1:1"]
    out = [] if "--out" in words else ["--out", str(tmp_path / "runs")]
    assert run(["live", *url, *words, *out]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert said in shown.err
    assert len(shown.err.splitlines()) == 1
    assert "secret" not in shown.err
    assert not (tmp_path / "runs").exists()


def test_a_key_is_sent_and_recorded_nowhere(engine: str, ask: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVER_KEY", KEY)
    with fake(engine, "needs-key") as server:
        code, said = ask(server.url, "--key-env", "SERVER_KEY", scenarios=("prefix-cache",))
    assert code == 0, said
    assert KEY not in said
    (folder,) = ask.out.iterdir()
    assert all(KEY not in path.read_text(encoding="utf-8") for path in folder.iterdir() if path.is_file())


def test_a_server_that_says_its_key_has_it_masked(
    engine: str, ask: Asked, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SERVER_KEY", "0.")
    with fake(engine) as server:
        ask(server.url, "--key-env", "SERVER_KEY", scenarios=("prefix-cache",))
    facts = ask.record().environment["server"]
    assert isinstance(facts, dict)
    assert facts["version"] in ("<key>5.23", "<key>32.0")  # of 0.5.23 and 0.32.0


def test_a_finding_is_replayed_k_of_n_times(engine: str, ask: Asked) -> None:
    with fake(engine, "wrong-token") as server:
        assert ask(server.url, scenarios=("prefix-cache",))[0] == 1
        finding = ask.record().findings[0]
        assert run(["replay", finding.id, "--out", str(ask.out), "--times", "3"]) == 1
        said = ask.capsys.readouterr().out
    assert "STILL FAILS 3/3" in said
    assert "a server is not deterministic" in said


def test_a_line_that_a_right_server_answers_rightly_is_unknown_and_never_fixed(engine: str, ask: Asked) -> None:
    with fake(engine) as server:
        assert ask(server.url, scenarios=("prefix-cache",))[0] == 0
        plan = ask.record().plan["cells"]
        assert isinstance(plan, list)
        assert run(["replay", str(plan[0]), "--times", "2", "--format", "json"]) == 4
        said = json.loads(ask.capsys.readouterr().out)
    assert said["verdict"] == "unknown"
    assert "NOT REPRODUCED 0/2" in said["text"]
    assert "--admin" in said["text"]


def test_a_replay_asks_other_words_the_second_time(engine: str, ask: Asked) -> None:
    with fake(engine) as server:
        assert ask(server.url, scenarios=("prefix-cache",))[0] == 0
        first = [tuple(each.get("input_ids") or each["prompt"]) for each in server.bodies]
        plan = ask.record().plan["cells"]
        assert isinstance(plan, list)
        run(["replay", str(plan[0]), "--times", "2"])
        again = [tuple(each.get("input_ids") or each["prompt"]) for each in server.bodies[len(first) :]]
    of_round = first[2:]  # a cold walk and a cold position test came before
    middle = len(again) // 2
    assert sorted(again[1:middle]) == sorted(of_round)
    assert not set(again[middle + 1 :]) & set(first)


def test_a_gate_takes_a_run_of_a_server(engine: str, ask: Asked) -> None:
    with fake(engine) as server:
        assert ask(server.url, scenarios=("prefix-cache", "aborts"))[0] == 0
    (folder,) = ask.out.iterdir()
    assert run(["gate", str(folder)]) == 0
    assert "tokens" in ask.capsys.readouterr().out


def test_a_prefill_server_alone_is_refused_and_not_accused(ask: Asked) -> None:
    with fake("sglang", mode="prefill") as server:
        code, said = ask(server.url)
    assert code == 2, said
    assert "--decode URL" in said


def test_a_pair_that_shows_no_transfers_is_unknown_and_says_what_to_start(ask: Asked) -> None:
    with fake("sglang", mode="prefill") as prefill, fake("sglang", mode="decode") as decode:
        code, said = ask(prefill.url, "--decode", decode.url, scenarios=("pd-transfer",))
    assert code == 4, said
    assert "transfer: the server does not say how many requests there were; start both servers with" in said


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
    assert code == 130, said
    assert "interrupted" in said


def test_a_run_without_time_says_so(engine: str, ask: Asked) -> None:
    with fake(engine) as server:
        code, said = ask(server.url, "--max-time", "0.001", scenarios=("prefix-cache",))
    assert code == 4
    assert "its time was up; use a larger --max-time" in said


def test_a_line_with_a_relative_model_says_where_to_replay_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["replay", "prefix-cache:target=http%3A//127.0.0.1%3A1,known-answers=nowhere/tiny"]) == 2
    assert "replay it in the folder where the run was started" in capsys.readouterr().err
