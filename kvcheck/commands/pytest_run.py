"""A run of pytest under --kvcheck: seeds of tests, findings as failures, and the record of the run.

Invariants:
- A test that uses kvcheck and judges nothing fails.
- A seed is part of a test's id: pytest's own --lf and --ff know the failed ones.
- One process writes the record, even if pytest has several.
"""

from __future__ import annotations

import re
import shlex
import shutil
import sys
import textwrap
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import pytest

from kvcheck.commands.pytest_asks import JUDGED, MARKER, SEED, asks
from kvcheck.core.base.causes import NUMBERS
from kvcheck.core.base.codes import CODES
from kvcheck.core.base.errors import KvcheckError, UsageError
from kvcheck.core.base.record import Coverage, Evidence, Finding, ScenarioResult, to_plain, value_from
from kvcheck.core.run.cell import decided
from kvcheck.testing import IntegrityError, NotJudged, check_round_trip, watch
from kvcheck.testing.plan import Trial, trial

if TYPE_CHECKING:
    from kvcheck.core.run.session import Session

SCENARIO = "own-code"
TRIAL = pytest.StashKey[Trial]()
REASON_AT_MOST = 300
MOST_LEFT = 8
"""Lines about untried settings, each once for all tests."""


class PoolChecks:
    round_trip = staticmethod(check_round_trip)
    watch = staticmethod(watch)


@dataclass(frozen=True, slots=True, kw_only=True)
class TestRunOutcome:
    """One run of a test. test: its node id. cell: that without the seed. reason: why it is no evidence, or None."""

    test: str
    cell: str
    seed: int
    evidence: Evidence
    findings: tuple[Finding, ...]
    reason: str | None
    duration_s: float
    not_tried: tuple[str, ...] = ()


