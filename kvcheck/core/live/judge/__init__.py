"""Judges a running server's cache by its answers: `judge_round` judges one round of them."""

from __future__ import annotations

from kvcheck.core.live.judge.round import judge_round
from kvcheck.core.live.judge.steps import SentPrompts, longest_shared, made, packed
from kvcheck.core.live.judge.verdicts import Judgement, PagePlace, ServerSetting, Unjudged, Wrong, finding

__all__ = [
    "Judgement",
    "PagePlace",
    "SentPrompts",
    "ServerSetting",
    "Unjudged",
    "Wrong",
    "finding",
    "judge_round",
    "longest_shared",
    "made",
    "packed",
]
