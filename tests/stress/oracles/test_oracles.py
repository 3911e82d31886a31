"""Every oracle judges something or says it did not; contract, accounting, aliasing, output, liveness case by case.

Invariants:
- A history is written out here event by event; what must be found is written out beside it.
- An oracle that is broken on purpose gives another verdict on one of these histories, so they are not decoration.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kvcheck.core.base.record import Finding
from kvcheck.core.cache.backend.backend import Footprint, Submitted
from kvcheck.core.cache.events import Event
from kvcheck.core.stress.history import History
from kvcheck.core.stress.oracles import ORACLES
from kvcheck.core.stress.oracles.accounting import AccountingOracle
from kvcheck.core.stress.oracles.aliasing import AliasingOracle
from kvcheck.core.stress.oracles.contract import ContractOracle
from kvcheck.core.stress.oracles.liveness import LivenessOracle
from kvcheck.core.stress.oracles.oracle import MAX_FINDINGS, Oracle, judge
from kvcheck.core.stress.oracles.output import OutputOracle
from kvcheck.core.stress.workload.events import (
    Aliased,
    Broke,
    Closed,
    Counted,
    Descriptor,
    Expected,
    Finished,
    Forward,
    Owned,
    Restored,
    Saved,
)

TABLE = ("full.latent", "full.index_k_with_scale")
Where = tuple[str, int | None, int | None, str | None, int | None, int | None]


def where(finding: Finding) -> Where:
    """Code, request, seen_request, buffer, layer, page."""
    return (finding.code, finding.request, finding.seen_request, finding.buffer, finding.layer, finding.page)


def verdict(make: Callable[[], Oracle], *events: Event) -> tuple[tuple[Where, ...], bool]:
    """What an oracle finds, and whether it judged anything."""
    oracle = make()
    findings = judge(oracle, History.of(*events))
    return tuple(map(where, findings)), oracle.judged > 0


def moving(*, space: str, ids: list[int], owners: list[int] | None = None) -> tuple[Footprint, ...]:
    """A footprint on the pool's latent buffer."""
    named = None if owners is None else np.array(owners)
    return (Footprint(space, ("latent",), (0, 1), np.array(ids, dtype=np.int64), owners=named),)


# All of them


@pytest.mark.parametrize("name", ORACLES.names())
def test_an_empty_history_judges_nothing_and_finds_nothing(name: str) -> None:
    oracle = ORACLES.load(name)()
    assert judge(oracle, History.of()) == ()
    assert (oracle.name, oracle.judged) == (name, 0)


@pytest.mark.parametrize("name", ORACLES.names())
def test_judging_while_it_happens_is_judging_afterwards(name: str) -> None:
    events: tuple[Event, ...] = (
        *RESUMED_ONE_BEHIND,
        *SHARED_VALUE,
        *LEFT_OVER,
        Expected(1, (4, 5)),
        Finished(1, (4, 6)),
        Broke("KV902", "ValueError", "lengths"),
    )
    live, later = ORACLES.load(name)(), ORACLES.load(name)()
    history = History(keep=True)
    history.listen(live.handlers())
    for event in events:
        history.emit(event)
    live.finish()
    assert judge(later, history) == tuple(live.findings)
    assert later.judged == live.judged
    assert history.count == len(events)


def test_a_history_keeps_events_only_when_asked_to() -> None:
    history = History()
    history.emit(Owned("value"))
    assert (history.count, history.events) == (1, [])


# Contract

RESUMED_IN_PLACE: tuple[Event, ...] = (
    Forward(1, 0, 64),
    Forward(1, 64, 65),
    Saved(1, 65, TABLE, TABLE),
    Restored(1, 65, (5, 6), TABLE, TABLE),
    Forward(1, 65, 66),
)
RESUMED_ONE_BEHIND: tuple[Event, ...] = (*RESUMED_IN_PLACE[:4], Forward(1, 64, 65))
SAVED_ONE_AHEAD: tuple[Event, ...] = (Forward(1, 0, 64), Saved(1, 65, TABLE, TABLE))
RESTORED_SHORT: tuple[Event, ...] = (*RESUMED_IN_PLACE[:3], Restored(1, 64, (5, 6), TABLE, TABLE))
NEVER_SAVED: tuple[Event, ...] = (Restored(1, 64, (5, 6), TABLE, TABLE),)
SAVED_IN_PART: tuple[Event, ...] = (Saved(1, 65, TABLE[:1], TABLE),)
RESTORED_IN_PART: tuple[Event, ...] = (Saved(1, 65, TABLE, TABLE), Restored(1, 65, (5,), TABLE[:1], TABLE))


