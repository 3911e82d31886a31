"""A write to a stopped peer, and one to memory that nobody registered: does the engine report them done?

VENV/bin/python of an environment with mooncake-transfer-engine-non-cuda runs it. Exit 1: one of them was.
"""

import ctypes
import mmap
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor, wait

SIZE, TRIES = 4096, 20
shared = mmap.mmap(-1, 4 * SIZE)  # the peer registers the first page; this process looks at all of it
base = ctypes.addressof(ctypes.c_char.from_buffer(shared))
heard, said = os.pipe()
child = os.fork()  # the library does not survive a fork, so each process loads it
from mooncake.engine import TransferEngine  # noqa: E402

engine, source = TransferEngine(), ctypes.create_string_buffer(SIZE)
assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
engine.register_memory(ctypes.addressof(source) if child else base, SIZE)
if not child:
    os.write(said, f"127.0.0.1:{engine.get_rpc_port()}".encode())
    signal.pause()
session, early, threads = os.read(heard, 100).decode(), 0, ThreadPoolExecutor()
for number in range(1, TRIES + 1):
    source.raw = bytes([number]) * SIZE
    os.kill(child, signal.SIGSTOP)
    os.waitid(os.P_PID, child, os.WSTOPPED | os.WNOWAIT)
    write = threads.submit(engine.transfer_sync_write, session, ctypes.addressof(source), base, SIZE)
    wait([write], 0.3)
    early += write.done() and write.result() == 0 and shared[:SIZE] != source.raw
    os.kill(child, signal.SIGCONT)
    time.sleep(0.1 + 0 * write.result())
code = engine.transfer_sync_write(session, ctypes.addressof(source), base + 2 * SIZE, SIZE)
os.kill(child, signal.SIGKILL)
print(f"{early} of {TRIES} writes were done while the peer was stopped and they had not landed")
print(f"a write to memory that nobody registered returned {code}", flush=True)
os._exit(int(early > 0 or code == 0))
