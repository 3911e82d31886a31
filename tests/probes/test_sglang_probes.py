"""Installed engines: verdicts and exit codes of the probes, on a stand-in engine with one fault at a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fakes.engine import HELLO, environment, interpreter, put_fault
from rigs.schemas import check_fits

from kvcheck.commands.main import run
from kvcheck.core.base.errors import UnknownVerdict, UsageError
from kvcheck.core.probes.frame.engine_process import EngineProcess, Patience
from kvcheck.core.probes.frame.wire import Ask, Reply
from kvcheck.core.probes.installed import parse_target
from kvcheck.core.probes.runner import ProbeRunner
from kvcheck.core.run.plan import Plan

SOURCES = Path(__file__).parents[1] / "fakes" / "sglang"
SCHEDULES = 4
GOOD = ""
FAULTS = [
    ("index-lost", "retract.nsa", {"KV102", "KV304"}),
    ("part-page-lost", "retract.nsa", {"KV102"}),
    ("family-raises", "retract.nsa", {"KV902"}),
    ("views", "metadata.get-buf", {"KV305", "KV102", "KV103"}),
    ("row-remembered", "metadata.get-buf", {"KV102"}),
    ("no-wait", "layer-wait.nsa", {"KV201"}),
    ("waits-for-layer-before", "layer-wait.nsa", {"KV201"}),
    ("moved-in-place", "index-moves.hybrid-kernel", {"KV302"}),
    ("side-not-moved", "index-moves.hybrid-kernel", {"KV302"}),
    ("paged-not-moved", "index-moves.hybrid-kernel", {"KV302"}),
    ("sorted-in-place", "index-moves.hybrid-direct", {"KV301", "KV303"}),
    ("wrong-pairing", "index-moves.hybrid-direct", {"KV301"}),
    ("wrong-pairing", "index-moves.mamba-tree-direct", {"KV303"}),
    ("freed-twice", "index-moves.tree-kernel", {"KV402"}),
    ("mixed-sides", "index-moves.tree-kernel", {"KV902"}),
    ("state-dies", "state-lengths.nsa-longer", {"KV902"}),
    ("state-trims", "state-lengths.nsa-shorter", {"KV102?", "KV301?"}),
    ("sampled-is-counted", "sent-lists.nsa", {"KV301"}),
    ("part-page-twice", "sent-lists.mha", {"KV301"}),
    ("rest-forgotten", "sent-lists.mha", {"KV301"}),
    ("state-result-lost", "state-failure.nsa", {"KV203"}),
    ("pages-by-tokens", "token-moves.nsa", {"KV301?"}),
    ("gate-of-one-rank", "agreement.metadata", {"KV601"}),
    ("no-gate", "agreement.metadata", {"KV203"}),
    ("metadata-turned", "agreement.everything", {"KV203"}),
    ("room-kept", "agreement.everything", {"KV203", "KV203?"}),  # metadata of before, and pages of before
    ("pages-last", "agreement.everything", {"KV203?"}),
    ("early-ack", "host-copy.nsa-direct", {"KV201"}),
    ("ack-lost", "host-copy.nsa-direct", {"KV901"}),
    ("index-not-backed-up", "host-copy.nsa-direct", {"KV102", "KV104", "KV304"}),
    ("load-overtakes", "host-copy.nsa-direct", {"KV102"}),
    ("list-changed", "host-copy.nsa-direct", {"KV301", "KV302", "KV304"}),
]
"""Fault, shape and codes; with a question mark where a finding needs an assumption outside the engine's contract."""
CALLED = [
    ("index-lost", "retract.nsa", "Req.load_kv_cache", "schedule_batch.py", "def load_kv_cache"),
    ("family-raises", "retract.nsa", " > NSATokenToKVPool.get_cpu_copy", "memory_pool.py", "raise"),
    ("views", "metadata.get-buf", "MetadataBuffers.get_buf", "utils.py", "def get_buf"),
    ("no-wait", "layer-wait.nsa", "NSATokenToKVPool.get_index_buffer", "memory_pool.py", "def get_index_buffer"),
    ("moved-in-place", "index-moves.hybrid-kernel", ".write > move > move_indices", "cache_controller.py", ".to("),
    (
        "wrong-pairing",
        "index-moves.mamba-tree-direct",
        ".backup_from_device_all_layer",
        "cache_controller.py",
        "pool.backup",
    ),
    ("state-result-lost", "state-failure.nsa", "MooncakeKVManager.transfer_worker > send", "conn.py", "transfer"),
    ("pages-by-tokens", "token-moves.nsa", "NSATokenToKVPool.move_kv_cache", "memory_pool.py", "def move_kv_cache"),
    ("no-gate", "agreement.metadata", "DecodeTransferQueue.pop_transferred", "decode.py", "def pop_transferred"),
    ("early-ack", "host-copy.nsa-direct", "CopyController.write > HostPool.backup", "memory_pool_host.py", "transfer"),
    ("load-overtakes", "host-copy.nsa-direct", "CopyController.start_loading > HostPool.load", "_host.py", "transfer"),
    ("ack-lost", "host-copy.nsa-direct", "CopyController.start_loading", "copy_controller.py", "def start_loading"),
]
"""Fault, shape, the end of the functions that the first finding names, their file, and part of the line named there."""
WRONG_PREFIXES = {
    "frees-twice": "KV402",
    "lock-stays": "KV401",
    "evicts-locked": "KV402",
    "child-stays": "KV402",
    "page-too-many": "KV301",
    "rows-by-number frees-twice": "KV402",
    "rows-by-number lock-stays": "KV401",
    "numbered-from-0 evicts-locked": "KV402",
    "row-number-stays": "KV401",
}
RIGHT_PREFIXES = ["rows-by-number", "numbered-from-0", "rows-by-number numbered-from-0"]
"""Releases differ in these, and none is wrong: whose row it is stays on a request, and a chunk gets another row."""
NO_EVIDENCE = [
    ("row-each-chunk", "prefixes.radix", "after a request came in chunks, it is not clear who holds a row: of rows [1"),
    ("stub-in-path", "pool-copy.nsa", "called stand-ins, which move no bytes: sgl_kernel.copy_rows"),
    ("plainest-raises", "retract.nsa", "the control case failed: offload_kv_cache raised RuntimeError: no copies"),
    ("scratch", "pool-copy.nsa", "seen[0], page by page, which it does not transfer"),
    (GOOD, "pool-copy.swa", "this release has no pool.swa (tried sglang.srt.mem_cache.swa_memory_pool:SWAKVPool"),
]
BROKEN = {
    "garbage": ("echo Python 2.7", "said 'Python 2.7\\n', which is no answer", "none"),
    "no greeting": (
        """echo '{"ask": {"probe": "x", "subject": "y", "seed": 1, "schedule": 0, "traced": []}}'""",
        "said ask",
        "none",
    ),
    "death": ("echo out of luck >&2; exit 3", "ended with status 3: getting ready", "out of luck"),
    "closed output": ("echo bye >&2; exec >&-; sleep 60", "closed its output and did not end: getting ready", "bye"),
    "silence": ("echo thinking >&2; sleep 60", "said nothing for 0.5 s: getting ready", "thinking"),
    "death later": (f"echo '{HELLO}'; read ask; echo gone >&2; exit 4", "ended with status 4: retract on nsa", "gone"),
    "hang later": (
        f"echo '{HELLO}'; read ask; echo stuck >&2; sleep 60",
        "said nothing for 0.5 s: retract on",
        "stuck",
    ),
    "greets again": (f"echo '{HELLO}'; read ask; echo '{HELLO}'; sleep 60", "said hello instead of an answer", "none"),
}


