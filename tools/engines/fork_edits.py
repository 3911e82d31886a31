"""The five bugs as edits of a release of SGLang: what a pull request would change to bring each back.

Invariants:
- An edit applies as often as it says, or not at all: a release in which its lines are others is told, never skipped.
- An edit names the cell and the code that have to show it. What else fails is recorded and not expected.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Lines of a file that become others. file: below the package. pattern: what it finds, `times` times."""

    file: str
    pattern: str
    text: str
    times: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """A bug and what brings it back. bug: its letter in docs/bugs.md. upstream: the change that it takes back.

    cell, code: of the finding that has to be among those of the run.
    """

    name: str
    bug: str
    upstream: str
    shows: str
    changes: tuple[Change, ...]
    cell: str
    code: str


class Unchanged(Exception):
    """The lines of an edit are not those of this release."""


def apply(edit: Edit, package: Path) -> None:
    """Edit the package in place. Raises Unchanged, with nothing written, where its lines are others."""
    texts: dict[Path, str] = {}
    for change in edit.changes:
        path = package / change.file
        text = texts.get(path) or path.read_text(encoding="utf-8")
        texts[path], times = re.subn(change.pattern, change.text, text)
        if times != change.times:
            raise Unchanged(f"{edit.name}: {change.file} has its lines {times} times, expected {change.times}")
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")


POOL = "srt/mem_cache/memory_pool.py"
SENDER = "srt/disaggregation/mooncake/conn.py"
METADATA = "srt/disaggregation/utils.py"
EDITS = (
    Edit(
        name="resume-without-index-keys",
        bug="a",
        upstream="#23346",
        shows="a retracted request is saved and loaded without its index keys",
        changes=(
            Change(file=POOL, pattern=r'\n +"index_k": self\.index_key_cache\.cpu_copy\(indices\),', text=""),
            Change(
                file=POOL,
                pattern=r'\n +self\.index_key_cache\.load_cpu_copy\(kv_cache_cpu_dict\["index_k"\], indices\)',
                text="",
            ),
        ),
        cell="retract-resume/retract.nsa",
        code="KV304",
    ),
    Edit(
        name="metadata-as-views",
        bug="a",
        upstream="#23346",
        shows="get_buf returns views of a slot that is used again",
        changes=(Change(file=METADATA, pattern=r"\[idx\]\.clone\(\)", text="[idx]", times=14),),
        cell="retract-resume/metadata.get-buf",
        code="KV305",
    ),
    Edit(
        name="index-reader-without-wait",
        bug="b",
        upstream="#22811",
        shows="readers of index keys do not wait for their layer",
        changes=(
            Change(
                file="srt/mem_cache/index_key_cache.py",
                pattern=r"\n +if self\.pool\.layer_transfer_counter is not None:"
                r"\n +self\.pool\.layer_transfer_counter\.wait_until\(\n[^\n]+\n +\)",
                text="",
            ),
        ),
        cell="hicache/layer-wait.nsa",
        code="KV201",
    ),
    Edit(
        name="longer-state-list-is-sent",
        bug="c",
        upstream="#23323",
        shows="a list is cut only where it is the shorter one, which cuts nothing",
        changes=(
            Change(
                file=SENDER,
                pattern=r"if len\(src_indices\) > len\(dst_indices_local\):"
                r"(\n +src_indices = src_indices\[: len\(dst_indices_local\)\])\n +else:\n[^\n]+",
                text=r"if len(src_indices) < len(dst_indices_local):\1",
            ),
        ),
        cell="pd-transfer/state-lengths.nsa-longer",
        code="KV902",
    ),
    Edit(
        name="lists-moved-in-place",
        bug="d",
        upstream="#23427",
        shows="move_hybrid_indices replaces the lists of a transfer that a tree keeps",
        changes=(
            Change(
                file="srt/mem_cache/hybrid_cache/hybrid_cache_controller.py",
                pattern=r"\n( +)resolved_pool_transfers\.append\(\n +replace\(\n +transfer,"
                r"\n +(host_indices)=(transfer_host_indices),\n +(device_indices)=(transfer_device_indices),"
                r"\n +\)\n +\)",
                text=r"\n\1transfer.\2 = \3\n\1transfer.\4 = \5\n\1resolved_pool_transfers.append(transfer)",
            ),
        ),
        cell="hicache-hybrid/index-moves.hybrid-kernel",
        code="KV302",
    ),
    Edit(
        name="status-before-metadata",
        bug="e",
        upstream="#26394",
        shows="a rank reports Success before its metadata is there",
        changes=(
            Change(
                file=METADATA,
                pattern=r"\n +if (?:decode_reqs is not None and )?metadata_buffers is not None:"
                r"\n +_apply_metadata_gate\([^\n]+",
                text="",
                times=2,
            ),
        ),
        cell="nvlink-aux/agreement.default-metadata",
        code="KV203",
    ),
)
