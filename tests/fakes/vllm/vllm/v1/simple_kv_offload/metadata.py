"""Stand-in."""

from dataclasses import dataclass


@dataclass
class SimpleCPUOffloadWorkerMetadata:
    completed_store_events: dict
