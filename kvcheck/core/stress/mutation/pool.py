"""ServerPool: so many servers of trials, which take orders in turn and answer in lines.

Invariants:
- A server that dies is started again, and its order is answered with what ended it.
- All servers end with the pool, and so do the processes that they have forked.
"""

from __future__ import annotations

import json
import queue
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType

from kvcheck.core.base.child import Streams, close_input, end, listen, start, tell
from kvcheck.core.stress.mutation.server import PROGRAM

ENDING_S = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came of one order. said: the last line that says what came of it. at: the last plan line that began.

    ended: exit status, negative for a signal. stalled: it waited for what did not come, and was killed.
    """

    number: int
    said: Mapping[str, object] = field(default_factory=dict)
    at: str = ""
    ended: int = 0
    total_cpu_s: float = 0.0
    stalled: bool = False


class ServerPool:
    """Servers, each with at most one order at a time."""

    def __init__(self, jobs: int) -> None:
        self._jobs = jobs
        self._lines: queue.Queue[tuple[subprocess.Popen[str], str | None]] = queue.Queue()
        self._servers: list[subprocess.Popen[str]] = []

    def __enter__(self) -> ServerPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for server in self._servers:
            close_input(server)
        end(*self._servers, within_s=ENDING_S)

    def answers(self, orders: Callable[[], Mapping[str, object] | None]) -> Iterator[Answer]:
        """Give out orders until there are none, and yield each answer as it comes.

        orders: the next order, which has a "number"; None: there is none now. It is asked again after each answer.
        """
        busy: dict[subprocess.Popen[str], Answer] = {}
        while True:
            while len(busy) < self._jobs and (order := orders()) is not None:
                server = next((each for each in self._servers if each not in busy), None) or self._started()
                busy[server] = Answer(number=int(str(order["number"])))
                tell(server, json.dumps(order))
            if not busy:
                return
            server, line = self._lines.get()
            if server not in busy:
                continue
            so_far = busy[server]
            if line is None:
                self._servers.remove(server)
                del busy[server]
                close_input(server)
                yield _updated(so_far, {"ended": server.wait()})
                continue
            value = json.loads(line)
            busy[server] = _updated(so_far, value)
            if "ended" in value:
                yield busy.pop(server)

    def _started(self) -> subprocess.Popen[str]:
        server = start(PROGRAM, streams=Streams(stdin=subprocess.PIPE), variables={"OMP_NUM_THREADS": "1"})
        self._servers.append(server)
        listen(server, lambda line: self._lines.put((server, line)))
        return server


def _updated(answer: Answer, value: Mapping[str, object]) -> Answer:
    """The answer after one more line."""
    if "at" in value:
        return Answer(number=answer.number, said=answer.said, at=str(value["at"]))
    if "ended" in value:
        return Answer(
            number=answer.number,
            said=answer.said,
            at=answer.at,
            ended=int(str(value["ended"])),
            total_cpu_s=float(str(value.get("total_cpu_s", 0.0))),
            stalled=bool(value.get("stalled")),
        )
    return Answer(number=answer.number, said=value, at=answer.at)
