"""Stand-in."""

from dataclasses import dataclass


@dataclass
class SimpleCPUOffloadWorkerMetadata:
    """Stores that have ended."""

    completed_store_events: dict
