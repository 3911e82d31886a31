"""Stand-in."""

from dataclasses import dataclass
from typing import Any


@dataclass
class ModelRunnerOutput:
    req_ids: list
    sampled_token_ids: list
    kv_connector_output: Any = None


@dataclass
class KVConnectorOutput:
    finished_recving: Any = None
    kv_connector_worker_meta: Any = None
