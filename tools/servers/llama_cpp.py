"""llama.cpp's server: how it is started on a CPU.

Invariants:
- Everything that a start depends on is here; the engine is compiled from its own sources, unchanged.
- The model is a GGUF file (`llama_gguf`), of the same tokens and weights as the folder.
- The cache has 16-bit floats, as llama.cpp has it by itself.
"""

from __future__ import annotations

from pathlib import Path

from tools.servers.serving import LOCAL, Command, free_ports

ENVIRONMENT = "llama-cpp-11434"
"""Name of the folder that `make_env.sh llama.cpp` is given, in the folder of environments."""

FLAGS: tuple[str, ...] = (
    *("--parallel", "4", "--ctx-size", "4096", "--kv-unified"),  # requests at once, and one cache that they share
    *("--threads", "1", "--threads-batch", "1", "--threads-http", "16"),
    *("--batch-size", "512", "--ubatch-size", "256"),  # longer prompts are prefilled in chunks
    "--metrics",
    "--no-warmup",
    *("--cache-ram", "64"),  # MiB: the cache of a slot is saved before another prompt takes the slot, and loaded back
)


def commands(environments: Path, gguf: Path) -> tuple[Command]:
    (port,) = free_ports(1)
    words = (
        *(str(environments / ENVIRONMENT / "bin" / "llama-server"), "--model", str(gguf), "--alias", gguf.stem),
        *("--host", LOCAL, "--port", str(port)),
        *FLAGS,
    )
    return (Command(name="llama.cpp", words=words, port=port, variables={"OMP_NUM_THREADS": "1"}),)
