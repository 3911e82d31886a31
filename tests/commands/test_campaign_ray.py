"""`kvcheck campaign --ray`: a worker that is killed loses nothing, and without Ray it is UNKNOWN."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rigs.live_processes import children_of, poll

from kvcheck.commands.main import run
from kvcheck.core.base.record import read_record
from kvcheck.core.stress.campaign.ledger import LEDGER

ROOT = Path(__file__).parents[2]
WORDS = ["campaign", "retract-resume", "--shape", "llama-3-micro", "--requests", "3", "--seeds", "12", "--no-reports"]


def workers_of(pid: int) -> list[int]:
    """Processes of Ray below this one that run a batch."""
    found = []
    for child in children_of(pid):
        title = Path(f"/proc/{child}/cmdline")
        found += [child] if title.exists() and title.read_bytes().startswith(b"ray::run_in_task") else []
        found += workers_of(child)
    return found


@pytest.mark.ray
@pytest.mark.schedules
@pytest.mark.processes(starts=True)
def test_a_killed_worker_loses_nothing_and_the_record_is_that_of_a_run_without_ray(tmp_path: Path) -> None:
    words = [*WORDS, "--workloads", "1", "--jobs", "2"]
    command = [sys.executable, "-P", "-m", "kvcheck", *words, "--ray", "local", "--out", str(tmp_path / "ray")]
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as driver:
        assert poll(lambda: any(path.stat().st_size for path in (tmp_path / "ray").glob(f"*/{LEDGER}")), 300)
        assert poll(lambda: bool(workers_of(driver.pid)), 60)
        os.kill(workers_of(driver.pid)[0], signal.SIGKILL)
        said, complained = driver.communicate(timeout=500)
    assert driver.returncode == 0, complained
    assert said.splitlines()[0].startswith("kvcheck ") and said.splitlines()[-1] == " exit 0"
    assert "raylet" not in said, "what Ray says goes to stderr"
    assert run([*words[:-1], "1", "--out", str(tmp_path / "plain")]) == 0
    ray, plain = (read_record(next((tmp_path / name).iterdir())) for name in ("ray", "plain"))
    assert ray.evidence == plain.evidence and ray.verdict == plain.verdict and ray.plan == plain.plan


def test_without_ray_it_is_unknown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if importlib.util.find_spec("ray") is not None:
        monkeypatch.setitem(sys.modules, "ray", None)
    assert run([*WORDS, "--ray", "local", "--out", str(tmp_path)]) == 4
    printed = capsys.readouterr()
    assert "--ray needs Ray, which cannot be imported" in printed.err and "pip install 'kvcheck[ray]'" in printed.err
    assert printed.out == "" and not [*tmp_path.iterdir()]
