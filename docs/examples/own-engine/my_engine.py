"""An offload of one's own behind kvcheck's scheduler: wrong, right, and in a target that does nothing else."""

from dataclasses import replace

from kvcheck.core.cache.offload import Offload
from kvcheck.core.stress.targets.builtin import BuiltinTarget
from kvcheck.core.stress.targets.target import FIXED


class ByHand(Offload):
    """Saves the buffers that somebody listed. The values are not among them."""

    def _table(self):
        return tuple((space, buffer) for space, buffer in self.pool.buffers() if buffer.name == "k")


class Whole(Offload):
    """Saves every buffer that the pool has."""

    def _table(self):
        return tuple(self.pool.buffers())


class RetractsOnly(BuiltinTarget):
    """An engine without a prefix cache and without a second end."""

    capabilities = frozenset({"retract-resume", "metadata"})


def by_hand():
    return replace(FIXED, offload=ByHand)


def whole():
    return replace(FIXED, offload=Whole)


def retracts_only():
    return RetractsOnly(whole())
