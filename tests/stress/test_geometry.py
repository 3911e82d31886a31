"""Uneven geometry: sizes are odd, and few pages and few requests on their way have their turns."""

from __future__ import annotations

from collections import Counter
from unittest.mock import Mock

import pytest

from kvcheck.core.base.paging import pages_for
from kvcheck.core.cache.backend.eager import EagerBackend
from kvcheck.core.run.plan import Plan, workload_seed
from kvcheck.core.stress.plan_scenario import variant_of
from kvcheck.core.stress.scenarios import SCENARIOS
from kvcheck.core.stress.scenarios.serving import make_setup
from kvcheck.core.stress.targets.builtin import BuiltinTarget
from kvcheck.core.stress.targets.target import Setup
from kvcheck.core.stress.workload.shapes import TINY_SHAPES
from kvcheck.core.stress.workload.shapes import shape as shape_named


def setup_of(plan: Plan) -> Setup:
    """What the engine of a plan is built from, without its host tier."""
    shape = shape_named(plan.shape)
    load = SCENARIOS.load(plan.scenario)().load(
        shape, seed=workload_seed(plan), requests=None, trace=None, variant=variant_of(plan)
    )
    return make_setup(shape, load, EagerBackend(), lambda event: None)


@pytest.mark.parametrize("scenario", SCENARIOS.names())
def test_tables_and_pools_have_odd_sizes(scenario: str) -> None:
    for name in TINY_SHAPES:
        if shape_named(name).family in SCENARIOS.load(scenario).families:
            made = setup_of(Plan(scenario=scenario, shape=name))
            sizes = (made.sizes.pages, made.sizes.requests, made.sizes.max_tokens, made.metadata_slots)
            assert all(size % 2 for size in sizes), sizes


class _BuiltError(Exception):
    """The engine is not built: only what it would be built from is looked at."""


@pytest.mark.parametrize("name", ["llama-3-tiny", "gpt-oss-tiny"])
@pytest.mark.parametrize("scenario", ["pd-transfer", "nvlink-aux"])
def test_few_pages_and_few_requests_on_their_way_have_their_turns(scenario: str, name: str) -> None:
    """Mostly it is the slots that hold requests back. Then a limit that is counted wrongly is never met."""
    target, kinds = Mock(spec=BuiltinTarget), Counter[str]()
    target.build.side_effect = _BuiltError
    for schedule in range(24):
        plan = Plan(scenario=scenario, shape=name, schedule=schedule)
        made, shape = SCENARIOS.load(scenario)(), shape_named(name)
        load = made.load(shape, seed=workload_seed(plan), requests=None, trace=None, variant=variant_of(plan))
        with pytest.raises(_BuiltError):
            made.run(target, shape, load, backend=EagerBackend(), emit=lambda event: None, variant=variant_of(plan))
        setup: Setup = target.build.call_args.args[0]
        assert setup.pair is not None
        longest = pages_for(max(job.prompt_tokens for job in load.jobs), shape.page_size)
        is_tight, is_few = setup.pair.prefill_sizes.pages == longest, setup.config.max_prefilling < setup.metadata_slots
        assert longest <= setup.pair.prefill_sizes.pages and not (is_tight and is_few)
        assert not is_tight or made.table.variant(variant_of(plan))["fault kind"] != "losses"
        kinds.update({"tight": is_tight, "few": is_few})
    assert kinds["few"] == 8 and kinds["tight"] >= 3
