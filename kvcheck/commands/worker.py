"""Child process of `kvcheck stress --jobs`: reads tasks from stdin, writes JSON lines before and after each schedule.

With an argument it answers line by line: batches of seeds, mutants or CPU lines on CUDA, or questions about the user's
own target.

Invariants:
- An error is the last line, with its exit code, and ends the process; the parent ends the remaining cells.
- An error of kvcheck or of the machine is never a finding. A process that ends without a last line is one.
- SIGTERM unwinds the schedule in progress: temporary folders are removed.
- Code under test cannot disturb it: its prints go to stderr, and its threads end with the process.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import chain
from types import FrameType

from kvcheck.commands.own_target import OWN, Tell
from kvcheck.commands.targets import target_of
from kvcheck.commands.terminal import complain
from kvcheck.core.base.deadline import Interrupted
from kvcheck.core.base.errors import InternalError, KvcheckError, UnknownVerdict, machine_trouble, text_of
from kvcheck.core.base.record import Finding, to_plain, value_from
from kvcheck.core.run.plan import parse_line
from kvcheck.core.run.turns import Report


def main() -> int:
    signal.signal(signal.SIGTERM, _end)
    said = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(line: str) -> None:
        said.write(line + "\n")
        said.flush()

    try:
        kind = sys.argv[1] if sys.argv[1:] else None
        asked = sys.stdin.read() if kind is None else ""
        from kvcheck.core.run.workers import BEGUN, work  # a death while this is loaded is not the target's

        for line in chain((BEGUN,), work(asked, target_of, say) if kind is None else _answers(kind, say)):
            say(line)
    except (KeyboardInterrupt, BrokenPipeError):
        return 130
    except (Exception, SystemExit) as error:  # the target's own exceptions are findings already
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the parent sends it once it has this line
        report = _failure(error)
        say(report.line())
        assert report.exit_code is not None
        return report.exit_code
    return 0


def _answers(kind: str, say: Callable[[str], None]) -> Iterator[str]:
    from kvcheck.core.stress import mutant_trials
    from kvcheck.core.stress.seeds import batches

    answers: dict[str, Callable[[str], str]] = {
        OWN: partial(_answered, say=say),
        mutant_trials.MUTANTS: partial(mutant_trials.answered, target_of=target_of),
        batches.BATCHES: partial(batches.answered, target_of=target_of, say=say),
    }
    yield from map(answers[kind], sys.stdin)


def _answered(text: str, say: Callable[[str], None]) -> str:
    what, given = json.loads(text)
    answer = QUESTIONS[what](lambda row: say(json.dumps({"told": to_plain(row)})), **given)
    return json.dumps({"answer": answer})


def _identity(tell: Tell, *, name: str) -> str:
    from kvcheck.core.stress.targets.own import own_identity

    return own_identity(name)


def _stories(tell: Tell, *, findings: list[object], until: float) -> None:
    from kvcheck.core.stress.stories import stories as made

    for row in made(_findings(findings), target_of, until=until).items():
        tell(row)


def _smaller(tell: Tell, *, findings: list[object], until: float) -> None:
    from kvcheck.core.stress.smaller import smaller as found

    for row in found(_findings(findings), target_of, until=until):
        tell(row)


def _shrink(tell: Tell, *, line: str, runs: int, is_text: bool) -> str:
    from kvcheck.commands.shrink import search

    return search(parse_line(line), runs, tell, is_text=is_text).value


def _held(tell: Tell, *, line: str, device: str, times: int) -> object:
    from kvcheck.commands.held import held

    return to_plain(held(parse_line(line), device, times))


def _findings(rows: list[object]) -> list[Finding]:
    return [value_from(Finding, row, "finding") for row in rows]


QUESTIONS: Mapping[str, Callable[..., object]] = {
    "identity": _identity,
    "stories": _stories,
    "smaller": _smaller,
    "shrink": _shrink,
    "held": _held,
}


def ran(text: str) -> str:
    """Run a batch task in a process that others started; return the answer, or the error that ended it."""
    from kvcheck.core.stress.seeds.batches import answered

    try:
        return answered(text, target_of)
    except Exception as error:  # as in main: the target's own exceptions are findings already
        return _failure(error).line()


def _failure(error: BaseException) -> Report:
    trouble = machine_trouble(error)
    if trouble is not None:
        return Report(error=trouble, exit_code=UnknownVerdict.exit_code)
    if isinstance(error, KvcheckError):
        return Report(error=str(error), exit_code=error.exit_code)
    for line in traceback.format_exc().splitlines():
        complain(line)
    text = f"kvcheck itself failed in a process of its own ({type(error).__name__}: {text_of(error)}); please report it"
    return Report(error=text, exit_code=InternalError.exit_code)


def _end(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once: what unwinds must not be stopped half-way
    raise Interrupted


if __name__ == "__main__":
    code = main()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)  # the interpreter would wait for threads
