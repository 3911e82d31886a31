"""Stand-in."""

from types import SimpleNamespace


class LMCacheEngineConfig:
    @staticmethod
    def from_defaults(**values):
        return SimpleNamespace(**values)
