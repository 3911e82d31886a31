"""Names of cells: the scenario, and what it was tried with.

"SCENARIO/SHAPE"; "SCENARIO/SHAPE/TRANSPORT" where the ranks are processes; "SCENARIO/ENGINE" with a running server;
"own-model/SCENARIO/ENGINE" where that server serves a model of the user's own.

Invariants:
- Two cells of a run have two names, and the line of a cell's plan leads to its name.
- Sees plain lines alone, so that what reads a record can name its cells.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from urllib.parse import unquote

KNOWN_ANSWERS = "known-answers"
"""The key that the lines of running servers with a known-answer model have and no other line has."""
OWN_MODEL = "own-model"
"""How the scenario begins in lines of running servers with a model of the user's own."""

UNNAMED_SERVER = "server"
SCENARIO_NAMES = ("retract-resume", "hicache", "hicache-hybrid", "pd-transfer", "nvlink-aux")
"""The scenarios of kvcheck's own cache: each has a row of SCENARIOS."""
PROCESS_TRANSPORTS = ("tcp", "mooncake", "ipc")
"""Transports that join processes, one a rank; all others work in one process."""
ENGINE_NAMES = ("sglang", "vllm", "lmcache", "mooncake")
"""The installed engines that can be a target: each has a row of ENGINES."""


def is_engine(target: str) -> bool:
    """Whether a target names an installed engine, such as sglang or vllm:DIR."""
    return target.partition(":")[0] in ENGINE_NAMES


def tried_with(shape: str, transport: str | None) -> str:
    """What a scenario is tried with, as a record names it. transport: None where one process does the work."""
    return shape if transport is None else f"{shape}/{transport}"


def keys_of(line: str) -> dict[str, str]:
    """The keys of a plan's line, such as shape and mutant; its scenario is under "scenario"."""
    scenario, _, rest = line.partition(":")
    pairs = (pair.partition("=") for pair in rest.split(","))
    return {"scenario": scenario, **{key: unquote(value, errors="surrogateescape") for key, _, value in pairs}}


def is_own_model(line: str) -> bool:
    """Whether a plan's line, or its scenario alone, is of a server with a model of the user's own."""
    return line.startswith(f"{OWN_MODEL}/")


def is_of_server(line: str) -> bool:
    """Whether a plan's line is of a running server."""
    return is_own_model(line) or KNOWN_ANSWERS in keys_of(line)


def cell_of(line: str, judged: Collection[str]) -> str:
    """The name of the cell that a plan's line begins. judged: names in the record, which once had no transport."""
    keys = keys_of(line)
    if is_of_server(line):
        return f"{keys['scenario']}/{keys.get('engine', UNNAMED_SERVER)}"
    plain, named = (
        f"{keys['scenario']}/{tried_with(keys.get('shape', ''), transport)}"
        for transport in (None, keys.get("transport"))
    )
    return plain if plain in judged and named not in judged else named


def lines_of(plan: dict[str, object]) -> Sequence[str]:
    """The lines of the cells that a record's plan lists."""
    lines = plan.get("cells")
    return [str(line) for line in lines] if isinstance(lines, list) else []
