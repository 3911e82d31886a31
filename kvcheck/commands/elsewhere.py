"""Words that belong to another command, and that command.

Invariants:
- A misplaced word is one line and exit 2: no command runs another.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvcheck.core.base.cells import ENGINE_NAMES, is_engine
from kvcheck.core.base.errors import UsageError
from kvcheck.core.live.clients.connection import address_of


def check_subject(command: str, words: Iterable[str]) -> None:
    for word in words:
        if (told := belongs_to(command, word)) is not None:
            raise UsageError(told)


def belongs_to(command: str, word: str) -> str | None:
    from kvcheck.core.stress.targets.own import is_own  # it is loaded with targets, which no help needs

    engine, equals, _ = word.partition("==")
    if equals and engine in ENGINE_NAMES:
        made = f"next: kvcheck env {word} DIR, then kvcheck probe {engine}:DIR"
        return f"{word}: expected an environment that has this release; {made}"
    if command != "live" and (address := address_of(word)) is not None:
        return f"{word}: a running server is judged by kvcheck live {address}"
    if command != "probe" and is_engine(word):
        return f"{word}: an installed engine is judged by kvcheck probe {word}"
    if command == "probe" and not is_engine(word) and is_own(word):
        return f"{word}: code of your own is run by kvcheck stress --target {word}"
    return None
