"""How llama.cpp's server is started: the command line that its tables give.

Invariants:
- Nothing is started; the flags that the engine really has are seen where it runs.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcheck.core.base.errors import UsageError
from tools.servers.llama_cpp import VARIANTS, Sizes, command


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_is_served_on_this_machine_alone_with_a_small_cache(variant: str) -> None:
    made = command(Path("env"), Path("models/m4.gguf"), port=1234, variant=variant, sizes=Sizes(slots=3, pool=2048))
    said = dict(zip(made.words[1:], made.words[2:], strict=False))
    assert made.words[0] == "env/bin/llama-server" and said["--model"] == "models/m4.gguf" and said["--alias"] == "m4"
    assert [said[flag] for flag in ("--host", "--port", "--parallel", "--ctx-size")] == [
        "127.0.0.1",
        "1234",
        "3",
        "2048",
    ]
    assert (said["--cache-ram"] == "0") == (variant == "plain"), "a host tier only where it is asked for"


def test_an_unknown_variant_and_no_room_are_refused() -> None:
    with pytest.raises(UsageError, match="known: plain, host"):
        command(Path("env"), Path("m4.gguf"), port=1234, variant="storage")
    with pytest.raises(UsageError, match="at least one slot"):
        Sizes(slots=8, pool=4)
