"""Makes a story from notes: picks the steps that matter, draws the edges between them, and words the history.

Invariants:
- A step that the finding names is always included, of the others the nearest to the moment, up to MOST_STEPS.
- A missing edge is one of the finding's. Edges that follow from two others are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvcheck.core.base.record import Finding
from kvcheck.core.base.story import HOST, MESSAGE, MOST_EDGES, MOST_STEPS, READ, WRITE, Edge, Story, StoryStep, short
from kvcheck.core.cache.backend.backend import Submitted
from kvcheck.core.cache.events import Allocated, Freed, TierChanged
from kvcheck.core.stress.clocks import at
from kvcheck.core.stress.flip import pair_of
from kvcheck.core.stress.oracles.oracle import unit_text, unit_word
from kvcheck.core.stress.story_history import (
    act_text,
    history,
    is_computing,
    is_of_another,
    is_of_pages,
    row_seen,
    row_text,
    words_of,
)
from kvcheck.core.stress.story_notes import Note, StoryNotes, Touch
from kvcheck.core.stress.workload.events import (
    Faulted,
    Finished,
    Leased,
    MessageEmitted,
    Restored,
    Resumed,
    Retracted,
    Saved,
    Saw,
    Sent,
)

BEHIND = 2
"""Steps after the moment in a story: they show the waits of other operations."""
VITAL = (Saved, Restored, Retracted, Resumed, Faulted)
"""Acts that are included at any age, the last MOST_VITAL of them."""
MOST_VITAL = 4
MOST_MOVES = 4
"""Copies between ranks that a request's story includes first."""
STATUS_BEFORE_DATA, FREED_IN_USE = "KV203", "KV202"


@dataclass(slots=True, kw_only=True)
class _Piece:
    notes: list[Note]
    kind: str
    touch: Touch | None = None
    is_named: bool = False
    key: tuple[object, ...] = field(default=())

    @property
    def first(self) -> Note:
        return self.notes[0]

    @property
    def last(self) -> Note:
        return self.notes[-1]

    @property
    def is_operation(self) -> bool:
        return isinstance(self.first.event, Submitted)


def tell(notes: StoryNotes, cause: Finding, followed: Finding, *, is_flipped: bool = False) -> Story:
    """followed: the finding that the notes are about, the cause or its effect. is_flipped: the schedule runs the two
    operations of a race in the other order."""
    space = _space(notes)
    pieces = _of_place(notes, space) if space is not None else _of_request(notes)
    picked = _picked(notes, pieces)
    found = row_seen(notes)
    followed_place = unit_text(space, followed.page) if space is not None and followed.page is not None else None
    about = followed_place or f"request {followed.request}"
    if followed is not cause:
        about += f", of the symptom {followed.id}"
    about += ", in the order in which wrong bytes are read" if is_flipped and found is not None else ""
    return Story(
        about=short(about),
        steps=tuple(_step(each, space) for each in picked),
        edges=_edges(notes, picked),
        history=history(notes, space),
        row=None if found is None else short(row_text(found)),
        words=() if found is None else words_of(found, notes.requests),
    )


def _space(notes: StoryNotes) -> str | None:
    finding, event = notes.finding, notes.cause
    if finding.page is None:
        return None
    if isinstance(event, Allocated | Freed | Leased):
        return event.space if event.space in notes.places else None
    if isinstance(event, Submitted):
        placed = [
            touch
            for place in notes.places.values()
            for note in place
            if note.event is event
            for touch in note.touches
            if touch.unit == finding.page and finding.buffer in (None, *touch.buffers)
        ]
        placed.sort(key=lambda touch: touch.is_write != (finding.code != "KV201"))
        return placed[0].space if placed else None
    kind = event.mismatch.space if isinstance(event, Saw) else "full"
    if isinstance(event, Saw) and event.mismatch.tier == "host":
        kind = f"host.{kind}"
    named = f"{notes.process}:{kind}" if notes.process else kind
    return named if named in notes.places else None


# Pieces


def _of_place(notes: StoryNotes, space: str) -> list[_Piece]:
    named = _named_ordinals(notes, space)
    pieces: list[_Piece] = []
    open_pieces: dict[tuple[object, ...], _Piece] = {}
    period = 0
    for note in sorted((*notes.places[space], *_acts(notes)), key=lambda note: note.at):
        if not isinstance(note.event, Submitted):
            period += isinstance(note.event, Allocated)
            kind = MESSAGE if isinstance(note.event, MessageEmitted) else HOST
            pieces.append(_Piece(notes=[note], kind=kind, is_named=note.event is notes.cause))
            continue
        touch = _touch(notes, note, space)
        if touch is None:
            continue
        is_named = note.ordinal in named
        is_behind = note.at > (notes.moment or 0)
        key = (period, note.lane, note.event.name, touch.owner, is_named and note.ordinal, is_behind)
        if key in open_pieces:
            open_pieces[key].notes.append(note)
            continue
        kind = WRITE if touch.is_write else READ
        open_pieces[key] = _Piece(notes=[note], kind=kind, touch=touch, is_named=is_named, key=key)
        pieces.append(open_pieces[key])
    return pieces


