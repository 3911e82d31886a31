"""Children of kvcheck: what they import, what they inherit, and which kvcheck they are."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest
from fakes.engine import GREET, environment, interpreter
from rigs.literal_record import PASSED

from kvcheck.commands.main import run
from kvcheck.core.base import child
from kvcheck.core.base.child import OWN, SECRET, StandardStreams, import_paths, inherited, start
from kvcheck.core.base.errors import InternalError, UnknownVerdict
from kvcheck.core.run.store import RunStore

ROOT = Path(__file__).parents[2]
SECRETS = dict.fromkeys(
    [
        *("HF_TOKEN", "VLLM_API_KEY", "SGLANG_API_KEY", "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "CUDA_PASSWORD"),
        *("https_proxy", "HTTP_PROXY", "GITHUB_ENV", "LMCACHE_REMOTE_URL", "PYTHONPATH", "BASH_ENV"),
    ],
    "redis://user:word@host",
)
SEEN = {"HOME": "/h", "LC_ALL": "C", "CUDA_VISIBLE_DEVICES": "0", "OMP_NUM_THREADS": "1", "MC_LOG_LEVEL": "INFO"}
SEEN_BY_ENGINES = {"HF_HOME": "/h", "SGLANG_CLIP_MAX_NEW_TOKENS": "1", "VLLM_USE_V1": "1", "LMCACHE_SIZE": "1"}


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A folder with another kvcheck and a module that is named like a standard one."""
    folder = tmp_path / "hostile"
    folder.mkdir()
    mark = folder / "foreign-code-ran"
    touch = f"open({str(mark)!r}, 'w').close()\n"
    (folder / "queue.py").write_text(touch + "raise SystemExit(3)\n")
    for package in ("kvcheck", "kvcheck/commands", "kvcheck/core", "kvcheck/core/stress"):
        (folder / package).mkdir()
        (folder / package / "__init__.py").write_text(touch + "__version__ = '0.0.0'\n")
    return folder


