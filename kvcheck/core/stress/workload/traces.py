"""Request traces in Mooncake's JSONL format, and their scaling to a pool.

A line is one request: `timestamp` (ms), `input_length` and `output_length` (tokens), and `hash_ids`, one for each block
of 512 prompt tokens; the last block may be partial. Equal ids after an equal prefix mean equal content. Other keys are
ignored. Two jobs share exactly the blocks that their rows share, as far as both kept them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from kvcheck.core.base.errors import UsageError
from kvcheck.core.base.rng import Rng
from kvcheck.core.stress.workload.jobs import Job, Workload, merge_runs

BLOCK_TOKENS: Final = 512
"""Prompt tokens that one hash id stands for."""

MIN_CAPACITY_TOKENS: Final = 32
"""The smallest pool that a trace is scaled to. A smaller one cannot hold a prompt, its output and a second request."""

MAX_REQUESTS: Final = 10_000_000
"""The most requests of one run. A word of content has 24 bits for its request, so more requests would share words."""

_LONGEST: Final = 2**31 - 1  # larger lengths and timestamps can only be damage and would overflow the arithmetic below


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRow:
    timestamp_ms: int
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


def read_trace(path: Path, limit: int | None) -> tuple[TraceRow, ...]:
    """Raises UsageError with path and line for bad lines and decreasing timestamps. Lines after `limit` are not
    read."""
    if limit is not None and limit < 1:
        raise UsageError(f"trace {path}: expected a limit of at least 1 request, got {limit}")
    rows: list[TraceRow] = []
    before = 0
    try:
        if not path.exists():
            raise UsageError(f"trace {path}: expected a JSONL file, got a path that does not exist; check --trace")
        if not path.is_file():
            raise UsageError(f"trace {path}: expected a JSONL file, got something that is not a file; check --trace")
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                row = _row(line, f"{path}:{number}")
                if row.timestamp_ms < before:
                    raise _bad(f"{path}:{number}", "timestamp", f"at least {before}, the line before", row.timestamp_ms)
                before = row.timestamp_ms
                if len(rows) == MAX_REQUESTS:
                    raise UsageError(f"trace {path}: expected at most {MAX_REQUESTS} requests; use --requests")
                rows.append(row)
                if len(rows) == limit:
                    break
    except OSError as error:
        raise UsageError(f"trace {path}: expected a readable file, got: {error.strerror}; check --trace") from error
    if not rows:
        raise UsageError(f"trace {path}: expected at least one request, got an empty file; check --trace")
    return tuple(rows)


def scale_trace(
    rows: tuple[TraceRow, ...], capacity_tokens: int, *, seed: int, mean_output: int | None = None
) -> Workload:
    """Jobs for a pool of `capacity_tokens`. `seed` decides which metadata fields each job uses.

    Prompts: a full block becomes b tokens, a partial one max(1, floor(length * b / 512)). b is the largest number for
    which no prompt is cut and the mean prompt is at most a tenth of the capacity. If the mean is then under a
    sixteenth, b grows until the mean reaches that, and longer prompts are cut to the whole blocks that fit. b is 1 ..
    512 and at most a quarter of the capacity. prompt + output is never more than half of the capacity.

    Outputs: all are scaled by one factor to a mean of `mean_output` (20 if the pool has at least 320 tokens, else a
    sixteenth of the pool), rounded, at least 1, and cut at a quarter of the capacity.

    Arrivals: timestamps are mapped linearly onto

        n * mean output * mean total / (1.3 * capacity)

    rounds, so the trace offers 1.3 times the pool's throughput. Shared prefixes count in full.
    """
    if capacity_tokens < MIN_CAPACITY_TOKENS:
        raise UsageError(
            f"scaling a trace: expected a pool of at least {MIN_CAPACITY_TOKENS} tokens, got {capacity_tokens}; "
            "use more pages"
        )
    if not rows:
        raise UsageError("scaling a trace: expected at least one request, got none")
    if mean_output is not None and mean_output < 1:
        raise UsageError(f"scaling a trace: expected a mean output of at least 1 token, got {mean_output}")
    inputs = np.array([row.input_length for row in rows], dtype=np.int64)
    outputs, cut_outputs = _scale_outputs(rows, capacity_tokens, mean_output)
    block = _block_tokens(inputs, outputs, capacity_tokens)
    prompts, cut_prompts = _prompts(inputs, outputs, block=block, capacity_tokens=capacity_tokens)
    arrivals = _arrivals(rows, prompts, outputs, capacity_tokens)
    jobs = _jobs(rows, prompts, outputs, arrivals, block=block, seed=seed)
    return Workload(
        jobs=jobs,
        note=(
            f"{len(rows)} requests for {capacity_tokens} tokens; a block of {BLOCK_TOKENS} became {block}: prompts of "
            f"{prompts.mean():.1f} tokens on average and {prompts.max()} at most, outputs of {outputs.mean():.1f} and "
            f"{outputs.max()}; cut to fit: {int(cut_prompts.sum())} prompts, {int(cut_outputs.sum())} outputs"
        ),
    )


def _row(line: bytes, where: str) -> TraceRow:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{where}: expected UTF-8 text, got byte 0x{line[error.start]:02x}; the file is damaged"
        ) from error
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _bad(where, "line", "one complete JSON object", text.strip()) from error
    if not isinstance(value, dict):
        raise _bad(where, "line", "one JSON object", value)
    for key in ("timestamp", "input_length", "output_length", "hash_ids"):
        if key not in value:
            raise UsageError(f"{where}: expected the key {key!r}, got {', '.join(map(repr, value)) or 'no keys'}")
    timestamp = _integer(value["timestamp"], "timestamp", where, least=0)
    input_length = _integer(value["input_length"], "input_length", where, least=1)
    output_length = _integer(value["output_length"], "output_length", where, least=1)
    ids = value["hash_ids"]
    if not isinstance(ids, list):
        raise _bad(where, "hash_ids", "a list of integers", ids)
    for one in ids:
        if type(one) is not int or one < 0:
            raise _bad(where, "hash_ids", "integers of at least 0", one)
    blocks = -(-input_length // BLOCK_TOKENS)
    if len(ids) != blocks:
        wanted = f"{blocks} ids, one for each block of {BLOCK_TOKENS} of {input_length} tokens"
        raise UsageError(f"{where}: hash_ids: expected {wanted}, got {len(ids)}")
    return TraceRow(timestamp_ms=timestamp, input_length=input_length, output_length=output_length, hash_ids=tuple(ids))


def _integer(value: object, key: str, where: str, *, least: int) -> int:
    """true and 1.0 are refused."""
    if type(value) is not int or not least <= value <= _LONGEST:
        raise _bad(where, key, f"an integer from {least} to {_LONGEST}", value)
    return value


def _bad(where: str, what: str, expected: str, got: object) -> UsageError:
    found = repr(got)
    return UsageError(f"{where}: {what}: expected {expected}, got {found if len(found) <= 80 else found[:77] + '...'}")


def _scale_outputs(
    rows: tuple[TraceRow, ...], capacity_tokens: int, mean_output: int | None
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    mean = mean_output if mean_output is not None else min(20, max(1, capacity_tokens // 16))
    lengths = np.array([row.output_length for row in rows], dtype=np.int64)
    total = int(lengths.sum())
    # Python integers: the products pass 64 bits for long traces of long outputs.
    scaled = np.array(
        [max(1, (2 * n * mean * len(rows) + total) // (2 * total)) for n in lengths.tolist()], dtype=np.int64
    )
    most = capacity_tokens // 4
    return np.minimum(scaled, most), scaled > most


def _block_tokens(inputs: npt.NDArray[np.int64], outputs: npt.NDArray[np.int64], capacity_tokens: int) -> int:
    chosen = 1
    for block in range(1, min(BLOCK_TOKENS, capacity_tokens // 4) + 1):
        prompts, cut = _prompts(inputs, outputs, block=block, capacity_tokens=capacity_tokens)
        total = int(prompts.sum())
        if total * 10 > capacity_tokens * len(prompts):
            break
        if cut.any() and block > 1:
            # A larger block cuts prompts, so grow only while the mean is too small to load the pool.
            before, _ = _prompts(inputs, outputs, block=chosen, capacity_tokens=capacity_tokens)
            if int(before.sum()) * 16 >= capacity_tokens * len(before):
                break
        chosen = block
    return chosen


def _prompts(
    inputs: npt.NDArray[np.int64], outputs: npt.NDArray[np.int64], *, block: int, capacity_tokens: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    full = (inputs - 1) // BLOCK_TOKENS
    tail = np.maximum(1, (inputs - full * BLOCK_TOKENS) * block // BLOCK_TOKENS)
    prompts = full * block + tail
    room = capacity_tokens // 2 - outputs
    cut = prompts > room
    fitting: npt.NDArray[np.int64] = np.where(cut, room // block * block, prompts)
    return fitting, cut


def _arrivals(
    rows: tuple[TraceRow, ...],
    prompts: npt.NDArray[np.int64],
    outputs: npt.NDArray[np.int64],
    capacity_tokens: int,
) -> list[int]:
    count, output = len(rows), int(outputs.sum())
    rounds = -(-10 * output * (int(prompts.sum()) + output) // (13 * capacity_tokens * count))
    first, last = rows[0].timestamp_ms, rows[-1].timestamp_ms
    return [(row.timestamp_ms - first) * rounds // max(1, last - first) for row in rows]


def _jobs(
    rows: tuple[TraceRow, ...],
    prompts: npt.NDArray[np.int64],
    outputs: npt.NDArray[np.int64],
    arrivals: list[int],
    *,
    block: int,
    seed: int,
) -> tuple[Job, ...]:
    mix = Rng(seed)
    tree = _BlockTree()
    jobs: list[Job] = []
    for index, row in enumerate(rows):
        prompt = int(prompts[index])
        blocks = tree.author(row.hash_ids, request=index + 1, prompt=prompt, block=block)
        speculative = mix.chance(1, 4)
        jobs.append(
            Job(
                request=index + 1,
                arrival=arrivals[index],
                prompt_tokens=prompt,
                output_tokens=int(outputs[index]),
                blocks=blocks,
                wants_logprobs=mix.chance(1, 4),
                speculative=speculative,
                wants_hidden=mix.chance(1, 2) and speculative,
            )
        )
    return tuple(jobs)


class _BlockTree:
    """The request that first brought each block, for each prefix before it. One with more of a block than any before is
    the author of the rest, so a later prompt can share a partial last block with the same id."""

    def __init__(self) -> None:
        self._nodes: dict[tuple[int, int], int] = {}  # (parent node, hash id) -> node; the root is -1
        self._authors: list[int] = []  # node -> the request that brought its first tokens
        self._ends: list[int] = []  # node -> how many tokens it brought
        self._longer: dict[
            int, list[tuple[int, int]]
        ] = {}  # node -> (author, end) of later requests that had more of it, in growing order

    def author(
        self, hash_ids: tuple[int, ...], *, request: int, prompt: int, block: int
    ) -> tuple[tuple[int, int], ...]:
        """(author, tokens) runs of a prompt of `prompt` tokens, whose blocks join the tree."""
        runs: list[tuple[int, int]] = []
        node, start = -1, 0
        for hash_id in hash_ids:
            if start >= prompt:
                break
            size = min(block, prompt - start)
            start += size
            node = self._nodes.setdefault((node, hash_id), len(self._ends))
            if node == len(self._ends):
                self._authors.append(request)
                self._ends.append(size)
            if size <= self._ends[node]:
                runs.append((self._authors[node], size))
            else:
                runs.extend(self._reach_further(node, size, request))
        return merge_runs(runs)

    def _reach_further(self, node: int, size: int, request: int) -> list[tuple[int, int]]:
        longer = self._longer.setdefault(node, [])
        known = longer[-1][1] if longer else self._ends[node]
        if known < size:
            longer.append((request, size))
        done = self._ends[node]
        runs = [(self._authors[node], done)]
        for author, end in longer:
            if done < size:
                runs.append((author, min(end, size) - done))
                done = end
        return runs
