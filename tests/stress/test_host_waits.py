"""No operation makes the process wait for the device that runs it: every scenario, on a CPU and on a device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from rigs.host_waits import HostWaits, StrictBackend

from kvcheck.core.base.record import Verdict
from kvcheck.core.cache.backend.backend import Backend, Footprint, Operation, Place
from kvcheck.core.cache.backend.eager import EagerBackend
from kvcheck.core.run.plan import Plan
from kvcheck.core.stress.runner import ScheduleRunner
from kvcheck.core.stress.targets.builtin import BuiltinTarget
from kvcheck.core.stress.workload.shapes import MICRO_SHAPES
from kvcheck.kernels.digest_rows import digest_rows

READS = {"decode.write", "decode.read", "decode.read_index", "decode.read_state", "table.req_to_token.write"}
OFFLOAD = {"offload.save", "offload.restore"}
TIERS = READS | {"hicache.backup", "hicache.load", "hicache.copy_state", "storage.put"}
ROOMS = {"receive.mark", "metadata.set", "metadata.get", "seal.make", "seal.look", "seal.verify", "seal.clear"}
WIRE = {"wire.kv", "wire.state", "wire.aux", "wire.seal", "wire.flush", "wire.message.status"}
LOOKED_AT = {
    "retract-resume": READS | OFFLOAD,
    "hicache": TIERS | OFFLOAD,
    "hicache-hybrid": TIERS | OFFLOAD,
    "pd-transfer": READS | OFFLOAD | ROOMS | WIRE,
    "nvlink-aux": READS | OFFLOAD | ROOMS | WIRE | {"wire.kv.sent", "metadata.put"},
}
"""By scenario: operations that its schedules here submit, each many times or once."""
REQUESTS = {"hicache": 12, "hicache-hybrid": 12}


def looked_at(plan: Plan, target: BuiltinTarget | None = None) -> HostWaits:
    waits: list[HostWaits] = []

    def around(backend: Backend) -> Backend:
        waits.append(HostWaits(backend))
        return waits[0]

    outcome = ScheduleRunner(target or BuiltinTarget()).run(plan, around=around)
    assert outcome.verdict is Verdict.PASS, outcome.findings
    return waits[0]


@pytest.mark.schedules
@pytest.mark.parametrize("scenario", LOOKED_AT)
def test_no_operation_makes_the_process_wait_inside_it(scenario: str) -> None:
    judged: Counter[str] = Counter()
    for number, shape in enumerate(MICRO_SHAPES):
        plan = Plan(scenario=scenario, shape=shape, seed=1, schedule=number, requests=REQUESTS.get(scenario, 5))
        waits = looked_at(plan)
        assert not waits.found, f"{plan.line()}: {', '.join(map(str, waits.found))}"
        judged.update(waits.judged)
    assert LOOKED_AT[scenario] <= judged.keys()


# By hand: [2, 8, 2] words on the device, ids there, words in pinned and in pageable memory

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
WAITING: dict[str, Callable[[Words], object]] = {
    "item": lambda w: w[0][0, 0, 0].item(),
    "truth of a tensor": lambda w: bool(w[0].any()),
    "an index of Python": lambda w: [1, 2, 3][w[1][0]],
    "equal": lambda w: torch.equal(w[0], w[0]),
    "nonzero": lambda w: w[0].nonzero(),
    "a mask as an index": lambda w: w[0][w[0] > 0],
    "a mask as a target": lambda w: w[0].__setitem__(w[0] > 0, 1),
    "unique": lambda w: w[1].unique(),
    "tolist": lambda w: w[1].tolist(),
    "numpy": lambda w: w[1].numpy(),
    "an array": lambda w: np.asarray(w[1]),
    "cpu": lambda w: w[1].cpu(),
    "to the CPU": lambda w: w[1].to("cpu"),
    "a copy to pageable memory": lambda w: w[3].copy_(w[0]),
    "a copy to memory of the chunk": lambda w: torch.empty(2, 8, 2, dtype=torch.int64).copy_(w[0]),
    "what a chunk made there": lambda w: int(torch.ones(2, device=w[0].device).sum()),
    "a result of a kernel": lambda w: int(digest_rows(w[0], w[1], key=1)),
}
LEGAL: dict[str, Callable[[Words], object]] = {
    "a copy to pinned memory": lambda w: w[2].copy_(w[0]),
    "a copy from pageable memory": lambda w: w[0].copy_(w[3]),
    "a gather": lambda w: w[0].index_select(1, w[1]),
    "ids as an index": lambda w: w[0][:, w[1]],
    "a choice": lambda w: torch.where(w[0] > 0, w[0], 0),
    "a value of host memory": lambda w: int(w[3][0, 0, 0]),
    "bytes of pinned memory": lambda w: w[2].numpy().tobytes(),
    "what a chunk made on the host": lambda w: int(torch.ones(2).sum()),
    "a kernel": lambda w: w[0][0, 0].copy_(digest_rows(w[0], w[1], key=1)),
}


def by_hand(call: Callable[[Words], object], **options: object) -> HostWaits:
    waits = HostWaits(EagerBackend())
    places = {"device": Place.DEVICE, "pinned": Place.PINNED, "pageable": Place.PAGEABLE}
    device, pinned, pageable = (waits.empty(name, (2, 8, 2), torch.int64, place) for name, place in places.items())
    words = (device, waits.index(np.arange(2)), pinned, pageable)
    writes: Sequence[Footprint] = options.pop("writes", ())  # type: ignore[assignment]
    operation = Operation("by hand", (lambda: call(words),), **options)  # type: ignore[arg-type]
    waits.submit(operation, lane=waits.lane("a"), writes=writes)
    return waits


@pytest.mark.parametrize("name", WAITING)
def test_a_call_that_waits_is_seen_unless_the_operation_says_so(name: str) -> None:
    (found,) = by_hand(WAITING[name]).found
    assert found.operation == "by hand" and found.place.startswith("test_host_waits.py:")
    assert not by_hand(WAITING[name], joins_host=True).found
    pageable = Footprint("pageable", ("",), (0, 1), np.array([0]), place=Place.PAGEABLE)
    assert not by_hand(WAITING[name], writes=(pageable,)).found


@pytest.mark.parametrize("name", LEGAL)
def test_a_call_that_only_queues_work_is_not_accused(name: str) -> None:
    waits = by_hand(LEGAL[name])
    assert not waits.found and waits.judged == {"by hand": 1}


@pytest.mark.gpu
@pytest.mark.parametrize("scenario", LOOKED_AT)
def test_on_a_device_torch_sees_no_call_that_synchronises_inside_an_operation(scenario: str) -> None:
    strict: list[StrictBackend] = []

    def around(backend: Backend) -> Backend:
        strict.append(StrictBackend(backend))
        return strict[0]

    plan = Plan(scenario=scenario, shape="glm-5.1-micro", seed=1, requests=3)
    engine = ScheduleRunner(BuiltinTarget())
    outcome = engine.run(replace(plan, backend="cuda", device="cuda", strategy="eager"), around=around)
    assert outcome.verdict is Verdict.PASS, outcome.findings
    assert sum(strict[0].judged.values()) > 40
