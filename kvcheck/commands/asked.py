"""Options and steps shared by all commands that make a run."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvcheck.commands.closing import close
from kvcheck.commands.options import check_positive
from kvcheck.commands.report import check_outputs, parse_outputs
from kvcheck.commands.terminal import Terminal
from kvcheck.core.report.screen import grid_lines
from kvcheck.core.run.session import Session
from kvcheck.core.run.store import make_folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Options of every run. argv: the words of the command."""

    argv: Sequence[str]
    began: float = field(default_factory=time.monotonic)
    seed: int | None
    max_time: float | None
    out: Path
    output: list[str] | None
    format_name: str
    reports: bool
    verbose: bool = False

    def __post_init__(self) -> None:
        check_positive("--max-time", self.max_time)

    @property
    def until(self) -> float | None:
        return None if self.max_time is None else self.began + self.max_time

    def check_places(self) -> None:
        check_outputs(parse_outputs(self.output, self.format_name))
        make_folder(self.out)

    def session(
        self, *, drawn: int, plan: Mapping[str, object], resumes: bool = False, names_seed: bool = True
    ) -> Session:
        """drawn: the seed. names_seed: whether the command to repeat the run names it."""
        words = ["kvcheck", *(word for word in self.argv if word != "--resume")]
        if names_seed and self.seed is None:
            words += ["--seed", str(drawn)]
        return Session(
            argv=[*self.argv],
            repro=shlex.join(words),
            seed=drawn,
            plan=plan,
            out=self.out,
            teller=Terminal(is_quiet=self.format_name == "json", is_verbose=self.verbose),
            resumes=resumes,
        )

    def draw(self, session: Session) -> None:
        """Show the grid of cells above the progress of a terminal."""
        if isinstance(session.teller, Terminal):
            session.teller.board = lambda width: grid_lines(session.record(complete=False), width)

    def close(self, session: Session, *, interrupted: bool) -> int:
        outputs = parse_outputs(self.output, self.format_name)
        return close(session, outputs, reports=self.reports, interrupted=interrupted)
