"""SARIF 2.1.0: a result for each cause in each cell that shows it, and rules from the table of codes.

Invariants:
- A finding has no file, so its location is logical: the cell. GitHub's code scanning shows only results with files.
- UNKNOWN is a result of kind "open", the term of SARIF, and a notification of the invocation.
"""

from __future__ import annotations

import json

from kvcheck.core.base.codes import CODES
from kvcheck.core.report.ci.outcome import RUN, CiOutcome, writer
from kvcheck.core.report.ci.trouble import CiTrouble, TroubleKind
from kvcheck.core.report.markdown import printable

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
KINDS = {
    TroubleKind.FINDING: ("fail", "error"),
    TroubleKind.SLOWER: ("fail", "error"),
    TroubleKind.GAP: ("open", "none"),
    TroubleKind.CONDITIONAL: ("review", "none"),
}
"""(kind, level) of a result: a level other than none belongs to the kind "fail" alone."""


def render(outcome: CiOutcome) -> str:
    troubles = outcome.troubles
    rules = list(dict.fromkeys(map(_rule_id, troubles)))
    titles = {_rule_id(each): each.title for each in troubles}
    gaps = [each for each in troubles if each.kind is TroubleKind.GAP]
    run = {
        "tool": {
            "driver": {
                "name": "kvcheck",
                "version": outcome.version,
                "rules": [_rule(name, titles[name]) for name in rules],
            }
        },
        "invocations": [
            {
                "executionSuccessful": outcome.is_complete,
                "exitCode": outcome.exit_code,
                "toolExecutionNotifications": [
                    *({"level": "error", "message": {"text": _text(each.message)}} for each in gaps),
                    *({"level": "warning", "message": {"text": _text(each)}} for each in outcome.warnings),
                ],
            }
        ],
        "columnKind": "unicodeCodePoints",
        "properties": {name: _text(value) for name, value in outcome.facts.items()},
        "results": [
            _result(each, cell, rules.index(_rule_id(each))) for each in troubles for cell in each.cells or (RUN,)
        ],
    }
    return json.dumps({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}, indent=1, ensure_ascii=True) + "\n"


def _rule_id(trouble: CiTrouble) -> str:
    return _text(trouble.code or trouble.title.replace(" ", "-"))


def _rule(name: str, title: str) -> dict[str, object]:
    known = CODES.get(name)
    rule: dict[str, object] = {"id": name, "shortDescription": {"text": _text(title)}}
    if known is not None:
        rule["name"] = known.title
        rule["fullDescription"] = {"text": known.meaning}
        rule["help"] = {"text": f"{known.meaning}\nUsual cause: {known.usual_cause}\nSeen in: {known.seen_in}"}
    return rule


def _result(trouble: CiTrouble, cell: str, rule: int) -> dict[str, object]:
    kind, level = KINDS[trouble.kind]
    shape = cell.rpartition("/")[2]
    return {
        "ruleId": _rule_id(trouble),
        "ruleIndex": rule,
        "kind": kind,
        "level": level,
        "message": {"text": "\n".join(_text(line) for line in trouble.lines)},
        "locations": [
            {"logicalLocations": [{"name": _text(shape), "fullyQualifiedName": _text(cell), "kind": "module"}]}
        ],
        "partialFingerprints": {"kvcheck/v1": trouble.fingerprint(cell)},
        "properties": {"place": _text(trouble.place), "replay": _text(trouble.replay)},
    }


def _text(text: str) -> str:
    return printable(text) or " "


write = writer("sarif", render)
