"""The transfer engine's library: accepted builds, and the settings of each protocol.

Invariants:
- Exactly one build must be installed, none older than OLDEST. Builds silently overwrite each other's files, and older
  ones have other meanings for the same return code.
- The library is not imported here, because bad input makes it end the process.
- The library takes any protocol name and may fall back to TCP. The option that forbids it is set if there is one.
"""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
from dataclasses import dataclass

from kvcheck.core.base.child import StandardStreams, end, start
from kvcheck.core.base.errors import UnknownVerdict, UsageError
from kvcheck.core.base.identity import MOONCAKE_BUILDS as BUILDS

OLDEST = "0.3.13.post1"
LIBRARIES = "apt-get install -y libibverbs1 libnuma1 libcurl4"
"""Installs the library's dependencies on Debian and Ubuntu."""
INSTALL = f"pip install '{BUILDS[0]}>={OLDEST}'; on Debian and Ubuntu also {LIBRARIES}"
ENGINE_PROCESS = "kvcheck.core.cache.transfer.mooncake.child"
LOAD_ONLY = "load-only"
"""Argument of the engine's process: load the library, print any error, and end."""
LOAD_S = 60.0
VERSION = re.compile(r"(\d+(?:\.\d+)*)(?:(a|b|rc|\.dev)(\d+))?(?:\.post(\d+))?(?:\+[\w.]+)?")
SHORTEST_TRANSFER_S = 5  # the library reads anything below as this


@dataclass(frozen=True, slots=True)
class ProtocolRow:
    """flag: the required build option; "" if every build has it."""

    told: str
    variables: dict[str, str]
    flag: str = ""


PROTOCOLS = {
    "tcp": ProtocolRow("tcp", {"MC_FORCE_TCP": "1"}),
    "rdma": ProtocolRow("rdma", {"MC_FORCE_HCA": "1"}),
    "nvlink": ProtocolRow("nvlink", {"MC_FORCE_MNNVL": "1"}, "SUPPORT_MNNVL"),
    "nvlink_intra": ProtocolRow("nvlink_intra", {"MC_INTRANODE_NVLINK": "true"}, "SUPPORT_INTRA_NVLINK"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Limits and settings of an engine process, in seconds.

    call_s: watchdog of a call. It must exceed 61, for which the library waits for a peer that accepts a connection and
    stays silent; otherwise healthy peers are given up during a handshake. transfer_s, progress_s, status_s: the
    library's own limits, so that it fails before the watchdog. variables: MC_ variables that override these.
    """

    start_s: float = 120.0
    call_s: float = 75.0
    fence_s: float = 10.0
    transfer_s: int = 10
    progress_s: int = 5
    status_s: int = 5
    lanes: int = 16
    slice_bytes: int = 256 << 10
    variables: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        if min(self.start_s, self.call_s, self.fence_s) <= 0 or min(self.progress_s, self.status_s, self.lanes) < 1:
            raise UsageError(f"engine settings: every bound has to be positive, got {self}")
        if self.transfer_s < SHORTEST_TRANSFER_S:
            raise UsageError(f"engine settings: expected transfer_s of {SHORTEST_TRANSFER_S} up, got {self.transfer_s}")
        if bad := [name for name, _ in self.variables if not re.fullmatch(r"MC_[A-Z0-9_]+", name)]:
            raise UsageError(f"engine settings: not variables of the engine: {', '.join(map(repr, bad))}; expected MC_")

    def environment(self, protocol: str) -> dict[str, str]:
        return {
            "MC_LOG_LEVEL": "ERROR",
            "MC_TRANSFER_TIMEOUT": str(self.transfer_s),
            "MC_TCP_PROGRESS_TIMEOUT_SEC": str(self.progress_s),
            "MC_TCP_STATUS_TIMEOUT_SEC": str(self.status_s),
            "MC_TCP_LANES_PER_PEER": str(self.lanes),
            "MC_TCP_SLICE_SIZE": str(self.slice_bytes),
            **PROTOCOLS[protocol].variables,
            **dict(self.variables),
        }


def require_protocol(protocol: str) -> None:
    if protocol not in PROTOCOLS:
        raise UsageError(f"unknown protocol {protocol!r}; known: {', '.join(PROTOCOLS)}")


def require_library() -> str:
    """Return the installed version. Raise UnknownVerdict unless there is one build, new enough."""
    found = {build: version for build in BUILDS if (version := _version_of(build)) is not None}
    if not found:
        raise UnknownVerdict(f"transport mooncake needs the mooncake transfer engine; next: {INSTALL}")
    if len(found) > 1:
        raise UnknownVerdict(
            "transport mooncake: builds that overwrite each other's files are installed together: "
            f"{', '.join(f'{build} {version}' for build, version in found.items())}; expected one; next: "
            f"pip uninstall -y {' '.join(found)}, then install one of them again"
        )
    ((build, version),) = found.items()
    if not is_new_enough(version):
        raise UnknownVerdict(
            f"transport mooncake: {build} {version} means something else by its return codes; expected {OLDEST} or "
            f"newer; next: pip install '{build}>={OLDEST}'"
        )
    return version


def why_unusable() -> str | None:
    try:
        require_library()
        process = start(ENGINE_PROCESS, LOAD_ONLY, streams=StandardStreams(stderr=subprocess.DEVNULL))
    except UnknownVerdict as error:
        return str(error)
    try:
        said = process.communicate(timeout=LOAD_S)[0].strip()
    except subprocess.TimeoutExpired:
        return f"the library was not loaded within {LOAD_S:g} s"
    finally:
        end(process)
    if process.returncode == 0:
        return None
    return said or f"the process that was to load the library ended with {process.returncode}"


def is_new_enough(version: str) -> bool:
    rank, oldest = _rank(version), _rank(OLDEST)
    return rank is not None and oldest is not None and rank >= oldest


def _version_of(build: str) -> str | None:
    try:
        return importlib.metadata.version(build)
    except importlib.metadata.PackageNotFoundError:
        return None


def _rank(version: str) -> tuple[tuple[int, ...], int, int] | None:
    """(release padded to six numbers, 0 before the release and 1 from it on, post release)."""
    match = VERSION.fullmatch(version)
    if match is None:
        return None
    release = tuple(int(part) for part in match[1].split("."))
    return (*release, *(0,) * (6 - len(release))), int(match[2] is None), int(match[4] or -1)
