"""The published schemas, prepared once for all tests that ask whether something fits them."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
from referencing import Registry, Resource

REPORTS = Path(__file__).parents[2] / "reports"


@cache
def validator(name: str, command: str | None = None) -> jsonschema.Draft202012Validator:
    """For reports/`name`.schema.json, or for the entry of a command in it."""
    schemas: dict[str, Any] = {
        path.name: json.loads(path.read_text(encoding="utf-8")) for path in REPORTS.glob("*.schema.json")
    }
    schema = schemas[f"{name}.schema.json"]
    jsonschema.Draft202012Validator.check_schema(schema)
    registry: Registry[Any] = Registry().with_resources(
        (key, Resource.from_contents(each)) for key, each in schemas.items()
    )
    wanted = schema if command is None else {"$ref": f"{name}.schema.json#/$defs/{command.replace(' ', '%20')}"}
    return jsonschema.Draft202012Validator(wanted, registry=registry)


def check_fits(raw: object, name: str = "run", command: str | None = None) -> None:
    """Raise ValidationError unless the JSON value fits the schema."""
    validator(name, command).validate(raw)
