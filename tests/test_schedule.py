"""A printed line says the whole schedule, survives a shell, and strategies do as they are told, every time.

Invariants:
- Whatever a plan holds, its line gives the same plan back; whatever else is typed is a UsageError that says why.
"""

from __future__ import annotations

import re
import shlex
import shutil
import string
import subprocess
from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvcheck.core.backend.backend import Lane, Operation
from kvcheck.core.backend.simulated import Choice, Chooser, Pending, Record, SimulatedBackend
from kvcheck.core.errors import UsageError
from kvcheck.core.stress.schedule import Plan, parse_line
from kvcheck.core.stress.strategies import (
    STRATEGIES,
    EagerStrategy,
    LazyStrategy,
    RandomStrategy,
    Recorder,
    ReplayStrategy,
    decode_choices,
    encode_choices,
    make_strategy,
)

SHELLS = [name for name in ("bash", "dash", "zsh", "sh") if shutil.which(name)]
ODD_TRACES = (
    "my traces/hour,1=a.jsonl",
    "~/x~y.jsonl",
    "~",
    "a%2Cb%.jsonl",
    "$(id)`id`$HOME.jsonl",
    "a'b\"c\\d;e&f|g>h<i*?[j]{k,l}!m#n(o)^p",
    string.punctuation,
    " leading and trailing ",
    "tab\tnewline\ncarriage\r",
    "žluťoučký-追跡-🚀.jsonl",
    "",
)

WORDS = st.from_regex(r"[a-z0-9][a-z0-9.-]{0,12}", fullmatch=True)
NUMBERS = st.integers(min_value=-(10**20) + 1, max_value=10**20 - 1)
COUNTS = st.integers(min_value=0, max_value=10**20 - 1)
TEXTS = st.none() | st.text(max_size=30) | st.sampled_from(ODD_TRACES)
PLANS = st.builds(
    Plan,
    scenario=WORDS,
    shape=st.text(max_size=20),
    target=st.text(max_size=20),
    mutant=TEXTS,
    backend=WORDS,
    device=st.sampled_from(("cpu", "cuda", "cuda:1")),
    transport=WORDS,
    strategy=st.sampled_from(STRATEGIES.names()),
    seed=NUMBERS,
    schedule=COUNTS,
    requests=st.none() | COUNTS,
    trace=TEXTS,
    choices=TEXTS,
    expect=TEXTS,
)


# Lines


@given(PLANS)
@example(Plan(scenario="retract-resume", shape="glm-5.1-tiny"))
@example(Plan(scenario="retract-resume", shape="", target="", mutant="", trace="", choices="", expect=""))
@example(Plan(scenario="retract-resume", shape=string.punctuation, trace=string.whitespace))
@example(Plan(scenario="retract-resume", shape="None", mutant="None", requests=0))
def test_a_line_gives_its_plan_back(plan: Plan) -> None:
    line = plan.line()
    assert parse_line(line) == plan
    assert parse_line(f"  {line}\n") == plan
    assert re.fullmatch(r"[A-Za-z0-9:=,./_~%-]+", line), "these characters are what a shell leaves alone"


def test_defaults_are_left_out_except_seed_and_schedule() -> None:
    plain = Plan(scenario="retract-resume", shape="glm-5.1-tiny")
    assert plain.line() == "retract-resume:shape=glm-5.1-tiny,seed=1,schedule=0"
    full = Plan(
        scenario="retract-resume",
        shape="glm-5.1-tiny",
        mutant="index-not-saved",
        device="cuda:0",
        strategy="random",
        seed=7,
        schedule=3,
        requests=12,
        trace="traces/an hour.jsonl",
        expect="KV102",
    )
    assert full.line() == (
        "retract-resume:shape=glm-5.1-tiny,mutant=index-not-saved,device=cuda%3A0,strategy=random,seed=7,schedule=3,"
        "requests=12,trace=traces/an%20hour.jsonl,expect=KV102"
    )


def test_a_line_may_leave_out_all_but_the_shape_and_may_name_keys_in_any_order() -> None:
    assert parse_line("x:shape=llama-3-tiny") == Plan(scenario="x", shape="llama-3-tiny")
    assert parse_line("x:seed=4,shape=a") == parse_line("x:shape=a,seed=4")


