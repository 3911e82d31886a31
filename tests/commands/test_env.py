"""`kvcheck env`: its steps over wheels of this test, checkouts, refusals, interruptions, and what a record says.

Invariants:
- Nothing is downloaded: pip finds the wheels of a folder alone, and the base holds this interpreter's packages.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sysconfig
import venv
import zipfile
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fakes.engine import environment, interpreter
from rigs.schemas import check_fits

from kvcheck.commands import env as making
from kvcheck.commands import terminal
from kvcheck.commands.env import BASE, HAS, MARKER, NEEDS, TORCH, described, versions
from kvcheck.commands.main import run
from kvcheck.core.base.errors import UsageError
from kvcheck.core.base.identity import commit_of
from kvcheck.core.base.record import read_record
from kvcheck.core.probes.frame.guard import CannotDrive, Fault, attempt
from kvcheck.core.probes.frame.names import Names
from kvcheck.core.probes.import_check import compiled_errors
from kvcheck.core.probes.installed import ENGINES
from kvcheck.core.report.gate.contradictions import build_problems

ROOT = Path(__file__).parents[2]
FAKES = ROOT / "tests" / "fakes"
GIT = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
STAND_IN_BASE = """case "$*" in
*install*) echo "$@" >>"$(dirname "$0")/../installs" ;;
esac"""


def wheel(folder: Path, name: str, version: str, files: dict[str, str] | None = None, asks: str = "") -> Path:
    """A wheel with these files, and a package of its own name without any."""
    stem = name.replace("-", "_")
    info = f"{stem}-{version}.dist-info"
    content = {
        **({f"{stem}.py": ""} if files is None else files),
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{asks}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    content[f"{info}/RECORD"] = "".join(f"{each},,\n" for each in [*content, f"{info}/RECORD"])
    path = folder / f"{stem}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as packed:
        for each, text in content.items():
            packed.writestr(each, text)
    return path


def release(folder: Path, fault: str = "") -> dict[str, str]:
    """The files of the stand-in for SGLang, with its fault beside it."""
    top = FAKES / "sglang"
    files = {path.relative_to(top).as_posix(): path.read_text() for path in sorted(top.rglob("*.py"))}
    return {**files, "sglang_fault.py": '"""Beside this file is the fault."""\n', "fault": fault}


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels that pip finds, and no other index."""
    folder = tmp_path / "shelf"
    folder.mkdir()
    for name, version in (("transformers", "5.8.1"), ("xgrammar", "0.2.1"), ("apache-tvm-ffi", "0.1.7")):
        wheel(folder, name, version)
        wheel(folder, name, "99")
    monkeypatch.setattr(terminal, "HEARTBEAT_S", 1e9)  # on a busy machine pip is slow
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return folder


def full_base(folder: Path) -> Path:
    """A base that lacks nothing: an environment that finds this interpreter's packages."""
    venv.EnvBuilder(with_pip=False, symlinks=True).create(folder)
    (site,) = folder.glob("lib/python*/site-packages")
    paths = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (site / "here.pth").write_text("\n".join(sorted(paths)) + "\n")
    (folder / HAS).write_text("\n".join((TORCH, *BASE, *(n for needs in NEEDS.values() for n in needs.light))) + "\n")
    # The environment reads the base's folder alone, where a .pth file of the base is not read.
    for path in sorted(paths):
        for each in Path(path).glob("*") if Path(path).is_dir() else ():
            target = site / each.name
            if not target.exists() and not each.name.startswith(("pip", "setuptools", "kvcheck", "__editable__")):
                target.symlink_to(each)
    return folder


def checkout(folder: Path, fault: str = "", version: str | None = "0.6.0.dev1") -> Path:
    """A git checkout of the stand-in for SGLang, laid out as upstream."""
    top = folder / "python"
    for name, text in release(folder, fault).items():
        path = top / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    told = "" if version is None else f'version = "{version}"\n'
    (top / "pyproject.toml").write_text(f'[project]\nname = "sglang"\n{told}dependencies = ["transformers==5.8.1"]\n')
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
        subprocess.run([*GIT, *command], cwd=folder, check=True)
    return folder


def test_every_engine_has_its_needs() -> None:
    assert set(NEEDS) == set(ENGINES.names())


