"""Documents name what exists: every path, command, option, module and link of the project's markdown."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest
import typer
from typer.main import get_command

from kvcheck.commands import main
from kvcheck.core.base.errors import KvcheckError
from kvcheck.core.run.plan import parse_line

PROJECT = Path(__file__).parents[1]
FOLDERS = ("docs", "reports/published", "kvcheck", "tests", "tools")
TOPS = ("*.md", "reports/*.md", *(f"{folder}/**/*.md" for folder in FOLDERS))
DOCUMENTS = sorted(
    path.relative_to(PROJECT).as_posix() for top in TOPS for path in PROJECT.glob(top) if path.name != "CHANGELOG.md"
)
LINES_AT_MOST = {"README.md": 150, "ARCHITECTURE.md": 120, "HACKING.md": 70, "AGENTS.md": 60}

MADE_LATER = {  # what a command makes, by its first part, or by its name: the reason
    "runs": "where kvcheck writes runs",
    "build": "where make writes",
    "envs": "environments of engines, made by make env",
    ".github": "where GitHub reads what the reader copies there",
    "reports/runs": "where make stress writes runs",
    **dict.fromkeys(("run.json", "report.html"), "a file of a run"),
    **dict.fromkeys(
        ("findings.csv", "scenarios.csv", "words.csv", "observed.csv", "situations.csv", "mutants.csv", "bench.csv"),
        "a table of a run",
    ),
    **dict.fromkeys(("results.jsonl", "edits.md", "edits.csv"), "written by tools.mutation"),
    **dict.fromkeys(("budgets.toml", "ids.json", "bisect.sh"), "what the reader writes"),
    "known_answers.json": "a file of a model folder",
    "conversation_trace.jsonl": "what the reader downloads",
}
OPTIONS_OF_OTHERS = {
    "--kv-cache-dtype": "vLLM's and SGLang's servers",
    **dict.fromkeys(("--speculative-eagle-topk", "--disable-radix-cache"), "SGLang's server"),
    "--no-enable-prefix-caching": "vLLM's server",
    "--tool": "compute-sanitizer's",
    "--planted": "of tools/gate_trials.py",
    **dict.fromkeys(("--again", "--edits", "--cpu", "--survivors"), "of tools.mutation"),
    **dict.fromkeys(("--kvcheck-seed", "--kvcheck-out"), "pytest's, by kvcheck's plugin"),
    **dict.fromkeys(("--lf", "--ff"), "pytest's"),
}
PATH = re.compile(r"(?:\.{1,2}/)*[\w.*<>{}-]+(?:/[\w.*<>{}-]+)*/?")
FILE_NAME = re.compile(r"[\w<>*-]+\.(?:py|md|toml|json|jsonl|sh|html|csv|txt|j2)")
MODULE = re.compile(r"kvcheck(?:\.\w+)+(?::\w+(?:\.\w+)*)?")
SCHEDULE = re.compile(r"[a-z][a-z-]*:(?:[a-z]+=[^\s',]+,?)*shape=[^\s']+")


def fences(text: str) -> str:
    """The lines inside ``` fences, continuation lines joined."""
    inside = re.findall(r"^```[^\n]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return "\n".join(inside).replace("\\\n", " ")


