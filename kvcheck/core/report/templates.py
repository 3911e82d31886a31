"""The templates of pages, each compiled once: compiling takes longer than filling.

Invariants:
- Every value is escaped, and a name without a value is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from jinja2 import Environment, StrictUndefined, Template

from kvcheck.core.report.wording import asset


@cache
def template(name: str, finalize: Callable[[object], object]) -> Template:
    environment = Environment(autoescape=True, undefined=StrictUndefined, finalize=finalize)
    return environment.from_string(asset(name))
