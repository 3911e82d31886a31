"""Causes: which findings of a schedule are symptoms of another one, and which findings of a run are one bug.

    stage       subject                                                      oracles
    0           a status that the bytes do not have, a fault unnoticed       protocol: KV203, KV301, KV602
    1 to 6      a rule of memory, ids, lengths or footprints                 aliasing, lifetime, residency, contract,
                                                                             audit, guards of the code under test
    7, 8        a missing edge; a leak                                       ordering, accounting
    9           wrong bytes                                                  content and all others
    10 to 12    consequences of wrong bytes                                  protocol: others, reports, transfers,
                                                                             progress, output, liveness
    13          calls that are not refused                                   contract: KV308

A finding is a symptom of an earlier stage's finding with which it shares a request, page or buffer. Consequences of
wrong bytes are symptoms of the first cause.

Invariants:
- A leak explains no wrong bytes, and wrong bytes explain no leak.
- A symptom keeps its code, message, schedule line and place in the record.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from kvcheck.core.base.cells import is_engine, keys_of
from kvcheck.core.base.record import Finding

GUARDS = frozenset({"KV202", "KV301", "KV402", "KV403"})
"""Codes of errors that the code under test raises when it refuses a wrong call."""
CALL = "KV308"
"""Illegal calls, made by a probe, that an engine does not refuse."""
FALSE_STATUS = frozenset({"KV203", "KV301", "KV602"})
STAGES = {"aliasing": 1, "lifetime": 2, "residency": 3, "contract": 4, "audit": 5, "ordering": 7, "accounting": 8}
ENDS = {"protocol": 10, "reports": 10, "transfers": 10, "progress": 10, "bytes": 10, "output": 11, "liveness": 12}
UNMOVED = "KV304"
"""A buffer that was not moved explains wrong bytes of that buffer alone."""
GUARD, ACCOUNTING, BYTES, CALLS = 6, STAGES["accounting"], 9, 13
TOLD = frozenset({"lifetime", "residency", "contract", "aliasing", "liveness"})
"""Oracles whose messages name the broken rule if no buffer does. Numbers in them differ each time."""
SINGLE = frozenset({"known-answers", "bench"})
"""Oracles whose findings each stand alone: they name places in an answer, no schedule."""
NUMBERS = re.compile(r"\[[-\d, ]*\]|-?\d+")
RANKS = re.compile(r"\b(prefill|decode)-\d+(: ?)?")
MOST_OF_A_RULE = 160
CONDITIONAL = " (conditional)"

Signature = tuple[object, ...]


def stage(finding: Finding) -> int:
    if finding.oracle == "protocol" and finding.code in FALSE_STATUS:
        return 0
    if finding.oracle == "liveness" and finding.code in GUARDS:
        return GUARD
    if finding.code == CALL:
        return CALLS
    if _is_changed(finding):
        return STAGES["aliasing"]
    return STAGES.get(finding.oracle) or ENDS.get(finding.oracle, BYTES)


def _is_changed(finding: Finding) -> bool:
    """True for index values that changed under a transfer: seen only at the acknowledgement, after pages that they name
    wrongly were freed, written and read. (mutant: move-changes-indices)"""
    return finding.oracle == "residency" and finding.code == "KV303" and finding.page is None


def signature(finding: Finding) -> Signature:
    """Return a key that findings of one bug share across schedules, cells and requests.

    Probes of an installed engine each test another part of it, so their findings need cell and reader too.
    """
    kind = (finding.oracle, finding.code, finding.tier, _buffer(finding), finding.condition)
    if finding.oracle in SINGLE:
        return (*kind, finding.id or finding.message)
    if is_engine(keys_of(finding.schedule).get("target", "")):
        return (*kind, finding.cell, finding.lane)
    if finding.oracle == "ordering":
        return (finding.oracle, finding.code, finding.tier, *operations(finding))
    if finding.oracle in TOLD and finding.buffer is None:
        return (*kind, NUMBERS.sub("#", RANKS.sub("", finding.message)))
    return kind if finding.oracle in TOLD or finding.oracle == "accounting" else (*kind, finding.scenario)


def place_of(finding: Finding) -> str:
    """Return a text that is equal for the same bug in other schedules, releases and machines."""
    where = ", ".join(
        part for part in (" ".join(filter(None, (finding.tier, _buffer(finding)))), _reader(finding)) if part
    )
    if finding.oracle == "ordering":
        where = " before ".join(str(name) for name in operations(finding) if name is not None) or where
    where = where or NUMBERS.sub("#", RANKS.sub("", finding.message)).splitlines()[0][:MOST_OF_A_RULE].strip()
    return f"{finding.oracle}: {where}{'' if finding.condition is None else CONDITIONAL}"


def _reader(finding: Finding) -> str | None:
    """None for kvcheck's own engine: its lanes are queues, which identify no bug."""
    return finding.lane if is_engine(keys_of(finding.schedule).get("target", "")) else None


