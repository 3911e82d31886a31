"""`kvcheck stress --target http://...` against a server that has one fault: exit code, finding and what is said.

Invariants:
- Each fault of the fake server has a row here, and the code that it has to end in.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes.server import FAULTS, Fake
from rigs.known_answers import small

from kvcheck.commands.main import run
from kvcheck.core.base.record import RunRecord, Verdict, read_record
from kvcheck.core.live import health, runner
from kvcheck.core.live.model.alphabet import Alphabet
from kvcheck.core.live.model.folder import write_model

PARAMETERS = small(nodes=1024, digits=6)
ALPHABET = Alphabet(PARAMETERS)
SCENARIOS = ("prefix-cache", "retract-resume", "aborts")
ENGINES = ("sglang", "vllm")

# fault: (exit code, codes of findings that it has to end in, a text that the terminal shows)
ENDS: dict[str, tuple[int, set[str], str]] = {
    "foreign-page": (1, {"KV801", "KV802"}, "it points to layer"),
    "stale-page": (1, {"KV801", "KV802"}, "found nothing"),
    "wrong-token": (1, {"KV801"}, "where"),
    "shifted": (1, {"KV803"}, "the answer is the right one, but"),
    "other-answer": (1, {"KV802"}, "the whole answer is that of request"),
    "other-model": (2, set(), "does not serve this model"),
    "response-cache": (4, set(), "the server does not say how many"),
    "last-token-cache": (4, set(), ""),
    "hang": (2, set(), "did not answer one cold request"),
    "hang-once": (1, {"KV806"}, "got no answer"),
    "dies": (1, {"KV806"}, "takes no connection any more"),
    "some-500": (4, set(), "status 500: out of luck"),
    "garbage": (1, {"KV807"}, ""),
    "half": (1, {"KV807"}, "ended after"),
    "slow": (0, set(), ""),
    "needs-key": (2, set(), "a key is needed"),
    "cached-count": (1, {"KV805"}, "cached tokens"),
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


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Iterator[str]:
    yield str(request.param)


class Asked:
    """Runs kvcheck against a fake server."""

    def __init__(self, model: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.model, self.out, self.capsys = model, out, capsys

    def __call__(self, url: str, *arguments: str, scenarios: tuple[str, ...] = SCENARIOS) -> tuple[int, str]:
        words = ["stress", *scenarios, "--target", url, "--known-answers", str(self.model)]
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
    with fake(engine, fault) as server:
        ended, said = ask(server.url, *(("--timeout", "1") if fault.startswith("hang") else ()))
    assert ended == code, said
    assert text in said
    if code != 2:
        codes = {finding.code for finding in ask.record().findings}
        assert bool(codes & findings) == bool(findings), said
        assert not codes - findings, said


def test_a_right_server_passes_and_says_what_it_did(engine: str, ask: Asked) -> None:
    with fake(engine) as server:
        code, said = ask(server.url)
    assert code == 0, said
    record = ask.record()
    assert record.verdict is Verdict.PASS
    seen = record.evidence.observed
    assert all(seen[kind] > 0 for kind in ("token", "hit", "hit-token", "retract", "abort", "evict")), seen
    assert "not tried: hicache" in said
    facts = record.environment["server"]
    assert isinstance(facts, dict)
    assert facts["engine"] == engine
    assert facts["evidence"]["hit"] == "each request: cached tokens"
