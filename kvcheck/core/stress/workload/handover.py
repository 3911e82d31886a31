"""Content of a prefill's handover: metadata rows, and the number of bytes to arrive for a prompt.

Invariants:
- A field that a request does not use is zero in its row.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kvcheck.core.base import content
from kvcheck.core.cache.pools import POOLS
from kvcheck.core.cache.pools.buffers import Granularity
from kvcheck.core.cache.pools.shape import ModelShape
from kvcheck.core.cache.transfer.metadata import MetadataField, MetadataRow, metadata_fields
from kvcheck.core.stress.workload.jobs import Job
from kvcheck.core.stress.workload.mismatch import Mismatch

TOP_LOGPROBS = 20
"""Top log-probabilities handed over for a request with them; the field is wider, so a prefix is written."""
PLAIN_FIELDS = ("output_ids", "bootstrap_room")
"""Fields whose values are the request's own numbers, and no content words."""


def metadata_values(job: Job, first_token: int, fields: tuple[MetadataField, ...]) -> dict[str, torch.Tensor]:
    """The fields a prefill writes: name to [n <= width]."""
    values: dict[str, torch.Tensor] = {}
    for field in fields:
        used = _used(job, field)
        if field.name in PLAIN_FIELDS:
            values[field.name] = torch.tensor(
                [first_token if field.name == "output_ids" else job.request], dtype=field.dtype
            )
        elif used:
            words = content.codes_of(job.request) ^ content.mask(
                _site(field.name), -(-used * field.dtype.itemsize // 8)
            )
            values[field.name] = words.view(torch.uint8)[: used * field.dtype.itemsize].view(field.dtype)
    return values


def expected_row(job: Job, first_token: int, fields: tuple[MetadataField, ...]) -> torch.Tensor:
    row = torch.zeros(fields[-1].offset + fields[-1].size_bytes, dtype=torch.uint8)
    for field in fields:
        value = metadata_values(job, first_token, (field,)).get(field.name)
        if value is not None:
            packed = value.view(torch.uint8)
            row[field.offset : field.offset + len(packed)] = packed
    return row


def mismatches(
    job: Job, expected: torch.Tensor, row: MetadataRow, fields: tuple[MetadataField, ...]
) -> Iterator[Mismatch]:
    """A Mismatch for each field that differs; its count is bytes."""
    if torch.equal(expected, row.packed):
        return
    for field in fields:
        span = slice(field.offset, field.offset + field.size_bytes)
        seen, wanted = row.packed[span], expected[span]
        if torch.equal(seen, wanted):
            continue
        padded = torch.zeros(-(-field.size_bytes // 8) * 8, dtype=torch.uint8)
        padded[: len(seen)] = seen
        words = padded.view(torch.int64)
        yield Mismatch(
            request=job.request,
            space="metadata",
            buffer=f"metadata.{field.name}",
            piece=field.name,
            layer=0,
            page=0,
            row=0,
            position=0,
            author=job.request,
            words=tuple(int(value) for value in words[:64]),
            half=False,
            count=int((seen != wanted).sum()),
        )


def bytes_for(shape: ModelShape, prompt_tokens: int, decode_ranks: int) -> int:
    """Bytes that one decode rank receives for a prompt: its part of every buffer, and one metadata row."""
    size = shape.page_size
    pages = -(-prompt_tokens // size)
    hidden = max(0, prompt_tokens + 1 - shape.window) // size if shape.window_layers else 0
    units = {"full": pages, "window": pages - hidden, "state": 1}
    total = 0
    for space in POOLS.load(shape.family)(shape):
        for buffer in space.buffers:
            rows = units[space.name] * (size if buffer.rows is Granularity.TOKEN else 1)
            kept = max(1, buffer.shards // decode_ranks)
            total += len(space.layers) * rows * buffer.row_bytes * kept // buffer.shards
    last = metadata_fields(shape.hidden_size)[-1]
    return total + last.offset + last.size_bytes


def _used(job: Job, field: MetadataField) -> int:
    if field.name.startswith("output_top_logprobs"):
        return TOP_LOGPROBS if job.wants_logprobs else 0
    if field.name.startswith("output_topk"):
        return field.width if job.speculative else 0
    if field.name == "output_hidden_states":
        return field.width if job.wants_hidden else 0
    return field.width


def _site(name: str) -> content.Site:
    return content.Site("metadata", f"metadata.{name}", name, 0)
