"""Every oracle judges something or says it did not; contract, accounting, aliasing, output, liveness case by case."""

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
    Mapped,
    Owned,
    Restored,
    Returned,
    Saved,
)

TABLE = ("full.latent", "full.index_k_with_scale")


def saved(tokens: int, buffers: tuple[str, ...] = TABLE) -> Saved:
    return Saved(1, tokens, buffers, TABLE)


def restored(tokens: int, buffers: tuple[str, ...] = TABLE) -> Restored:
    return Restored(1, tokens, (5, 6), buffers, TABLE)


def write(space: str, *ids: int, owners: tuple[int, ...] | None = None) -> Submitted:
    return Submitted(1, "decode.write", "forward", (), moving(space, *ids, owners=owners))


def read(space: str, *ids: int) -> Submitted:
    return Submitted(1, "offload.save", "offload", moving(space, *ids), ())


def moving(space: str, *ids: int, owners: tuple[int, ...] | None = None) -> tuple[Footprint, ...]:
    named = None if owners is None else np.array(owners)
    return (Footprint(space, ("latent",), (0, 1), np.array(ids, dtype=np.int64), owners=named),)


RETRACTED: tuple[Event, ...] = (Forward(1, 0, 64), Forward(1, 64, 65), saved(65))
COUNTED = Counted("full", 20, 44, 64)
VALUE = "offloaded value"

Make = Callable[[], Oracle]
GOOD: dict[str, tuple[Make, tuple[Event, ...]]] = {
    "resumed at the committed length": (ContractOracle, (*RETRACTED, restored(65), Forward(1, 65, 66))),
    "requests continue independently, one behind a shared prefix": (
        ContractOracle,
        (Forward(1, 0, 64), Forward(2, 64, 70), Forward(1, 64, 65), Forward(2, 70, 71)),
    ),
    "free and cached pages add up": (AccountingOracle, (COUNTED, Counted("rows", 8, 0, 8), Closed(()))),
    "everything is back": (AccountingOracle, (COUNTED, Returned("full", 64, 64), Returned("rows", 8, 8))),
    "an empty map": (AccountingOracle, (Mapped("full_to_window", ()),)),
    "owned values and kept descriptors": (AliasingOracle, (Owned(VALUE), Descriptor(1, "save", True))),
    "an owned value": (AliasingOracle, (Owned(VALUE),)),
    "equal tokens, in any order": (
        OutputOracle,
        (Expected(1, (4, 5)), Expected(2, ()), Finished(2, ()), Finished(1, (4, 5))),
    ),
    "everything finished": (LivenessOracle, (Expected(1, ()), Finished(1, ()))),
}
UNJUDGED: dict[str, tuple[Make, tuple[Event, ...]]] = {
    "slot 0 of an unpadded space, and nothing": (ContractOracle, (write("metadata.prefill", 0), read("full"))),
    "a request without a reference": (OutputOracle, (Finished(9, (1,)),)),
}

# Of each finding its code, request, buffer, page or row, and words of the message.
Found = tuple[str, int | None, str | None, int | None, str]


def length(words: str) -> Found:
    return ("KV301", 1, None, None, words)


def unmoved(words: str) -> Found:
    return ("KV304", 1, "index_k_with_scale", None, words)


def lost(space: str, words: str) -> Found:
    return ("KV401", None, space, None, words)


