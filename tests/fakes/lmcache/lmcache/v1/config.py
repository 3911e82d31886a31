"""Stand-in."""

from types import SimpleNamespace


class LMCacheEngineConfig:
    """Whatever it is given."""

    @staticmethod
    def from_defaults(**values):
        """Those."""
        return SimpleNamespace(**values)
