"""Misuse: a call that a check has to refuse, or a call at the very edge that it has to let through.

Invariants:
- A refusal names the error that the class documents. Any other error, such as torch's own, is not a refusal.
- A refused call changes nothing: what `kept` counts is the same before and after it.
- A row whose state does not exist now gives NOT_NOW and has done nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Generic, TypeVar

from kvcheck.core.base.errors import UnknownVerdict, machine_trouble


class Absence(Enum):
    """What an attempt gives that could not be made."""

    NOT_NOW = "not now"


NOT_NOW = Absence.NOT_NOW

S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class Misuse(Generic[S]):
    """One row of a table. refused_with: the error that it has to raise; None: it is legal, and gives
    False only where its result is wrong."""

    name: str
    refused_with: type[Exception] | None
    attempt: Callable[[S], object]

    def on(self, subject: S, kept: Callable[[S], object] = lambda subject: None) -> Attempt:
        """The row as a call on one subject. kept: a cheap digest of what a refused call must not change."""
        call = partial(self.attempt, subject)
        return Attempt(self.name, self.refused_with, call, partial(kept, subject), about=_about(self.attempt))


@dataclass(frozen=True, slots=True)
class Attempt:
    """A call that can be made now. about: what is right, in a sentence; "" where the name says it."""

    name: str
    refused_with: type[Exception] | None
    call: Callable[[], object]
    kept: Callable[[], object]
    about: str = ""

    def make(self) -> str | Absence | None:
        """Make the call: None where all is right, NOT_NOW, or what was expected and what happened."""
        try:
            before = self.kept() if self.refused_with is not None else None
        except Exception as error:  # what the call is about could not be made
            return self._failed(error)
        try:
            given = self.call()
        except Exception as error:  # whatever is raised is compared with what the row names
            if self.refused_with is None or not isinstance(error, self.refused_with):
                return self._failed(error)
        else:
            if given is NOT_NOW:
                return NOT_NOW
            if self.refused_with is not None:
                return self._wrong("it was accepted")
            return self._wrong("that is not so") if given is False else None
        after = self.kept()
        return None if before == after else self._wrong(f"it changed something: {before} became {after}")

    def _failed(self, error: Exception) -> str:
        """Another error than the row names. Raises UnknownVerdict for one of the machine."""
        if trouble := machine_trouble(error):
            raise UnknownVerdict(trouble) from error
        return self._wrong(f"{type(error).__name__}: {error}")

    def _wrong(self, happened: str) -> str:
        expected = self.about or "that it is allowed and gives the right result"
        if self.refused_with is not None:
            expected = f"{self.refused_with.__name__}, no change"
        return f"{self.name}: expected {expected}; got: {happened}"


def _about(attempt: Callable[..., object]) -> str:
    """The first sentence of a function's docstring, in quotes; "" for one without a name of its own."""
    text = getattr(attempt, "__doc__", None) if getattr(attempt, "__name__", "<lambda>") != "<lambda>" else None
    return f'"{" ".join(text.split()).rstrip(".")}"' if text else ""


def on_each(rows: Iterable[Misuse[S]], subject: S, kept: Callable[[S], object]) -> list[Attempt]:
    """Every row of a table as a call on one subject."""
    return [row.on(subject, kept) for row in rows]
