"""DeviceEnd: the end of a schedule on a device: waits, reports errors, and checks whether the device is lost.

    an error         a finding of the target, as on a CPU
    a lost device    CUDA repeats its error at every call from now on; the first is reported once, with the unfinished
                     operations, one of which caused it
    broken hardware  no finding: an uncorrected error of memory or a link, and the schedule is no evidence

Invariants:
- The objects of a schedule on a lost device stay alive: torch records an event when it frees pinned memory, and that
  would end the process before the report.
"""

from __future__ import annotations

import sys
from pathlib import Path
from traceback import walk_tb
from types import FrameType

from kvcheck.core.base.errors import HardwareError, TargetError, text_of
from kvcheck.core.base.nouns import counted
from kvcheck.core.cache.backend.backend import Backend, Completed, Operation, Submitted
from kvcheck.core.cache.backend.delays import DelayReport
from kvcheck.core.cache.backend.simulated import Pending
from kvcheck.core.cache.backend.streamed import StreamedBackend
from kvcheck.core.stress.history import History
from kvcheck.core.stress.workload.events import Broke

LANES_MOST = 8
"""Lanes that are named: a finding is read in a terminal."""
CRASH = "KV902"

_ID = "an operation was given an id that is out of range"
_ADDRESS = "an operation read or wrote at an address that is out of range"
WAYS = {
    "device-side assert": _ID,
    "illegal memory access": _ADDRESS,
    "invalid address": _ADDRESS,
    "misaligned address": _ADDRESS,
    "hardware stack error": "the hardware reported an error in the call stack of an operation",
    "or a hardware error": "an operation misused memory of another device, or the hardware reported an error",
}
"""Messages of CUDA and Triton for a lost context, and their meaning. A kernel of torch asserts its ids."""
OTHER = "an operation has ended it"
HARDWARE = ("uncorrectable ECC error", "uncorrectable NVLink error")
"""Messages of CUDA that no operation causes: errors 214 and 220."""


UNDER_TEST = ("kvcheck.core.cache.", "kvcheck.core.stress.targets.mutants.", "kvcheck.kernels.")
"""Modules of kvcheck whose calls are named if one of them raises."""
OTHERS = sys.stdlib_module_names | {"kvcheck", "numpy", "torch"}
"""Packages whose calls are not named. All further ones are the user's own."""


def broke_by(error: BaseException, code: str, during: str = "") -> Broke:
    text, request = text_of(error), None
    if code == CRASH:
        call, request, operation = _place(error)
        known = (("in", call), ("request", request), ("operation", operation))
        about = [*([during] if during else []), *(f"{word} {value}" for word, value in known if value is not None)]
        text = "; ".join(part for part in (text, ", ".join(about)) if part)
    return Broke(code, type(error).__name__, text, request)


def is_of_user(error: BaseException) -> bool:
    """Whether the user's own code raised it, itself or by a call into a library."""
    names = (str(frame.f_globals.get("__name__")) for frame, _ in reversed([*walk_tb(error.__traceback__)]))
    tops = (name.partition(".")[0] for name in names)
    return next((top != "kvcheck" for top in tops if top == "kvcheck" or top not in OTHERS), False)


def _place(error: BaseException) -> tuple[str | None, int | None, str | None]:
    call, request, operation = None, None, None
    for frame, line in reversed([*walk_tb(error.__traceback__)]):
        name, code = str(frame.f_globals.get("__name__")), frame.f_code
        if name.startswith(UNDER_TEST) or name.partition(".")[0] not in OTHERS:
            call = call or f"{code.co_qualname} ({Path(code.co_filename).name}:{line})"
        if operation is None and (ran := _operation(frame)) is not None:
            operation, request = ran.name, request or ran.request
        request = request or _request(frame)
    return call, request, operation


def _operation(frame: FrameType) -> Operation | None:
    pending = frame.f_locals.get("pending") if frame.f_code.co_name == "_step" else None
    found = pending.operation if isinstance(pending, Pending) else frame.f_locals.get("operation")
    return found if isinstance(found, Operation) else None


def _request(frame: FrameType) -> int | None:
    code = frame.f_code
    for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
        value = frame.f_locals.get(name)
        if type(value).__module__.startswith(UNDER_TEST) and name != "self":
            value = getattr(value, "request_id", getattr(value, "request", None))
        elif name not in ("request", "request_id"):
            continue
        if type(value) is int:
            return value
    return None


class DeviceEnd:
    def __init__(self, device: str, backend: Backend, history: History) -> None:
        self.delays: DelayReport | None = None
        self.is_lost = False
        self._device = device
        self._backend = backend if isinstance(backend, StreamedBackend) else None
        self._history = history
        self._unfinished: dict[int, Submitted] = {}
        self._kept: list[BaseException] = []
        if self._backend is not None:
            history.listen(((Submitted, self._submitted), (Completed, self._completed)))

    def settle(self, error: BaseException | None = None, code: str = CRASH) -> None:
        """Wait for the device, whose memory the next run will use, and report errors. error: of the target. Raises
        HardwareError if the device reports a hardware failure."""
        late: RuntimeError | TargetError | None = None
        if self._backend is not None:
            try:
                self.delays = self._backend.settle()
            except (RuntimeError, TargetError) as raised:
                late = raised
            self.is_lost = (error or late) is not None and self._backend.is_lost()
            self._check_hardware(error, late)
        if self.is_lost:
            self._kept += [each for each in (error, late) if each is not None]
            own, of_device = (None, error) if isinstance(error, RuntimeError) else (error, late)
            if of_device is not None:
                self._history.emit(Broke(CRASH, type(of_device).__name__, self._lost(text_of(of_device))))
            error, late = own, None
        for each, its_code in ((error, code), (late, CRASH)):
            if each is not None:
                self._history.emit(broke_by(each, its_code))

    def _check_hardware(self, *errors: BaseException | None) -> None:
        for each in errors:
            if each is not None and any(words in text_of(each) for words in HARDWARE):
                self.is_lost = True
                self._kept.append(each)
                raise HardwareError(
                    f"the hardware of {self._device} reported an error, which says nothing of the code under test: "
                    f"{_first_line(text_of(each))}; next: nvidia-smi -q, and the same on another device"
                ) from each

    def _submitted(self, event: Submitted) -> None:
        self._unfinished[event.ordinal] = event

    def _completed(self, event: Completed) -> None:
        del self._unfinished[event.ordinal]

    def _lost(self, said: str) -> str:
        way = next((way for words, way in WAYS.items() if words in said), OTHER)
        return (
            f"the context of {self._device} is lost: {way}, one of those that were not known to have run; "
            f"the last of each lane: {self._last_of_lanes()}; it said: {_first_line(said)}"
        )

    def _last_of_lanes(self) -> str:
        lanes: dict[str, list[Submitted]] = {}
        for each in self._unfinished.values():
            lanes.setdefault(each.lane, []).append(each)
        told = [
            f"{lane}: {each[-1].name} (#{each[-1].ordinal}{f', {len(each) - 1} before it' if each[1:] else ''})"
            for lane, each in [*lanes.items()][:LANES_MOST]
        ]
        more = len(lanes) - LANES_MOST
        return ", ".join([*told, *([f"and {counted(more, 'more lane')}"] if more > 0 else [])]) or "none"


def _first_line(said: str) -> str:
    return next(iter(said.strip().splitlines()), "nothing")
