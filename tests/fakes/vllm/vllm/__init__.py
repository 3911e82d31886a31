"""A stand-in for vLLM: the names that kvcheck's probes look for, good or with one fault at a time."""

from pathlib import Path

import sglang_fault


def has_fault(name: str) -> bool:
    return (Path(sglang_fault.__file__).parent / "fault").read_text() == name
