"""Builds: checks that runs are of one build of kvcheck and of one state of each trace and engine.

Invariants:
- A run of kvcheck's own code is evidence only for the build that judges it.
- Runs of one installed engine need the same files of it and the same kvcheck; runs against servers one version.
- A run without the digest of its subject is no evidence. Unknown digests never count as equal.
- A run of a mutant is never evidence: its code is broken on purpose.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvcheck.core.base.cells import is_engine, is_of_server, keys_of, lines_of
from kvcheck.core.base.identity import short
from kvcheck.core.base.record import Identity, RunRecord
from kvcheck.core.base.server_facts import engine_and_version, server_of

BUILTIN = "builtin"


def build_problems(records: Sequence[RunRecord], code: str) -> Iterator[tuple[RunRecord, str]]:
    """Yield runs that are no evidence for the build of digest `code`, or contradict other runs; with reasons."""
    firsts: dict[tuple[str, ...], tuple[str, RunRecord]] = {}
    for record in records:
        for message in _own(record, code):
            yield record, message
        for name, value, what in _claims(record):
            first, other = firsts.setdefault(name, (value, record))
            if first != value:
                yield record, f"{what} is {short(value)}, and {short(first)} in run {other.run_id}: {_apart(name)}"


def changes(then: Identity | None, now: Identity) -> list[str]:
    if then is None:
        return ["it does not say which build of kvcheck made it"]
    named = (("kvcheck's code", "code"), ("the content of the trace", "trace"), ("the engine", "target"))
    both = ((what, getattr(then, name), getattr(now, name)) for what, name in named)
    return [f"{what} was {short(old)}, and is {short(new)}" for what, old, new in both if old != new]


def engine_of(record: RunRecord) -> str | None:
    """Return the installed engine of the run; None for kvcheck's own code."""
    planned = _planned(record, but_servers=True)
    targets = {cell["target"].partition(":")[0] for cell in planned if is_engine(cell.get("target", ""))}
    return min(targets) if targets else None


def absent_of(record: RunRecord) -> dict[str, str]:
    engine = record.environment.get("engine")
    absent = engine.get("absent") if isinstance(engine, dict) else None
    return {str(cell): str(why) for cell, why in absent.items()} if isinstance(absent, dict) else {}


def own_target_of(record: RunRecord) -> str | None:
    """Return the user's own target of the run, as MODULE:NAME."""
    planned = _planned(record, but_servers=True)
    targets = {cell.get("target", BUILTIN) for cell in planned if not is_engine(cell.get("target", ""))} - {BUILTIN}
    return min(targets) if targets else None


def _planned(record: RunRecord, *, but_servers: bool = False) -> list[dict[str, str]]:
    return [keys_of(line) for line in lines_of(record.plan) if not (but_servers and is_of_server(line))]


def _own(record: RunRecord, code: str) -> Iterator[str]:
    again = f"next: {record.repro}"
    mutants = dict.fromkeys(cell["mutant"] for cell in _planned(record) if "mutant" in cell)
    if mutants:
        yield f"it judged the mutant {', '.join(mutants)}, code that is broken on purpose; leave this run out"
    identity = record.identity
    if identity is None or identity.code is None:
        yield f"it does not say which build of kvcheck made it, as records of older versions do not; {again}"
        return
    engine = engine_of(record)
    if engine is None and server_of(record) is None and identity.code != code:
        there, here = short(identity.code), short(code)
        yield f"it is of another build of kvcheck: its code is {there}, and {here} here; {again}"
    named = engine or own_target_of(record)
    if named is not None and identity.target is None:
        yield f"it does not say which {named} it judged; {again}"
    if identity.trace is None and any("trace" in cell for cell in _planned(record)):
        yield f"it does not say what was in the trace that it fed; {again}"


def _claims(record: RunRecord) -> Iterator[tuple[tuple[str, ...], str, str]]:
    """Facts that must be equal in all runs that have them: (name, value, in words)."""
    identity = record.identity
    if identity is None:
        return
    if (server := server_of(record)) is not None:
        name, version = engine_and_version(server)
        # An unknown version never equals that of another run.
        yield ("server", name), version or f"unknown in run {record.run_id}", f"the version of the {name} that served"
        if identity.code is not None:
            yield ("checker", f"{name} server"), identity.code, f"the code of kvcheck that judged the {name} server"
    engine = engine_of(record)
    named = engine or own_target_of(record)
    if named is not None and identity.target is not None:
        yield ("engine", named), identity.target, f"the {named} that it judged"
    if engine is not None and identity.code is not None:
        yield ("checker", engine), identity.code, "the code of kvcheck that judged it"
    if identity.trace is not None:
        for trace in sorted({cell["trace"] for cell in _planned(record) if "trace" in cell}):
            yield ("trace", trace), identity.trace, f"the content of {trace}"


def _apart(name: tuple[str, ...]) -> str:
    return {
        "engine": "gate runs of another build of it by themselves, or run both again",
        "server": "gate runs of another version of it by themselves",
        "checker": "run both again with one kvcheck",
        "trace": "run both again with one trace",
    }[name[0]]
