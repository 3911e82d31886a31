"""The templates of pages, each compiled once: compiling takes longer than filling.

Invariants:
- Every value is escaped, and a name without a value is an error. Only the package's own style, script and drawings are
  marked safe.
- No control character of a record is in a page.
"""

from __future__ import annotations

import json
import math
from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from kvcheck.core.base.identity import short
from kvcheck.core.base.nouns import counted
from kvcheck.core.base.server_facts import OBSERVED
from kvcheck.core.report.markdown import printable
from kvcheck.core.report.wording import MARKS, WORST_FIRST, clip, why_text

FOLDER = ("kvcheck.core", "report")


def filled(name: str, **values: object) -> str:
    return _environment().get_template(name).render(style=asset("page.css"), **values)


def asset(name: str) -> Markup:
    environment = _environment()
    assert environment.loader is not None
    return Markup(environment.loader.get_source(environment, name)[0])


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader(*FOLDER), autoescape=True, undefined=StrictUndefined, finalize=_visible
    )
    environment.filters |= {"clip": clip, "short": short, "plain": _plain, "number": _number, "why": why_text}
    environment.tests["finite"] = lambda value: value is not None and math.isfinite(value)
    environment.globals |= {"marks": MARKS, "worst_first": WORST_FIRST, "units": OBSERVED, "counted": counted}
    return environment


def _visible(value: object) -> object:
    return printable(value, keep="\n\t") if isinstance(value, str) and not isinstance(value, Markup) else value


def _plain(value: object) -> str:
    """Text of a fact of any type; "n/a" for none."""
    if value is None or value == {}:
        return "n/a"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _number(value: object) -> str:
    return f"{value:,}" if type(value) is int else "n/a"
