"""Kept references of own models: what is written is read back, and what was changed is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from kvcheck.core.base.errors import UsageError
from kvcheck.core.live.exchange import Answer, End, Exchange, Question, Sending, Served
from kvcheck.core.live.line import OwnPlan
from kvcheck.core.live.own.arms import ArmResult
from kvcheck.core.live.own.reference import FILE, Kept, Reference, check_alike, draw_questions, read_reference
from kvcheck.core.live.own.verdict import compare_builds

PLAN = OwnPlan(
    situation="prefix-cache",
    target="http://127.0.0.1:8000",
    engine="vllm",
    names=77,
    requests=24,
    longest=512,
    pool=4096,
)
FACTS = {"dtype": "bfloat16", "attention_backend": "fa3", "tp_size": 8}


def kept(count: int = 20) -> Reference:
    """A reference of one token a request."""
    rows = tuple(
        Kept(
            Question(number=n, ids=(n, n + 1), expected=(0, 0)),
            Answer(end=End.DONE, tokens=(5,), logprobs=(-0.5,), top=({5: -0.5, 6: -1.5},)),
        )
        for n in range(count)
    )
    return Reference(
        engine="sglang",
        version="0.5.23",
        model="m",
        facts=FACTS,
        kept=rows,
        again=(0.0,) * count,
        control=(0.0,) * count,
    )


def write(folder: Path, reference: Reference, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    data = json.loads(reference.to_json()) | changes
    (folder / FILE).write_text(json.dumps(data))
    return folder


def test_a_reference_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    folder = write(tmp_path / "kept", kept())
    read = read_reference(folder)
    assert read == dataclasses.replace(kept(), kept=read.kept) and len(read.kept) == 20
    assert read.kept[3].answer == kept().kept[3].answer and read.kept[3].question.ids == (3, 4)
    assert read.digest == kept().digest


@pytest.mark.parametrize(
    ("changes", "told"),
    [({"format": 2}, "expected format 1, got 2"), ({"again": [1.0]}, "was changed"), ({"digest": "x"}, "was changed")],
)
def test_a_reference_that_was_changed_is_refused(tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        read_reference(write(tmp_path / "kept", kept(), **changes))


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"tokens": (1, 2, 3)}, "request 0: expected a log-probability for each of 3 tokens"),
        ({"tokens": (-1,), "logprobs": (0.0,)}, "request 0: expected token ids"),
        ({"tokens": ("x",), "logprobs": (0.0,)}, r"requests\[0\].tokens\[0\]: expected int, got str"),
        ({"tokens": (1,), "logprobs": (0.0,), "top": ({1.5: 0.0},)}, "request 0: expected token ids"),
        ({"tokens": (1,), "logprobs": (0.0,), "top": ()}, "request 0: expected a list of tokens for each step"),
    ],
)
def test_a_reference_with_a_wrong_request_is_refused(tmp_path: Path, fields: dict[str, Any], told: str) -> None:
    whole = kept()
    wrong = dataclasses.replace(whole.kept[0], answer=dataclasses.replace(whole.kept[0].answer, **fields))
    with pytest.raises(UsageError, match=told):
        read_reference(write(tmp_path / "kept", dataclasses.replace(whole, kept=(wrong,))))


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "[" * 5000, '{"format": NaN}', "\udc80"])
def test_what_is_no_reference_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(UsageError, match="reference"):
        read_reference(tmp_path)


def test_servers_that_may_differ_in_version_alone_are_compared() -> None:
    served = Served(engine="sglang", version="0.6.0", model="m", facts=FACTS)
    untold = check_alike(kept(), served)
    assert "quantization" in untold and "dtype" not in untold
    for changed, told in (
        ({"model": "n"}, "had model m, and this one has n"),
        ({"engine": "vllm"}, "had engine sglang"),
        ({"facts": FACTS | {"dtype": "float16"}}, "had dtype bfloat16, and this one has float16"),
        ({"facts": FACTS | {"tp_size": 4}}, "tensor parallelism 8"),
        ({"facts": {"dtype": "bfloat16", "tp_size": 8}}, "has a value that it does not say"),
    ):
        with pytest.raises(UsageError, match=told):
            check_alike(kept(), dataclasses.replace(served, **changed))  # type: ignore[arg-type]


def arm(reference: Reference, moved: dict[int, float], *, cached: int = 0, most: int | None = None) -> ArmResult:
    """Answers of another build: some of them moved by so many nats."""
    found = ArmResult(name="cold")
    references = {each.question.number: each.answer for each in reference.kept}
    exchanges = [
        Exchange(
            Sending(question=each.question, rid="r"),
            dataclasses.replace(
                each.answer, cached=cached, logprobs=(-0.5 - moved.get(n, 0.0),), top=({5: -0.5 - moved.get(n, 0.0)},)
            ),
        )
        for n, each in enumerate(reference.kept[:most])
    ]
    found.add(exchanges, references)
    return found


def test_a_build_with_the_same_numbers_passes() -> None:
    same = arm(kept(), {})
    compared = compare_builds(kept(), same, arm(kept(), {}), is_whole=True, rounds=1)
    assert compared.message is None and compared.reason is None and compared.notes


def test_a_build_that_answers_otherwise_is_a_finding() -> None:
    one = {7: 2.0}
    compared = compare_builds(kept(), arm(kept(), one), arm(kept(), one), is_whole=True, rounds=1)
    assert compared.message is not None and compared.request == 7
    finding = compared.finding(oracle="own-model", scenario="own-model/reference", shape="sglang")
    assert finding.code == "KV811" and finding.cell == "own-model/reference/sglang"
    slight = dict.fromkeys(range(20), 0.01)
    assert compare_builds(kept(), arm(kept(), slight), arm(kept(), slight), is_whole=True, rounds=1).message is not None


def test_what_does_not_come_again_or_is_within_noise_is_no_finding() -> None:
    once = compare_builds(kept(), arm(kept(), {7: 2.0}), arm(kept(), {}), is_whole=True, rounds=1)
    assert once.message is None
    noisy = dataclasses.replace(kept(), control=(0.5,) * 20)
    slight = dict.fromkeys(range(20), 0.01)
    assert compare_builds(noisy, arm(noisy, slight), arm(noisy, slight), is_whole=True, rounds=1).message is None


def test_a_few_that_lead_are_no_finding_however_many_controls_are_less_noisy_than_they() -> None:
    """Five of twenty lie above twenty controls of their kind in 1 of 42 runs of one build, and above sixty in 1 of
    1,550."""
    noisy = dataclasses.replace(kept(), again=(0.015,) * 20)
    five, nine = (dict.fromkeys(range(20), 0.01) | dict.fromkeys(range(count), 0.02) for count in (5, 9))
    assert compare_builds(noisy, arm(noisy, five), arm(noisy, five), is_whole=True, rounds=1).message is None
    assert compare_builds(noisy, arm(noisy, nine), arm(noisy, nine), is_whole=True, rounds=1).message is not None
    assert compare_builds(noisy, arm(noisy, nine), arm(noisy, nine), is_whole=True, rounds=9).message is None


def test_answers_that_lack_or_were_not_cold_are_unknown() -> None:
    for cold, is_whole, told in (
        (arm(kept(), {}, most=12), True, "8 of 20"),
        (arm(kept(), {}), False, "were not answered twice"),
        (arm(kept(), {}, cached=16), True, "not cold"),
    ):
        compared = compare_builds(kept(), cold, arm(kept(), {}), is_whole=is_whole, rounds=1)
        assert compared.message is None and compared.reason is not None and told in compared.reason


def test_requests_of_a_reference_are_of_many_lengths() -> None:
    drawn = draw_questions(dataclasses.replace(PLAN, requests=30))
    assert drawn == draw_questions(dataclasses.replace(PLAN, requests=30))
    assert len({len(each.ids) for each in drawn}) > 10 and len({each.ids for each in drawn}) == 30
