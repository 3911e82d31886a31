"""The rows of the pages about servers, made of literal rows of their CSV files."""

from __future__ import annotations

from tools.servers.published_tables import NOT_PLANTED, NUMBERS, equal, own, reuse

PRICE = {"run_id": "a", "ratio": "0.5", "lo": "0.4", "hi": "0.6", "floor": "0.1", "verdict": "faster"}
PRICE |= {"arm": "reuse", "baseline": "fresh", "rounds": "15", "tokens_judged": "4000", "exit_code": "0"}
TRIAL = {"case": "vllm-stale", "requests": "49", "noise": "again=0 control=0.05 treated=2", "codes": "KV810"}
TRIAL |= {"exit_code": "1", "is_found": "1", "beside": "0", "seconds": "60", "note": ""}


def test_a_run_with_reuse_has_its_ratio_or_that_a_number_is_no_measurement() -> None:
    rows = [PRICE | {"case": "x-reuse", "number": NUMBERS[0]}, PRICE | {"case": "x-equal", "number": NUMBERS[0]}]
    price = "0.5 [0.4, 0.6], floor 10%: faster"
    no = "not a measurement"
    assert reuse(rows) == [f"| `x-reuse` | reuse to fresh | 15 | {price} | {no} | {no} | 4,000 | 0 |"]


def test_equal_servers_are_counted_by_run() -> None:
    near = {"ratio": "1.1", "verdict": "not told apart"}
    rows = [PRICE | near | {"case": "x-equal", "number": number} for number in NUMBERS]
    rows += [each | {"run_id": "b", "ratio": "0.9", "exit_code": "1"} for each in rows]
    rows[-1]["verdict"] = "slower"
    ratios = "0.90 to 1.10, floor 10%"
    assert equal(rows) == [f"| `x-equal` | 1 of 2 | {ratios} | {ratios} | {ratios} | 8,000 | 1 |"]


def test_a_trial_without_a_planted_page_is_not_one_that_was_missed() -> None:
    unplanted = {"is_found": "0", "note": NOT_PLANTED, "exit_code": "0", "codes": ""}
    missed = TRIAL | {"is_found": "0", "exit_code": "4", "codes": ""}
    (row,) = own([TRIAL, missed, TRIAL | unplanted])
    found = "1 of 2 found; 0 with KV809, 1 with KV810; 0 of 1 without a page accused"
    assert row == f"| `vllm-stale` | 49 | {found} | 1 | 0.05 | 2 to 2 | 60 |"
    (accused,) = own([TRIAL | {"case": "vllm-equal", "is_found": ""}])
    assert "1 of 1 runs accused" in accused