def test_resuming_at_exactly_the_committed_length_is_right() -> None:
    assert verdict(ContractOracle, *RESUMED_IN_PLACE) == ((), True)


def test_requests_continue_independently_and_may_start_behind_a_shared_prefix() -> None:
    assert verdict(ContractOracle, Forward(1, 0, 64), Forward(2, 64, 70), Forward(1, 64, 65), Forward(2, 70, 71)) == (
        (),
        True,
    )


@pytest.mark.parametrize(
    ("events", "words"),
    [
        pytest.param(
            RESUMED_ONE_BEHIND, "computes position 64, expected 65: its committed length is off by -1", id="behind"
        ),
        pytest.param((Forward(1, 0, 64), Forward(1, 66, 67)), "computes position 66, expected 64", id="gap"),
        pytest.param((Forward(1, 64, 64),), "computed no position from 64 on", id="nothing left to compute"),
        pytest.param(SAVED_ONE_AHEAD, "saved with 65 tokens, expected the 64 committed ones", id="uncommitted"),
        pytest.param(RESTORED_SHORT, "restored with 64 tokens, expected the 65 saved ones", id="restored short"),
        pytest.param(NEVER_SAVED, "restored with 64 tokens", id="never saved"),
    ],
)
def test_a_length_that_does_not_continue_is_kv301(events: tuple[Event, ...], words: str) -> None:
    (finding,) = judge(ContractOracle(), History.of(*events))
    assert where(finding) == ("KV301", 1, None, None, None, None)
    assert words in finding.message
    assert (finding.oracle, finding.tier) == ("contract", "device")


@pytest.mark.parametrize(("events", "verb"), [(SAVED_IN_PART, "saved"), (RESTORED_IN_PART, "restored")])
def test_a_buffer_that_did_not_move_is_kv304_and_is_named(events: tuple[Event, ...], verb: str) -> None:
    (finding,) = judge(ContractOracle(), History.of(*events))
    assert where(finding) == ("KV304", 1, None, "index_k_with_scale", None, None)
    assert f"request 1 was {verb} without full.index_k_with_scale" in finding.message


@pytest.mark.parametrize("space", ["full", "window", "state", "rows"])
def test_padding_in_an_operation_is_kv301(space: str) -> None:
    event = Submitted(1, "decode.write", "forward", (), moving(space=space, ids=[4, 0], owners=[1, 2]))
    (finding,) = judge(ContractOracle(), History.of(event))
    assert where(finding) == ("KV301", 2, None, "latent", None, None)
    unit = {"full": "full page 0", "window": "window page 0", "state": "state slot 0", "rows": "row 0"}[space]
    assert finding.message == f"decode.write names {unit}, which is padding"


def test_reading_padding_is_found_where_no_request_is_named() -> None:
    event = Submitted(1, "offload.save", "offload", moving(space="full", ids=[0]), ())
    assert verdict(ContractOracle, event) == ((("KV301", None, None, "latent", None, None),), True)


def test_slot_0_of_an_unpadded_space_and_an_operation_on_nothing_are_fine() -> None:
    unpadded = Submitted(1, "metadata.set", "host", (), moving(space="metadata.prefill", ids=[0]))
    nothing = Submitted(2, "offload.save", "offload", moving(space="full", ids=[]), ())
    assert verdict(ContractOracle, unpadded, nothing) == ((), False)


# Accounting

BALANCED = (Counted("full", 20, 44, 64), Counted("rows", 8, 0, 8), Closed(()))
LEFT_OVER = (Counted("full", 20, 40, 64), Closed((("full.latent", 512), ("offload.latent", 64))))


def test_free_and_cached_pages_add_up() -> None:
    assert verdict(AccountingOracle, *BALANCED) == ((), True)


