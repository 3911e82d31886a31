"""One literal RunRecord of a run against a server, with findings of both tests, and its passing brother."""

from __future__ import annotations

from dataclasses import replace

from rigs.literal_record import CODE, MARKUP

from kvcheck.core.base.record import Coverage, Evidence, Finding, Identity, RunRecord, ScenarioResult, Verdict

PREFIX = Evidence(
    schedules=3, requests=120, observed={"token": 7_440, "hit": 96, "hit-token": 18_432, "evict": 4_096, "retract": 0}
)
RETRACTED = Evidence(schedules=3, requests=48, observed={"token": 3_072, "hit": 12, "retract": 0})
HIERARCHY = Evidence(schedules=1, requests=40, observed={"token": 640, "hit": 8, "evict": 512})


def suspect(layer: int, head: int | None, page: int, weight: float, why: str) -> dict[str, object]:
    place = {"layer": layer, "head": head, "page": page, "first": 16 * page, "last": 16 * page + 15}
    return {**place, "weight": weight, "why": why}


WALK: dict[str, object] = {
    "test": "walk",
    "page": 16,
    "page_assumed": False,
    "prompt": 100,
    "right": [12, 31, 47, 90],
    "wrong": [90, 18, 66, 73],
    "suspects": [
        suspect(2, None, 4, 1.0, "page 4 of layer 2 leads from node 7 to another node"),
        suspect(1, 3, 1, 0.6, "values of position 18 may have sent layer 2 astray"),
    ],
    "requests": [17, 11],
    "rid": "kvcheck-1-17",
    "step": 5,
    "expected": 441,
    "expected_word": "node441",
    "answered": 409,
    "answered_word": "node409",
    "logprob": -9e-06,
}
MARKS: dict[str, object] = {
    "test": "position",
    "page": 16,
    "page_assumed": True,
    "prompt": 4000,
    "right": [3982, 3982, 3982, 3982],
    "wrong": [3983, 3983, 3983, 3983],
    "suspects": [suspect(3, 1, 248, 1.0, f"a bit {MARKUP}")],
    "requests": [21],
    "rid": "kvcheck-1-21",
    "step": 2,
    "expected": 900,
    "expected_word": "mark900",
    "answered": 902,
    "answered_word": f"mark902 {MARKUP}",
    "logprob": None,
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
    message="request 17 answered node409 at step 5 where node441 is right",
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
        page=248,
        row=3983,
        seen_request=None,
        message=f"request 21, step 2: answered mark902 {MARKUP}",
        minimal=MARKS,
    ),
)
LINE = "target=http%3A//127.0.0.1%3A30000,known-answers=tiny,engine=sglang,seed=1,round=0,names=7,longest=4096"


def row(name: str, verdict: Verdict, evidence: Evidence, **more: object) -> ScenarioResult:
    plain = ScenarioResult(id=f"{name}/sglang", shape="sglang", verdict=verdict, evidence=evidence)
    return replace(plain, schedules=evidence.schedules, coverage=Coverage(wanted=3, floor=1), **more)  # type: ignore[arg-type]


LIVE = RunRecord(
    run_id="20260103-030405-0c4e",
    tool={"name": "kvcheck", "version": "0.1.0", "commit": "3f2c1ab"},
    argv=("kvcheck", "live", "http://127.0.0.1:30000", "--known-answers", "tiny"),
    repro="kvcheck live http://127.0.0.1:30000 --known-answers tiny --seed 1",
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
            "decode": None,
            "known_answers": "9c2b" * 16,
            "parameters": {"family": "llama", "layers": 4, "kv_heads": 4},
            "model": MARKUP,
            "longest": 4096,
            "pool": 4096,
            "page": 16,
            "mode": None,
            "said": {"kv_cache_dtype": "auto", MARKUP: MARKUP},
            "evidence": {"hit": "meta_info.cached_tokens", "retract": "sglang:num_retracted_requests", MARKUP: MARKUP},
        },
    },
    plan={
        "cells": [f"{name}:{LINE}" for name in ("prefix-cache", "retract-resume", "hicache", "priority")],
        "schedules": 3,
        "max_time_s": None,
        "require": {"hit": 100, "retract": 10},
    },
    evidence=PREFIX.plus(RETRACTED).plus(HIERARCHY).plus(Evidence(schedules=0)),
    scenarios=(
        row("prefix-cache", Verdict.FAIL, PREFIX, code="KV801", duration_s=20.5),
        row("retract-resume", Verdict.FAIL, RETRACTED, code="KV802", duration_s=30.25),
        row("hicache", Verdict.PASS, HIERARCHY, duration_s=9.0),
        row(
            "priority",
            Verdict.UNKNOWN,
            Evidence(observed={"token": 0}),
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
    warnings=("pd-transfer: not tried: this is no prefill and decode pair",),
    identity=Identity(code=CODE),
)
LIVE_PASSED = replace(
    LIVE,
    run_id="20260103-030406-0c4f",
    verdict=Verdict.PASS,
    exit_code=0,
    plan={**LIVE.plan, "cells": [f"hicache:{LINE}"], "require": {"hit": 8}},
    evidence=HIERARCHY,
    scenarios=(LIVE.scenarios[2], ScenarioResult(id="require/hit", shape="hit", verdict=Verdict.PASS)),
    findings=(),
    warnings=(),
)
