"""kvcheck's end of the child that holds an engine: sends requests, waits with a limit, and ends the child.

A child that dies, hangs or writes anything but an answer is UnknownVerdict with the last line of its standard error.
Processes that the child has started end with it, also on an interruption and at kvcheck's end.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from kvcheck.core.base.child import (
    Build,
    StandardStreams,
    check,
    close_input,
    has_ended,
    kill_group,
    listen,
    spawn,
    tail,
    tell,
)
from kvcheck.core.base.errors import UnknownVerdict
from kvcheck.core.probes.frame.wire import LONGEST_LINE, Ask, Hello, Message, Refusal, Reply, decode, encode

TAIL = 20_000


@dataclass(frozen=True, slots=True)
class Patience:
    """Limits in seconds: for the start of a child, for an answer, and for its end after it has closed its output."""

    start_s: float = 300.0
    answer_s: float = 120.0
    end_s: float = 5.0


class EngineProcess:
    """A child with an engine. entry: "module:name" of its tables. variables: replace inherited ones. Raises
    UnknownVerdict if it does not get ready."""

    def __init__(
        self,
        engine: str,
        entry: str,
        python: Path,
        patience: Patience,
        device: str = "cpu",
        *,
        program: str,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self._name = f"{engine} under {python}"
        made = f"kvcheck env {engine}==VERSION VENV"
        made = made if device == "cpu" else f"on a machine with a GPU, {made} --device cuda"
        self._next = f"{made}, then kvcheck probe {engine}:VENV"
        self._patience = patience
        self._is_ready = False
        self._said: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115, `close` closes it
        self._lines: queue.Queue[str | None] = queue.Queue()
        streams = StandardStreams(stdin=subprocess.PIPE, stderr=self._said)
        try:
            told = json.dumps(dict(variables or {}))
            self._started = spawn(program.partition(":")[0], entry, device, told, streams=streams, engine_python=python)
            self._child = self._started.process
        except OSError as error:
            self._said.close()
            raise UnknownVerdict(f"{self._name}: cannot be started: {error}") from error
        try:
            listen(self._child, self._lines.put, LONGEST_LINE)
            self.hello = self._greeting()
            self._is_ready = True
        finally:
            if not self._is_ready:  # e.g. interrupted: no caller has this object yet to end the child
                self.close()

    def ask(self, ask: Ask) -> Reply:
        """Run one schedule. Raises UnknownVerdict and ends the child if no answer comes."""
        tell(self._child, encode(ask))
        what = f"{ask.probe} on {ask.subject}"
        answer = self._hear(self._patience.answer_s, what)
        if not isinstance(answer, Reply):
            raise self._lost(f"said {type(answer).__name__.lower()} instead of an answer to {what}")
        return answer

    @property
    def cpu_s(self) -> float:
        """CPU seconds of the child by the kernel's count; 0 after its end."""
        try:
            fields = Path(f"/proc/{self._child.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return 0.0
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        kill_group(self._child)
        close_input(self._child)
        self._said.close()

    def _greeting(self) -> Hello:
        build = self._build()
        answer = self._hear(self._patience.start_s, "getting ready")
        if isinstance(answer, Refusal):
            self.close()
            raise UnknownVerdict(f"{self._name}: {answer.reason}; next: {self._next}")
        if not isinstance(answer, Hello):
            raise self._lost(f"said {type(answer).__name__.lower()} instead of being ready")
        if build is None:
            raise self._lost("did not say which kvcheck it runs")
        return answer

    def _build(self) -> Build | None:
        """None if the child sent none. Raises InternalError for another build."""
        try:
            build = self._started.greet(self._patience.start_s)
        except TimeoutError:
            raise self._lost(f"said nothing for {self._patience.start_s:g} s: getting ready") from None
        if build is not None:
            check(build, self._name, is_own_python=False)
        return build

    def _hear(self, within_s: float, what: str) -> Message:
        try:
            line = self._lines.get(timeout=within_s)
        except queue.Empty:
            raise self._lost(f"said nothing for {within_s:g} s: {what}") from None
        if line is None:
            is_over = has_ended(self._child, self._patience.end_s)
            status = kill_group(self._child)
            ended = f"ended with status {status}" if is_over else "closed its output and did not end"
            raise self._lost(f"{ended}: {what}")
        try:
            return decode(line)
        except (ValueError, RecursionError) as error:
            raise self._lost(f"said {line[:60]!r}, which is no answer ({error}): {what}") from error

    def _lost(self, why: str) -> UnknownVerdict:
        told = tail(self._said.fileno(), TAIL).splitlines()
        self.close()
        last = f"its last line: {told[-1][-300:] if told else 'none'}"
        more = "" if self._is_ready else f"; next: {self._next}"
        return UnknownVerdict(f"{self._name}: the child {why}; {last}{more}")
