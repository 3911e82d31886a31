"""The frame that starts and stops servers of engines, with a server of the standard library in an engine's place."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rigs.live_processes import is_alive, poll

from kvcheck.core.base.errors import UnknownVerdict
from tools.servers.serving import Command, free_ports, serving, session_ticks

ROOT = Path(__file__).parents[2]
ENGINE = """
import http.server, os, signal, subprocess, sys, time
mode, port = sys.argv[1], int(sys.argv[2])
below = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print("pids", os.getpid(), below.pid, os.environ.get("GIVEN"), os.environ.get("HF_TOKEN"), flush=True)
if mode == "dies":
    sys.exit("out of pages")
if mode == "busy":
    while time.process_time() < 0.3: pass
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(404 if mode == "sick" or self.path != "/ready" else 200)
        self.end_headers()
    def log_message(self, *_): pass
http.server.HTTPServer(("127.0.0.1", port), Health).serve_forever()
"""
HOLDS_ONE = """
import sys, time
from pathlib import Path
from tools.servers.serving import Command, serving
port, folder = int(sys.argv[1]), Path(sys.argv[2])
words = (sys.executable, "-c", sys.argv[3], "plain", str(port))
command = Command(name="held", words=words, port=port, health="/ready")
with serving([command], folder=folder, within_s=60):
    print("up", flush=True)
    time.sleep(60)
"""


def command(mode: str, name: str = "engine") -> Command:
    (port,) = free_ports(1)
    words = (sys.executable, "-c", ENGINE, mode, str(port))
    return Command(name=name, words=words, port=port, variables={"GIVEN": "yes"}, health="/ready")


def pids(log: Path) -> list[int]:
    """Processes that the stand-in says it consists of; none before it has said so."""
    said = log.read_text().split() if log.exists() else []
    return [*map(int, said[1:3])] if said[:1] == ["pids"] else []


@pytest.mark.processes
def test_servers_answer_and_nothing_of_them_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setattr("tools.servers.serving.STOP_S", 0.5)
    with serving([command("plain", "one"), command("busy", "two")], folder=tmp_path, within_s=60) as (one, two):
        alive = [pid for server in (one, two) for pid in pids(server.log)]
        assert len(alive) == 4 and all(map(is_alive, alive))
        assert one.address != two.address and set(pids(one.log)) < set(session_ticks(one.group))
        assert one.log.read_text().split()[3:5] == ["yes", "None"], "a variable that is given, and a secret that is not"
        used = two.cpu_s()
        assert used >= 0.3
    assert poll(lambda: not any(map(is_alive, alive))) and not session_ticks(one.group), "two ignores SIGTERM"
    assert two.cpu_s() >= used, "the figure of its end, after its end"
    two.stop()


@pytest.mark.processes
@pytest.mark.parametrize(
    ("mode", "within_s", "told"),
    [("dies", 60, "ended before it answered"), ("sick", 1.5, "did not answer /ready within")],
)
def test_a_server_that_does_not_come_up_is_an_error_with_its_log(
    mode: str, within_s: float, told: str, tmp_path: Path
) -> None:
    with (
        pytest.raises(UnknownVerdict, match=told) as error,
        serving([command("plain", "other"), command(mode)], folder=tmp_path, within_s=within_s),
    ):
        pass
    log = tmp_path / "engine.log"
    assert str(log) in str(error.value) and ("out of pages" in str(error.value)) == (mode == "dies")
    alive = [*pids(log), *pids(tmp_path / "other.log")]
    assert len(alive) >= 2 and not any(map(is_alive, alive))


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_server_ends_with_the_script_that_started_it(number: signal.Signals, tmp_path: Path) -> None:
    words = [sys.executable, "-c", HOLDS_ONE, str(free_ports(1)[0]), str(tmp_path), ENGINE]
    paths = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/tests"}
    with subprocess.Popen(words, env=paths, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as script:
        try:
            assert script.stdout is not None and script.stdout.readline() == "up\n"
            alive = pids(tmp_path / "held.log")
            script.send_signal(number)
            assert script.wait(60) != 0
        finally:
            script.kill()
    assert len(alive) == 2 and poll(lambda: not any(map(is_alive, alive)))
