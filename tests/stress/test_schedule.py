"""A printed line says the whole schedule, survives a shell, and gives the recorded choices back.

Invariants:
- Whatever a plan holds, its line gives the same plan back; whatever else is typed is a UsageError that says why.
"""

from __future__ import annotations

import re
import shlex
import shutil
import string
import subprocess

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvcheck.core.base.errors import UsageError
from kvcheck.core.stress.schedule import Kind, Plan, parse_line
from kvcheck.core.stress.strategies import STRATEGIES, decode_choices, encode_choices

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
@example(Plan(scenario="retract-resume", probe="retract.nsa", target="sglang:/a b/env"))
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
        "retract-resume:shape=glm-5.1-tiny,mutant=index-not-saved,device=cuda:0,strategy=random,seed=7,schedule=3,"
        "requests=12,trace=traces/an%20hour.jsonl,expect=KV102"
    )


def test_a_probe_stands_under_the_key_of_the_shape() -> None:
    plan = parse_line("retract-resume:shape=retract.nsa,target=sglang,seed=3,schedule=0")
    assert (plan.probe, plan.shape, plan.kind) == ("retract.nsa", "", Kind.PROBE)
    assert plan.line() == "retract-resume:shape=retract.nsa,target=sglang,seed=3,schedule=0"
    assert plan.cell == "retract-resume/retract.nsa"
    with pytest.raises(UsageError, match="got 'probe=retract'"):
        parse_line("retract-resume:shape=a,probe=retract")


def test_a_line_may_leave_out_all_but_the_shape_and_may_name_keys_in_any_order() -> None:
    assert parse_line("x:shape=llama-3-tiny") == Plan(scenario="x", shape="llama-3-tiny")
    assert parse_line("x:seed=4,shape=a") == parse_line("x:shape=a,seed=4")


def test_an_ordinary_line_needs_no_quotes() -> None:
    choices = encode_choices(bytes(range(200)))
    plan = Plan(scenario="retract-resume", shape="a", strategy="replay", trace="/t/a b.jsonl", choices=choices)
    assert shlex.quote(plan.line()) == plan.line()
    assert shlex.split(f"kvcheck replay {plan.line()}") == ["kvcheck", "replay", plan.line()]


@pytest.mark.processes
@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("trace", ODD_TRACES)
def test_a_real_shell_passes_a_line_on_unchanged(shell: str, trace: str) -> None:
    line = Plan(scenario="retract-resume", shape="a", trace=trace, mutant="~").line()
    done = subprocess.run([shell, "-c", f"printf %s {line}"], capture_output=True, text=True, check=True, timeout=20)
    assert done.stdout == line
    assert parse_line(done.stdout).trace == trace


@pytest.mark.processes
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
