"""The engine process: maps its worker's regions, runs the library, and answers each call with its return code.

It is a separate process because the library ends its process on bad arguments, cannot cancel a call, and surely
releases memory only when its process ends.

Invariants:
- It ends with its worker, and with the socket, also during a call.
- After the first failed call it makes no other, because the library may still move bytes of the failed one.
- MC_ variables of the user's environment are dropped.
"""

from __future__ import annotations

import ctypes
import faulthandler
import mmap
import os
import select
import signal
import socket
import sys
import threading
from typing import Protocol

from kvcheck.core.base.private_network import enter
from kvcheck.core.cache.transfer.mooncake.frames import (
    CODE,
    MOST_DESCRIPTORS,
    Channel,
    ChannelClosed,
    Frame,
    FrameType,
    pack_json,
    unpack_call,
    unpack_json,
)
from kvcheck.core.cache.transfer.mooncake.library import INSTALL, LOAD_ONLY

NOT_TRIED = -100_001
"""Code of a call after a failed one. The library's own are above -10,000."""
NO_METADATA_SERVER = "P2PHANDSHAKE"
STANDARD_INPUT = 0


class Library(Protocol):
    def initialize(self, local_hostname: str, metadata_server: str, protocol: str, device_name: str) -> int:
        """0, or a negative code."""

    def get_rpc_port(self) -> int: ...

    def register_memory(self, address: int, size: int) -> int:
        """0, or a negative code."""

    def batch_transfer_sync_write(self, peer: str, local: list[int], remote: list[int], length: list[int]) -> int:
        """0 if all were written, -1 if not."""


class EngineRefused(Exception):
    """No engine can be set up. The message is for the user."""


class Unusable(EngineRefused):
    """The installed library cannot be used at all."""


def main() -> None:
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the worker, which decides
    link = socket.socket(fileno=os.dup(STANDARD_INPUT))
    try:
        run(Channel(link), link)
    except ChannelClosed:
        os._exit(0)  # the library's own exit takes a second and waits for its transfers


def run(channel: Channel, link: socket.socket) -> None:
    """Answer the calls of one worker. Raise ChannelClosed when it is gone."""
    request = channel.receive(descriptors=MOST_DESCRIPTORS)
    asked = unpack_json(request.payload)
    try:
        join(asked.get("network"))  # before there is a second thread
        die_with(link)
        maps = map_regions(channel, asked)
        library, ready = set_up(asked, maps)
    except EngineRefused as error:
        channel.send(
            FrameType.REFUSED, request.number, pack_json({"why": str(error), "is_library": isinstance(error, Unusable)})
        )
        channel.receive()  # the worker reads why, and closes
        return
    channel.send(FrameType.READY, request.number, ready)
    serve(channel, library)


def join(network: object) -> None:
    if network is None:
        return
    try:
        enter(str(network))
    except OSError as error:
        raise EngineRefused(
            f"the engine's process could not enter the network of its run at {network}: {error}"
        ) from error


def die_with(link: socket.socket) -> None:
    poll = select.poll()
    poll.register(link.fileno(), select.POLLRDHUP)

    def watch() -> None:
        poll.poll()
        os._exit(0)

    threading.Thread(target=watch, name="watch the worker", daemon=True).start()


def map_regions(channel: Channel, asked: dict[str, object]) -> dict[str, mmap.mmap]:
    regions = asked["regions"]
    if not isinstance(regions, dict) or len(regions) != len(channel.descriptors):
        raise EngineRefused(f"expected a descriptor for each region, got {len(channel.descriptors)} for {regions}")
    try:
        return {
            name: mmap.mmap(descriptor, int(size))
            for (name, size), descriptor in zip(regions.items(), channel.descriptors, strict=True)
        }
    except OSError as error:
        raise EngineRefused(f"a region could not be mapped: {error}") from error


def set_up(asked: dict[str, object], maps: dict[str, mmap.mmap]) -> tuple[Library, bytes]:
    set_variables(asked["variables"])
    library = load(str(asked["flag"]))
    if (code := library.initialize(str(asked["host"]), NO_METADATA_SERVER, str(asked["protocol"]), "")) != 0:
        raise EngineRefused(
            f"initialize for protocol {asked['protocol']} at {asked['host']} returned {code}, expected 0"
        )
    extents = {}
    for name, memory in maps.items():
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        if (code := library.register_memory(address, len(memory))) != 0:
            raise EngineRefused(f"registering region {name} of {len(memory)} bytes returned {code}, expected 0")
        extents[name] = [address, len(memory)]
    return library, pack_json({"port": library.get_rpc_port(), "regions": extents})


def set_variables(variables: object) -> None:
    """Set the environment, which has the library's only settings."""
    for name in [name for name in os.environ if name.startswith("MC_")]:
        del os.environ[name]
    if isinstance(variables, dict):
        os.environ.update({str(name): str(value) for name, value in variables.items()})


def load(flag: str) -> Library:
    """flag: the required build option, or "". Raise Unusable."""
    try:
        from mooncake import engine
    except ImportError as error:
        raise Unusable(f"the library could not be loaded: {error}; next: {INSTALL}") from error
    if flag and not getattr(engine, flag, False):
        raise Unusable(f"the installed build is without it ({flag}); it would use TCP and say nothing")
    library: Library = engine.TransferEngine()
    return library


def serve(channel: Channel, library: Library) -> None:
    has_failed = False
    while True:
        frame = channel.receive()
        code = NOT_TRIED if has_failed else call(library, frame)
        has_failed = has_failed or code != 0
        channel.send(FrameType.DONE, frame.number, CODE.pack(code))


def call(library: Library, frame: Frame) -> int:
    if frame.kind is not FrameType.WRITE:
        raise ChannelClosed(f"unexpected frame {frame.kind.name}")
    return library.batch_transfer_sync_write(*unpack_call(frame.payload))


def load_only() -> None:
    try:
        load("")
    except Unusable as error:
        sys.stdout.write(f"{error}\n")
        sys.exit(1)
    os._exit(0)  # the library takes a second to end by itself


if __name__ == "__main__":
    if sys.argv[1:] == [LOAD_ONLY]:
        load_only()
    main()