def kvcheck(folder: Path, *arguments: str, before: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    """The command, started in this folder as its console script is: the folder is not on its path."""
    program = "from kvcheck.commands.main import main; main()"
    command = [sys.executable, "-P", "-c", f"{before}{program}", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


PAIR = "pd-transfer --ranks 1x1 --shape llama-3-tiny --seed 4 --requests 6 --transport"
WORKERS = "retract-resume --shape glm-5.1-tiny --shape deepseek-v3.2-tiny --schedules 1 --requests 12 --seed 1 --jobs 2"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("command", "code", "told"),
    [
        pytest.param(f"stress {WORKERS} --mutant offload-skips-index-buffer", 1, "KV102", id="workers"),
        pytest.param(f"stress {PAIR} tcp", 0, "1 cell passed", id="ranks"),
        pytest.param(f"stress {PAIR} mooncake", 0, "1 cell passed", id="engines of ranks", marks=pytest.mark.mooncake),
        pytest.param(
            "probe sglang:ENV --probe pool-copy.mha --schedules 12 --seed 1", 0, "1 cell pass", id="an engine"
        ),
    ],
)
def test_children_are_the_kvcheck_that_was_started(
    command: str, code: int, told: str, hostile: Path, tmp_path: Path
) -> None:
    env = environment(tmp_path / "env", "")
    done = kvcheck(hostile, *command.replace("ENV", str(env)).split(), "--no-reports", "--out", "../runs")
    assert done.returncode == code and told in done.stdout and "KV902" not in done.stdout, done.stdout + done.stderr
    assert not (hostile / "foreign-code-ran").exists()


@pytest.mark.processes
def test_a_page_is_drawn_without_the_settings_of_the_current_folder(tmp_path: Path) -> None:
    plain, odd = tmp_path / "plain", tmp_path / "odd"
    record = RunStore(tmp_path / "runs").save(PASSED)
    plain.mkdir()
    odd.mkdir()
    (odd / "matplotlibrc").write_text("font.size: 40\naxes.linewidth: 9\nno.such.key: 1\n")
    pages = []
    for folder in (plain, odd):
        done = kvcheck(folder, "report", str(record), "-o", "html=page.html")
        assert done.returncode == 0 and not done.stderr, done.stderr
        pages.append((folder / "page.html").read_bytes())
    assert pages[0] == pages[1]


@pytest.mark.processes
def test_another_kvcheck_in_a_child_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "kvcheck"
    package.mkdir()
    (package / "__init__.py").write_text("__version__ = '9.9'\n")
    begun = child.spawn

    def spawn(*arguments: str, **keys: object) -> object:
        with monkeypatch.context() as patch:
            patch.setattr(child, "OWN", replace(OWN, package=str(package)))
            return begun(*arguments, **keys)  # type: ignore[arg-type]

    monkeypatch.setattr(child, "spawn", spawn)
    with pytest.raises(InternalError, match=rf"another kvcheck: expected {OWN.package} .* got {package} version 9.9"):
        start("kvcheck", "--version", streams=StandardStreams())


@pytest.mark.processes
def test_a_child_that_says_nothing_is_no_verdict(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    silent = interpreter(tmp_path / "silent", "exit 3", greeting="") / "bin" / "python"
    monkeypatch.setattr(sys, "executable", str(silent))
    with pytest.raises(UnknownVerdict, match="ended with status 3 before kvcheck was loaded"):
        start("kvcheck", streams=StandardStreams())
    monkeypatch.setattr(sys, "executable", str(tmp_path / "missing"))
    with pytest.raises(UnknownVerdict, match=r"the machine cannot start this process: .*No such file"):
        start("kvcheck", streams=StandardStreams())


@pytest.mark.processes
def test_an_engine_that_greets_as_another_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = GREET.replace('"$4"', '\'{"package": "/other", "version": "9", "python": "3"}\'')
    env = interpreter(tmp_path / "env", "sleep 60", greeting=other)
    assert run(["probe", f"sglang:{env}", "--out", str(tmp_path / "runs")]) == 70
    assert "got /other version 9 on Python 3" in capsys.readouterr().err


def test_children_inherit_what_is_stated_and_no_secret() -> None:
    everything = {**SECRETS, **SEEN, **SEEN_BY_ENGINES}
    assert inherited(everything) == SEEN
    assert inherited(everything, is_engine=True) == SEEN | SEEN_BY_ENGINES
    assert not any(SECRET.fullmatch(name) for name in ("TOKENIZERS_PARALLELISM", "MC_KEYBOARD", "VLLM_MAX_TOKENS"))


@pytest.mark.processes
def test_an_engine_does_not_see_the_callers_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    env = interpreter(tmp_path / "env", f"env > {tmp_path}/seen; exit 3")
    for name, value in (SECRETS | SEEN_BY_ENGINES).items():
        monkeypatch.setenv(name, value)
    assert run(["probe", f"sglang:{env}", "--out", str(tmp_path / "runs")]) == 4
    seen = {line.partition("=")[0] for line in (tmp_path / "seen").read_text().splitlines()}
    assert seen & {*SECRETS} == set() and seen >= {*SEEN_BY_ENGINES, "PATH"}


def test_paths_are_the_parents_without_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert import_paths(["", ".", "lib", str(tmp_path), "/usr/lib/python", f"{tmp_path}/lib"]) == [
        "/usr/lib/python",
        f"{tmp_path}/lib",
    ]


def test_the_page_about_children_names_what_they_inherit() -> None:
    page = (ROOT / "docs" / "children.md").read_text(encoding="utf-8")
    for name in (*SEEN, *SEEN_BY_ENGINES):
        prefix = name.split("_")[0]
        assert f"`{name}`" in page or f"`{prefix}_*`" in page, name


def shell(script: str, **streams: object) -> subprocess.Popen[str]:
    """A process that leads a group, with pipes."""
    keys = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, **streams}
    return subprocess.Popen(["sh", "-c", script], text=True, start_new_session=True, **keys)  # type: ignore[call-overload,no-any-return]


@pytest.mark.processes
def test_lines_of_a_child_end_with_none() -> None:
    heard: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    process = shell("read word; echo $word; printf half")
    child.listen(process, heard.put, 3)
    child.tell(process, "abcde")
    assert [heard.get(timeout=30) for _ in range(5)] == ["abc", "de\n", "hal", "f", None]
    child.kill_group(process)
    child.tell(process, "nobody hears it")
    child.close_input(process)


@pytest.mark.processes
def test_group_of_a_stopped_child_ends_with_it(tmp_path: Path) -> None:
    process = shell(f"sleep 60 & echo $! > {tmp_path}/pid; kill -STOP $$", stdout=subprocess.DEVNULL)
    while not (tmp_path / "pid").is_file() or not (tmp_path / "pid").read_text().strip():
        time.sleep(0.01)
    assert not child.has_ended(process, 0.05)
    assert child.kill_group(process) == -9 == child.kill_group(process)
    child.close_input(process)
    status = Path(f"/proc/{int((tmp_path / 'pid').read_text())}/stat")
    while status.exists() and status.read_text().rpartition(")")[2].split()[0] not in "ZX":
        time.sleep(0.01)


@pytest.mark.processes
def test_child_that_has_ended_keeps_its_status() -> None:
    process = shell("exit 3")
    assert child.has_ended(process, 30.0) and process.returncode is None
    assert child.kill_group(process) == 3
    for stream in (process.stdin, process.stdout):
        assert stream is not None
        stream.close()


@pytest.mark.processes
def test_children_are_asked_to_end_and_then_killed() -> None:
    polite = shell("sleep 60", stdin=subprocess.DEVNULL)
    deaf = shell("trap '' TERM; echo up; while :; do sleep 1; done", stdin=subprocess.DEVNULL)
    assert deaf.stdout is not None and polite.stdout is not None
    assert deaf.stdout.readline() == "up\n"
    child.end(polite, deaf, within_s=0.5)
    assert (polite.returncode, deaf.returncode) == (-15, -9)
    child.kill_group(deaf)
    deaf.stdout.close()
    polite.stdout.close()


def test_tail_is_the_end_of_what_was_written() -> None:
    with tempfile.TemporaryFile() as log:
        log.write(b"first\nlast line\n\0")
        log.flush()
        assert (child.tail(log.fileno(), 100), child.tail(log.fileno(), 6)) == ("first\nlast line", "line")
