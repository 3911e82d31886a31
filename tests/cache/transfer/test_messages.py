"""Messages between ends: each kind survives its encoding, and nothing else gets through."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcheck.core.base.errors import TransferError
from kvcheck.core.cache.transfer.messages import (
    MAX_MESSAGE_BYTES,
    MAX_ROW_BYTES,
    Abort,
    AuxData,
    Done,
    Drained,
    Message,
    Status,
    Want,
    decode,
    encode,
)

LARGEST_ROOM = (1 << 64) - 1
WANT = Want(
    room=0,
    attempt=0,
    generation=1,
    request=3,
    tokens=9,
    slot=2,
    state_slot=4,
    runs=(("kv.full", 0, (5, 6, 7)), ("state.window", 1, (8, 9)), ("state.full", 0, ())),
)
ONE_OF_EACH: tuple[Message, ...] = (
    WANT,
    Status(room=LARGEST_ROOM, generation=LARGEST_ROOM, is_ok=True),
    Done(room=0, generation=0, is_ok=False, reason="3 pages, 4 pages"),
    Abort(room=1, attempt=0, generation=2, reason='ü \N{SNOWMAN} \\ " \n\ud7ff\ue000'),
    Drained(room=LARGEST_ROOM, generation=1),
    AuxData(room=0, generation=1, slot=0, row="00ff"),
)

numbers = st.one_of(st.sampled_from([0, LARGEST_ROOM]), st.integers(0, LARGEST_ROOM))
indices = st.one_of(st.sampled_from([0, (1 << 63) - 1]), st.integers(0, (1 << 63) - 1))
runs = st.lists(st.tuples(st.text(max_size=9), indices, st.lists(indices, max_size=4).map(tuple)), max_size=3)
MADE: dict[str, st.SearchStrategy[Any]] = {
    "room": numbers,
    "generation": numbers,
    "request": indices,
    "attempt": indices,
    "tokens": indices,
    "slot": indices,
    "state_slot": indices,
    "is_ok": st.booleans(),
    "reason": st.text(max_size=50),
    "row": st.binary(max_size=40).map(bytes.hex),
    "runs": runs.map(tuple),
}


@given(st.data())
def test_any_message_survives_and_can_be_a_key(data: st.DataObject) -> None:
    made = [kind(**{each.name: data.draw(MADE[each.name]) for each in fields(kind)}) for kind in Message.__args__]
    for message in (*made, *ONE_OF_EACH):
        back = decode(encode(message))
        assert back == message and type(back) is type(message)
        assert hash(back) == hash(message), "lists were left in it"


def with_value(message: Message, name: str, value: object) -> bytes:
    return json.dumps([type(message).__name__, asdict(message) | {name: value}]).encode()


NOT_A_NUMBER = (-1, True, False, 1.0, "1", None, [1], {"a": 1}, 1 << 70)
NOT_TEXT = (1, None, ["a"], True, "\ud800", "\udfff")
WRONG: dict[str, tuple[object, ...]] = {
    "room": (*NOT_A_NUMBER, 1 << 64),
    "generation": (*NOT_A_NUMBER, 1 << 64),
    "request": (*NOT_A_NUMBER, 1 << 63),
    "attempt": (*NOT_A_NUMBER, 1 << 63),
    "tokens": (*NOT_A_NUMBER, 1 << 63),
    "slot": (*NOT_A_NUMBER, 1 << 63),
    "state_slot": (*NOT_A_NUMBER, 1 << 63),
    "is_ok": (0, 1, "true", None, 1.0, []),
    "reason": NOT_TEXT,
    "row": (*NOT_TEXT, "0", "0g", "00 ff", "0xff", "FF", "00\n", "\u0660\u0660", "00" * (MAX_ROW_BYTES + 1)),
    "runs": (
        *(None, 1, "kv", {}, [1], ["kv"], [["kv.full", 0]], [["kv.full", 0, [1], 2]], [{"kv.full": 0}]),
        *([[leg, 0, [1]]] for leg in NOT_TEXT),
        *([["kv.full", first, [1]]] for first in (*NOT_A_NUMBER, 1 << 63)),
        *([["kv.full", 0, pages]] for pages in (None, 1, "12", {"1": 2}, [[1]])),
        *([["kv.full", 0, [1, page]]] for page in (*NOT_A_NUMBER, 1 << 63)),
    ),
}


@pytest.mark.parametrize("message", ONE_OF_EACH, ids=lambda each: type(each).__name__)
def test_a_field_of_another_type_or_range_is_refused(message: Message) -> None:
    for field in fields(message):
        for value in WRONG[field.name]:
            with pytest.raises(TransferError, match=f"message {type(message).__name__}: .* in {field.name}, "):
                decode(with_value(message, field.name, value))


@pytest.mark.parametrize("message", ONE_OF_EACH, ids=lambda each: type(each).__name__)
def test_a_missing_and_an_extra_field_are_refused(message: Message) -> None:
    kind, values = type(message).__name__, asdict(message)
    required = [name for name in values if name != "reason" or kind == "Abort"]
    broken = [{key: value for key, value in values.items() if key != name} for name in required]
    for each in (*broken, values | {"more": 1}):
        with pytest.raises(TransferError):
            decode(json.dumps([kind, each]).encode())


GOOD = encode(WANT)
GARBAGE: dict[str, bytes] = {
    "nothing": b"",
    "not JSON": b"[",
    "cut off": GOOD[:-1],
    "two messages": GOOD + GOOD,
    "not UTF-8": GOOD.replace(b"kv.full", b"kv.\xff\xfe"),
    "another coding": GOOD.decode().encode("utf-16"),
    "a number": b"1",
    "null": b"null",
    "text of two letters": b'"ab"',
    "an object": b'{"Want": 1, "room": 2}',
    "one element": b'["Drained"]',
    "three elements": b'["Drained", {"room": 1, "generation": 1}, 3]',
    "an unknown kind": b'["Nope", {}]',
    "a kind that is no text": b'[["Drained"], {"room": 1, "generation": 1}]',
    "the kind of nothing": b'[null, {"room": 1, "generation": 1}]',
    "values in a list": b'["Drained", [1, 1]]',
    "values that are text": b'["Drained", "ab"]',
    "not a number": b'["Drained", {"room": NaN, "generation": 1}]',
    "endless": b'["Drained", {"room": Infinity, "generation": 1}]',
    "a number of too many digits": b'["Drained", {"room": ' + b"9" * 5000 + b', "generation": 1}]',
    "deep": b"[" * 100_000 + b"]" * 100_000,
    "deep inside": b'["Abort", {"room": 1, "generation": 1, "reason": '
    + b'{"a":' * 50_000
    + b"1"
    + b"}" * 50_000
    + b"}]",
    "deep but parsed": b'["Abort", {"room": 1, "generation": 1, "reason": ' + b"[" * 300 + b"]" * 300 + b"}]",
    "a line break in the kind": b'["a\\nb", {}]',
    "too long": encode(Abort(room=1, attempt=0, generation=1, reason="x" * MAX_MESSAGE_BYTES)),
}


@pytest.mark.parametrize("name", GARBAGE)
def test_anything_else_is_refused_in_one_line(name: str) -> None:
    with pytest.raises(TransferError) as refused:
        decode(GARBAGE[name])
    assert "expected" in str(refused.value) and "got" in str(refused.value)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 300


@given(
    st.binary(max_size=60)
    | st.tuples(st.integers(0, len(GOOD) - 1), st.binary(min_size=1, max_size=3)).map(
        lambda change: GOOD[: change[0]] + change[1] + GOOD[change[0] + len(change[1]) :]
    )
)
def test_any_bytes_and_a_changed_message_are_a_message_or_refused(data: bytes) -> None:
    try:
        message = decode(data)
    except TransferError:
        return
    assert decode(encode(message)) == message


def test_a_message_may_be_as_long_as_the_bound() -> None:
    pages = tuple(range(100_000, 200_000))
    message = Want(**{**asdict(WANT), "runs": (("kv.full", 0, pages),)})
    assert decode(encode(message)) == message, "the longest prompt"
    short = encode(ONE_OF_EACH[4])
    assert decode(short.ljust(MAX_MESSAGE_BYTES)) == ONE_OF_EACH[4]
    with pytest.raises(TransferError):
        decode(short.ljust(MAX_MESSAGE_BYTES + 1))
