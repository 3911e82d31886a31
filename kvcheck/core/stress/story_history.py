"""The history of a page or of a request in words, from its notes: its owners, writes, saves and frees."""

from __future__ import annotations

from collections.abc import Sequence

from kvcheck.core.base import content
from kvcheck.core.base.content import Site, Tag
from kvcheck.core.base.story import MOST_LINES, MOST_WORDS, Word, short
from kvcheck.core.cache.backend.backend import Submitted
from kvcheck.core.cache.events import Allocated, Event, Freed, RoomChanged, SealsFitted, TierChanged
from kvcheck.core.stress.flip import pair_of
from kvcheck.core.stress.oracles.oracle import unit_word
from kvcheck.core.stress.story_notes import MOST_NOTES, Note, StoryNotes
from kvcheck.core.stress.workload.events import (
    Aborted,
    Broke,
    Failed,
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
from kvcheck.core.stress.workload.mismatch import Mismatch

POSITIONS = 4096
"""Positions that are tried for a word of 32 bits; a longer request raises it to its own position."""
TRIED = 64
"""Requests to try for a word of 32 bits: it carries half a tag, so each takes a search."""
OWNERS = 5
"""Owners of a page in a history: the last ones, and the one whose words were seen."""
FIRST_LINES = 4
"""Lines kept at the beginning if others are left out."""
VERBS = {
    "decode.write": "written",
    "decode.send_early": "sent",
    "offload.save": "saved",
    "offload.restore": "restored",
    "hicache.load": "loaded",
    "hicache.backup": "backed up",
    "receive.mark": "marked as empty",
}
"""Effects of operations on a page, in a word. Others have their names."""
STATES = {0: "failed", 3: "transferring", 4: "success"}


def row_text(found: Mismatch) -> str:
    piece = f".{found.piece}" if found.piece and found.piece not in found.buffer else ""
    if found.space == "metadata":
        return f"{found.buffer}, slot {found.page}, read for request {found.request}"
    unit = "slot" if found.space == "state" else "page"
    whose = f"of request {found.request} on the host" if found.tier == "host" else f"read for request {found.request}"
    return f"{found.buffer}{piece}, layer {found.layer}, {unit} {found.page}, row {found.row}, {whose}"


def words_of(found: Mismatch, requests: int) -> tuple[Word, ...]:
    return tuple(_word(found, at, requests) for at in range(min(MOST_WORDS, len(found.words))))


def _word(found: Mismatch, at: int, requests: int) -> Word:
    seen = found.words[at]
    wanted = _wanted(found, at)
    belongs = "not known" if wanted is None else f"request {found.author}, position {found.position}"
    if wanted == 0:
        belongs = "an empty state"
    return Word(
        index=at,
        seen=_hex(seen, found.half),
        seen_says="as wanted" if seen == wanted else _said(says(found, at, requests)),
        wanted=None if wanted is None else _hex(wanted, found.half),
        wanted_says=belongs,
    )


def _wanted(found: Mismatch, at: int) -> int | None:
    """None for metadata, whose fields are values, and for an unknown author."""
    if found.space == "metadata" or not found.author:
        return None
    if found.position < 0:
        return 0
    whole = content.word(Tag(found.author, 0, found.position), _site(found), at)
    return _half(whole) if found.half else whole


def says(found: Mismatch, at: int, requests: int) -> Tag | str:
    site, seen = _site(found), found.words[at]
    if seen == (content.POISON_HALF if found.half else content.POISON_WORD):
        return "never written"
    if seen == 0:
        return "empty"
    if found.half:
        near = tuple(dict.fromkeys(each for each in (found.request, found.author) if each))
        positions = max(POSITIONS, found.position + 1)
        tag = content.decode_half(seen, site, at, requests=min(requests, TRIED), positions=positions, first=near)
    else:
        tag = content.decode(seen, site, at, requests=max(requests, 1 << 20))
    return "no word of this place" if tag is None else tag


def _said(tag: Tag | str) -> str:
    return tag if isinstance(tag, str) else f"request {tag.request}, position {tag.position}"


def _site(found: Mismatch) -> Site:
    return Site(found.space, found.buffer, found.piece, found.layer, found.first_word)


def _hex(word: int, half: bool) -> str:
    digits = 8 if half else 16
    return f"{word & ((1 << 4 * digits) - 1):0{digits}x}"


def _half(word: int) -> int:
    low = word & 0xFFFFFFFF
    return low - (1 << 32) if low >> 31 else low


def is_computing(note: Note) -> bool:
    return isinstance(note.event, Submitted) and note.event.name.startswith(("decode.write", "decode.read"))


def history(notes: StoryNotes, space: str | None) -> tuple[str, ...]:
    lines = _of_request(notes) if space is None else _of_place(notes, space)
    if len(lines) > MOST_LINES:
        cut = len(lines) - MOST_LINES + 1
        lines = [*lines[:FIRST_LINES], f"({cut} more are left out)", *lines[cut + FIRST_LINES :]]
    return tuple(map(short, lines))


def row_seen(notes: StoryNotes) -> Mismatch | None:
    """The row of the finding; or of a race, the first row read wrong at its place."""
    finding = notes.finding
    if isinstance(notes.cause, Saw):
        return notes.cause.mismatch
    if pair_of(finding) is None:
        return None
    return next((each for each in notes.saw if (each.page, each.buffer) == (finding.page, finding.buffer)), None)


def is_of_another(notes: StoryNotes, note: Note) -> bool:
    event = note.event
    owner = event.owner if isinstance(event, Allocated) else getattr(event, "request", None)
    if not isinstance(event, Submitted) and owner not in (None, notes.finding.request):
        return True
    if isinstance(event, Submitted) and notes.finding.request not in (
        event.request,
        *(touch.owner for touch in note.touches),
    ):
        return True
    end = notes.process.rpartition("-")[0]
    ranks = {note.process, *(touch.space.rpartition(":")[0] for touch in note.touches)}
    if isinstance(event, MessageEmitted):
        ranks = {event.sender, event.peer}
    return bool(end) and notes.process not in ranks and any(rank.startswith(f"{end}-") for rank in ranks)


def is_of_pages(note: Note) -> bool:
    return isinstance(note.event, Allocated) and unit_word(note.event.space) == "page"


def _of_place(notes: StoryNotes, space: str) -> list[str]:
    finding, moment = notes.finding, notes.moment or 0
    assert finding.page is not None
    place = [note for note in notes.places[space] if note.at <= moment]
    periods: list[list[Note]] = [[]]
    for note in place:
        if isinstance(note.event, Allocated):
            periods.append([])
        periods[-1].append(note)
    told = [(number, each) for number, each in enumerate(periods) if each]
    kept = told[-OWNERS:]
    owner = finding.seen_request
    whose = [] if owner is None else [pair for pair in told[:-OWNERS] if _owner(pair[1]) == owner]
    kept = [*whose[-1:], *kept]
    left_out = len(told) - len(kept)
    lines = []
    if left_out or len(notes.places[space]) == MOST_NOTES:
        count = str(left_out) if left_out else "others"
        lines.append(f"{count} earlier {'owner is' if left_out == 1 else 'owners are'} left out")
    lines += [_period(notes, each, space) for _, each in kept]
    lines += [
        act_text(note)
        for note in notes.acts
        if isinstance(note.event, Saved | Restored) and set(note.event.buffers) != set(note.event.table)
        if note.event.request == finding.request and note.at <= moment
    ][-2:]
    return lines


def _owner(period: Sequence[Note]) -> int | None:
    event = period[0].event
    return event.owner if isinstance(event, Allocated) else None


def _period(notes: StoryNotes, period: Sequence[Note], space: str) -> str:
    """ "given to request 2, written (forward #8 to #14), saved (d2h #31), freed"."""
    told: dict[tuple[str, str], list[int]] = {}
    parts: list[str] = []
    holder = _owner(period)
    order: dict[str, tuple[str, str] | None] = {}
    for note in period:
        event = note.event
        if isinstance(event, Submitted):
            verb = _verb(notes, note, space, holder)
            if verb is not None:
                told.setdefault((verb, note.lane), []).append(event.ordinal)
                order.setdefault(f"{verb} {note.lane}", (verb, note.lane))
            continue
        if not isinstance(event, Allocated):
            order.setdefault(_handed_over(event), None)
    for text, key in order.items():
        if key is None:
            parts.append(text)
            continue
        ordinals = told[key]
        span = f"#{ordinals[0]}" if len(ordinals) == 1 else f"#{ordinals[0]} to #{ordinals[-1]}"
        parts.append(f"{key[0]} ({key[1]} {span})")
    text = ", ".join(parts)
    return text if holder is None else f"request {holder}: {text or 'nothing was done'}"


def _verb(notes: StoryNotes, note: Note, space: str, holder: int | None) -> str | None:
    """Reads of passes count only for the finding's request."""
    event, finding = note.event, notes.finding
    assert isinstance(event, Submitted)
    touches = [touch for touch in note.touches if touch.space == space and touch.unit == finding.page]
    if finding.buffer is not None and any(finding.buffer in touch.buffers for touch in touches):
        touches = [touch for touch in touches if finding.buffer in touch.buffers and touch.has_row(finding.row)]
    elif finding.buffer is not None and touches and "." not in finding.buffer:
        return None
    if not touches:
        return None
    is_write = any(touch.is_write for touch in touches)
    owner = next((touch.owner for touch in touches if touch.is_write == is_write), None)
    whose = "" if owner in (None, holder) else f" for request {owner}"
    if is_computing(note) and not is_write:
        return f"read for request {owner}" if owner == finding.request else None
    if event.name in VERBS:
        return f"{VERBS[event.name]}{whose}"
    return f"{'written' if is_write else 'read'} by {event.name}{whose}"


def _handed_over(event: Event) -> str:
    if isinstance(event, Freed):
        return "freed"
    if isinstance(event, TierChanged):
        return f"{'joined' if event.added else 'left'} the prefix cache"
    return type(event).__name__.lower()


def _of_request(notes: StoryNotes) -> list[str]:
    moment = notes.moment or 0
    lines: dict[str, None] = {}
    for note in notes.acts:
        event = note.event
        is_handed = isinstance(event, Leased) or (isinstance(event, Allocated) and not is_of_pages(note))
        if note.at > moment or isinstance(event, Submitted) or is_handed or is_of_another(notes, note):
            continue
        is_named = not note.process or isinstance(event, MessageEmitted)
        lines.setdefault(act_text(note) if is_named else f"{note.process}: {act_text(note)}")
    return [*lines]


def act_text(note: Note) -> str:
    """The host's act, as a sentence without a subject if that is the scheduler."""
    event = note.event
    if isinstance(event, Allocated):
        units = ", ".join(map(str, event.ids[:8])) + (" ..." if len(event.ids) > 8 else "")
        word = unit_word(event.space)
        return f"gives {event.space} {word}{'' if len(event.ids) == 1 else 's'} {units} to request {event.owner}"
    if isinstance(event, Freed):
        count = "" if len(event.ids) == 1 else f" and {len(event.ids) - 1} more"
        return f"frees {event.space} {unit_word(event.space)} {event.ids[0]}{count}" if event.ids else "frees nothing"
    if isinstance(event, Saved | Restored):
        verb = "saved" if isinstance(event, Saved) else "restored"
        absent = [name for name in event.table if name not in event.buffers]
        without = f" without {', '.join(absent)}" if absent else ""
        return f"request {event.request} was {verb}{without}, {event.tokens} tokens"
    if isinstance(event, RoomChanged):
        why = f": {event.reason}" if event.reason else ""
        old, new = (STATES.get(state, str(state)) for state in (event.old, event.new))
        return f"the room of request {event.request} goes from {old} to {new}{why}"
    if isinstance(event, MessageEmitted):
        lost = "; the message is lost" if event.copies == 0 else ""
        return f"{event.sender} sends {event.kind} of request {event.request} to {event.peer}{lost}"
    if isinstance(event, SealsFitted):
        return f"the seals of request {event.request} fit, over {event.size} bytes"
    if isinstance(event, Broke):
        return f"{event.error}: {event.message}"
    return _plain_act(event)


def _plain_act(event: Event) -> str:
    request = getattr(event, "request", None)
    if isinstance(event, Sent):
        return f"request {request} is sent, {event.prompt} tokens"
    if isinstance(event, Failed | Faulted):
        why = event.reason if isinstance(event, Failed) else event.why
        return f"request {request} {'fails' if isinstance(event, Failed) else 'gets a fault'}: {why}"
    if isinstance(event, Leased):
        return f"request {request} gets {event.space} slot {event.slot}"
    if isinstance(event, TierChanged):
        return f"the prefix cache {'takes' if event.added else 'drops'} it"
    verbs = {Retracted: "is retracted", Resumed: "is resumed", Aborted: "is aborted", Finished: "has finished"}
    return f"request {request} {verbs[type(event)]}"
