"""Ranks that share memory of a device by CUDA IPC, as real processes; runs wherever torch, pytest and a GPU are."""

from __future__ import annotations

import pytest
import torch

from kvcheck.core.run.plan import Plan
from kvcheck.core.stress.ranks.runner import RankRunner
from kvcheck.core.stress.rows import settings_tried_by

WAYS = ("async", "ordered", "messages")
"""Of the metadata, in the first three schedules of this plan."""


def device_plan(device: str, way: str) -> Plan:
    return Plan(
        scenario="nvlink-aux",
        shape="llama-3-tiny",
        backend="eager",
        device=device,
        transport="ipc",
        ranks="1x1",
        schedule=WAYS.index(way),
        requests=6,
    )


@pytest.mark.parametrize("way", WAYS)
def test_the_plans_have_the_ways_that_they_are_named_by(way: str) -> None:
    assert f"metadata path:{way}" in settings_tried_by(device_plan("cuda", way))


@pytest.mark.gpu
@pytest.mark.processes(starts=True)
@pytest.mark.parametrize(
    ("device", "way"), [("cuda:0", "async"), ("cuda:0", "ordered"), ("cuda:0", "messages"), ("cuda", "async")]
)
def test_every_request_arrives_in_memory_of_a_device(device: str, way: str) -> None:
    """On "cuda", each end has a device of its own where there are two."""
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices: with one, cuda and cuda:0 are the same")
    outcome = RankRunner().run(device_plan(device, way))
    assert outcome.findings == () and outcome.judged["bytes"] > 0
    assert outcome.evidence.transfers
