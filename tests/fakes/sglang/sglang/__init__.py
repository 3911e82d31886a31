"""A stand-in for SGLang: the modules and names that kvcheck's probes look for, good or with one fault at a time.

The fault is the text of the file `fault` beside the environment's packages, read whenever something is called, so that
one process can be tried with all of them.
"""

from pathlib import Path

import sglang_fault


def has_fault(name: str) -> bool:
    """Whether that fault is put in now."""
    return (Path(sglang_fault.__file__).parent / "fault").read_text() == name