def test_constraints_are_what_the_release_requires_of_these_packages() -> None:
    asks = [
        "transformers==5.8.1",
        "Apache.TVM_ffi<0.2,>=0.1.5",
        "openai[realtime]==1.0; extra == 'test'",
        "numba==0.61; python_version < '3.12'",
        "numba==0.65; python_version >= '3.12'",
        "-r other.txt",
        "blake3 >= 1 # why",
        "torch==2.9.1",
    ]
    assert versions(asks, ("transformers", "apache-tvm-ffi", "openai", "numba", "blake3", "cbor2", "x==3")) == [
        "transformers==5.8.1",
        "Apache.TVM_ffi<0.2,>=0.1.5",
        'openai==1.0; extra == "test"',
        'numba==0.61; python_version < "3.12"',
        'numba==0.65; python_version >= "3.12"',
        "blake3>=1",
    ]


def test_version_and_requirements_of_a_checkout(tmp_path: Path) -> None:
    package = tmp_path / "vllm"
    package.mkdir()
    (package / "__init__.py").write_text("")
    assert described(package) == ("0+source", [])
    (package / "version.py").write_text('__version__ = "0.34.0.dev7"\n')
    (tmp_path / "requirements").mkdir()
    (tmp_path / "requirements" / "common.txt").write_text("-r other.txt\ntransformers >= 5.5 # why\n")
    assert described(package) == ("0.34.0.dev7", ["-r other.txt", "transformers >= 5.5 # why"])
    (tmp_path / "pyproject.toml").write_text("[project")
    with pytest.raises(UsageError, match="expected the checkout's own project file"):
        described(package)