def test_an_ordinary_line_needs_no_quotes() -> None:
    choices = encode_choices(bytes(range(200)))
    plan = Plan(scenario="retract-resume", shape="a", strategy="replay", trace="/t/a b.jsonl", choices=choices)
    assert shlex.quote(plan.line()) == plan.line()
    assert shlex.split(f"kvcheck replay {plan.line()}") == ["kvcheck", "replay", plan.line()]


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("trace", ODD_TRACES)
def test_a_real_shell_passes_a_line_on_unchanged(shell: str, trace: str) -> None:
    line = Plan(scenario="retract-resume", shape="a", trace=trace, mutant="~").line()
    done = subprocess.run([shell, "-c", f"printf %s {line}"], capture_output=True, text=True, check=True, timeout=20)
    assert done.stdout == line
    assert parse_line(done.stdout).trace == trace


@given(PLANS)
@settings(max_examples=20)
@pytest.mark.skipif("bash" not in SHELLS, reason="there is no bash on this machine")
def test_bash_passes_any_line_on_unchanged(plan: Plan) -> None:
    done = subprocess.run(
        ["bash", "-c", f"printf %s {plan.line()}"], capture_output=True, text=True, check=True, timeout=20
    )
    assert parse_line(done.stdout) == plan


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", "expected SCENARIO:key=value,..., got ''"),
        ("retract-resume", "expected SCENARIO:key=value,..., got 'retract-resume'"),
        (":shape=a", "expected SCENARIO:key=value,..., got ':shape=a'"),
        ("x:", "as key=value, got ''"),
        ("x:shape=a,", "as key=value, got ''"),
        ("x:shape=a,,seed=1", "as key=value, got ''"),
        ("x:shape", "as key=value, got 'shape'"),
        ("x:shape=a,sede=1", "as key=value, got 'sede=1'"),
        ("x:shape=a,scenario=y", "as key=value, got 'scenario=y'"),
        ("x:shape=a seed=1,color=red", "as key=value, got 'color=red'"),
        ("x:seed=1", "expected shape=NAME, found none"),
        ("x:shape=a,seed=one", "seed must be an integer, got 'one'"),
        ("x:shape=a,seed=", "seed must be an integer, got ''"),
        ("x:shape=a,seed=1.5", "seed must be an integer, got '1.5'"),
        ("x:shape=a,schedule=--1", "schedule must be an integer, got '--1'"),
        ("x:shape=a,schedule=1_0", "schedule must be an integer, got '1_0'"),
        ("x:shape=a,requests=%C2%B2", "requests must be an integer, got '²'"),
        ("x:shape=a,requests=None", "requests must be an integer, got 'None'"),
    ],
)
def test_a_bad_line_says_what_was_expected_and_found(line: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_line(line)
    assert str(caught.value).startswith("schedule line: ")
    assert words in str(caught.value)
    assert caught.value.exit_code == 2


def test_an_unknown_key_lists_the_known_ones_and_does_not_flood_the_terminal() -> None:
    with pytest.raises(UsageError) as caught:
        parse_line(f"x:{'long' * 500}=1")
    assert all(key in str(caught.value) for key in ("seed", "schedule", "shape", "trace", "choices", "expect"))
    assert len(str(caught.value)) < 400


@given(st.text(max_size=60) | st.text(alphabet="x:=,seedhap%12~", max_size=40))
def test_any_text_is_a_plan_or_a_usage_error(text: str) -> None:
    try:
        plan = parse_line(text)
    except UsageError as error:
        assert str(error).startswith("schedule line: ")
    else:
        assert parse_line(plan.line()) == plan


# Choices


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


# Strategies


def offered(*heads: tuple[int, int]) -> list[Choice]:
    """Enabled parts: (ordinal, parts) of the operation at the head of each lane."""
    table: list[Choice] = []
    for index, (ordinal, parts) in enumerate(heads):
        work = tuple([lambda: None] * parts)
        pending = Pending(ordinal, Operation("copy", work), Lane(index, f"lane{index}"), work, Record(ordinal))
        table.extend((pending, part) for part in range(parts))
    return table


def run(chooser: Chooser) -> list[str]:
    """What ran, in order: two lanes, three operations each, of up to three parts; the host polls, waits and drains."""
    backend = SimulatedBackend(chooser)
    ran: list[str] = []
    lanes = (backend.lane("forward"), backend.lane("offload"))
    for turn in range(3):
        for at, lane in enumerate(lanes):
            parts = tuple(
                (lambda name=f"{lane.name}{turn}.{part}": ran.append(name)) for part in range(1 + (turn + at) % 3)
            )
            done = backend.submit(Operation("copy", parts), lane=lane)
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


def test_random_is_the_published_generator_and_nothing_else() -> None:
    # splitmix64 of 0 begins e220..., 6e78..., 06c4..., f88b...; the top two bits choose among part 0, part 1 and pause.
    random, table = RandomStrategy(0), offered((1, 1), (2, 1))
    assert [random.choose(table, may_pause=True) for _ in range(4)] == [None, 1, 0, None]
    random = RandomStrategy(0)
    assert [random.choose(table[:1], may_pause=True) for _ in range(4)] == [None, 0, 0, None]
    random = RandomStrategy(0)
    assert [random.choose(table, may_pause=False) for _ in range(4)] == [1, 0, 0, 1]


@given(st.integers(), st.lists(st.tuples(st.integers(1, 40), st.booleans()), max_size=30))
def test_random_is_a_function_of_seed_and_offers_and_stays_in_bounds(seed: int, offers: list[tuple[int, bool]]) -> None:
    one, two = RandomStrategy(seed), RandomStrategy(seed)
    for parts, may_pause in offers:
        chosen = one.choose(offered((1, parts)), may_pause=may_pause)
        assert two.choose(offered((9, parts)), may_pause=may_pause) == chosen
        assert may_pause if chosen is None else 0 <= chosen < parts


def test_equal_seeds_run_equally_and_other_seeds_run_otherwise() -> None:
    def ran(seed: int, schedule: int) -> list[str]:
        return run(make_strategy("random", seed=seed, schedule=schedule, choices=None))

    assert ran(1, 5) == ran(1, 5)
    assert len({tuple(ran(seed, schedule)) for seed in (1, 2) for schedule in range(8)}) >= 8


@pytest.mark.parametrize(
    "make", [EagerStrategy, LazyStrategy, *(lambda seed=seed: RandomStrategy(seed) for seed in range(12))]
)
def test_a_recorded_run_replays(make: Callable[[], Chooser]) -> None:
    recorder = Recorder(make())
    ran = run(recorder)
    assert recorder.is_whole
    again = Recorder(make_strategy("replay", seed=9, schedule=9, choices=encode_choices(bytes(recorder.choices))))
    assert run(again) == ran
    assert again.choices == recorder.choices


def test_every_part_runs_once_whatever_the_strategy() -> None:
    for make in (EagerStrategy, LazyStrategy, RandomStrategy):
        ran = [name for name in run(make()) if name not in ("host", "joined")]
        assert len(ran) == len(set(ran)) == 1 + 2 + 2 + 3 + 3 + 1


def test_replay_bends_what_no_longer_fits_and_ends_eagerly() -> None:
    table = offered((7, 1), (3, 2))
    replay = ReplayStrategy([0, 0, 2, 9])
    assert replay.choose(table, may_pause=True) is None
    assert replay.choose(table, may_pause=False) == 0, "a pause where the host waits would hang"
    assert replay.choose(table, may_pause=True) == 1
    assert replay.choose(table, may_pause=True) == 2, "the last part that there is"
    assert replay.choose(table, may_pause=True) == 1, "past its end: the oldest operation"


class Scripted:
    """Gives the answers it was made with."""

    def __init__(self, *answers: int | None) -> None:
        self._answers = list(answers)

    def choose(self, enabled: object, *, may_pause: bool) -> int | None:
        """The next answer."""
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


@pytest.mark.parametrize(
    ("schedule", "kind"), [(0, EagerStrategy), (1, LazyStrategy), (2, RandomStrategy), (99, RandomStrategy)]
)
def test_the_portfolio_is_eager_then_lazy_then_random(schedule: int, kind: type[Chooser]) -> None:
    assert type(make_strategy("portfolio", seed=1, schedule=schedule, choices=None)) is kind


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("portfolio", RandomStrategy),
        ("eager", EagerStrategy),
        ("lazy", LazyStrategy),
        ("random", RandomStrategy),
        ("replay", ReplayStrategy),
    ],
)
def test_every_strategy_in_the_table_can_be_made(name: str, kind: type[Chooser]) -> None:
    assert type(make_strategy(name, seed=1, schedule=4, choices=encode_choices(b"\0\1"))) is kind
    assert name in STRATEGIES.names()


def test_a_strategy_that_cannot_be_made_says_why() -> None:
    with pytest.raises(UsageError, match="replay needs recorded choices"):
        make_strategy("replay", seed=1, schedule=0, choices=None)
    with pytest.raises(UsageError, match=r"unknown strategy 'eagre'.*did you mean 'eager'\?"):
        make_strategy("eagre", seed=1, schedule=0, choices=None)