def _acts(notes: StoryNotes) -> list[Note]:
    return [
        note
        for note in notes.acts
        if not isinstance(note.event, Submitted | Allocated | Leased | MessageEmitted | Sent | Finished)
        and getattr(note.event, "request", None) in (None, notes.finding.request)
    ]


def _of_request(notes: StoryNotes) -> list[_Piece]:
    pieces: list[_Piece] = []
    for note in notes.acts:
        if is_of_another(notes, note):
            continue
        if isinstance(note.event, Leased) or (isinstance(note.event, Allocated) and not is_of_pages(note)):
            continue
        if not isinstance(note.event, Submitted):
            kind = MESSAGE if isinstance(note.event, MessageEmitted) else HOST
            pieces.append(_Piece(notes=[note], kind=kind, is_named=note.event is notes.cause))
            continue
        mine = [touch for touch in note.touches if touch.owner == notes.finding.request] or list(note.touches)
        touch = next((touch for touch in mine if touch.is_write), mine[0] if mine else None)
        if touch is None:
            continue
        name = "computes" if is_computing(note) else note.event.name
        key = (note.lane, name)
        if pieces and pieces[-1].key == key:
            pieces[-1].notes.append(note)
            continue
        kind = WRITE if touch.is_write else READ
        pieces.append(_Piece(notes=[note], kind=kind, touch=touch, is_named=note.event is notes.cause, key=key))
    return pieces


def _touch(notes: StoryNotes, note: Note, space: str) -> Touch | None:
    """A write counts more than a read."""
    finding = notes.finding
    layer = _local_layer(notes)
    touches = [
        touch
        for touch in note.touches
        if touch.space == space
        and touch.unit == finding.page
        and (finding.buffer in (None, *touch.buffers) or not _has_buffer(notes, space))
        and (layer is None or touch.layers[0] <= layer < touch.layers[1])
        and touch.has_row(finding.row)
    ]
    return next((touch for touch in touches if touch.is_write), touches[0] if touches else None)


def _has_buffer(notes: StoryNotes, space: str) -> bool:
    return any(notes.finding.buffer in touch.buffers for note in notes.places[space] for touch in note.touches)


def _local_layer(notes: StoryNotes) -> int | None:
    """Footprints number the layers of a space; the content oracle names the model's layer."""
    finding, event = notes.finding, notes.cause
    if finding.layer is None or finding.oracle == "ordering":
        return finding.layer
    if not isinstance(event, Saw):
        return None
    found = event.mismatch
    row = notes.sites.get((found.space, found.buffer, found.piece))
    return row.layers.index(found.layer) if row is not None and found.layer in row.layers else None


def _named_ordinals(notes: StoryNotes, space: str) -> set[int | None]:
    finding, event = notes.finding, notes.cause
    if (pair := pair_of(finding)) is not None:
        return {pair.held, pair.until}
    if isinstance(event, Submitted):
        return {event.ordinal}
    if not isinstance(event, Saw):
        return set()
    reads = [
        note.ordinal
        for note in notes.places[space]
        if note.at <= (notes.moment or 0)
        and is_computing(note)
        and (touch := _touch(notes, note, space)) is not None
        and not touch.is_write
        and touch.owner == finding.request
    ]
    return set(reads[-1:])


# Steps


def _picked(notes: StoryNotes, pieces: Sequence[_Piece]) -> list[_Piece]:
    moment, finding = notes.moment or 0, notes.finding
    before = [each for each in pieces if each.first.at <= moment]
    behind = [each for each in pieces if each.first.at > moment and each.is_operation and not each.is_named]
    named = [each for each in pieces if each.is_named]
    chosen = [*named[:MOST_STEPS], *[each for each in behind if any(_waits_too(one, each) for one in named)][:BEHIND]]
    seen = finding.seen_request
    foreign = [each for each in before if each.kind == WRITE and each.touch and each.touch.owner == seen]
    chosen += foreign[-1:] if seen not in (None, finding.request) else []
    chosen += [each for each in before if isinstance(each.first.event, VITAL)][-MOST_VITAL:]
    chosen += [each for each in before if _moves_bytes(each)][-MOST_MOVES:]
    for each in reversed(before):
        reads_only = each.kind == READ and all(map(is_computing, each.notes))
        if not reads_only and not isinstance(each.first.event, TierChanged):
            chosen.append(each)
    kept = list({each.first.at: each for each in chosen}.values())[:MOST_STEPS]
    return sorted(kept, key=lambda each: each.first.at)


