"""Import check: whether an engine's capabilities can be imported, as the probes' child imports them.

It runs under the interpreter of the engine's environment. Each line of output is an error with the capabilities that it
takes away. No output: all existing capabilities can be imported, and compiled code runs on a device. Capabilities that
a release lacks are ignored.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections import defaultdict
from collections.abc import Callable
from typing import cast

from kvcheck.core.base.nouns import some_of
from kvcheck.core.probes.frame.guard import CannotDrive
from kvcheck.core.probes.frame.names import Names
from kvcheck.core.probes.frame.tables import EngineSpec
from kvcheck.core.probes.frame.wire import Hello, Refusal
from kvcheck.core.probes.installed import ENGINES

MOST_NAMED = 4
"""Capabilities named by an error; the first ones are needed by most probes."""


def errors(engine: str, device: str = "cpu") -> list[str]:
    spec = ENGINES.load(engine)
    module, attribute = spec.start.split(":")  # it is loaded here, because not every environment has torch
    start = cast(Callable[..., Hello | Refusal], getattr(importlib.import_module(module), attribute))
    started = start(spec) if device == "cpu" else start(spec, device)
    if isinstance(started, Refusal):
        return [started.reason]
    broken = [
        f"{engine} {started.version}: cannot be imported: {error}: needed by {some_of(names, MOST_NAMED)}"
        for error, names in breaks(spec).items()
    ]
    return broken or ([] if device == "cpu" else compiled_errors(spec, device))


def compiled_errors(spec: EngineSpec, device: str) -> list[str]:
    if not spec.compiled:
        return []
    module, attribute = spec.compiled.split(":")
    try:
        getattr(importlib.import_module(module), attribute)(device)
    except CannotDrive as error:
        return [str(error)]
    return []


def breaks(spec: EngineSpec) -> dict[str, list[str]]:
    """Return error -> capabilities that are in the release and cannot be imported for it."""
    names, broken = Names(spec.table), defaultdict(list)
    for name in spec.table:
        if error := names.find(name).error:
            broken[error].append(name)
    return dict(broken)


def main(engine: str, device: str = "cpu") -> None:
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)
        answers.writelines(" ".join(text.split()) + "\n" for text in errors(engine, device))


if __name__ == "__main__":
    main(*sys.argv[1:])
