"""Environments with releases of engines: versions from a wheel's own words, what cannot be imported, what a base has.

Invariants:
- Nothing is downloaded; interpreters that only say what they were asked stand in where an environment is made.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from engines import pins
from fakes.engine import environment, interpreter

from kvcheck.core.probes.frame.guard import CannotDrive
from kvcheck.core.probes.frame.names import Names
from kvcheck.core.probes.frame.stubs import Stubs

ENGINES = Path(__file__).parents[1] / "engines"
METADATA = """Metadata-Version: 2.4
Name: sglang
Version: 0.5.13.post1
Requires-Dist: transformers==5.8.1
Requires-Dist: Apache.TVM_ffi<0.2,>=0.1.5
Requires-Dist: xgrammar==0.2.1; platform_machine != "nowhere"
Requires-Dist: llguidance==1.0; platform_machine == "nowhere"
Requires-Dist: openai==1.0; extra == "test"

Requires-Dist: cbor2==9 is text, as it stands behind the headers.
"""
BASE = """case "$*" in
*purelib*) echo "$0-site" ;;
*install*) echo "$@" >>"$(dirname "$0")/../installs" ;;
esac"""


def test_versions_are_those_that_the_wheel_asks_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wheel = tmp_path / "sglang-0.5.13.post1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as packed:
        packed.writestr("sglang/vendored/other.dist-info/METADATA", "Requires-Dist: transformers==1\n")
        packed.writestr("sglang-0.5.13.post1.dist-info/METADATA", METADATA)
    pins.main([str(wheel), "transformers", "apache-tvm-ffi", "xgrammar", "llguidance", "openai", "cbor2"])
    assert capsys.readouterr().out.splitlines() == [
        "transformers==5.8.1",
        "apache-tvm-ffi<0.2,>=0.1.5",
        "xgrammar==0.2.1",
        "llguidance",
        "openai",
        "cbor2",
    ]


def test_what_cannot_be_imported_is_not_called_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "release"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "lacking.py").write_text("import what_nobody_has\n")
    (package / "broken.py").write_text("raise ValueError('Invalid version: N/A')\n")
    (package / "confused.py").write_text("import os\nos.nope\n")
    monkeypatch.syspath_prepend(tmp_path)
    names = Names(
        {
            "lacking": ("release.gone:x", "release.lacking:x"),
            "broken": ("release.broken:x", "release.gone:x"),
            "confused": ("release.confused:x",),
            "renamed": ("release:x", "release.gone.deeper:x", "json.decoder.deeper:x"),
        }
    )
    with pytest.raises(CannotDrive) as caught:
        names.require(("renamed", "broken", "lacking", "confused"))
    assert str(caught.value).split("; ") == [
        "broken cannot be imported: release.broken:x: ValueError: Invalid version: N/A",
        "lacking cannot be imported: release.lacking:x: ModuleNotFoundError: No module named 'what_nobody_has'",
        "confused cannot be imported: release.confused:x: AttributeError: module 'os' has no attribute 'nope'",
        "this release has no renamed (tried release:x: release has no x",
        "release.gone.deeper:x: ModuleNotFoundError: No module named 'release.gone'",
        "json.decoder.deeper:x: ModuleNotFoundError: No module named 'json.decoder.deeper'",
        "'json.decoder' is not a package)",
    ]
    with pytest.raises(CannotDrive, match="broken cannot be imported"):
        names["broken"]


def test_stand_in_has_a_version_that_can_be_compared() -> None:
    stubs = Stubs("release", ("what_nobody_has",))
    made = stubs.create_module(__import__("importlib.machinery").machinery.ModuleSpec("what_nobody_has", stubs))
    assert made.__version__ == "0"


@pytest.mark.processes
def test_environment_is_refused_where_a_main_module_breaks(tmp_path: Path) -> None:
    def told(fault: str) -> tuple[int, str]:
        env = environment(tmp_path / f"env{fault}", fault)
        command = [env / "bin" / "python", "-I", ENGINES / "imports.py", "sglang"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.returncode, done.stderr

    assert told("") == (0, "")
    status, said = told("import-breaks")
    assert status == 1
    (line,) = said.splitlines()
    assert line.startswith("make_env: sglang unknown: cannot be imported: InvalidVersion: 'N/A': request,")


@pytest.mark.processes
@pytest.mark.parametrize(
    ("had", "status", "installed"),
    [
        ("torch==2.13.0\nnumpy\ntriton\nmsgspec\npyyaml\n", 0, ["orjson", "pyzmq"]),  # made for another engine
        (None, 0, ["torch==2.13.0", "numpy", "triton", "orjson"]),  # nobody knows what it has
        ("torch==2.9.0\n", 1, []),
    ],
)
def test_base_is_given_what_the_engine_needs(
    tmp_path: Path, had: str | None, status: int, installed: list[str]
) -> None:
    base = interpreter(tmp_path / "base", BASE, greeting="")
    if had is not None:
        (base / "requirements.txt").write_text(had)
    python = interpreter(tmp_path / "python", "exit 9", greeting="")  # nothing more than the base is made
    command = [ENGINES / "make_env.sh", "sglang", "0.5.9", tmp_path / "env", base]
    environ = {**os.environ, "PYTHON": str(python / "bin" / "python"), "TORCH": "torch==2.13.0"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == (9 if status == 0 else 1)
    if status:
        assert "was made with torch==2.9.0; expected torch==2.13.0; name another BASE" in done.stderr
        return
    asked = (base / "installs").read_text().splitlines()[0].split()
    assert [name for name in installed if name not in asked] == []
    assert ("msgspec" in asked) is (had is None) and "msgspec" in (base / "requirements.txt").read_text().split()
    again = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert again.returncode == 9 and len((base / "installs").read_text().splitlines()) == 2, sys.executable
