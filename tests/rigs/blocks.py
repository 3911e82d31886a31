"""Fenced blocks of the documents, and the command lines in them, as kvcheck's own parser reads them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from kvcheck.commands import main
from kvcheck.commands.main import COMMANDS, command_named
from kvcheck.core.base.errors import KvcheckError
from kvcheck.core.bench import CASES
from kvcheck.core.live.scenarios import LIVE_SCENARIOS
from kvcheck.core.probes.installed import ENGINES
from kvcheck.core.stress.scenarios import SCENARIOS
from kvcheck.core.stress.targets.mutants import MUTANTS
from kvcheck.core.stress.workload.shapes import SHAPES

PROJECT = Path(__file__).parents[2]
FENCE = re.compile(r"^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
ASSIGNED = re.compile(r"(\w+=\S*\s+)*")
TO_FILL_IN = re.compile(r"\$?[A-Z][A-Z_]*")
FILLED = "1"
"""Stands for what the reader fills in: a text and a number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One fenced block. language: what stands behind the opening fence, "" for nothing. line: of the opening fence."""

    document: str
    line: int
    language: str
    text: str

    @property
    def first(self) -> str:
        return next((line.strip() for line in self.text.splitlines() if line.strip()), "")

    @property
    def commands(self) -> tuple[str, ...]:
        """Its lines as a shell takes them, without comments and empty ones."""
        lines = (line.partition(" #")[0].strip() for line in self.text.replace("\\\n", " ").splitlines())
        return tuple(re.sub(r"\s+", " ", line) for line in lines if line and not line.startswith("#"))


@cache
def text_of(document: str) -> str:
    return (PROJECT / document).read_text(encoding="utf-8")


def blocks_of(document: str, text: str) -> list[Block]:
    found = [
        Block(
            document=document, line=text.count("\n", 0, each.start()) + 1, language=each["language"], text=each["text"]
        )
        for each in FENCE.finditer(text)
    ]
    fences = len(re.findall(r"^\s*```", text, re.MULTILINE))
    assert fences == 2 * len(found), f"{document}: {fences} fences, {len(found)} blocks; expected two for each block"
    return found


def block_of(document: str, start: str) -> Block:
    (found,) = [each for each in blocks_of(document, text_of(document)) if each.first.startswith(start)]
    return found


def kvcheck_words(line: str) -> list[str] | None:
    """The words behind `kvcheck` of a command line; None for a line of another program."""
    plain = ASSIGNED.sub("", line, count=1)
    called = re.fullmatch(r"(?:(?:\S*/)?kvcheck|.*?-m kvcheck)((?: .*)?)", plain)
    return None if called is None else shlex.split(called[1])


def complaints_of(words: Sequence[str]) -> list[str]:
    """What is wrong with the words of a kvcheck command: options, numbers and kinds of values, and names in tables."""
    name, *rest = words or [""]
    if [name, *rest[:1]] == main.SERVE.split():
        name, *rest = main.SERVE, *rest[1:]
    if name not in COMMANDS:
        return [f"kvcheck has no command {name!r}"]
    filled = [FILLED if TO_FILL_IN.fullmatch(word) else word for word in rest]
    command = command_named(name)
    try:
        given = command.make_context(name, [*filled], obj=[name, *rest])
        if hasattr(command, "commands"):  # `kvcheck model make`: the words behind it belong to that
            sub, under, left = command.resolve_command(given, filled)
            given = under.make_context(sub, [*left], parent=given, obj=[name, *rest])
    except KvcheckError as error:
        return [str(error)]
    except Exception as error:  # the option parser's errors have a text for people, and nothing else is one
        if not hasattr(error, "format_message"):
            raise
        return [f"kvcheck {name}: {error.format_message()}"]
    return unknown_names(name, given.params, rest)


def unknown_names(command: str, given: Mapping[str, object], typed: Sequence[str]) -> list[str]:
    """Names of scenarios, mutants, shapes, cases and probes that no table has."""
    probes = {
        name for row in ENGINES.names() for each in ENGINES.load(row).probes for name in (each.name, each.scenario)
    }
    rows: list[tuple[str, object, set[str]]] = [
        ("mutant", given.get("mutant"), {*MUTANTS}),
        ("shape", given.get("shape"), {*SHAPES}),
        ("scenario", given.get("scenarios"), {*(LIVE_SCENARIOS if command == "live" else SCENARIOS).names()}),
        ("probe", given.get("probes"), probes),
        ("mutant", given.get("mutants"), {*MUTANTS}),
        ("case", given.get("cases"), {*CASES.names()}),
    ]
    found = []
    for kind, value, known in rows:
        names = [value] if isinstance(value, str) else [*value] if isinstance(value, (list, tuple)) else []
        for each in names:
            plain = each.partition(".")[0] if kind == "probe" else each
            if plain != FILLED and plain not in known:
                found.append(f"kvcheck {command}: no {kind} {each!r} in {' '.join(typed)}")
    return found
