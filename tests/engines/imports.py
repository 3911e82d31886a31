"""Imports: whether what kvcheck's probes look for in an engine can be imported, as the probes' child imports it.

    DIR/bin/python -I tests/engines/imports.py sglang

Exit 0: what is there can be imported; what a release does not have is no matter. 1: something is there and breaks.

Invariants:
- The names, the stand-ins and the start are the child's own; nothing is looked for that no probe needs.
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))  # last: the engine's own packages are found before

from kvcheck.core.probes.frame import probe_server
from kvcheck.core.probes.frame.names import Names
from kvcheck.core.probes.frame.probe import EngineSpec
from kvcheck.core.probes.frame.wire import Refusal
from kvcheck.core.probes.installed import ENGINES


def main(engine: str) -> int:
    """Say what breaks: each error once, with all that it takes away."""
    os.environ.update(probe_server.VARIABLES["cpu"])
    spec = ENGINES.load(engine)
    started = probe_server.ProbeServer(spec).start()
    if isinstance(started, Refusal):
        sys.stderr.write(f"make_env: {started.reason}\n")
        return 1
    broken = breaks(spec)
    for error, names in broken.items():
        sys.stderr.write(f"make_env: {engine} {started.version}: cannot be imported: {error}: {', '.join(names)}\n")
    return 1 if broken else 0


def breaks(spec: EngineSpec) -> dict[str, list[str]]:
    """Error -> the capabilities that are in the release and cannot be imported for it."""
    names, broken = Names(spec.table), defaultdict(list)
    for name in spec.table:
        if error := names.find(name).error:
            broken[error].append(name)
    return dict(broken)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
