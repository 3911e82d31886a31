"""Stories of findings: from histories written out by hand and of real schedules, what they tell and leave out.

The texts of a real schedule are in tests/golden/story.txt; `python tests/stress/test_stories.py --regenerate`.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
from rigs.ordering_histories import load, op, read, touch, write

from kvcheck.commands.targets import target_of
from kvcheck.core.base import content
from kvcheck.core.base.content import RowSites, Site, Tag
from kvcheck.core.base.record import Finding
from kvcheck.core.base.story import MOST_EDGES, MOST_LINES, MOST_STEPS, MOST_WORDS, Story
from kvcheck.core.cache.backend.backend import Completed, LaneWaited, ProcessJoined, Submitted
from kvcheck.core.cache.events import Allocated, Event, Freed
from kvcheck.core.report.story_text import story_lines
from kvcheck.core.run.plan import parse_line
from kvcheck.core.stress.flip import confirmed
from kvcheck.core.stress.history import History
from kvcheck.core.stress.oracles import ORACLES
from kvcheck.core.stress.oracles.oracle import judge
from kvcheck.core.stress.runner import ScheduleRunner
from kvcheck.core.stress.stories import MOST_STORIES, UNMADE, stories, with_stories
from kvcheck.core.stress.story_notes import AFTER, MOST_NOTES, StoryNotes
from kvcheck.core.stress.story_telling import tell
from kvcheck.core.stress.workload.events import Expected, Retracted, Saved, Saw, SitesKnown
from kvcheck.core.stress.workload.mismatch import Mismatch

GOLDEN = Path(__file__).parents[1] / "golden" / "story.txt"
SITE = Site("full", "latent", "", 0)
HOSTILE = 'h2d<&"'


def done(*events: Event) -> list[Event]:
    """Events with each operation's completion behind it."""
    pairs = ((event, Completed(event.ordinal)) if isinstance(event, Submitted) else (event,) for event in events)
    return [each for pair in pairs for each in pair]


def told(oracle: str, events: Sequence[Event], code: str) -> Story:
    """The story of the first finding of that code."""
    finding = next(each for each in judge(ORACLES.load(oracle)(), History.of(*events)) if each.code == code)
    finding = dataclasses.replace(finding, id="1")
    notes = noted(finding, events)
    assert notes.moment is not None
    return tell(notes, finding, finding)


def noted(finding: Finding, events: Sequence[Event]) -> StoryNotes:
    """The notes of a history that are taken for a finding."""
    notes, history = StoryNotes(finding, ORACLES.load(finding.oracle)()), History()
    history.listen(notes.handlers())
    for event in events:
        history.emit(event)
    notes.finish()
    return notes


def texts(story: Story) -> list[str]:
    return [f"{step.lane}: {step.text} {step.number}".strip() for step in story.steps]


RACE = done(
    Allocated("full", (4,), 1),
    write(1, 4, owner=1),
    ProcessJoined(1),
    Freed("full", (4,)),
    Allocated("full", (4,), 2),
    load(2, 4, lane=HOSTILE, owner=2),
    read(3, 4, owner=2),
    LaneWaited(2, "forward"),
    read(4, 4, owner=2),
)


def test_a_race_has_its_missing_wait_and_the_waits_that_exist() -> None:
    story = told("ordering", RACE, "KV201")
    assert (story.about, story.untold, story.row, story.words) == ("full page 4", None, None, ())
    assert texts(story) == [
        "scheduler: gives full page 4 to request 1",
        "forward: op1 writes for request 1 #1",
        "scheduler: frees full page 4",
        "scheduler: gives full page 4 to request 2",
        f"{HOSTILE}: op2 writes for request 2 #2",
        "forward: op3 reads for request 2 #3",
        "forward: op4 reads for request 2 #4",
    ]
    assert [step.is_wrong for step in story.steps] == [False, False, False, False, True, True, False]
    edges = [(edge.source, edge.target, edge.is_missing) for edge in story.edges]
    assert edges == [(4, 5, True), (1, 2, False), (4, 6, False)]
    assert story.history == (
        "request 1: written by op1 (forward #1), freed",
        f"request 2: written by op2 ({HOSTILE} #2), read by op3 (forward #3)",
    )


