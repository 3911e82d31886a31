"""A room from both sides, step by step: who may write what, when it counts as arrived, and when memory comes back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rigs.pair import PATIENCE, Rig, Room

from kvcheck.core.cache.backend.backend import Operation
from kvcheck.core.cache.backend.simulated import SimulatedBackend
from kvcheck.core.cache.transfer.loopback_wire import PATHS
from kvcheck.core.cache.transfer.messages import Abort, AuxData, Drained, Message, Status
from kvcheck.core.cache.transfer.receiver import FAILED, SUCCESS, TRANSFERRING
from kvcheck.core.cache.transfer.seal import Seal
from kvcheck.core.cache.transfer.sender import DONE, PENDING
from kvcheck.core.cache.transfer.wire import LEGS
from kvcheck.core.stress.strategies import LazyStrategy
from kvcheck.core.stress.workload.shapes import TINY_SHAPES

LAST_ROOM = (1 << 64) - 1
ROOM = 5


def inbox(rig: Rig, *messages: Message, sender: str = "prefill-0") -> None:
    rig.decode.wire.inbox += [(sender, message, []) for message in messages]


def sent_to(rig: Rig) -> list[Message]:
    return [message for _, message, _ in rig.prefill.wire.inbox]


def lazy(**given: Any) -> tuple[Rig, Room]:
    """A rig whose operations run when somebody waits, and whose want has come."""
    rig = Rig(backend=SimulatedBackend(LazyStrategy()), **given)
    got = rig.expect(ROOM, 9)
    while rig.sender._wants._rooms == {}:
        rig.poll()
        rig.backend.idle()
    return rig, got


@pytest.mark.parametrize("name", TINY_SHAPES)
@pytest.mark.parametrize("room", [0, 1, LAST_ROOM])
def test_a_room_arrives_whole_whatever_its_number(name: str, room: int) -> None:
    rig = Rig(name)
    tokens = 2 * rig.shape.page_size + 1
    got = rig.expect(room, tokens)
    assert rig.rooms[room].status == TRANSFERRING
    sent = rig.prefill_room(room, tokens, chunk=rig.shape.page_size)
    assert rig.sender.state(room) == PENDING, "nobody has verified it yet"
    assert len(rig.differs(sent, got)) == 0
    rig.poll()
    assert rig.rooms[room].status == SUCCESS
    assert rig.told.rooms == [("decode-0", room, 1, TRANSFERRING, SUCCESS, "")]
    rig.receiver.take(rig.rooms[room])
    assert rig.sender.state(room) == PENDING
    rig.sender.poll()
    assert rig.sender.state(room) == DONE


def test_a_room_that_no_source_has_reported_is_late_and_not_unsealed() -> None:
    rig = Rig()
    got = rig.expect(ROOM, 9)
    (mark,) = rig.told.marks
    assert int(rig.decode.pool.sets["full"].write_view("k")[0, int(got.holding.pages[0]) * 4, 0]) == mark
    rig.poll(PATIENCE)
    assert rig.rooms[ROOM].status == FAILED and rig.told.late == []


@pytest.mark.parametrize("name", TINY_SHAPES)
def test_all_memory_of_a_room_is_marked_before_it_is_asked_for(name: str) -> None:
    rig = Rig(name)
    pool = rig.decode.pool
    views = {(space, each.name): pool.sets[space].write_view(each.name) for space, each in pool.buffers()}
    before = {key: words.clone() for key, words in views.items()}
    extent = pool.extent(rig.expect(ROOM, 9).holding, 9)
    for space, buffer in pool.buffers():
        rows, key = extent.rows(space, buffer), (space, buffer.name)
        assert len(rows) and bool((views[key][:, rows] != before[key][:, rows]).all()), key


@pytest.mark.parametrize("tokens", range(9, 26))
def test_windows_that_start_on_different_pages_are_paired_by_page(tokens: int) -> None:
    """The source has kept more of the window than the target, or less."""
    for query in (0, 6, tokens):
        rig = Rig("gpt-oss-tiny")
        got = rig.expect(ROOM, tokens)
        sent = rig.begin(ROOM, tokens, query=query)
        rig.sender.send_pages(ROOM, tokens, rig.done())
        rig.finish(sent)
        rig.poll()
        assert rig.rooms[ROOM].status == SUCCESS, rig.rooms[ROOM].reason
        assert rig.differs(sent, got) == []
    first = int((got.holding.window_pages > 0).argmax())
    assert first == max(0, tokens + 1 - 10) // 4, "the target keeps what its next token sees"


@pytest.mark.parametrize("legs", [{}, dict.fromkeys(LEGS, "async")])
@pytest.mark.parametrize("over_messages", [False, True])
def test_success_never_comes_before_the_bytes(legs: dict[str, str], over_messages: bool) -> None:
    assert set(legs.values()) <= set(PATHS)
    rig, got = lazy(paths=legs, aux_over_messages=over_messages)
    sent = rig.prefill_room(ROOM, 9)
    looks = 0
    while rig.rooms[ROOM].status == TRANSFERRING:
        assert rig.now < PATIENCE
        rig.receiver.poll()
        if rig.rooms[ROOM].status == TRANSFERRING:
            rig.backend.idle()
            looks += 1
    assert looks > 1, "the wire has to take its time for this to mean anything"
    assert rig.rooms[ROOM].status == SUCCESS
    assert rig.differs(sent, got) == []


@pytest.mark.parametrize("name", ["llama-3-tiny", "glm-5.1-tiny", "gpt-oss-tiny", "qwen3-next-tiny"])
def test_one_wrong_byte_anywhere_is_no_success_and_fails_at_the_deadline(name: str) -> None:
    tokens = 2 * Rig(name).shape.page_size - 1
    buffers = [(space, buffer.name) for space, buffer in Rig(name).decode.pool.buffers()]
    for space, buffer in (*buffers, ("metadata", ""), ("seal", "")):
        rig = Rig(name)
        got = rig.expect(ROOM, tokens)
        rig.prefill_room(ROOM, tokens)
        if space == "metadata":
            rig.decode.metadata.row_view(got.slot)[1599] ^= 1
        elif space == "seal":
            rig.receiver._seals[got.slot, 20] ^= 128
        else:
            words = rig.decode.pool.sets[space].write_view(buffer)
            pages = {"full": got.holding.pages, "window": got.holding.window_pages}.get(space)
            unit = got.holding.state_slot if pages is None else int(pages[1])
            rows_per_unit = words.shape[1] // (rig.decode.pool.sets[space].units + 1)
            words[-1, unit * rows_per_unit + rows_per_unit // 2, -1] ^= 1 << 40  # the last layer, inside the prompt
        rig.poll(PATIENCE - 1)
        assert (rig.rooms[ROOM].status, rig.told.sizes) == (TRANSFERRING, []), f"{space}.{buffer}"
        rig.poll()
        assert rig.rooms[ROOM].status == FAILED and "nothing complete from prefill-0" in rig.rooms[ROOM].reason
        assert rig.told.late == [ROOM], "the source had reported it"
        assert sent_to(rig) == [Abort(room=ROOM, attempt=0, generation=1, reason=rig.rooms[ROOM].reason)]


def test_a_seal_that_was_seen_is_read_again_beside_the_bytes() -> None:
    rig = Rig()
    got = rig.expect(ROOM, 9)
    rig.prefill_room(ROOM, 9)
    row, seal = rig.decode.metadata.row_view(got.slot), rig.receiver._seals[got.slot]
    row[0] ^= 1
    rig.poll()
    row[0] ^= 1
    for byte in (20, 44, 63):  # room, digest and check word
        seal[byte] ^= 1
        rig.poll()
        assert rig.rooms[ROOM].status == TRANSFERRING, byte
        seal[byte] ^= 1
    rig.poll()
    assert rig.rooms[ROOM].status == SUCCESS


def test_bytes_are_read_only_once_a_seal_of_the_attempt_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    rig, names = Rig(), list[str]()
    submit = rig.backend.submit
    monkeypatch.setattr(
        rig.backend, "submit", lambda each, **given: (names.append(each.name), submit(each, **given))[1]
    )
    got = rig.expect(ROOM, 9)
    inbox(rig, Status(room=ROOM, generation=1, is_ok=True))
    old = Seal(room=ROOM, generation=2, bytes=0, digest=0).packed()
    for there in (torch.zeros_like(old), old):
        rig.receiver._seals[got.slot] = there
        rig.poll(2)
    assert rig.rooms[ROOM].status == TRANSFERRING, "a status that lies is no success"
    rig.prefill_room(ROOM, 9)
    rig.decode.metadata.row_view(got.slot)[0] ^= 1
    rig.poll(3)
    looks = [name for name in names if name in ("seal.look", "seal.verify")]
    assert looks == [*["seal.look"] * 5, *["seal.verify"] * 3], "nothing there and another attempt's seal, then its own"


def test_a_seal_alone_is_not_looked_at_before_the_status() -> None:
    rig = Rig()
    rig.expect(ROOM, 9)
    rig.prefill_room(ROOM, 9)
    held_back, rig.decode.wire.inbox[:] = list(rig.decode.wire.inbox), []
    rig.poll(3)
    assert rig.rooms[ROOM].status == TRANSFERRING
    rig.decode.wire.inbox[:] = held_back
    rig.poll()
    assert rig.rooms[ROOM].status == SUCCESS


def test_a_room_that_is_taken_gives_its_row_and_its_slot_back() -> None:
    rig = Rig()
    got = rig.expect(ROOM, 9)
    rig.prefill_room(ROOM, 9)
    rig.poll()
    row = rig.receiver.take(rig.rooms[ROOM])
    assert row.field("output_ids")[:5].tolist() == [1, 2, 3, 4, 5]
    assert not rig.decode.metadata.row_view(got.slot).any(), "cleared before anybody leases it"
    assert rig.decode.metadata.slots.available == rig.decode.metadata.slots.count


@pytest.mark.parametrize("generation", [0, 1, 3])
def test_messages_of_another_generation_peer_or_room_change_nothing(generation: int) -> None:
    rig = Rig()
    first = rig.expect(ROOM, 9)
    rig.receiver._rooms.pop(ROOM)
    rig.rooms[ROOM] = rig.receiver.expect(ROOM, first.holding, 9, first.slot)
    before = rig.decode.metadata.row_view(first.slot).clone()
    for message in (
        Drained(room=ROOM, generation=generation),
        Status(room=ROOM, generation=generation, is_ok=False, reason="old"),
        Status(room=ROOM, generation=generation, is_ok=True),
        AuxData(room=ROOM, generation=generation, slot=first.slot, row="ff" * 1600),
        AuxData(room=ROOM, generation=generation, slot=first.slot + 1, row=""),
    ):
        inbox(rig, message)
        rig.receiver.poll()
    inbox(rig, Status(room=ROOM, generation=2, is_ok=False), Drained(room=ROOM, generation=2), sender="prefill-7")
    inbox(rig, Drained(room=6, generation=2), Status(room=0, generation=2, is_ok=True))
    rig.poll()
    receiving = rig.receiver._rooms[ROOM]
    assert (receiving.status, receiving.waits, receiving.writers) == (TRANSFERRING, {"prefill-0"}, {"prefill-0"})
    assert torch.equal(rig.decode.metadata.row_view(first.slot), before)


def test_repeated_messages_are_as_one() -> None:
    """Every message between the ends comes three times."""
    rig = Rig(aux_over_messages=True)
    for wire in (rig.prefill.wire, rig.decode.wire):
        plain = wire.receive
        wire.receive = lambda plain=plain: [each for each in plain() for _ in range(3)]  # type: ignore[method-assign]
    got = rig.expect(ROOM, 9)
    sent = rig.prefill_room(ROOM, 9)
    rig.poll()
    assert rig.rooms[ROOM].status == SUCCESS
    assert rig.differs(sent, got) == []
    assert len(rig.told.rooms) == len(rig.told.sizes) == 1
    rig.receiver.take(rig.rooms[ROOM])
    rig.sender.poll()
    assert rig.sender.state(ROOM) == DONE
    failing = rig.expect(6, 9, request=2)
    rig.begin(6, 9, request=2)
    rig.sender.fail(6, "broken")
    rig.poll(2)
    assert rig.rooms[6].status == FAILED and rig.receiver.is_drained(rig.rooms[6])
    assert [each[3:] for each in rig.told.rooms[1:]] == [(TRANSFERRING, FAILED, "broken")]
    rig.receiver.forget(rig.rooms[6])
    assert failing.holding.is_open
    assert rig.told.drains == [6], "a source has answered, so its memory was marked and can be looked at"


@pytest.mark.parametrize(("slot", "size"), [(1, 1600), (0, 1599), (0, 1608), (0, 0), (3, 0)])
def test_aux_data_for_another_slot_or_of_another_length_fails_the_room_and_writes_nothing(slot: int, size: int) -> None:
    rig = Rig()
    assert rig.expect(ROOM, 9).slot == 0
    before = rig.decode.metadata.memory().clone()
    inbox(rig, AuxData(room=ROOM, generation=1, slot=slot, row="ab" * size))
    rig.receiver.poll()
    assert rig.rooms[ROOM].status == FAILED and f"{size} bytes for slot {slot}" in rig.rooms[ROOM].reason
    assert torch.equal(rig.decode.metadata.memory(), before)


def test_drained_is_said_behind_everything_that_was_written() -> None:
    rig, _ = lazy(paths=dict.fromkeys(LEGS, "async"))
    rig.prefill_room(ROOM, 9)
    landings = [signal for signals in rig.decode.wire.landing.values() for signal in signals]
    assert len(landings) == 3 and not any(rig.backend.query(each) for each in landings)
    rig.receiver.fail(rig.rooms[ROOM], "aborted")
    while not rig.receiver.is_drained(rig.rooms[ROOM]):
        rig.sender.poll()
        rig.receiver.poll()
        rig.backend.idle()
    assert all(rig.backend.query(each) for each in landings)


def test_a_fence_frees_what_only_that_peer_could_write_and_fails_what_waited_for_it() -> None:
    rig = Rig()
    waiting = rig.expect(ROOM, 9)
    arrived = rig.expect(6, 9, request=2)
    sent = rig.prefill_room(6, 9, request=2)
    rig.receiver.poll()
    rig.receiver.fence("prefill-0")
    assert rig.rooms[ROOM].status == FAILED and rig.rooms[ROOM].reason == "prefill-0 is gone"
    assert rig.receiver.is_drained(rig.rooms[ROOM])
    assert rig.rooms[6].status == SUCCESS, "its bytes are here, and verified"
    assert rig.differs(sent, arrived) == []
    rig.receiver.forget(rig.rooms[ROOM])
    assert waiting.holding.is_open


def test_a_room_that_is_asked_of_a_gone_peer_fails_at_once_and_nobody_has_to_drain_it() -> None:
    rig = Rig()
    rig.receiver.fence("prefill-0")
    rig.expect(ROOM, 9)
    assert (rig.rooms[ROOM].status, rig.rooms[ROOM].reason) == (FAILED, "prefill-0 is gone")
    assert rig.receiver.is_drained(rig.rooms[ROOM])
    assert sent_to(rig) == [], "it is asked for nothing"
    assert rig.told.marks == []
    inbox(rig, Status(room=ROOM, generation=1, is_ok=True))
    rig.receiver.poll()
    rig.receiver.fail(rig.rooms[ROOM], "x")
    rig.receiver.forget(rig.rooms[ROOM])
    assert rig.told.drains == [], "nobody marked its memory: what it holds is of earlier owners"


def test_a_want_is_sent_behind_the_clearing_of_the_state_slot() -> None:
    rig = Rig("qwen3-next-tiny", backend=SimulatedBackend(LazyStrategy()))
    forward = rig.decode.pool.forward
    cleared: list[int] = []
    rig.decode.backend.submit(Operation("clear", (lambda: cleared.append(1),)), lane=forward)
    rig.expect(ROOM, 9)
    while not sent_to(rig):
        assert rig.backend.allocated()
        rig.backend.idle()
    assert cleared
