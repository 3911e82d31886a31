"""Rng: the one seeded generator behind every choice that a workload or a scheduler makes.

splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014).

Invariants:
- Equal seeds give equal draws on every machine and Python version.
- Each method takes exactly one draw, so the number of draws never depends on the values drawn.
"""

from __future__ import annotations

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15


class Rng:
    __slots__ = ("_state",)

    def __init__(self, seed: int) -> None:
        self._state = seed & _MASK

    def next_u64(self) -> int:
        self._state = z = (self._state + _GAMMA) & _MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        return z ^ (z >> 31)

    def below(self, n: int) -> int:
        """An integer 0 .. n - 1, n >= 1. The bias of the multiply-shift is under n / 2**64."""
        assert n >= 1, f"below() needs at least one choice, got {n}"
        return (self.next_u64() * n) >> 64

    def chance(self, numerator: int, denominator: int) -> bool:
        return self.below(denominator) < numerator
