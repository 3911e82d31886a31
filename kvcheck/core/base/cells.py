"""Names of cells.

"SCENARIO/SHAPE"; "SCENARIO/SHAPE/TRANSPORT" if the ranks are processes; "SCENARIO/ENGINE" with a running server;
"own-model/SCENARIO/ENGINE" if that server serves the user's own model.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from urllib.parse import unquote

from kvcheck.core.base.errors import UsageError

KNOWN_ANSWERS = "known-answers"
"""The key that only lines of running servers with a known-answer model have."""
OWN_MODEL = "own-model"
"""Start of the scenario in lines of running servers with the user's own model."""

UNNAMED_SERVER = "server"
SCENARIO_NAMES = ("retract-resume", "hicache", "hicache-hybrid", "pd-transfer", "nvlink-aux")
PROCESS_TRANSPORTS = ("tcp", "mooncake", "ipc")
"""Transports that join processes, one a rank; all others work in one process."""
ENGINE_NAMES = ("sglang", "vllm", "lmcache", "mooncake")
KINDS = ("cpu", "threads", "cuda")
STREAMED = frozenset({"threads", "cuda"})
"""Backends, and kinds of devices, whose work runs beside the process."""
DRIVER = "libcuda.so.1"
CONNECTIONS = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
"""Hardware queues of a device, the most that CUDA has: lanes that share one wait for each other's holds. It counts if
it is set before the process first uses the device."""


def is_engine(target: str) -> bool:
    return target.partition(":")[0] in ENGINE_NAMES


def tried_with(shape: str, transport: str | None) -> str:
    return shape if transport is None else f"{shape}/{transport}"


def keys_of(line: str) -> dict[str, str]:
    """Parse a plan's line; the scenario is under "scenario"."""
    scenario, _, rest = line.partition(":")
    pairs = (pair.partition("=") for pair in rest.split(","))
    return {"scenario": scenario, **{key: unquote(value, errors="surrogateescape") for key, _, value in pairs}}


def is_own_model(line: str) -> bool:
    return line.startswith(f"{OWN_MODEL}/")


def is_of_server(line: str) -> bool:
    return is_own_model(line) or KNOWN_ANSWERS in keys_of(line)


def cell_of(line: str, judged: Collection[str]) -> str:
    """Return the cell name of a plan's line. judged: names in the record; old ones lack the transport."""
    keys = keys_of(line)
    if is_of_server(line):
        return f"{keys['scenario']}/{keys.get('engine', UNNAMED_SERVER)}"
    plain, named = (
        f"{keys['scenario']}/{tried_with(keys.get('shape', ''), transport)}"
        for transport in (None, keys.get("transport"))
    )
    return plain if plain in judged and named not in judged else named


def lines_of(plan: dict[str, object]) -> Sequence[str]:
    lines = plan.get("cells")
    return [str(line) for line in lines] if isinstance(lines, list) else []


def kind_of(device: str) -> str:
    kind, colon, number = device.partition(":")
    if kind not in KINDS or (colon and not (kind == "cuda" and number.isascii() and number.isdigit())):
        raise UsageError(f"--device: expected cpu, threads, cuda or cuda:N, got {device!r}")
    return kind


def number_of(device: str) -> int:
    return int(device.partition(":")[2] or 0)
