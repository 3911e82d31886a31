"""AgentLauncher: ranks on several machines. One agent a rank, started by torchrun; the first also supervises.

    supervisor --spec, tell, close_input, wait, close, quit--> mailbox of an agent --> its child
    supervisor <--events, ended------------------------------- mailbox of the supervisor

The mailboxes are keys of a TCPStore.

Invariants:
- An agent decides nothing: it starts the process of its spec and passes lines on both ways.
- A mailbox has one writer and one reader. Lines are JSON. They are taken once each, in the sequence of their sending.
- Every wait has a bound. An agent that hears nothing for an hour ends; the rank of one that does not answer is dead.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed import DistError

from kvcheck.core.base.errors import UnknownVerdict, UsageError
from kvcheck.core.stress.ranks.child import Child, Ending, LocalChild, LocalLauncher, Put
from kvcheck.core.stress.ranks.spec import RankSpec, read_spec

CONNECT_S = 120.0
STEP_S = 1.0
"""Seconds that one look into a mailbox waits. A line that comes later is found by the next look."""
IDLE_S = 3600.0
"""An agent that hears nothing for so many seconds ends."""
ANSWER_S = 20.0
LOOK_S = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """The rank of this process among `world` processes, and the address of the store where all of them meet.

    is_host: this process opens the store. bind: the address at which this machine is reached.
    """

    rank: int
    world: int
    store_host: str
    store_port: int
    is_host: bool
    bind: str

    def connect(self) -> TCPStore:
        """A new connection. Raises UsageError where nobody answers."""
        return self._connect(is_host=False)

    def open(self) -> TCPStore:
        """The first connection of this process."""
        return self._connect(is_host=self.is_host)

    def _connect(self, *, is_host: bool) -> TCPStore:
        try:
            return TCPStore(
                self.store_host,
                self.store_port,
                is_master=is_host,
                timeout=timedelta(seconds=CONNECT_S),
                wait_for_workers=False,
            )
        except DistError as error:
            raise UsageError(f"no store at {self.store_host}:{self.store_port}: {error}") from error


class Mailbox:
    """Lines for one reader. store: a connection that no other thread waits on."""

    def __init__(self, store: Store, name: str) -> None:
        self._store = store
        self._name = name
        self._count = 0
        self._sending = threading.Lock()

    def send(self, value: Mapping[str, object]) -> None:
        """Append a line."""
        with self._sending:
            self._store.set(f"kvcheck/{self._name}/{self._count}", json.dumps(value))
            self._count += 1

    def take(self, within_s: float = STEP_S) -> dict[str, object] | None:
        """The next line, or None if none comes in time."""
        key = f"kvcheck/{self._name}/{self._count}"
        deadline = time.monotonic() + within_s
        try:
            while not self._store.check([key]):  # waiting in the store says so on standard error, each time
                if time.monotonic() > deadline:
                    return None
                time.sleep(LOOK_S)
            value: dict[str, object] = json.loads(self._store.get(key))
            self._store.delete_key(key)
        except DistError as error:
            raise UnknownVerdict(f"{self._name}: the store is gone, and rank 0 with it: {error}") from error
        self._count += 1
        return value


class RemoteChild:
    """A rank's process under an agent."""

    def __init__(self, spec: RankSpec, box: Mailbox) -> None:
        self.spec = spec
        self._box = box
        self._ending: Ending | None = None
        self._has_ended = threading.Event()
        box.send({"spec": spec.to_json()})

    def tell(self, value: Mapping[str, object]) -> None:
        self._box.send({"tell": dict(value)})

    def close_input(self) -> None:
        self._box.send({"close_input": True})

    def wait(self, within_s: float | None = None) -> Ending:
        self._box.send({"wait": within_s})
        if not self._has_ended.wait((within_s or 0.0) + ANSWER_S) or self._ending is None:
            return Ending(1, f"the agent of {self.spec.name} does not answer")
        return self._ending

    def close(self) -> None:
        self._box.send({"close": True})

    def ended(self, ending: Ending) -> None:
        """The agent has reported its end."""
        self._ending = ending
        self._has_ended.set()


