"""Replay lines: short where the schedule line is long, whole where nothing shorter works."""

from __future__ import annotations

import html
import shlex
from dataclasses import replace

import pytest
from rigs.literal_record import FAILED, FOREIGN, MUTANTS

from kvcheck.core.base.record import Finding, RunRecord
from kvcheck.core.report.screen import cause_lines
from kvcheck.core.report.to_html import render
from kvcheck.core.report.wording import LONG, replay_line

LINE = f"retract-resume:shape=glm-5.1-tiny,seed=1,choices={'eNoL' * 60}"
WHOLE = f"kvcheck replay {LINE}"
FLIPPED = f"kvcheck replay {LINE},strategy=flip"
PROVEN = {"confirmed": "in the other order it saw other bytes", "replay": FLIPPED}


def found(number: int = 3, **changed: object) -> Finding:
    """A finding of the literal record with a long line."""
    given: dict[str, object] = {"id": f"{FAILED.run_id}.{number}", "schedule": LINE, "replay": WHOLE, "minimal": None}
    return replace(FOREIGN, **{**given, **changed})  # type: ignore[arg-type]


def run(*argv: str) -> RunRecord:
    """The literal record, made by this command."""
    return replace(FAILED, argv=("stress", *argv), findings=(found(),), mutants=())


def test_a_long_line_becomes_the_number_in_its_run() -> None:
    assert replay_line(run(), found()) == f"kvcheck replay {FAILED.run_id}#3"


@pytest.mark.parametrize("argv", [("--out", "my runs"), ("--out=my runs",)])
def test_the_folder_of_runs_is_named_where_the_command_named_one(argv: tuple[str, ...]) -> None:
    line = replay_line(run(*argv), found())
    assert shlex.split(line) == ["kvcheck", "replay", f"{FAILED.run_id}#3", "--out", "my runs"]


@pytest.mark.parametrize("identity", ["", "3", "another-run.3", f"{FAILED.run_id}.", f"{FAILED.run_id}.03", "x#3"])
def test_a_finding_that_has_no_number_of_its_run_keeps_its_line(identity: str) -> None:
    assert replay_line(run(), found(id=identity)) == WHOLE


def test_a_line_that_is_short_stays() -> None:
    longest = "k" * LONG
    assert replay_line(run(), found(replay=longest)) == longest
    assert replay_line(run(), found(replay=longest + "k")) == f"kvcheck replay {FAILED.run_id}#3"
    assert replay_line(run("--out", "d" * len(WHOLE)), found()) == WHOLE, "the name of its folder is longer"
    assert replay_line(run(), found(replay="", schedule="")) == FAILED.repro


def test_the_terminal_prints_short_lines_of_a_stored_run_and_whole_ones_without() -> None:
    record = replace(run(), findings=(found(minimal=PROVEN),))
    stored, nowhere = (cause_lines(record, 120, {}, is_kept=is_kept) for is_kept in (True, False))
    assert f"    again     kvcheck replay {FAILED.run_id}#3" in stored
    assert f"    shown     kvcheck replay {FAILED.run_id}#3:proof" in stored
    assert f"    again     {WHOLE}" in nowhere and f"    shown     {FLIPPED}" in nowhere


def test_the_page_shows_the_short_line_and_folds_the_whole_one() -> None:
    text = html.unescape(render(replace(run(), mutants=(replace(MUTANTS[0], replay=WHOLE),))))
    shown, _, rest = text.partition('<section id="scenarios">')
    assert f"<code>kvcheck replay {FAILED.run_id}#3</code>" in shown and WHOLE not in shown
    finding, _, mutants = rest.partition('<section id="mutants">')
    assert finding.count(f"<code>{WHOLE}</code>") == 1 and mutants.count(f"<code>{WHOLE}</code>") == 1
    for part in (finding, mutants):
        before, _, after = part.partition(f"<code>{WHOLE}</code>")
        assert before.rindex("<details>") > before.rfind("</details>") and "</details>" in after, "it lies in a fold"
