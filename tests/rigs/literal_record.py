"""One literal RunRecord, from which the golden reports are made, and its passing and unknown brothers."""

from __future__ import annotations

from dataclasses import replace

from kvcheck.core.base.record import (
    Coverage,
    Evidence,
    Finding,
    Identity,
    MutantResult,
    RunRecord,
    ScenarioResult,
    Verdict,
)
from kvcheck.core.base.story import Edge, Story, StoryStep, Word

MARKUP = "<script>alert('x')</script>"

RETRACT = Evidence(
    schedules=400,
    events=81250,
    requests=3200,
    retractions=212,
    resumes=212,
    foreign_reuses=57,
    words_verified={"latent": 1_204_224, "index_k_with_scale": 301_056},
)
TRANSFER = Evidence(schedules=37, events=911, requests=74, transfers=74, aborts=3, words_verified={"metadata": 5920})
NOTHING = Evidence(schedules=200, events=400, requests=200)

FOREIGN = Finding(
    id="1",
    code="KV102",
    oracle="content",
    scenario="retract-resume",
    shape="glm-5.1-tiny",
    tier="device",
    buffer="index_k_with_scale",
    layer=2,
    page=17,
    row=0,
    request=7,
    seen_request=9,
    lane="compute",
    message="request 7 resumed and read bytes of request 9 in index_k_with_scale, layer 2, page 17; expected its own",
    schedule="kv1:retract-resume/glm-5.1-tiny:12:0.3.1.4",
    replay="kvcheck replay 'kv1:retract-resume/glm-5.1-tiny:12:0.3.1.4'",
    minimal={"requests": 2, "steps": ["write 7 -> page 17", "retract 7", "write 9 -> page 17", "resume 7"]},
)
HOSTILE = f'k<&"{MARKUP}'
"""A name of a lane or a buffer that markup would be made of."""
STORY = Story(
    about=f"full page 17 of {HOSTILE}",
    steps=(
        StoryStep(
            lane="forward", kind="write", text="decode.write writes for request 9", begin=10, end=14, first=3, last=5
        ),
        StoryStep(lane="scheduler", kind="host", text="frees full page 17", begin=20, end=20),
        StoryStep(
            lane=HOSTILE, kind="write", text=f"{HOSTILE} writes for request 7", begin=31, first=8, last=8, is_wrong=True
        ),
        StoryStep(lane="messages", kind="message", text="prefill-0 sends Status", begin=33, end=33),
        StoryStep(
            lane="forward", kind="read", text="reads for request 7", begin=40, end=41, first=9, last=9, is_wrong=True
        ),
    ),
    edges=(Edge(source=2, target=4, is_missing=True), Edge(source=0, target=1)),
    history=("request 9: written (forward #3 to #5), freed", f"request 7: loaded ({HOSTILE} #8)"),
    row=f"{HOSTILE}, layer 2, page 17, row 0, read for request 7",
    words=(
        Word(
            index=0, seen="00ff", seen_says="request 9, position 3", wanted="0a0b", wanted_says="request 7, position 0"
        ),
        Word(index=1, seen="a5a5", seen_says="never written", wanted=None, wanted_says="not known"),
    ),
)
UNTOLD = Story(about="KV201", untold="there was no time to run the schedule once more")
FINDINGS = (
    replace(
        FOREIGN,
        id="3",
        code="KV901",
        oracle="liveness",
        buffer=None,
        layer=None,
        page=None,
        row=None,
        seen_request=None,
        tier=None,
        lane=None,
        minimal=None,
        message=f'=HYPERLINK("http://example.invalid"), {MARKUP}\nand a second line',
    ),
    replace(FOREIGN, story=STORY),
    replace(FOREIGN, id="2", layer=3, page=18, code="KV104", seen_request=None, message="never written", cause="1"),
    replace(FOREIGN, id="4", layer=3, page=18, request=None),
    replace(
        FOREIGN,
        id="5",
        code="KV201",
        layer=None,
        page=17,
        buffer=f"latent {MARKUP}",
        row=None,
        minimal={
            "line": "hicache:shape=glm-5.1-micro,strategy=answers,seed=1,schedule=10,requests=2,pages=2,choices=none",
            "requests": 2,
            "pages": 2,
            "wait": f"{HOSTILE} on forward waits for hicache.load on hicache.h2d: with it, 0 of 20 schedules failed; "
            "without it, 4 of 20",
        },
        story=UNTOLD,
    ),
)
SCENARIOS = (
    ScenarioResult(
        id="retract-resume/glm-5.1-tiny",
        shape="glm-5.1-tiny",
        verdict=Verdict.FAIL,
        code="KV102",
        schedules=400,
        duration_s=3.125,
        evidence=RETRACT,
        coverage=Coverage(wanted=400, floor=3, tried=("eager", "lazy"), not_tried=("random", f"ranks {MARKUP}")),
    ),
    ScenarioResult(
        id="handover/<b>tiny</b>",
        shape="<b>tiny</b>",
        verdict=Verdict.PASS,
        schedules=37,
        duration_s=1.25,
        evidence=TRANSFER,
    ),
    ScenarioResult(
        id="retract-resume/gpt-oss-tiny",
        shape="gpt-oss-tiny",
        verdict=Verdict.UNKNOWN,
        code="KV990",
        reason="no retraction in 200 schedules: the pool holds every request at once",
        schedules=200,
        duration_s=0.5,
        evidence=NOTHING,
    ),
)
MUTANTS = (
    MutantResult(
        name="index-buffer-not-saved",
        bug="a",
        killer="content",
        outcome="killed",
        schedules=4,
        verdict=Verdict.PASS,
        killed_by="content",
        message="KV102 in index_k_with_scale",
        replay="kvcheck replay kv1:m1",
    ),
    MutantResult(
        name="metadata-read-returns-view",
        bug="a",
        killer="aliasing",
        outcome="survived",
        schedules=100,
        verdict=Verdict.FAIL,
    ),
)
LINES = (
    "retract-resume:shape=glm-5.1-tiny,seed=1,schedule=0",
    "handover:shape=%3Cb%3Etiny%3C/b%3E,seed=1,schedule=0",
    "retract-resume:shape=gpt-oss-tiny,seed=1,schedule=0",
)
CODE = "3f2c1ab0" * 8
FAILED = RunRecord(
    run_id="20260102-030405-0c4e",
    tool={"name": "kvcheck", "version": "0.1.0", "commit": "3f2c1ab"},
    argv=("kvcheck", "stress", "retract-resume", f"--shape={MARKUP}"),
    repro="kvcheck stress retract-resume --seed 1",
    seed=1,
    started_at="2026-01-02T03:04:05Z",
    duration_s=4.875,
    verdict=Verdict.FAIL,
    exit_code=1,
    complete=True,
    environment={"python": "3.11.9", "torch": "2.6.0", "device": "cpu", "cores": 2, "psi": None, "note": MARKUP},
    plan={"schedules": 400, "trace": None, "cells": [*LINES], "mutants": [each.name for each in MUTANTS]},
    evidence=RETRACT.plus(TRANSFER).plus(NOTHING),
    scenarios=SCENARIOS,
    findings=FINDINGS,
    mutants=MUTANTS,
    warnings=("only 2 cores: fewer schedules than asked for",),
    identity=Identity(code=CODE),
)
PASSED = replace(
    FAILED,
    run_id="20260102-030406-0c4f",
    verdict=Verdict.PASS,
    exit_code=0,
    plan={"schedules": 400, "cells": [LINES[1]]},
    evidence=TRANSFER,
    scenarios=(replace(SCENARIOS[1], coverage=Coverage(wanted=37, floor=3)),),
    findings=(),
    mutants=(),
    warnings=(),
)
UNJUDGED = replace(
    PASSED,
    run_id="20260102-030407-0c50",
    seed=None,
    verdict=Verdict.UNKNOWN,
    exit_code=4,
    complete=False,
    plan={"schedules": 400, "cells": [LINES[2]]},
    evidence=NOTHING,
    scenarios=SCENARIOS[2:],
)
