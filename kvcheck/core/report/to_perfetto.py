"""A story as a trace for Perfetto or chrome://tracing: lanes are threads, waits are flows.

Invariants:
- One microsecond of the trace is one event of the schedule.
- Slices of a thread do not overlap: a step ends at the latest when the next one of its lane begins.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from kvcheck.core.base.record import Finding
from kvcheck.core.base.story import Story
from kvcheck.core.report.markdown import printable
from kvcheck.core.report.story_text import lanes_of, step_text
from kvcheck.core.run.store import write_text

PID = 1


def write(finding: Finding, path: Path) -> None:
    assert finding.story is not None
    trace = {
        "displayTimeUnit": "ms",
        "otherData": {"finding": finding.id, "unit": "one microsecond is one event of the schedule"},
        "traceEvents": [*_names(finding, finding.story), *_slices(finding.story), *_flows(finding.story)],
    }
    write_text(path, json.dumps(trace, indent=1, allow_nan=False) + "\n")


def _names(finding: Finding, story: Story) -> Iterator[dict[str, object]]:
    title = printable(f"{finding.id} {finding.code} {finding.cell}")
    yield {"ph": "M", "name": "process_name", "pid": PID, "tid": 0, "args": {"name": title}}
    for tid, lane in enumerate(lanes_of(story), 1):
        yield {"ph": "M", "name": "thread_name", "pid": PID, "tid": tid, "args": {"name": printable(lane)}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": PID, "tid": tid, "args": {"sort_index": tid}}


def _slices(story: Story) -> Iterator[dict[str, object]]:
    lanes = lanes_of(story)
    for at, step in enumerate(story.steps):
        named = {"step": at + 1, "named by the finding": step.is_wrong, "pending": step.end is None}
        yield {
            "ph": "X",
            "name": printable(step_text(step)),
            "cat": f"{step.kind},finding" if step.is_wrong else step.kind,
            "pid": PID,
            "tid": lanes.index(step.lane) + 1,
            "ts": step.begin,
            "dur": _end(story, at) - step.begin,
            "args": named,
        }


def _end(story: Story, at: int) -> int:
    step = story.steps[at]
    last = max(each.begin for each in story.steps) + 1
    end = last if step.end is None else step.end
    following = [each.begin for each in story.steps[at + 1 :] if each.lane == step.lane and each.begin > step.begin]
    return max(step.begin + 1, min([end, *following]))


def _flows(story: Story) -> Iterator[dict[str, object]]:
    """An arrow from a step to the one that waits for it, or should."""
    lanes = lanes_of(story)
    for number, edge in enumerate(story.edges, 1):
        name = "MISSING WAIT" if edge.is_missing else "wait"
        for phase, at in (("s", edge.source), ("f", edge.target)):
            step = story.steps[at]
            end = {"bp": "e"} if phase == "f" else {}
            row = {"ph": phase, "id": number, "name": name, "cat": "missing" if edge.is_missing else "wait"}
            yield {**row, **end, "pid": PID, "tid": lanes.index(step.lane) + 1, "ts": step.begin}