def _waits_too(named: _Piece, behind: _Piece) -> bool:
    return named.first.lane != behind.first.lane and _is_waited_for(named, behind)


def _moves_bytes(piece: _Piece) -> bool:
    event = piece.first.event
    spaces = {touch.space.rpartition(":")[0] for touch in piece.first.touches}
    return isinstance(event, Submitted) and not event.name.startswith("wire.seal") and len(spaces) > 1


def _step(piece: _Piece, space: str | None) -> StoryStep:
    first, last = piece.first, piece.last
    if not isinstance(first.event, Submitted):
        lane = "messages" if piece.kind == MESSAGE else f"{first.process} scheduler".strip()
        return StoryStep(
            lane=short(lane),
            kind=piece.kind,
            text=short(act_text(first)),
            begin=first.at,
            end=first.at,
            is_wrong=piece.is_named,
        )
    assert piece.touch is not None
    ended = [note.ended for note in piece.notes]
    return StoryStep(
        lane=short(first.lane),
        kind=piece.kind,
        text=short(_operation_text(piece, piece.touch, space)),
        begin=first.at,
        end=None if None in ended else max(each for each in ended if each is not None),
        first=first.ordinal,
        last=last.ordinal,
        is_wrong=piece.is_named,
    )


def _operation_text(piece: _Piece, touch: Touch, space: str | None) -> str:
    event = piece.first.event
    assert isinstance(event, Submitted)
    verb = "writes" if touch.is_write else "reads"
    owner = event.request if touch.owner is None else touch.owner
    whose = "" if owner is None else f" for request {owner}"
    if space is not None:
        return f"{event.name} {verb}{whose}"
    if is_computing(piece.first):
        return f"computes{whose}"
    source = next((each for each in piece.first.touches if not each.is_write), None)
    if touch.is_write and source is not None and source.space != touch.space:
        return f"{event.name} copies {_units(source)} to {_units(touch)}"
    return f"{event.name} {verb} {_units(touch)}"


def _units(touch: Touch) -> str:
    word = unit_word(touch.space)
    plural = "" if len(touch.units) == 1 else "s"
    return f"{touch.space} {word}{plural} {', '.join(map(str, touch.units))}"


# Edges


def _edges(notes: StoryNotes, pieces: Sequence[_Piece]) -> tuple[Edge, ...]:
    missing = _missing(notes, pieces)
    waits = {
        (source, target)
        for target in range(len(pieces))
        for source in range(target)
        if _is_waited_for(pieces[source], pieces[target])
    }
    ordered = waits | {
        (source, target)
        for target in range(len(pieces))
        for source in range(target)
        if not pieces[source].is_operation and pieces[source].first.process == pieces[target].first.process
    }
    plain = [
        (source, target)
        for source, target in sorted(waits, key=lambda pair: (pair[1], pair[0]))
        if pieces[source].first.lane != pieces[target].first.lane
        and not any((source, via) in ordered and (via, target) in ordered for via in range(source + 1, target))
    ]
    edges = [Edge(source=source, target=target, is_missing=True) for source, target in missing]
    edges += [Edge(source=source, target=target) for source, target in plain if (source, target) not in missing]
    return tuple(edges[:MOST_EDGES])


def _is_waited_for(source: _Piece, target: _Piece) -> bool:
    is_told = target.is_operation or target.is_named or isinstance(target.first.event, Freed)
    if not source.is_operation or not is_told:
        return False
    return at(target.first.clock, source.last.lane_number) >= source.last.count


def _missing(notes: StoryNotes, pieces: Sequence[_Piece]) -> list[tuple[int, int]]:
    finding = notes.finding
    if (pair := pair_of(finding)) is not None:
        places = {each.first.ordinal: at for at, each in enumerate(pieces) if each.is_named}
        held, until = places.get(pair.held), places.get(pair.until)
        return [] if held is None or until is None else [(held, until)]
    last = next((at for at, each in enumerate(pieces) if each.first.event is notes.cause), None)
    if last is None:
        return []
    if finding.code == STATUS_BEFORE_DATA:
        return [(at, last) for at, each in enumerate(pieces[:last]) if _is_unproven(notes, each, pieces[last])]
    if finding.code == FREED_IN_USE and isinstance(notes.cause, Freed):
        pending = [
            at
            for at, each in enumerate(pieces[:last])
            if each.is_operation and (each.last.ended is None or each.last.ended > (notes.moment or 0))
        ]
        return [(at, last) for at in pending]
    return []


def _is_unproven(notes: StoryNotes, piece: _Piece, status: _Piece) -> bool:
    mine = f"{notes.process}:"
    lands = any(touch.is_write and touch.space.startswith(mine) for touch in piece.first.touches)
    is_foreign = piece.is_operation and bool(notes.process) and piece.first.process != notes.process
    return is_foreign and lands and not _is_waited_for(piece, status)
