r"""JUnit XML, read by Jenkins and GitLab: a test case for each cell, with the evidence in its output.

Invariants:
- UNKNOWN is an <error>, since CI shows a skipped test as harmless. A case accepted by a baseline is <skipped>.
- Elements and attributes are those of the common schema (junit-10.xsd): a case has at most one failure or error.
- A character that XML 1.0 forbids becomes its \x.. or \u.... escape.
"""

from __future__ import annotations

import re
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from kvcheck.core.base.record import Verdict
from kvcheck.core.report.ci.outcome import FAILS, Case, CiOutcome, writer
from kvcheck.core.report.ci.trouble import CiTrouble, TroubleKind
from kvcheck.core.report.markdown import printable
from kvcheck.core.report.wording import clip

MESSAGE_CHARS = 500
ELEMENTS = {Verdict.FAIL: "failure", Verdict.UNKNOWN: "error"}
MOMENT = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d")


def render(outcome: CiOutcome) -> str:
    verdicts = [case.verdict for case in outcome.cases]
    time = f"{max(0.0, outcome.duration_s):.3f}"
    counts = {
        "tests": str(len(verdicts)),
        "failures": str(verdicts.count(Verdict.FAIL)),
        "errors": str(verdicts.count(Verdict.UNKNOWN)),
    }
    root = Element("testsuites", _attributes({"name": outcome.name, "time": time, **counts}))
    skipped = {"skipped": str(sum(map(_is_skipped, outcome.cases)))}
    moment = MOMENT.match(outcome.started_at or "")
    suite = {"name": outcome.name, **counts, **skipped, "time": time, **({"timestamp": moment[0]} if moment else {})}
    parent = SubElement(root, "testsuite", _attributes(suite))
    properties = SubElement(parent, "properties")
    # Evidence of each case stands here: the schema has properties only for a suite.
    each = {f"{case.id}: evidence": "; ".join(case.details) for case in outcome.cases if case.details}
    for name, value in {**outcome.facts, **each}.items():
        SubElement(properties, "property", _attributes({"name": name, "value": value}))
    for case in outcome.cases:
        _add_case(parent, case)
    if outcome.warnings:
        _add(parent, "system-err", "\n".join(outcome.warnings))
    indent(root, " ")
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{tostring(root, encoding="unicode")}\n'


def _add_case(parent: Element, case: Case) -> None:
    named = {"name": case.id, "classname": case.group, "time": f"{max(0.0, case.duration_s):.3f}"}
    element = SubElement(parent, "testcase", _attributes(named))
    fails = {Verdict.FAIL: FAILS, Verdict.UNKNOWN: (TroubleKind.GAP,)}.get(case.verdict, ())
    first = [each for each in case.troubles if each.kind in fails]
    others = [each for each in case.troubles if each.kind not in fails]
    if first:
        more = f" (and {len(first) - 1} more)" if len(first) > 1 else ""
        message = clip(f"{first[0].head}: {first[0].message}", MESSAGE_CHARS) + more
        _add(element, ELEMENTS[case.verdict], _told(first), type=first[0].code or first[0].title, message=message)
    elif case.let_pass is not None:
        _add(element, "skipped", "", message=clip(case.let_pass, MESSAGE_CHARS))
    if output := "\n".join((*case.details, *((_told(others),) if others else ()))):
        _add(element, "system-out", output)


def _add(parent: Element, tag: str, text: str, **values: str) -> None:
    SubElement(parent, tag, _attributes(values)).text = printable(text, keep="\n\t")


def _is_skipped(case: Case) -> bool:
    return case.let_pass is not None and case.verdict is Verdict.PASS


def _told(troubles: list[CiTrouble]) -> str:
    return "\n\n".join("\n".join((f"{each.head}: {each.where}", *each.lines)) for each in troubles)


def _attributes(values: dict[str, str]) -> dict[str, str]:
    return {name: printable(value) for name, value in values.items()}


write = writer("junit", render)
