"""Speculation, of which there is none."""

import enum


class SpeculativeAlgorithm(enum.Enum):
    NONE = 0
