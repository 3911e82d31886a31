"""Hints for an unknown name: the known ones or their command, and the nearest."""

from __future__ import annotations

import pytest

from kvcheck.core.base.registry import LISTED_NAMES, did_you_mean, unknown_name

MANY = [f"name-{number}" for number in range(LISTED_NAMES + 1)]


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("retract-resum", "'retract-resume'"),
        ("RETRACT-RESUME", "'retract-resume'"),
        ("kv102", "'KV102'"),
        ("resum", "'retract-resume'"),
        ("xyz", ""),
    ],
)
def test_the_nearest_name_is_told_case_aside(name: str, near: str) -> None:
    hint = did_you_mean(name, ["retract-resume", "hicache", "KV102"])
    assert hint == (f"; did you mean {near}?" if near else "")


def test_names_are_listed_or_their_command_is() -> None:
    assert "known: tree, seal" in unknown_name("case", "tre", ["tree", "seal"])
    text = unknown_name("mutant", "nome-3", MANY, listed_by="kvcheck list mutants")
    assert "name-4" not in text and "'name-3'" in text and "kvcheck list mutants" in text
    assert all(name in unknown_name("key", "x", MANY) for name in MANY), "no command lists them"
