"""A stand-in for SGLang: the modules and names that kvcheck's probes look for, good or with one fault at a time.

The faults are the words of the file `fault` beside the environment's packages, read whenever something is called, so
that one process can be tried with all of them. Some words are no fault: a release may rightly be so.
"""

from pathlib import Path

import sglang_fault


def has_fault(name: str) -> bool:
    """Whether that fault is put in now."""
    return name in (Path(sglang_fault.__file__).parent / "fault").read_text().split()
