"""Situations: events that can happen to a request, a cached prefix or a stored object, by its state.

A schedule that ends well is no evidence about a race that it never came near, so every run counts the rows that it has
reached and names the others.

Invariants:
- A row is legal: an engine has to survive it, without a change that a user sees.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

TREE = frozenset({"hicache", "hicache-hybrid"})
RETRACT = frozenset({"retract-resume"})
TRANSFER = frozenset({"pd-transfer", "nvlink-aux"})
PAIR = RETRACT | TRANSFER
ALL = TREE | PAIR

HAPPENINGS: Mapping[str, str] = {
    "abort": "its user ends it",
    "preempt": "it is retracted though it could go on",
    "retract": "it is retracted for lack of room",
    "retry": "it is sent again",
    "time out": "its patience runs out",
    "copy": "a message about it comes once more, late",
    "match": "another request looks it up",
    "split": "another request shares a part of it",
    "evict": "its tier gives it up",
    "pressure": "its tier gives others up, and may not give it up",
    "remove": "it is deleted by somebody else",
    "overwrite": "somebody else writes it with the same content",
}
"""Events with their meaning, in the order of a matrix's columns."""


@dataclass(frozen=True, slots=True)
class State:
    """A state of a subject. meaning: follows "a request". happenings: possible events, with their scenarios."""

    subject: str
    name: str
    meaning: str
    happenings: Mapping[str, frozenset[str]]


@dataclass(frozen=True, slots=True, order=True)
class Situation:
    subject: str
    state: str
    happening: str

    @property
    def key(self) -> str:
        return f"{self.subject}/{self.state}/{self.happening}"

    @property
    def shows(self) -> str:
        state = next(each for each in STATES if (each.subject, each.name) == (self.subject, self.state))
        article = "An" if self.subject[0] in "aeiou" else "A"
        return f"{article} {self.subject} {state.meaning}: {HAPPENINGS[self.happening]}."


STATES: Sequence[State] = (
    State("request", "waiting", "that is queued", {"abort": ALL}),
    State("request", "fetching", "whose pages are on their way from the store", {"abort": TREE}),
    State("request", "loading", "whose pages are on their way from the host", {"abort": TREE}),
    State(
        "request",
        "asked for",
        "that the decode end has asked for and that is not begun",
        {"abort": PAIR, "time out": TRANSFER, "copy": TRANSFER},
    ),
    State(
        "request",
        "prefilling",
        "of whose prompt a part is computed",
        {"abort": ALL, "time out": TRANSFER, "copy": TRANSFER},
    ),
    State(
        "request",
        "handing over",
        "whose metadata row is under way to the decode end",
        {"abort": PAIR, "time out": TRANSFER, "copy": TRANSFER},
    ),
    State(
        "request",
        "sealing",
        "whose seal alone is under way to the decode end",
        {"abort": PAIR, "time out": TRANSFER, "copy": TRANSFER},
    ),
    State(
        "request",
        "transferring",
        "that has landed and that the decode end has not taken",
        {"abort": PAIR, "time out": TRANSFER, "copy": TRANSFER},
    ),
    State("request", "ready", "that is computed and not decoding yet", {"abort": ALL}),
    State(
        "request",
        "joined",
        "that has decoded once since it came from the prefill end",
        {"abort": PAIR, "preempt": PAIR, "copy": TRANSFER},
    ),
    State(
        "request",
        "running",
        "that is decoding",
        {"abort": ALL, "preempt": ALL, "retract": ALL, "copy": TRANSFER},
    ),
    State(
        "request",
        "restoring",
        "that was just resumed, while what was saved of it is kept",
        {"abort": ALL, "preempt": ALL, "retract": TREE},
    ),
    State(
        "request",
        "retracted",
        "that was retracted and waits to be resumed",
        {"abort": ALL, "copy": TRANSFER},
    ),
    State(
        "request",
        "draining",
        "that has failed, and whose memory may still be written",
        {"retry": TRANSFER, "time out": TRANSFER, "copy": TRANSFER},
    ),
    State("request", "ended", "that has failed, and of which nothing is left", {"retry": TRANSFER, "copy": TRANSFER}),
    State(
        "room",
        "partly reported",
        "that some of its sources have reported",
        {"abort": TRANSFER, "time out": TRANSFER, "copy": TRANSFER},
    ),
    State(
        "room",
        "arrived",
        "that has arrived at one decode rank, and not at all of them",
        {"abort": TRANSFER, "time out": TRANSFER, "copy": TRANSFER},
    ),
    State(
        "prefix",
        "on the device",
        "that the device alone holds",
        {"match": TREE, "split": TREE, "evict": TREE, "remove": TREE},
    ),
    State(
        "prefix",
        "in use",
        "that is locked on the device",
        {"match": TREE, "split": TREE, "pressure": TREE},
    ),
    State(
        "prefix",
        "being backed up",
        "that is being copied to the host",
        {"match": TREE, "split": TREE, "pressure": TREE},
    ),
    State(
        "prefix",
        "on both tiers",
        "that device and host hold",
        {"match": TREE, "split": TREE, "evict": TREE, "remove": TREE},
    ),
    State(
        "prefix",
        "on the host",
        "that the host alone holds",
        {"match": TREE, "split": TREE, "evict": TREE, "remove": TREE},
    ),
    State(
        "prefix",
        "being loaded",
        "that is being copied from the host",
        {"match": TREE, "split": TREE, "pressure": TREE},
    ),
    State(
        "prefix",
        "being stored",
        "that is being copied from the host to the store",
        {"match": TREE, "split": TREE, "evict": TREE, "pressure": TREE},
    ),
    State("object", "being written", "that is on its way to the store", {"overwrite": TREE, "remove": TREE}),
    State("object", "stored", "that the store holds", {"overwrite": TREE, "remove": TREE}),
    State(
        "object",
        "being read",
        "that is on its way from the store",
        {"match": TREE, "overwrite": TREE, "remove": TREE},
    ),
)
"""All states, in the order of a matrix's rows."""

SITUATIONS: Mapping[str, Situation] = {
    situation.key: situation
    for state in STATES
    for situation in (Situation(state.subject, state.name, happening) for happening in state.happenings)
}


def situations_of(scenario: str) -> tuple[Situation, ...]:
    return tuple(
        Situation(state.subject, state.name, happening)
        for state in STATES
        for happening, scenarios in state.happenings.items()
        if scenario in scenarios
    )


def never_reached(scenarios: Iterable[str], counts: Mapping[str, int]) -> list[Situation]:
    legal = {situation.key: situation for name in scenarios for situation in situations_of(name)}
    return [each for key, each in SITUATIONS.items() if key in legal and not counts.get(key)]
