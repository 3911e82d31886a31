"""The templates of pages and of Markdown, each compiled once: compiling takes longer than filling.

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

from kvcheck.core.base.nouns import counted
from kvcheck.core.base.server_facts import OBSERVED
from kvcheck.core.report.markdown import code_block, code_span, escaped, printable, rule_line, table_line
from kvcheck.core.report.wording import MARKS, WORST_FIRST, clip, why_text


def filled(name: str, **values: object) -> str:
    environment = _of_pages() if name.endswith(".html.j2") else _of_markdown()
    return environment.get_template(name).render(**values)


def asset(name: str) -> Markup:
    environment = _of_pages()
    assert environment.loader is not None
    return Markup(environment.loader.get_source(environment, name)[0])


@cache
def _of_pages() -> Environment:
    environment = Environment(loader=_loader(), autoescape=True, undefined=StrictUndefined, finalize=_visible)
    environment.filters |= {"clip": clip, "plain": _plain, "number": _number, "why": why_text}
    environment.tests["finite"] = lambda value: value is not None and math.isfinite(value)
    environment.globals |= {"marks": MARKS, "worst_first": WORST_FIRST, "units": OBSERVED, "counted": counted}
    environment.globals["style"] = Markup(_loader().get_source(environment, "page.css")[0])
    return environment


@cache
def _of_markdown() -> Environment:
    environment = Environment(
        loader=_loader(),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_escaped,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.globals |= {"marks": MARKS, "counted": counted}
    environment.filters |= {
        "code": lambda text: Markup(code_span(text)),
        "block": lambda lines: Markup("\n".join(code_block(lines))),
        "row": lambda texts: Markup(table_line(texts)),
        "rule": lambda texts: Markup(rule_line(len(texts))),
    }
    return environment


def _loader() -> PackageLoader:
    return PackageLoader("kvcheck.core", "report")


def _escaped(value: object) -> object:
    """For Markdown. Markup comes from macros and filters."""
    return Markup(escaped(value)) if isinstance(value, str) and not isinstance(value, Markup) else value


def _visible(value: object) -> object:
    return printable(value, keep="\n\t") if isinstance(value, str) and not isinstance(value, Markup) else value


def _plain(value: object, indent: int | None = None) -> str:
    if value is None or value == {}:
        return "n/a"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, indent=indent, default=str)


def _number(value: object) -> str:
    return f"{value:,}" if type(value) is int else "n/a"
