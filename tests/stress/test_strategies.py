"""Strategies do as they are told, every time, and a recorded run replays."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvcheck.core.base.errors import UsageError
from kvcheck.core.cache.backend.backend import Lane, Operation
from kvcheck.core.cache.backend.simulated import Choice, Chooser, Goal, Pending, Record, SimulatedBackend
from kvcheck.core.run.plan import Plan, parse_line
from kvcheck.core.stress.strategies import (
    DELAYS,
    LANE_GROUPS,
    DelayStrategy,
    EagerStrategy,
    LazyStrategy,
    RandomStrategy,
    Recorder,
    ReplayStrategy,
    decode_choices,
    encode_choices,
    make_strategy,
)


def offered(*heads: tuple[int, int]) -> list[Choice]:
    """Enabled chunks: (ordinal, chunks) of the operation at the head of each lane."""
    table: list[Choice] = []
    for index, (ordinal, chunks) in enumerate(heads):
        work = tuple([lambda: None] * chunks)
        pending = Pending(ordinal, Operation("copy", work), Lane(index, f"lane{index}"), work, Record(ordinal, deque()))
        table.extend((pending, chunk) for chunk in range(chunks))
    return table


def run(chooser: Chooser) -> list[str]:
    """What ran, in order: two lanes, three operations each, of up to three chunks; the host polls, waits and drains."""
    backend = SimulatedBackend(chooser)
    ran: list[str] = []
    lanes = (backend.lane("forward"), backend.lane("offload"))
    for turn in range(3):
        for at, lane in enumerate(lanes):
            chunks = tuple(
                (lambda name=f"{lane.name}{turn}.{chunk}": ran.append(name)) for chunk in range(1 + (turn + at) % 3)
            )
            done = backend.submit(Operation("copy", chunks), lane=lane)
        backend.query(done)
        ran.append("host")
        if turn == 1:
            backend.wait(done)
            ran.append("joined")
    backend.drain()
    return ran


def test_eager_runs_the_oldest_operation_and_never_pauses() -> None:
    table = offered((7, 1), (3, 3), (5, 1))
    for may_pause in (True, False):
        assert EagerStrategy().choose(table, may_pause=may_pause) == 1
    in_program_order = ["forward0.0", "offload0.0", "offload0.1", "host", "forward1.0", "forward1.1"]
    assert run(EagerStrategy())[:6] == in_program_order


def test_lazy_runs_nothing_until_the_host_waits() -> None:
    table = offered((1, 1), (3, 3))
    assert LazyStrategy().choose(table, may_pause=True) is None
    assert LazyStrategy().choose(table, may_pause=False) == 3
    ran = run(LazyStrategy())
    assert ran[:2] == ["host", "host"]
    before_the_wait_ended = ran[2 : ran.index("joined")]
    assert before_the_wait_ended, "waiting runs something"
    assert all(name.startswith("offload") for name in before_the_wait_ended), "the youngest lane goes first"


def on_lanes(*names: str) -> list[Choice]:
    """Enabled chunks: one operation of two chunks at the head of each lane, submitted in this order."""
    work = (lambda: None, lambda: None)
    heads = [
        Pending(at, Operation("copy", work), Lane(at, name), work, Record(at, deque()))
        for at, name in enumerate(names, start=1)
    ]
    return [(head, chunk) for head in heads for chunk in range(2)]


@pytest.mark.parametrize(
    ("group", "lanes"),
    [
        ("compute", ["forward"]),
        ("d2h", ["d2h", "hicache.d2h", "hicache.d2h.side"]),
        ("h2d", ["h2d", "hicache.h2d.0", "hicache.h2d.0.side", "hicache.h2d.1", "hicache.h2d.1.side"]),
        ("storage", ["storage", "storage.read"]),
    ],
)
def test_a_delayed_group_runs_when_nothing_else_can_and_the_process_waits(group: str, lanes: list[str]) -> None:
    everything = ["forward", "d2h", "h2d", "hicache.d2h", "hicache.h2d.1.side", "storage.read", "fabric", "notify"]
    others = [name for name in everything if name not in lanes]
    delay = DelayStrategy([group])
    mixed = on_lanes(*lanes, *reversed(others))
    for may_pause in (True, False):
        assert delay.choose(mixed, may_pause=may_pause) == 2 * len(lanes), "the oldest of the lanes that run promptly"
    alone = on_lanes(*lanes)
    assert delay.choose(alone, may_pause=True) is None
    assert delay.choose(alone[::-1], may_pause=False) == len(alone) - 1, "the oldest of the delayed ones"


def test_delays_come_one_leg_at_a_time_then_together_and_start_elsewhere_in_every_round() -> None:
    groups = ("compute", "d2h", "h2d", "storage", "wire", "state", "message", "aux")
    assert (*((group,) for group in groups), groups) == DELAYS
    count = len(DELAYS)
    picked = [make_strategy("delay", seed=1, schedule=at, choices=None) for at in range(count * count)]
    made = [each.groups for each in picked if isinstance(each, DelayStrategy)]
    assert made[:count] == list(DELAYS)
    for start in range(0, count * count, count):
        assert sorted(made[start : start + count]) == sorted(DELAYS), "every round has each"
    assert {made[at] for at in range(0, count * count, count)} == set(DELAYS), "settings of that period meet each"
    assert set(LANE_GROUPS) == set(DELAYS[-1])


def test_random_is_the_published_generator_and_nothing_else() -> None:
    # splitmix64 of 0 begins e220..., 6e78..., 06c4..., f88b...; the top two bits choose chunk 0, chunk 1 or pause.
    random, table = RandomStrategy(0), offered((1, 1), (2, 1))
    assert [random.choose(table, may_pause=True) for _ in range(4)] == [None, 1, 0, None]
    random = RandomStrategy(0)
    assert [random.choose(table[:1], may_pause=True) for _ in range(4)] == [None, 0, 0, None]
    random = RandomStrategy(0)
    assert [random.choose(table, may_pause=False) for _ in range(4)] == [1, 0, 0, 1]


@given(st.integers(), st.lists(st.tuples(st.integers(1, 40), st.booleans()), max_size=30))
def test_random_is_a_function_of_seed_and_offers_and_stays_in_bounds(seed: int, offers: list[tuple[int, bool]]) -> None:
    one, two = RandomStrategy(seed), RandomStrategy(seed)
    for chunks, may_pause in offers:
        chosen = one.choose(offered((1, chunks)), may_pause=may_pause)
        assert two.choose(offered((9, chunks)), may_pause=may_pause) == chosen
        assert may_pause if chosen is None else 0 <= chosen < chunks


def test_each_seed_and_schedule_runs_otherwise() -> None:
    made = (make_strategy("random", seed=seed, schedule=at, choices=None) for seed in (1, 2) for at in range(8))
    assert len({tuple(run(each)) for each in made}) >= 8


@pytest.mark.parametrize(
    "make",
    [
        EagerStrategy,
        LazyStrategy,
        *(lambda groups=groups: DelayStrategy(groups) for groups in DELAYS),
        *(lambda seed=seed: RandomStrategy(seed) for seed in range(12)),
    ],
)
def test_a_recorded_run_replays(make: Callable[[], Chooser]) -> None:
    recorder = Recorder(make())
    ran = run(recorder)
    assert recorder.is_whole
    again = Recorder(make_strategy("replay", seed=9, schedule=9, choices=encode_choices(bytes(recorder.choices))))
    assert run(again) == ran
    assert again.choices == recorder.choices


def test_replay_bends_what_no_longer_fits_and_ends_eagerly() -> None:
    table = offered((7, 1), (3, 2))
    replay = ReplayStrategy([0, 0, 2, 9])
    assert replay.choose(table, may_pause=True) is None
    assert replay.choose(table, may_pause=False) == 0, "a pause where the process waits would hang"
    assert replay.choose(table, may_pause=True) == 1
    assert replay.choose(table, may_pause=True) == 2, "the last chunk that there is"
    assert replay.choose(table, may_pause=True) == 1, "past its end: the oldest operation"


class Scripted:
    """Gives the answers it was made with."""

    def __init__(self, *answers: int | None) -> None:
        self._answers = list(answers)

    def choose(self, enabled: object, *, may_pause: bool, goal: Goal | None = None) -> int | None:
        return self._answers.pop(0)


def test_a_recorder_that_cannot_keep_everything_says_so_and_does_not_interfere() -> None:
    short = Recorder(Scripted(None, 0, 4), limit=2)
    assert [short.choose([], may_pause=True) for _ in range(3)] == [None, 0, 4]
    assert (short.choices, short.is_whole) == (bytearray([0, 1]), False)
    wide = Recorder(Scripted(254, 255))
    assert wide.choose([], may_pause=True) == 254
    assert wide.is_whole
    assert wide.choose([], may_pause=True) == 255
    assert (wide.choices, wide.is_whole) == (bytearray([255]), False)


def test_a_strategy_that_cannot_be_made_says_why() -> None:
    with pytest.raises(UsageError, match="replay needs recorded choices"):
        make_strategy("replay", seed=1, schedule=0, choices=None)
    with pytest.raises(UsageError, match="flip needs the two operations"):
        make_strategy("flip", seed=1, schedule=0, choices=None)
    with pytest.raises(UsageError, match=r"expected one of the orders eager, .*answers, delay:compute"):
        make_strategy("portfolio", seed=1, schedule=0, choices=None, order="delay:colour")
    with pytest.raises(UsageError, match=r"unknown strategy 'eagre'.*did you mean 'eager'\?"):
        make_strategy("eagre", seed=1, schedule=0, choices=None)


# Recorded choices as text


@given(st.binary(max_size=400))
@example(b"")
@example(bytes(200_000))
def test_choices_survive_as_text(choices: bytes) -> None:
    text = encode_choices(choices)
    assert decode_choices(text) == choices
    assert re.fullmatch(r"[A-Za-z0-9_-]+", text)
    plan = Plan(scenario="x", shape="a", strategy="replay", choices=text)
    assert parse_line(plan.line()).choices == text


GOOD = encode_choices(bytes([0, 1, 2, 0, 3] * 20))


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("", id="empty"),
        pytest.param("A", id="no base64"),
        pytest.param("not recorded choices", id="prose"),
        pytest.param(GOOD[:-4], id="cut"),
        pytest.param(GOOD[4:], id="head missing"),
        pytest.param(GOOD[:6] + GOOD[7:], id="one character lost"),
        pytest.param(GOOD[:6] + ("A" if GOOD[6] != "A" else "B") + GOOD[7:], id="one character changed"),
        pytest.param("é" + GOOD, id="not ASCII"),
    ],
)
def test_damaged_choices_are_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError, match="choices are damaged") as caught:
        decode_choices(text)
    assert "copy the whole line" in str(caught.value)


@given(st.text(max_size=40))
def test_any_text_is_choices_or_a_usage_error(text: str) -> None:
    try:
        assert isinstance(decode_choices(text), bytes)
    except UsageError as error:
        assert "choices are damaged" in str(error)
