"""Variables of a server."""

from contextlib import nullcontext


class Variable:
    def override(self, value):
        return nullcontext()


class Variables:
    SGLANG_MOONCAKE_CUSTOM_MEM_POOL = Variable()


envs = Variables()
