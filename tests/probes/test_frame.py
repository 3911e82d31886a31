"""Parts of the engine frame alone: stand-in streams, stand-in packages, names, tensors found by looking, content."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace

import pytest
import torch

from kvcheck.core.base.rng import Rng
from kvcheck.core.probes.frame.buffer_views import inventory
from kvcheck.core.probes.frame.content import ContentWriter, ProbeJudge
from kvcheck.core.probes.frame.guard import CannotDrive, Fault, attempt, fitted
from kvcheck.core.probes.frame.names import Names
from kvcheck.core.probes.frame.probe import Rig, Stop, run
from kvcheck.core.probes.frame.streams import LAZY, RANDOM, Machine, SideEvent, SideStream
from kvcheck.core.probes.frame.stubs import ASKERS, Stubs
from kvcheck.core.probes.frame.wire import decode
from kvcheck.core.probes.sglang.rig.scheduler_loop import end_of

ENGINE = "an_engine"
UNITS = {"token": 12, "state": 5}


@pytest.fixture
def machine() -> Machine:
    made = Machine()
    SideStream.machine = SideEvent.machine = made
    return made


@pytest.fixture
def stubs() -> Iterator[Stubs]:
    made = Stubs(ENGINE, ("a_kernel",))
    made.install()
    yield made
    made.uninstall()


def as_module(name: str, source: str) -> ModuleType:
    module = ModuleType(name)
    exec(compile(source, f"/of/a/user/{name.replace('.', '/')}.py", "exec"), module.__dict__)
    return module


def rig_of(subject: str, machine: Machine) -> Rig:
    return Rig(
        package=ENGINE,
        names=Names({}),
        machine=machine,
        stubs=Stubs(ENGINE, ()),
        subject=subject,
        schedule=0,
        mix=Rng(1),
    )


def queued(machine: Machine, order: str, seed: int = 1) -> tuple[list[int], list[SideEvent]]:
    """Six pieces on a side stream, an event behind each."""
    machine.reset(order, seed)
    done: list[int] = []
    events = [SideEvent() for _ in range(6)]
    with machine.on(SideStream()):
        for number, event in enumerate(events):
            machine.queue(lambda number=number: done.append(number))  # type: ignore[misc]
            event.record()
    return done, events


def test_lazy_work_runs_as_far_as_somebody_waits(machine: Machine) -> None:
    done, events = queued(machine, LAZY)
    assert done == [] and not events[2].query()
    machine.current.wait_event(events[2])
    assert done == [0, 1, 2] and events[2].query() and not events[3].query()
    machine.synchronize()
    assert done == [0, 1, 2, 3, 4, 5]


def test_random_work_follows_its_seed(machine: Machine) -> None:
    runs = [tuple(queued(machine, RANDOM, seed)[0]) for seed in range(12)]
    assert runs == [tuple(queued(machine, RANDOM, seed)[0]) for seed in range(12)]
    assert len({len(run) for run in runs}) > 2 and all(run == tuple(range(len(run))) for run in runs)


def test_wait_of_a_side_stream_orders_it_and_nobody_else(machine: Machine) -> None:
    done, events = queued(machine, LAZY)
    other = SideStream()
    other.wait_event(events[0])
    with machine.on(other):
        machine.queue(lambda: done.append(9))
    assert done == []
    other.synchronize()
    assert done == [0, 9]


def test_wait_binds_to_the_record_at_that_time(machine: Machine) -> None:
    machine.reset(LAZY, 0)
    done: list[str] = []
    side, event = SideStream(), SideEvent()
    machine.current.wait_event(event)  # never recorded: nothing to wait for
    with side:
        machine.queue(lambda: done.append("first"))
        event.record()
    bound = event.mark()
    with side:
        machine.queue(lambda: done.append("second"))
        event.record()
    bound()
    assert done == ["first"]
    event.synchronize()
    assert done == ["first", "second"]


def test_stub_is_served_to_the_engine_alone(stubs: Stubs) -> None:
    with pytest.raises(ModuleNotFoundError):
        as_module("a_library", "import a_kernel")
    with pytest.raises(ModuleNotFoundError):
        as_module(f"{ENGINE}.part", "import another_kernel")
    module = as_module(f"{ENGINE}.part", "from a_kernel.ops import run\nclass Mine(run.Base): pass")
    assert list(stubs.served) == ["a_kernel", "a_kernel.ops"] and not stubs.calls
    assert module.Mine.__mro__[1] is object
    as_module("a_library", "import a_kernel.more")  # it is there by now, so all of it is


def test_a_library_that_insists_on_a_package_is_served_it(monkeypatch: pytest.MonkeyPatch, stubs: Stubs) -> None:
    look = "import importlib.util\nfound = importlib.util.find_spec('a_kernel') is not None"
    assert not as_module("a_library.utils", look).found
    monkeypatch.setitem(ASKERS, "a_kernel", "a_library")
    assert as_module("a_library.utils", look).found and not as_module("another_library", look).found


def test_calls_of_stubs_are_counted_and_seen_by_open_windows(stubs: Stubs) -> None:
    module = as_module(f"{ENGINE}.part", "import a_kernel\na_kernel.load()\ndef go(): return a_kernel.copy(1).more()")
    with stubs.window() as called:
        module.go()
    module.go()
    assert called == {"a_kernel.copy": 1, "a_kernel.copy().more": 1}
    assert stubs.calls["a_kernel.copy"] == 2 and stubs.calls["a_kernel.load"] == 1


def test_real_package_is_never_stood_in_for() -> None:
    made = Stubs(ENGINE, ("json",))
    made.install()
    try:
        assert as_module(f"{ENGINE}.part", "import json").json.dumps([1]) == "[1]" and not made.served
    finally:
        made.uninstall()


def test_names_are_tried_in_order_and_what_is_missing_is_named() -> None:
    names = Names({"new": ("json:nope", "json:dumps"), "method": ("json:JSONEncoder.encode",), "gone": ("no.such:x",)})
    assert names.find("new").place == "json:dumps" and names["method"].__name__ == "encode"
    with pytest.raises(CannotDrive, match=r"no gone \(tried no.such:x: ModuleNotFoundError"):
        names.require(("new", "gone"))


def test_fault_of_the_engine_is_told_from_a_wrong_call_of_ours() -> None:
    module = as_module(f"{ENGINE}.part", "def bad(): return [][1]\ndef bare(x): return x.nothing")
    bad = attempt(module.bad, ENGINE)
    assert isinstance(bad, Fault) and bad.is_engine and bad.where.startswith(f"{ENGINE}.part, line 1")
    bare = attempt(lambda: module.bare(SimpleNamespace()), ENGINE)
    assert isinstance(bare, Fault) and not bare.is_engine
    ours = attempt(lambda: fitted(lambda x: x / 0, {"x": 1}), ENGINE)
    assert isinstance(ours, Fault) and not ours.is_engine


def test_parameters_are_filled_by_name() -> None:
    def wants(size: int, *, page: int = 2, **rest: int) -> tuple[int, int, dict[str, int]]:
        return size, page, rest

    assert fitted(wants, {"size": 1, "page": 5, "other": 6}) == (1, 5, {})
    with pytest.raises(CannotDrive, match="wants asks for size, which no probe knows"):
        fitted(wants, {"page": 5})


def pool() -> object:
    """An object of the engine with buffers here, below and stacked, and a few that are none."""
    inner = type("Inner", (), {"__module__": f"{ENGINE}.inner"})()
    inner.states = torch.zeros(2, 5, 4)
    made = type("Pool", (), {"__module__": f"{ENGINE}.pool"})()
    made.k = [torch.zeros(12, 2, 8) for _ in range(2)]
    made.inner = inner
    made.alias = made.k[0]
    made.pointers = torch.zeros(12, dtype=torch.int64)
    return made


def test_tensors_are_found_wherever_they_hang() -> None:
    made = pool()
    made.odd = torch.zeros(7, 3)  # type: ignore[attr-defined]
    found = inventory(made, ENGINE, UNITS)
    assert [(each.name, each.layer, each.unit) for each in found.buffers] == [
        ("k", 0, "token"),
        ("k", 1, "token"),
        ("inner.states", 0, "state"),
        ("inner.states", 1, "state"),
    ]
    assert found.unknown == ("odd[0]: [7, 3]",)


def test_a_conditional_finding_stands_in_no_other_ones_way() -> None:
    writer, judge = ContentWriter(inventory(pool(), ENGINE, UNITS)), ProbeJudge()
    held, seen = writer.found.buffers[0], writer.found.buffers[0].rows[[3, 4]]
    for condition in ("lists differ", "lists differ", None, None):
        judge.compare(held, seen, request=1, positions=(0, 1), ids=(3, 4), when="read", condition=condition)
    assert [each.condition for each in judge.findings] == ["lists differ", None]


CONTROLLER = """\
class Controller:
    def write(self, copy, left):
        self.start(copy, left)

    def start(self, copy, left):
        return [self.write(copy, left - 1) if left else move(copy) for _ in range(1)]

    def look(self, fails):
        return 1 / (not fails)