def test_a_history_with_the_wait_has_no_finding_and_no_story() -> None:
    good = [*RACE[:-6], LaneWaited(2, "forward"), *RACE[-6:]]
    assert noted(Finding(code="KV201", oracle="ordering", message="m"), good).moment is None


def mismatch(author: int, seen: int, position: int = 5) -> Mismatch:
    return Mismatch(
        request=author,
        space="full",
        buffer="latent",
        piece="",
        layer=0,
        page=4,
        row=1,
        position=position,
        author=author,
        words=tuple(content.word(Tag(seen, 0, 9), SITE, at) for at in range(12)),
        half=False,
        count=1,
    )


REUSE = done(
    SitesKnown((RowSites(space="full", buffer="latent", piece="", layers=(0, 1), words=12),)),
    Expected(1, ()),
    Expected(2, ()),
    Allocated("full", (4,), 1),
    dataclasses.replace(write(1, 4, owner=1), name="decode.write"),
    Retracted(1),
    Saved(1, 6, ("full.k",), ("full.k", "full.latent")),
    Freed("full", (4,)),
    Allocated("full", (4,), 2),
    dataclasses.replace(write(2, 4, owner=2), name="decode.write"),
    Freed("full", (4,)),
    Allocated("full", (4,), 1),
    dataclasses.replace(read(3, 4, owner=1), name="decode.read"),
    Saw(mismatch(1, 2)),
)


def test_a_reused_page_tells_who_had_it_and_what_was_read() -> None:
    story = told("content", REUSE, "KV102")
    assert story.history == (
        "request 1: written (forward #1), freed",
        "request 2: written (forward #2), freed",
        "request 1: read for request 1 (forward #3)",
        "request 1 was saved without full.latent, 6 tokens",
    )
    assert story.row == "latent, layer 0, page 4, row 1, read for request 1"
    assert len(story.words) == MOST_WORDS
    first = story.words[0]
    assert (first.seen_says, first.wanted_says) == ("request 2, position 9", "request 1, position 5")
    assert int(first.seen, 16) == content.word(Tag(2, 0, 9), SITE, 0) & ((1 << 64) - 1)
    assert int(first.wanted or "", 16) == content.word(Tag(1, 0, 5), SITE, 0) & ((1 << 64) - 1)
    assert [step.text for step in story.steps if step.is_wrong] == ["decode.read reads for request 1"]
    assert "request 1 was saved without full.latent, 6 tokens" in [step.text for step in story.steps]
    assert not any(edge.is_missing for edge in story.edges)


def test_a_write_outside_its_span_is_not_told_of_the_row() -> None:
    other = dataclasses.replace(op(9, "forward", writes=(touch(4, span=(2, 4), owner=2),)), name="decode.write")
    at = next(at for at, event in enumerate(REUSE) if getattr(event, "ordinal", None) == 3)
    story = told("content", [*REUSE[:at], other, Completed(9), *REUSE[at:]], "KV102")
    assert not any("#9" in text for text in texts(story)) and not any("#9" in line for line in story.history)


def test_a_page_freed_while_it_is_used_has_a_missing_wait_for_each_pending_operation() -> None:
    events: list[Event] = [Allocated("full", (4,), 1), write(1, 4, owner=1), Freed("full", (4,)), Completed(1)]
    story = told("lifetime", events, "KV202")
    assert [(edge.source, edge.target) for edge in story.edges if edge.is_missing] == [(1, 2)]
    assert story.steps[2].is_wrong and story.steps[1].end == 4