def ask_of(shape: str, schedule: int = 0) -> Ask:
    probe, _, subject = shape.partition(".")
    return Ask(probe=probe, subject=subject, seed=1, schedule=schedule)


def first_bad(child: EngineProcess, shape: str) -> Reply:
    """The first schedule that is no pass, or the last."""
    replies = [child.ask(ask_of(shape, number)) for number in range(SCHEDULES)]
    return next((reply for reply in replies if reply.findings or reply.unknown), replies[-1])


@pytest.mark.processes
@pytest.mark.parametrize(("fault", "shape", "codes"), FAULTS)
def test_fault_alone_is_found(child: EngineProcess, fake: Path, fault: str, shape: str, codes: set[str]) -> None:
    put_fault(fake, GOOD)
    good = first_bad(child, shape)
    assert (good.findings, good.unknown) == ((), None)
    assert all(count > 0 for count in good.evidence.words_verified.values()) and good.evidence.events
    put_fault(fake, fault)
    bad = first_bad(child, shape)
    assert {f"{finding.code}{'?' * bool(finding.condition)}" for finding in bad.findings} == codes, bad


@pytest.mark.processes
@pytest.mark.parametrize(("fault", "shape", "chain", "file", "part"), CALLED)
def test_finding_names_functions_of_the_engine(
    child: EngineProcess, fake: Path, fault: str, shape: str, chain: str, file: str, part: str
) -> None:
    put_fault(fake, fault)
    (first, *_), again = first_bad(child, shape).findings, first_bad(child, shape).findings
    assert first.minimal is not None and first.minimal == again[0].minimal
    names, place = str(first.minimal["called"]).split("   ")
    path, line = place.rsplit(":", 1)
    assert names.endswith(chain) and path.startswith("sglang/srt/") and path.endswith(file)
    assert part in (SOURCES / path).read_text().splitlines()[int(line) - 1]