@dataclass(slots=True)
class CheckedRun:
    """The hooks of one run, registered by --kvcheck."""

    config: pytest.Config
    planned: dict[str, list[int]] = field(default_factory=dict)
    outcomes: list[TestRunOutcome] = field(default_factory=list)
    order: dict[str, int] = field(default_factory=dict)
    """Place of each test by its node id. Processes of xdist end in any order; a record has its tests in this one."""
    whole: list[tuple[TestRunOutcome, frozenset[object]]] = field(default_factory=list)
    """Failures that are printed whole, each with its findings as `_same` compares them."""
    session: Session | None = None

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        marker = metafunc.definition.get_closest_marker(MARKER)
        if marker is None:
            return
        count = marker.args[0] if len(marker.args) == 1 and not marker.kwargs else None
        if not isinstance(count, int) or count < 1:
            raise pytest.UsageError(
                f"{metafunc.definition.nodeid}: expected @pytest.mark.{MARKER}(N) with N of 1 or more"
            )
        first: int = self.config.getoption("kvcheck_seed")
        seeds = range(first, first + count)
        if SEED not in metafunc.fixturenames:
            metafunc.fixturenames.append(SEED)
        metafunc.parametrize(SEED, seeds, indirect=True, ids=[f"seed{seed}" for seed in seeds])

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        out: Path | None = self.config.getoption("kvcheck_out")
        if out is None or hasattr(self.config, "workerinput"):
            return
        from kvcheck.commands.terminal import Terminal
        from kvcheck.core.run.session import Session

        again = shlex.join(["pytest", *map(str, self.config.invocation_params.args)])
        try:
            self.session = Session(
                argv=[*sys.argv], repro=again, seed=None, plan={"cells": []}, out=out, teller=Terminal(is_quiet=True)
            )
        except UsageError as error:
            raise pytest.UsageError(str(error).replace("--out", "--kvcheck-out")) from error

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        self.order = {name: place for place, name in enumerate(ids)}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.order = {item.nodeid: place for place, item in enumerate(session.items)}
        for item in session.items:
            if asks(item):
                self.planned.setdefault(self.cell(item), []).append(self.seed(item))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        with trial(self.seed(item)) as made:
            item.stash[TRIAL] = made
            result = yield
        if asks(item) and not made.judged:
            raise NotJudged("the test asks for kvcheck and judged nothing: call a check of kvcheck.testing in it")
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        error = None if call.excinfo is None else call.excinfo.value
        if call.excinfo is not None and isinstance(error, (IntegrityError, NotJudged)):
            shown = call.excinfo.getrepr(style="value")
            if shown.reprcrash is not None:
                shown.reprcrash.message = str(error).partition("\n")[0]  # the line of pytest's summary
            for entry in shown.reprtraceback.reprentries:
                entry.lines = [part for line in entry.lines for part in _folded(line)]
            shown.reprtraceback.extraline = f"\n{_place(item, call.excinfo)}: {type(error).__name__}"
            report.longrepr = shown
            if item.config.getoption("usepdb", False):  # a debugger stops in the last frame, which is the user's then
                call.excinfo.traceback.filter(call.excinfo)[-1]._rawentry.tb_next = None
        if call.when == "call" or (call.when == "setup" and error is not None):
            made = item.stash.get(TRIAL, None)
            if asks(item) or isinstance(error, (IntegrityError, NotJudged)) or (made is not None and made.judged):
                setattr(report, JUDGED, to_plain(self._outcome(item, error, made or Trial(), call.duration)))
        return report

    @pytest.hookimpl(trylast=True)  # after junitxml and the like, which keep the whole text
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not hasattr(report, JUDGED):
            return
        outcome = value_from(TestRunOutcome, getattr(report, JUDGED), JUDGED)
        self.outcomes.append(outcome)
        if not report.failed or not outcome.findings:
            return
        causes = _same(each for each in outcome.findings if each.cause is None)
        first = next((each.seed for each, seen in self.whole if each.cell == outcome.cell and causes <= seen), None)
        if first is None:
            self.whole.append((outcome, _same(outcome.findings)))
        else:
            cause = outcome.findings[0]
            called = (cause.minimal or {}).get("called")
            report.longrepr = f"{cause.code} {CODES[cause.code].title}, as with seed{first}"
            report.longrepr += f": {called}" if called else ""

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(self.config, "workerinput"):
            return
        self.outcomes.sort(key=lambda each: self.order.get(each.test, len(self.order)))
        if self.session is not None:
            self.session.results, self.session.plan = self._results(), {"cells": self._lines()}
            for outcome in self.outcomes:
                self.session.keep(outcome.findings)
            is_whole = session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
            self.session.save(complete=is_whole, exit_code=None if is_whole else 130)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        from kvcheck.core.base.nouns import counted

        words = sum(sum(each.evidence.words_verified.values()) for each in self.outcomes)
        cells = len({each.cell for each in self.outcomes})
        counts = f"{counted(cells, 'test')}, {counted(len(self.outcomes), 'schedule')}"
        told = f"kvcheck: {counts}, {counted(words, 'word')} judged"
        terminalreporter.write_line(told)
        left = [*dict.fromkeys(text for each in self.outcomes for text in each.not_tried)]
        for text in left[:MOST_LEFT]:
            terminalreporter.write_line(f"kvcheck: not tried: {text}")
        if len(left) > MOST_LEFT:
            terminalreporter.write_line(
                f"kvcheck: not tried: {len(left) - MOST_LEFT} more, in the results of the calls"
            )
        if self.session is not None:
            folder = self.session.folder
            saved = f"kvcheck: record {folder / 'run.json'}; next: kvcheck report {folder}"
            terminalreporter.write_line(saved if self.session.is_saved else f"kvcheck: no record in {folder}")

    def seed(self, item: pytest.Item) -> int:
        chosen: int = _parameters(item).get(SEED, self.config.getoption("kvcheck_seed"))
        return chosen

    def cell(self, item: pytest.Item) -> str:
        start, bracket, rest = item.nodeid.partition("[")
        if SEED not in _parameters(item) or not bracket:
            return item.nodeid
        ids, named = rest.removesuffix("]"), f"seed{self.seed(item)}"
        # Ids may hold dashes themselves, as those of negative numbers do: nothing but the seed and one dash is cut.
        kept, count = re.subn(rf"^{named}-|-{named}(?=-|$)|^{named}$", "", ids, count=1)
        return item.nodeid if not count else f"{start}[{kept}]" if kept else start

    def _outcome(
        self, item: pytest.Item, error: BaseException | None, made: Trial, duration_s: float
    ) -> TestRunOutcome:
        cell = self.cell(item)
        findings = error.findings if isinstance(error, IntegrityError) else ()
        reason = None
        if error is not None and not findings:
            skipped = isinstance(error, pytest.skip.Exception)
            kind = "skipped" if skipped else "not judged" if isinstance(error, KvcheckError) else type(error).__name__
            reason = f"{kind}: {error}"[:REASON_AT_MOST]
        again = shlex.join(["pytest", "--kvcheck", item.nodeid])
        marker = item.get_closest_marker(MARKER)
        if self.seed(item) not in range(1 if marker is None else marker.args[0]):
            again += f" --kvcheck-seed {self.seed(item)}"
        return TestRunOutcome(
            test=item.nodeid,
            cell=cell,
            seed=self.seed(item),
            evidence=made.evidence(),
            findings=tuple(replace(each, scenario=SCENARIO, shape=cell, replay=again) for each in findings),
            reason=reason,
            duration_s=round(duration_s, 3),
            not_tried=tuple(text for each in made.judged for text in each.not_tried),
        )

    def _results(self) -> list[ScenarioResult]:
        cells = dict.fromkeys([*self.planned, *(each.cell for each in self.outcomes)])
        return [self._result(cell, [each for each in self.outcomes if each.cell == cell]) for cell in cells]

    def _result(self, cell: str, runs: list[TestRunOutcome]) -> ScenarioResult:
        wanted = self.planned.get(cell) or [each.seed for each in runs]
        ran = {each.seed for each in runs}
        left = [seed for seed in wanted if seed not in ran]
        evidence = Evidence(schedules=0)
        for each in runs:
            evidence = evidence.plus(each.evidence)
        unrun = f"did not run with seed {', '.join(map(str, left))}" if left else None
        reason = next((each.reason for each in runs if each.reason), unrun)
        if conditions := [found.condition for each in runs for found in each.findings]:
            reason = None if None in conditions else f"only if {conditions[0]}"
        verdict, code = decided(is_failed=bool(conditions), reason=reason)
        return ScenarioResult(
            id=f"{SCENARIO}/{cell}",
            shape=cell,
            verdict=verdict,
            code=code,
            reason=reason,
            schedules=evidence.schedules,
            duration_s=round(sum(each.duration_s for each in runs), 3),
            evidence=evidence,
            coverage=Coverage(
                wanted=len(wanted),
                floor=len(wanted),
                tried=tuple(f"seed:{seed}" for seed in wanted if seed in ran),
                not_tried=tuple(f"seed:{seed}" for seed in left),
            ),
        )

    def _lines(self) -> list[str]:
        cells = dict.fromkeys([*self.planned, *(each.cell for each in self.outcomes)])
        return [f"{SCENARIO}:shape={quote(cell, safe='/:[]')}" for cell in cells]


def _same(findings: Iterable[Finding]) -> frozenset[object]:
    """Return codes and messages without their numbers, which are equal for one bug under several seeds."""
    return frozenset((each.code, NUMBERS.sub("#", each.message)) for each in findings)


def _place(item: pytest.Item, error: pytest.ExceptionInfo[BaseException]) -> str:
    """Return file and line of the test: the call that failed, or the start of a test that has not made one."""
    lines = [each.lineno for each in error.traceback if each.path == item.path]
    return f"{item.location[0]}:{(lines[-1] if lines else item.location[1] or 0) + 1}"


def _folded(line: str) -> list[str]:
    """Return parts of a line that fit the terminal. Those of a finding stand below its text."""
    margin, width = " " * 10 * line.startswith("  "), shutil.get_terminal_size().columns
    return textwrap.wrap(line, width, subsequent_indent=margin, break_long_words=False, break_on_hyphens=False) or [
        line
    ]


def _parameters(item: pytest.Item) -> dict[str, Any]:
    callspec = getattr(item, "callspec", None)
    found: dict[str, Any] = {} if callspec is None else callspec.params
    return found
