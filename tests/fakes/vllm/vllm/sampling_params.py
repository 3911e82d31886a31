"""Stand-in."""

from dataclasses import dataclass


@dataclass
class SamplingParams:
    """How many tokens a request may produce."""

    max_tokens: int
    ignore_eos: bool = False
