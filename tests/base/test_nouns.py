"""Counted nouns: the plural of each noun that kvcheck counts."""

from __future__ import annotations

import pytest

from kvcheck.core.base.nouns import counted, counted_field, plural


@pytest.mark.parametrize(
    ("noun", "many"), [("cell", "cells"), ("process", "processes"), ("retry", "retries"), ("search", "searches")]
)
def test_the_plural_is_for_all_numbers_but_one(noun: str, many: str) -> None:
    assert [counted(number, noun) for number in (0, 1, 1000)] == [f"0 {many}", f"1 {noun}", f"1,000 {many}"]
    assert plural(1, noun) == noun


@pytest.mark.parametrize(
    ("name", "one"),
    [("retries", "1 retry"), ("pages_wanted", "1 page wanted"), ("orderings_checked", "1 ordering checked")],
)
def test_fields_of_the_evidence_have_a_singular(name: str, one: str) -> None:
    assert counted_field(1, name) == one
    assert counted_field(2, name) == f"2 {name.replace('_', ' ')}"
