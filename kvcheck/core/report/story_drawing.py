"""The lanes of a story as a drawing: lanes from left to right, time downwards, waits as arrows between steps.

Invariants:
- A missing wait is dashed, crossed out and named, besides red.
"""

from __future__ import annotations

from collections.abc import Iterator

from markupsafe import Markup

from kvcheck.core.base.story import HOST, MESSAGE, READ, WRITE, Edge, Story, StoryStep
from kvcheck.core.report.markdown import printable
from kvcheck.core.report.story_text import is_pending, lane_letter, lanes_of, step_text

ROW, TOP, LEFT, HALF = 38, 26, 30, 7
"""Height of a step, height of the lane names, width of the step numbers, half of a mark."""

WIDE, NARROW, MOST_WIDE = 46, 30, 6
"""Width of a lane, and its width beyond MOST_WIDE lanes: the list beside the drawing needs room for two lines."""


def story_svg(story: Story) -> Markup:
    lanes = lanes_of(story)
    width, height = LEFT + _lane_width(lanes) * len(lanes) + 24, TOP + ROW * len(story.steps)
    title = f"{len(story.steps)} steps in {len(lanes)} lanes"
    missing = sum(edge.is_missing for edge in story.edges)
    if missing:
        title += f"; {missing} missing {'wait' if missing == 1 else 'waits'}"
    opened = Markup('<svg class="lanes" viewBox="0 0 {w} {h}" width="{w}" height="{h}" role="img" aria-label="{t}">')
    parts = [*_frame(story, lanes, height), *_bars(story, lanes, height), *_edges(story, lanes), *_marks(story, lanes)]
    return opened.format(w=width, h=height, t=title) + Markup("\n").join(parts) + Markup("</svg>")


def _lane_width(lanes: list[str]) -> int:
    return WIDE if len(lanes) <= MOST_WIDE else NARROW


def _lane_x(lanes: list[str], at: int) -> int:
    return LEFT + _lane_width(lanes) * at + _lane_width(lanes) // 2


def _x(lanes: list[str], step: StoryStep) -> int:
    return _lane_x(lanes, lanes.index(step.lane))


def _y(at: int) -> int:
    return TOP + ROW * at + ROW // 2


def _frame(story: Story, lanes: list[str], height: int) -> Iterator[Markup]:
    for at, lane in enumerate(lanes):
        x = _lane_x(lanes, at)
        yield Markup('<path class="lane" d="M{} {}V{}"/>').format(x, TOP - 4, height - 6)
        name = Markup('<text x="{}" y="16" class="mid"><title>{}</title>{}</text>')
        yield name.format(x, printable(lane), lane_letter(at))
    for at in range(len(story.steps)):
        yield Markup('<text x="{}" y="{}" class="end">{}</text>').format(LEFT - 8, _y(at) + 4, at + 1)


def _bars(story: Story, lanes: list[str], height: int) -> Iterator[Markup]:
    for at, step in enumerate(story.steps):
        later = [row for row in range(at + 1, len(story.steps)) if is_pending(step, story.steps[row].begin)]
        if later:
            top, bottom = _y(at), min(_y(later[-1]) + ROW // 2 - 4, height)
            yield Markup('<rect class="bar" x="{}" y="{}" width="6" height="{}"/>').format(
                _x(lanes, step) - 3, top, bottom - top
            )


def _marks(story: Story, lanes: list[str]) -> Iterator[Markup]:
    for at, step in enumerate(story.steps):
        x, y = _x(lanes, step), _y(at)
        kind = f"{step.kind} wrong" if step.is_wrong else step.kind
        shapes = {
            WRITE: f"M{x - HALF} {y - HALF}h{2 * HALF}v{2 * HALF}h-{2 * HALF}z",
            READ: f"M{x - HALF} {y}a{HALF} {HALF} 0 1 1 {2 * HALF} 0a{HALF} {HALF} 0 1 1 -{2 * HALF} 0z",
            HOST: f"M{x} {y - HALF - 1}L{x + HALF + 1} {y}L{x} {y + HALF + 1}L{x - HALF - 1} {y}z",
            MESSAGE: f"M{x - HALF} {y - HALF}L{x + HALF} {y}L{x - HALF} {y + HALF}z",
        }
        yield Markup('<path class="{}" d="{}"><title>{}</title></path>').format(
            kind, shapes[step.kind], printable(f"{at + 1}: {step.lane}: {step_text(step)}")
        )


def _edges(story: Story, lanes: list[str]) -> Iterator[Markup]:
    for edge in sorted(story.edges, key=lambda edge: edge.is_missing):
        yield from _edge(story, lanes, edge)


def _edge(story: Story, lanes: list[str], edge: Edge) -> Iterator[Markup]:
    source, target = (story.steps[at] for at in (edge.source, edge.target))
    x1, y1, x2, y2 = _x(lanes, source), _y(edge.source), _x(lanes, target), _y(edge.target)
    side = 0 if x1 == x2 else (HALF + 3 if x2 > x1 else -HALF - 3)
    end = x2 - side
    bend = max(18, abs(y2 - y1) // 3)
    path = f"M{x1} {y1}C{x1 + side * 2} {y1 + bend} {end - side * 2} {y2 - bend // 4} {end} {y2}"
    yield Markup('<path class="{}" d="{}"/>').format("missing" if edge.is_missing else "wait", path)
    back = -5 if side >= 0 else 5
    yield Markup('<path class="{}" d="M{} {}L{} {}L{} {}"/>').format(
        "missing head" if edge.is_missing else "wait head", end + back, y2 - 4, end, y2, end + back, y2 + 4
    )
    if edge.is_missing:
        x, y = (x1 + end) // 2, (y1 + y2) // 2
        yield Markup('<path class="cross" d="M{} {}l12 12m0 -12l-12 12"/>').format(x - 6, y - 6)
        yield Markup('<text class="mid missing-name" x="{}" y="{}">no wait</text>').format(x, y - 11)