def move(copy):
    copy()
"""


def called(rig: Rig, code: str) -> object:
    rig.judge.find(code, "contract", "wrong")
    (found,) = [each for each in rig.judge.findings if each.code == code]
    return (found.minimal or {}).get("called")


@pytest.mark.parametrize(
    ("left", "chain"),
    [(0, "Controller.write > start > move"), (2, "Controller.write > start > … > start > move")],
)
def test_finding_names_the_functions_of_a_recorded_operation(left: int, chain: str, machine: Machine) -> None:
    rig, engine = rig_of("", machine), as_module(f"{ENGINE}.part", CONTROLLER).Controller()
    rig.measured(lambda: engine.write(rig.record, left), "write")
    rig.measured(lambda: engine.look(False), "look", is_aside=True)
    assert called(rig, "KV301") == f"{chain}   {ENGINE}/part.py:13"


def test_finding_without_an_operation_names_the_function_that_was_called_last(machine: Machine) -> None:
    rig, engine = rig_of("", machine), as_module(f"{ENGINE}.part", CONTROLLER).Controller()
    assert called(rig, "KV301") is None, "nothing was called"
    rig.measured(lambda: engine.write(rig.record, 0), "write")
    rig.measured(lambda: engine.write(lambda: None, 0), "write")
    assert called(rig, "KV302") == f"Controller.write   {ENGINE}/part.py:2"
    with pytest.raises(Stop):
        rig.measured(lambda: engine.look(True), "look", is_aside=True)
    assert (rig.judge.findings[-1].minimal or {})["called"] == f"Controller.look   {ENGINE}/part.py:9"
    assert sys.getprofile() is None


def test_finding_keeps_what_it_names_itself(machine: Machine) -> None:
    rig, engine = rig_of("", machine), as_module(f"{ENGINE}.part", CONTROLLER).Controller()
    rig.measured(lambda: engine.look(False), "look")
    rig.judge.find("KV303", "contract", "wrong", minimal={"called": "other   x.py:1"})
    assert rig.judge.findings[0].minimal == {"called": "other   x.py:1"}
    other = ProbeJudge()
    other.find("KV303", "contract", "wrong")
    assert other.findings[0].minimal is None


class Empty:
    def needs(self, subject: str) -> tuple[str, ...]:
        return ()

    def control(self, rig: Rig) -> None:
        rig.judge.words["x"] = 1 if rig.subject == "driven" else 0

    def measure(self, rig: Rig) -> None:
        rig.judge.notes.append("measured")


@pytest.mark.parametrize(("subject", "why"), [("driven", "nothing was judged"), ("idle", "judged nothing")])
def test_probe_without_evidence_is_no_pass(subject: str, why: str, machine: Machine) -> None:
    rig = rig_of(subject, machine)
    assert why in str(run(Empty(), rig)) and rig.judge.evidence().words_verified == {}


@pytest.mark.parametrize(
    "request_of_a_release",
    [
        SimpleNamespace(extend_end=7, fill_ids=[0] * 9),
        SimpleNamespace(extend_range=SimpleNamespace(start=2, end=7)),
        SimpleNamespace(fill_len=7),
        SimpleNamespace(fill_ids=[0] * 7),
    ],
)
def test_end_of_a_round_is_found_by_each_releases_name(request_of_a_release: SimpleNamespace) -> None:
    assert end_of(request_of_a_release) == 7


@pytest.mark.parametrize("line", ["", "[]", "{}", '{"hello": 1}', '{"reply": {}}', '{"x": {}}', "[" * 5000, "nan"])
def test_line_of_no_form_is_refused(line: str) -> None:
    with pytest.raises((ValueError, RecursionError)):
        decode(line)
