"""Real releases of SGLang, where environments with them are named: equal verdicts, turned round by an edit.

    REAL_SGLANG=/envs/sglang-0.5.9:/envs/sglang-0.5.14 pytest tests/probes/test_real_sglang.py

Nothing is expected of a version: its verdict is turned round by an edit of a copy of its files. A release that lacks
something is UNKNOWN with that name.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcheck.core.probes.frame.engine_process import EngineProcess, Patience
from kvcheck.core.probes.frame.wire import Ask, Reply
from kvcheck.core.probes.installed import parse_target

ENVIRONMENTS = [Path(text) for text in os.environ.get("REAL_SGLANG", "").split(":") if text]
pytestmark = [
    pytest.mark.sglang,
    pytest.mark.processes,
    pytest.mark.skipif(not ENVIRONMENTS, reason="REAL_SGLANG names no environment; see kvcheck env"),
]
SCHEDULES = 6
HOST_POOLS = "mem_cache/memory_pool_host.py"
RADIX = "mem_cache/radix_cache.py"
POOL = "mem_cache/memory_pool.py"
HYBRID = "mem_cache/hybrid_cache/hybrid_cache_controller.py"
SHAPES = (
    *("retract.nsa", "metadata.get-buf", "layer-wait.nsa", "host-copy.mha-kernel", "host-copy.mla-direct"),
    *("host-copy.nsa-kernel", "state-lengths.nsa-longer", "state-lengths.nsa-shorter", "agreement.metadata"),
    *("prefixes.radix", "index-moves.hybrid-kernel", "index-moves.tree-kernel", "index-moves.tree-direct"),
    *("index-moves.mamba-tree-kernel", "index-moves.mamba-tree-direct", "agreement.default-metadata"),
    *("state-failure.nsa", "token-moves.nsa", "sent-lists.nsa", "sent-lists.mha"),
)
# Edits of lists reach several shapes; each is turned round by its own edit alone.
GROUPS = (SHAPES[:10], *((shape,) for shape in SHAPES[10:]))
NO_HYBRID = r"this release has no hicache\.(hybrid|mamba-tree) \(tried "
NO_MOVE = r"(?s)\nclass MLATokenToKVPool\((?:(?!\nclass |def move_kv_cache).)*\nclass "
ONLY_STAGED = r"MambaPoolHost only supports layout='page_first_direct'"
# shape: why a release may have no verdict: the reason, a file of the release, and what has to be true of it.
LACKING = {
    "index-moves.hybrid-kernel": [(NO_HYBRID, HYBRID, None)],
    "index-moves.mamba-tree-kernel": [
        (NO_HYBRID, HYBRID, None),
        (ONLY_STAGED, HOST_POOLS, "layout != .page_first_direct."),
    ],
    "index-moves.mamba-tree-direct": [(NO_HYBRID, HYBRID, None)],
    "token-moves.nsa": [(r"of this release has no move_kv_cache", POOL, NO_MOVE)],
}
INDEX = "mem_cache/index_key_cache.py"
METADATA = "disaggregation/utils.py"
CONTROLLER = "managers/cache_controller.py"
CONTROLLERS = (CONTROLLER, "mem_cache/hybrid_cache/hybrid_cache_controller.py")
TRANSFERS = "mem_cache/l2_transfer.py"
SENDER = "disaggregation/mooncake/conn.py"
PREFILL = "disaggregation/prefill.py"
SAMPLED = "seq_len = len(req.origin_input_ids) + len(req.output_ids)"
WAIT = (
    "        if self.layer_transfer_counter is not None:\n"
    "            self.layer_transfer_counter.wait_until(layer_id - self.start_layer)\n"
)
READ = "        buf = self.index_k_with_scale_buffer[layer_id - self.start_layer]\n        return"
SAVE_INDEX = """
    def get_cpu_copy(self, indices, mamba_indices=None):
        pages = indices[:: self.page_size] // self.page_size
        return super().get_cpu_copy(indices), [index[pages] for index in self.index_k_with_scale_buffer]

    def load_cpu_copy(self, copy, indices, mamba_indices=None):
        super().load_cpu_copy(copy[0], indices)
        pages = indices[:: self.page_size] // self.page_size
        for index, kept in zip(self.index_k_with_scale_buffer, copy[1]):
            index[pages] = kept
