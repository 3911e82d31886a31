"""The kvcheck command: a table of subcommands, and the one place that turns errors into exit codes.

Invariants:
- `kvcheck --help` imports no subcommand; a subcommand is imported when it is named.
- Every exit code is one of docs/exit-codes.md; a crash of kvcheck itself is 70, never 1.
- Unwritable output is no crash and has an exit code of its own. SIGINT and SIGTERM end a run in one way.
"""

from __future__ import annotations

import errno
import importlib
import itertools
import os
import re
import signal
import sys
import traceback
from typing import Any, TextIO

import typer
from typer.core import TyperGroup
from typer.main import get_command

from kvcheck import __version__
from kvcheck.commands.command import CONTEXT, Command, write_examples
from kvcheck.commands.interrupts import INTERRUPTED, NUMBERS, Interrupts
from kvcheck.commands.settings import ALL_TYPED, COMMANDS_THAT_MOVED, check_settings, place_of
from kvcheck.commands.terminal import complain, say
from kvcheck.core.base.errors import (
    InternalError,
    KvcheckError,
    UnknownVerdict,
    UsageError,
    machine_trouble,
    missing_library,
)
from kvcheck.core.base.registry import did_you_mean

SERVE = "bench serve"

GROUPS: dict[str, dict[str, tuple[str, str]]] = {
    "Check": {
        "stress": ("kvcheck.commands.stress:stress", "Run kvcheck's own cache, or code of yours, under schedules."),
        "probe": ("kvcheck.commands.probe:probe", "Check an installed engine: sglang, vllm, lmcache or mooncake."),
        "live": ("kvcheck.commands.live:live", "Check a running server, by known answers or by its own."),
    },
    "Understand": {
        "show": ("kvcheck.commands.show:show", "Show how a finding came about: timeline, history, words."),
        "replay": ("kvcheck.commands.replay:replay", "Run a printed schedule again, or the findings of a run."),
        "shrink": ("kvcheck.commands.shrink:shrink", "Look for a smaller schedule that fails alike."),
        "explain": ("kvcheck.commands.doctor:explain", "Explain a finding code, oracle, mutant or scenario."),
        "list": ("kvcheck.commands.doctor:list_kind", "List scenarios, shapes, oracles, mutants, codes and more."),
    },
    "Decide": {
        "report": ("kvcheck.commands.report:report", "Write HTML, CSV, JSON or Markdown reports of stored runs."),
        "compare": ("kvcheck.commands.compare:compare", "Show what is new or fixed in a run, against another."),
        "gate": ("kvcheck.commands.gate:gate", "Decide from stored runs whether a change may be merged."),
        "baseline": ("kvcheck.commands.baseline:app", "Keep the file of known findings that the gate reads."),
        "merge": ("kvcheck.commands.merge:merge", "Make one record of several runs: shards, other seeds."),
    },
    "Prices": {
        "bench": ("kvcheck.commands.bench:bench", "Measure what the fixes cost here. Slowness never fails."),
        SERVE: ("kvcheck.commands.bench_serve:bench_serve", "Measure running servers, and judge their answers."),
    },
    "Set up": {
        "env": ("kvcheck.commands.env:env", "Make an environment with an engine, for kvcheck probe."),
        "model": ("kvcheck.commands.model:app", "Make a model whose every answer is known; keep answers."),
        "doctor": ("kvcheck.commands.doctor:doctor", "Show what this machine has, and what is missing."),
    },
    "About kvcheck itself": {
        "selftest": ("kvcheck.commands.selftest:selftest", "Check that kvcheck finds every mutant (a bug put back)."),
    },
}
COMMANDS = {name: row for group in GROUPS.values() for name, row in group.items()}
PLUGIN = ("pytest --kvcheck", "Check pools of your own, in your tests.")
"""The subject that is a plugin of pytest; listed under Check."""
OPTION_HINTS = {
    "-q": "for the record alone: --format json",
    "--quiet": "for the record alone: --format json",
    "--json": "it is --format json",
    "--no-color": "colours are switched off by NO_COLOR=1 in the environment",
    "--color": "colours are switched on by FORCE_COLOR=1 in the environment",
    "--list": "names are printed by kvcheck list",
    "-j": "processes are set by --jobs",
    "-n": "processes are set by --jobs",
    "-k": "scenarios are words of their own: kvcheck stress hicache",
}
PIPE_CLOSED = 141
"""Exit code of a program in a shell whose reader, such as `head`, has gone."""

