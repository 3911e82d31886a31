"""`kvcheck model`: a folder is made, an answer is printed, and wrong input is one line and exit code 2."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from rigs.known_answers import walk

from kvcheck.commands.main import run
from kvcheck.core.model.alphabet import Alphabet
from kvcheck.core.model.answers import answers
from kvcheck.core.model.folder import read_model

TINY = ["--layers", "2", "--kv-heads", "2", "--nodes", "64", "--length", "256", "--distance", "20"]


def test_a_model_is_made_and_its_answer_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, prompt = tmp_path / "ü b", tmp_path / "ids.json"
    assert run(["model", "make", str(folder), *TINY]) == 0
    parameters = read_model(folder).parameters
    assert parameters.distance == 20
    told = capsys.readouterr().out
    quoted = shlex.quote(str(folder))
    assert read_model(folder).digest in told and told.count(f" --known-answers {quoted} --admin\n") == 2
    assert f"vllm serve {quoted} --port 8000 --max-model-len 256 " in told
    assert f"sglang.launch_server --model-path {quoted} --port 30000 --context-length 256 " in told
    request = walk(parameters, count=9)
    prompt.write_text(json.dumps(request))
    assert run(["model", "answer", str(folder), "--prompt", str(prompt), "--tokens", "5"]) == 0
    assert json.loads(capsys.readouterr().out) == list(answers(Alphabet(parameters), request, 5))


def test_the_lines_that_start_servers_are_those_of_the_manual(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["model", "make", "known-answers", "--layers", "2", "--kv-heads", "2"]) == 0
    lines = [line[8:] for line in capsys.readouterr().out.splitlines() if " known-answers --port " in line]
    manual = (Path(__file__).parents[2] / "docs" / "live.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 2 and set(lines) <= set(manual)


def test_defaults_leave_room_for_prompts_of_the_whole_length(tmp_path: Path) -> None:
    assert run(["model", "make", str(tmp_path / "m"), "--layers", "2", "--length", "6000", "--head-dim", "128"]) == 0
    parameters = read_model(tmp_path / "m").parameters
    assert (parameters.nodes, parameters.distance) == (6000, 256)


@pytest.mark.parametrize(("options", "window"), [([], 64), (["--window", "40"], 40), (["--length", "1024"], 128)])
def test_an_architecture_with_windows_has_one_of_a_quarter_of_the_length(
    options: list[str], window: int, tmp_path: Path
) -> None:
    assert run(["model", "make", str(tmp_path / "m"), *TINY, "--arch", "gpt-oss", *options]) == 0
    assert read_model(tmp_path / "m").parameters.window == window
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    assert (config["sliding_window"], config["layer_types"]) == (window, ["sliding_attention", "full_attention"])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot read"),
        ("[1,", "not JSON"),
        ("{}", "expected a JSON list of token ids"),
        ("[1, true]", "expected a JSON list of token ids"),
        ("[1, 3, 30]", "last token of a request"),
    ],
)
def test_a_prompt_that_is_none_is_one_line(
    text: str | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["model", "make", str(tmp_path / "m"), *TINY]) == 0
    if text is not None:
        (tmp_path / "ids.json").write_text(text)
    assert run(["model", "answer", str(tmp_path / "m"), "--prompt", str(tmp_path / "ids.json")]) == 2
    assert said in capsys.readouterr().err


def test_without_a_subcommand_help_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["model"]) == 2
    assert "make" in capsys.readouterr().out
    assert run(["model", "mkae"]) == 2