@pytest.mark.parametrize(
    ("free", "words"),
    [(20, "4 of 64 ids of full are neither free nor cached"), (30, "6 of 64 ids of full are counted twice")],
)
def test_ids_that_do_not_add_up_are_kv401(free: int, words: str) -> None:
    (finding,) = judge(AccountingOracle(), History.of(Counted("full", free, 40, 64)))
    assert where(finding) == ("KV401", None, None, "full", None, None)
    assert words in finding.message


def test_locks_that_are_left_are_kv401() -> None:
    (finding,) = judge(AccountingOracle(), History.of(Counted("locks on cached prefixes", 0, 0, 3)))
    assert finding.message == "3 locks on cached prefixes are left after all requests have finished; expected none"


def test_memory_held_after_close_is_kv401_and_names_buffer_and_tier() -> None:
    findings = judge(AccountingOracle(), History.of(LEFT_OVER[1]))
    assert [(where(found), found.tier) for found in findings] == [
        (("KV401", None, None, "latent", None, None), "device"),
        (("KV401", None, None, "latent", None, None), "host"),
    ]
    assert "512 bytes of full.latent are still allocated after close" in findings[0].message


# Aliasing

SHARED_VALUE: tuple[Event, ...] = (
    Owned("offloaded value"),
    Aliased(3, "offloaded value", "full.latent", 7),
    Aliased(4, "metadata row", "metadata.prefill", 2),
    Aliased(5, "offloaded value", "full.latent", None),
    Descriptor(6, "move", False),
)


def test_owned_values_and_kept_descriptors_are_right() -> None:
    assert verdict(AliasingOracle, Owned("offloaded value"), Descriptor(1, "save", True)) == ((), True)


def test_shared_storage_is_kv305_and_a_changed_descriptor_kv303() -> None:
    findings = judge(AliasingOracle(), History.of(*SHARED_VALUE))
    assert [where(found) for found in findings] == [
        ("KV305", 3, None, "full.latent", None, 7),
        ("KV305", 4, None, "metadata.prefill", None, 2),
        ("KV305", 5, None, "full.latent", None, None),
        ("KV303", 6, None, None, None, None),
    ]
    assert "shares its storage with full.latent (page 7)" in findings[0].message
    assert "shares its storage with metadata.prefill (slot 2)" in findings[1].message
    assert "shares its storage with full.latent, which" in findings[2].message
    assert findings[3].message == "move changed the page list of request 6 in place"


# Output

SAME_TOKENS = (Expected(1, (4, 5)), Expected(2, ()), Finished(2, ()), Finished(1, (4, 5)))


def test_equal_tokens_are_right_in_any_order_of_finishing() -> None:
    assert verdict(OutputOracle, *SAME_TOKENS) == ((), True)


def test_a_request_without_reference_is_not_judged() -> None:
    assert verdict(OutputOracle, Finished(9, (1,))) == ((), False)


@pytest.mark.parametrize(
    ("tokens", "row", "words"),
    [
        ((4, 6, 6), 1, "output token 1 of 3 is 6, the reference run has 5"),
        ((4, 5), 2, "output token 2 of 3 is missing, the reference run has 6"),
        ((4, 5, 6, 7), 3, "output token 3 of 3 is 7, the reference run has none"),
        ((), 0, "output token 0 of 3 is missing, the reference run has 4"),
    ],
)
def test_other_tokens_are_kv501_at_the_first_that_differs(tokens: tuple[int, ...], row: int, words: str) -> None:
    (finding,) = judge(OutputOracle(), History.of(Expected(1, (4, 5, 6)), Finished(1, tokens)))
    assert where(finding) == ("KV501", 1, None, None, None, None)
    assert finding.row == row
    assert words in finding.message


# Liveness


def test_everything_finished_is_right() -> None:
    assert verdict(LivenessOracle, *SAME_TOKENS) == ((), True)


def test_requests_that_never_finish_are_kv901() -> None:
    (finding,) = judge(LivenessOracle(), History.of(*(Expected(i, ()) for i in (1, 2, 3)), Finished(1, ())))
    assert where(finding) == ("KV901", 2, None, None, None, None)
    assert finding.message == "2 requests never ended, the first of them request 2"


