"""Story: the origin of one finding: a timeline of the operations that matter, a history in words, and a row as hex.

Invariants:
- A story is bounded in steps, edges, lines, words and characters, whatever the schedule did.
- Times are indices in the schedule's history, never seconds, so a story is the same each time.
"""

from __future__ import annotations

from dataclasses import dataclass

MOST_STEPS = 12
MOST_EDGES = 16
MOST_LINES = 12
MOST_WORDS = 8
TEXT_CHARS = 240

WRITE, READ, HOST, MESSAGE = "write", "read", "host", "message"
KINDS = (WRITE, READ, HOST, MESSAGE)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoryStep:
    """An event in a lane. begin, end: indices in the history; end is None while it is pending.

    first, last: ordinals of its operations; None if it has none. is_wrong: the finding names it.
    """

    lane: str
    kind: str
    text: str
    begin: int
    end: int | None = None
    first: int | None = None
    last: int | None = None
    is_wrong: bool = False

    def __post_init__(self) -> None:
        _check(self.kind in KINDS, f"expected a kind of {', '.join(KINDS)}, got {self.kind[:40]!r}")
        _check(self.begin >= 0 and (self.end is None or self.begin <= self.end), "a step ends before it begins")
        _check_text(self.lane, self.text)

    @property
    def number(self) -> str:
        if self.first is None:
            return ""
        return f"#{self.first}" if self.last in (None, self.first) else f"#{self.first} to #{self.last}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """A wait of one step for another, by index in the story. is_missing: required and absent."""

    source: int
    target: int
    is_missing: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """A word of the row that was read. seen, wanted: hex. wanted: None if unknown."""

    index: int
    seen: str
    seen_says: str
    wanted: str | None
    wanted_says: str

    def __post_init__(self) -> None:
        _check_text(self.seen, self.seen_says, self.wanted or "", self.wanted_says)


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """about: the place or request that it follows. untold: why there is nothing else; None: complete. history: events
    of the place or the request. row: the row that was read; None: unknown."""

    about: str
    untold: str | None = None
    steps: tuple[StoryStep, ...] = ()
    edges: tuple[Edge, ...] = ()
    history: tuple[str, ...] = ()
    row: str | None = None
    words: tuple[Word, ...] = ()

    def __post_init__(self) -> None:
        for rows, most in (
            (self.steps, MOST_STEPS),
            (self.edges, MOST_EDGES),
            (self.history, MOST_LINES),
            (self.words, MOST_WORDS),
        ):
            _check(len(rows) <= most, f"expected at most {most} of a kind, got {len(rows)}")
        _check_text(self.about, self.untold or "", self.row or "", *self.history)
        for edge in self.edges:
            inside = 0 <= edge.source < len(self.steps) and 0 <= edge.target < len(self.steps)
            _check(inside and edge.source != edge.target, "an edge names a step that is not in the story")


def short(text: str) -> str:
    return text if len(text) <= TEXT_CHARS else f"{text[: TEXT_CHARS - 2]} …"


def _check_text(*texts: str) -> None:
    longest = max(map(len, texts))
    _check(longest <= TEXT_CHARS, f"expected texts of at most {TEXT_CHARS} characters, got {longest}")


def _check(is_right: bool, complaint: str) -> None:
    if not is_right:
        raise ValueError(f"story: {complaint}")
