"""Causes and symptoms on literal findings: what follows from what, what stays apart, and what is one bug of a run."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from kvcheck.core.base.causes import bugs, in_causal_order, signature
from kvcheck.core.base.record import Finding


def finding(oracle: str, code: str, message: str = "", **more: object) -> Finding:
    plain = Finding(code=code, oracle=oracle, scenario="hicache", shape="llama-3-tiny", tier="device", message=message)
    return replace(plain, **more)  # type: ignore[arg-type]


def race(code: str, earlier: str, later: str, **more: object) -> Finding:
    pair = {"earlier": {"operation": earlier}, "later": {"operation": later}}
    return finding("ordering", code, f"{later} and {earlier}", minimal=pair, **more)


UNMOVED = finding("contract", "KV304", "request 3 was saved without full.index", buffer="index", request=3)
UNMOVED_AGAIN = replace(UNMOVED, request=5, message="request 5 was restored without full.index")
OTHER_UNMOVED = replace(UNMOVED, buffer="k_scale", request=8)
LENGTH = finding("contract", "KV301", "request 3 computes position 66, expected 65", request=3)
FOREIGN = finding("content", "KV102", buffer="index", page=5, request=3, seen_request=4)
FOREIGN_K = replace(FOREIGN, buffer="k", page=9, request=7, seen_request=8)
STALE_METADATA = finding("content", "KV102", buffer="metadata.topk_p", request=9, seen_request=8)
OWN_POSITION = replace(FOREIGN, code="KV301", request=6, seen_request=6, page=2)
TOKENS = finding("output", "KV501", request=3, tier=None)
OTHER_TOKENS = replace(TOKENS, request=11)
MOVED_IDS = finding("residency", "KV303", "the index values of a backup for request 1 changed", request=1)
FREED = finding("lifetime", "KV202", "full 5 was freed while wire.kv of it was pending", page=5, request=2)
GUARD = finding("liveness", "KV402", "DoubleFree: host.full: freed [12, 13]", tier=None)
CRASH = finding("liveness", "KV902", "TypeError: no", tier=None)
HANG = finding("liveness", "KV901", "Hang: no request was admitted", tier=None)
VIEW = finding("aliasing", "KV305", buffer="metadata-decode", page=1, request=2)
GATE = race("KV201", "hicache.load", "decode.read", buffer="k", page=6, request=13)
GATE_V = replace(GATE, buffer="v")
GATE_LATER = race("KV201", "hicache.load", "decode.send_early", buffer="k", page=6, request=13)
BACKUP = race("KV202", "hicache.backup", "decode.write", buffer="latent", page=2, request=1)
LEAK = finding("accounting", "KV401", "1 of 8 ids of full are neither free nor cached", buffer="full")
EARLY = finding("protocol", "KV203", "is Success while its aux has not landed", buffer="metadata", request=2)
DISAGREE = finding("protocol", "KV601", "decode ranks 0 and 1 decided differently")
REASON = finding("protocol", "KV603", "its reason does not say", request=11)
CALL = finding("liveness", "KV308", "a save of too many rows: expected DoubleFree", tier=None)
PADDING = finding("content", "KV403", buffer="v", page=0, request=20)

ONE: dict[str, tuple[tuple[Finding, ...], Finding]] = {
    "a buffer that was left out, and its bytes": ((FOREIGN, OWN_POSITION, UNMOVED, TOKENS), UNMOVED),
    "the same rule of another request": ((UNMOVED, UNMOVED_AGAIN), UNMOVED),
    "two buffers that one save left out": ((UNMOVED, replace(OTHER_UNMOVED, request=3)), UNMOVED),
    "a length, and the request's bytes": ((FOREIGN, LENGTH, TOKENS), LENGTH),
    "ids of cached pages, and a sharer's bytes": ((FOREIGN_K, MOVED_IDS, GATE), MOVED_IDS),
    "ids that changed, and the page of another request that they name": ((FREED, MOVED_IDS), MOVED_IDS),
    "ids of cached pages, and the guard that they run into": ((GUARD, MOVED_IDS), MOVED_IDS),
    "a guard, and bytes": ((FOREIGN_K, GUARD), GUARD),
    "a page that was freed early": ((FOREIGN, FREED), FREED),
    "a view of a slot": ((STALE_METADATA, TOKENS, VIEW), VIEW),
    "a missing edge, and the bytes of its buffer": ((replace(FOREIGN_K, request=1, page=1), GATE), GATE),
    "one missing edge of two buffers": ((GATE, GATE_V), GATE),
    "one operation that two readers do not wait for": ((GATE, GATE_LATER), GATE),
    "a status before its bytes": ((replace(FREED, buffer=None), EARLY, STALE_METADATA, DISAGREE), EARLY),
    "bytes of another owner before those of another position": ((OWN_POSITION, FOREIGN), FOREIGN),
    "an owner that is known before one that is not": ((replace(FOREIGN, seen_request=None), FOREIGN), FOREIGN),
    "bytes, and tokens of a request that nobody saw": ((OTHER_TOKENS, FOREIGN), FOREIGN),
    "an error after a finding": ((CRASH, UNMOVED), UNMOVED),
    "a hang after a leak": ((HANG, LEAK), LEAK),
    "a leak, and a reason that does not fit": ((REASON, LEAK), LEAK),
    "a page that was freed early, and the count": ((LEAK, FREED), FREED),
    "a lone error": ((CRASH,), CRASH),
}


@pytest.mark.parametrize("case", ONE)
def test_one_bug_is_one_cause_with_symptoms(case: str) -> None:
    given, cause = ONE[case]
    ordered = in_causal_order(given)
    assert replace(ordered[0], id="", cause=None) == cause
    assert [each.id for each in ordered] == [str(number) for number in range(1, len(given) + 1)]
    assert [each.cause for each in ordered] == [None, *["1"] * (len(given) - 1)]
    assert len(bugs(ordered)) == 1
    shuffled = random.Random(1).sample(given, len(given))
    assert sorted(map(str, (replace(each, id="", cause=None) for each in in_causal_order(shuffled)))) == sorted(
        map(str, given)
    ), "nothing is lost"


TWO: dict[str, tuple[Finding, Finding]] = {
    "bytes, and a call beside the schedule's work": (FOREIGN, CALL),
    "an error, and such a call": (CRASH, CALL),
    "ranks that disagree, and such a call": (DISAGREE, CALL),
    "two buffers": (UNMOVED, OTHER_UNMOVED),
    "a buffer, and bytes of another": (UNMOVED, FOREIGN_K),
    "a length, and another request's bytes": (LENGTH, FOREIGN_K),
    "a page, and bytes of another page and request": (FREED, FOREIGN_K),
    "a missing edge, and bytes of another buffer": (GATE, FOREIGN),
    "two missing edges": (GATE, BACKUP),
    "ids of cached pages, and metadata": (MOVED_IDS, STALE_METADATA),
    "a view of a slot, and KV": (VIEW, FOREIGN_K),
    "a leak, and bytes": (LEAK, FOREIGN),
    "a missing edge, and a leak": (GATE, LEAK),
    "a leak, and tokens": (LEAK, TOKENS),
    "a status, and another request's bytes": (EARLY, FOREIGN_K),
    "bytes of two requests in two buffers": (FOREIGN, FOREIGN_K),
    "bytes, and padding of another buffer": (FOREIGN, PADDING),
    "a finding, and a conditional one": (FOREIGN, replace(FOREIGN, condition="a peer of another release")),
}


@pytest.mark.parametrize("case", TWO)
def test_what_shares_nothing_stays_a_cause_of_its_own(case: str) -> None:
    for given in (TWO[case], TWO[case][::-1]):
        ordered = in_causal_order(given)
        assert [each.cause for each in ordered] == [None, None], ordered
        assert len(bugs(ordered)) == 2


def test_a_symptom_belongs_to_the_nearest_to_the_root_that_explains_it() -> None:
    ordered = in_causal_order((TOKENS, FOREIGN_K, FOREIGN, GATE, UNMOVED))
    told = {each.id: each for each in ordered}
    causes = [each.oracle for each in ordered if each.cause is None]
    assert causes == ["contract", "ordering"]
    of_index = next(each for each in ordered if each.buffer == "index" and each.oracle == "content")
    of_k = next(each for each in ordered if each.buffer == "k" and each.oracle == "content")
    assert told[of_index.cause or ""].oracle == "contract"
    assert told[of_k.cause or ""].oracle == "ordering"


def test_a_bug_of_a_run_has_its_cells_and_symptoms() -> None:
    first = in_causal_order((FOREIGN, UNMOVED, TOKENS))
    other = tuple(
        replace(each, scenario="pd-transfer", schedule="pd-transfer:schedule=3")
        for each in in_causal_order((FOREIGN, UNMOVED))
    )
    run = tuple(
        replace(each, id=f"R.{number}{each.id}", cause=each.cause and f"R.{number}{each.cause}")
        for number, made in enumerate((first, other, in_causal_order((LEAK,))))
        for each in made
    )
    unmoved, leak = bugs(run)
    assert unmoved.cause == run[0] and unmoved.symptoms == {"KV102": 2, "KV501": 1}
    assert unmoved.cells == ("hicache/llama-3-tiny", "pd-transfer/llama-3-tiny")
    assert len(unmoved.findings) == 5
    assert (leak.cause.code, leak.symptoms, leak.cells) == ("KV401", {}, ("hicache/llama-3-tiny",))


def test_findings_of_a_server_each_stand_alone() -> None:
    answer = Finding(id="1", code="KV801", oracle="known-answers", message="request 1", request=1)
    assert len(bugs((answer, replace(answer, id="2")))) == 2
    (bug,) = bugs((replace(FOREIGN, id="7", cause="6"),))
    assert (bug.cause.code, bug.symptoms) == ("KV102", {}), "a symptom whose cause is not there is shown"
    assert len(in_causal_order((answer, replace(answer, message="request 2")))) == 2


def test_findings_of_probes_are_told_apart_by_cell_and_reader() -> None:
    line = "hicache:shape=host-copy.nsa,target=sglang%3Aenv,seed=1,schedule=0"
    one = replace(FOREIGN, id="1", scenario="hicache", shape="host-copy.nsa", lane="reader of keys", schedule=line)
    two, three = replace(one, id="2", lane="reader of scales"), replace(one, id="3", shape="host-copy.swa")
    assert len(bugs((one, two, three))) == 3
    assert len(bugs((one, replace(one, id="4")))) == 1


def test_numbers_and_ranks_make_no_other_bug() -> None:
    one = finding("lifetime", "KV202", "decode-0:full 5 was freed while wire.kv of it was pending", page=5)
    two = finding("lifetime", "KV202", "decode-1:full 17 was freed while wire.kv of it was pending", page=17)
    other = finding("lifetime", "KV202", "decode-1:full 17 was freed while offload.restore of it was pending", page=17)
    assert signature(one) == signature(two) != signature(other)
    assert signature(GUARD) == signature(replace(GUARD, message="DoubleFree: host.full: freed [7]"))
    assert signature(FOREIGN) != signature(replace(FOREIGN, scenario="pd-transfer"))
