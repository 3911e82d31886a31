"""Rounds of the two ends of a pair at the edge: who is asked for, who is let in, and what an abort ends."""

from __future__ import annotations

import pytest
from rigs.pair import Rig
from rigs.rounds import FIRST, SECOND, ZeroDecoder, deps, request

from kvcheck.core.base.errors import LengthMismatch
from kvcheck.core.cache.scheduler.decode import ABORTED, DecodeScheduler
from kvcheck.core.cache.scheduler.prefill import PrefillScheduler
from kvcheck.core.cache.scheduler.request import SchedulerConfig
from kvcheck.core.cache.transfer.messages import Want

ROUNDS = 8
"""Enough for all that is said between the two ends."""


@pytest.fixture(params=["llama-3-tiny", "glm-5.1-tiny", "gpt-oss-tiny", "qwen3-next-tiny"])
def rig(request: pytest.FixtureRequest) -> Rig:
    return Rig(request.param)


def decode_of(rig: Rig, **settings: int) -> DecodeScheduler:
    config = SchedulerConfig(**({"max_running": 1} | settings))  # type: ignore[arg-type]
    return DecodeScheduler(
        deps(rig.decode.pool), config, metadata=rig.decode.metadata, receiver=rig.receiver, room_of=int
    )


def prefill_of(rig: Rig) -> PrefillScheduler:
    """It computes a page a round."""
    one = rig.prefill
    config = SchedulerConfig(max_running=1, chunk_tokens=one.pool.page_size)
    return PrefillScheduler(one.pool, one.metadata, ZeroDecoder(one.pool), rig.sender, one.backend, config, room_of=int)


def ask(rig: Rig, number: int, tokens: int) -> None:
    """The decode rank asks for a prompt."""
    pages = tuple(range(1, 1 + -(-tokens // rig.shape.page_size)))
    want = Want(
        room=number, attempt=0, generation=number, request=number, tokens=tokens, slot=0, state_slot=0,
        runs=(("kv.full", 0, pages),),
    )  # fmt: skip
    rig.prefill.wire.inbox.append(("decode-0", want, []))


def test_a_rank_refuses_what_can_never_fit_and_a_value_too_many(rig: Rig) -> None:
    decode, prefill = decode_of(rig), prefill_of(rig)
    most = min(rig.prefill.pool.sizes.max_tokens, 14 * rig.shape.page_size)
    for each, tokens in ((decode, most - 1), (prefill, most)):
        with pytest.raises(LengthMismatch):
            each.submit(request(FIRST, tokens + 1))
        assert each.is_idle
        with pytest.raises(ValueError, match="zip"):  # that all agreed values are used is stated by a strict zip
            each.settle([1])
        each.submit(request(FIRST, tokens))
        assert not each.is_idle


def test_no_more_prompts_are_asked_for_than_may_be_on_their_way(rig: Rig) -> None:
    scheduler = decode_of(rig, max_prefilling=1)
    for number in (FIRST, SECOND):
        scheduler.submit(request(number, 1))
    assert scheduler.settle(scheduler.poll()).admitted == [FIRST]


def test_a_request_that_is_sent_again_waits_until_its_earlier_attempt_is_drained(rig: Rig) -> None:
    scheduler = decode_of(rig)
    scheduler.submit(request(FIRST, 1))
    scheduler.settle(scheduler.poll())
    assert scheduler.abort(FIRST)
    scheduler.submit(request(FIRST, 1, attempt=1))
    assert scheduler.settle(scheduler.poll()).admitted == []
    admitted: list[int] = []
    for _ in range(ROUNDS):
        rig.sender.poll()
        admitted += scheduler.settle(scheduler.poll()).admitted
    assert admitted == [FIRST]


@pytest.mark.parametrize(("more", "admitted"), [(1, [FIRST]), (0, [FIRST, SECOND])])
def test_a_prompt_is_let_in_where_it_fits_beside_one_under_way(more: int, admitted: list[int], rig: Rig) -> None:
    """Of five free pages, the first one needs three and takes one a round."""
    pool, size = rig.prefill.pool, rig.shape.page_size
    for space in pool.paged:
        assert pool.allocators[space].allocate(pool.allocators[space].available - 5, 99) is not None
    scheduler = prefill_of(rig)
    for number, tokens in ((FIRST, 2 * size + 1), (SECOND, 2 * size + more)):
        scheduler.submit(request(number, tokens))
        ask(rig, number, tokens)
    assert scheduler.settle(scheduler.poll()).admitted == admitted


def test_a_prompt_that_nobody_has_asked_for_is_ended_and_reported(rig: Rig) -> None:
    scheduler = prefill_of(rig)
    scheduler.submit(request(FIRST, 1))
    assert not scheduler.abort(SECOND) and scheduler.abort(FIRST)
    reports = [scheduler.settle(scheduler.poll()) for _ in range(3)]
    assert [number for each in reports for number, _ in each.failed] == [FIRST] and scheduler.is_idle


def test_a_prompt_that_the_decode_end_aborts_fails_at_the_prefill_end_with_the_reason(rig: Rig) -> None:
    scheduler = decode_of(rig)
    rig.sender.open(FIRST, FIRST, 1)
    scheduler.submit(request(FIRST, 1))
    scheduler.settle(scheduler.poll())
    assert scheduler.abort(FIRST)
    rig.poll()
    assert rig.sender.reason(FIRST) == ABORTED
