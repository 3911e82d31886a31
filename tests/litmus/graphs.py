"""Litmus programs of captured graphs; programs.py lists them with their outcomes.

Invariants:
- As those of programs.py: nothing but the Backend Protocol, and lanes called a and b.
"""

from __future__ import annotations

from litmus.rig import Rig


def capture_runs_nothing(rig: Rig) -> str:
    x, out = rig.cells(0), rig.cells(-1)
    with rig.capture("a"):
        rig.store("a", x, 1)
    rig.copy("b", x, out)
    return rig.outcome(out, x)


def replay_keeps_the_order(rig: Rig) -> str:
    x, out = rig.cells(0), rig.cells(-1)
    rig.store("a", x, 5)
    with rig.capture("a") as graph:
        rig.copy("a", x, out)
        rig.store("a", x, 2)
    rig.backend.replay(graph)
    return rig.outcome(out, x)


def graph_is_replayed_again(rig: Rig) -> str:
    x = rig.cells(0)
    with rig.capture("a") as graph:
        rig.run("a", lambda: x.add_(1))
    rig.backend.replay(graph)
    rig.backend.replay(graph)
    return rig.outcome(x)


def wait_in_a_capture_is_lost(rig: Rig) -> str:
    x, out = rig.cells(0), rig.cells(-1)
    written = rig.store("a", x, 1)
    with rig.capture("b") as graph:
        rig.wait(written, "b")
        rig.copy("b", x, out, after=[written])
    rig.backend.replay(graph)
    return rig.outcome(out)


def wait_before_a_replay_holds(rig: Rig) -> str:
    x, out = rig.cells(0), rig.cells(-1)
    written = rig.store("a", x, 1)
    with rig.capture("b") as graph:
        rig.copy("b", x, out)
    rig.wait(written, "b")
    rig.backend.replay(graph)
    return rig.outcome(out)
