"""PrivateNetwork: a network namespace for the engine processes of one machine; its only interface is a loopback.

The library listens on all interfaces, so engine processes enter the namespace before they load it. This module, run as
a program, holds the namespace.

Invariants:
- If the system refuses the namespace, `path` is None and `why` gives the reason.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import subprocess
import sys
from pathlib import Path
from typing import Self

from kvcheck.core.base.child import StandardStreams, end, start
from kvcheck.core.base.errors import UnknownVerdict

CLONE_NEWUSER = 0x1000_0000
CLONE_NEWNET = 0x4000_0000
SIOCSIFFLAGS = 0x8914
IFF_UP = 0x1
READY = "ready"
OWN = "/proc/self/ns"


class PrivateNetwork:
    def __init__(self) -> None:
        self.path: str | None = None
        self.why = ""
        self._holder: subprocess.Popen[str] | None = None
        try:
            self._holder = start(__name__, streams=StandardStreams(stdin=subprocess.PIPE))
        except UnknownVerdict as error:
            self.why = str(error)
            return
        assert self._holder.stdout is not None
        said = self._holder.stdout.readline().strip()
        if said == READY:
            self.path = f"/proc/{self._holder.pid}/ns"
        else:
            self.why = said or "the process that was to make it ended"

    def close(self) -> None:
        """Close it for new processes. It ends with the last process inside."""
        if self._holder is not None:
            end(self._holder)
            for stream in (self._holder.stdin, self._holder.stdout):
                if stream is not None:
                    stream.close()
            self._holder = None
        self.path = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def enter(path: str) -> None:
    """Move this process, which has one thread, into the namespace. Raises OSError."""
    for name, kind in (("user", CLONE_NEWUSER), ("net", CLONE_NEWNET)):
        if os.path.samestat(os.stat(f"{path}/{name}"), os.stat(f"{OWN}/{name}")):
            continue
        opened = os.open(f"{path}/{name}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            _call("setns", opened, kind)
        finally:
            os.close(opened)


def make() -> None:
    """Move this process, which has one thread, into a new namespace with its loopback up. Raises OSError."""
    try:
        _call("unshare", CLONE_NEWNET)
        _raise_loopback()
    except PermissionError:  # not root, or not of networks: allowed as root of a new user namespace
        user, group = os.getuid(), os.getgid()
        _call("unshare", CLONE_NEWUSER | CLONE_NEWNET)
        Path("/proc/self/setgroups").write_text("deny", encoding="utf-8")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1", encoding="utf-8")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1", encoding="utf-8")
        _raise_loopback()


def _raise_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", IFF_UP))


def main() -> None:
    try:
        make()
    except OSError as error:
        sys.stdout.write(f"the system refuses a network namespace ({error.strerror})\n")
        return
    sys.stdout.write(READY + "\n")
    sys.stdout.flush()
    sys.stdin.read()


def _call(name: str, *arguments: int) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


if __name__ == "__main__":
    main()
