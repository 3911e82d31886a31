"""What CI systems accept of the files they read, written by hand: elements, attributes, types and limits."""

from __future__ import annotations

import json
import re
from typing import Any
from xml.etree import ElementTree

COUNT = re.compile(r"\d+")
SECONDS = re.compile(r"\d+(\.\d{1,3})?")
MOMENT = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d")
CTRF_STATUSES = ("passed", "failed", "pending", "skipped", "other")
ANY = re.compile(r".*", re.DOTALL)
JUNIT: dict[str, tuple[dict[str, re.Pattern[str]], set[str], set[str]]] = {
    # element: (attributes, those that have to be there, children)
    "testsuites": (
        {"name": ANY, "time": SECONDS, "tests": COUNT, "failures": COUNT, "errors": COUNT},
        set(),
        {"testsuite"},
    ),
    "testsuite": (
        {"name": ANY, "tests": COUNT, "failures": COUNT, "errors": COUNT, "skipped": COUNT, "time": SECONDS}
        | {"timestamp": MOMENT},
        {"name", "tests", "failures", "errors"},
        {"properties", "testcase", "system-out", "system-err"},
    ),
    "properties": ({}, set(), {"property"}),
    "property": ({"name": ANY, "value": ANY}, {"name", "value"}, set()),
    "testcase": (
        {"name": ANY, "classname": ANY, "time": SECONDS},
        {"name", "classname", "time"},
        {"skipped", "error", "failure", "system-out", "system-err"},
    ),
    "skipped": ({"message": ANY}, {"message"}, set()),
    **{name: ({"type": ANY, "message": ANY}, {"type", "message"}, set()) for name in ("failure", "error")},
    **{name: ({}, set(), set()) for name in ("system-out", "system-err")},
}


def ctrf(text: str) -> list[dict[str, Any]]:
    """The tests of a CTRF file, as its schema 0.0 has them."""
    document = json.loads(text)
    assert document["reportFormat"] == "CTRF" and re.fullmatch(r"\d+\.\d+\.\d+", document["specVersion"])
    results = document["results"]
    tests: list[dict[str, Any]] = results["tests"]
    counts = {status: sum(test["status"] == status for test in tests) for status in CTRF_STATUSES}
    summary = {name: results["summary"][name] for name in ("tests", *CTRF_STATUSES)}
    assert summary == {"tests": len(tests), **counts} and results["tool"]["name"] == "kvcheck"
    assert 0 <= results["summary"]["start"] <= results["summary"]["stop"]
    for test in tests:
        assert isinstance(test["duration"], int) and test["name"] and test["suite"]
    return tests


def junit(text: str) -> ElementTree.Element:
    """The <testsuite> of a JUnit file that Jenkins and GitLab take."""
    root = ElementTree.fromstring(text.encode("utf-8"))
    assert root.tag == "testsuites"
    for element in root.iter():
        attributes, needed, children = JUNIT[element.tag]
        assert needed <= element.attrib.keys() <= attributes.keys(), (element.tag, element.attrib)
        for name, value in element.attrib.items():
            assert attributes[name].fullmatch(value), (element.tag, name, value)
        assert {child.tag for child in element} <= children, element.tag
    (suite,) = root
    assert next(iter(suite)).tag == "properties", "properties come first"
    cases = suite.findall("testcase")
    assert cases, "a suite without a case looks like a pass"
    names = [(case.get("classname"), case.get("name")) for case in cases]
    assert len(set(names)) == len(names), "GitLab takes two cases of one name for one"
    for case in cases:
        assert len([child for child in case if child.tag in ("failure", "error", "skipped")]) <= 1, "GitLab takes one"
    for name, tag in (("failures", "failure"), ("errors", "error")):
        found = sum(case.find(tag) is not None for case in cases)
        assert suite.get(name) == root.get(name) == str(found)
    assert suite.get("skipped", "0") == str(len(suite.findall("testcase/skipped")))
    assert suite.get("tests") == root.get("tests") == str(len(cases))
    return suite


COMMAND = re.compile(r"::(error|warning|notice) title=([^:,\r\n]*)::([^\r\n]*)")


def github(text: str) -> list[tuple[str, str, str]]:
    found = []
    for line in text.splitlines():
        assert "##[" not in line.partition("::")[0], "the old form of a command works anywhere in a line"
        if not line.lstrip().startswith("::"):
            continue
        command = COMMAND.fullmatch(line)
        assert command is not None, line
        assert not re.search(r"%(?!25|0A|0D|3A|2C)", command[2] + command[3]), "a stray %"
        level, title, data = (re.sub("%(0D|0A|3A|2C|25)", _decoded, part) for part in command.groups())
        found.append((level, title, data))
    for level in ("error", "warning", "notice"):
        assert sum(each[0] == level for each in found) <= 10, "GitHub drops the eleventh"
    return found


def _decoded(found: re.Match[str]) -> str:
    return chr(int(found[1], 16))


def gitlab(text: str) -> list[dict[str, Any]]:
    assert text.isascii()
    entries: list[dict[str, Any]] = json.loads(text)
    assert isinstance(entries, list)
    for entry in entries:
        assert entry.keys() == {"description", "check_name", "fingerprint", "severity", "location"}
        assert entry["severity"] in ("info", "minor", "major", "critical", "blocker")
        assert entry["description"] and entry["check_name"] and re.fullmatch("[0-9a-f]{64}", entry["fingerprint"])
        path, begin = entry["location"]["path"], entry["location"]["lines"]["begin"]
        assert re.fullmatch(r"[\w.-]+(/[\w.-]+)*", path, re.ASCII) and begin == 1
        assert not {".", ".."} & {*path.split("/")}, "a path out of the repository"
    prints = [entry["fingerprint"] for entry in entries]
    assert len(set(prints)) == len(prints)
    return entries


KINDS = ("notApplicable", "pass", "fail", "review", "open", "informational")


def sarif(text: str) -> dict[str, Any]:
    whole = json.loads(text)
    assert whole.keys() == {"$schema", "version", "runs"} and whole["version"] == "2.1.0"
    (run,) = whole["runs"]
    driver = run["tool"]["driver"]
    rules = driver["rules"]
    assert driver["name"] == "kvcheck" and len({rule["id"] for rule in rules}) == len(rules)
    assert all(rule["shortDescription"]["text"] for rule in rules)
    for result in run["results"]:
        assert rules[result["ruleIndex"]]["id"] == result["ruleId"]
        assert result["kind"] in KINDS and result["message"]["text"]
        assert result["level"] in ("none", "note", "warning", "error")
        assert result["kind"] == "fail" or result["level"] == "none", "a level is for fail alone"
        ((place,),) = [location["logicalLocations"] for location in result["locations"]]
        assert place["fullyQualifiedName"] and result["partialFingerprints"]
    (invocation,) = run["invocations"]
    assert isinstance(invocation["executionSuccessful"], bool) and isinstance(invocation["exitCode"], int)
    found: dict[str, Any] = run
    return found
