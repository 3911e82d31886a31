"""Targets: the implementations that kvcheck can test."""

from __future__ import annotations

from kvcheck.core.base.registry import Registry
from kvcheck.core.stress.targets.target import Target

TARGETS: Registry[type[Target]] = Registry(
    "target",
    {
        "builtin": (
            "kvcheck.core.stress.targets.builtin:BuiltinTarget",
            "The complete, fixed implementation in this package.",
        )
    },
)
