"""What a command cannot do ends in exit 2 with one line on stderr, and leaves no file: one table of all commands."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from rigs.gate import of_this_build
from rigs.literal_record import FAILED, FOREIGN, PASSED

from kvcheck.commands.main import run
from kvcheck.core.run.store import RunStore

# Lines are those of a shell. What a folder has for them: runs RED and GREEN, a run CUT short, the model `tiny`.
RED, GREEN, CUT = "20260102-030405-00000001", "20260102-030405-00000002", "20260102-030405-00000003"
LINE = "retract-resume:shape=llama-3-tiny"
SMALL = "stress retract-resume --shape llama-3-tiny"
KNOWN = "--known-answers tiny"
NOBODY = "http://127.0.0.1:1"
WHO = "--owner me --reason 'issue 7' --expires 2999-01-01"
BUG = "retract-resume:shape=glm-5.1-tiny,mutant=offload-skips-index-buffer,seed=1,schedule=0"
DEVICE = "hicache:shape=llama-3-tiny,mutant=gate-waits-wrong-entry,backend={0},device={0},strategy=delay"
PAIR = "pd-transfer:shape=llama-3-tiny,backend=eager,transport=ipc,ranks=1x1,seed=1,schedule=0"
LONG = "x" * 5000

NAMES = [
    ("nope", "no command 'nope'; known: stress"),
    ("stres --shape x", "no command 'stres'; did you mean 'stress'?"),
    ("campaign", "many seeds are run by kvcheck stress --seeds A-B"),
    ("help stres", "did you mean 'stress'?"),
    ("stress nope", "unknown scenario 'nope'; known: retract-resume"),
    ("stress --shape glm-5.1-tin", "did you mean 'glm-5.1-tiny'?"),
    ("stress --mutant nope", "unknown mutant 'nope'"),
    ("stress --mutant offload", "did you mean 'offload-skips-index-buffer'"),
    ("stress --strategy nope", "unknown strategy 'nope'"),
    ("stress --strategy replay", "use kvcheck replay"),
    ("stress --target nope", "unknown target 'nope'"),
    ("stress --transport nope", "unknown transport 'nope'; known: loopback, tcp, mooncake"),
    ("stress --backend nope", "unknown backend 'nope'"),
    ("stress --decoder wods", "did you mean 'words'"),
    ("stress HiCache", "did you mean 'hicache'?"),
    ("stress --nope", "No such option: --nope"),
    ("selftest offload-skips-index-buffer -o csv=file", "cannot write file: File exists"),
    ("selftest nope", "unknown mutant 'nope'"),
    ("probe", "Missing argument 'ENGINE[:ENV]': sglang, vllm, lmcache, mooncake"),
    ("explain --format json", "expected a code such as KV102"),
    ("explain kv0102", "did you mean 'KV102'"),
    ("list shape", "did you mean 'shapes'"),
    # Another command is meant.
    ("stress sglang", "an installed engine is judged by kvcheck probe sglang"),
    ("stress --target sglang==0.5.23", "next: kvcheck env sglang==0.5.23 DIR, then kvcheck probe sglang:DIR"),
    ("stress --target h:1", "a running server is judged by kvcheck live http://h:1"),
    ("stress --target http://h:1 --known-answers tiny", "a running server is judged by kvcheck live http://h:1"),
    ("probe my.own:make", "code of your own is run by kvcheck stress --target my.own:make"),
    ("live sglang:envs/fork", "an installed engine is judged by kvcheck probe sglang:envs/fork"),
    ("bench seal serve", "expected kvcheck bench serve URL"),
]
STRESS = [
    ("--device tpu", "--device: expected cpu, threads, cuda or cuda:N, got 'tpu'"),
    ("--format nope", "--format: expected one of text, json, got 'nope'"),
    ("--schedules 0", "--schedules: expected at least 1, got 0"),
    ("--max-time nan", "--max-time: expected at least 0.001, got nan"),
    ("--max-time inf", "--max-time: expected a number, got inf"),
    ("--requests 10000001", "requests: expected at most 10000000, got 10000001"),
    ("--seed abc", "--seed: expected a valid integer, got 'abc'"),
    (f"--seed {'9' * 30}", "--seed: expected an integer of at most 20 digits"),
    ("--trace no-such.jsonl", "trace no-such.jsonl: expected a JSONL file"),
    (f"--trace {LONG}", "File name too long"),
    ("-o html", "expected FORMAT=PATH"),
    ("--out file/runs", "cannot write"),
    ("-o csv=file", "cannot write file: File exists"),
    ("-o html=file/page.html", "cannot write file: File exists"),
    ("-o json=folder", "cannot write folder/run.json: expected the name of a file, got a folder"),
    ("-o html=a -o html=a", "two reports would be written to a;"),
    ("-o csv=b.x -o html=b.x", "two reports would be written to b.x;"),
    ("-o html=c/findings.csv -o csv=c", "two reports would be written to c;"),
    ("-o html=a -o html=folder/../a", "two reports would be written to folder/../a;"),
    ("-q", "--format json"),
    ("--no-color", "NO_COLOR=1"),
    ("--mutant", "see kvcheck stress --help"),
    ("--mutant ofload", "did you mean 'offload-"),
    ("-o juint=x.xml", "did you mean 'junit'"),
    ("-o github=- --format json", "stdout is the JSON"),
    ("--resume", "--resume: no interrupted run of this plan and seed"),
    ("--schedules 3 --min-schedules 4", "--min-schedules 4: expected at most --schedules, which is 3"),
    # Orders, devices and ranks
    ("--device cuda --strategy random", "next: --strategy delay, which holds lanes, or --device cpu"),
    ("--backend cuda", "--backend cuda does not run on --device cpu"),
    ("--ranks 2x2", "retract-resume runs 1x1 only; name pd-transfer or nvlink-aux"),
    ("--transport tcp", "--transport tcp: retract-resume runs in one process"),
    ("--transport tcp --mutant failed-overwritten", "--transport tcp runs real processes"),
    ("--strategy answers:-1", "expected a strategy, or answers:K with a number K from 0 on"),
    ("--strategy random:1", "expected a strategy, or answers:K"),
    ("--strategy answers --backend eager", "--strategy answers: expected --backend simulated"),
    ("--decoder known-answer", "expected a shape of llama-answers"),
    ("--decoder known-answer --transport tcp", "expected --transport loopback, got tcp; next: the same "),
    # Many seeds
    ("--seeds 9-5", "--seeds: expected"),
    ("--seeds 1-3 --shard 0/2", "--shard: expected I/N"),
    ("--shard 1/2", "expected --seeds A-B beside it"),
    ("--ray auto", "expected --seeds A-B beside it"),
    ("--seeds 1-3 --seed 1", "--seed: not for a run of many seeds"),
    ("--seeds 1-3 --min-schedules 3", "--min-schedules: not for a run of many seeds"),
    ("--seeds 1-3 --device threads", "expected schedules of one process on a CPU"),
    ("--seeds 1-3 --resume", "--resume: no interrupted run of this plan and seed"),
    ("--seeds 1-3 --ray local --target some:engine", "leave --target some:engine out, or --ray"),
]
PD_TRANSFER = [
    ("--ranks 2x", "expected PREFILLxDECODE, each from 1 to 8"),
    ("--ranks 9x1", "such as 2x2; got '9x1'"),
    ("--transport tcp --device cuda", "have host memory alone; expected --device cpu, or --transport ipc"),
    ("--transport ipc --device threads", "--transport ipc runs ranks as processes; leave one of them out"),
    ("--transport tcp --backend simulated", "--transport tcp runs real processes, in no chosen order"),
    ("--decoder known-answer --ranks 2x2", "expected --ranks 1x1"),
]
LINES = [
    ("nope", "no run 'nope'"),
    (LONG, "no run 'xxx"),
    (f"{LINE},requests=99999999999999999999", "expected at most 10000000"),
    (f"{LINE},trace=a%00b", "trace a\\x00b: expected a JSONL file"),
    (f"{LINE},schedule=99999999999", "schedule: expected at most 1000000"),
    (f"{LINE},strategy=replay,choices=zz!", "choices are damaged"),
    (f"{LINE},choices=AAAA", "choices: expected strategy=replay, flip or answers beside them"),
    (f"{LINE},strategy=replay", "strategy=replay: expected choices=..., got none"),
    (f"{LINE},strategy=flip,choices=7.b~7.c", "the lower number first, got '7.b~7.c'; copy the whole line"),
    (f"{LINE},strategy=flip,choices=7.b~8.c,backend=eager", "choices: expected backend=simulated"),
    (f"{LINE},expect=KVnope", "expect: expected a finding code, got 'KVnope'"),
    ("prefix-cache:target=http%3A//127.0.0.1%3A1,known-answers=nowhere", "replay it in the folder where the run was"),
    # Findings by their number: of RED, which has four
    (f"{RED}#0", f"run {RED} has no finding 0; it has 4"),
    (f"{RED}#9", f"run {RED} has no finding 9; it has 4"),
    (f"{RED}#4", f"finding {RED}.4 is of no one schedule; run it again: "),
    (f"{RED}#2:proof", f"finding {RED}.2 has no proof"),
    (f"{RED}#2:small", "no smaller schedule is stored"),
    (f"{RED}#two", f"expected the number of a finding behind #, such as {RED}#1"),
    (f"{RED}#1:other", "expected the number of a finding behind #"),
]
SHRINK = [
    (PAIR, f"without a trace, got transport=ipc; next: kvcheck replay {PAIR}"),
    (f"{LINE},trace=sample", "without a trace, got trace=sample; next: kvcheck replay"),
    ("retract-resume:shape=retract.nsa,target=sglang", "without a trace, got target=sglang; next: kvcheck replay"),
    (f"{DEVICE.format('threads')},choices=hicache.load,expect=KV102", "got device=threads; next: kvcheck shrink hic"),
    (f"{DEVICE.format('cuda')},schedule=3", "wrong-entry,seed=1,schedule=3, the same work on a CPU"),
    (f"{BUG} --runs 0", "--runs"),
    ("nonsense", "nonsense"),
]
RECORDS = [
    ("report RED -o junit=-", "only github goes to stdout"),
    ("report RED -o html=reports/runs/RED/run.json", "expected another file than the record"),
    ("gate", "Missing argument"),
    ("gate nope", "no run 'nope'"),
    ("gate GREEN --budget nope.toml", "budget file nope.toml"),
    ("gate GREEN --tol nan", "--tol and --fail-over"),
    ("gate GREEN --tol 0.5", "expected 0 <= tol <= fail-over <= 10"),
    ("gate GREEN --on-inconclusive no", "expected one of pass, warn, fail, got 'no'"),
    ("gate GREEN --strict-baseline", "expected --baseline FILE"),
    ("gate GREEN -o csv=x", "unknown format of the gate 'csv'; known: json, md, html"),
    ("gate GREEN -o md=.", "expected the name of a file, got a folder"),
    ("gate GREEN -o md=x -o html=x", "two reports would be written to x"),
    ("gate GREEN -o md=/dev/null/x", "cannot write"),
    ("gate RED -o github=- --format json", "stdout is the JSON"),
    (f"baseline save RED known.toml {WHO} --expires soon", "--expires 'soon': expected a date"),
    (f"baseline save RED known.toml {WHO} --expires 2020-01-01", "a date that has passed"),
    (f"baseline save RED known.toml {WHO} --owner ' '", "--owner: expected a text"),
    (f"baseline save RED there.toml {WHO}", "expected a file that is not there yet"),
    (f"baseline save GREEN known.toml {WHO}", "no finding and no UNKNOWN"),
    (f"baseline save CUT known.toml {WHO}", "was cut short"),
    (f"baseline accept RED 7 known.toml {WHO}", "has no finding and no UNKNOWN cell '7'; its findings: "),
    (f"baseline accept RED 5 known.toml {WHO}", "is a symptom of"),
    (f"baseline accept RED known.toml {WHO}", "expected one finding as RUN#N"),
    (f"baseline accept nothing#1 known.toml {WHO}", "no run 'nothing'"),
    ("baseline prune absent.toml RED", "No such file or directory"),
    ("baseline show there.toml", "expected TOML"),
]
SERVERS = [
    ("live", "Missing argument 'URL'"),
    (f"live {NOBODY}", "expected --known-answers DIR"),
    (f"live {NOBODY} {KNOWN}", "expected a running server"),
    (f"live http://10.0.0.1:1 {KNOWN}", "add --allow-remote"),
    (f"live http://user:secret@127.0.0.1:1 {KNOWN}", "no password"),
    (f"live https:// {KNOWN}", "lacks a host"),
    (f"live localhost:8000 {KNOWN}", "http:// is missing; expected http://localhost:8000"),
    (f"live http://127.0.0.1:1 {KNOWN} --decode 127.0.0.1:8421", "--decode 127.0.0.1:8421: http:// is missing"),
    (f"live http://127.0.0.1:1 {KNOWN} --metrics 127.0.0.1:8421", "--metrics 127.0.0.1:8421: http:// is missing"),
    ("live [::1]:8000 --own-model", "expected http://[::1]:8000"),
    ("live tiny", "URL: expected http://HOST:PORT, got 'tiny'"),
    (f"live {NOBODY} --known-answers /nowhere", "is no known-answer model"),
    (f"live {NOBODY} nonsense {KNOWN}", "unknown scenario"),
    (f"live {NOBODY} {KNOWN} --require hits=1", "expected KIND=NUMBER"),
    (f"live {NOBODY} {KNOWN} --requests 0", "--requests: expected at least 1, got 0"),
    (f"live {NOBODY} {KNOWN} --concurrency 0", "--concurrency: expected"),
    (f"live {NOBODY} {KNOWN} --timeout nan", "--timeout: expected"),
    (f"live {NOBODY} {KNOWN} --timeout 1e300", "at most 86,400"),
    (f"live {NOBODY} {KNOWN} --key-env NO_SUCH", "found none"),
    (f"live {NOBODY} {KNOWN} --api tgi", "unknown engine 'tgi'"),
    (f"live {NOBODY} {KNOWN} --out /proc/no", "expected a running server"),
    (f"live {NOBODY} {KNOWN} --own-model", "expected one of both"),
    (f"live {NOBODY} --vocabulary 512", "expected --own-model beside it"),
    (f"live {NOBODY} --own-model --reference nothing", "nothing is no reference"),
    (f"model reference {NOBODY}", "Missing argument 'DIR'"),
    (f"model reference DIR {NOBODY}", "expected http://HOST:PORT"),
    (f"model reference {NOBODY} DIR", "expected a running server"),
    (f"model reference {NOBODY} DIR --requests 0", "--requests"),
    (f"bench serve {NOBODY}", "Missing option '--known-answers': The model that the server serves"),
    (f"bench serve sglang {KNOWN}", "URL: expected http://HOST:PORT, got 'sglang'"),
    (f"bench serve http://user:secret@127.0.0.1:1 {KNOWN}", "no password"),
    (f"bench serve {NOBODY} {KNOWN} --load fresh", "--load fresh: it is for two servers"),
    (f"bench serve {NOBODY} {KNOWN} --versus {NOBODY} --load mixed", "expected one of shared, fresh, returning"),
    (f"bench serve {NOBODY} {KNOWN} --versus x", "--versus: expected http://HOST:PORT, got 'x'"),
    (f"bench serve {NOBODY} {KNOWN} --precision nan", "--precision: expected a number above 0"),
    (f"bench serve {NOBODY} {KNOWN} --rounds 0", "--rounds: expected at least 1"),
    (f"bench serve {NOBODY} {KNOWN} --requests 0", "--requests: expected 1"),
    (f"bench serve {NOBODY} {KNOWN} --prompt 4", "--prompt: expected at least"),
    ("bench --precision much", "--precision: expected a valid number, got 'much'"),
]
MODELS = [  # kvcheck model make
    ("--layers 1", "layers of a known-answer model is from 2 to 256; got 1"),
    ("--head-dim 96", "multiple of 64; got 96"),
    ("--dtype int4", "unknown dtype 'int4'"),
    ("--arch lama", "did you mean 'llama'?"),
    ("--arch deepseek-v3 --group 2", "--group: this architecture has 1 only; got 2"),
    ("--arch deepseek-v3 --dtype fp16", "ask for --dtype bf16"),
    ("--arch deepseek-v32 --top-k 2", "top-k is from 4 to 2048"),
    ("--top-k 64", "llama has no indexer; got a top-k of 64"),
    ("--kv-scale 4", "kv-scale 4 is for a cache in FP8: ask for --dtype fp8-kv; got bf16"),
    ("--dtype fp8-kv --kv-scale 3", "kv-scale is one of 1, 2, 4, 8, 16; got 3"),
    ("--arch deepseek-v3 --dtype fp8-kv --kv-scale 2", "--kv-scale: deepseek-v3 has no scales"),
    ("--window 64", "llama has no layer with a window; got a window of 64"),
    ("--arch gpt-oss --window 3", "window is from 4 to length (4096); got 3"),
    ("--arch gpt-oss --group 1", "needs 2 query heads or more; got --group 1"),
    ("--arch qwen3-next --layers 3", "ask for more --layers"),
    ("--arch qwen3-next --nodes 20000", "ask for fewer --nodes"),
    ("--nodes 3", "nodes of a known-answer model are from 16"),
    ("--kv-heads 64", "need more dimensions of a head"),
    ("--distance 4096", "distance is from 0 to length - 1"),
]
TABLE = [
    *NAMES,
    *((f"{SMALL} {words}", told) for words, told in STRESS),
    *((f"stress pd-transfer {words}", told) for words, told in PD_TRANSFER),
    *((f"replay {words}", told) for words, told in LINES),
    *((f"shrink {words}", told) for words, told in SHRINK),
    *RECORDS,
    *SERVERS,
    *((f"model make m {words}", told) for words, told in MODELS),
    ("model answer tiny --prompt absent.json", "cannot read"),
    ("model answer tiny --prompt there.toml", "not JSON"),
]


@pytest.fixture
def desk(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").symlink_to(model)
    (tmp_path / "there.toml").write_text("[[")
    (tmp_path / "file").touch()
    (tmp_path / "folder" / "run.json").mkdir(parents=True)
    found = [
        replace(FOREIGN, id=f"{RED}.{number}", schedule=line, cause=cause, code=code)
        for number, line, cause, code in (
            (2, f"{LINE},seed=1", None, "KV102"),
            (3, f"{LINE},seed=2", None, "KV103"),
            (4, "", None, "KV104"),
            (5, f"{LINE},seed=1", f"{RED}.2", "KV501"),
        )
    ]
    for record in (
        replace(FAILED, run_id=RED, findings=tuple(found)),
        replace(PASSED, run_id=GREEN),
        replace(FAILED, run_id=CUT, complete=False),
    ):
        RunStore(tmp_path / "reports" / "runs").save(of_this_build(record))
    return tmp_path


@pytest.mark.parametrize(("line", "told"), TABLE, ids=[line[:80] for line, _ in TABLE])
def test_what_cannot_be_done_is_one_line_and_exit_2(
    line: str, told: str, desk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(desk.rglob("*"))
    named = line.replace("RED", RED).replace("GREEN", GREEN).replace("CUT", CUT)
    assert run(shlex.split(named)) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("kvcheck: ") and printed.err.count("\n") == 1, printed.err
    assert told in printed.err
    assert "secret" not in printed.err and sorted(desk.rglob("*")) == before