COMPLETING = "_KVCHECK_COMPLETE"
"""Set by a shell that completes a word."""
OUTPUT_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG, errno.EBADF, errno.ENXIO})

WRONG_TYPE = re.compile(
    r"Invalid value for '(?P<option>[^']+)': Input should be (?P<wanted>[^,;]+)[^;]*(?P<more>.*)", re.DOTALL
)

EXAMPLES: dict[str, str] = {
    "stress": "kvcheck stress | kvcheck stress retract-resume --shape glm-5.1-tiny --seed 1 | "
    "kvcheck stress --mutant offload-skips-index-buffer | kvcheck stress --seeds 1-1000 --max-time 28800",
    "probe": "kvcheck probe mooncake | kvcheck probe sglang:envs/sglang-0.5.23 --seed 1 | "
    "kvcheck probe vllm:envs/vllm --probe blocks --schedules 12 | "
    "kvcheck probe sglang:envs/fork --changed main..HEAD",
    "live": "kvcheck live http://127.0.0.1:8000 --known-answers tiny --admin | "
    "kvcheck live http://127.0.0.1:8000 prefix-cache --own-model",
    "merge": "kvcheck merge SHARD_1 SHARD_2 SHARD_3 SHARD_4 | kvcheck merge RUN_OF_SEED_1 RUN_OF_SEED_2",
    "replay": "kvcheck replay 20260102-030405-0c4e91d7#1 --times 100 | "
    "kvcheck replay retract-resume:shape=glm-5.1-tiny,seed=1,schedule=3",
    "shrink": "kvcheck shrink 20260102-030405-0c4e91d7#1 | "
    "kvcheck shrink hicache:shape=llama-3-tiny,seed=1,schedule=7 --runs 1000",
    "show": "kvcheck show | kvcheck show 20260102-030405-0c4e91d7#1 | kvcheck show 20260102#2 -o perfetto=trace.json",
    "selftest": "kvcheck selftest | kvcheck selftest resume-refeeds-token",
    "bench": "kvcheck bench | kvcheck bench metadata-read --shape glm-5.1 --seed 1 | "
    "kvcheck bench offload-restore --max-time 60 -o html=prices.html",
    SERVE: "kvcheck bench serve http://127.0.0.1:30000 --known-answers tiny | "
    "kvcheck bench serve http://a:8000 --versus http://b:8000 --known-answers tiny",
    "gate": "kvcheck gate 20260102-030405-0c4e91d7 --budget reports/baselines/cpu.toml | "
    "kvcheck gate STRESS_RUN BENCH_RUN --budget budgets.toml -o md=gate.md",
    "baseline": "kvcheck baseline save RUN kv.toml --owner me --reason '#7' --expires 2027-03-01 | "
    "kvcheck baseline show kv.toml",
    "compare": "kvcheck compare RUN_A RUN_B | kvcheck compare RUN_A RUN_B -o md=changes.md",
    "env": "kvcheck env sglang==0.5.23 envs/sglang-0.5.23 --base envs/base | "
    "kvcheck env --source ~/vllm envs/vllm-fork",
    "report": "kvcheck report 20260102-030405-0c4e91d7 | kvcheck report 20260102 -o html=report.html",
    "model": "kvcheck model make tiny | kvcheck model answer tiny --prompt ids.json --tokens 8 | "
    "kvcheck model reference http://127.0.0.1:8000 kept --requests 50",
    "list": "kvcheck list mutants | kvcheck list shapes --format json",
    "doctor": "kvcheck doctor --out runs",
    "explain": "kvcheck explain KV102 | kvcheck explain offload-skips-index-buffer",
}


