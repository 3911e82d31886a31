"""What is said of an unknown name: the known ones or their command, and the nearest."""

from __future__ import annotations

import pytest

from kvcheck.core.base.misspelt import LISTED_NAMES, did_you_mean, unknown_name

MANY = [f"name-{number}" for number in range(LISTED_NAMES + 1)]


@pytest.mark.parametrize(
    ("name", "near"),
    [("retract-resum", "'retract-resume'"), ("RETRACT-RESUME", "'retract-resume'"), ("kv102", "'KV102'"), ("xyz", "")],
)
def test_the_nearest_name_is_told_case_aside(name: str, near: str) -> None:
    hint = did_you_mean(name, ["retract-resume", "hicache", "KV102"])
    assert hint == (f"; did you mean {near}?" if near else "")


def test_few_names_are_listed() -> None:
    assert (
        unknown_name("case", "tre", ["tree", "seal"]) == "unknown case 'tre'; known: tree, seal; did you mean 'tree'?"
    )


def test_of_many_names_the_command_that_lists_them_is_told() -> None:
    text = unknown_name("mutant", "nome-3", MANY, listed_by="kvcheck list mutants")
    assert text == (
        f"unknown mutant 'nome-3': expected one of {len(MANY)} names; did you mean 'name-3'?; see kvcheck list mutants"
    )


def test_names_that_no_command_lists_are_told_however_many() -> None:
    assert all(name in unknown_name("key", "x", MANY) for name in MANY)
