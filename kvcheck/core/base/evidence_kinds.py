"""Kinds of evidence: a running server's activity under judged requests, with unit and meaning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Kind:
    unit: str
    meaning: str


KINDS: Mapping[str, Kind] = {
    "hit": Kind("requests", "judged requests, part of whose prompt came from the prefix cache"),
    "hit-token": Kind("tokens", "prompt tokens of judged requests that came from the prefix cache"),
    "host-hit": Kind("tokens", "prompt tokens that were found in the host tier"),
    "storage-hit": Kind("tokens", "prompt tokens that were found in the storage tier"),
    "evict": Kind("tokens", "tokens that left the device tier of the prefix cache"),
    "lost-prefix": Kind("requests", "requests whose prefix had been computed and was not in the cache any more"),
    "retract": Kind("retractions", "requests that were retracted or preempted, counted each time"),
    "backup": Kind("tokens", "tokens that were copied from the device to the host tier"),
    "load-back": Kind("tokens", "tokens that were copied from the host tier back to the device"),
    "transfer": Kind("requests", "judged requests whose cache went from a prefill server to a decode server"),
    "abort": Kind("requests", "requests that were aborted while they ran"),
    "overtake": Kind("requests", "requests of high priority that finished before an earlier one of low priority"),
}

TOKEN = "token"
OBSERVED: Mapping[str, Kind] = {TOKEN: Kind("tokens", "tokens of answers that were judged"), **KINDS}
"""All counts of a server in a record; without judged tokens no other counts."""
