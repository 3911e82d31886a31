"""The controller of a hybrid model's tree."""

from sglang.srt.managers.cache_controller import HiCacheController


class HybridCacheController(HiCacheController):
    pass
