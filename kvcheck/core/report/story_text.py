"""The story of a finding as text: lanes as columns with time downwards, the history, and the row that was read."""

from __future__ import annotations

from collections.abc import Sequence

from kvcheck.core.base.codes import CODES
from kvcheck.core.base.record import Finding, RunRecord
from kvcheck.core.base.story import HOST, MESSAGE, READ, WRITE, Story, StoryStep, Word
from kvcheck.core.base.untold import why_untold
from kvcheck.core.report.markdown import printable
from kvcheck.core.report.wording import aligned, by_name

MARKS = {WRITE: "W", READ: "R", HOST: "h", MESSAGE: "m"}
LEGEND = "W writes, R reads, h the host acts, m a message, | still pending, * the finding names it"
NOT_KEPT = "its record has no story: it was made without one, or only the first causes of the run have one"


def story_lines(finding: Finding) -> list[str]:
    """Return the output of `kvcheck show` for a finding."""
    known = CODES.get(finding.code)
    title = known.title if known else "unknown code"
    lines = [f" {finding.id}  {finding.code} {title}   {finding.cell}", f"    what    {finding.message}"]
    if (why := why_no_story(finding)) is not None:
        lines += [f"    replay  {finding.replay}"] if finding.replay else []
        return [*lines, f"    story   none: {why}"]
    story = finding.story
    assert story is not None
    lines += [f"    about   {story.about}", "", *_timeline(story), ""]
    if story.history:
        lines += [" history", *(f"    {line}" for line in story.history), ""]
    if story.row is not None:
        lines += [f" words of {story.row}", *_words(story.words), ""]
    return [*lines, f"    replay  {finding.replay}"]


def why_no_story(finding: Finding) -> str | None:
    if finding.story is None:
        return why_untold(finding) or NOT_KEPT
    return finding.story.untold


def show_line(record: RunRecord, finding: Finding) -> str | None:
    if finding.story is None or finding.story.untold is not None:
        return None
    return by_name("show", record, finding)


def lanes_of(story: Story) -> list[str]:
    return list(dict.fromkeys(step.lane for step in story.steps))


def lane_letter(at: int) -> str:
    return chr(ord("A") + at)


def step_text(step: StoryStep) -> str:
    return " ".join(part for part in (step.text, step.number) if part)


def waits_text(story: Story, at: int) -> str:
    rows = [edge for edge in story.edges if edge.target == at]
    missing = ", ".join(str(edge.source + 1) for edge in rows if edge.is_missing)
    waits = ", ".join(str(edge.source + 1) for edge in rows if not edge.is_missing)
    parts = [f"DOES NOT WAIT for {missing}" if missing else "", f"waits for {waits}" if waits else ""]
    return "; ".join(part for part in parts if part)


def _timeline(story: Story) -> list[str]:
    lanes = lanes_of(story)
    names = [f"{lane_letter(at)} {lane}" for at, lane in enumerate(lanes)]
    head = f"        {' '.join(lane_letter(at) for at in range(len(lanes)))}"
    rows = []
    for at, step in enumerate(story.steps):
        cells = [_cell(story, at, lane) for lane in lanes]
        waits = waits_text(story, at)
        mark = "*" if step.is_wrong else " "
        rows.append(f"    {at + 1:2} {mark}{' '.join(cells)}   {step_text(step)}{f'   [{waits}]' if waits else ''}")
    return [f" lanes   {' · '.join(names)}", f"         {LEGEND}", head, *rows]


def _cell(story: Story, at: int, lane: str) -> str:
    step = story.steps[at]
    if step.lane == lane:
        return MARKS[step.kind]
    return "|" if any(is_pending(each, step.begin) for each in story.steps[:at] if each.lane == lane) else "."


def is_pending(step: StoryStep, moment: int) -> bool:
    """Whether an operation that began earlier has not run at that moment. Several operations are not drawn as one."""
    is_one = step.first == step.last
    return is_one and step.kind in (WRITE, READ) and step.begin < moment and (step.end is None or moment <= step.end)


def _words(words: Sequence[Word]) -> list[str]:
    rows = [("", "seen", "", "wanted", "")]
    rows += [
        (str(word.index), printable(word.seen), word.seen_says, printable(word.wanted or "-"), word.wanted_says)
        for word in words
    ]
    return [f"    {line}" for line in aligned(rows)]