def spans(text: str) -> list[str]:
    """What stands between single backticks outside fences."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))


def commands(text: str, program: str) -> Iterator[list[str]]:
    """The words behind each call of `program`, in spans and on lines of fences."""
    for line in (*spans(text), *fences(text).splitlines()):
        code = line.partition(" #")[0]
        for called in re.findall(rf"(?:^|(?<!kvcheck model)[\s/]|-m ){program}(?= )([^|;&]*)", code):
            try:
                yield shlex.split(called)
            except ValueError:
                yield called.split()


@cache
def options_of(name: str) -> frozenset[str]:
    """Every way to write an option of a subcommand; "" is kvcheck itself."""
    group = get_command(main.app)
    context = typer.Context(group, obj=[name])
    command = group if not name else group.get_command(context, name)  # type: ignore[attr-defined]
    assert command is not None
    all_of_it = (command, *getattr(command, "commands", {}).values())  # `kvcheck model` has commands of its own
    options = (each.opts + each.secondary_opts for part in all_of_it for each in part.params)
    return frozenset({"--help", "-h"}.union(*options))


def wrong_commands(document: str, text: str) -> list[str]:
    """Subcommands and options of kvcheck that do not exist, targets that the Makefile lacks."""
    found = []
    for words in commands(text, "kvcheck"):
        name = next((word for word in words if not word.startswith("-")), "")
        name = main.SERVE if " ".join(words[:2]) == main.SERVE else name
        if not name or name != name.lower() or name.startswith("..."):
            continue
        if name not in main.COMMANDS:
            found.append(f"{document}: kvcheck has no command {name!r}")
            continue
        asked = [word.split("=")[0].rstrip(",.;:") for word in words if re.match(r"--?[a-z]", word)]
        found += [f"{document}: kvcheck {name} has no option {each}" for each in asked if each not in options_of(name)]
    targets = set(re.findall(r"^([a-z-]+):", (PROJECT / "Makefile").read_text(), re.MULTILINE))
    for words in commands(text, "make"):
        if re.fullmatch(r"[a-z][a-z-]*", words[0]) and words[0] not in targets:
            found.append(f"{document}: the Makefile has no target {words[0]!r}")
    return found


def wrong_options(document: str, text: str) -> list[str]:
    """Options that stand alone and that no command has."""
    known = frozenset({*OPTIONS_OF_OTHERS}.union(options_of(""), *(options_of(name) for name in main.COMMANDS)))
    asked = [re.split(r"[ =]", span)[0] for span in spans(text) if span.startswith("--")]
    return [f"{document}: no command has the option {each}" for each in asked if each not in known]


def wrong_modules(document: str, text: str) -> list[str]:
    """Names kvcheck.module[:attribute] that lead nowhere."""
    found = []
    for span in (*spans(text), *fences(text).split()):
        if not MODULE.fullmatch(span):
            continue
        module, _, attribute = span.partition(":")
        try:
            made: object = import_module(module)
            for part in attribute.split(".") if attribute else ():
                made = getattr(made, part)
        except (ImportError, AttributeError) as error:
            found.append(f"{document}: {span} leads nowhere ({error})")
    return found


def wrong_paths(document: str, text: str) -> list[str]:
    """Backticked paths that are not there: from the project, `kvcheck/`, `kvcheck/core/` or the document's folder."""
    called = [word for word in fences(text).split() if re.match(r"(?:tests|tools|docs|kvcheck)/", word)]
    asked = [each for each in (*spans(text), *called) if is_path(each)]
    return [f"{document}: {each} does not exist" for each in asked if not exists(document, each)]


def is_path(span: str) -> bool:
    """A path: it has a folder that the project knows, or it is a file by its ending."""
    if not PATH.fullmatch(span) or span.startswith("--"):
        return False
    first = span.split("/")[0]
    known = {each.name for top in (PROJECT, PROJECT / "kvcheck", PROJECT / "kvcheck/core") for each in top.iterdir()}
    return bool(FILE_NAME.fullmatch(span.split("/")[-1])) or ("/" in span and (span.endswith("/") or first in known))


def exists(document: str, span: str) -> bool:
    """Whether the path is there, or is made later; <name> and * stand for anything."""
    if any(span == made or span.startswith(f"{made}/") for made in MADE_LATER):
        return True
    pattern = re.sub(r"<\w+>", "*", span).rstrip("/")
    tops = (PROJECT, PROJECT / "kvcheck", PROJECT / "kvcheck/core", (PROJECT / document).parent)
    if "/" not in pattern:
        return any(
            True for top in ("kvcheck", "tests", "tools", "docs", "reports") for _ in (PROJECT / top).rglob(pattern)
        ) or any(True for _ in PROJECT.glob(pattern))
    if pattern.startswith("."):
        return ((PROJECT / document).parent / pattern).exists()
    return any(any(True for _ in top.glob(pattern)) for top in tops)


def wrong_schedules(document: str, text: str) -> list[str]:
    """Schedule lines that kvcheck would refuse."""
    found = []
    for line in (*spans(text), *fences(text).splitlines()):
        for schedule in SCHEDULE.findall(line):
            if schedule.endswith("..."):  # shortened to fit the page
                continue
            try:
                parse_line(schedule)
            except KvcheckError as error:
                found.append(f"{document}: {schedule} is refused: {error}")
    return found


