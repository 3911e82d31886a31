"""The published schemas, prepared once for all tests that ask whether something fits them."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema

REPORTS = Path(__file__).parents[2] / "reports"


@cache
def validator(name: str) -> jsonschema.Draft202012Validator:
    """For reports/`name`.schema.json."""
    schema: Any = json.loads((REPORTS / f"{name}.schema.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def check_fits(raw: object, name: str = "run") -> None:
    """Raise ValidationError unless the JSON value fits the schema."""
    validator(name).validate(raw)