@pytest.mark.processes
def test_a_release_is_made_and_runs_and_is_not_made_twice(
    tmp_path: Path, shelf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asks = "Requires-Dist: transformers==5.8.1\nRequires-Dist: xgrammar==0.2.1\n"
    wheel(shelf, "sglang", "0.7.0", release(tmp_path), asks)
    base, folder = full_base(tmp_path / "base"), tmp_path / "env"
    asked = ["env", "sglang==0.7.0", str(folder), "--base", str(base)]
    (folder / "half").mkdir(parents=True)  # as an interruption leaves it
    order = {"engine": "sglang", "version": "0.7.0", "source": None, "also": []}
    (folder / MARKER).write_text(json.dumps({"order": order, "made": False}))
    assert run(asked) == 0, capsys.readouterr().err
    said = capsys.readouterr().out
    assert f"sglang 0.7.0; next: kvcheck probe sglang:{folder}" in said.splitlines()[-1]
    assert "was not finished: it is made anew" in said and not (folder / "half").exists()
    (site,) = folder.glob("lib/python*/site-packages")
    assert {"transformers-5.8.1.dist-info", "xgrammar-0.2.1.dist-info"} <= {each.name for each in site.iterdir()}
    assert run(asked) == 0 and "made before" in capsys.readouterr().out
    assert run(["env", "sglang==0.7.1", str(folder), "--base", str(base)]) == 2
    assert "name another folder" in capsys.readouterr().err

    wheel(shelf, "sglang", "0.7.2", release(tmp_path, "import-breaks"), asks)
    broken = ["env", "sglang==0.7.2", str(tmp_path / "broken"), "--base", str(base)]
    assert run(broken) == 4
    told = capsys.readouterr().err
    assert "is not made: sglang 0.7.2: cannot be imported: InvalidVersion: 'N/A'" in told and told.count("\n") == 1
    assert '"made": false' in (tmp_path / "broken" / MARKER).read_text()


@pytest.mark.processes
@pytest.mark.parametrize("from_checkout", [False, True])
def test_for_a_gpu_all_that_the_release_asks_for_is_installed_and_a_machine_without_one_is_4(
    tmp_path: Path,
    shelf: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    from_checkout: bool,
) -> None:
    monkeypatch.setattr(making, "no_device", lambda: None)  # a driver tells of one that torch does not see
    wheel(shelf, "torch", "2.0", {"here.pth": sysconfig.get_path("purelib") + "\n"})
    wheel(shelf, "sglang-kernel", "0.4.10")
    asks = ("transformers==5.8.1", "torch==2.0", "sglang-kernel==0.4.10")
    folder, order = tmp_path / "env", ["env", "sglang==0.7.0", str(tmp_path / "env"), "--device", "cuda"]
    if from_checkout:
        project = checkout(tmp_path / "fork") / "python" / "pyproject.toml"
        project.write_text(project.read_text().replace('["transformers==5.8.1"]', json.dumps(asks)))
        order += ["--source", str(tmp_path / "fork")]
    else:
        wheel(shelf, "sglang", "0.7.0", release(tmp_path), "".join(f"Requires-Dist: {each}\n" for each in asks))
    assert run(order) == 4
    told = capsys.readouterr()
    assert "is not made: torch " in told.err and "sees no CUDA device, asked for cuda" in told.err
    assert told.err.count("\n") == 1
    (site,) = folder.glob("lib/python*/site-packages")
    have = {each.name for each in site.iterdir()}
    assert {"sglang_kernel-0.4.10.dist-info", "transformers-5.8.1.dist-info", "sglang-0.7.0.dist-info"} <= have
    assert ("__editable__.sglang.pth" in have) is from_checkout and not (tmp_path / "env-base").exists()
    marker = json.loads((folder / MARKER).read_text())
    assert (marker["made"], marker["order"]["device"]) == (False, "cuda")


@pytest.mark.parametrize(
    ("returns", "devices", "told"),
    [
        ((0, 0), 1, None),
        ((0, 0), 0, "tells of no GPU"),
        ((100, 0), 1, "libcuda.so.1 returned 100"),
        ((0, 3), 1, "libcuda.so.1 returned 3"),
        (None, 0, "no driver of a GPU: gone"),
    ],
)
def test_a_gpu_is_looked_for_before_gigabytes_are_fetched(
    returns: tuple[int, int] | None,
    devices: int,
    told: str | None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def opened(name: str) -> SimpleNamespace:
        if name != "libcuda.so.1" or returns is None:
            raise OSError("gone")

        def count(found: Any) -> int:
            found._obj.value = devices
            return returns[1]

        return SimpleNamespace(cuInit=lambda flags: returns[0], cuDeviceGetCount=count)

    why = making.no_device(opened)
    assert why is None if told is None else why is not None and told in why
    if why is not None:
        monkeypatch.setattr(making, "no_device", lambda: why)
        assert run(["env", "sglang==0.7.0", str(tmp_path / "env"), "--device", "cuda"]) == 4
        said = capsys.readouterr().err
        assert f"{why}; nothing was installed; next: " in said and said.count("\n") == 1
        assert not (tmp_path / "env").exists()


def needs_more(device: str) -> None:
    raise CannotDrive(f"nothing runs on {device}")


def test_compiled_code_that_does_not_run_on_the_device_is_an_error() -> None:
    spec = ENGINES.load("sglang")
    assert compiled_errors(replace(spec, compiled=""), "cuda") == []
    assert compiled_errors(replace(spec, compiled="builtins:str"), "cuda") == []
    assert compiled_errors(replace(spec, compiled=f"{__name__}:needs_more"), "cuda:1") == ["nothing runs on cuda:1"]
    (told,) = compiled_errors(spec, "cuda")
    assert told.startswith("sgl_kernel.kvcacheio cannot be imported: ModuleNotFoundError")


@pytest.mark.processes
def test_a_transfer_engine_needs_no_base(tmp_path: Path, shelf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in NEEDS["mooncake"].full:
        wheel(shelf, name, "1.0")
    files = {f"mooncake/{path.name}": path.read_text() for path in (FAKES / "_mooncake" / "mooncake").glob("*.py")}
    wheel(shelf, "mooncake-transfer-engine-non-cuda", "0.9.0", files)
    folder = tmp_path / "env"
    asked = ["env", "mooncake==0.9.0", str(folder)]
    for is_made in (False, True):
        assert run([*asked, "--format", "json"]) == 0, capsys.readouterr().err
        printed = capsys.readouterr()
        made = json.loads(printed.out)
        check_fits(made, "commands", "env")
        assert (made["made_before"], made["version"], made["folder"]) == (is_made, "0.9.0", str(folder))
        assert "base with torch" not in printed.err and (f"environment in {folder}" in printed.err) is not is_made
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("env")] == ["env"]
    (info,) = folder.glob("lib/python*/site-packages/mooncake_transfer_engine_*.dist-info")
    shutil.rmtree(info)
    assert run(asked) == 2
    told = capsys.readouterr().err
    assert "remove the folder" in told and told.count("\n") == 1

    files["mooncake/engine.py"] = "raise ImportError('libibverbs.so.1: cannot open shared object file')\n"
    wheel(shelf, "mooncake-transfer-engine-non-cuda", "0.9.1", files)
    assert run(["env", "mooncake==0.9.1", str(tmp_path / "broken")]) == 4
    told = capsys.readouterr().err
    assert "libibverbs.so.1" in told and told.count("\n") == 1


@pytest.mark.processes
def test_a_checkout_is_linked_judged_and_named_with_its_commit(
    tmp_path: Path, shelf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, folder = checkout(tmp_path / "sglang"), tmp_path / "env"
    base = str(full_base(tmp_path / "base"))
    assert run(["env", "--source", str(source), str(folder), "--base", base]) == 0
    assert "sglang 0.6.0.dev1" in capsys.readouterr().out.splitlines()[-1]
    (site,) = folder.glob("lib/python*/site-packages")
    (told,) = site.glob("sglang-*.dist-info/direct_url.json")
    assert json.loads(told.read_text()) == {"url": source.as_uri(), "dir_info": {"editable": True}}

    def stress(expected: int) -> dict[str, object]:
        runs = ["--out", str(tmp_path / "runs"), "--no-reports", "--seed", "1", "--schedules", "12"]
        assert run(["probe", f"sglang:{folder}", "--probe", "pool-copy.nsa", *runs]) == expected
        newest = max((tmp_path / "runs").iterdir(), key=lambda path: (path / "run.json").stat().st_mtime_ns)
        record = read_record(newest)
        assert not [text for _, text in build_problems([record], "") if "does not say" in text]
        engine = record.environment["engine"]
        assert isinstance(engine, dict)
        return engine

    commit = commit_of(source)
    engine = stress(0)
    assert (engine["version"], engine["commit"]) == ("0.6.0.dev1", commit)
    (source / "python" / "fault").write_text("index-lost")
    init = source / "python" / "sglang" / "__init__.py"
    init.write_text(init.read_text() + "\n# an edit\n")
    assert stress(1)["commit"] == f"{commit} and changes"
    (source / "python" / "fault").write_text("")
    shutil.rmtree(source / ".git")
    assert stress(0)["commit"] is None


def test_a_checkout_as_target_gets_a_hint_that_works(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "sglang"
    (source / "python" / "sglang").mkdir(parents=True)
    (source / "python" / "sglang" / "__init__.py").write_text("")
    assert run(["probe", f"sglang:{source}", "--out", str(tmp_path / "runs")]) == 2
    told = capsys.readouterr().err
    assert f"kvcheck env --source {source} VENV, then kvcheck probe sglang:VENV" in told
    assert told.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["sglang", "new"], "expected ENGINE==VERSION, such as sglang==0.5.23, or --source CHECKOUT"),
        (["sglang==1"], "expected ENGINE==VERSION DIR"),
        (["sglang==1", "new", "other"], "expected ENGINE==VERSION DIR"),
        (["new", "--source", "full"], "expected a checkout of one engine, found none; name one of sglang, vllm"),
        (["sglang==", "new"], "expected ENGINE==VERSION"),
        (["sglang==1; rm -rf x", "new"], "expected ENGINE==VERSION"),
        (["sglang==--index-url", "new"], "expected ENGINE==VERSION"),
        (["sglnag==1", "new"], "sglang"),
        (["sglang==1", "full"], "it holds files that kvcheck env did not make"),
        (["sglang==1", "new", "--base", "full/file/base"], "Not a directory; expected a folder that can be written"),
        (["sglang==1", "full/file"], "expected a new folder, got a file"),
        (["sglang==1", "new", "--base", "new"], "expected another folder than the environment itself"),
        (["sglang==1", "new", "--base", "full"], "expected a new folder or a base"),
        (["sglang==1", "new", "--python", "no-such-python"], "expected an interpreter, found none"),
        (["sglang==1", "new", "--also", "x @ http://a/b"], "expected the name of a package"),
        (["sglang==1", "new", "--torch", "-r x"], "expected the name of a package"),
        (["sglang==1", "new", "--device", "rocm"], "--device rocm: expected cpu or cuda"),
        (["vllm==1", "new", "--device", "cuda"], "no probe of vllm runs on a GPU; leave --device out"),
        (["sglang==1", "new", "--device", "cuda", "--base", "b"], "expected no --base and no --torch"),
        (["sglang==1", "new", "--device", "cuda", "--torch", "torch"], "expected no --base and no --torch"),
        (["sglang", "new", "--source", "full"], "expected a checkout with one of python/sglang"),
    ],
)
def test_bad_input_is_one_line_and_leaves_everything_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    assert run(["env", *arguments]) == 2
    told = capsys.readouterr().err
    assert said in told and told.count("\n") == 1
    assert [path.name for path in tmp_path.rglob("*")] == ["full", "file"]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("had", "installed"),
    [
        (f"{TORCH}\nnumpy\ntriton\nmsgspec\npyyaml\n", ["orjson", "pyzmq"]),  # made for another engine
        ("", [TORCH, "numpy", "triton", "orjson", "msgspec"]),  # begun, and nothing installed yet
    ],
)
def test_a_base_is_given_what_the_engine_needs_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], had: str, installed: list[str]
) -> None:
    base = interpreter(tmp_path / "base", STAND_IN_BASE, greeting="")
    (base / HAS).write_text(had)
    python = interpreter(tmp_path / "python", "exit 9", greeting="")  # nothing more than the base is made
    command = ["env", "sglang==0.5.9", str(tmp_path / "env"), "--base", str(base)]
    command += ["--python", str(python / "bin" / "python")]
    assert run(command) == 4
    assert f"venv {tmp_path / 'env'} ended with status 9" in capsys.readouterr().err
    asked = (base / "installs").read_text().splitlines()[0].split()
    assert [name for name in installed if name not in asked] == []
    assert ("msgspec" in asked) is (not had) and "msgspec" in (base / HAS).read_text().split()
    assert run(command) == 4 and len((base / "installs").read_text().splitlines()) == 2


