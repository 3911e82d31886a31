"""llama.cpp's server: how it is started on a CPU, by variant.

Invariants:
- Everything that a start depends on is in these tables; the engine is compiled from its own sources, unchanged.
- The model is a GGUF file (`llama_gguf`), of the same tokens and weights as the folder.
- The cache has 16-bit floats, as llama.cpp has it by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvcheck.core.base.errors import UsageError
from tools.servers.serving import LOCAL, Command

ENVIRONMENT = "llama-cpp-11434"
"""Name of the folder that `make_env.sh llama.cpp` is given."""

FLAGS: tuple[str, ...] = (
    *("--threads", "1", "--threads-batch", "1", "--threads-http", "16"),
    *("--batch-size", "512", "--ubatch-size", "256"),  # longer prompts are prefilled in chunks
    "--metrics",
    "--no-warmup",
)
VARIANTS: Mapping[str, tuple[str, ...]] = {
    "plain": ("--cache-ram", "0"),
    "host": ("--cache-ram", "64"),
}
"""Flags of each variant. host: the cache of a slot is saved to RAM (MiB) before another prompt takes the slot, and
loaded back.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """slots: requests at once. pool: tokens of all slots together, in one cache that they share."""

    slots: int = 4
    pool: int = 4096

    def __post_init__(self) -> None:
        if self.slots < 1 or self.pool < self.slots:
            raise UsageError(f"llama.cpp has at least one slot, and a token for each; got {self}")


def command(environment: Path, gguf: Path, *, port: int, variant: str = "plain", sizes: Sizes | None = None) -> Command:
    """The command that serves the model of `gguf` under the name of its file."""
    if variant not in VARIANTS:
        raise UsageError(f"unknown variant {variant!r} of llama.cpp; known: {', '.join(VARIANTS)}")
    sizes = sizes or Sizes()
    words = (
        *(str(environment / "bin" / "llama-server"), "--model", str(gguf), "--alias", gguf.stem),
        *("--host", LOCAL, "--port", str(port)),
        *("--parallel", str(sizes.slots), "--ctx-size", str(sizes.pool), "--kv-unified"),
        *FLAGS,
        *VARIANTS[variant],
    )
    return Command(name=f"llama.cpp-{variant}", words=words, port=port, variables={"OMP_NUM_THREADS": "1"})
