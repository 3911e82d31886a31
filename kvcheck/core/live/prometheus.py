"""Counters of a server from its Prometheus metrics.

Invariants:
- A malformed line is skipped: a hidden counter is no evidence.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

_LABEL = r'[a-zA-Z_][a-zA-Z0-9_]*\s*=\s*"(?:[^"\\]|\\.)*"'
_LABELS = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*"((?:[^"\\]|\\.)*)"')
_SAMPLE = re.compile(rf"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\s*\{{((?:\s*{_LABEL}\s*,?)*)\s*\}})?\s+(\S+)")
_ESCAPED = {"n": "\n", "\\": "\\", '"': '"'}
_NO_COUNTERS = ("_bucket", "_created")
_LONGEST_LINE = 1 << 16


@dataclass(frozen=True, slots=True)
class Sample:
    name: str
    labels: Mapping[str, str]
    value: float


def parse_samples(text: str) -> Iterator[Sample]:
    for line in text.split("\n"):
        if line.startswith("#") or len(line) > _LONGEST_LINE or not (match := _SAMPLE.match(line.strip())):
            continue
        try:
            value = float(match[3])
        except ValueError:
            continue
        labels = {name: _plain(written) for name, written in _LABELS.findall(match[2] or "")}
        yield Sample(match[1], labels, value)


def counters(samples: Iterable[Sample], labelled: Iterable[str] = ()) -> dict[str, float]:
    """Metric -> sum over its labels. labelled: further sums, as `name{label="value"}` with one label."""
    wanted: dict[tuple[str, str, str], str] = {}
    for row in labelled:
        match = _SAMPLE.match(f"{row} 0")
        pairs = _LABELS.findall(match[2] or "") if match else []
        assert match and len(pairs) == 1, f"{row} is no metric with one label"
        wanted[match[1], pairs[0][0], pairs[0][1]] = row
    sums: dict[str, float] = {}
    for sample in samples:
        if not math.isfinite(sample.value) or sample.name.endswith(_NO_COUNTERS):
            continue
        rows = [wanted[sample.name, *pair] for pair in sample.labels.items() if (sample.name, *pair) in wanted]
        for name in (sample.name, *rows):
            sums[name] = sums.get(name, 0.0) + sample.value
    return sums


def _plain(written: str) -> str:
    return re.sub(r"\\(.)", lambda match: _ESCAPED.get(match[1], match[0]), written)
