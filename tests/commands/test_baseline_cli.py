"""`kvcheck baseline` and `kvcheck gate --baseline` from outside: exit codes, files, refusals in one line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from report.test_baseline import run as made
from rigs.gate import of_this_build, vllm_run
from rigs.literal_record import FOREIGN

from kvcheck.commands.main import run
from kvcheck.core.base.record import RunRecord
from kvcheck.core.report.gate.baseline_file import read_baseline
from kvcheck.core.run.store import RunStore

ROOT = Path(__file__).parents[2]
WHOSE = ("--owner", "me", "--reason", "issue 7", "--expires", "2999-01-01")


def stored(folder: Path, record: RunRecord) -> str:
    """The folder of a run that this kvcheck seems to have made."""
    return str(RunStore(folder / "runs").save(of_this_build(record)).parent)


def test_the_baseline_of_the_tree_knows_what_the_newest_vllm_has(tmp_path: Path) -> None:
    file = "engines"
    known = str(RunStore(tmp_path).save(vllm_run()))
    assert run(["gate", known]) == 1
    assert run(["gate", known, "--baseline", file, "--strict-baseline"]) == 0
    other = str(RunStore(tmp_path).save(vllm_run("KV104")))
    assert run(["gate", other, "--baseline", file]) == 1


def test_save_gate_accept_and_prune(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(tmp_path / "known.toml")
    old = stored(tmp_path, made(FOREIGN, unknown=True))
    assert run(["gate", old]) == 1
    assert run(["baseline", "save", old, file, *WHOSE]) == 0
    assert run(["gate", old, "--baseline", file]) == 0
    Path(file).write_text("# kept\n\n" + Path(file).read_text())
    several = tmp_path / "several.toml"
    several.write_text(Path(file).read_text().replace('place = "', 'place = ["other", "').replace('scale"', 'scale"]'))
    assert run(["baseline", "accept", f"{old}#1", str(several), *WHOSE]) == 2  # one of its places

    newer = replace(made(FOREIGN, replace(FOREIGN, buffer="latent"), unknown=True), run_id="20260102-030499-0001")
    newer = replace(
        newer, findings=tuple(replace(f, id=f"{newer.run_id}.{n}") for n, f in enumerate(newer.findings, 1))
    )
    new = stored(tmp_path, newer)
    assert run(["gate", new, "--baseline", file]) == 1
    assert f"finding {newer.run_id}.2" in capsys.readouterr().out
    assert run(["baseline", "accept", f"{new}#2", file, *WHOSE]) == 0
    assert run(["gate", new, "--baseline", file]) == 0
    assert run(["baseline", "accept", new, f"{newer.run_id}.2", file, *WHOSE]) == 2
    assert "is about this already" in capsys.readouterr().err

    fixed = stored(tmp_path, replace(made(unknown=True), run_id="20260102-030499-0002"))
    assert run(["gate", fixed, "--baseline", file]) == 0
    assert run(["gate", fixed, "--baseline", file, "--strict-baseline"]) == 1
    assert "no such finding any more: remove this row" in capsys.readouterr().out
    assert run(["baseline", "prune", file, fixed]) == 0
    assert "2 rows removed, 1 left" in capsys.readouterr().out
    assert [entry.kind.value for entry in read_baseline(Path(file))] == ["unknown"]
    assert Path(file).read_text().startswith("# kept\n")
    assert run(["gate", fixed, "--baseline", file, "--strict-baseline"]) == 0


def test_a_file_with_a_byte_order_mark_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, folder = tmp_path / "known.toml", stored(tmp_path, made(FOREIGN))
    assert run(["baseline", "save", folder, str(file), *WHOSE]) == 0
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    assert run(["gate", folder, "--baseline", str(file)]) == 0
    assert "no new finding" in capsys.readouterr().out


def test_accept_takes_an_unknown_cell_by_its_name(tmp_path: Path) -> None:
    file = tmp_path / "known.toml"
    folder = stored(tmp_path, made(unknown=True))
    assert run(["gate", folder]) == 4
    assert run(["baseline", "accept", folder, "retract-resume/gpt-oss-tiny", str(file), *WHOSE]) == 0
    assert run(["gate", folder, "--baseline", str(file)]) == 0


def test_show_marks_what_has_expired(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "known.toml"
    assert run(["baseline", "save", stored(tmp_path, made(FOREIGN)), str(file), *WHOSE]) == 0
    file.write_text(file.read_text().replace("2999-01-01", "2020-01-01"))
    assert run(["baseline", "show", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "2020-01-01 EXPIRED  issue 7" in printed and "1 row, 1 expired" in printed
