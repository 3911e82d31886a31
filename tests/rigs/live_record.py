"""One literal RunRecord of a run against a server, with findings of both tests, and its passing brother.

Invariants:
- Every field is written out: no clock, no machine, no randomness, no server.
- Hostile text is in the server's facts and in the tokens on purpose.
"""

from __future__ import annotations

from dataclasses import replace

from rigs.literal_record import CODE, MARKUP

from kvcheck.core.base.record import Evidence, Finding, Identity, RunRecord, ScenarioResult, Verdict

PREFIX = Evidence(
    schedules=3,
    requests=120,
    observed={"token": 7_440, "hit": 96, "hit-token": 18_432, "evict": 4_096, "retract": 0},
)
RETRACTED = Evidence(schedules=3, requests=48, observed={"token": 3_072, "hit": 12, "retract": 0})
HIERARCHY = Evidence(schedules=1, requests=40, observed={"token": 640, "hit": 8, "evict": 512})

WALK: dict[str, object] = {
    "picture": {
        "page_size": 16,
        "prompt_length": 100,
        "layers": 4,
        "step": 5,
        "expected": "node41",
        "answered": "node9",
        "right_path": [12, 31, 47, 90],
        "wrong_path": [90, 18, 66, 73],
        "suspects": [
            {"layer": 2, "head": None, "page": 4, "first": 64, "last": 79, "why": "the hop of this layer went astray"},
            {"layer": 1, "head": 3, "page": 1, "first": 16, "last": 31, "why": "values of the layer before"},
        ],
        "logprob": -9e-06,
        "owners": [17, 18],
    }
}
MARKS: dict[str, object] = {
    "picture": {
        "page_size": 16,
        "prompt_length": 4000,
        "layers": 4,
        "step": 2,
        "expected": "mark3:17",
        "answered": f"mark3:19 {MARKUP}",
        "right_path": [3801, 3801, 3801, 3801],
        "wrong_path": [3802, 3802, 3802, 3802],
        "suspects": [
            {"layer": 3, "head": 1, "page": 237, "first": 3792, "last": 3807, "why": f"bit 2 differs {MARKUP}"}
        ],
        "logprob": -0.01,
        "owners": [],
    }
}
STALE = Finding(
    id="1",
    code="KV801",
    oracle="known-answers",
    scenario="prefix-cache",
    shape="sglang",
    layer=2,
    page=4,
    row=66,
    request=17,
    seen_request=11,
    message="request 17, step 5: answered node9; expected node41",
    replay="kvcheck replay 20260103-030405-0c4e.1",
    minimal=WALK,
)
LIVE_FINDINGS = (
    STALE,
    replace(
        STALE,
        id="2",
        code="KV802",
        scenario="retract-resume",
        request=21,
        layer=3,
        page=237,
        row=3802,
        seen_request=None,
        message=f"request 21, step 2: answered mark3:19 {MARKUP}",
        minimal=MARKS,
    ),
)
LIVE = RunRecord(
    run_id="20260103-030405-0c4e",
    tool={"name": "kvcheck", "version": "0.1.0", "commit": "3f2c1ab"},
    argv=("kvcheck", "stress", "--target", "http://127.0.0.1:30000", "--known-answers", "tiny"),
    repro="kvcheck stress --target http://127.0.0.1:30000 --known-answers tiny --seed 1",
    seed=1,
    started_at="2026-01-03T03:04:05Z",
    duration_s=61.5,
    verdict=Verdict.FAIL,
    exit_code=1,
    complete=True,
    environment={
        "python": "3.11.9",
        "device": "cpu",
        "server": {
            "address": "http://127.0.0.1:30000",
            "engine": "sglang",
            "version": "0.5.23",
            "model": "9c2b" * 16,
            "page": 16,
            "pool": 4096,
            "mode": None,
            "metrics": ["http://127.0.0.1:30000/metrics"],
            "note": MARKUP,
            "evidence": {"hit": "meta_info.cached_tokens", "retract": "sglang:num_retracted_requests", MARKUP: MARKUP},
        },
    },
    plan={
        "target": "http://127.0.0.1:30000",
        "known_answers": "9c2b" * 16,
        "rounds": 3,
        "scenarios": ["prefix-cache/sglang", "retract-resume/sglang", "hicache/sglang", "priority/sglang"],
        "require": {"hit": 100, "retract": 10},
        "not_tried": ["pd-transfer: this is no prefill and decode pair"],
    },
    evidence=PREFIX.plus(RETRACTED).plus(HIERARCHY).plus(Evidence(schedules=0)),
    scenarios=(
        ScenarioResult(
            id="prefix-cache/sglang",
            shape="sglang",
            verdict=Verdict.FAIL,
            code="KV801",
            schedules=3,
            duration_s=20.5,
            evidence=PREFIX,
        ),
        ScenarioResult(
            id="retract-resume/sglang",
            shape="sglang",
            verdict=Verdict.FAIL,
            code="KV802",
            schedules=3,
            duration_s=30.25,
            evidence=RETRACTED,
        ),
        ScenarioResult(
            id="hicache/sglang",
            shape="sglang",
            verdict=Verdict.PASS,
            schedules=1,
            duration_s=9.0,
            evidence=HIERARCHY,
        ),
        ScenarioResult(
            id="priority/sglang",
            shape="sglang",
            verdict=Verdict.UNKNOWN,
            code="KV990",
            reason="the server has no priorities; start it with --enable-priority-scheduling",
        ),
        ScenarioResult(id="require/hit", shape="hit", verdict=Verdict.PASS),
        ScenarioResult(
            id="require/retract",
            shape="retract",
            verdict=Verdict.UNKNOWN,
            code="KV990",
            reason="0 of 10 retractions; give the server a smaller pool: --max-total-tokens 1024",
        ),
    ),
    findings=LIVE_FINDINGS,
    warnings=("the server does not say its pool; taken from its log",),
    identity=Identity(code=CODE),
)
LIVE_PASSED = replace(
    LIVE,
    run_id="20260103-030406-0c4f",
    verdict=Verdict.PASS,
    exit_code=0,
    plan={**LIVE.plan, "scenarios": ["hicache/sglang"], "require": {"hit": 8}},
    evidence=HIERARCHY,
    scenarios=(
        LIVE.scenarios[2],
        ScenarioResult(id="require/hit", shape="hit", verdict=Verdict.PASS),
    ),
    findings=(),
    warnings=(),
)