@pytest.mark.processes
def test_a_replay_in_another_environment_names_the_same_functions(
    child: EngineProcess, fake: Path, tmp_path: Path
) -> None:
    put_fault(fake, "early-ack")
    elsewhere = parse_target(f"sglang:{environment(tmp_path / 'env', 'early-ack')}").start(Patience())
    try:
        asks = [ask_of("host-copy.nsa-direct", number) for number in range(SCHEDULES)]
        replies = [child.ask(ask).findings for ask in asks]
        assert any(replies) and replies == [elsewhere.ask(ask).findings for ask in asks]
    finally:
        elsewhere.close()


@pytest.mark.processes
@pytest.mark.parametrize("ways", WRONG_PREFIXES)
def test_faults_of_a_prefix_tree_are_found_whoever_numbers_rows(child: EngineProcess, fake: Path, ways: str) -> None:
    put_fault(fake, ways)
    replies = [child.ask(ask_of("prefixes.radix", number)) for number in range(SCHEDULES)]
    assert WRONG_PREFIXES[ways] in {finding.code for reply in replies for finding in reply.findings}, replies


@pytest.mark.processes
@pytest.mark.parametrize("ways", [GOOD, *RIGHT_PREFIXES, "long-ones-run-alone"])
def test_prefix_tree_passes_with_all_that_is_wanted(child: EngineProcess, fake: Path, ways: str) -> None:
    put_fault(fake, ways)
    replies = [child.ask(ask_of("prefixes.radix", number)) for number in range(SCHEDULES)]
    row = parse_target(f"sglang:{fake}").spec.probe("prefixes")
    assert row is not None and not any(reply.findings for reply in replies)
    for reply in replies:
        assert reply.unknown is None and all(getattr(reply.evidence, name) for name in row.wants), reply


@pytest.mark.processes
@pytest.mark.parametrize(("fault", "shape", "why"), NO_EVIDENCE)
def test_no_evidence_is_unknown_with_why(child: EngineProcess, fake: Path, fault: str, shape: str, why: str) -> None:
    put_fault(fake, fault)
    reply = child.ask(ask_of(shape))
    assert not reply.findings and reply.unknown is not None and why in reply.unknown


@pytest.mark.processes
@pytest.mark.parametrize("shape", ["index-moves.tree-kernel", "index-moves.mamba-tree-direct"])
def test_prefixes_are_as_long_as_the_tree_loads(child: EngineProcess, fake: Path, shape: str) -> None:
    put_fault(fake, "loads-long-alone")
    reply = first_bad(child, shape)
    assert (reply.findings, reply.unknown) == ((), None)
    assert any("loads 256 tokens or more" in note for note in reply.notes)


