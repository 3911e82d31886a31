"""Mutants of the attention itself: right bytes with wrong scales, positions, windows, lengths, picks or states."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from kvcheck.core.base.paging import floor_to_page
from kvcheck.core.cache.offload import Offload, OffloadedKV
from kvcheck.core.cache.pools.attention import AttentionInputs, Held
from kvcheck.core.cache.pools.pool import Holding
from kvcheck.core.cache.pools.shape import ModelShape
from kvcheck.core.stress.targets.mutants.mutant import Mutant
from kvcheck.core.stress.targets.mutants.retract_resume import UPSTREAM
from kvcheck.core.stress.targets.target import FIXED


class ScaledTwice(AttentionInputs):
    def scaled(self, rows: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return super().scaled(super().scaled(rows, scales), scales)


class ShiftedPositions(AttentionInputs):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__(shape)
        self._first: dict[int, Held] = {}

    def position(self, holding: Held, start: int) -> int:
        is_resumed = self._first.setdefault(holding.request, holding) is not holding
        return super().position(holding, start) + is_resumed


class ShortWindow(AttentionInputs):
    def first_seen(self, position: int) -> int:
        return super().first_seen(position) + (position + 1 >= self._window)


class LengthWithoutOwn(AttentionInputs):
    def length(self, start: int, stop: int) -> int:
        return start if start and stop == start + 1 else super().length(start, stop)


class IndexWithoutOpenPage(AttentionInputs):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__(shape)
        self._page_size = shape.page_size

    def ranked(self, length: int) -> int:
        return max(floor_to_page(length, self._page_size), min(length, self._page_size))


class OthersPicks(AttentionInputs):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__(shape)
        self._before: torch.Tensor | None = None

    def picked(self, scores: torch.Tensor, count: int) -> torch.Tensor:
        """The table of picks is one row off: the first request reads the last row of the call before. Positions beyond
        its own end become the last one."""
        own = super().picked(scores, count)
        before, self._before = self._before, own
        return own if before is None or before.shape != own.shape else before.clamp(max=scores.shape[1] - 1)


class TokenTwice(AttentionInputs):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__(shape)
        self._last: dict[int, Held] = {}

    def times(self, holding: Held) -> int:
        before = self._last.setdefault(holding.request, holding)
        self._last[holding.request] = holding
        return 1 + (before is not holding)


class OlderState(Offload):
    def save(self, holding: Holding) -> OffloadedKV:
        value = super().save(holding)
        self._backend.wait(value.saved)
        kept: dict[tuple[int, str], torch.Tensor] = self.__dict__.setdefault("_states", {})
        for buffer in value.buffers:
            if buffer.space == "state":
                buffer.words.copy_(kept.setdefault((holding.request, buffer.name), buffer.words.clone()))
        return value


_mutant = partial(
    Mutant,
    bug="a",
    scenario="retract-resume",
    shape="deepseek-v3.2-answers",
    decoder="known-answer",
    killed_by="output",
    code="KV501",
)
ATTENTION: tuple[Mutant, ...] = (
    _mutant(
        name="scale-applied-twice",
        parts=replace(FIXED, attention=ScaledTwice),
        shape="llama-fp8-answers",
        shows="Rows of an 8-bit pool are multiplied by their scales twice when they are read.",
        matters="Bytes and scales are right and belong to the request; what attention makes of them is noise.",
        example="SGLang #18818, #20705: scales of an FP8 cache not applied, or applied where they had been already.",
    ),
    _mutant(
        name="resume-shifts-positions",
        parts=replace(FIXED, attention=ShiftedPositions),
        shape="llama-3-tiny",
        decoder="words",
        killed_by="content",
        code="KV301",
        shows="A resumed request goes on with position ids that are one too high; its rows lie where they should.",
        matters="All that it reads from before the retraction is one token further away than the model takes it to be.",
        example=f"{UPSTREAM}: the length that positions were made from counted a token without KV.",
    ),
    _mutant(
        name="window-one-short",
        parts=replace(FIXED, attention=ShortWindow),
        shape="gpt-oss-answers",
        shows="Window layers see one token less than the model was made for.",
        matters="Only what stands at the very edge of a window is lost, so short tests answer as before.",
        example="A window that counts the current token in the mask, and not in the page table.",
    ),
    _mutant(
        name="resume-takes-older-state",
        parts=replace(FIXED, offload=OlderState),
        shape="qwen3-next-tiny",
        decoder="words",
        killed_by="content",
        code="KV101",
        shows="A request that is retracted again gets back the recurrent state of its earlier retraction.",
        matters="The state is the request's own and well formed, and lacks the tokens since: text goes astray later.",
        example="SGLang #33450, vLLM #43559: a cached state of linear attention that is some tokens old.",
    ),
    _mutant(
        name="length-without-own-token",
        parts=replace(FIXED, attention=LengthWithoutOwn),
        shape="llama-answers",
        shows="A decode step reads the request as it was before the step: its own token is left out.",
        matters="Every token of every answer is computed without the one before it.",
        example="SGLang #30433: lengths of a decode batch that were one behind.",
    ),
    _mutant(
        name="index-skips-open-page",
        parts=replace(FIXED, attention=IndexWithoutOpenPage),
        shows="An indexer ranks whole pages alone: the tokens of a request's last page are never picked.",
        matters="What stands nearest is lost until its page is full. Long answers are read as vague, not as wrong.",
        example="A kernel that divides the length by the page size and rounds down.",
    ),
    _mutant(
        name="picks-of-other-request",
        parts=replace(FIXED, attention=OthersPicks),
        shows="Sparse attention reads the positions that an indexer picked for another request of the batch.",
        matters="All rows that are read are the request's own, at their places: they are the wrong ones to read.",
        example="A table of top-k positions whose rows are those of the batch before a request left it.",
    ),
    _mutant(
        name="resume-takes-token-twice",
        parts=replace(FIXED, attention=TokenTwice),
        shape="qwen3-next-answers",
        shows="The first token after a resume is taken into the recurrent state twice.",
        matters="The state decays once more: everything before that token weighs less than it should from then on.",
        example="A step that is run once to warm up, on the slot of a live request.",
    ),
)
