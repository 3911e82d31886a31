"""Probe sent-lists: the lists of pages and states that SGLang's prefill side builds itself, chunk by chunk.

The engine's `send_kv_chunk` is called after each chunk, and kvcheck's sender records the lists. The decode side lists
the pages of the whole prompt, so both must be equal for any chunks.

Invariants:
- The last chunk is sent as the engine sends it: the sampled token is already among the request's outputs.
- The control's prompt ends inside a page, and only its pages are compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from kvcheck.core.probes.frame.guard import CannotDrive
from kvcheck.core.probes.frame.probe import Rig
from kvcheck.core.probes.sglang.retract import admit, hold, mixed, release
from kvcheck.core.probes.sglang.rig.bare_manager import bare
from kvcheck.core.probes.sglang.rig.pools import PAGES, SmallPool, pool_names, small_pool, take
from kvcheck.core.probes.sglang.rig.scheduler_loop import REQUEST_NEEDS, extend_to, make_request

STATES = {"mha": (), "nsa": ("dsa", "nsa"), "swa": ("swa",)}
"""Names that releases had for the kind of state of a family."""
WINDOW_PAGES = 2
PROMPTS = 6
PLAIN = 9
NEXT = 5
"""A sampled token."""


@dataclass(slots=True)
class ListSender:
    """The engine's sender of a request, reduced to its lists. has_kinds: states are a list for each kind.

    pages: of all sends. states: of the last, by kind; None: not sent.
    """

    has_kinds: bool
    pages: list[int] = field(default_factory=list)
    states: list[list[int]] | None = None
    supports_host_tensor_indices: bool = False

    def get_max_transfer_tokens(self) -> None:
        """Return None: a send has no bound."""

    def should_send_kv_chunk(self, pages: int, last_chunk: bool) -> bool:
        """An empty list is sent only with the last chunk, as by the engine's senders."""
        return pages > 0 or last_chunk

    def send(self, pages: Any, states: Any = None, *_: Any, **__: Any) -> None:
        self.pages += [int(each) for each in pages]
        if states is not None:
            kinds = states if self.has_kinds else [states]
            self.states = [[int(row) for row in kind] for kind in kinds if kind is not None]


class SentLists:
    def needs(self, subject: str) -> tuple[str, ...]:
        return (*REQUEST_NEEDS, "transfer.prefill", *pool_names(subject))

    def control(self, rig: Rig) -> None:
        made = small_pool(rig, rig.subject)
        size = made.page_size
        plain = take(made, 1)
        made.write(PLAIN, plain)
        _Prefill(rig, made, judges_states=False).run(2 * size + size // 2, ())
        made.check(rig.judge, PLAIN, plain, when="beside a prompt that was sent")

    def measure(self, rig: Rig) -> None:
        made = small_pool(rig, rig.subject)
        mixed(rig, made)
        prefill, size = _Prefill(rig, made), made.page_size
        for _ in range(PROMPTS):
            pages = 1 + rig.mix.below(PAGES - WINDOW_PAGES - 3)
            length = pages * size - (rig.mix.below(size) if rig.mix.chance(1, 2) else 0)
            cuts = sorted({1 + rig.mix.below(length) for _ in range(rig.mix.below(4))} - {length})
            prefill.run(length, cuts)


class _Prefill:
    def __init__(self, rig: Rig, made: SmallPool, *, judges_states: bool = True) -> None:
        self.judges_states = judges_states
        self.rig, self.made, self.window = rig, made, WINDOW_PAGES * made.page_size
        self.size = int(made.allocator.page_size)
        kinds, self.has_kinds = STATES[made.family], rig.names.has("transfer.kinds")
        state_types = [each for each in rig.names["transfer.kinds"] if each.value in kinds] if self.has_kinds else []
        if self.has_kinds and len(state_types) != len(kinds[:1]):
            raise CannotDrive(f"this release has no state kind of {', '.join(kinds)}")
        arguments = SimpleNamespace(state_types=state_types)
        own = {
            "token_to_kv_pool_allocator": made.allocator,
            "req_to_token_pool": made.request_pool,
            "sliding_window_size": self.window,
            "enable_staging": False,
            "kv_checksum_computer": None,
            "disagg_metadata_buffers": SimpleNamespace(set_buf=lambda request: None),
            "disagg_prefill_bootstrap_queue": SimpleNamespace(kv_manager=SimpleNamespace(kv_args=arguments)),
            "disagg_prefill_pending_chunk_rids": set(),
        }
        self.scheduler = bare(rig.names["transfer.prefill"], own)

    def run(self, length: int, cuts: Sequence[int]) -> None:
        rig, made, size = self.rig, self.made, self.size
        request = make_request(rig, "probe", range(1, length + 1), 8)
        row = admit(made, request)
        slots = take(made, -(-length // made.page_size))
        hold(made, row, slots[:length])
        sender = request.disagg_kv_sender = ListSender(has_kinds=self.has_kinds)
        request.start_send_idx, request.disagg_decode_prefix_len = 0, 0
        for end in cuts:
            self._send(request, end, is_last=False)
        request.output_ids.append(NEXT)
        self._send(request, length, is_last=True)
        when = f"a prompt of {length} tokens, pages of {size}, cut at {[*cuts]}"
        rig.judge.count("requests")
        self._compare(sender.pages, (slots[:length:size] // size).tolist(), "pages", when)
        if STATES[made.family] and self.judges_states:
            states = sender.states or []
            if len(states) != 1:
                rig.judge.find("KV301", "contract", f"{when}: {len(states)} lists of states were sent, expected 1")
            else:
                self._compare(states[0], self._states(slots, length), "states", when)
        release(made, request, slots)

    def _send(self, request: Any, end: int, *, is_last: bool) -> None:
        extend_to(request, end)
        self.rig.measured(lambda: self.scheduler.send_kv_chunk(request, last_chunk=is_last), "send_kv_chunk")

    def _states(self, slots: torch.Tensor, length: int) -> list[int]:
        size = self.size
        if self.made.family != "swa":
            return [int(each) for each in slots[:length:size] // size]
        first = max(0, length - self.window) // size * size
        mapped = self.made.pool.full_to_swa_index_mapping[slots[first:length:size].to(torch.int64)]
        return [int(each) // size for each in mapped]

    def _compare(self, sent: list[int], wanted: list[int], what: str, when: str) -> None:
        judge = self.rig.judge
        judge.reads += 1
        judge.words[what] = judge.words.get(what, 0) + len(wanted)
        judge.count("pages_wanted", len(wanted))
        if sent != wanted:
            text = f"{when}: the prefill side lists {len(sent)} {what}, {sent}; the prompt has {len(wanted)}, {wanted}"
            judge.find("KV301", "contract", text, lane=what)
