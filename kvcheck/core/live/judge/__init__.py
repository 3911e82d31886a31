"""What the answers of a running server say about its cache: `round.judge_round` judges one round of them."""

from __future__ import annotations

from kvcheck.core.live.judge.round import judge_round as judge_round
