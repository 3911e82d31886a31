"""Stand-in."""

from dataclasses import dataclass


@dataclass
class SamplingParams:
    max_tokens: int
    ignore_eos: bool = False