def wrong_links(document: str, text: str) -> list[str]:
    """Relative links, and anchors in markdown, that lead nowhere."""
    found = []
    prose = re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (PROJECT / document).parent / name if name else PROJECT / document
        if not path.exists():
            found.append(f"{document}: the link to {target} leads nowhere")
        elif anchor and path.suffix == ".md" and anchor not in anchors(path.read_text() if name else text):
            found.append(f"{document}: {target}: no heading has this anchor")
    return found


def anchors(text: str) -> set[str]:
    """Anchors that a page of markdown has: its headings, as GitHub spells them."""
    heads = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


CHECKS: dict[str, Callable[[str, str], list[str]]] = {
    "commands": wrong_commands,
    "options": wrong_options,
    "modules": wrong_modules,
    "paths": wrong_paths,
    "schedules": wrong_schedules,
    "links": wrong_links,
}


@pytest.mark.parametrize("check", CHECKS)
def test_documents_name_what_exists(check: str) -> None:
    told = [each for name in DOCUMENTS for each in CHECKS[check](name, (PROJECT / name).read_text("utf-8"))]
    assert len(DOCUMENTS) > 40 and not told, "\n".join(told)


@pytest.mark.parametrize("document", LINES_AT_MOST)
def test_a_page_that_is_read_first_is_short(document: str) -> None:
    lines = len((PROJECT / document).read_text("utf-8").splitlines())
    assert lines <= LINES_AT_MOST[document], f"{document} has {lines} lines, expected {LINES_AT_MOST[document]} at most"


@pytest.mark.parametrize("row", [*MADE_LATER, *OPTIONS_OF_OTHERS])
def test_an_exception_is_needed(row: str) -> None:
    assert any(f"`{row}" in (PROJECT / name).read_text("utf-8") for name in DOCUMENTS), "no document names it"


@pytest.mark.parametrize(
    ("check", "text", "complaint"),
    [
        ("commands", "Run `kvcheck stres --seed 1`.", "no command 'stres'"),
        ("commands", "Run `kvcheck stress --sed 1`.", "kvcheck stress has no option --sed"),
        ("commands", "Run `make tset`.", "no target 'tset'"),
        ("options", "With `--sed` it", "the option --sed"),
        ("modules", "See `kvcheck.core.nowhere`.", "leads nowhere"),
        ("paths", "See `kvcheck/nowhere.py`.", "kvcheck/nowhere.py does not exist"),
        ("paths", "A row in `nowhere/<name>.py`.", "does not exist"),
        ("paths", "See `no_such_file.py`.", "does not exist"),
        ("paths", "```\npytest tests/no_such_test.py -q\n```\n", "does not exist"),
        ("schedules", "`reports/runs/`, `kvcheck replay hicache:shape=llama-3-tiny,sed=1`", "is refused"),
        ("links", "[this](nowhere.md)", "leads nowhere"),
        ("links", "# A head\n[this](#another-head)", "no heading"),
    ],
)
def test_what_does_not_exist_is_told(check: str, text: str, complaint: str) -> None:
    (told,) = CHECKS[check]("README.md", text)
    assert complaint in told


@pytest.mark.parametrize("check", CHECKS)
def test_what_exists_is_not_told(check: str) -> None:
    text = (
        "# A head\n`kvcheck stress --seed 1`, `kvcheck RUN`, `make test`, `--on-inconclusive warn`, "
        "`kvcheck.commands.main:run`, `tests/test_documents.py`, `commands/<verb>.py`, `run.json`, `a/b`, `OK`, "
        "`reports/runs/`, `kvcheck replay hicache:shape=llama-3-tiny,seed=1,schedule=0`, [here](#a-head), [web](https://example.org)\n"
    )
    assert CHECKS[check]("README.md", text) == []


def test_the_worked_example_of_a_mutant_applies() -> None:
    (diff,) = re.findall(r"^```diff\n(.*?)^```", (PROJECT / "HACKING.md").read_text(), re.MULTILINE | re.DOTALL)
    head, *hunks = re.split(r"^@@.*@@\n", diff, flags=re.MULTILINE)
    (name,) = re.findall(r"^\+\+\+ b/(.*)$", head, re.MULTILINE)
    source = (PROJECT / name).read_text()
    for hunk in hunks:
        before = "".join(f"{line[1:]}\n" for line in hunk.splitlines() if not line.startswith("+"))
        assert source.count(before) == 1, before
    assert "shows=" in hunks[-1]
