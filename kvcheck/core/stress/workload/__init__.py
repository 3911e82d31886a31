"""Workloads: model shapes, request traces, synthetic requests, events, and the decoders that write and check KV.

Invariants:
- A workload is a pure function of its file and its integers (capacity, page size, seed).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcheck.core.base.registry import Registry

if TYPE_CHECKING:
    from kvcheck.core.cache.scheduler.decoder import Decoder

WORDS, KNOWN_ANSWER = "words", "known-answer"

DECODERS: Registry[type[Decoder]] = Registry(
    "decoder",
    {
        WORDS: (
            "kvcheck.core.stress.workload.decoder:ContentDecoder",
            "Words that say whose they are: each row that is read is compared. For every shape and scenario.",
        ),
        KNOWN_ANSWER: (
            "kvcheck.core.stress.workload.known_answers:KnownAnswerDecoder",
            "A model with written weights, whose answers are known: attention and states read the pool in float32.",
        ),
    },
)