@pytest.mark.parametrize("code", ["KV901", "KV902", "KV402"])
def test_an_error_keeps_the_code_it_stands_for_and_explains_what_did_not_finish(code: str) -> None:
    events = (Expected(1, ()), Broke(code, "DoubleFree", "full: freed [3]"))
    (finding,) = judge(LivenessOracle(), History.of(*events))
    assert where(finding) == (code, None, None, None, None, None)
    assert finding.message == "DoubleFree: full: freed [3]"


# Limits


@pytest.mark.parametrize(
    ("make", "bad"),
    [
        (ContractOracle, lambda i: SAVED_IN_PART[0]),
        (AliasingOracle, lambda i: Aliased(i, "offloaded value", "full.latent", i)),
        (OutputOracle, lambda i: Finished(1, (i + 1,))),
    ],
)
def test_more_of_the_same_is_not_listed_but_still_counted(
    make: Callable[[], Oracle], bad: Callable[[int], Event]
) -> None:
    oracle = make()
    findings = judge(oracle, History.of(Expected(1, ()), *(bad(i) for i in range(MAX_FINDINGS + 5))))
    assert len(findings) == MAX_FINDINGS
    assert oracle.judged >= MAX_FINDINGS + 5


# Broken oracles


class IgnoresRestores(ContractOracle):
    def _restored(self, event: Restored) -> None:
        return


class ForgetsLengths(ContractOracle):
    def _forward(self, event: Forward) -> None:
        self.judged += 1


class ComparesWithNothing(ContractOracle):
    def _complete(self, verb: str, event: Saved | Restored) -> None:
        return


class ReadsPaddingOnly(ContractOracle):
    def _submitted(self, event: Submitted) -> None:
        super()._submitted(Submitted(event.ordinal, event.name, event.lane, event.reads, ()))


class ForgetsTheCache(AccountingOracle):
    def _counted(self, event: Counted) -> None:
        super()._counted(Counted(event.space, event.free, 0, event.total))


class LooksAtDevicesOnly(AccountingOracle):
    def _closed(self, event: Closed) -> None:
        super()._closed(Closed(tuple(row for row in event.held if not row[0].startswith("offload."))))


class NeverCounts(AliasingOracle):
    def _owned(self, event: Owned) -> None:
        return


class TrustsDescriptors(AliasingOracle):
    def _descriptor(self, event: Descriptor) -> None:
        self.judged += 1


class ComparesTheShorter(OutputOracle):
    def _finished(self, event: Finished) -> None:
        expected = self._expected.get(event.request, ())
        size = min(len(expected), len(event.tokens))
        self._expected[event.request] = expected[:size]
        super()._finished(Finished(event.request, event.tokens[:size]))


class NeverEnds(LivenessOracle):
    def finish(self) -> None:
        return


class BlamesEverybody(LivenessOracle):
    def _broken(self, event: Broke) -> None:
        super()._broken(event)
        self._broke = False


@pytest.mark.parametrize(
    ("whole", "broken", "events"),
    [
        (ContractOracle, IgnoresRestores, RESTORED_SHORT),
        (ContractOracle, IgnoresRestores, RESTORED_IN_PART),
        (ContractOracle, ForgetsLengths, RESUMED_ONE_BEHIND),
        (ContractOracle, ForgetsLengths, SAVED_ONE_AHEAD),
        (ContractOracle, ComparesWithNothing, SAVED_IN_PART),
        (ContractOracle, ReadsPaddingOnly, (Submitted(1, "write", "forward", (), moving(space="full", ids=[0])),)),
        (AccountingOracle, ForgetsTheCache, BALANCED),
        (AccountingOracle, LooksAtDevicesOnly, LEFT_OVER),
        (AliasingOracle, NeverCounts, (Owned("offloaded value"),)),
        (AliasingOracle, TrustsDescriptors, SHARED_VALUE),
        (OutputOracle, ComparesTheShorter, (Expected(1, (4, 5)), Finished(1, (4,)))),
        (LivenessOracle, NeverEnds, (Expected(1, ()),)),
        (LivenessOracle, BlamesEverybody, (Expected(1, ()), Broke("KV902", "ValueError", "lengths"))),
    ],
)
def test_a_broken_oracle_is_noticed(
    whole: Callable[[], Oracle], broken: Callable[[], Oracle], events: tuple[Event, ...]
) -> None:
    assert verdict(whole, *events) != verdict(broken, *events)