BAD: dict[str, tuple[Make, tuple[Event, ...], tuple[Found, ...]]] = {
    "behind": (ContractOracle, (*RETRACTED, restored(65), Forward(1, 64, 65)), (length("expected 65"),)),
    "a gap": (ContractOracle, (Forward(1, 0, 64), Forward(1, 66, 67)), (length("66, expected 64"),)),
    "nothing left to compute": (ContractOracle, (Forward(1, 64, 64),), (length("from 64 on"),)),
    "saved ahead": (ContractOracle, (Forward(1, 0, 64), saved(65)), (length("with 65 tokens, expected the 64"),)),
    "restored short": (ContractOracle, (*RETRACTED, restored(64)), (length("with 64 tokens, expected the 65"),)),
    "never saved": (ContractOracle, (restored(64),), (length("restored with 64 tokens"),)),
    "saved in part": (ContractOracle, (saved(65, TABLE[:1]),), (unmoved("saved without full."),)),
    "restored in part": (ContractOracle, (saved(65), restored(65, TABLE[:1])), (unmoved("restored without full."),)),
    **{
        f"padding is written, {unit}": (
            ContractOracle,
            (write(space, 4, 0, owners=(1, 2)),),
            (("KV301", 2, "latent", None, f"{unit}, which is padding"),),
        )
        for space, unit in {"full": "page 0", "window": "page 0", "state": "slot 0", "rows": "row 0"}.items()
    },
    "padding is read for nobody": (ContractOracle, (read("full", 0),), (("KV301", None, "latent", None, "page 0"),)),
    "ids are lost": (AccountingOracle, (Counted("full", 20, 40, 64),), (lost("full", "4 of 64 ids"),)),
    "ids are counted twice": (AccountingOracle, (Counted("full", 30, 40, 64),), (lost("full", "6 of 64 ids"),)),
    "locks are left": (AccountingOracle, (Counted("locks", 0, 0, 3),), (lost("locks", "3 locks are left"),)),
    "memory is held after close": (
        AccountingOracle,
        (Closed((("full.latent", 512), ("offload.latent", 64))),),
        (lost("latent", "512 bytes of full."), lost("latent", "64 bytes of offload.")),
    ),
    "the tree keeps pages": (AccountingOracle, (Returned("full", 60, 64),), (lost("full", "4 of 64 ids"),)),
    "a map names a freed page": (
        AccountingOracle,
        (Mapped("full_to_window", ((3, 7), (5, 2))),),
        (lost("full_to_window", "still maps 3 to 7"),),
    ),
    "shared storage": (
        AliasingOracle,
        (
            *(Aliased(3, VALUE, "full.latent", 7), Aliased(4, "metadata row", "metadata.prefill", 2)),
            Aliased(5, VALUE, "full.latent", None),
        ),
        (
            ("KV305", 3, "full.latent", 7, "full.latent (page 7)"),
            ("KV305", 4, "metadata.prefill", 2, "metadata.prefill (slot 2)"),
            ("KV305", 5, "full.latent", None, "full.latent, which"),
        ),
    ),
    "a changed descriptor": (
        AliasingOracle,
        (Descriptor(6, "move", False),),
        (("KV303", 6, None, None, "move changed the page list of request 6"),),
    ),
    **{
        f"output: {words}": (
            OutputOracle,
            (Expected(1, (4, 5, 6)), Finished(1, tokens)),
            (("KV501", 1, None, row, words),),
        )
        for tokens, row, words in (
            ((4, 6, 6), 1, "token 1 of 3 is 6, the reference run has 5"),
            ((4, 5), 2, "token 2 of 3 is missing, the reference run has 6"),
            ((4, 5, 6, 7), 3, "token 3 of 3 is 7, the reference run has none"),
            ((), 0, "token 0 of 3 is missing, the reference run has 4"),
        )
    },
    "requests never end": (
        LivenessOracle,
        (Expected(1, ()), Expected(2, ()), Expected(3, ()), Finished(1, ())),
        (("KV901", 2, None, None, "2 requests never ended"),),
    ),
    **{
        f"an error {code} explains what did not finish": (
            LivenessOracle,
            (Expected(1, ()), Broke(code, "DoubleFree", "full: freed [3]")),
            ((code, None, None, None, "DoubleFree: full: freed [3]"),),
        )
        for code in ("KV901", "KV902", "KV402")
    },
}


@pytest.mark.parametrize("name", GOOD)
def test_a_right_history_is_judged_and_has_no_findings(name: str) -> None:
    make, events = GOOD[name]
    oracle = make()
    assert judge(oracle, History.of(*events)) == ()
    assert oracle.judged


@pytest.mark.parametrize("name", UNJUDGED)
def test_nothing_to_judge_is_not_counted(name: str) -> None:
    make, events = UNJUDGED[name]
    oracle = make()
    assert (judge(oracle, History.of(*events)), oracle.judged) == ((), 0)


@pytest.mark.parametrize("name", BAD)
def test_a_wrong_history_has_these_findings(name: str) -> None:
    make, events, expected = BAD[name]
    oracle = make()
    found = judge(oracle, History.of(*events))
    assert [_told(each) for each in found] == [each[:-1] for each in expected]
    for finding, (*_, words) in zip(found, expected, strict=True):
        assert words in finding.message
        assert (finding.oracle, finding.seen_request, finding.layer) == (oracle.name, None, None)
        if oracle.name in ("contract", "accounting"):
            assert finding.tier == ("host" if "offload." in words else "device")


def _told(finding: Finding) -> tuple[str, int | None, str | None, int | None]:
    place = finding.row if finding.oracle == "output" else finding.page
    return (finding.code, finding.request, finding.buffer, place)


# All of them


@pytest.mark.parametrize("name", ORACLES.names())
def test_an_empty_history_judges_nothing_and_finds_nothing(name: str) -> None:
    oracle = ORACLES.load(name)()
    assert judge(oracle, History.of()) == ()
    assert (oracle.name, oracle.judged) == (name, 0)


@pytest.mark.parametrize("name", ORACLES.names())
def test_judging_while_it_happens_is_judging_afterwards(name: str) -> None:
    live, later, history = ORACLES.load(name)(), ORACLES.load(name)(), History(keep=True)
    history.listen(live.handlers())
    for _, events, _ in BAD.values():
        for event in events:
            history.emit(event)
    live.finish()
    assert judge(later, history) == tuple(live.findings)
    assert later.judged == live.judged
    assert history.count == sum(len(events) for _, events, _ in BAD.values())


def test_a_history_keeps_events_only_when_asked_to() -> None:
    history = History()
    history.emit(Owned("value"))
    assert (history.count, history.events) == (1, [])


@pytest.mark.parametrize(
    ("make", "bad"),
    [
        (ContractOracle, lambda i: saved(65, TABLE[:1])),
        (AliasingOracle, lambda i: Aliased(i, "offloaded value", "full.latent", i)),
        (OutputOracle, lambda i: Finished(1, (i + 1,))),
    ],
)
def test_more_of_the_same_is_not_listed_but_still_counted(make: Make, bad: Callable[[int], Event]) -> None:
    oracle = make()
    findings = judge(oracle, History.of(Expected(1, ()), *(bad(i) for i in range(MAX_FINDINGS + 5))))
    assert len(findings) == MAX_FINDINGS
    assert oracle.judged >= MAX_FINDINGS + 5