@pytest.mark.processes
def test_chunks_are_told_in_the_words_of_the_release(child: EngineProcess, fake: Path) -> None:
    put_fault(fake, "reads-extend-range")
    good = first_bad(child, "sent-lists.mha")
    assert (good.findings, good.unknown) == ((), None)
    put_fault(fake, "reads-extend-range part-page-twice")
    assert {finding.code for finding in first_bad(child, "sent-lists.mha").findings} == {"KV301"}


@pytest.mark.processes
@pytest.mark.parametrize(
    ("fault", "shape"),
    [
        ("pages-by-tokens", "token-moves.mla"),
        ("state-trims", "state-lengths.nsa-longer"),
        ("lists-on-device", "index-moves.hybrid-direct"),
        ("lists-on-device", "index-moves.tree-direct"),
        ("lists-on-device", "index-moves.mamba-tree-direct"),
    ],
)
def test_what_harms_nobody_is_no_finding(child: EngineProcess, fake: Path, fault: str, shape: str) -> None:
    put_fault(fake, fault)
    reply = first_bad(child, shape)
    assert (reply.findings, reply.unknown) == ((), None) and reply.evidence.words_verified


@pytest.mark.processes
def test_finding_names_the_owner_and_the_place_each_time(child: EngineProcess, fake: Path) -> None:
    put_fault(fake, "index-lost")
    replies = [child.ask(ask_of("retract.nsa")) for _ in range(5)]
    finding = replies[0].findings[0]
    assert (finding.code, finding.buffer, finding.layer) == ("KV102", "index_k", 0)
    assert (finding.request, finding.seen_request) == (1, 3)
    assert replies == [replies[0]] * 5 and child.ask(ask_of("retract.nsa", 2)) != replies[0]


@pytest.mark.processes
def test_every_reader_of_a_layer_is_tried(child: EngineProcess, fake: Path) -> None:
    put_fault(fake, "no-wait")
    reply = child.ask(ask_of("layer-wait.nsa"))
    assert [finding.lane for finding in reply.findings] == ["get_index_buffer"]
    assert reply.evidence.orderings_checked == 2 * 3  # two readers, three layers


@pytest.mark.processes
def test_every_byte_is_judged_when_a_rank_commits(child: EngineProcess, fake: Path) -> None:
    put_fault(fake, GOOD)
    words = child.ask(ask_of("agreement.everything", 1)).evidence.words_verified
    # Two ranks, three requests: rows of 16 int32, 48 bfloat16 and 8 int64, and two pages of 16 tokens in 3 layers.
    fields = {"output_ids": 8, "output_hidden_states": 12, "bootstrap_room": 8, "kv_buffer": 2 * 16 * 20 * 3}
    assert words == {name: 2 * 3 * count for name, count in fields.items()}
    put_fault(fake, "metadata-turned")  # the room, which opens the gate, comes before the fields that it stands for
    bad = first_bad(child, "agreement.everything")
    assert {finding.buffer for finding in bad.findings} & {"output_ids", "output_hidden_states"}


@pytest.mark.processes
@pytest.mark.parametrize("name", BROKEN)
def test_child_that_breaks_is_unknown_with_its_last_line(name: str, tmp_path: Path) -> None:
    script, why, last = BROKEN[name]
    target = f"sglang:{interpreter(tmp_path / 'env', script)}"
    with pytest.raises(UnknownVerdict) as told:
        patience = Patience(
            start_s=0.5 if name == "silence" else 60, answer_s=0.5 if name == "hang later" else 60, end_s=0.5
        )
        started = parse_target(target).start(patience)
        started.ask(ask_of("retract.nsa"))
    is_ready = name in ("death later", "hang later", "greets again")  # then another environment is of no help
    assert why in str(told.value) and f"its last line: {last}{'' if is_ready else '; next: kvcheck env'}" in str(
        told.value
    )
    assert is_ready == str(told.value).endswith(last)


