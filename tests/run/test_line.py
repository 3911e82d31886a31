"""One codec for the lines of all plans: a line holds the whole plan and survives a shell."""

from __future__ import annotations

import re
import shutil
import string
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvcheck.core.base.errors import UsageError
from kvcheck.core.live.line import LivePlan, OwnPlan, parse_live_line, parse_own_line
from kvcheck.core.live.scenarios import LIVE_SCENARIOS
from kvcheck.core.run.plan import Plan, parse_line
from kvcheck.core.stress.strategies import STRATEGIES

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
    "\udc80 of no encoding",
    "",
)

WORDS = st.from_regex(r"[a-z0-9][a-z0-9.-]{0,12}", fullmatch=True)
NUMBERS = st.integers(min_value=-(10**20) + 1, max_value=10**20 - 1)
COUNTS = st.integers(min_value=0, max_value=10**20 - 1)
FILLED = st.text(min_size=1, max_size=30) | st.sampled_from(ODD_TRACES[:-1])
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
OF_SERVERS: dict[str, Any] = {
    "target": FILLED,
    "decode": TEXTS,
    "engine": TEXTS,
    "seed": NUMBERS,
    "round": COUNTS,
    "names": COUNTS,
    "requests": st.integers(1, 1000),
    "concurrency": st.integers(1, 1000),
    "longest": COUNTS,
    "pool": st.none() | COUNTS,
    "admin": st.integers(0, 1),
}
SITUATIONS = st.sampled_from(LIVE_SCENARIOS.names())


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of lines. head, needed: how a valid line begins."""

    name: str
    parse: Callable[[str], Any]
    plans: st.SearchStrategy[Any]
    noun: str
    head: str
    needed: str

    def line(self, *pairs: str) -> str:
        """A line with what is needed, and these pairs."""
        return f"{self.head}:{','.join((self.needed, *pairs))}"


KINDS = (
    Kind("schedule", parse_line, PLANS, "schedule line", "hicache", "shape=a"),
    Kind(
        "server",
        parse_live_line,
        st.builds(LivePlan, scenario=SITUATIONS, known_answers=FILLED, **OF_SERVERS),
        "line of a running server",
        "hicache",
        "target=http%3A//a%3A1,known-answers=d",
    ),
    Kind(
        "own model",
        parse_own_line,
        st.builds(OwnPlan, situation=SITUATIONS, vocabulary=COUNTS, **OF_SERVERS),
        "line of an own model",
        "own-model/hicache",
        "target=http%3A//a%3A1",
    ),
)
EACH_KIND = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)


# All kinds


@EACH_KIND
@given(data=st.data())
def test_a_line_gives_its_plan_back_and_needs_no_quotes(kind: Kind, data: st.DataObject) -> None:
    plan = data.draw(kind.plans)
    line = plan.line()
    assert kind.parse(line) == kind.parse(f"  {line}\n") == plan
    assert re.fullmatch(r"[A-Za-z0-9:=,./_~%-]+", line), "these characters are what a shell leaves alone"


@pytest.mark.parametrize(
    ("plan", "line"),
    [
        (Plan(scenario="hicache", shape="glm-5.1-tiny"), "hicache:shape=glm-5.1-tiny,seed=1,schedule=0"),
        (
            Plan(
                scenario="retract-resume",
                shape="glm-5.1-tiny",
                mutant="index-not-saved",
                device="cuda:0",
                strategy="random",
                seed=-7,
                schedule=3,
                requests=12,
                trace="traces/an hour.jsonl",
                expect="KV102",
            ),
            "retract-resume:shape=glm-5.1-tiny,mutant=index-not-saved,device=cuda:0,strategy=random,seed=-7,schedule=3,"
            "requests=12,trace=traces/an%20hour.jsonl,expect=KV102",
        ),
        (
            Plan(scenario="offload", probe="cpu_offload.sent", target="vllm:/a b", engine_env="A=1\nB=2"),
            "offload:shape=cpu_offload.sent,target=vllm:/a%20b,seed=1,schedule=0,engine_env=A%3D1%0AB%3D2",
        ),
        (
            LivePlan(scenario="hicache", target="http://a:1", known_answers="models/tiny", longest=99, pool=4096),
            "hicache:target=http%3A//a%3A1,known-answers=models/tiny,seed=1,round=0,names=0,longest=99,pool=4096",
        ),
        (
            OwnPlan(situation="prefix-cache", target="http://a:1", decode="http://b:2", vocabulary=9, requests=24),
            "own-model/prefix-cache:target=http%3A//a%3A1,decode=http%3A//b%3A2,seed=1,round=0,names=0,vocabulary=9,"
            "requests=24",
        ),
    ],
)
def test_defaults_are_left_out_except_what_a_reader_looks_for(plan: Any, line: str) -> None:
    assert plan.line() == line


@EACH_KIND
def test_a_line_may_leave_out_what_has_a_default_and_name_keys_in_any_order(kind: Kind) -> None:
    last = "names" if kind.name != "schedule" else "schedule"
    assert kind.parse(kind.line()).seed == 1
    assert kind.parse(kind.line("seed=4", f"{last}=5")) == kind.parse(f"{kind.head}:seed=4,{kind.needed},{last}=5")


@EACH_KIND
@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", ":key=value,..., got ''"),
        ("{head}", ":key=value,..., got '{head}'"),
        (":{needed}", ":key=value,..., got ':{needed}'"),
        ("{head}:", "as key=value, got ''"),
        ("{head}:{needed},", "as key=value, got ''"),
        ("{head}:{needed},,seed=1", "as key=value, got ''"),
        ("{head}:seed", "as key=value, got 'seed'"),
        ("{head}:{needed},sede=1", "as key=value, got 'sede=1'"),
        ("{head}:{needed},scenario=y", "as key=value, got 'scenario=y'"),
        ("{head}:{needed} seed=1,color=red", "as key=value, got 'color=red'"),
        ("{head}:{needed},seed=1,seed=1", "each key once, got seed twice"),
        ("{head}:{needed},target=%G1", "{twice}"),
        ("{head}:seed=1", "=..., found none"),
        ("{head}:{needed},seed=one", "seed must be an integer, got 'one'"),
        ("{head}:{needed},seed=", "seed must be an integer, got ''"),
        ("{head}:{needed},seed=1.5", "seed must be an integer, got '1.5'"),
        ("{head}:{needed},seed=1-1", "seed must be an integer, got '1-1'"),
        ("{head}:{needed},seed=" + "9" * 30, "at most 20 digits"),
        ("{head}:{needed},pool=1_0", "{pool}"),
        ("{head}:{needed},requests=--1", "requests must be an integer, got '--1'"),
        ("{head}:{needed},requests=-1", "requests must be an integer, got '-1' (at most 20 digits, not negative)"),
        ("{head}:{needed},requests=%C2%B2", "requests must be an integer, got '²'"),
        ("{head}:{needed},requests=None", "requests must be an integer, got 'None'"),
    ],
)
def test_a_bad_line_says_what_was_expected_and_found(kind: Kind, line: str, words: str) -> None:
    is_schedule = kind.name == "schedule"
    own = {
        "head": kind.head,
        "needed": kind.needed,
        "twice": "%XX escapes in target, got '%G1'" if is_schedule else "each key once, got target twice",
        "pool": "got 'pool=1_0'" if is_schedule else "pool must be an integer, got '1_0'",
    }
    with pytest.raises(UsageError) as caught:
        kind.parse(line.format(**own))
    assert str(caught.value).startswith(f"{kind.noun}: ")
    assert words.format(**own) in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("hicache:known-answers=d", "expected target=..., found none"),
        ("hicache:known-answers=,target=t", "expected known-answers=..., found none"),
        ("own-model/hicache:target=", "expected target=..., found none"),
        ("nothing:known-answers=d,target=t", "unknown scenario of a running server 'nothing'"),
        ("own-model/nothing:target=t", "unknown scenario of a running server 'nothing'"),
        ("hicache:known-answers=d,target=t,requests=0", "--requests: expected 1 to"),
        ("own-model/hicache:target=t,requests=0", "--requests: expected 1 to"),
        ("hicache:known-answers=d,target=t,concurrency=99999", "--concurrency: expected 1 to"),
    ],
)
def test_a_line_of_a_server_names_a_scenario_a_server_and_sizes_that_can_be_sent(line: str, words: str) -> None:
    with pytest.raises(UsageError, match=re.escape(words)):
        (parse_own_line if line.startswith("own") else parse_live_line)(line)


@EACH_KIND
def test_an_unknown_key_lists_the_known_ones_and_does_not_flood_the_terminal(kind: Kind) -> None:
    with pytest.raises(UsageError) as caught:
        kind.parse(f"{kind.head}:{'long' * 500}=1")
    assert all(key in str(caught.value) for key in ("seed", "requests", "target"))
    assert len(str(caught.value)) < 400


@EACH_KIND
@given(text=st.text(max_size=60) | st.text(alphabet="x:=,seedhap%12~", max_size=40))
def test_any_text_is_a_plan_or_a_usage_error(kind: Kind, text: str) -> None:
    try:
        plan = kind.parse(text)
    except UsageError as error:
        assert str(error).startswith(f"{kind.noun}: ")
    else:
        assert kind.parse(plan.line()) == plan


# Lines of schedules


@given(PLANS)
@example(Plan(scenario="retract-resume", shape="", target="", mutant="", trace="", choices="", expect=""))
@example(Plan(scenario="retract-resume", shape=string.punctuation, trace=string.whitespace))
@example(Plan(scenario="retract-resume", shape="None", mutant="None", requests=0))
@example(Plan(scenario="retract-resume", probe="retract.nsa", target="sglang:/a b/env"))
@settings(max_examples=20)
def test_odd_texts_of_a_schedule_come_back(plan: Plan) -> None:
    assert parse_line(plan.line()) == plan


def test_a_probe_stands_under_the_key_of_the_shape() -> None:
    plan = parse_line("retract-resume:shape=retract.nsa,target=sglang,seed=3,schedule=0")
    assert (plan.probe, plan.shape, plan.is_in_process) == ("retract.nsa", "", False)
    assert plan.line() == "retract-resume:shape=retract.nsa,target=sglang,seed=3,schedule=0"
    assert plan.cell == "retract-resume/retract.nsa"
    with pytest.raises(UsageError, match="got 'probe=retract'"):
        parse_line("retract-resume:shape=a,probe=retract")


@pytest.mark.processes
@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("trace", ODD_TRACES)
def test_a_real_shell_passes_a_line_on_unchanged(shell: str, trace: str) -> None:
    line = Plan(scenario="retract-resume", shape="a", trace=trace, mutant="~").line()
    done = subprocess.run([shell, "-c", f"printf %s {line}"], capture_output=True, text=True, check=True, timeout=20)
    assert done.stdout == line
    assert parse_line(done.stdout).trace == trace