class LazyGroup(TyperGroup):
    """Subcommands by name; help texts come from the table."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [name for name in COMMANDS if not (ctx.resilient_parsing and name == SERVE)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        width = len(PLUGIN[0])
        for heading, group in GROUPS.items():
            with formatter.section(heading):
                rows = [(name.ljust(width), summary) for name, (_, summary) in group.items()]
                formatter.write_dl([*rows, PLUGIN] if heading == "Check" else rows)
        with formatter.section("Options"):
            formatter.write_dl([row for each in self.get_params(ctx) if (row := each.get_help_record(ctx))])

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        write_examples(self.epilog, formatter)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import a command; for shell completion, return only name and help."""
        if cmd_name not in COMMANDS:
            return None
        if ctx.resilient_parsing:
            return _placeholder(cmd_name, COMMANDS[cmd_name][1])
        return command_named(cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if " ".join(args[:2]) == SERVE:
            args = [SERVE, *args[2:]]
        if ctx.resilient_parsing and args and args[0] in COMMANDS:
            return args[0], command_named(args[0]), args[1:]
        if args and not ctx.resilient_parsing and not args[0].startswith("-") and args[0] not in COMMANDS:
            if (moved := COMMANDS_THAT_MOVED.get(args[0])) is not None:
                raise UsageError(f"no command {args[0]!r}; {moved}")
            hint = did_you_mean(args[0], COMMANDS) or f"; known: {', '.join(COMMANDS)}"
            raise UsageError(f"no command {args[0]!r}{hint}; see kvcheck --help")
        return super().resolve_command(ctx, args)

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        try:
            return super().parse_args(ctx, args)
        except BrokenPipeError as error:
            raise _reader_left() from error

    def invoke(self, ctx: Any) -> Any:
        """Run the subcommand. A closed output pipe gets its own exit code: the parser would exit 1 like a finding."""
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except BrokenPipeError as error:
            raise _reader_left() from error
        except KeyboardInterrupt as error:  # the parser above would leave without a word
            complain("interrupted")
            raise typer.Exit(INTERRUPTED) from error
        return result


app = typer.Typer(
    cls=LazyGroup,
    help="Find wrong bytes and missing waits in the KV cache of LLM inference, and measure what the fixes cost.",
    epilog="kvcheck stress | kvcheck stress --mutant offload-skips-index-buffer | kvcheck explain KV102",
    add_completion=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings=CONTEXT,
)


@app.callback(invoke_without_command=True)
def _root(
    ctx: typer.Context,
    version: bool = typer.Option(False, "--version", "-V", help="Print the version and exit."),
    config: str | None = typer.Option(  # read by settings.py
        None, "--config", metavar="FILE", help="Settings, instead of [tool.kvcheck] in pyproject.toml; '' for none."
    ),
) -> None:
    if version:
        say(f"kvcheck {__version__}")
        raise typer.Exit()
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())
        raise typer.Exit(2)
    if ctx.invoked_subcommand in ALL_TYPED:
        check_settings(ctx)


