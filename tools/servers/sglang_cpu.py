"""SGLang on a CPU as a server, or as a pair of servers: how each is started, by variant, and what is put into it.

Invariants:
- Everything that a start depends on is in these tables. Nothing of the engine is changed but by stand-ins and `faults`.
- A server does not start if one of its stand-ins cannot be put in, and each notes how often it was called.
- The pool is small: a few long requests fill it, so that pages are evicted and requests retracted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvcheck.core.base.errors import UsageError
from tools.servers.faults.planting import LOG, ORDERS, fault_log, fault_orders
from tools.servers.inside.ledger import counts
from tools.servers.inside.stand_ins import STAND_INS
from tools.servers.serving import LOCAL, Command, free_ports

ENVIRONMENT = "sglang-cpu-0.5.23"
"""Name of the folder that `make_env.sh sglang` is given, in the folder of environments."""
PAGE = 16
"""Tokens of a page."""
ON_PATH = Path(__file__).parent / "inside" / "on_path"

VARIABLES: Mapping[str, str] = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONPATH": str(ON_PATH.resolve()),
}
FLAGS: tuple[str, ...] = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--disable-overlap-schedule", "--disable-cuda-graph", "--skip-server-warmup"),
    "--sleep-on-idle",  # its scheduler polls: without this an idle server takes a whole core
    *("--enable-metrics", "--enable-cache-report"),
    *("--mem-fraction-static", "0.3", "--watchdog-timeout", "1200"),
    *("--page-size", str(PAGE)),
    *("--max-running-requests", "8"),
    *("--chunked-prefill-size", "256"),  # longer prompts are prefilled in chunks
    *("--schedule-conservativeness", "0.1"),  # admits what may have to be retracted later
)
_HICACHE = (
    *("--enable-hierarchical-cache", "--hicache-ratio", "3"),
    *("--hicache-io-backend", "kernel", "--hicache-mem-layout", "layer_first"),
)
_IMPORTS = ("compiled-packages",)
_HOST_TIER = (*_IMPORTS, "unpinned-host-memory", "host-copies")


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """flags: of each server by its role. {bootstrap}: a port for both of a pair.
    faulty: the role that a fault is planted in.
    """

    flags: Mapping[str, tuple[str, ...]]
    stand_ins: tuple[str, ...] = _IMPORTS
    variables: Mapping[str, str] = field(default_factory=dict)
    faulty: str = "server"


VARIANTS: Mapping[str, Variant] = {
    "plain": Variant(flags={"server": ()}),
    "priority": Variant(
        flags={"server": ("--enable-priority-scheduling", "--priority-scheduling-preemption-threshold", "1")}
    ),
    "mla": Variant(flags={"server": ()}, stand_ins=(*_IMPORTS, "attention-on-latents")),
    "hicache": Variant(flags={"server": _HICACHE}, stand_ins=_HOST_TIER),
    "pair": Variant(
        flags={
            "prefill": ("--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", "{bootstrap}"),
            "decode": ("--disaggregation-mode", "decode"),
        },
        stand_ins=(*_HOST_TIER, "sender-indices"),
        variables={"MC_FORCE_TCP": "1"},
        faulty="prefill",
    ),
}
"""A pair's pages go over Mooncake's transfer engine, which is the default of SGLang, by TCP."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """longest: tokens of a request, prompt and answer together. slots: tokens that the pool holds."""

    longest: int = 2048
    slots: int = 3200
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        if self.slots % PAGE or self.slots < self.longest + PAGE:
            raise UsageError(f"a pool has whole pages of {PAGE}, and room for one request and a page more; got {self}")


def commands(
    environments: Path,
    model: Path,
    *,
    folder: Path,
    variant: str = "plain",
    sizes: Sizes | None = None,
    has_faults: bool = False,
) -> tuple[Command, ...]:
    """The commands that serve `model`, on ports that are free now; of a pair, the prefill server's is the first.

    folder: for what the stand-ins note, and the orders and the log where it `has_faults`.
    """
    if variant not in VARIANTS:
        raise UsageError(f"unknown variant {variant!r} of SGLang; known: {', '.join(VARIANTS)}")
    row, sizes = VARIANTS[variant], sizes or Sizes()
    _noted(folder).mkdir(parents=True, exist_ok=True)
    *ports, bootstrap = free_ports(len(row.flags) + 1)
    common = {
        **VARIABLES,
        **row.variables,
        "KVCHECK_INSIDE": str(_noted(folder).resolve()),
        "KVCHECK_STAND_INS": ",".join(row.stand_ins),
    }
    faults = {ORDERS: str(fault_orders(folder)), LOG: str(fault_log(folder))}
    made = []
    for (role, flags), port in zip(row.flags.items(), ports, strict=True):
        words = (
            *(
                str(environments / ENVIRONMENT / "bin" / "python"),
                "-m",
                "sglang.launch_server",
                "--model-path",
                str(model),
            ),
            *("--served-model-name", model.name, "--host", LOCAL, "--port", str(port), "--dtype", sizes.dtype),
            *("--context-length", str(sizes.longest), "--max-total-tokens", str(sizes.slots)),
            *(*FLAGS, *(flag.format(bootstrap=bootstrap) for flag in flags)),
        )
        variables = common | (faults if has_faults and role == row.faulty else {})
        name = f"sglang-{variant}" if len(row.flags) == 1 else f"sglang-{variant}-{role}"
        made.append(Command(name=name, words=words, port=port, variables=variables))
    return tuple(made)


def stand_ins(variant: str) -> dict[str, str]:
    """What takes the place of what only a GPU has, by name, in words: for a record."""
    return {name: STAND_INS[name].shows for name in VARIANTS[variant].stand_ins}


def called(folder: Path) -> dict[str, int]:
    """Which stand-ins were put in, and how often each was called, in all processes of a start."""
    return counts(_noted(folder))


def _noted(folder: Path) -> Path:
    return folder / "stand-ins"