def test_a_finding_without_a_page_follows_its_request() -> None:
    saved = Saved(7, 3, ("full.k",), ("full.k", "full.latent"))
    events = [Allocated("full", (4, 5), 7), *done(write(1, 4, owner=7)), saved]
    story = told("contract", events, "KV304")
    assert story.about == "request 7"
    assert story.history == ("gives full pages 4, 5 to request 7", "request 7 was saved without full.latent, 3 tokens")


def test_a_long_history_gives_a_bounded_story() -> None:
    events: list[Event] = []
    for at in range(1, 3 * MOST_NOTES, 2):
        lane = f"lane{at % 40}"
        events += done(Allocated("full", (4,), at), load(at, 4, lane=lane, owner=at), ProcessJoined(at))
        events.append(Freed("full", (4,)))
    events += done(Allocated("full", (4,), 2), load(99_998, 4, owner=2), read(99_999, 4, owner=2))
    story = told("ordering", events, "KV201")
    assert len(story.steps) == MOST_STEPS and len(story.edges) <= MOST_EDGES and len(story.history) <= MOST_LINES
    assert story.history[0].endswith("earlier owners are left out")
    assert [step.number for step in story.steps if step.is_wrong] == ["#99998", "#99999"]


def test_little_is_kept_behind_the_moment() -> None:
    (finding, *_) = judge(ORACLES.load("ordering")(), History.of(*RACE))
    notes = noted(finding, [*RACE, *done(*(read(at, 4, owner=2) for at in range(10, 10 + 5 * AFTER)))])
    assert notes.moment is not None
    assert sum(note.at > notes.moment for note in notes.places["full"]) <= AFTER


# Real schedules


@cache
def failed() -> tuple[Finding, ...]:
    """The findings of the command of docs/bugs.md for a missing wait, with its proof."""
    plan = parse_line(
        "hicache:shape=glm-5.1-tiny,mutant=index-key-reader-without-wait,backend=simulated,strategy=eager,requests=20"
    )
    runner = ScheduleRunner(target_of(plan))
    return confirmed(runner, runner.run(plan))


@cache
def told_of_failed() -> Story:
    return stories(failed(), target_of)[failed()[0].id]


@pytest.mark.schedules
def test_the_story_of_a_missing_wait_is_the_golden_one_and_the_same_twice() -> None:
    story = told_of_failed()
    assert golden_text() == GOLDEN.read_text(encoding="utf-8")
    assert sum(edge.is_missing for edge in story.edges) == 1


@pytest.mark.schedules
def test_a_finding_that_is_not_made_again_is_not_told() -> None:
    other = [dataclasses.replace(each, message="something else", minimal=None) for each in failed()]
    (story,) = stories(other, target_of).values()
    assert (story.untold, story.steps) == (UNMADE, ())


@pytest.mark.schedules
def test_without_time_a_sentence_stands_in_for_the_story() -> None:
    (story,) = stories(failed(), target_of, until=0.0).values()
    assert "no time" in str(story.untold) and story.steps == ()


def test_at_most_so_many_causes_are_told_and_places_that_cannot_be_told_run_nothing() -> None:
    findings = [
        Finding(id=f"r.{at}", code="KV401", oracle="accounting", message="lost", schedule="a:shape=b", tier=f"t{at}")
        for at in range(2 * MOST_STORIES)
    ]
    found = stories(findings, lambda plan: pytest.fail("a target was made"))
    assert len(found) == MOST_STORIES
    assert all("neither a page nor a request" in str(story.untold) for story in found.values())
    kept = with_stories(findings, found)
    assert [each.story is not None for each in kept].count(True) == MOST_STORIES


def golden_text() -> str:
    return "\n".join(story_lines(dataclasses.replace(failed()[0], id="RUN.1", story=told_of_failed()), 1000)) + "\n"


if __name__ == "__main__":
    assert sys.argv[1:] == ["--regenerate"], "usage: python tests/stress/test_stories.py --regenerate"
    GOLDEN.write_text(golden_text(), encoding="utf-8")
