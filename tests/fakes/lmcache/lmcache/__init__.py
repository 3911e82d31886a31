"""A stand-in for LMCache: the names that kvcheck's probe looks for, good or with one fault at a time."""

from pathlib import Path

import sglang_fault


def has_fault(name: str) -> bool:
    return (Path(sglang_fault.__file__).parent / "fault").read_text() == name
