"""What a mutant breaks leads to a function of the fixed code, and the words of the five bugs to the fixed functions.

Invariants:
- Functions are looked up in the source text, so that a person who opens the file finds them.
"""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import pytest
from rigs.settings import with_settings

import kvcheck
from kvcheck.commands.main import run
from kvcheck.core.cache.hicache.controller import TransferController
from kvcheck.core.cache.offload import Offload, OffloadedKV
from kvcheck.core.cache.pools.buffers import BufferSet
from kvcheck.core.cache.transfer.blocks import pair_pages
from kvcheck.core.cache.transfer.metadata import MetadataBuffers
from kvcheck.core.cache.transfer.seal import Sealer
from kvcheck.core.run.plan import Plan
from kvcheck.core.stress.runner import ScheduleRunner
from kvcheck.core.stress.targets.builtin import BuiltinTarget
from kvcheck.core.stress.targets.mutants import MUTANTS, mutant
from kvcheck.core.stress.targets.mutants.mutant import overridden
from kvcheck.core.stress.targets.target import FIXED, TargetParts

PACKAGE = Path(kvcheck.__file__).parent
WITH_STORE = with_settings(Plan(scenario="hicache", shape="llama-3-tiny"), "store:memory").schedule
"""A schedule of the hicache scenario whose host tier has a store behind it."""

WORDS: dict[str, tuple[Callable[..., object], ...]] = {
    "get_buf": (MetadataBuffers.get,),
    "#23346": (MetadataBuffers.get, Offload._table),
    "get_index_k_continuous": (BufferSet.read_view,),
    "#22811": (BufferSet.read_view,),
    "state_indices": (pair_pages,),
    "#18727": (pair_pages,),
    "#23323": (pair_pages,),
    "move_hybrid_indices": (TransferController.move,),
    "#23427": (TransferController.move,),
    "#23429": (TransferController.move,),
    "#23252": (Sealer.seal,),
}
"""A word that an engineer searches for -> the fixed functions whose docstrings have it."""

ABOUT_BUGS = {"mutants", "probes", "codes.py", "bugs.py"}
"""Folders and files whose text is about bugs, and holds no fix."""


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


def files_with(word: str, root: Path) -> set[Path]:
    """Files of the fixed code that have a word, once or more."""
    files = {path for path in root.rglob("*.py") if not ABOUT_BUGS & set(path.relative_to(root).parts)}
    return {path for path in files if word in path.read_text(encoding="utf-8")}


@pytest.mark.parametrize("name", MUTANTS)
def test_what_a_mutant_breaks_is_one_part_or_two_whose_functions_exist(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    bug = mutant(name)
    changed = sum(getattr(bug.parts, row.name) is not getattr(FIXED, row.name) for row in fields(TargetParts))
    assert changed == len(bug.faults) and changed in ((1, 2) if bug.within else (1,))
    assert bug.breaks
    for place in bug.breaks:
        assert leads_to(place, PACKAGE.parent), place
        assert "mutants" not in place
    assert run(["explain", name]) == 0
    assert set(bug.breaks) <= {line.removeprefix("breaks: ") for line in capsys.readouterr().out.splitlines()}


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
    assert run(["list", "mutants", "--json"]) == 0
    assert {row["name"]: tuple(row["breaks"]) for row in json.loads(capsys.readouterr().out)} == {
        each.name: each.breaks for each in MUTANTS.values()
    }
    assert run(["list", "mutants"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(" ")[0] for line in lines if "read_view" in line] == [
        each.name for each in MUTANTS.values() if any("read_view" in place for place in each.breaks)
    ]


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


@pytest.mark.parametrize(
    "place",
    [
        "kvcheck/core/nowhere.py: Offload.save",
        "kvcheck/core/cache/offload.py: Offload.sav",
        "kvcheck/core/cache/offload.py: Of.save",
    ],
)
def test_a_place_that_does_not_exist_is_seen(place: str) -> None:
    assert leads_to("kvcheck/core/cache/offload.py: Offload.save", PACKAGE.parent) and not leads_to(
        place, PACKAGE.parent
    )


@pytest.mark.parametrize("word", WORDS)
def test_the_word_of_a_bug_leads_to_the_fixed_function(word: str) -> None:
    files = {Path(inspect.getsourcefile(function) or "") for function in WORDS[word]}
    assert files_with(word, PACKAGE / "core") == files
    for function in WORDS[word]:
        assert (inspect.getdoc(function) or "").count(word) == 1, function


def test_a_word_that_strays_is_seen(tmp_path: Path) -> None:
    for name in ("transfer/metadata.py", "mutants/metadata.py", "codes.py", "wire.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("# get_buf\n", encoding="utf-8")
    assert files_with("get_buf", tmp_path) == {tmp_path / "transfer/metadata.py", tmp_path / "wire.py"}
