"""Tokens of a known-answer model.

    0 pad | 1 begin | 2 end | 3 guard | 4 too little | 5 too much | lost at (layer, head) | lost at layer |
    (with states: the same two, ahead) | places | nodes | marks

A prompt lists *places*, the answer names *nodes*; place i and node i are two tokens of one node i. *Marks* belong to
the position test: a phase, which selects the next bits, and a value of a few bits.

Invariants:
- Every request begins with `BEGIN, GUARD`: a failed lookup finds their keys.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvcheck.core.model.parameters import Parameters

PAD, BEGIN, END, GUARD, TOO_LITTLE, TOO_MUCH = range(6)
_FIRST_LOST = 8
HEADER = (BEGIN, GUARD)


@dataclass(frozen=True, slots=True)
class Alphabet:
    parameters: Parameters

    @property
    def lost_layers(self) -> int:
        return _FIRST_LOST + self.parameters.layers * self.parameters.kv_heads

    @property
    def places(self) -> int:
        return _FIRST_LOST + self._lost_ids * (1 + self.parameters.has_state)

    @property
    def _lost_ids(self) -> int:
        return self.parameters.layers * (self.parameters.kv_heads + 1)

    @property
    def nodes(self) -> int:
        return self.places + self.parameters.nodes

    @property
    def marks(self) -> int:
        return self.nodes + self.parameters.nodes

    @property
    def size(self) -> int:
        last = self.marks + self.parameters.phases * (1 << self.parameters.bits)
        return -(-last // 64) * 64

    def lost(self, layer: int, head: int | None) -> int:
        """The answer if a lookup in that layer and head found nothing. head: None: in every head."""
        return self.lost_layers + layer if head is None else _FIRST_LOST + layer * self.parameters.kv_heads + head

    def ahead(self, layer: int, head: int | None) -> int:
        """The answer if a state layer found a newer value, or one of twice the strength."""
        return self.lost(layer, head) + self._lost_ids

    def is_ahead(self, token: int) -> bool:
        return _FIRST_LOST + self._lost_ids <= token < self.places

    def lost_at(self, token: int) -> tuple[int, int | None] | None:
        """(layer, head) of a lost or ahead token. head: None: every head."""
        heads, layers = self.parameters.kv_heads, self.parameters.layers
        if not _FIRST_LOST <= token < self.places:
            return None
        number = (token - _FIRST_LOST) % self._lost_ids
        if number < layers * heads:
            return divmod(number, heads)
        return (number - layers * heads, 0 if heads == 1 else None)

    def place(self, node: int) -> int:
        return self.places + node

    def node(self, node: int) -> int:
        return self.nodes + node

    def mark(self, phase: int, value: int) -> int:
        return self.marks + (phase % self.parameters.phases << self.parameters.bits) + value

    def as_place(self, token: int) -> int | None:
        return token - self.places if self.places <= token < self.nodes else None

    def as_node(self, token: int) -> int | None:
        return token - self.nodes if self.nodes <= token < self.marks else None

    def as_mark(self, token: int) -> tuple[int, int] | None:
        """(phase, value) of a mark."""
        bits = self.parameters.bits
        if not self.marks <= token < self.marks + (self.parameters.phases << bits):
            return None
        phase, value = divmod(token - self.marks, 1 << bits)
        return phase, value

    def words(self) -> list[str]:
        return [self.word(token) for token in range(self.size)]

    def word(self, token: int) -> str:
        named = {
            PAD: "<pad>",
            BEGIN: "<begin>",
            END: "<end>",
            GUARD: "<guard>",
            TOO_LITTLE: "<little>",
            TOO_MUCH: "<much>",
        }
        return named.get(token) or f"{self._kind(token)}{token}"

    def _kind(self, token: int) -> str:
        for kind, known in (
            ("place", self.as_place),
            ("node", self.as_node),
            ("mark", self.as_mark),
            ("ahead", lambda token: token if self.is_ahead(token) else None),
            ("lost", self.lost_at),
        ):
            if known(token) is not None:
                return kind
        return "unused"