class AgentLauncher:
    """Starts ranks under the agents, prefill ranks first. Only the process of rank 0 has one."""

    def __init__(self, place: Address) -> None:
        self._place = place
        self._store = place.open()
        self._boxes = [Mailbox(self._store, f"to-{rank}") for rank in range(place.world)]
        self._children: dict[int, tuple[RemoteChild, Put]] = {}
        self._runs = 0
        self._is_over = False
        ranks = range(place.world)
        self._threads = [threading.Thread(target=self._listen, args=(rank,), daemon=True) for rank in ranks]
        for thread in self._threads:
            thread.start()

    def start(self, spec: RankSpec, put: Put) -> Child:
        """Tell the agent of that rank to start it."""
        rank = spec.rank + (spec.prefill if spec.end == "decode" else 0)
        child = RemoteChild(spec, self._boxes[rank])
        self._children[rank] = (child, put)
        return child

    def meeting(self, name: str) -> str:
        """A prefix in the store, of this run alone."""
        return f"tcp://{self._place.store_host}:{self._place.store_port}/{self._runs}/{name}"

    def close(self) -> None:
        """Later runs get other names in the store."""
        self._runs += 1

    def dismiss(self) -> None:
        """Tell all agents to end."""
        for box in self._boxes:
            box.send({"quit": True})
        self._is_over = True
        for thread in self._threads:
            thread.join(ANSWER_S)

    def _listen(self, rank: int) -> None:
        box = Mailbox(self._place.connect(), f"from-{rank}")
        while not self._is_over:
            value = box.take()
            if value is None:
                continue
            child, put = self._children[rank]
            if "ended" in value:
                child.ended(Ending(int(str(value["ended"])), str(value["text"])))
                put(child.spec.name, None)
            else:
                put(child.spec.name, value)


def run_agent(place: Address, program: str) -> None:
    """Run the agent of a place until it is told to quit or has heard nothing for IDLE_S seconds."""
    box, back = Mailbox(place.open(), f"to-{place.rank}"), Mailbox(place.connect(), f"from-{place.rank}")
    launcher = LocalLauncher(program, host=place.bind)
    child: LocalChild | None = None
    heard = time.monotonic()
    try:
        while time.monotonic() - heard < IDLE_S:
            value = box.take()
            if value is None:
                continue
            heard = time.monotonic()
            if value.get("quit"):
                return
            if "spec" in value:
                child = _start(launcher, read_spec(str(value["spec"])), back)
            elif child is not None:
                _pass_on(child, value)
    finally:
        if child is not None:
            child.wait(within_s=0.0)
            child.close()
        launcher.close()


def _start(launcher: LocalLauncher, spec: RankSpec, back: Mailbox) -> LocalChild:
    made: list[LocalChild] = []
    is_made = threading.Event()

    def put(name: str, value: dict[str, object] | None) -> None:
        if value is not None:
            back.send(value)
            return
        is_made.wait()
        ending = made[0].wait()
        back.send({"ended": ending.code, "text": ending.text})

    try:
        made.append(launcher.start(spec, put))
    except UnknownVerdict as error:
        kind = type(error).__name__
        back.send({"event": "error", "kind": kind, "message": str(error), "exit_code": error.exit_code})
        raise
    is_made.set()
    return made[0]


def _pass_on(child: LocalChild, value: Mapping[str, object]) -> None:
    told, within_s = value.get("tell"), value.get("wait")
    if isinstance(told, dict):
        child.tell(told)
    elif value.get("close_input"):
        child.close_input()
    elif value.get("close"):
        child.close()
    else:
        child.wait(float(within_s) if isinstance(within_s, int | float) else None)
