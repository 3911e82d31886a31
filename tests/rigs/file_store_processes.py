"""Child processes of test_file_store.py: writers that are killed, and writers that share a folder.

Run as a script, without torch, so that a child costs one fork. The verdict is made of what a reader sees afterwards.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvcheck.core.base.errors import StorageError
from kvcheck.core.cache.hicache.file_store import FileStore
from kvcheck.core.cache.hicache.storage import Namespace, object_bytes

OWNER = Namespace(model="m", dtype="bfloat16", layout="page_first", page_size=16, rank=0, ranks=1)
KEYS = tuple(OWNER.key("full", bytes([number]) * 32) for number in range(24))
SIZE = 9000
CALLS = ("open", "write", "fsync", "replace", "mkdir", "unlink", "pwrite", "pread", "fstat", "stat", "close", "listdir")


def payload_of(number: int, version: int) -> bytes:
    """Bytes of one version of one page; no two agree on any 9 bytes in the same place."""
    return (f"{number:04d}/{version:03d}|".encode() * (SIZE // 9 + 1))[:SIZE]


def die_at(step: int) -> None:
    """Make the `step`-th system call of this process its last: it is killed before it, a write is killed half-way."""
    steps = itertools.count(1)

    def dying(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            if next(steps) == step:
                if name == "write":
                    call(args[0], args[1][: len(args[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return counted

    for name in CALLS:
        setattr(os, name, dying(name, getattr(os, name)))
    fcntl.flock = dying("flock", fcntl.flock)


def forked(work: Callable[[int], None]) -> tuple[int, int]:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            work(writing)
            os._exit(0)
        finally:
            os._exit(9)
    os.close(writing)
    return child, reading


def acknowledged(reading: int) -> list[tuple[int, int]]:
    with os.fdopen(reading, "rb") as stream:
        data = stream.read()
    return [(data[at], data[at + 1]) for at in range(0, len(data) - 1, 2)]


def judge(folder: Path, started: dict[int, list[int]], done: list[tuple[int, int]]) -> list[str]:
    """What is wrong with the folder now. started: versions a page may have, in the order they were put."""
    wrong: list[str] = []
    store = FileStore(folder)
    last = dict(done)
    for number, versions in started.items():
        seen = store.get(KEYS[number], SIZE)
        first = versions.index(last[number]) if number in last else 0
        allowed: list[bytes | None] = [payload_of(number, version) for version in versions[first:]]
        if seen not in (allowed if number in last else [None, *allowed]):
            wrong.append(f"page {number}: {seen[:9] if seen else seen!r}, acknowledged {last.get(number)}")
    if store.refused:
        wrong.append(f"{store.refused} objects refused")
    if os.listdir(folder / "drafts"):
        wrong.append(f"drafts left after reopening: {os.listdir(folder / 'drafts')}")
    for number in started:
        store.put(KEYS[number], payload_of(number, 0))
        if store.get(KEYS[number], SIZE) != payload_of(number, 0):
            wrong.append(f"page {number} cannot be put again")
    store.close()
    return wrong


def every_step(folder: Path) -> dict[str, object]:
    """Kill a writer before each of its system calls: opening, a replacing put, a new put, a remove."""
    wrong: list[str] = []
    for step in itertools.count(1):
        here = folder / str(step)
        store = FileStore(here)
        store.put(KEYS[0], payload_of(0, 1))
        store.close()

        def work(acknowledge: int, here: Path = here, step: int = step) -> None:
            write = os.write
            die_at(step)
            victim = FileStore(here)
            for number, version in ((0, 2), (1, 1)):
                victim.put(KEYS[number], payload_of(number, version))
                write(acknowledge, bytes([number, version]))
            victim.remove(KEYS[2])
            victim.put(KEYS[2], payload_of(2, 1))
            victim.remove(KEYS[2])

        child, reading = forked(work)
        done = acknowledged(reading)
        _, status = os.waitpid(child, 0)
        wrong += [f"step {step}: {line}" for line in judge(here, {0: [1, 2], 1: [1], 2: [1]}, done or [(0, 1)])]
        if os.WIFEXITED(status):
            return {"steps": step - 1, "wrong": wrong, "status": os.WEXITSTATUS(status)}
    raise AssertionError("counting ended")


def any_moment(folder: Path, rounds: int) -> dict[str, object]:
    """Kill writers after random waits while they put and replace."""
    chance = random.Random(1)
    wrong: list[str] = []
    completed = 0
    for turn in range(rounds):
        # All rounds share one folder: each works on what the killed ones before it left behind.
        def work(acknowledge: int) -> None:
            store = FileStore(folder)
            for version in range(1, 200):
                for number in range(4):
                    store.put(KEYS[number], payload_of(number, version))
                    os.write(acknowledge, bytes([number, version]))

        child, reading = forked(work)
        early = b"".join(os.read(reading, 2) for _ in range(chance.randrange(1, 6)))  # how far it gets, on any disk
        time.sleep(chance.uniform(0.0, 0.005))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        done = [(early[at], early[at + 1]) for at in range(0, len(early), 2)] + acknowledged(reading)
        completed += len(done)
        if turn:  # the judge of the round before put every page and read it back
            done = [(number, 0) for number in range(4)] + done
        started = {number: list(range(200)) for number in range(4)}
        wrong += [f"round {turn}: {line}" for line in judge(folder, started, done)]
    return {"puts": completed, "wrong": wrong}


def share(folder: Path, who: int) -> dict[str, object]:
    """Put, read, remove and reopen beside a twin; pages 0-7 are never removed, 8-11 are, each side owns versions."""
    chance = random.Random(who)
    wrong: list[str] = []
    store = FileStore(folder)
    seen: set[int] = set()
    reads = found = full = refused = 0
    versions = {payload_of(number, version) for number in range(12) for version in range(8)}
    for turn in range(150):
        number = chance.randrange(12)
        try:
            store.put(KEYS[number], payload_of(number, 2 * chance.randrange(4) + who))
            seen |= {number}
        except StorageError:
            full += 1
        if number >= 8 and chance.random() < 0.5:
            store.remove(KEYS[number])
        for number in chance.sample(range(12), 4):
            data = store.get(KEYS[number], SIZE)
            reads += 1
            found += data is not None
            if data is not None and (data not in versions or not data.startswith(f"{number:04d}/".encode())):
                wrong.append(f"turn {turn}: page {number} gave {data[:9]!r}")
            if data is None and number < 8 and number in seen:
                wrong.append(f"turn {turn}: page {number} was there and is lost")
        if turn % 10 == 9:  # opening cleans up drafts, and must leave the twin's alone
            refused += store.refused
            store.close()
            store = FileStore(folder)
    refused += store.refused
    store.close()
    return {"wrong": wrong, "reads": reads, "found": found, "full": full, "refused": refused, "kept": sorted(seen)}


def limited(folder: Path) -> dict[str, object]:
    """With a limit on the length of a file, too large an object is refused and the small ones stay."""
    import resource

    sys.dont_write_bytecode = True  # what fits of a module's bytecode would be kept
    resource.setrlimit(resource.RLIMIT_FSIZE, (object_bytes(KEYS[0], SIZE), resource.RLIM_INFINITY))
    store = FileStore(folder)
    store.put(KEYS[0], payload_of(0, 1))
    message = ""
    with contextlib.suppress(StorageError):
        try:
            store.put(KEYS[1], payload_of(1, 1) + b"more")
        except StorageError as error:
            message = str(error)
            raise
    return {
        "message": message,
        "kept": store.get(KEYS[0], SIZE) == payload_of(0, 1),
        "partial": store.contains(KEYS[1]),
        "drafts": os.listdir(folder / "drafts"),
    }


def main(verb: str, folder: Path, *numbers: str) -> None:
    values = [int(number) for number in numbers]
    if verb == "every_step":
        result = every_step(folder)
    elif verb == "any_moment":
        result = any_moment(folder, values[0])
    elif verb == "share":
        result = share(folder, values[0])
    else:
        result = limited(folder)
    sys.stdout.write(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
