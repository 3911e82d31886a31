"""docs/ci: each file is well formed, hides no verdict, and says by its own steps what a change brings."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from rigs import ci_readers
from rigs.ci_runner import CI, EXPRESSION, HIDDEN, ROOT, faults, run_steps, step_faults

from kvcheck.commands.main import command_named

yaml = pytest.importorskip("yaml", reason="PyYAML is a tool of development: pip install -e '.[dev]'")

WORKFLOWS = ("github-pull-request.yml", "github-nightly.yml", "github-gpu.yml")
CELL = "stress retract-resume --shape glm-5.1-tiny --seed 1 --schedules 3 --jobs 1"
ENGINE = ("Install the engine",)
BUG = "offload-skips-index-buffer"


def is_accepted(line: str) -> bool:
    """Whether kvcheck has such a command with such options. It is parsed and not run."""
    name, *words = line.split()
    given = command_named(name).make_context(name, words, obj=[name, *words]).params
    return given["words"][-1] == "envs/engine"


def read(name: str) -> tuple[str, dict[Any, Any]]:
    """Text and value of a file."""
    text = (CI / name).read_text(encoding="utf-8")
    return text, yaml.safe_load(text)


@pytest.mark.parametrize("name", WORKFLOWS)
def test_a_workflow_is_well_formed(name: str) -> None:
    assert faults(*read(name)) == []


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ((b"contents: read", b"contents: write"), "permissions"),
        ((b"@11bd71901bbe5b1630ceea73d27597364c9af683", b"@v4"), "not pinned"),
        ((b"-o github=-\n", b"-o github=- || true\n"), "a verdict is hidden"),
        ((b"          kvcheck gate ", b"          kvcheck report "), "a verdict is kept and not judged"),
        ((b"  pull_request:", b"  pull_request_target:"), "trigger"),
        ((b"kvcheck $ARGUMENTS", b"kvcheck ${{ github.head_ref }}"), "an expression in a script"),
        ((b"    runs-on:", b"    run-on:"), "unknown key 'run-on'"),
        ((b"-o github=-\n", b"-o github=-\n      - name: again\n        run: kvcheck gate x\n"), "one step"),
    ],
)
def test_a_fault_of_a_workflow_is_seen(change: tuple[bytes, bytes], fault: str) -> None:
    raw = (CI / WORKFLOWS[0]).read_bytes()
    assert raw.count(change[0]) == 1
    text = raw.replace(*change).decode()
    assert any(fault in each for each in faults(text, yaml.safe_load(text))), faults(text, yaml.safe_load(text))


def test_the_nightly_tries_every_engine_newest_and_pre() -> None:
    _, workflow = read("github-nightly.yml")
    assert workflow["jobs"]["engines"]["strategy"] == {
        "fail-fast": False,
        "matrix": {"engine": ["sglang", "vllm", "lmcache"], "release": ["newest", "pre"]},
    }


def test_the_action_takes_its_inputs_by_the_environment() -> None:
    text, action = read("action/action.yml")
    assert action["runs"]["using"] == "composite" and not HIDDEN.search(text)
    for step in action["runs"]["steps"]:
        assert step["shell"] == "bash" and [*step_faults(step)] == []
        named = {found for value in step["env"].values() for found in EXPRESSION.findall(value)}
        assert named <= {f"inputs.{name}" for name in action["inputs"]}
    assert all({"description", "required", "default"} == each.keys() for each in action["inputs"].values())


def test_the_job_of_gitlab_keeps_its_reports_where_they_are_written() -> None:
    text, jobs = read("gitlab-ci.yml")
    (job,) = jobs.values()
    assert not HIDDEN.search(text) and len(job["script"]) == 1 and job["artifacts"]["when"] == "always"
    out = job["variables"]["OUT"]
    reports = job["artifacts"]["reports"]
    assert reports == {"junit": f"{out}/gate.xml", "codequality": f"{out}/quality.json"}
    assert '-o junit="$OUT/gate.xml" -o gitlab="$OUT/quality.json"' in job["script"][0]


@pytest.mark.processes(starts=True)
@pytest.mark.parametrize("brings", [None, BUG])
def test_a_pull_request_that_brings_a_bug_back_is_red_and_named(brings: str | None, tmp_path: Path) -> None:
    _, workflow = read("github-pull-request.yml")
    arguments = CELL if brings is None else f"{CELL} --mutant {brings}"
    done = run_steps(workflow["jobs"]["kvcheck"]["steps"], tmp_path, env={**workflow["env"], "ARGUMENTS": arguments})
    installed = done.installed.splitlines()
    assert installed[1:] == ["install kvcheck", "env --source . envs/engine"]
    assert is_accepted(installed[-1])
    suite = ci_readers.junit((tmp_path / "build/kvcheck/junit.xml").read_text(encoding="utf-8"))
    found = ci_readers.github(done.output)
    if brings is None:
        assert (done.exit_code, done.failed) == (0, None), done.output
        assert suite.get("failures") == suite.get("errors") == "0"
        assert {level for level, _, _ in found} == {"notice"} and ": PASS, exit 0" in done.summary
        return
    assert (done.exit_code, done.failed) == (1, "kvcheck"), done.output
    (failure,) = suite.iter("failure")
    assert failure.get("type") == "KV304" and "index_k_with_scale" in str(failure.get("message"))
    assert any(level == "error" and title == "KV304 buffer not moved" for level, title, _ in found)
    line = next(line for line in str(failure.text).splitlines() if line.startswith("next: kvcheck replay "))
    assert "#1 --out build/kvcheck/runs" in line and line.removeprefix("next: ") in done.summary


KNOWN = """
[[unknown]]
cell = "retract-resume/glm-5.1-tiny"
says = "{says}"
owner = "kv team"
reason = "its time is short here"
expires = 2099-01-01
"""


@pytest.mark.processes(starts=True)
@pytest.mark.parametrize(("says", "code"), [(None, 4), ("its time was up", 0), ("another reason", 4)])
def test_too_little_stops_a_pull_request_unless_the_baseline_knows_it(
    says: str | None, code: int, tmp_path: Path
) -> None:
    _, workflow = read("github-pull-request.yml")
    (tmp_path / "known.toml").write_text(KNOWN.format(says=says))
    env = {**workflow["env"], "ARGUMENTS": f"{CELL} --min-schedules 3 --max-time 0.01"}
    if says is not None:
        env["BASELINE"] = "known.toml"
    done = run_steps(workflow["jobs"]["kvcheck"]["steps"], tmp_path, env=env)
    assert done.exit_code == code, done.output
    of = "junit" if says is None else "gate"
    suite = ci_readers.junit((tmp_path / f"build/kvcheck/{of}.xml").read_text(encoding="utf-8"))
    assert (suite.get("failures"), suite.get("errors")) == ("0", "0" if code == 0 else "1")


@pytest.mark.processes(starts=True)
def test_a_run_without_a_verdict_is_not_gated(tmp_path: Path) -> None:
    _, workflow = read("github-pull-request.yml")
    env = {**workflow["env"], "ARGUMENTS": "stress no-such-scenario"}
    done = run_steps(workflow["jobs"]["kvcheck"]["steps"], tmp_path, env=env)
    assert (done.exit_code, done.failed) == (2, "kvcheck"), done.output
    assert "kvcheck gate" not in done.output and not (tmp_path / "build/kvcheck/gate.xml").exists()


@pytest.mark.processes(starts=True)
def test_the_action_and_the_job_of_gitlab_give_the_same_verdict(tmp_path: Path) -> None:
    arguments = f"{CELL} --mutant {BUG}"
    _, action = read("action/action.yml")
    inputs = {"SOURCE": "kvcheck", "TORCH": "", "ARGUMENTS": arguments, "OUT": "build/kvcheck"}
    done = run_steps(action["runs"]["steps"], tmp_path / "action", env=inputs)
    assert (done.exit_code, done.installed) == (1, "install kvcheck\n"), done.output
    _, jobs = read("gitlab-ci.yml")
    job = jobs["kvcheck"]
    steps = [{"name": line, "run": line} for line in (*job["before_script"], *job["script"])]
    variables = {name: value for name, value in job["variables"].items() if "$" not in value}
    done = run_steps(steps, tmp_path / "gitlab", env={**variables, "ARGUMENTS": arguments})
    assert done.exit_code == 1, done.output
    entries = ci_readers.gitlab((tmp_path / "gitlab/build/kvcheck/quality.json").read_text(encoding="utf-8"))
    assert entries[0]["check_name"] == "KV304"


@pytest.mark.processes(starts=True)
def test_the_nightly_finds_the_version_that_it_installs(tmp_path: Path) -> None:
    _, workflow = read("github-nightly.yml")
    steps = workflow["jobs"]["engines"]["steps"]
    for release in ("newest", "pre"):
        env = {"ENGINE": "vllm", "RELEASE": release, **workflow["env"]}
        folder = tmp_path / release
        done = run_steps(steps, folder, env=env, names=("Install kvcheck", "Find the version", *ENGINE))
        assert done.exit_code == 0, done.output
        assert done.variables == "VERSION=9.9.9\n"
        asked = "index versions --pre vllm" if release == "pre" else "index versions vllm"
        assert done.installed.splitlines()[-2:] == [asked, "env vllm==9.9.9 envs/engine"]
        assert is_accepted("env vllm==9.9.9 envs/engine")


@pytest.mark.processes(starts=True)
def test_the_script_before_a_merge_stops_at_a_finding(tmp_path: Path) -> None:
    step = {"name": "pre-merge", "run": f"{CI / 'pre-merge.sh'} {CELL} --mutant {BUG}"}
    (tmp_path / "build/kvcheck/runs/of-yesterday").mkdir(parents=True)
    done = run_steps([step], tmp_path / "checkout", env={"OUT": str(tmp_path / "build/kvcheck")})
    assert done.exit_code == 1, done.output
    ci_readers.junit((tmp_path / "build/kvcheck/junit.xml").read_text(encoding="utf-8"))
    assert len([*(tmp_path / "build/kvcheck/runs").iterdir()]) == 1, "an earlier call's runs are not judged"


@pytest.mark.processes(starts=True)
@pytest.mark.parametrize(("baseline", "code"), [("known.toml", 0), ("", 4)])
def test_the_script_before_a_merge_knows_a_baseline(baseline: str, code: int, tmp_path: Path) -> None:
    step = {"name": "pre-merge", "run": f"{CI / 'pre-merge.sh'} {CELL} --min-schedules 3 --max-time 0.01"}
    (tmp_path / "known.toml").write_text(KNOWN.format(says="its time was up"))
    done = run_steps([step], tmp_path, env={"OUT": str(tmp_path / "out"), "BASELINE": baseline})
    assert done.exit_code == code, done.output
    assert (tmp_path / "out/gate.xml").exists() == bool(baseline)


@pytest.mark.processes(starts=True)
def test_the_script_before_a_merge_needs_a_case_for_its_budget(tmp_path: Path) -> None:
    path = CI / "pre-merge.sh"
    assert os.access(path, os.X_OK)
    syntax = subprocess.run(["bash", "-n", str(path)], capture_output=True, check=False)
    assert syntax.returncode == 0, syntax.stderr
    env = {"OUT": str(tmp_path / "out"), "BUDGET": str(ROOT / "reports/baselines/cpu.toml")}
    done = run_steps([{"name": "pre-merge", "run": f"{path} {CELL}"}], tmp_path / "checkout", env=env)
    assert (done.exit_code, done.output) == (2, "pre-merge: BUDGET needs BENCH, the case that it is about\n")
