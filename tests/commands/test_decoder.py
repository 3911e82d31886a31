"""`kvcheck stress --decoder`: the decoder is in record, line and replay."""

from __future__ import annotations

import pytest
from rigs.server_runs import Commands

from kvcheck.core.run.plan import parse_line

FEW = ("--seed", "1", "--schedules", "3", "--no-reports", "--jobs", "1")


@pytest.mark.schedules
@pytest.mark.parametrize("scenario", ["retract-resume", "hicache"])
def test_known_answers_pass_and_the_record_says_what_was_asked(scenario: str, kvcheck: Commands) -> None:
    """Answers that depend on loaded pages are the evidence of the host tier."""
    code, said = kvcheck.kept("stress", scenario, "--decoder", "known-answer", "--shape", "llama-answers", *FEW)
    assert code == 0, said
    (line,) = kvcheck.record().plan["cells"]
    assert parse_line(line).decoder == "known-answer"
    words = kvcheck.record().evidence.words_verified
    assert words["k"] and words["v"] and (scenario == "hicache" or words["metadata"])
    assert scenario != "hicache" or 0 < words["host:k"] == words["host:v"] < words["k"]


@pytest.mark.schedules
def test_a_mutant_is_shown_by_the_decoder_of_its_card_and_its_line_replays(kvcheck: Commands) -> None:
    code, said = kvcheck.kept("stress", "--mutant", "length-without-own-token", *FEW)
    assert code == 1 and "the known answer has" in said
    finding = kvcheck.record().findings[0]
    assert (finding.code, parse_line(finding.schedule).decoder) == ("KV501", "known-answer")
    code, said = kvcheck.said("replay", finding.schedule, "--times", "2")
    assert code == 1 and "identical each time" in said
