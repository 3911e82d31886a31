"""CachingRules: the model of the cache, its declaration and the findings, shared by all rules of the caching oracle."""

from __future__ import annotations

from kvcheck.core.base.record import Finding
from kvcheck.core.stress.oracles.cache_model import CacheModel
from kvcheck.core.stress.oracles.oracle import MAX_FINDINGS
from kvcheck.core.stress.workload.tier_events import Declared


class CachingRules:
    name = "caching"

    def __init__(self) -> None:
        self.judged = 0
        self.findings: list[Finding] = []
        self._cache = CacheModel()
        self._declared: Declared | None = None
        self._is_over = False

    def _unit(self, tier: str, space: str, each: bytes) -> int | None:
        return self._cache.held[tier, space].get(each)

    def _named(self, tier: str, space: str, each: bytes) -> str:
        return f"{tier} {space} {self._unit(tier, space, each)}"

    def _add(
        self, code: str, message: str, *, request: int | None = None, tier: str | None = None, page: int | None = None
    ) -> None:
        if len(self.findings) < MAX_FINDINGS:
            self.findings.append(
                Finding(code=code, oracle=self.name, request=request, tier=tier, page=page, message=message)
            )
