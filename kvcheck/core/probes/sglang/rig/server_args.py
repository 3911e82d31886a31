"""Runtime: what SGLang wants to have been published before one of its objects can be made.

Invariants:
- Done by name where a release has the name, and left where it has not; nothing is decided by a version.
"""

from __future__ import annotations

from kvcheck.core.probes.frame.names import Names


def prepare(names: Names) -> None:
    """Publish the arguments of a server of one rank, as SGLang's own tests do."""
    if names.has("server.args") and names.has("server.publish"):
        names["server.publish"](names["server.args"](model_path="dummy"))
