"""Content: writes content by kvcheck's rule to an engine's own memory, and judges it later.

Each row encodes its owner, buffer, layer and position. All judged bytes are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from kvcheck.core.base.content import Site, codes, mask
from kvcheck.core.base.deviation import Expectation, Owners, classify
from kvcheck.core.probes.frame.buffer_views import BufferView, Inventory
from kvcheck.core.probes.frame.tally import ProbeTally

REQUESTS = 4096
"""Most owners in a schedule: requests, or prefixes that requests share."""
UNWRITTEN = 0
"""An unwritten word of an engine's memory: pools are zeroed when they are made."""
STALE = ("KV101", "KV102", "KV103", "KV104")
"""Codes of rows that the awaited work has not reached, or only in part."""


def content(site: Site, request: int, positions: Sequence[int], size: int) -> torch.Tensor:
    """Return the rule's bytes of rows of `size` bytes: [positions, size] uint8."""
    at = np.asarray(positions, dtype=np.int64)
    words = -(-size // 8)
    tags = codes(np.full(len(at), request, dtype=np.int64), at)
    return (tags[:, None] ^ mask(site, words)).view(torch.uint8)[:, :size]


def site_of(held: BufferView) -> Site:
    return Site(held.unit, held.name, "", held.layer)


def rows_of(held: BufferView, request: int, positions: Sequence[int]) -> torch.Tensor:
    """Return the rule's bytes of whole rows of a buffer: [positions, bytes of a row] uint8."""
    return content(site_of(held), request, positions, held.rows.shape[1])


@dataclass(slots=True)
class ProbeJudge(ProbeTally):
    def absorb(self, other: ProbeJudge, code: str | None = None, why: str = "") -> None:
        """code, why: new code, and an addition to the message, of findings about rows."""
        self.reads += other.reads
        for name, words in other.words.items():
            self.words[name] = self.words.get(name, 0) + words
        for each in other.findings:
            if code is None:
                self.keep(each)
            elif each.oracle == "content":
                self.keep(replace(each, code=code, message=each.message + why))

    def compare(
        self,
        held: BufferView,
        seen: torch.Tensor,
        *,
        request: int,
        positions: Sequence[int],
        ids: Sequence[int],
        when: str,
        part: torch.Tensor | None = None,
        code: str | None = None,
        lane: str | None = None,
        condition: str | None = None,
        has_others: bool = False,
        wanted: torch.Tensor | None = None,
    ) -> int:
        """Return the number of right rows. part: bytes of a row that count, [bytes] bool.

        code: replaces the code of a stale, foreign, torn or unwritten row. lane: the reader. condition: the assumption
        under which wrong rows are a finding. has_others: as in Owners. wanted: the expected rows, if the engine itself
        wrote the request's words.
        """
        site = site_of(held)
        seen = seen.cpu()
        if wanted is None:
            wanted = content(site, request, positions, seen.shape[1])
        if part is not None:
            seen = torch.where(part, seen, wanted)
        self.reads += 1
        size = seen.numel() if part is None else int(part.sum()) * len(seen)
        self.words[held.name] = self.words.get(held.name, 0) + size // 8
        wrong = torch.nonzero((seen != wanted).any(1)).view(-1)
        if len(wrong):
            row = int(wrong[0])
            found = classify(
                _words(seen[row], part),
                site,
                Expectation(request=request, author=request, position=positions[row], is_state=held.unit == "state"),
                Owners(requests=REQUESTS, unwritten=(UNWRITTEN,), has_others=has_others),
            )
            self.find(
                code if code is not None and found.code in STALE else found.code,
                "content",
                f"{when}: {held.unit} {ids[row]} of {held.name}, layer {held.layer}, holds {found.story}; "
                f"expected request {request}, position {positions[row]}; {len(wrong)} of {len(ids)} rows are wrong",
                tier=held.tier,
                buffer=held.name,
                layer=held.layer,
                row=int(ids[row]),
                request=request,
                seen_request=found.owner,
                lane=lane,
                condition=condition,
            )
        return len(ids) - len(wrong)


def _words(row: torch.Tensor, part: torch.Tensor | None) -> list[int | None]:
    whole = len(row) // 8 * 8
    words: list[int] = row[:whole].clone().view(torch.int64).tolist()
    if part is None:
        return [*words]
    counts = part[:whole].view(-1, 8).all(1).tolist()
    return [word if is_read else None for word, is_read in zip(words, counts, strict=True)]


class ContentWriter:
    def __init__(self, found: Inventory) -> None:
        self.found = found

    def write(self, request: int, unit: str, ids: Sequence[int], first: int = 0) -> None:
        for held in self.found.buffers:
            if held.unit == unit:
                self.write_field(held, request, ids, first)

    def write_field(self, held: BufferView, request: int, ids: Sequence[int], first: int = 0) -> None:
        at = torch.as_tensor(list(ids), dtype=torch.int64)
        held.rows[at] = rows_of(held, request, range(first, first + len(at))).to(held.rows.device)

    def check(
        self,
        judge: ProbeJudge,
        request: int,
        unit: str,
        ids: Sequence[int],
        *,
        when: str,
        first: int = 0,
        part: Callable[[int], torch.Tensor | None] | None = None,
    ) -> tuple[str, ...]:
        """Compare these units of every buffer that has them. Returns the buffers without a right row.

        part: row size -> bytes that count; None if the buffer has no such rows.
        """
        at = torch.as_tensor(list(ids), dtype=torch.int64)
        right: dict[str, int] = {}
        for held in self.found.buffers:
            counts = part(held.rows.shape[1]) if part is not None else None
            if held.unit == unit and len(at) and (part is None or counts is not None):
                right[held.name] = right.get(held.name, 0) + judge.compare(
                    held,
                    held.rows[at],
                    request=request,
                    positions=range(first, first + len(at)),
                    ids=list(ids),
                    when=when,
                    part=counts,
                )
        return tuple(name for name, count in right.items() if not count)
