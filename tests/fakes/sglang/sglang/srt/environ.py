"""Variables of a server."""

from contextlib import nullcontext


class Variable:
    def override(self, value):
        return nullcontext()


class Variables:
    SGLANG_MOONCAKE_CUSTOM_MEM_POOL = Variable()
    SGLANG_NATIVE_MOVE_KV_CACHE = Variable()


envs = Variables()
