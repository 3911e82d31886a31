r"""JUnit XML, read by Jenkins and GitLab: a test case for each cell, with the evidence in its output.

Invariants:
- UNKNOWN is an <error>, since CI shows a skipped test as harmless. A case accepted by a baseline is <skipped>.
- Elements and attributes are those of the common schema (junit-10.xsd): a case has at most one failure or error.
- A character that XML 1.0 forbids becomes its \x.. or \u.... escape.
"""

from __future__ import annotations

import re
from pathlib import Path
from xml.sax.saxutils import escape, quoteattr

from kvcheck.core.base.record import RunRecord, Verdict
from kvcheck.core.report.ci.outcome import Case, CiOutcome, of_gate, of_record
from kvcheck.core.report.ci.trouble import CiTrouble, TroubleKind
from kvcheck.core.report.gate.result import GateResult
from kvcheck.core.report.markdown import printable
from kvcheck.core.report.wording import clip
from kvcheck.core.run.store import write_text

FILE = "junit.xml"
MESSAGE_CHARS = 500
ELEMENTS = {Verdict.FAIL: "failure", Verdict.UNKNOWN: "error"}
MOMENT = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d")


def write(record: RunRecord, path: Path) -> None:
    write_text(path / FILE if path.is_dir() else path, render(of_record(record)))


def write_gate(result: GateResult, path: Path) -> None:
    write_text(path, render(of_gate(result)))


def render(outcome: CiOutcome) -> str:
    verdicts = [case.verdict for case in outcome.cases]
    counts = {
        "tests": str(len(verdicts)),
        "failures": str(verdicts.count(Verdict.FAIL)),
        "errors": str(verdicts.count(Verdict.UNKNOWN)),
    }
    skipped = sum(_is_skipped(case) for case in outcome.cases)
    time = f"{max(0.0, outcome.duration_s):.3f}"
    moment = MOMENT.match(outcome.started_at or "")
    suite = {"name": outcome.name, **counts, "skipped": str(skipped), "time": time}
    if moment is not None:
        suite["timestamp"] = moment[0]
    lines = [
        '<?xml version="1.0" encoding="UTF-8"?>',
        f"<testsuites{_attributes({'name': outcome.name, 'time': time, **counts})}>",
        f" <testsuite{_attributes(suite)}>",
        "  <properties>",
        *(f"   <property{_attributes({'name': name, 'value': value})}/>" for name, value in _properties(outcome)),
        "  </properties>",
        *(line for case in outcome.cases for line in _case(case)),
        *([f"  <system-err>{_text(chr(10).join(outcome.warnings))}</system-err>"] if outcome.warnings else []),
        " </testsuite>",
        "</testsuites>",
    ]
    return "\n".join(lines) + "\n"


def _properties(outcome: CiOutcome) -> list[tuple[str, str]]:
    """Facts of the run and evidence of each case: the schema has properties only for a suite."""
    each = [(f"{case.id}: evidence", "; ".join(case.details)) for case in outcome.cases if case.details]
    return [*outcome.facts.items(), *each]


def _case(case: Case) -> list[str]:
    named = {"name": case.id, "classname": case.group, "time": f"{max(0.0, case.duration_s):.3f}"}
    fails = {Verdict.FAIL: (TroubleKind.FINDING, TroubleKind.SLOWER), Verdict.UNKNOWN: (TroubleKind.GAP,)}.get(
        case.verdict, ()
    )
    first = [each for each in case.troubles if each.kind in fails]
    others = [each for each in case.troubles if each.kind not in fails]
    lines = [f"  <testcase{_attributes(named)}>"]
    if first:
        more = f" (and {len(first) - 1} more)" if len(first) > 1 else ""
        message = clip(f"{first[0].head}: {first[0].message}", MESSAGE_CHARS) + more
        about = _attributes({"type": first[0].code or first[0].title, "message": message})
        element = ELEMENTS[case.verdict]
        lines.append(f"   <{element}{about}>{_text(_told(first))}</{element}>")
    elif case.let_pass is not None:
        lines.append(f"   <skipped{_attributes({'message': clip(case.let_pass, MESSAGE_CHARS)})}/>")
    output = "\n".join((*case.details, *((_told(others),) if others else ())))
    lines += [f"   <system-out>{_text(output)}</system-out>"] if output else []
    return [*lines, "  </testcase>"]


def _is_skipped(case: Case) -> bool:
    return case.let_pass is not None and case.verdict is Verdict.PASS


def _told(troubles: list[CiTrouble]) -> str:
    return "\n\n".join("\n".join((f"{each.head}: {each.where}", *each.lines)) for each in troubles)


def _attributes(values: dict[str, str]) -> str:
    return "".join(f" {name}={quoteattr(printable(value))}" for name, value in values.items())


def _text(text: str) -> str:
    return escape(printable(text, keep="\n\t"))
