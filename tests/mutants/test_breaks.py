"""What a mutant breaks leads to a function of the fixed code."""

from __future__ import annotations

import ast
import json
from dataclasses import fields, replace
from pathlib import Path

import pytest
from rigs.settings import with_settings

import kvcheck
from kvcheck.commands.main import run
from kvcheck.core.cache.offload import Offload, OffloadedKV
from kvcheck.core.run.plan import Plan
from kvcheck.core.stress.runner import ScheduleRunner
from kvcheck.core.stress.targets.builtin import BuiltinTarget
from kvcheck.core.stress.targets.mutants import MUTANTS, mutant
from kvcheck.core.stress.targets.mutants.mutant import overridden
from kvcheck.core.stress.targets.target import FIXED, TargetParts

PACKAGE = Path(kvcheck.__file__).parent
WITH_STORE = with_settings(Plan(scenario="hicache", shape="llama-3-tiny"), "store:memory").schedule
"""A schedule of the hicache scenario whose host tier has a store behind it."""


def leads_to(place: str, root: Path) -> bool:
    """Whether "folder/file.py: Class.function" is the definition of a function in that file."""
    file, _, name = place.partition(": ")
    owner, _, function = name.partition(".")
    if not (root / file).is_file():
        return False
    classes = [
        node for node in ast.parse((root / file).read_text(encoding="utf-8")).body if isinstance(node, ast.ClassDef)
    ]
    return any(
        isinstance(node, ast.FunctionDef) and (each.name, node.name) == (owner, function)
        for each in classes
        for node in each.body
    )


@pytest.mark.parametrize("name", MUTANTS)
def test_what_a_mutant_breaks_is_one_part_or_two_whose_functions_exist(name: str) -> None:
    bug = mutant(name)
    changed = sum(getattr(bug.parts, row.name) is not getattr(FIXED, row.name) for row in fields(TargetParts))
    assert changed == len(bug.faults) and changed in ((1, 2) if bug.within else (1,))
    assert bug.breaks
    for place in bug.breaks:
        assert leads_to(place, PACKAGE.parent) and "mutants" not in place, place


@pytest.mark.schedules
def test_every_part_is_what_engines_are_made_of() -> None:
    """A row that a constructor is not given would leave its mutants without an effect."""
    made: set[str] = set()
    parts = TargetParts(**{row.name: recorded(row.name, getattr(FIXED, row.name), made) for row in fields(TargetParts)})
    engine = ScheduleRunner(BuiltinTarget(parts))
    for scenario, schedule in (("hicache", WITH_STORE), ("pd-transfer", 0)):
        plan = Plan(scenario=scenario, shape="llama-3-tiny", seed=1, schedule=schedule, requests=4, strategy="eager")
        assert engine.run(plan).findings == ()
    assert made == {row.name for row in fields(TargetParts)}


def recorded(row: str, part: type, made: set[str]) -> type:
    """The part, which adds its row to `made` when one is made."""

    def start(self: object, *arguments: object, **named: object) -> None:
        made.add(row)
        part.__init__(self, *arguments, **named)

    return type(part.__name__, (part,), {"__init__": start})


def test_the_list_of_mutants_says_what_each_breaks(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["list", "mutants", "--format", "json"]) == 0
    assert {row["name"]: tuple(row["breaks"]) for row in json.loads(capsys.readouterr().out)} == {
        each.name: each.breaks for each in MUTANTS.values()
    }
    assert run(["explain", "load-without-pin"]) == 0
    told = {line.strip().removeprefix("breaks").strip() for line in capsys.readouterr().out.splitlines()}
    assert {*mutant("load-without-pin").breaks} <= told


def test_only_what_the_fixed_class_has_is_broken() -> None:
    class Fixed(Offload):
        pass

    class Broken(Fixed):
        extra = 1

        def discard(self, offloaded: OffloadedKV) -> None:
            raise NotImplementedError

        def _mine(self) -> None:
            raise NotImplementedError

    assert overridden(Fixed, Broken) == [f"{Offload.__module__.replace('.', '/')}.py: Offload.discard"]
    assert replace(mutant("failed-overwritten"), parts=FIXED).breaks == ()