"""
# Lists moved in place: those of a side pool to the device, pages into the order of their slots, states to the host.
MOVED = r"""
\1transfer.host_indices, transfer.device_indices = transfer_host_indices, transfer_device_indices
\1\2resolved_pool_transfers.append("""
SORTED = r"""
\1order = device_indices.argsort()
\1device_indices.copy_(device_indices[order])
\1return host_indices[order], device_indices
"""
SORTED_HOST = "host_indices[:], idx = host_indices.sort()"
SORTED_DEVICE = r"""
\1device_indices.copy_(device_indices.sort().values)
\1device_indices = device_indices.cpu()
"""
MOVED_BACK = r"""
\1for each in pool_transfers or []:
\1    each.device_indices = each.device_indices.cpu()
\1self.load_queue.append("""
# shape: (file, pattern, replacement). The first list breaks what is right, the second mends what is wrong.
BREAK = {
    "retract.nsa": [
        (POOL, r"self\.index_k_with_scale_buffer\[layer_id\]\[chunk_page_indices\] = idx_chunk", "pass"),
        (POOL, r"self\.index_key_cache\.load_cpu_copy\(kv_cache_cpu_dict\[\"index_k\"\], indices\)", "pass"),
    ],
    "metadata.get-buf": [(METADATA, r"\[idx\]\.clone\(\)", "[idx]")],
    "layer-wait.nsa": [
        (POOL, re.escape(WAIT + READ), READ),
        (INDEX, r"if self\.pool\.layer_transfer_counter is not None:", "if False:"),
    ],
    "state-lengths.nsa-longer": [  # the longer list is sent as it is
        (SENDER, r"src_indices = src_indices\[: len\(dst_indices_local\)\]", "pass"),
        (SENDER, r"(prefill_state_indices) = prefill_state_indices\[: len\(dst_state_indices\)\]", "pass"),
    ],
    # A backup that is acknowledged as soon as it may start.
    "host-copy.mha-kernel": [
        (CONTROLLER, r"HiCacheAck\(start_event, finish_event, op", "HiCacheAck(start_event, start_event, op"),
        (TRANSFERS, r"TransferCompletion\(ack_start, ack_finish", "TransferCompletion(ack_start, ack_start"),
    ],
    # A load that does not wait for what was queued before it.
    "host-copy.mla-direct": [
        *((file, r"producer_event\.start_event\.wait\(self\.load_stream\)", "pass") for file in CONTROLLERS),
        (TRANSFERS, r"start_event\.wait\(stream\)", "pass"),
    ],
    # A backup without the index buffer.
    "host-copy.nsa-kernel": [
        ("mem_cache/memory_pool_host.py", r"self\._backup_indexer_from_device_all_layer\([^)]*\)\n", "pass\n"),
        ("mem_cache/hiradix_cache.py", r'return \{"extra_pools": \[pool\]\}', "return {}"),
        (
            "mem_cache/hybrid_cache/hybrid_pool_assembler.py",
            r"(sidecar_spec\(\) for c in )config\.pools if [^\n]*",
            r"\1()",
        ),
    ],
    "agreement.metadata": [
        (METADATA, r"if actual_room == 0:", "if False:"),
        (SENDER, r'in \("NVLINK", "INTRA_NODE_NVLINK"\)', '== "NVLINK"'),
    ],
    "agreement.default-metadata": [(METADATA, r"if actual_room == 0:", "if False:")],
    "state-failure.nsa": [(SENDER, r"if state_rc != 0:", "if False:")],
    # The token that was just sampled counts as one of the prompt; a part page is sent with each chunk.
    "sent-lists.nsa": [
        (PREFILL, rf"seq_len = {length}", SAMPLED)
        for length in (r"min\(req\.extend_end, transfer_input_len\)", r"len\(req\.fill_ids\)")
    ],
    "sent-lists.mha": [(PREFILL, r"\n            end_idx = end_idx - end_idx % page_size\n", "\n            pass\n")],
    "token-moves.nsa": [(POOL, r"self\.index_key_cache\.move\(tgt_loc, src_loc\)", "pass")],
    "index-moves.hybrid-kernel": [(HYBRID, r"\n( +)((?:# [^\n]*\n +)*)resolved_pool_transfers\.append\(", MOVED)],
    "index-moves.tree-kernel": [(CONTROLLER, r"\n( +)return host_indices, device_indices\n", SORTED)],
    "index-moves.tree-direct": [
        (CONTROLLER, r"host_indices, idx = host_indices\.sort\(\)", SORTED_HOST),
        (CONTROLLER, r"\n( +)device_indices = device_indices\.cpu\(\)\n", SORTED_DEVICE),
    ],
    "index-moves.mamba-tree-kernel": [(HYBRID, r"\n( +)self\.load_queue\.append\(", MOVED_BACK)],
    "index-moves.mamba-tree-direct": [(HYBRID, r"\n( +)self\.load_queue\.append\(", MOVED_BACK)],
    "prefixes.radix": [
        (RADIX, r"if node\.evicted or node\.lock_ref > 0:", "if node.evicted:"),
        (RADIX, r"\n            self\._delete_leaf\(x\)\n", "\n"),
    ],
}
MISMATCH = """
    def maybe_send_extra(self, request, rows, *others):
        flat = lambda lists: [row for each in lists for row in (each if isinstance(each, list) else [each])]
        ours, theirs = len(flat(rows)), len(flat(request.dst_state_indices))
        if ours {sign} theirs:
            self.record_failure(request.room, f"state lists differ: {{ours}} and {{theirs}}")
            self.update_status(request.room, 0)
            parts = [str(request.room).encode(), b"0", b"0"]
            self._connect(f"tcp://{{request.endpoint}}:{{request.dst_port}}").send_multipart(parts)
            return -1
        return self.send_extra_unless_{name}(request, rows, *others)

    def send_extra_unless_{name}("""


def fails_where(sign: str, name: str) -> list[tuple[str, str, str]]:
    """Edits by which a request whose prefill list is longer or shorter fails on both sides."""
    return [
        (SENDER, r"\n    def maybe_send_extra\(", MISMATCH.format(sign=sign, name=name)),
        # Releases that ignore what a state leg returned would go on to Success.
        (
            SENDER,
            r"KVPoll\.Success if all\(polls\) else",
            "KVPoll.Success if all(polls) and self.request_status[req.room] else",
        ),
    ]


SEND_AUX = "        # TODO(shangming): Fix me when nvlink_transport of Mooncake is bug-free\n        if ("

# Tokens of index pages, each by its key and its scale, where whole pages are moved by numbers of tokens.
BY_TOKENS = (
    "for part in (index_k[:, : 64 * 128].view(-1, 64, 128), index_k[:, 64 * 128 :].view(-1, 64, 4)): "
    "part[tgt_loc_flat // 64, tgt_loc_flat % 64] = part[src_loc_flat // 64, src_loc_flat % 64]"
)
MEND = {
    "retract.nsa": [(POOL, r"(class NSATokenToKVPool\(MLATokenToKVPool\):\n)", r"\1" + SAVE_INDEX)],
    "metadata.get-buf": [(METADATA, r"(self\.\w+\[idx\]),", r"\1.clone(),")],
    "layer-wait.nsa": [(POOL, re.escape(READ), WAIT + READ)],
    "state-lengths.nsa-longer": fails_where(">", "longer"),
    "state-lengths.nsa-shorter": fails_where("<", "shorter"),
    "agreement.metadata": [(SENDER, re.escape(SEND_AUX), "        if self.custom_mem_pool_type or (")],
    "agreement.default-metadata": [(SENDER, re.escape(SEND_AUX), "        if True or (")],  # by socket, in order
    "state-failure.nsa": [
        (SENDER, r"\n( +)self\.maybe_send_extra\(\n", r"\n\1lost = self.maybe_send_extra(\n"),
        (SENDER, r"polls\.append\(True if ret == 0 else False\)", "polls.append(ret == 0 and not lost)"),
    ],
    "token-moves.nsa": [
        (file, r"index_k\[tgt_loc_flat\] = index_k\[src_loc_flat\]", BY_TOKENS)
        for file in (POOL, "mem_cache/index_key_cache.py")
    ],
}


@pytest.fixture(scope="module", params=ENVIRONMENTS, ids=lambda path: path.name)
def release(request: pytest.FixtureRequest) -> Path:
    folder: Path = request.param
    return folder


@pytest.fixture(scope="module")
def child(release: Path) -> Iterator[EngineProcess]:
    started = parse_target(f"sglang:{release}").start(Patience())
    yield started
    started.close()


def asks(shape: str) -> list[Ask]:
    probe, _, subject = shape.partition(".")
    return [Ask(probe=probe, subject=subject, seed=1, schedule=number) for number in range(SCHEDULES)]


def verdict(child: EngineProcess, shape: str) -> str:
    """What a release does, or why it has no verdict."""
    replies = [child.ask(ask) for ask in asks(shape)]
    unknown = next((reply.unknown for reply in replies if reply.unknown), None)
    return unknown or ("fail" if any(reply.findings for reply in replies) else "pass")


def lacks(release: Path, shape: str, said: str) -> bool:
    """Whether it says that the release lacks what the shape needs, and the release's own files say so too."""
    for reason, file, wanted in LACKING.get(shape, []):
        path = package_of(release)[0] / "srt" / file
        if re.search(reason, said):
            return not path.exists() if wanted is None else bool(re.search(wanted, path.read_text()))
    return False


def package_of(release: Path) -> tuple[Path, list[str]]:
    """Where a release is, and the paths that it is found by."""
    program = (
        "import sys, importlib.util as u; print(*u.find_spec('sglang').submodule_search_locations, "
        "*(p for p in sys.path if 'site-packages' in p), sep=chr(10))"
    )
    told = subprocess.run([release / "bin/python", "-I", "-c", program], capture_output=True, text=True, check=True)
    package, *paths = told.stdout.split()
    return Path(package), paths


def edited(release: Path, folder: Path, verdicts: dict[str, str]) -> Path:
    """An environment beside the release's, with a copy of SGLang in which each verdict's cause is turned round."""
    package, paths = package_of(release)
    copy = folder / "edited"
    shutil.copytree(package, copy / "sglang", ignore=shutil.ignore_patterns("__pycache__"))
    for shape, now in verdicts.items():
        done = 0
        for file, pattern, text in (BREAK if now == "pass" else MEND)[shape]:
            path = copy / "sglang" / "srt" / file
            if path.exists():
                source, count = re.subn(pattern, text, path.read_text())
                path.write_text(source)
                done += count
        assert done, f"no edit turns {shape} of {release.name} round, which is {now}"
    venv.EnvBuilder(with_pip=False, symlinks=True).create(folder / "env")
    (site,) = (folder / "env").glob("lib/python*/site-packages")
    (site / "edited.pth").write_text("\n".join([str(copy), *paths]) + "\n")
    return folder / "env"


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group[-1])
def test_an_edit_turns_a_verdict(child: EngineProcess, release: Path, tmp_path: Path, group: tuple[str, ...]) -> None:
    verdicts = {shape: verdict(child, shape) for shape in group}
    judged = {shape: now for shape, now in verdicts.items() if not lacks(release, shape, now)}
    assert set(judged.values()) <= {"pass", "fail"}, judged
    if not judged:
        return  # that it lacks the shape was what there is to show
    other = parse_target(f"sglang:{edited(release, tmp_path, judged)}").start(Patience())
    try:
        turned = {shape: verdict(other, shape) for shape in judged}
    finally:
        other.close()
    assert turned == {shape: "pass" if now == "fail" else "fail" for shape, now in judged.items()}


@pytest.mark.parametrize("shape", SHAPES)
def test_twenty_equal_asks_have_equal_answers(child: EngineProcess, release: Path, shape: str) -> None:
    ask = asks(shape)[1]
    replies: list[Reply] = [child.ask(ask) for _ in range(20)]
    assert replies == [replies[0]] * 20
    if replies[0].unknown is None:
        assert replies[0].evidence.events
    else:
        assert lacks(release, shape, replies[0].unknown), replies[0].unknown