@pytest.mark.processes
def test_child_ends_where_getting_ready_is_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    env, file = interpreter(tmp_path / "env", f"echo $$ > {tmp_path}/id; echo; sleep 60"), tmp_path / "id"

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvcheck.core.probes.frame.engine_process.decode", interrupt)  # the child has said a line then
    out = tmp_path / "runs"
    assert run(["probe", f"sglang:{env}", "--out", str(out)]) == 130
    assert not [*out.iterdir()], "nothing was judged, so there is no run"
    with pytest.raises(ProcessLookupError):
        os.kill(int(file.read_text()), 0)


@pytest.mark.processes
def test_lost_child_makes_one_schedule_unknown(tmp_path: Path) -> None:
    env = interpreter(tmp_path / "env", f"echo '{HELLO}'; read ask; exit 5")
    runner = ProbeRunner(f"sglang:{env}", Patience(start_s=5, answer_s=5))
    plan = Plan(scenario="retract-resume", probe="retract.nsa", target=f"sglang:{env}")
    replies = [runner.run(plan) for _ in range(2)]  # the second has a child of its own
    runner.close()
    assert all("ended with status 5" in (reply.unknown or "") for reply in replies)


@pytest.mark.processes
def test_stress_passes_fails_and_replays(tmp_path: Path, fake: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put_fault(fake, "index-lost")
    base = ["probe", f"sglang:{fake}", "--seed", "1", "--schedules", "12", "--out", str(tmp_path)]
    code = run([*base, "--no-reports", "--probe", "pool-copy.mha", "--probe", "retract.nsa", "--format", "json"])
    record = json.loads(capsys.readouterr().out)
    check_fits(record)
    assert code == record["exit_code"] == 1
    verdicts = {row["id"]: row["verdict"] for row in record["scenarios"]}
    assert verdicts == {"retract-resume/pool-copy.mha": "pass", "retract-resume/retract.nsa": "fail"}
    assert record["environment"]["engine"]["engine"] == "sglang"
    line = record["findings"][0]["schedule"]
    assert run(["replay", line, "--times", "3"]) == 1
    assert "STILL FAILS 3/3" in capsys.readouterr().out
    broken = interpreter(tmp_path / "broken", "exit 3")
    assert run(["replay", line, line.replace(str(fake), str(broken))]) == 1, "the finding counts, whatever else is not"
    told = capsys.readouterr().out
    assert "STILL FAILS 1/1" in told and "UNKNOWN  retract-resume/retract.nsa: sglang under" in told
    assert run(["replay", line, "--device", "cuda"]) == 2
    assert "says itself where it runs; leave --device out" in capsys.readouterr().err


@pytest.mark.processes
def test_resumed_run_keeps_engine_and_notes(tmp_path: Path, fake: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put_fault(fake, GOOD)
    base = ["probe", f"sglang:{fake}", "--seed", "1", "--schedules", "12", "--out", str(tmp_path)]
    base += ["--no-reports", "--probe", "retract.nsa", "--format", "json"]
    assert run(base) == 0
    record = json.loads(capsys.readouterr().out)
    file = tmp_path / record["run_id"] / "run.json"
    note = "retract-resume/retract.nsa: not exercised: this and that"
    cut = {**record, "complete": False, "exit_code": 130, "warnings": [note]}
    file.write_text(json.dumps(cut))
    assert run([*base, "--resume"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["scenarios"] == record["scenarios"] and note in again["warnings"]
    other = {**record["environment"]["engine"], "version": "0.0.1"}
    file.write_text(json.dumps({**cut, "environment": {**record["environment"], "engine": other}}))
    assert run([*base, "--resume"]) == 0
    printed = capsys.readouterr()
    assert f"--resume skips run {record['run_id']}, which is about something else: the engine's sur" in printed.err
    assert record["run_id"] not in json.loads(printed.out)["run_id"] and note not in printed.out


@pytest.mark.processes(starts=True)
def test_release_with_other_names_is_unknown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    env = environment(tmp_path / "env", "renamed")
    base = ["probe", f"sglang:{env}", "--schedules", "1", "--out", str(tmp_path), "--no-reports"]
    assert run([*base, "--probe", "retract.nsa"]) == 4
    out = capsys.readouterr().out
    assert "cannot drive: this release has no pool.nsa (tried sglang.srt.mem_cache.memory_pool:NSATokenT" in out


@pytest.mark.processes
def test_environment_without_engine_is_one_line_and_4(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    env = environment(tmp_path / "env", None)
    assert run(["probe", f"sglang:{env}", "--out", str(tmp_path / "runs")]) == 4
    told = capsys.readouterr()
    assert "sglang cannot be imported by" in told.err and "No module named 'sglang'" in told.err
    assert told.err.endswith("next: kvcheck env sglang==VERSION VENV, then kvcheck probe sglang:VENV\n")
    assert not told.out and not list(tmp_path.glob("runs/*"))


@pytest.mark.processes
def test_device_that_torch_does_not_see_is_4(tmp_path: Path, fake: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--out", str(tmp_path / "runs")]
    assert run(["probe", f"sglang:{fake}", "--device", "cuda:1", "--probe", "retract", *out]) == 4
    told = capsys.readouterr().err
    assert "sees no CUDA device, asked for cuda:1; next: on a machine with a GPU, kvcheck env sglang==" in told
    assert run(["probe", f"vllm:{fake}", "--device", "cuda", *out]) == 2
    assert f"runs on cuda; expected cpu; next: kvcheck probe vllm:{fake}, without" in capsys.readouterr().err
    line = f"retract-resume:shape=metadata.get-buf,target=sglang%3A{fake},backend=cuda,device=cuda"
    assert run(["replay", line]) == 2
    assert "probe metadata of sglang runs on cpu, not on cuda" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["probe", "sglang:/nowhere"], "with an interpreter at DIR/bin/python; found none at /nowhere"),
        (["probe", "sglang", "--probe", "retract.nope"], "sglang has no probe 'retract.nope'; did you mean 'retract."),
        (["replay", "pd-transfer:shape=state-lengths.swa-longer,target=sglang,requests=5"], "takes no requests, got 5"),
        (["probe", "sglang", "--device", "threads"], "no probe of sglang runs on threads; expected cpu or cuda"),
        (["probe", "sglnag"], "did you mean 'sglang'?"),
        (["probe", "127.0.0.1:8000"], "a running server is judged by kvcheck live http://127.0.0.1:8000"),
        (["probe", "sglang==0.5.23"], "next: kvcheck env sglang==0.5.23 DIR, then kvcheck probe sglang:DIR"),
        (["stress", "--target", "sglang:DIR"], "an installed engine is judged by kvcheck probe sglang:DIR"),
        (["stress", "--target", "nope"], "unknown target 'nope'; a target of your own is MODULE:NAME; known: builtin"),
    ],
)
def test_unusable_arguments_are_refused(
    arguments: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*arguments, "--out", str(tmp_path)]) == 2
    assert told in capsys.readouterr().err
    assert run(["replay", "retract-resume:shape=nope.nsa,target=sglang,seed=1"]) == 2, "a line of no probe"


def test_interpreter_itself_may_be_named(tmp_path: Path) -> None:
    assert parse_target(f"sglang:{sys.executable}").python == Path(sys.executable)
    assert parse_target("sglang").python == Path(sys.executable)
    with pytest.raises(UsageError, match="expected sglang, or sglang:DIR"):
        parse_target("sglang:")


@pytest.mark.processes
def test_help_imports_no_engine_and_no_target() -> None:
    program = (
        "import sys, kvcheck, kvcheck.commands.main as m; m.run(['--help']); m.run(['stress', '--help']); "
        "found = {n.split('.')[0] for n in sys.modules} & {'sglang', 'vllm', 'lmcache', 'torch'}; "
        "sys.exit(any(n.startswith('kvcheck.core.stress.targets') for n in sys.modules) or bool(found))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
