"""SGLang as a target: its stand-in packages, its names, and its probes."""

from __future__ import annotations

from typing import Final

from kvcheck.core.probes.frame.tables import Dropped, EngineSpec, ProbeRow, Reviewed
from kvcheck.core.probes.sglang.names import NAMES

_WAYS = tuple(f"{family}-{way}" for family in ("mha", "mla", "nsa") for way in ("kernel", "late", "direct"))
_BOTH = ("cpu", "cuda")
_POOLS = ("mha", "mla", "nsa", "swa", "mamba")

_UNIFIED = ("0.5.21", "0.5.22", "0.5.23")
"""Releases whose scheduler makes the unified tree instead of SWARadixCache and MambaRadixCache."""
_CUT = "no way is known in which peers of one release build unequal lists (#27004), and copies cut them (#23323)"
_WINDOWS = ("KV301 content: device swa_kv_pool.k_buffer", "KV301 content: device swa_kv_pool.v_buffer")
_STALE = ("KV102 content: device swa_kv_pool.k_buffer", "KV102 content: device swa_kv_pool.v_buffer")
_ENDS = ("KV301 contract: lengths, prefill shorter at the start", "KV301 contract: lengths, prefill shorter at the end")

SGLANG: Final = EngineSpec(
    name="sglang",
    shows="An installed SGLang: sglang for the one beside kvcheck, sglang:DIR for that of an environment.",
    package="sglang",
    stubs=("sgl_kernel", "torchvision", "tvm_ffi"),
    table=NAMES,
    variables=("SGLANG_", "SGL_"),
    prepare="kvcheck.core.probes.sglang.rig.bare_manager:prepare",
    compiled="kvcheck.core.probes.sglang.rig.compiled_copies:require_compiled",
    probes=(
        ProbeRow(
            name="pool-copy",
            scenario="retract-resume",
            subjects=_POOLS,
            entry="kvcheck.core.probes.sglang.pool_copy:PoolCopy",
            shows="every tensor of a pool comes back by get_cpu_copy and load_cpu_copy, after others used its pages",
            devices=_BOTH,
        ),
        ProbeRow(
            name="retract",
            scenario="retract-resume",
            subjects=_POOLS,
            entry="kvcheck.core.probes.sglang.retract:Retract",
            shows="all of a pool comes back by Req.offload_kv_cache and load_kv_cache, with real allocator and rows",
            devices=_BOTH,
            wants_held=("orderings_checked",),
        ),
        ProbeRow(
            name="token-moves",
            scenario="speculation",
            subjects=_POOLS,
            entry="kvcheck.core.probes.sglang.token_moves:TokenMoves",
            shows="move_kv_cache moves a token's bytes of every buffer to its new slot, and no others",
            reviewed=(
                Reviewed(
                    subject="nsa",
                    releases=("0.5.21", "0.5.22"),
                    places=(
                        "KV301 content: index_key_cache.buffer",
                        "KV902 liveness: DSATokenToKVPool: tokens # moved to #: move_kv_cache raised IndexError: index "
                        "# is out of bounds for dimension # with size # (sglang.srt.mem_cache.index_key_cac",
                    ),
                    why="servers with this pool draft chains, which move no tokens; trees do (#31215, #31218)",
                ),
            ),
        ),
        ProbeRow(
            name="metadata",
            scenario="retract-resume",
            subjects=("get-buf",),
            entry="kvcheck.core.probes.sglang.metadata:MetadataSlots",
            shows="what get_buf returned stays as it was when its slot is given to another request",
        ),
        ProbeRow(
            name="layer-wait",
            scenario="hicache",
            subjects=("mha", "mla", "nsa"),
            entry="kvcheck.core.probes.sglang.layer_wait:LayerWait",
            shows="every reader of a pool waits for its layer's load before it reads",
            wants=("orderings_checked",),
            devices=_BOTH,
        ),
        ProbeRow(
            name="host-copy",
            scenario="hicache",
            subjects=_WAYS,
            entry="kvcheck.core.probes.sglang.host_copy:HostCopy",
            shows="pages come back from the host whole and in time, while pages of both tiers change hands",
            wants=("backups", "loads", "device_evictions", "host_evictions", "orderings_checked"),
            devices=_BOTH,
        ),
        ProbeRow(
            name="index-moves",
            scenario="hicache-hybrid",
            subjects=(
                "hybrid-kernel",
                "hybrid-direct",
                "tree-kernel",
                "tree-direct",
                "mamba-tree-kernel",
                "mamba-tree-direct",
            ),
            entry="kvcheck.core.probes.sglang.index_moves:IndexMoves",
            shows="lists that a tree keeps stay on their side and keep their values while copies move theirs",
        ),
        ProbeRow(
            name="prefixes",
            scenario="prefix-cache",
            subjects=("radix", "swa", "mamba", "unified-full", "unified-swa", "unified-mamba"),
            entry="kvcheck.core.probes.sglang.prefix_cache:PrefixCache",
            shows="prefix trees over their allocators and pools: owners, locks, sizes, hits and contents of pages",
            wants=("requests", "retractions", "resumes", "lookups", "device_hit_pages", "device_evictions"),
            dropped=(
                Dropped(
                    subject="swa",
                    lacks="tree.swa",
                    releases=_UNIFIED,
                    why="hybrid models with windows have the unified tree since 0.5.21 (prefixes.unified-swa)",
                ),
                Dropped(
                    subject="mamba",
                    lacks="tree.mamba",
                    releases=_UNIFIED,
                    why="hybrid models with states have the unified tree since 0.5.21 (prefixes.unified-mamba)",
                ),
            ),
        ),
        ProbeRow(
            name="state-lengths",
            scenario="pd-transfer",
            subjects=("nsa-longer", "nsa-shorter", "swa-longer", "swa-shorter"),
            entry="kvcheck.core.probes.sglang.state_lengths:StateLengths",
            shows="a state list longer or shorter than its receiver's harms nobody: its own request at most fails",
            reviewed=(
                Reviewed(
                    subject="nsa-shorter",
                    releases=_UNIFIED,
                    places=("KV102 content: device index_key_cache.buffer", _ENDS[1]),
                    why=_CUT,
                ),
                Reviewed(
                    subject="swa-longer",
                    releases=_UNIFIED,
                    places=(*_WINDOWS, "KV301 contract: lengths, prefill longer at the start"),
                    why=_CUT,
                ),
                Reviewed(subject="swa-shorter", releases=_UNIFIED, places=(*_WINDOWS, *_STALE, *_ENDS), why=_CUT),
            ),
        ),
        ProbeRow(
            name="sent-lists",
            scenario="pd-transfer",
            subjects=("mha", "nsa", "swa"),
            entry="kvcheck.core.probes.sglang.sent_lists:SentLists",
            shows="the prefill side lists the pages and states of the prompt, each once, whatever its chunks were",
            wants=("requests", "pages_wanted"),
        ),
        ProbeRow(
            name="state-failure",
            scenario="pd-transfer",
            subjects=("nsa", "swa"),
            entry="kvcheck.core.probes.sglang.state_lengths:StateFailure",
            shows="a request whose states the copy engine failed to copy is told failed on both sides",
        ),
        ProbeRow(
            name="agreement",
            scenario="nvlink-aux",
            subjects=("metadata", "everything", "default-metadata"),
            entry="kvcheck.core.probes.sglang.agreement:Agreement",
            shows="ranks commit the same requests at the same poll, and what they commit is all there",
        ),
    ),
)
