"""Stand-in."""

from dataclasses import dataclass


@dataclass
class ModelRunnerOutput:
    """What a step has sampled."""

    req_ids: list
    sampled_token_ids: list