def in_causal_order(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Order the findings of one schedule: each cause, then its symptoms. Renumber their ids from "1"."""
    groups: list[_Group] = []
    for finding in sorted(findings, key=_order):
        group = next((each for each in groups if each.explains(finding)), None)
        if group is None:
            group = _Group()
            groups.append(group)
        group.add(finding)
    ordered: list[Finding] = []
    for group in groups:
        cause = str(len(ordered) + 1)
        for finding in group.findings:
            own = str(len(ordered) + 1)
            ordered.append(replace(finding, id=own, cause=None if own == cause else cause))
    return tuple(ordered)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bug:
    """One entry of a run. findings: causes and symptoms. cells: in the run's order."""

    cause: Finding
    findings: tuple[Finding, ...]
    cells: tuple[str, ...]

    @property
    def symptoms(self) -> dict[str, int]:
        others = [each for each in self.findings if signature(each) != signature(self.cause)]
        return dict(Counter(each.code for each in sorted(others, key=stage)))


def bugs(findings: Sequence[Finding]) -> tuple[Bug, ...]:
    by_id = {finding.id: finding for finding in findings if finding.id}
    members: dict[Signature, list[Finding]] = {}
    for finding in findings:
        root = by_id.get(finding.cause or "", finding)  # a cause that was not kept leaves its symptom a cause
        members.setdefault(signature(root), []).append(finding)
    found = [_bug(each) for each in members.values()]
    return tuple(sorted(found, key=lambda bug: (bug.cause.condition is not None, stage(bug.cause))))


def _bug(members: Sequence[Finding]) -> Bug:
    cause = next((each for each in members if each.cause is None), members[0])
    return Bug(
        cause=cause,
        findings=tuple(members),
        cells=tuple(dict.fromkeys(each.cell for each in members)),
    )


def _order(finding: Finding) -> tuple[object, ...]:
    """By stage. Wrong bytes: foreign ones before misplaced ones, those with a known owner first."""
    is_bytes = stage(finding) == BYTES
    return (
        finding.condition is not None,
        stage(finding),
        finding.code if is_bytes else "",
        is_bytes and finding.seen_request is None,
    )


@dataclass(slots=True)
class _Group:
    findings: list[Finding] = field(default_factory=list)
    _requests: set[int] = field(default_factory=set)
    _pages: set[tuple[str | None, int]] = field(default_factory=set)
    _buffers: set[str] = field(default_factory=set)
    _signatures: set[Signature] = field(default_factory=set)

    def add(self, finding: Finding) -> None:
        self.findings.append(finding)
        self._signatures.add(signature(finding))
        if stage(finding) <= BYTES:  # symptoms of wrong bytes explain nothing further
            self._requests |= _requests(finding)
            self._pages |= _pages(finding)
            self._buffers |= {buffer for buffer in (_buffer(finding),) if buffer is not None}

    def explains(self, finding: Finding) -> bool:
        if finding.condition != self.findings[0].condition:
            return False
        if signature(finding) in self._signatures:
            return True
        if finding.oracle in SINGLE or CALL in (finding.code, self.findings[0].code):
            return False
        first, then = stage(self.findings[0]), stage(finding)
        if then == first:
            return self._is_same_race(finding) if finding.oracle == "ordering" else self._shares(finding)
        if then > BYTES:
            return finding.oracle != "output" or first != ACCOUNTING
        if ACCOUNTING in (first, then):
            return then == ACCOUNTING and first < STAGES["ordering"]
        if first in (STAGES["residency"], GUARD) or _is_changed(self.findings[0]):
            # Ids of cached pages, which every buffer and every sharer uses.
            return _buffer(finding) != "metadata"
        if first == STAGES["ordering"] or self.findings[0].code == UNMOVED:
            return _buffer(finding) in self._buffers
        return self._shares(finding)

    def _shares(self, finding: Finding) -> bool:
        return (
            bool(_requests(finding) & self._requests)
            or bool(_pages(finding) & self._pages)
            or _buffer(finding) in self._buffers
        )

    def _is_same_race(self, finding: Finding) -> bool:
        earlier = {operations(each)[0] for each in self.findings if each.oracle == "ordering"}
        theirs = {each.seen_request for each in self.findings if each.oracle == "ordering"} - {None}
        return operations(finding)[0] in earlier - {None} or finding.seen_request in theirs


def _requests(finding: Finding) -> set[int]:
    return {each for each in (finding.request, finding.seen_request) if each is not None}


def _pages(finding: Finding) -> set[tuple[str | None, int]]:
    return set() if finding.page is None else {(finding.tier, finding.page)}


def _buffer(finding: Finding) -> str | None:
    name = finding.buffer
    return "metadata" if name is not None and name.startswith("metadata") else name


def operations(finding: Finding) -> tuple[object, object]:
    pair = [(finding.minimal or {}).get(which) for which in ("earlier", "later")]
    earlier, later = (each.get("operation") if isinstance(each, dict) else None for each in pair)
    return earlier, later