def test_a_base_with_another_torch_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / HAS).write_text("torch==2.9.0\n")
    assert run(["env", "sglang==0.5.9", str(tmp_path / "env"), "--base", str(tmp_path / "base")]) == 2
    assert f"made with torch==2.9.0; expected {TORCH}; name another base" in capsys.readouterr().err


@pytest.mark.processes
def test_pip_that_finds_nothing_is_exit_4_below_its_own_lines(
    tmp_path: Path, shelf: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    base = full_base(tmp_path / "base")
    assert run(["env", "sglang==0.0.404", str(tmp_path / "env"), "--base", str(base)]) == 4
    *pips, ours = capfd.readouterr().err.splitlines()
    assert "kvcheck: pip install ended with status 1, see above; next: " in ours
    assert any(line.startswith("ERROR: ") and "sglang==0.0.404" in line for line in pips)


@pytest.mark.processes
def test_imports_are_checked_under_the_engines_interpreter(tmp_path: Path) -> None:
    def told(fault: str) -> str:
        env = environment(tmp_path / f"env{fault}", fault)
        code = f"import sys; sys.path.append({str(ROOT)!r}); from kvcheck.core.probes.import_check import main"
        command = [env / "bin/python", "-I", "-c", f"{code}; main('sglang')"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    assert told("") == ""
    (line,) = told("import-breaks").splitlines()
    assert line.startswith("sglang unknown: cannot be imported: InvalidVersion: 'N/A' (raised in sglang.")
    assert " request," in line and line.endswith(" more"), "the first capabilities by name, of dozens"


def test_an_error_is_told_by_its_first_line_with_words_and_by_the_module_that_raised_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "needs_more.py").write_text("raise ImportError('\\nneeds the library Vision.\\nInstall it.')\n")
    (tmp_path / "an_engine.py").write_text("import needs_more\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = Names({"pool": ("an_engine:Pool",)}).find("pool")
    assert found.error == "ImportError: needs the library Vision. (raised in needs_more)"
    silent = attempt(lambda: exec("raise ValueError"))
    assert isinstance(silent, Fault) and silent.text == "ValueError"


@pytest.mark.processes
def test_versions_are_chosen_that_go_together_and_with_the_torch_of_the_base(
    tmp_path: Path, shelf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The newest xgrammar wants another ffi than the release pins, and the newest vision another torch."""
    wheel(shelf, "xgrammar", "99.1", asks="Requires-Dist: apache-tvm-ffi==99\n")
    ours = metadata.version("torch").partition("+")[0]
    for torch in (ours, "99"):
        wheel(shelf, "vision", torch, asks=f"Requires-Dist: torch=={torch}\n")
    wheel(shelf, "torch", "99")
    asks = "Requires-Dist: xgrammar>=0.2\nRequires-Dist: apache-tvm-ffi==0.1.7\n"
    wheel(shelf, "sglang", "0.7.0", release(tmp_path), asks)
    folder, base = tmp_path / "env", full_base(tmp_path / "base")
    (info,) = base.glob("lib/python*/site-packages/torch-*.dist-info")
    info.unlink()  # what the real one asks for need not be there
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {ours}+cpu\n")
    asked = ["env", "sglang==0.7.0", str(folder), "--base", str(base), "--also", "vision"]
    assert run(asked) == 0, capsys.readouterr().err
    (site,) = folder.glob("lib/python*/site-packages")
    made = {each.name.removesuffix(".dist-info") for each in site.glob("*.dist-info")}
    assert {"xgrammar-99", "apache_tvm_ffi-0.1.7", f"vision-{ours}"} <= made
    assert not any(name.startswith("torch-") for name in made)