def run(arguments: list[str]) -> int:
    """Run one command line; returns its exit code and never raises."""
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:], "--help"]
    try:
        code = get_command(app).main(args=[*arguments], prog_name="kvcheck", standalone_mode=False, obj=arguments)
        return code if isinstance(code, int) else 0
    except SystemExit as error:
        if COMPLETING in os.environ and isinstance(error.code, int):  # the parser's answer to a shell
            return error.code
        return _crashed(error)
    except KvcheckError as error:
        complain(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        complain("interrupted")
        return INTERRUPTED
    except Exception as error:  # the last line of defence: usage errors of the option parser, then our own faults
        if isinstance(error, OSError) and error.filename is None and error.errno in OUTPUT_ERRORS:
            _mute(sys.stdout)
            complain(f"cannot write to stdout: {error.strerror}; expected a file or terminal that takes the output")
            return 2
        if hasattr(error, "exit_code") and hasattr(error, "format_message"):
            named = " ".join(["kvcheck", *(each for each in arguments[:1] if each in COMMANDS)])
            place = getattr(getattr(error, "ctx", None), "command_path", named)
            complain(f"{_parse_message(error)}{_elsewhere(arguments)}; see {place} --help")
            return 2
        if type(error).__name__ == "Abort":
            complain("interrupted")
            return INTERRUPTED
        if hasattr(error, "exit_code"):
            return int(error.exit_code)
        if trouble := missing_library(error) or machine_trouble(error):
            complain(trouble)
            return UnknownVerdict.exit_code
        return _crashed(error)


def _crashed(error: BaseException) -> int:
    for line in traceback.format_exc().splitlines():
        complain(line)
    complain(f"kvcheck itself failed ({type(error).__name__}: {error}); please report it with the lines above")
    return InternalError.exit_code


def main() -> None:
    if 1 in _open_missing_streams():
        complain("cannot write to stdout: it is closed; expected a file or terminal that takes the output")
        sys.exit(UsageError.exit_code)
    Interrupts().install()
    code = run(sys.argv[1:])
    for number in NUMBERS:
        signal.signal(number, signal.SIG_IGN)  # the verdict stands; all that is left is to leave
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            _mute(stream)  # or the interpreter would exit with a code of its own
    sys.exit(code)


def _open_missing_streams() -> list[int]:
    """Open the null device for each closed stream: the next opened file would get its number. Returns their numbers."""
    closed = []
    for number, mode in ((0, "r"), (1, "w"), (2, "w")):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
            os.set_inheritable(number, True)
            setattr(sys, ("stdin", "stdout", "stderr")[number], os.fdopen(number, mode, closefd=False))
            closed.append(number)
    return closed


def _reader_left() -> typer.Exit:
    _mute(sys.stdout)
    return typer.Exit(PIPE_CLOSED)


def _parse_message(error: Any) -> str:
    """Return the parser's error with expected and got, and the place of a value that was not typed."""
    text = str(error.format_message()).rstrip(".")
    if (hint := OPTION_HINTS.get(getattr(error, "option_name", None) or "")) is not None:
        return f"No such option: {error.option_name}; {hint}"
    if type(error).__name__ == "MissingParameter" and error.param is not None and error.param.help:
        return f"{text}: {error.param.help.rstrip('.')}"
    rows = getattr(error.__cause__, "errors", None)
    found = WRONG_TYPE.match(text)
    if found is not None and callable(rows):
        text = f"{found['option']}: expected {found['wanted']}, got {rows()[0]['input']!r}{found['more']}"
    option = getattr(error, "param", None)
    place = None if option is None or error.ctx is None else place_of(error.ctx, option)
    return text if place is None else f"{text}; it is set by {place}"


def _elsewhere(arguments: list[str]) -> str:
    from kvcheck.commands.elsewhere import belongs_to

    command, *words = arguments or [""]
    if command not in ("stress", "probe", "live"):
        return ""
    found = (told for word in words if (told := belongs_to(command, word)) is not None)
    return "".join(f"; {told}" for told in itertools.islice(found, 1))


def _mute(stream: TextIO) -> None:
    try:
        number = stream.fileno()
    except (OSError, ValueError, AttributeError):  # not a file: nothing will be flushed at exit
        return
    os.dup2(os.open(os.devnull, os.O_WRONLY), number)


def command_named(name: str) -> Any:
    target, summary = COMMANDS[name]
    module, _, attribute = target.partition(":")
    return _command(name, getattr(importlib.import_module(module), attribute), summary)


def _placeholder(name: str, summary: str) -> Any:
    def nothing() -> None:
        """Replaced when the command is named."""

    return _command(name, nothing, summary)


def _command(name: str, function: Any, summary: str) -> Any:
    single = function  # a command with subcommands of its own
    if not isinstance(function, typer.Typer):
        single = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
        single.command(name, cls=Command, context_settings=CONTEXT)(function)
    command = get_command(single)
    command.name, command.help, command.epilog = name, summary, EXAMPLES.get(name)
    return command
